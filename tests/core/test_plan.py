"""plan() names the kernel that runs and why, stats() counts it, and backends() describes the devices."""

from unittest.mock import Mock

import flashattn_core
import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, backends, plan

from tests.core.oracle import draw
from tests.promises import promise


def test_one_line_that_a_person_can_read(rng):
    query, key, value = draw(rng, heads=14, kv_heads=2, length=512, key_len=1024, dim=64, dtype="bfloat16")
    assert str(plan(query, key, value, mask="causal", return_lse=True, device="cpu")) == (
        "L 512, S 1024, heads 14/2, D 64, bfloat16 on cpu: cpu_prefill, "
        "precision float32 (many queries: work is split over the queries)"
    )


@pytest.mark.parametrize(
    ("length", "key_len", "dim", "kernel"),
    [
        (1, 1, 64, "metal_decode_fast"),
        (1, 128, 512, "metal_decode_fast"),
        (1, 129, 64, "metal_decode_parallel"),
        (1, 1024, 512, "metal_decode_parallel"),
        (1, 1025, 64, "metal_decode_split"),
        (2, 10, 64, "metal_decode_split"),
        (8, 5000, 512, "metal_decode_split"),
        (9, 9, 64, "metal_prefill_tg"),
        (64, 5000, 256, "metal_prefill_tg"),
        (65, 65, 256, "metal_prefill_reg"),
        (65, 65, 257, "metal_rowwise"),
        (9, 9, 512, "metal_rowwise"),
        (16, 70, 512, "cuda_decode"),
        (17, 70, 256, "cuda_prefill"),
        (17, 70, 257, "cuda_rowwise"),
    ],
)
def test_a_gpu_can_be_asked_about_anywhere(rng, length, key_len, dim, kernel):
    query, key, value = draw(rng, length=length, key_len=key_len, dim=dim)
    device = kernel.split("_")[0]
    answer = plan(query, key, value, device=device)
    assert answer.kernel == kernel
    assert f"{kernel}, precision float32 (" in str(answer)
    assert plan(query, key, value, device=device, kernel=kernel).reason == "the call names this kernel"


@promise("plan() names the precision that a call gets")
@pytest.mark.parametrize(
    ("device", "length", "dtype", "bits", "rounds"),
    [
        ("cuda", 100, "bfloat16", 0, True),
        ("cuda", 100, "float16", 0, True),
        ("cuda", 100, "float32", 0, False),
        ("cuda", 100, "bfloat16", 4, False),
        ("cuda", 1, "bfloat16", 0, False),
        ("metal", 100, "bfloat16", 0, False),
        ("cpu", 100, "bfloat16", 0, False),
    ],
)
def test_which_precision_a_call_gets(rng, device, length, dtype, bits, rounds):
    """plan() must say whether probabilities are rounded to the inputs' precision."""
    query, *stored = draw(rng, length=length, key_len=100, dim=64, dtype=dtype)
    stored, how = ([mx.quantize(x, bits=bits) for x in stored], {"bits": bits}) if bits else (stored, {})
    for asked, got in (("input", "input" if rounds else "float32"), ("float32", "float32")):
        answer = plan(query, *stored, device=device, precision=asked, **how)
        assert answer.precision == got
        assert f", precision {got} (" in str(answer)


@pytest.mark.parametrize(
    ("kernel", "device", "dim", "reason"),
    [
        ("cpu_decode", "cpu", 8, "cpu_decode takes up to 8 queries, found 9"),
        ("cpu_prefill", "cuda", 8, "cpu_prefill runs on the CPU, but the stream does not"),
        ("metal_rowwise", "cpu", 8, "metal_rowwise runs on Metal, but the stream does not"),
        ("metal_decode_fast", "metal", 8, "metal_decode_fast takes up to 1 queries, found 9"),
        ("metal_prefill_tg", "metal", 300, "metal_prefill_tg takes a head_dim up to 256, found 300"),
        ("cuda_prefill", "cuda", 257, "cuda_prefill takes a head_dim up to 256, found 257"),
    ],
)
def test_what_a_kernel_by_name_does_not_cover_has_a_reason(rng, kernel, device, dim, reason):
    query, key, value = draw(rng, length=9, key_len=9, dim=dim, dtype="float16")
    answer = plan(query, key, value, kernel=kernel, device=device, precision="input")
    assert (answer.kernel, answer.precision, answer.reason) == (None, "float32", reason)
    assert "no kernel" in str(answer)


@promise("backends() names what CUDA lacks, with the cure")
def test_what_is_missing_of_cuda_stands_there_with_its_cure(monkeypatch, tmp_path):
    """The test imitates MLX's CPU build without and with an NVIDIA GPU, and its CUDA build with and without NVRTC."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flashattn_core, "_DEVICES", tmp_path)
    assert backends()["cuda"] == "not in this MLX build"
    (tmp_path / "nvidia0").touch()
    cure = "pip install 'flashattn-core[cuda13]', or [cuda12]"
    assert backends()["cuda"] == f"not in this MLX build, though there is an NVIDIA GPU: {cure}"

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    describe = Mock(
        side_effect=["NVIDIA H100, sm_90a", NoKernelError("[flash_attention] NVRTC is not there: reinstall it")]
    )
    monkeypatch.setattr(flashattn_core._ext, "describe_cuda", describe)
    assert backends()["cuda"] == "NVIDIA H100, sm_90a"
    assert backends()["cuda"] == "NVRTC is not there: reinstall it"
