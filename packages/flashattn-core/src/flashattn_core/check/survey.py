"""Checks all kernels of a backend on calls like those of models, and reads stored results of earlier checks."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import _ext
from ..plan import Device
from . import compare
from .drawn import Given

_PROMPT = 100  # queries of a prompt


def of_backend(backend: Device) -> Iterator[tuple[str, int, str]]:
    """Checks each kernel on calls like those of models. Yields (name, number of kinds that it covers, error or "").

    Kernels that have passed before are checked again.
    """
    stream = mx.default_stream(mx.cpu if backend == "cpu" else mx.gpu)
    device = _ext.device_of(stream.device)
    for name in _ext.stats():
        if not name.startswith(backend) or name.endswith("_dkv"):  # the check of _dq also checks _dkv
            continue
        count, wrong = 0, ""
        for call, variant in calls_of(name, device):
            count += 1
            try:
                if backend == "cuda":
                    _ext.compile(call, variant, stream.device, True)
                wrong = wrong or compare.of_call(call, variant, stream)
            except (MemoryError, _ext.NoKernelError) as error:  # no memory, or no driver
                wrong = str(error).removeprefix("[flash_attention] ")
        yield name, count, wrong


def calls_of(name: str, device: _ext.Device) -> Iterator[tuple[_ext.Call, _ext.Variant]]:
    """Calls like those of models that the kernel with this name can run, each with the variants that it may need."""
    kernel = getattr(_ext.Kernel, name)
    for call in calls_of_models():
        for query_len in (_PROMPT, 1):
            of_length = call.with_lengths(query_len, call.key_len)
            try:
                if "backward" in name:
                    variant = _ext.backward_variant(of_length, device)
                else:
                    variant = _ext.choose(of_length, device, kernel).variant
            except _ext.NoKernelError:
                continue
            if variant is not None:
                yield of_length, variant
                if variant.small_blocks:  # the calls are short; long ones need the other size
                    yield of_length, _ext.Variant(kernel, variant.rounds)
            break


def remembered() -> tuple[Counter[str], list[Path]]:
    """Reads the stored results of earlier checks. Returns the number of passed checks for each device and software, and
    the files that describe failures."""
    caches = _ext.cache_folder()
    checked, failed = (sorted(Path(caches, of).glob("[0-9]*")) if caches else [] for of in ("checked", "failed"))
    passed: Counter[str] = Counter()
    for file in checked:
        lines = file.read_text(errors="replace").splitlines()
        passed[lines[1] if len(lines) > 1 else "an unknown machine"] += 1  # the first line holds the checksums
    return passed, failed


def calls_of_models() -> Iterator[_ext.Call]:
    """Yields prompts: each dtype and precision with three head sizes, and with padding. Then come prompts for layers of
    gpt-oss and gemma, and for quantised caches."""
    plain: list[tuple[int, Given]] = [(64, {}), (128, {}), (256, {}), (128, {"key_start": mx.int32})]
    windows: list[tuple[int, Given]] = [(64, {"sinks": mx.bfloat16}), (256, {}), (256, {"softcap": None})]
    stored = ("key_scales", "key_biases", "value_scales", "value_biases")
    kinds = [(dtype, dim, more, 0) for dtype in (mx.bfloat16, mx.float16, mx.float32) for dim, more in plain]
    kinds += [(mx.bfloat16, dim, {"window": None, **more}, 0) for dim, more in windows]
    kinds += [(mx.bfloat16, 128, dict.fromkeys(stored, mx.bfloat16), bits) for bits in (4, 8)]
    sizes: Any = {"heads": 8, "kv_heads": 2, "query_len": _PROMPT, "key_len": compare.FEW_KEYS[0]}
    for dtype, dim, more, bits in kinds:
        how: Any = {"given": {"causal": None, **more}, "bits": bits, "group_size": 64 if bits else 0}
        for rounds in (False, True) if dtype != mx.float32 else (False,):
            yield _ext.Call(dtype, dim, **sizes, **how, rounds=rounds)
