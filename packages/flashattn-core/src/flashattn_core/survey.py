"""Checks all kernels of a backend on calls like those of models, and reads stored results of earlier checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from . import _ext, decide
from .arguments import lowered
from .check import FEW_KEYS
from .drawn import Kind, Named, drawn
from .plan import Device, max_head_dim, plan

_PROMPT = 100  # queries of a prompt


def of_backend(backend: Device) -> Iterator[tuple[str, int, str]]:
    """Checks each kernel on calls like those of models. Yields (name, number of kinds that it covers, error or "").

    If FLASHATTN_CHECK is "never", nothing is checked. If it is "always", kernels that passed earlier are checked again.
    """
    stream = mx.default_stream(mx.cpu if backend == "cpu" else mx.gpu)
    for kernel in _ext.stats():
        if not kernel.startswith(backend) or kernel.endswith("_dkv"):  # the check of _dq also checks _dkv
            continue
        count, wrong = 0, ""
        for kind in kinds_of_models():
            for query_len in (_PROMPT, 1):
                call = drawn(replace(kind, query_len=query_len), query_len, FEW_KEYS[0])
                if not _covers(kernel, backend, call):
                    continue
                count += 1
                try:
                    wrong = wrong or decide.wrong_with(lowered(**call), kernel, stream)
                except _ext.NoKernelError as error:  # no memory, or no driver
                    wrong = str(error).removeprefix("[flash_attention] ")
                break
        yield kernel, count, wrong


def _covers(kernel: str, backend: Device, call: Named) -> bool:
    if "backward" in kernel:
        return "bits" not in call and call["query"].shape[-1] <= max_head_dim(backend, gradient=True)
    return plan(**call, device=backend, kernel=kernel).kernel is not None


def remembered() -> tuple[Counter[str], list[Path]]:
    """Reads the stored results of earlier checks. Returns the number of passed checks for each device and software, and
    the files that describe failures."""
    passed: Counter[str] = Counter()
    for file in _files("checked"):
        lines = file.read_text(errors="replace").splitlines()
        passed[lines[1] if len(lines) > 1 else "an unknown machine"] += 1  # the first line holds the checksums
    return passed, _files("failed")


def _files(folder: str) -> list[Path]:
    caches = _ext.cache_folder()
    return sorted(Path(caches, folder).glob("[0-9]*")) if caches else []


def kinds_of_models() -> Iterator[Kind]:
    """Yields kinds of prompts: each dtype with three head sizes, and with padding. Then come prompts for layers of
    gpt-oss and gemma, and for quantised caches."""
    causal: dict[str, mx.Dtype | None] = {"causal": None}
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        for dim in (64, 128, 256):
            yield Kind(dtype, dim, dim, 4, _PROMPT, causal)
        yield Kind(dtype, 128, 128, 4, _PROMPT, causal | {"key_start": mx.int32})
    for dim, more in ((64, {"sinks": mx.bfloat16}), (256, {}), (256, {"softcap": None})):
        yield Kind(mx.bfloat16, dim, dim, 4, _PROMPT, causal | {"window": None} | more)
    stored = ("key_scales", "key_biases", "value_scales", "value_biases")
    for bits in (4, 8):
        yield Kind(mx.bfloat16, 128, 128, 4, _PROMPT, causal | dict.fromkeys(stored, mx.bfloat16), bits, group_size=64)
