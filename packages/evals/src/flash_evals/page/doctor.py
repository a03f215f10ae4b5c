"""What `mlxlm-flash doctor` found on the page, and what was measured there: the kernels beside MLX's own attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from flash_evals.claims import quotient, times
from flash_evals.kernel_results import shape, storage
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Chart, point
from flash_evals.page.html import DASH, Html, figure, table, tag
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Run

COMMAND = "mlxlm-flash doctor"
MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
LOOKS = {"mlx": "off", "flash": "on"}


@dataclass(frozen=True)
class Call:
    """Of MLX's own attention, and of flash's fastest kernel."""

    queries: int
    keys: int
    fastest: str
    seconds: dict[str, float | None]  # median
    memory: dict[str, float | None]  # MB

    @classmethod
    def read(cls, node: Node) -> "Call":
        call, seconds, memory = (node[part] for part in ("call", "seconds", "bytes"))
        times = {kernel: seconds[kernel].amount() for kernel in seconds.dict()}
        megabytes = {kernel: quotient(amount(memory, kernel), 1e6) for kernel in times}
        flash = [kernel for kernel in times if kernel != "mlx"]
        fastest = min(flash, key=lambda kernel: inf if (time := times[kernel]) is None else time, default=DASH)
        kernels = {"mlx": "mlx", "flash": fastest}
        both = ({name: figures.get(kernel) for name, kernel in kernels.items()} for figures in (times, megabytes))
        return cls(call["query_len"].count(), call["key_len"].count(), fastest, *both)


def read(file: str, node: Node) -> list[Run]:
    facts = [f"broken: {node['broken'].count():,}", f"could be better: {node['could_be_better'].count():,}"]
    machine = {key: node[key].text() for key in ("system", "python")}
    kinds: dict[str, list[Call]] = {}
    if measured := node.get("table"):
        for call in measured["calls"].items():
            kinds.setdefault(_kind(call["call"]), []).append(Call.read(call))
        machine |= {key: measured[key].text() for key in ("device", "mlx", "flashattn-core")}
        facts += [machine["system"], "medians without their spread: nothing is claimed of them"]
    body = [part for kind, calls in kinds.items() for part in (_table(kind, calls), _charts(calls))]
    title, about = machine.get("device", machine["system"]), run.about([("machine", Node(machine))])
    return [Run(file, COMMAND, title, facts, [_findings(node["findings"]), *body], about, ran=True, interrupted=False)]


def _findings(node: Node) -> Html:
    rows = [
        [f"{_mark(finding['mark'])} {finding['subject'].text()}", finding["what"].text(), finding["cure"].text()]
        for finding in node.items()
    ]
    if not rows:
        raise Unusable("it has no findings")
    return tag("div", table("✓ fine, ! could be better, ✗ broken", ["", "what", "cure"], rows), class_="words")


def _mark(node: Node) -> str:
    if node.text() not in MARKS:
        raise node.expected("ok, warning or problem")
    return MARKS[node.text()]


def _kind(call: Node) -> str:
    """All but the lengths: `28/4x128, bfloat16, 8-bit K/V, window 128, sinks, batch size 1`."""
    names = {"num_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim", "kv_bits": "bits"}
    config = {"dtype": call["dtype"].text(), **{name: call[key].count() for name, key in names.items()}}
    window, batch_size = call["window"].count(), call["batch_size"].count()
    options = [f"window {window:,}"] * (window > 0)
    options += [name for name in ("softcap", "sinks", "padded") if call[name].flag()]
    return ", ".join([shape(config), storage(config), *options, f"batch size {batch_size:,}"])


def _table(kind: str, calls: Sequence[Call]) -> Html:
    return table(
        kind,
        ["queries x keys", ("time", list(LOOKS)), "flash is", "fastest kernel", ("peak memory", list(LOOKS))],
        [
            [
                f"{call.queries:,} x {call.keys:,}",
                *(figure(call.seconds[name], units.seconds) for name in LOOKS),
                DASH if gain is None else [figure(gain, times), " as fast"],
                call.fastest,
                *(figure(call.memory[name], units.memory) for name in LOOKS),
            ]
            for call in calls
            for gain in [quotient(call.seconds["mlx"], call.seconds["flash"])]
        ],
    )


def _charts(calls: Sequence[Call]) -> Html:
    decode = [call for call in calls if call.queries == 1]
    prefill = [call for call in calls if 1 < call.queries == call.keys]
    return drawing.row([_chart("Time of a decode step", decode), _chart("Time of a prefill", prefill)])


def _chart(title: str, calls: Sequence[Call]) -> Chart:
    lines = [(name, look, [point(each.keys, each.seconds[name]) for each in calls]) for name, look in LOOKS.items()]
    return chart.chart(title, chart.TIME, "keys", lines)
