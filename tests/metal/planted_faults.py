"""Plants faults in Metal's or CUDA's kernels, and asserts that the faults are noticed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.check.compare import difference
from flashattn_core.masks import Tree
from flashattn_core.reference import reference_attention

from tests.core.oracle import assert_matches_reference, draw, to_numpy
from tests.core.test_quantised import dequantised
from tests.emulators.metal_on_cpu import CompileError, MetalError
from tests.metal.metal_attention import Run

CSRC = Path(__file__).parents[2] / "packages/flashattn-core/csrc"
BARRIER = "threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
SHARED_BARRIER = "FLASHATTN_BARRIER;"  # the barrier in files of gpu/kernels
BLOCKS = {"lengths": (70, 150), "mask": "blocks"}  # an array mask that hides whole blocks


@cache
def kernels_of(backend: str) -> str:
    files = [file for folder in (backend, "gpu") for file in (CSRC / folder / "kernels").iterdir()]
    return "".join(file.read_text() for file in files)


@dataclass(frozen=True)
class Fault:
    kernel: str
    old: str
    new: str = ""
    occurrence: int = 0  # how many occurrences of `old` come before the one to replace
    lengths: tuple[int, int] | None = None
    mask: object = "causal"  # a mask, or the name of one in call()
    options: dict[str, object] = field(default_factory=dict)  # True stands for random numbers, one for each head
    dim: int = 40
    batch_and_kv_heads: tuple[int, int] = (2, 2)
    dtype: str = "float32"
    bits: int | None = None  # of keys and values, if they are quantised
    source: str = ""  # the name of the file to plant in; empty: the kernel's own file

    def __post_init__(self) -> None:
        backend, _, _ = self.kernel.partition("_")
        assert self.old in kernels_of(backend), f"the kernels no longer have {self.old!r}: plant the fault elsewhere"

    @property
    def query_and_key_lengths(self) -> tuple[int, int]:
        """The given lengths, or lengths that suit the kernel."""
        return self.lengths or ((1, 70) if "decode" in self.kernel else (33, 70))

    def plant(self, source: str) -> str:
        """Returns `source` with the fault in it, or unchanged if it is the source of another kernel."""
        backend, _, kernel = self.kernel.partition("_")
        parts = source.split(self.old)
        if f'"{backend}/kernels/{self.source or kernel}.' not in source or len(parts) < self.occurrence + 2:
            return source
        head, tail = parts[: self.occurrence + 1], parts[self.occurrence + 1 :]
        return self.old.join(head) + self.new + self.old.join(tail)


def assert_is_noticed(fault: Fault, call: Callable[[Callable[[str], str]], None]) -> None:
    """call(edit) runs the kernels with edited source and checks the results. It must raise if the fault is planted."""
    call(lambda source: source)  # without the fault it must not raise
    planted = []

    def edit(source: str) -> str:
        edited = fault.plant(source)
        planted.append(edited != source)
        return edited

    with pytest.raises((MetalError, AssertionError)) as noticed:
        call(edit)
    assert not isinstance(noticed.value, CompileError), "the fault is no valid code"
    assert any(planted), "no launch of this call has this text"


def replacing(old: str, new: str = "") -> Callable[[str], str]:
    """Returns an edit that replaces `old` by `new` in a source. The source must contain `old`."""

    def edit(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    return edit


def blocks(length: int, key_len: int) -> np.ndarray:
    """A mask with hidden, visible and partly visible blocks of 32 x 32. It differs for each batch element and head."""
    query, key = np.arange(length)[:, None], np.arange(key_len)[None]
    shifts = np.arange(12).reshape(2, 6, 1, 1) * 5
    return (key < query // 32 * 32 + 24) | (key > 130 - shifts - query % 5)


def call(fault: Fault, rng: np.random.Generator, edit: Callable[[str], str], run: Callable[..., Run]) -> None:
    """Runs the fault's call with `run`, which is a backend's forward pass. Raises if the fault is noticed."""
    length, key_len = fault.query_and_key_lengths
    batch, kv_heads = fault.batch_and_kv_heads
    sizes = {"heads": 6, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": fault.dim}
    query, key, value = draw(rng, batch=(batch,), dtype=fault.dtype, **sizes)
    # Later keys get larger scores, so that the row maximum rises from tile to tile.
    key = key * mx.linspace(0.2, 2, key_len).astype(key.dtype)[:, None]
    masks = {
        "tree": lambda: Tree(mx.array(rng.random((7, 7)) > 0.4)),
        "bool": lambda: mx.array(rng.random((6, length, key_len)) > 0.4),
        "additive": lambda: mx.array(rng.standard_normal((length, key_len), dtype=np.float32)),
        "NaN": lambda: mx.arange(key_len) != 40,
        "blocks": lambda: mx.array(blocks(length, key_len)),
    }
    mask = masks[fault.mask]() if fault.mask in list(masks) else fault.mask
    options = {
        name: mx.array(rng.random(6, dtype=np.float32)) if given is True else given
        for name, given in fault.options.items()
    }
    stored, how = [key, value], {}
    if fault.mask == "NaN":
        stored[1] = mx.where((mx.arange(key_len) == 40)[:, None], mx.nan, value)
    if fault.bits is not None:
        how = {"group_size": 32, "bits": fault.bits}
        stored = [mx.quantize(x.astype(mx.float16), **how) for x in (key, value)]
        if fault.dtype == "float32":  # values get other strides than keys
            stored[1] = tuple(mx.repeat(x, 2, axis=2)[:, :, ::2] for x in stored[1])
        key, value = (dequantised(x, **how) for x in stored)

    def attention(query, _key, _value, *args, return_lse, **options):
        result = run(query, *stored, *args, edit=edit, **how, **options)
        return result.out, result.lse

    # assert_matches_reference() would expect float32's error, because the dequantised keys and values are float32. But
    # this result is rounded to 16 bits.
    if fault.bits is not None and fault.dtype != "float32":
        scale = options.get("scale")
        out = run(query, *stored, scale, mask, kernel=fault.kernel, edit=edit, **how).out
        expected, _ = reference_attention(*map(to_numpy, (query, key, value)), scale, mask)
        assert difference(out, mx.array(expected.astype(np.float32))) == ""
        return
    assert_matches_reference(query, key, value, mask=mask, kernel=fault.kernel, attention=attention, **options)
