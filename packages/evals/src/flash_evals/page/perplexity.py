"""Result files of `perplexity` on the page."""

from collections.abc import Sequence

from flash_evals.claims import Ratio, quotient
from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Line, point
from flash_evals.page.html import Content, Html, figure, table, tag
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Predictions, Reading, Run
from flash_evals.perplexity import SAME_NLL

Columns = dict[str, Node]  # off, on, or the one that was compared with; at least one

ROWS: tuple[tuple[str, str, units.Shown], ...] = (
    ("word perplexity", "word_ppl", units.decimal(3)),
    ("byte perplexity", "byte_ppl", units.decimal(4)),
    ("bits per byte", "bits_per_byte", units.decimal(4)),
    ("prefill tokens/s", "tokens_per_s", units.rate),
    ("peak memory", "peak_memory_mb", units.megabytes),
)
RATIOS = ("tokens_per_s", "peak_memory_mb")
PAIRED = ("top1_agreement", "delta_nll_se", "max_abs_dlogit", "mean_kl")  # of the two columns token by token
PARTS = ("model", "dataset", "settings", "windows", "ranks", "machine", "compared")


def read(file: str, node: Node) -> list[Run]:
    columns: Columns = {name: column for name in ("other", *ARMS) if (column := node.get(name))}
    if not 1 <= len(columns) <= 2:
        raise Unusable(f"expected the arms off and on, or one of them, not {', '.join(columns) or 'none'}")
    tokens, compared, settings = node["tokens"].count(), node.get("compared"), node["settings"]
    both = list(columns) == list(ARMS)
    together = both and compared is None
    pair = node.get("paired") or Node({})
    delta = found.number() if (found := pair.get("delta_nll")) else None
    paired = {"delta_nll": delta, **{key: amount(pair, key) for key in PAIRED}}
    sizes = [f"{key} {size.count():,}" for key in ("context", "stride") if (size := settings.get(key))]
    context, dataset = settings["context"].count(), node["dataset"]["name"].text()
    return [
        run.of_arms(
            file,
            node,
            f"{node['model']['name'].text()} on {dataset}, context {context:,}",
            [", ".join([*sizes, *_ways(settings)]), f"{tokens:,} tokens"],
            [*_comparison(compared), _table(node, columns, compared, together)],
            _paired(paired) if len(columns) == 2 else [],
            PARTS,
            "on" in columns,
            comparisons=[Comparison("prefill", "off", *(_ratio(node, key) for key in RATIOS))] if together else [],
            predictions=_predictions(paired, tokens, together) if both else None,
            reading=_reading(node) if together else None,
        )
    ]


def _predictions(paired: dict[str, float | None], tokens: int, together: bool) -> Predictions:
    """As `perplexity` says it. The logits of arms that did not run together are not known."""
    agreement, delta = paired["top1_agreement"], paired["delta_nll"]
    if agreement is None or delta is None or (together and paired["max_abs_dlogit"] is None):
        return Predictions(None, "the arms cannot be compared: there are figures that are not known or not finite")
    top1 = (
        f"the same token ranks first at all {tokens:,}"
        if agreement == 1
        else f"another token ranks first at {round((1 - agreement) * tokens):,} of {tokens:,}"
    )
    same = agreement == 1 and abs(delta) <= SAME_NLL
    return Predictions(same, [f"{top1}, mean ΔNLL ", figure(delta, units.signed)])


def _paired(paired: dict[str, float | None]) -> list[tuple[str, Content]]:
    error = figure(paired["delta_nll_se"], units.scientific)
    return [
        ("top-1 agreement", figure(paired["top1_agreement"], units.percent)),
        ("ΔNLL", [figure(paired["delta_nll"], units.signed), " ± ", error]),
        ("max |Δlogit|", figure(paired["max_abs_dlogit"], units.scientific)),
        ("mean KL", figure(paired["mean_kl"], units.scientific)),
    ]


def _ways(settings: Node) -> list[str]:
    """`rolling scoring`, `joined documents`, as far as it is known."""
    return [f"{way.text()} {key}" for key in ("scoring", "documents") if (way := settings.get(key))]


def _comparison(compared: Node | None) -> list[Html]:
    """One column is of another run, at another time and perhaps on another machine: its speed says little here."""
    if compared is None:
        return []
    differs = "; ".join(difference.text() for difference in compared["differs_in"].items())
    differs_in = f" It differs in: {differs}." if differs else ""
    file = tag("code", compared["file"].text())
    return [tag("p", "One column is of another run, kept in ", file, ".", differs_in, class_="note")]


def _table(node: Node, columns: Columns, compared: Node | None, together: bool) -> Html:
    """With ratios of the arms, if they ran together."""
    names = {"off": "patch off", "on": "patch on", "other": "other"}
    if compared:
        names[compared["column"].text()] = f"patch {compared['arm'].text()}, another run"
    rows: list[list[Content]] = [["token perplexity", *map(_with_error, columns.values()), *([""] if together else [])]]
    for name, key, shown in ROWS:
        ratio = [run.times(_ratio(node, key)) if key in RATIOS else ""] if together else []
        rows.append([name, *(figure(amount(column, key), shown) for column in columns.values()), *ratio])
    head = ["", *(names[name] for name in columns), *(["on/off"] if together else [])]
    return table("Perplexity, prefill speed and peak memory", head, rows)


def _with_error(column: Node) -> Content:
    perplexity, error = column["ppl"].amount(), amount(column, "ppl_se")
    return [figure(perplexity, units.decimal(4)), " ± ", figure(error, units.decimal(2))]


def _ratio(node: Node, key: str) -> Ratio:
    return run.ratio(node, key, quotient(node["on"][key].amount(), node["off"][key].amount()))


def _reading(node: Node) -> Reading:
    settings, dataset, device = node["settings"], node["dataset"]["name"].text(), node["machine"]["device"].text()
    batch = [f"batch size {size.count():,}"] if (size := settings.get("batch_size")) else []
    ways = ", ".join(_ways(settings))
    return Reading(" · ".join(filter(None, [run.model(node["model"]), dataset, ways, *batch, device])), node)


def against_context(runs: Sequence[Run]) -> list[Html]:
    """Speed and memory against the context, of runs that share the rest: where they have several."""
    readings = run.grouped([each.reading for each in runs if each.reading], lambda reading: reading.shared)
    articles = []
    for shared, of_group in readings.items():
        by_context = {each.file["settings"]["context"].count(): each.file for each in of_group}
        if len(by_context) > 1:
            facts = tag("p", shared, class_="facts")
            articles.append(tag("article", tag("h3", "Against the context"), facts, _charts(by_context)))
    return articles


def _charts(by_context: dict[int, Node]) -> Html:
    def lines(key: str) -> list[Line]:
        return chart.arms(lambda arm: [point(n, file[arm][key].amount()) for n, file in by_context.items()])

    return drawing.row(
        [
            chart.chart("Prefill: tokens per second", chart.SPEED, "context in tokens", lines("tokens_per_s")),
            chart.chart("Peak memory of a batch", chart.MEMORY, "context in tokens", lines("peak_memory_mb")),
        ]
    )
