"""What `mlxlm-flash doctor` found, described, and what it measured: the kernels beside MLX's own attention."""

from collections.abc import Sequence
from math import inf, nan
from typing import Annotated, Literal

from msgspec import Meta, field

from flash_evals.claims import quotient, times
from flash_evals.page import chart, units
from flash_evals.page.chart import Chart, Point, Series
from flash_evals.page.description import Description, Table, grouped
from flash_evals.page.units import DASH, figure
from flash_evals.record import Amount, Count, Record
from flash_evals.workload import storage

COMMAND = "mlxlm-flash doctor"
MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
LOOK_OF = {"mlx": "off", "flash": "on"}


class Problem(Record):
    query_len: Count
    key_len: Count
    window: Count
    dtype: str
    heads: Count
    kv_heads: Count
    head_dim: Count
    batch_size: Count
    bits: Count
    softcap: bool
    sinks: bool
    padded: bool

    def __str__(self) -> str:
        """All but the lengths: `28/4x128, bfloat16, 8-bit K/V, window 128, sinks, batch size 1`."""
        options = [f"window {self.window:,}"] * (self.window > 0)
        options += [name for name in ("softcap", "sinks", "padded") if getattr(self, name)]
        shape = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return ", ".join([shape, storage(self.dtype, self.bits), *options, f"batch size {self.batch_size:,}"])


class Call(Record):
    call: Problem
    seconds: dict[str, Amount | None]  # median of each kernel, `mlx` among them
    bytes: dict[str, Amount | None]

    @property
    def fastest(self) -> str:
        """Of flash's kernels."""
        flash = [kernel for kernel in self.seconds if kernel != "mlx"]
        return min(flash, key=lambda kernel: inf if (time := self.seconds[kernel]) is None else time, default=DASH)

    def seconds_of(self, name: str) -> float | None:
        """Of MLX's own attention or of flash's fastest kernel."""
        return self.seconds.get("mlx" if name == "mlx" else self.fastest)

    def memory_of(self, name: str) -> float | None:
        """MB."""
        return quotient(self.bytes.get("mlx" if name == "mlx" else self.fastest), 1e6)


class Measured(Record):
    device: str
    mlx: str
    flashattn_core: str = field(name="flashattn-core")
    calls: list[Call]


class Finding(Record):
    mark: Literal["ok", "warning", "problem"]
    subject: str
    what: str
    cure: str


class Result(Record, tag_field="command", tag=COMMAND):
    system: str
    python: str
    findings: Annotated[list[Finding], Meta(min_length=1)]
    table: Measured | None
    broken: Count
    could_be_better: Count


def description(result: Result) -> Description:
    facts = [f"broken: {result.broken:,}", f"could be better: {result.could_be_better:,}"]
    machine = {"system": result.system, "python": result.python}
    calls: list[Call] = []
    if measured := result.table:
        calls = measured.calls
        machine |= {"device": measured.device, "mlx": measured.mlx, "flashattn-core": measured.flashattn_core}
        facts += [result.system, "medians without their spread: nothing is claimed of them"]
    kinds = grouped(calls, lambda call: str(call.call)).items()
    return Description(
        result,
        facts,
        [_findings(result), *(_times(kind, of_kind) for kind, of_kind in kinds)],
        command=COMMAND,
        title=machine.get("device", result.system),
        charts=[(kind, _charts(of_kind)) for kind, of_kind in kinds],
        about={"machine": machine},
    )


def _findings(result: Result) -> Table:
    rows = [[f"{MARKS[found.mark]} {found.subject}", found.what, found.cure] for found in result.findings]
    return Table("✓ fine, ! could be better, ✗ broken", ["", "what", "cure"], rows, words=True)


def _times(kind: str, calls: Sequence[Call]) -> Table:
    return Table(
        kind,
        ["queries x keys", "time mlx", "flash", "flash is", "fastest kernel", "peak memory mlx", "flash"],
        [
            [
                f"{call.call.query_len:,} x {call.call.key_len:,}",
                *(figure(call.seconds_of(name), units.seconds) for name in LOOK_OF),
                DASH if gain is None else [figure(gain, times), " as fast"],
                call.fastest,
                *(figure(call.memory_of(name), units.memory) for name in LOOK_OF),
            ]
            for call in calls
            for gain in [quotient(call.seconds_of("mlx"), call.seconds_of("flash"))]
        ],
    )


def _charts(calls: Sequence[Call]) -> list[Chart]:
    decode = [call for call in calls if call.call.query_len == 1]
    prefill = [call for call in calls if 1 < call.call.query_len == call.call.key_len]
    return [_chart("Time of a decode step", decode), _chart("Time of a prefill", prefill)]


def _chart(title: str, calls: Sequence[Call]) -> Chart:
    lines = [
        Series(name, look, [Point(each.call.key_len, each.seconds_of(name) or nan) for each in calls])
        for name, look in LOOK_OF.items()
    ]
    return Chart(title, chart.TIME, "keys", lines)
