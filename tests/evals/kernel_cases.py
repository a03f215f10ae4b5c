"""Workloads that the tests of `flash-eval kernels` share, and an implementation that does as it is told."""

from flash_evals import implementations, kernels_result, machine
from flash_evals.contest import Contest, Timings
from flash_evals.implementations import RESULTS, Contestant
from flash_evals.workload import Workload
from flashattn_core.masks import Causal, SlidingWindow
from flashattn_core.reference import visible_and_bias

GFLOPS, GBS = 100.0, 10.0  # the bounds of the machine of these tests


def workload(**changes):
    standard = {"batch_size": 1, "seq_len": 32, "query_len": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return Workload(**{**standard, "causal": True, "window": None, "dtype": "float32", "kv_bits": None, **changes})


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
    workload(num_heads=6, num_kv_heads=6, head_dim=16, seq_len=33, query_len=2),
]


def mask_of(work):
    return SlidingWindow(work.window) if work.window else Causal() if work.causal else None


def visible_in(work):
    """Spelled out by the reference, `(L, S)`."""
    shape = (work.batch_size, work.num_heads, work.query_len, work.head_dim)
    return visible_and_bias(shape, work.seq_len, mask_of(work))[0][0, 0]


def timed_contest(milliseconds, memory=2_500_000, spread=0.0, pass_="forward", **changes):
    """Three trials of each implementation, the outer ones that much apart from these times."""
    held = Contest(workload(num_heads=14, head_dim=64, **changes), pass_, list(milliseconds))
    held.peak_flops, held.bandwidth = [GFLOPS * 1e9], [GBS * 1e9]
    for name, time in milliseconds.items():
        held.timings[name] = Timings(memory, 1, 0, [time / 1e3 * factor for factor in (1 - spread, 1, 1 + spread)])
    return held


def entries_of(contests):
    """As the result file of a run has them."""
    settings = kernels_result.Settings(3, 30, 0, "of the process", interrupted=False)
    here = machine.Machine("Linux", "A Processor", 2, "cpu, AVX2, 2 threads", None, "3.11", {})
    return kernels_result.entries(contests, settings, here)


class Fake(Contestant):
    """Flash, with a say in what a call does before, also when it is prepared, and what comes out."""

    def __init__(self, work, pass_, inputs, before, preparing, **change):
        self.flash = implementations.MlxCalls(implementations.flash, work, pass_, inputs)
        self.before, self.preparing = before, preparing
        self.changes = [change.get(name, lambda result: result) for name in RESULTS[pass_]]

    def prepare(self):
        self.preparing()
        return self.flash.prepare()

    def compute(self, calls):
        for _ in calls:
            self.before()
        return self.flash.compute(calls)

    def as_numpy(self, results):
        return [change(array) for change, array in zip(self.changes, self.flash.as_numpy(results), strict=True)]
