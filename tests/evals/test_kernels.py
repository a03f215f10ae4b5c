"""`flash-eval kernels`: what it counts, whom it lets take part, who has his turn when, and what it writes."""

import csv
import json
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import contest, implementations, kernel_results
from flash_evals.contest import BOUNDS, Contest, order
from flash_evals.errors import EvalError
from flash_evals.implementations import GRADIENTS, IMPLEMENTATIONS, RESULTS, Call, Contestant
from flash_evals.measure import memory_method
from flash_evals.workload import PASSES, Heads, Inputs, Pass, Workload
from flashattn_core.masks import Causal, Mask, SlidingWindow
from flashattn_core.reference import reference_attention, visible_and_bias

Invoke = Callable[..., click.testing.Result]
Change = Callable[[np.ndarray], np.ndarray]  # of a result
GFLOPS, GBS = 100.0, 10.0  # the bounds of the machine of these tests


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of one call, bounds that are known beforehand, and no torch, whether it is installed or not."""
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0)
    monkeypatch.setattr(contest, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(flashattn_core, "peak_flops", lambda: GFLOPS * 1e9)
    monkeypatch.setattr(flashattn_core, "read_bandwidth", lambda: GBS * 1e9)
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)


@pytest.fixture
def evaluate(invoke: Invoke, tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """Entries and page of a small run; later options replace earlier ones."""

    def run(*arguments: object) -> tuple[list[dict[str, Any]], str]:
        out = tmp_path / "out.json"
        result = invoke("kernels", "--shape", "4/2x8", "--seq-len", 32, "--trials", 3, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return json.loads(out.read_text()), result.stdout

    return run


def workload(**changes: Any) -> Workload:
    standard = {"heads": Heads(4, 2, 8), "batch_size": 1, "query_len": 32, "seq_len": 32, "causal": True}
    return Workload(**{**standard, "window": None, "dtype": "float32", **changes})


WORKLOADS = [
    workload(),
    workload(causal=False),
    workload(causal=False, query_len=40, batch_size=3),
    workload(query_len=5),
    workload(query_len=1),
    workload(window=1),
    workload(window=7, query_len=9, batch_size=2),
    workload(window=7, query_len=1),
    workload(window=100),
    workload(heads=Heads(6, 6, 16), seq_len=33, query_len=2),
]


def mask_of(work: Workload) -> Mask | None:
    return SlidingWindow(work.window) if work.window else Causal() if work.causal else None


def visible_in(work: Workload) -> np.ndarray:
    """Spelled out by the reference, `(L, S)`."""
    shape = (work.batch_size, work.heads.query, work.query_len, work.heads.dim)
    return visible_and_bias(shape, work.seq_len, mask_of(work))[0][0, 0]


@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_counts_what_is_visible(work: Workload) -> None:
    visible = visible_in(work)
    given = work.visible()
    assert (given is None) == visible.all()
    if given is not None:
        np.testing.assert_array_equal(given, visible)
    for pass_, products in (("forward", 2), ("backward", 5), ("forward_backward", 7)):
        flops = 2 * products * work.heads.dim * visible.sum() * work.heads.query * work.batch_size
        assert replace(work, pass_=pass_).flops == flops
    seen = visible.any(axis=0).sum()
    assert work.bytes_read == 2 * work.batch_size * work.heads.kv * seen * work.heads.dim * 4


def test_16_bit_numbers_are_half_as_long() -> None:
    single, half = workload(query_len=16), workload(query_len=16, dtype="bfloat16")
    lse = 4 * 4 * 16
    assert single.bytes_held == 4 * 8 * (2 * 4 * 16 + 2 * 2 * 32) + lse
    assert half.bytes_held - lse == (single.bytes_held - lse) // 2
    assert half.bytes_read == single.bytes_read // 2


@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_gradients_are_held_beside_what_they_are_of(pass_: Pass) -> None:
    """And the output's cotangent beside the output, but none beside lse."""
    forward, work = workload(query_len=16), workload(query_len=16, pass_=pass_)
    lse = 4 * 4 * 16
    assert work.bytes_held - lse == 2 * (forward.bytes_held - lse)


def test_the_seed_decides_the_numbers() -> None:
    def query(seed: int) -> list[float]:
        return workload().inputs(seed)[0].ravel().tolist()

    assert query(0) == query(0) != query(1)


def gradients_of(work: Workload, seed: int) -> list[np.ndarray]:
    """Of query, key and value, by the formula in float64."""
    query, key, value, cotangent = (array.astype(np.float64) for array in work.inputs(seed))
    grouped = (work.batch_size, work.heads.kv, -1, work.query_len, work.heads.dim)
    query, cotangent = query.reshape(grouped), cotangent.reshape(grouped)
    key, value = key[:, :, None], value[:, :, None]
    scale = work.heads.dim**-0.5
    scores = np.where(visible_in(work), query @ key.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = cotangent @ value.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)) * scale
    return [
        (of_scores @ key).reshape(work.batch_size, work.heads.query, work.query_len, work.heads.dim),
        (of_scores.swapaxes(-1, -2) @ query).sum(axis=2),
        (weights.swapaxes(-1, -2) @ cotangent).sum(axis=2),
    ]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_every_implementation_computes_the_workload(name: str, work: Workload, pass_: Pass) -> None:
    inputs = work.inputs(seed=1)
    contestant = IMPLEMENTATIONS[name](replace(work, pass_=pass_), inputs)
    results = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(2)]))
    output, _ = reference_attention(*inputs[:3], mask=mask_of(work))
    expected = {"output": output, **dict(zip(GRADIENTS, gradients_of(work, seed=1), strict=True))}
    for what, result in zip(RESULTS[pass_], results, strict=True):
        np.testing.assert_allclose(result, expected[what], atol=1e-5, err_msg=what)


@pytest.mark.parametrize("name", ["flash", "mlx", "naive"])
def test_a_backward_pass_begins_after_the_forward_pass(name: str) -> None:
    """Whose kept arrays are there when it is prepared: flash's output and lse, the others' weights."""
    work = workload(query_len=256, seq_len=256, pass_="backward")
    contestant = IMPLEMENTATIONS[name](work, work.inputs(seed=0))
    mx.synchronize()
    before = mx.get_active_memory()
    flashattn_core.reset_stats()
    call = contestant.prepare()
    kept = 4 * 256 * (8 + 1) * 4 if name == "flash" else 4 * 256 * 256 * 4
    assert mx.get_active_memory() - before >= kept
    prepared = flashattn_core.stats()
    contestant.run([call])
    ran = {kernel: calls - prepared[kernel] for kernel, calls in flashattn_core.stats().items()}
    assert sum(ran.values()) == (name == "flash")
    assert ran["cpu_backward"] == (name == "flash")


@pytest.mark.parametrize("pass_", PASSES)
def test_calls_are_gone_when_they_have_run(pass_: Pass) -> None:
    work = workload(pass_=pass_)
    contestant = IMPLEMENTATIONS["flash"](work, work.inputs(seed=0))
    calls = [contestant.prepare() for _ in range(3)]
    contestant.run(calls)
    assert calls == []


class FakeTensor:
    def __init__(self, array: np.ndarray, dtype: str = "as given") -> None:
        self.array, self.dtype = array, dtype
        self.requires_grad = False
        self.graph: tuple[list[FakeTensor], mx.array] | None = None  # what attention was computed from, and its mask

    def requires_grad_(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad

    def detach(self) -> "FakeTensor":
        return FakeTensor(self.array, self.dtype)

    def to(self, dtype: str) -> "FakeTensor":
        return FakeTensor(self.array, dtype)

    def float(self) -> "FakeTensor":
        return self

    def numpy(self) -> np.ndarray:
        assert not self.requires_grad  # torch refuses it
        return self.array


class FakeTorch:
    """What of torch is used. Its attention has torch's mask: causal is aligned to the upper left."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.threads: list[int] = []
        self.gradients = 0
        self.float32, self.bfloat16 = "float32", "bfloat16"
        self.tensor = FakeTensor
        self.set_num_threads = self.threads.append
        self.nn = SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=self.attention))
        self.autograd = SimpleNamespace(grad=self.grad)

    def attention(
        self,
        query: FakeTensor,
        key: FakeTensor,
        value: FakeTensor,
        *,
        attn_mask: Any,
        is_causal: bool,
        enable_gqa: bool,
    ) -> FakeTensor:
        assert not (is_causal and attn_mask is not None)
        assert enable_gqa
        dtypes = {tensor.dtype for tensor in (query, key, value)}
        recorded = query.requires_grad
        self.calls.append(
            {"is_causal": is_causal, "masked": attn_mask is not None, "dtypes": dtypes, "recorded": recorded}
        )
        visible = np.ones((query.array.shape[-2], key.array.shape[-2]), bool) if attn_mask is None else attn_mask.array
        mask = mx.array(np.tril(visible) if is_causal else visible)
        out, _ = reference_attention(query.array, key.array, value.array, mask=mask)
        output = FakeTensor(out.astype(np.float32))
        if recorded:
            output.requires_grad, output.graph = True, ([query, key, value], mask)
        return output

    def grad(self, output: FakeTensor, inputs: list[FakeTensor], cotangent: FakeTensor) -> list[FakeTensor]:
        """Frees the graph, as torch does."""
        assert output.graph is not None
        (operands, mask), output.graph = output.graph, None
        assert inputs == operands
        assert all(tensor.requires_grad for tensor in inputs)
        assert not cotangent.requires_grad

        def attention(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)

        arrays, [of_output] = ([mx.array(tensor.array) for tensor in tensors] for tensors in (inputs, [cotangent]))
        self.gradients += 1
        return [FakeTensor(np.array(gradient)) for gradient in mx.vjp(attention, arrays, [of_output])[1]]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(implementations, "find_spec", lambda name: name)
    monkeypatch.setattr(implementations, "import_module", {"torch": fake}.__getitem__)
    monkeypatch.setattr("flash_evals.machine.version", lambda package: f"that of {package}")
    return fake


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    ("options", "is_causal", "masked"),
    [
        ([], True, False),
        (["--no-causal"], False, False),
        (["--query-len", 5], False, True),  # its own causal mask would be aligned to the other corner
        (["--window", 7], False, True),
        (["--window", 7, "--query-len", 5], False, True),
    ],
)
def test_torch_is_asked_for_the_same(
    evaluate: Callable[..., Any], torch: FakeTorch, options: list[object], is_causal: bool, masked: bool, pass_: Pass
) -> None:
    """And agrees, or the run would end."""
    entries, _ = evaluate("--impl", "flash,torch", "--pass", pass_, *options)
    assert [entry["config"]["impl"] for entry in entries] == ["flash", "torch"]
    recorded = pass_ != "forward"
    asked = {"is_causal": is_causal, "masked": masked, "dtypes": {"float32"}, "recorded": recorded}
    assert torch.calls[-1] == asked
    assert torch.gradients == (len(torch.calls) if recorded else 0)
    assert set(torch.threads) == {implementations.threads()}
    assert entries[0]["machine"]["versions"]["torch"] == "that of torch"


@pytest.mark.parametrize(("options", "masked"), [([], False), (["--window", 7], True)])
def test_torch_is_asked_for_a_decode_step(
    evaluate: Callable[..., Any], torch: FakeTorch, options: list[object], masked: bool
) -> None:
    evaluate("--impl", "flash,torch", "--query-len", 1, *options)
    assert torch.calls[-1] == {"is_causal": False, "masked": masked, "dtypes": {"float32"}, "recorded": False}


def test_torch_gets_the_dtype(evaluate: Callable[..., Any], torch: FakeTorch) -> None:
    evaluate("--impl", "torch", "--dtype", "bfloat16")
    assert torch.calls[-1]["dtypes"] == {"bfloat16"}


def test_torch_takes_part_where_it_is_installed(evaluate: Callable[..., Any], torch: FakeTorch) -> None:
    assert [entry["config"]["impl"] for entry in evaluate()[0]] == ["flash", "mlx", "naive", "torch"]


def test_threads_are_those_of_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, number in (("AVX2, 1 thread", 1), ("AVX-512, 32 threads", 32)):
        monkeypatch.setattr(flashattn_core, "backends", lambda text=text: {"cpu": text})
        assert implementations.threads() == number


class Fake(Contestant):
    """Flash, with a say in what a call does before, also when it is prepared, and what comes out."""

    def __init__(
        self,
        work: Workload,
        inputs: Inputs,
        before: Callable[[], None],
        preparing: Callable[[], None],
        **change: Change,
    ) -> None:
        self.flash = implementations.flash(work, inputs)
        self.before, self.preparing = before, preparing
        self.changes = [change.get(name, lambda result: result) for name in RESULTS[work.pass_]]

    def prepare(self) -> Call:
        self.preparing()
        return self.flash.prepare()

    def run(self, calls: list[Call]) -> Sequence[Any]:
        for _ in calls:
            self.before()
        return self.flash.run(calls)

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        arrays = self.flash.as_numpy(results)
        return [change(array) for change, array in zip(self.changes, arrays, strict=True)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a Fake in the place of an implementation."""

    def arrange(
        name: str,
        before: Callable[[], None] = lambda: None,
        preparing: Callable[[], None] = lambda: None,
        **change: Change,
    ) -> None:
        """The changes are of the results of that name."""
        monkeypatch.setitem(IMPLEMENTATIONS, name, lambda *arguments: Fake(*arguments, before, preparing, **change))

    return arrange


def one_element(factor: float) -> Change:
    """The largest one becomes so much larger."""

    def change(array: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed[np.unravel_index(np.abs(changed).argmax(), changed.shape)] *= factor
        return changed

    return change


@pytest.mark.parametrize("wrong", ["by more than the limit", "not a number"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2)])
@pytest.mark.parametrize(("pass_", "what"), [(pass_, what) for pass_ in PASSES for what in RESULTS[pass_]])
def test_a_wrong_result_is_not_timed(
    refused: Callable[..., str],
    fake: Callable[..., None],
    wrong: str,
    dtype: str,
    tolerance: float,
    pass_: Pass,
    what: str,
) -> None:
    limit = 2 * tolerance if what in GRADIENTS else tolerance
    fake("naive", **{what: one_element(float("nan") if wrong == "not a number" else 1 + 1.2 * limit)})
    options = ("--shape", "4/2x8", "--seq-len", 32, "--dtype", dtype, "--impl", "flash,naive", "--pass", pass_)
    line = refused("kernels", *options)
    problem = f"4/2x8, 32 queries, 32 keys, causal, {dtype}" + ("" if pass_ == "forward" else f", {pass_}")
    assert f"naive and flash give different results for {problem}: the {what} differs by" in line
    assert f"expected at most {limit:.0e}" in line


@pytest.mark.parametrize("pass_", PASSES)
def test_rounding_is_no_wrong_result(evaluate: Callable[..., Any], fake: Callable[..., None], pass_: Pass) -> None:
    fake("naive", **dict.fromkeys(RESULTS[pass_], lambda result: result * np.float32(1 + 1e-5)))
    assert evaluate("--impl", "flash,naive", "--pass", pass_)


def test_gradients_that_are_nothing_but_rounding(evaluate: Callable[..., Any]) -> None:
    """Of query and key, where each query sees one key."""
    assert evaluate("--impl", "flash,mlx,naive", "--pass", "backward", "--window", 1)


def test_what_an_implementation_does_not_cover(refused: Callable[..., str]) -> None:
    line = refused("kernels", "--shape", "1/1x600", "--seq-len", 8)
    assert line.startswith("Error: flash cannot compute 1/1x600, 8 queries, 8 keys, causal, float32: ")
    assert "600" in line.partition("float32: ")[2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_everybody_is_in_every_place_equally_often(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = [order(names, number) for number in range(2 * count)]
    assert all(sorted(turns) == names for turns in rounds)
    for place in zip(*rounds, strict=True):
        assert sorted(place) == sorted(names * 2)
    assert rounds[1] == rounds[0][::-1]


def test_turns(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., None]) -> None:
    """Warm-up one by one; then rounds in changing order, the machine's bounds among them."""
    turns: list[str] = []
    for name in ("flash", "mlx"):
        fake(name, before=lambda name=name: turns.append(name))
    monkeypatch.setattr(flashattn_core, "peak_flops", lambda: turns.append(BOUNDS) or 1.0)
    held = Contest(workload())
    assert sum(1 for _ in held.hold(["flash", "mlx"], 3, 0, 0)) == 2 * (1 + 3)
    warm_up = ["flash"] * 2 + ["mlx"] * 2  # a tiny call, and the one whose memory is measured
    rounds = [[BOUNDS, "flash", "mlx"], ["mlx", "flash", BOUNDS], ["flash", "mlx", BOUNDS]]
    assert turns == [*warm_up, *(turn for turns in rounds for turn in turns)]
    assert len(held.peak_flops) == len(held.read_bandwidth) == 3


class Clock:
    """Goes only when somebody lets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def go(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda seconds: None))
    return clock


@pytest.mark.parametrize(
    ("max_seconds", "trials"),
    [
        (0, 9),  # no limit
        (1, 1),  # one is taken whatever it costs
        (9, 1),
        (9.5, 2),
        (1000, 9),
    ],
)
def test_who_is_slow_takes_fewer_trials(
    fake: Callable[..., None], clock: Clock, max_seconds: float, trials: int
) -> None:
    fake("flash", before=lambda: clock.go(0.25))
    fake("mlx", before=lambda: clock.go(4.5))
    held = Contest(workload())
    steps = sum(1 for _ in held.hold(["flash", "mlx"], 9, max_seconds, 0))
    assert steps == 2 * (1 + 9)  # also those left out
    assert len(held.entries["mlx"].trials) == trials
    assert len(held.entries["flash"].trials) == (3 if max_seconds == 1 else 9)
    assert held.entries["mlx"].trials == [4.5] * trials


def test_a_trial_lasts_twenty_milliseconds(
    fake: Callable[..., None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted when the call is warm: the first one is slow."""
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0.02)
    calls: list[None] = []

    def before() -> None:
        calls.append(None)
        clock.go(0.1 if len(calls) <= 2 else 0.003)

    fake("flash", before=before)
    held = Contest(workload())
    list(held.hold(["flash"], 2, 0, 0))
    assert held.entries["flash"].calls == 8
    assert held.entries["flash"].trials == pytest.approx([0.003] * 2)


def test_what_prepares_a_call_is_not_timed(fake: Callable[..., None], clock: Clock) -> None:
    """But it counts for --max-seconds: that is what somebody waits for."""
    fake("flash", before=lambda: clock.go(0.25), preparing=lambda: clock.go(4))
    held = Contest(workload(pass_="backward"))
    list(held.hold(["flash"], 9, 13, 0))
    assert held.entries["flash"].trials == [0.25] * 3


def test_memory_is_that_of_one_call(fake: Callable[..., None]) -> None:
    """What a library allocates for good when it is first used is not the call's."""
    kept: list[np.ndarray] = []

    def before() -> None:
        if not kept:
            kept.append(np.ones(32_000_000, np.uint8))
        np.ones(64_000_000, np.uint8)

    fake("flash", before=before)
    held = Contest(workload())
    next(held.hold(["flash"], 1, 0, 0))
    if "resident" in memory_method():
        assert held.entries["flash"].peak_memory == pytest.approx(64e6, abs=3e6)


def test_json(evaluate: Callable[..., Any]) -> None:
    entries, _ = evaluate("--impl", "naive,flash", "--batch-size", 2, "--window", 9, "--query-len", 16, "--seed", 3)
    assert [entry["config"].pop("impl") for entry in entries] == ["flash", "naive"]
    for entry in entries:
        assert entry["config"] == {
            "batch_size": 2,
            "seq_len": 32,
            "query_len": 16,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "causal": True,
            "window": 9,
            "dtype": "float32",
            "kv_bits": None,
            "device": "cpu",
        }
        forward, work = entry["forward"], workload(batch_size=2, query_len=16, window=9)
        seconds = forward["time(s)"]
        assert len(forward["trials(s)"]) == 3
        assert seconds == statistics.median(forward["trials(s)"])
        assert forward["time_p20(s)"] == pytest.approx(np.quantile(forward["trials(s)"], 0.2))
        assert forward["time_p80(s)"] == pytest.approx(np.quantile(forward["trials(s)"], 0.8))
        assert forward["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops / seconds / 1e12)
        assert forward["read(GB/s)"] == pytest.approx(work.bytes_read / seconds / 1e9)
        assert (entry["backward"], entry["forward_backward"]) == ({}, {})
        assert entry["peak_memory_usage(MB)"] == forward["peak_memory_usage(MB)"] >= 0
        assert entry["inputs_and_outputs(MB)"] == forward["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
        assert entry["roofline"] == pytest.approx({"peak(TFLOPs/s)": GFLOPS / 1e3, "read(GB/s)": GBS})
        settings = entry["settings"]
        assert (settings["trials"], settings["max_seconds"], settings["seed"]) == (3, 30, 3)
        assert settings["interrupted"] is False
        assert entry["machine"]["versions"]["mlx"]
        assert "torch" not in entry["machine"]["versions"]


def test_every_shape_dtype_and_length(evaluate: Callable[..., Any]) -> None:
    entries, page = evaluate(
        *("--shape", "4/2x8,2/1x16", "--dtype", "float32,float16", "--seq-len", "16, 32", "--impl", "flash,mlx")
    )
    assert [
        (
            entry["config"]["head_dim"],
            entry["config"]["dtype"],
            entry["config"]["seq_len"],
            entry["config"]["query_len"],
        )
        for entry in entries[::2]
    ] == [(dim, dtype, keys, keys) for dim in (8, 16) for dtype in ("float32", "float16") for keys in (16, 32)]
    contests = kernel_results.by_workload(entries)
    assert len(contests) == 8
    ratios = [each["mlx"]["forward"]["time(s)"] / each["flash"]["forward"]["time(s)"] for each in contests]
    mean, low, high = statistics.geometric_mean(ratios), min(ratios), max(ratios)
    assert page.splitlines()[-1] == f"flash against mlx: {mean:,.2f}x ({low:,.2f}x–{high:,.2f}x over 8 shapes)"


def timed_entry(name: str, milliseconds: float, **changes: Any) -> dict[str, Any]:
    """Three trials of the same length, of a forward pass."""
    held = timed_contest({name: milliseconds}, **changes)
    [entry] = kernel_results.describe([held])
    return entry | SHARED


SHARED = {"settings": {"interrupted": False}, "machine": {"device": "cpu, AVX2, 2 threads"}}


def timed_contest(milliseconds: dict[str, float], memory: int = 2_500_000, **changes: Any) -> Contest:
    held = Contest(workload(heads=Heads(14, 2, 64), **changes))
    held.peak_flops, held.read_bandwidth = [GFLOPS * 1e9], [GBS * 1e9]
    for name, time in milliseconds.items():
        held.entries[name] = contest.Entry(memory, 1, 0, [time / 1e3] * 3)
    return held


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_page() -> None:
    times = {"flash": 0.1, "mlx": 1.0, "torch": 0.08}
    page = kernel_results.render([timed_entry(name, time, query_len=32) for name, time in times.items()])
    header, blank, titles, *rows = page.splitlines()
    assert header == (
        "attention forward, causal, batch size 1 · cpu, AVX2, 2 threads · peak 100 GFLOP/s, reads 10 GB/s"
    )
    assert blank == ""
    assert cells(titles) == (
        ["shape", "dtype", "queries", "keys", "impl", "time", "GFLOP/s", "of peak", "flash is", "memory", "trials"]
    )
    gflops = 4 * 64 * 14 * (32 * 33 // 2) / 1e-4 / 1e9  # 18.9
    assert list(map(cells, rows)) == [
        ["14/2x64", "float32", "32", "32", "flash", "100 µs (100–100)", f"{gflops:.1f}", "19%", "2.5 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", f"{gflops / 10:.1f}", "1.9%", "10.00x faster", "2.5 MB", "3"],
        ["torch", "80.0 µs (80.0–80.0)", f"{gflops / 0.8:.1f}", "24%", "1.25x slower", "2.5 MB", "3"],
    ]


def of_three_passes(**changes: Any) -> list[Contest]:
    """Flash and mlx; mlx has not finished a trial of forward_backward."""
    times = {"forward": (0.1, 1), "backward": (0.25, 2), "forward_backward": (0.3, None)}
    return [
        timed_contest(
            {"flash": flash, **({"mlx": mlx} if mlx else {})}, 1_000_000 * number, **{**changes, "pass_": pass_}
        )
        for number, (pass_, (flash, mlx)) in enumerate(times.items(), 1)
    ]


def test_passes_share_an_entry() -> None:
    flash, mlx = kernel_results.describe(of_three_passes())
    assert (flash["config"]["impl"], mlx["config"]["impl"]) == ("flash", "mlx")
    assert mlx["forward_backward"] == {}
    for number, pass_ in enumerate(PASSES, 1):
        work = workload(heads=Heads(14, 2, 64), pass_=pass_)
        assert flash[pass_]["FLOPS(TFLOPs/s)"] == pytest.approx(work.flops / flash[pass_]["time(s)"] / 1e12)
        assert flash[pass_]["peak_memory_usage(MB)"] == number
        assert flash[pass_]["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
        assert ("read(GB/s)" in flash[pass_]) is (pass_ == "forward")
    assert (flash["peak_memory_usage(MB)"], mlx["peak_memory_usage(MB)"]) == (3, 2)
    assert flash["inputs_and_outputs(MB)"] == mlx["inputs_and_outputs(MB)"] == work.bytes_held / 1e6
    assert flash["roofline"] == pytest.approx({"peak(TFLOPs/s)": GFLOPS / 1e3, "read(GB/s)": GBS})


def test_page_of_several_passes() -> None:
    """What the rows of a problem share stands in the first, and the pass in the first of its own."""
    contests = [*of_three_passes(), *of_three_passes(seq_len=64)]
    page = kernel_results.render([entry | SHARED for entry in kernel_results.describe(contests)])
    header, _, titles, *rows = page.splitlines()
    assert header.startswith("attention, causal, batch size 1 · cpu")
    assert cells(titles)[3:7] == ["keys", "pass", "impl", "time"]
    gflops = 2 * 64 * 14 * (32 * 33 // 2) / 1e-3 / 1e9  # of one product in a millisecond
    problem = ["14/2x64", "float32", "32", "32"]
    assert list(map(cells, rows[:5])) == [
        [*problem, "forward", "flash", "100 µs (100–100)", f"{gflops * 20:.1f}", "19%", "1.0 MB", "3"],
        ["mlx", "1.00 ms (1.00–1.00)", f"{gflops * 2:.1f}", "1.9%", "10.00x faster", "1.0 MB", "3"],
        ["backward", "flash", "250 µs (250–250)", f"{gflops * 20:.1f}", "19%", "2.0 MB", "3"],
        ["mlx", "2.00 ms (2.00–2.00)", f"{gflops * 2.5:.1f}", "2.4%", "8.00x faster", "2.0 MB", "3"],
        ["forward_backward", "flash", "300 µs (300–300)", f"{gflops * 70 / 3:.1f}", "22%", "3.0 MB", "3"],
    ]
    assert cells(rows[5])[:6] == ["14/2x64", "float32", "32", "64", "forward", "flash"]
    assert rows[10:] == [
        "",
        "flash against mlx, forward: 10.00x (10.00x–10.00x over 2 shapes)",
        "flash against mlx, backward: 8.00x (8.00x–8.00x over 2 shapes)",
    ]


@pytest.mark.parametrize("pass_", PASSES)
def test_page_of_one_pass_says_which(evaluate: Callable[..., Any], pass_: Pass) -> None:
    entries, page = evaluate("--pass", pass_, "--impl", "flash,naive")
    assert page.startswith(f"attention {pass_}, causal, batch size 1 · ")
    assert "pass" not in cells(page.splitlines()[2])
    assert [[name for name in PASSES if entry[name]] for entry in entries] == [[pass_]] * 2


def test_passes_are_measured_on_the_same_numbers(evaluate: Callable[..., Any]) -> None:
    entries, _ = evaluate("--pass", "backward,forward", "--impl", "flash,naive", "--seq-len", "16,32")
    assert [(entry["config"]["seq_len"], entry["config"]["impl"]) for entry in entries] == [
        (keys, name) for keys in (16, 32) for name in ("flash", "naive")
    ]
    for entry in entries:
        assert [len(entry[pass_].get("trials(s)", ())) for pass_ in PASSES] == [3, 3, 0]


def test_page_of_a_decode_step() -> None:
    page = kernel_results.render([timed_entry("flash", 0.01, query_len=1, seq_len=32)])
    titles, row = map(cells, page.splitlines()[2:])
    assert titles[6:8] == ["K/V GB/s", "of reads"]
    gbs = 2 * 2 * 32 * 64 * 4 / 1e-5 / 1e9
    assert row[6:8] == [f"{gbs:.1f}", f"{gbs / GBS:.0%}"]


def test_on_a_gpu_there_are_no_bounds(evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(default_device=lambda: "gpu", gpu="gpu", synchronize=lambda: None)
    monkeypatch.setattr(contest, "mx", gpu)
    entries, page = evaluate("--impl", "flash")
    assert entries[0]["roofline"] == {"peak(TFLOPs/s)": None, "read(GB/s)": None}
    assert "%" not in page
    assert "peak 1" not in page


def test_without_flash_there_is_nothing_to_be_faster_than(evaluate: Callable[..., Any]) -> None:
    entries, page = evaluate("--impl", "mlx,naive", "--seq-len", "16,32")
    assert len(entries) == 4
    assert "faster" not in page
    assert "slower" not in page
    assert "against" not in page


def test_csv_has_a_row_for_each_trial(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    entries, _ = evaluate("--impl", "flash,naive", "--pass", "forward,backward", "--csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["impl"], row["pass"], row["trial"], float(row["time(s)"])) for row in rows] == [
        (entry["config"]["impl"], pass_, str(number), seconds)
        for entry in entries
        for pass_ in ("forward", "backward")
        for number, seconds in enumerate(entry[pass_]["trials(s)"])
    ]
    assert len(rows) == 2 * 2 * 3
    assert {row["seq_len"] for row in rows} == {"32"}


def test_quick_changes_defaults_and_nothing_that_is_given(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("kernels", "--quick", "--shape", "2/1x8", "--impl", "flash", "--json", out)
    for more, lengths, trials in (([], [128, 512], 3), (["--seq-len", 16, "--trials", 2], [16], 2)):
        assert invoke(*arguments, *more).exit_code == 0
        entries = json.loads(out.read_text())
        assert [entry["config"]["seq_len"] for entry in entries] == lengths
        assert {len(entry["forward"]["trials(s)"]) for entry in entries} == {trials}
        assert {entry["settings"]["max_seconds"] for entry in entries} == {2}


@pytest.fixture
def interrupt_at(fake: Callable[..., None]) -> Callable[[int], None]:
    """Sends this process a SIGINT in that call of naive."""

    def arrange(number: int) -> None:
        calls: list[None] = []

        def before() -> None:
            calls.append(None)
            if len(calls) == number:
                signal.raise_signal(signal.SIGINT)

        fake("naive", before=before)

    return arrange


WARM_UP = 2  # calls of each implementation and configuration


@pytest.mark.parametrize(
    ("trial", "kept"),
    [
        (1, [(32, "flash", 1)]),
        (2, [(32, "flash", 1), (32, "naive", 1)]),  # in the second round flash comes after it
    ],
)
def test_ctrl_c_keeps_what_is_finished(
    invoke: Invoke, interrupt_at: Callable[[int], None], tmp_path: Path, trial: int, kept: list[tuple[int, str, int]]
) -> None:
    """In that trial of naive, of the second of three lengths."""
    out = tmp_path / "out.json"
    interrupt_at(WARM_UP + 2 + WARM_UP + trial)
    options = ("--shape", "2/1x8", "--seq-len", "16,32,48", "--impl", "flash,naive", "--trials", 2, "--json", out)
    page = invoke("kernels", *options)
    assert (page.exit_code, page.stderr) == (130, "")
    entries = json.loads(out.read_text())
    finished = [
        (entry["config"]["seq_len"], entry["config"]["impl"], len(entry["forward"]["trials(s)"])) for entry in entries
    ]
    assert ("flash against naive" in page.stdout) is (len(kept) == 2)  # a single ratio needs no mean
    assert finished == [(16, "flash", 2), (16, "naive", 2), *kept]
    assert all(entry["settings"]["interrupted"] for entry in entries)
    assert page.stdout.endswith("Interrupted; the figures are of the trials that were finished.\n")


def test_ctrl_c_between_two_passes(invoke: Invoke, interrupt_at: Callable[[int], None], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    interrupt_at(WARM_UP + 2 + WARM_UP)
    options = ("--shape", "2/1x8", "--seq-len", 16, "--impl", "flash,naive", "--trials", 2, "--json", out)
    page = invoke("kernels", "--pass", "forward_backward,backward", *options)
    assert (page.exit_code, page.stderr) == (130, "")
    entries = json.loads(out.read_text())
    assert [entry["backward"] for entry in entries] == [{}, {}]
    assert [len(entry["forward_backward"]["trials(s)"]) for entry in entries] == [2, 2]
    assert page.stdout.startswith("attention forward_backward, ")


def test_ctrl_c_before_anything_is_measured(invoke: Invoke, interrupt_at: Callable[[int], None]) -> None:
    interrupt_at(WARM_UP)
    page = invoke("kernels", "--shape", "2/1x8", "--seq-len", 16, "--impl", "flash,naive")
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "14x64"], "--shape takes query heads / key-value heads x head_dim, such as 14/2x64, separated by"),
        (["--shape", "14/3x64"], "not '14/3x64'"),
        (["--shape", "14/2x64,0/1x64"], "not '14/2x64,0/1x64'"),
        (["--shape", "14/0x64"], "not '14/0x64'"),
        (["--seq-len", "many"], "--seq-len takes numbers of keys separated by commas, not 'many'"),
        (["--seq-len", "0"], "--seq-len takes numbers of keys separated by commas, not '0'"),
        (["--seq-len", "00"], "--seq-len takes numbers of keys separated by commas, not '00'"),
        (["--dtype", "float64"], "--dtype takes float32, float16, bfloat16 separated by commas, not 'float64'"),
        (["--pass", "both"], "--pass takes forward, backward, forward_backward separated by commas, not 'both'"),
        (
            ["--pass", "forward,backward", "--query-len", "1"],
            "--pass backward takes at least 2 queries: a single one is",
        ),
        (["--pass", "forward_backward", "--seq-len", "1,32"], "--pass forward_backward takes at least 2 queries"),
        (["--impl", "flash,xla"], "--impl takes flash, mlx, naive, torch separated by commas, not 'flash,xla'"),
        (["--impl", "flash,torch"], "--impl torch: it is not installed: pip install torch==2.13.0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--query-len", "0"], "--query-len must be at least 1, not 0"),
        (["--query-len", "40"], "--query-len must be at most --seq-len, 32, not 40"),
        (["--window", "0"], "--window must be at least 1, not 0"),
        (["--window", "4", "--no-causal"], "--window 4 is causal, and does not go with --no-causal"),
        (["--trials", "0"], "--trials must be at least 1, not 0"),
        (["--max-seconds", "-1"], "--max-seconds must be at least 0, not -1.0"),
        (["--max-seconds", "nan"], "--max-seconds must be at least 0, not nan"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--kv-bits", "5"], "--kv-bits takes none, 2, 3, 4, 6, 8 separated by commas, not '5'"),
        (
            ["--kv-bits", "8", "--shape", "4/2x8"],
            "--kv-bits takes head_dims that are multiples of 64, its groups, not 8",
        ),
        (["--kv-bits", "8", "--pass", "forward,backward"], "--kv-bits goes with --pass forward"),
        (["--kv-bits", "8", "--impl", "naive"], "--kv-bits goes with --impl flash, mlx, not naive"),
    ],
)
def test_refused(refused: Callable[..., str], arguments: list[str], says: str) -> None:
    assert says in refused("kernels", "--seq-len", 32, *arguments)


def test_more_queries_than_keys_where_all_see_all(evaluate: Callable[..., Any]) -> None:
    assert evaluate("--query-len", 40, "--no-causal", "--impl", "flash,naive")


def test_disagreement_is_an_error_of_the_evaluation() -> None:
    results = {"flash": [np.ones(3)], "mlx": [np.array([1, 1, 2.0])]}
    with pytest.raises(EvalError, match="mlx and flash"):
        contest.require_agreement(workload(), "flash", "mlx", results)


def test_quantised_keys_and_values_are_packed() -> None:
    """A scale and a bias in the dtype for each 64 of them."""
    plain, packed = workload(heads=Heads(4, 2, 128)), workload(heads=Heads(4, 2, 128), kv_bits=4)
    rows = 2 * 4 * 32 * 128 * 4 + 4 * 4 * 32
    assert plain.bytes_read == 2 * 2 * 32 * 128 * 4
    assert packed.bytes_read == 2 * 2 * 32 * (128 // 2 + 2 * 2 * 4)
    assert packed.bytes_held - rows == packed.bytes_read
    assert "4-bit keys and values" in str(packed)


@pytest.mark.parametrize("name", implementations.QUANTISED)
@pytest.mark.parametrize("work", [workload(), workload(causal=False), workload(window=7, query_len=9)], ids=str)
def test_quantised_outputs(name: str, work: Workload) -> None:
    work = replace(work, heads=Heads(4, 2, 64), kv_bits=8)
    inputs = work.inputs(0)
    contestant = IMPLEMENTATIONS[name](work, inputs)
    (output,) = contestant.as_numpy(contestant.run([contestant.prepare() for _ in range(3)]))
    query, *others = inputs[:3]
    floats = (mx.dequantize(*mx.quantize(mx.array(x), 64, 8), group_size=64, bits=8) for x in others)
    expected, _ = reference_attention(query, *map(np.array, floats), None, mask_of(work))
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_quantised_beside_plain(evaluate: Callable[..., tuple[list[dict[str, Any]], str]]) -> None:
    entries, page = evaluate("--shape", "4/2x64", "--kv-bits", "none,8", "--impl", "flash,mlx,naive")
    found = [(entry["config"]["kv_bits"], entry["config"]["impl"]) for entry in entries]
    assert found == [(None, "flash"), (None, "mlx"), (None, "naive"), (8, "flash"), (8, "mlx")]
    assert "float32, 8-bit K/V" in page
