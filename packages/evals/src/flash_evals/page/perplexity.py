"""Result files of `perplexity` on the page."""

from collections.abc import Sequence
from typing import Literal

from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Line, Point
from flash_evals.page.html import Content, Html, figure, table, tag
from flash_evals.page.run import Comparison, Predictions, Run
from flash_evals.perplexity_result import Compared, Paired, Result

ROWS: tuple[tuple[str, str, units.Shown], ...] = (
    ("word perplexity", "word_ppl", units.decimal(3)),
    ("byte perplexity", "byte_ppl", units.decimal(4)),
    ("bits per byte", "bits_per_byte", units.decimal(4)),
    ("prefill tokens/s", "tokens_per_s", units.rate),
    ("peak memory", "peak_memory_mb", units.megabytes),
)
RATIOS: tuple[Literal["tokens_per_s"], Literal["peak_memory_mb"]] = ("tokens_per_s", "peak_memory_mb")
PARTS = ("model", "dataset", "settings", "windows", "ranks", "machine", "compared")


def read(file: str, result: Result) -> list[Run]:
    settings, paired = result.settings, result.paired
    both, together = _arms_of(result)
    sizes = [f"{key} {size:,}" for key in ("context", "stride") if (size := getattr(settings, key))]
    speed, memory = (result.ratio(figure) for figure in RATIOS)
    return [
        run.of_arms(
            file,
            result,
            f"{result.model.name} on {result.dataset.name}, context {settings.context:,}",
            [", ".join([*sizes, _ways(result)]), f"{result.tokens:,} tokens"],
            [*_comparison(result.compared), _table(result)],
            _paired(paired) if paired else [],
            PARTS,
            result.on is not None,
            comparisons=[Comparison("prefill", "off", speed, memory)] if together else [],
            predictions=_predictions(paired, result.tokens, together) if paired and both else None,
            read=result if together else None,
        )
    ]


def _arms_of(result: Result) -> tuple[bool, bool]:
    """Whether both arms are there, and whether they ran together."""
    both = tuple(result.columns) == ARMS
    return both, both and result.compared is None


def _predictions(paired: Paired, tokens: int, together: bool) -> Predictions:
    """As `perplexity` says it. The logits of arms that did not run together are not known."""
    agreement, delta = paired.top1_agreement, paired.delta_nll
    if delta is None or (together and paired.max_abs_dlogit is None):
        return Predictions(None, "the arms cannot be compared: there are figures that are not known or not finite")
    top1 = (
        f"the same token ranks first at all {tokens:,}"
        if agreement == 1
        else f"another token ranks first at {round((1 - agreement) * tokens):,} of {tokens:,}"
    )
    return Predictions(paired.same, [f"{top1}, mean ΔNLL ", figure(delta, units.signed)])


def _paired(paired: Paired) -> list[tuple[str, Content]]:
    error = figure(paired.delta_nll_se, units.scientific)
    return [
        ("top-1 agreement", figure(paired.top1_agreement, units.percent)),
        ("ΔNLL", [figure(paired.delta_nll, units.signed), " ± ", error]),
        ("max |Δlogit|", figure(paired.max_abs_dlogit, units.scientific)),
        ("mean KL", figure(paired.mean_kl, units.scientific)),
    ]


def _ways(result: Result) -> str:
    return f"{result.settings.scoring} scoring, {result.settings.documents} documents"


def _comparison(compared: Compared | None) -> list[Html]:
    """One column is of another run, at another time and perhaps on another machine: its speed says little here."""
    if compared is None:
        return []
    differs_in = f" It differs in: {'; '.join(compared.differs_in)}." if compared.differs_in else ""
    file = tag("code", compared.file)
    return [tag("p", "One column is of another run, kept in ", file, ".", differs_in, class_="note")]


def _table(result: Result) -> Html:
    """With ratios of the arms, if they ran together."""
    _, together = _arms_of(result)
    columns, compared = result.columns, result.compared
    names = {name: f"patch {name}" for name in columns}
    if compared:
        names[compared.column] = f"patch {compared.arm}, another run"
    first = [
        [figure(arm.ppl, units.decimal(4)), " ± ", figure(arm.ppl_se, units.decimal(2))] for arm in columns.values()
    ]
    ratios: dict[str, Content] = {key: run.times(result.ratio(key)) for key in RATIOS}
    rows: list[list[Content]] = [["token perplexity", *first, *([""] if together else [])]]
    for name, key, shown in ROWS:
        figures = [figure(getattr(column, key), shown) for column in columns.values()]
        rows.append([name, *figures, *([ratios.get(key, "")] if together else [])])
    head = ["", *names.values(), *(["on/off"] if together else [])]
    return table("Perplexity, prefill speed and peak memory", head, rows)


def against_context(runs: Sequence[Run]) -> list[Html]:
    """Speed and memory against the context, of runs that share the rest: where they have several."""
    results: list[Result] = [each.read for each in runs if each.read]
    articles = []
    for shared, of_group in run.grouped(results, _shared).items():
        by_context = {result.settings.context: result for result in of_group}
        if len(by_context) > 1:
            facts = tag("p", shared, class_="facts")
            articles.append(tag("article", tag("h3", "Against the context"), facts, _charts(by_context)))
    return articles


def _shared(result: Result) -> str:
    batch = f"batch size {result.settings.batch_size:,}"
    return " · ".join([run.model(result.model), result.dataset.name, _ways(result), batch, result.machine.device])


def _charts(by_context: dict[int, Result]) -> Html:
    def lines(key: str) -> list[Line]:
        return chart.arms(lambda arm: [Point(n, getattr(each.columns[arm], key)) for n, each in by_context.items()])

    return drawing.row(
        [
            chart.chart("Prefill: tokens per second", chart.SPEED, "context in tokens", lines("tokens_per_s")),
            chart.chart("Peak memory of a batch", chart.MEMORY, "context in tokens", lines("peak_memory_mb")),
        ]
    )
