"""Result files of `perplexity` on the page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flash_evals.claims import Ratio, quotient
from flash_evals.measure import ARMS, Arm
from flash_evals.page import chart, run, units
from flash_evals.page.chart import Point, Series
from flash_evals.page.html import Content, Html, facts, figure, table, tag
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Predictions, Ran, Reading, Run
from flash_evals.perplexity_result import SAME_NLL

Columns = dict[str, Node]  # off, on, or the one that was compared with; at least one

ROWS: tuple[tuple[str, str, units.Shown], ...] = (
    ("word perplexity", "word_ppl", units.decimal(3)),
    ("byte perplexity", "byte_ppl", units.decimal(4)),
    ("bits per byte", "bits_per_byte", units.decimal(4)),
    ("prefill tokens/s", "tokens_per_s", units.rate),
    ("peak memory", "peak_memory_mb", units.megabytes),
)
RATIOS = ("tokens_per_s", "peak_memory_mb")


@dataclass(frozen=True)
class Paired:
    """The two columns token by token; None is what is not known."""

    delta_nll: float | None
    delta_nll_se: float | None
    max_abs_dlogit: float | None
    mean_kl: float | None
    top1_agreement: float | None

    @classmethod
    def read(cls, node: Node | None) -> "Paired":
        if node is None:
            return cls(None, None, None, None, None)
        return cls(
            node["delta_nll"].number(),
            amount(node, "delta_nll_se"),
            amount(node, "max_abs_dlogit"),
            amount(node, "mean_kl"),
            amount(node, "top1_agreement"),
        )

    def predictions(self, tokens: int, together: bool) -> Predictions:
        """As `perplexity` says it. The logits of arms that did not run together are not known."""
        infinite = together and self.max_abs_dlogit is None
        if self.top1_agreement is None or self.delta_nll is None or infinite:
            return Predictions(None, "the arms cannot be compared: there are figures that are not known or not finite")
        same = self.top1_agreement == 1 and abs(self.delta_nll) <= SAME_NLL
        differ = round((1 - self.top1_agreement) * tokens)
        top1 = (
            f"the same token ranks first at all {tokens:,}"
            if self.top1_agreement == 1
            else f"another token ranks first at {differ:,} of {tokens:,}"
        )
        return Predictions(same, [f"{top1}, mean ΔNLL ", figure(self.delta_nll, units.signed)])


def read(file: str, node: Node) -> list[Run]:
    columns: Columns = {name: column for name in ("other", *ARMS) if (column := node.get(name))}
    if not 1 <= len(columns) <= 2:
        raise Unusable(f"expected the arms off and on, or one of them, not {', '.join(columns) or 'none'}")
    flash, tokens, paired = Ran.read(node["flash"]), node["tokens"].count(), Paired.read(node.get("paired"))
    compared, settings = node.get("compared"), node["settings"]
    arms, together = list(columns) == list(ARMS), _together(columns, compared)
    parts = ("model", "dataset", "settings", "windows", "ranks", "machine", "compared")
    return [
        Run(
            file,
            "perplexity",
            f"{node['model']['name'].text()} on {node['dataset']['name'].text()}, "
            f"context {settings['context'].count():,}",
            [
                run.model(node["model"]),
                _how_read(settings),
                f"{tokens:,} tokens",
                node["machine"]["device"].text(),
            ],
            [
                *_comparison(compared),
                _table(node, columns, compared),
                _facts(columns, paired, flash),
            ],
            run.about((part, node.get(part)) for part in parts),
            bool(flash.calls) or "on" not in columns,
            run.interrupted(node),
            [Comparison("prefill", "off", *(_ratio(node, key) for key in RATIOS))] if together else [],
            paired.predictions(tokens, together) if arms else None,
            reading=_reading(node) if together else None,
        )
    ]


def _how_read(settings: Node) -> str:
    """`context 256, stride 256, rolling scoring, joined documents`, as far as it is known."""
    sizes = [f"{key} {size.count():,}" for key in ("context", "stride") if (size := settings.get(key))]
    return ", ".join(filter(None, (*sizes, _ways(settings))))


def _ways(settings: Node) -> str:
    return ", ".join(f"{way.text()} {key}" for key in ("scoring", "documents") if (way := settings.get(key)))


def _comparison(compared: Node | None) -> list[Html]:
    """One column is of another run, at another time and perhaps on another machine: its speed says little here."""
    if compared is None:
        return []
    differs = [difference.text() for difference in compared["differs_in"].items()]
    differs_in = f" It differs in: {'; '.join(differs)}." if differs else ""
    file = tag("code", compared["file"].text())
    return [tag("p", "One column is of another run, kept in ", file, ".", differs_in, class_="note")]


def _head(columns: Columns, compared: Node | None) -> list[str]:
    names = {"off": "patch off", "on": "patch on", "other": "other"}
    if compared:
        names[compared["column"].text()] = f"patch {compared['arm'].text()}, another run"
    return ["", *(names[name] for name in columns)]


def _rows(columns: Columns) -> list[list[Content]]:
    rows: list[list[Content]] = [["token perplexity", *(_with_error(column) for column in columns.values())]]
    rows += [[name, *(figure(amount(arm, key), shown) for arm in columns.values())] for name, key, shown in ROWS]
    return rows


def _table(node: Node, columns: Columns, compared: Node | None) -> Html:
    """With ratios of the arms, if they ran together."""
    head, rows = _head(columns, compared), _rows(columns)
    if _together(columns, compared):
        head.append("on/off")
        for row, key in zip(rows, ("ppl", *(key for _, key, _ in ROWS)), strict=True):
            row.append(run.times(_ratio(node, key)) if key in RATIOS else "")
    return table("Perplexity, prefill speed and peak memory", head, rows)


def _together(columns: Columns, compared: Node | None) -> bool:
    return list(columns) == list(ARMS) and compared is None


def _with_error(column: Node) -> Content:
    perplexity, error = column["ppl"].amount(), amount(column, "ppl_se")
    return [figure(perplexity, units.decimal(4)), " ± ", figure(error, units.decimal(2))]


def _facts(columns: Columns, paired: Paired, flash: Ran) -> Html:
    compared: list[tuple[str, Content]] = [
        ("top-1 agreement", figure(paired.top1_agreement, units.percent)),
        ("ΔNLL", [figure(paired.delta_nll, units.signed), " ± ", figure(paired.delta_nll_se, units.scientific)]),
        ("max |Δlogit|", figure(paired.max_abs_dlogit, units.scientific)),
        ("mean KL", figure(paired.mean_kl, units.scientific)),
    ]
    return facts([*(compared if len(columns) == 2 else []), ("flash", str(flash))])


def _ratio(node: Node, key: str) -> Ratio:
    return run.ratio(node, key, quotient(node["on"][key].amount(), node["off"][key].amount()))


def _reading(node: Node) -> Reading:
    settings = node["settings"]
    speeds, memory = ({name: node[name][key].amount() for name in ARMS} for key in RATIOS)
    batch = f"batch size {size.count():,}" if (size := settings.get("batch_size")) else ""
    shared = (
        run.model(node["model"]),
        node["dataset"]["name"].text(),
        _ways(settings),
        batch,
        node["machine"]["device"].text(),
    )
    return Reading(" · ".join(filter(None, shared)), settings["context"].count(), speeds, memory)


def against_context(runs: Sequence[Run]) -> list[Html]:
    """Speed and memory against the context, of runs that share the rest: where they have several."""
    groups: dict[str, dict[int, Reading]] = {}
    for each in runs:
        if each.reading:
            groups.setdefault(each.reading.shared, {})[each.reading.context] = each.reading
    return [
        tag("article", tag("h3", "Against the context"), tag("p", shared, class_="facts"), _charts(by_context.values()))
        for shared, by_context in groups.items()
        if len(by_context) > 1
    ]


def _charts(readings: Iterable[Reading]) -> Html:
    readings = list(readings)

    def series(value: Callable[[Reading, Arm], float | None]) -> list[Series]:
        return [
            Series(
                f"patch {name}",
                name,
                [Point(each.context, x) for each in readings if (x := value(each, name)) is not None],
            )
            for name in ARMS
        ]

    speed = chart.lines(
        "Prefill: tokens per second", chart.SPEED, "context in tokens", series(lambda each, name: each.speeds[name])
    )
    memory = chart.lines(
        "Peak memory of a batch", chart.MEMORY, "context in tokens", series(lambda each, name: each.memory[name])
    )
    return chart.row([speed, memory])
