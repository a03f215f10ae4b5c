"""Checks the CUDA kernels' programs on this GPU, and lists those that passed. Users' machines skip their check.

    python packages/evals/scripts/list_tested_programs.py packages/flashattn-core/src/flashattn_core/check/tested.json

The programs are those that well-known models need, in bfloat16 and with both precisions: head_dim 64, 128 and 256;
prompts, decode steps and training; causal, windows, padding, sinks, soft-cap, and quantised caches. The file has the
checksums of program texts, so it must be written anew after a change to a kernel; if all machine code stays the same,
new checksums are enough. Other programs are checked on the user's machine. Other architectures and compilers stay.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
from flashattn_core import _ext, check
from flashattn_core.check import compare

GIVEN: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("causal", "key_start"),
    ("causal", "window"),
    ("causal", "window", "key_start"),
    ("key_start",),
    ("key_start", "key_stop"),
)
DTYPES = {"key_start": mx.int32, "key_stop": mx.int32, "sinks": mx.bfloat16}
STORED = ("key_scales", "key_biases", "value_scales", "value_biases")


def calls() -> Iterator[_ext.Call]:
    for dim in (128, 64, 256):
        for names in GIVEN:
            for more in ((), ("sinks",), ("softcap",)):
                if (more and dim == 128) or (more == ("sinks",) and dim != 64) or (more == ("softcap",) and dim != 256):
                    continue  # gpt-oss has sinks and head_dim 64, Gemma 2 has a soft-cap and head_dim 256
                given = {name: DTYPES.get(name) for name in (*names, *more)}
                for query_len in (100, 1):
                    if query_len == 1 and "causal" in names and "window" not in names:
                        continue  # a single query has no flag "causal"
                    for rounds in (True, False):
                        for is_traced in (False, True) if query_len > 1 else (False,):
                            yield _ext.Call(
                                mx.bfloat16, dim, heads=14, kv_heads=2, query_len=query_len, key_len=100, given=given,
                                rounds=rounds, is_traced=is_traced,
                            )  # fmt: skip
    for bits in (8, 4):
        for names in ((), ("causal",), ("key_start",), ("causal", "key_start")):
            given = {name: DTYPES.get(name) for name in names} | dict.fromkeys(STORED, mx.bfloat16)
            for query_len in (100, 1):
                if (query_len == 1) != ("causal" in names):
                    yield _ext.Call(
                        mx.bfloat16, 128, heads=14, kv_heads=2, query_len=query_len, key_len=100, given=given,
                        bits=bits, group_size=64, rounds=True,
                    )  # fmt: skip


def variants(call: _ext.Call, device: _ext.Device) -> Iterator[_ext.Variant]:
    if call.is_traced and (gradient := _ext.backward_variant(call, device)):
        yield gradient
    chosen = _ext.choose(call, device).variant
    yield chosen
    if chosen.small_blocks:
        yield _ext.Variant(chosen.kernel, chosen.rounds)


def main(file: Path) -> None:
    stream = mx.default_stream(mx.gpu)
    device, software = _ext.device_of(stream.device), _ext.software(stream.device)
    compiler = check.compiler_of(software)
    tested = {name: sorted(sums) for name, sums in check._tested().items()}
    began, passed, failed = time.perf_counter(), set[str](), 0
    wanted = [(call, variant) for call in calls() for variant in variants(call, device)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [pool.submit(_ext.compile, call, variant, stream.device, True) for call, variant in wanted]
        for (call, variant), done in zip(wanted, compiled, strict=True):
            sums = {line.split()[-1] for line in _ext.programs(call, variant, device)}
            if sums <= passed:
                continue
            try:
                done.result()
                wrong = compare.of_call(call, variant, stream)
            except _ext.NoKernelError as error:
                wrong = str(error)
            failed += bool(wrong)
            passed |= set() if wrong else sums
            seconds = f"{time.perf_counter() - began:6.1f} s"
            print(seconds, variant.kernel.name, call.head_dim, list(call.given), wrong, flush=True)
            tested[compiler] = sorted(passed)  # written after each check, so that Ctrl-C keeps what has passed
            file.write_text(json.dumps(tested, indent=0, sort_keys=True) + "\n")
    print(f"{software}: {len(passed)} programs passed, {failed} checks failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
