"""Result files of `speed` on the page."""

from collections.abc import Sequence

from flash_evals.claims import quotient
from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Chart, Point
from flash_evals.page.html import Content, Html, figure, table
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Run

WORK = {"prompt": "prompts", "generation": "generation"}
SHARES = {"attention": "attention_share", "accepted": "accepted_share"}  # of the time, and of a draft model's tokens


def read(file: str, node: Node) -> list[Run]:
    tests = node["results"].items()
    if not tests:
        raise Unusable("it has no results")
    return [
        run.of_arms(
            file,
            node,
            node["model"]["name"].text(),
            [f"{node['settings']['repetitions'].count()} repetitions, off and on taking turns"],
            [_table(tests), drawing.row(_charts(tests))],
            parts=("model", "draft_model", "settings", "machine"),
            comparisons=[_comparison(test) for test in tests],
        )
    ]


def _comparison(test: Node) -> Comparison:
    memory = quotient(*(test[arm]["peak_memory_mb"].amount() for arm in ("on", "off")))
    if test["kind"].text() not in WORK:
        raise test["kind"].expected(" or ".join(WORK))
    return Comparison(
        WORK[test["kind"].text()],
        "off",
        run.ratio(test, "tokens_per_s", test["ratio"].amount()),
        run.ratio(test, "peak_memory_mb", memory),
    )


def _table(tests: Sequence[Node]) -> Html:
    def measured(key: str) -> bool:
        return any(amount(test[arm], key) is not None for test in tests for arm in ARMS)

    shares = {name: key for name, key in SHARES.items() if measured(key)}
    return table(
        "Mean ± standard deviation of the repetitions; patch off and on",
        [
            "test",
            ("tokens/s", (*ARMS, "on/off")),
            ("peak memory", (*ARMS, "on/off")),
            *((name, ARMS) for name in shares),
        ],
        [
            [
                test["test"].text(),
                *(_rate(test[arm]) for arm in ARMS),
                run.times(ratios.speed),
                *(figure(test[arm]["peak_memory_mb"].amount(), units.megabytes) for arm in ARMS),
                run.times(ratios.memory),
                *(figure(amount(test[arm], key), units.share) for key in shares.values() for arm in ARMS),
            ]
            for test in tests
            for ratios in [_comparison(test)]
        ],
    )


def _rate(arm: Node) -> list[Content]:
    mean, deviation = arm["tokens_per_s"].amount(), amount(arm, "tokens_per_s_sd")
    return [figure(mean, units.rate), *([" ± ", figure(deviation, units.rate)] if deviation is not None else [])]


def _charts(tests: Sequence[Node]) -> list[Chart]:
    """Of each kind: against its tokens, at each depth; against the depth where the tokens do not vary."""
    charts: list[Chart] = []
    for (work, batch), of_kind in run.grouped(tests, _kind).items():
        title = work.capitalize() + (f", {batch} at once" if batch > 1 else "")
        by_depth = run.grouped(of_kind, lambda test: test["depth"].count())
        if any(len(at) > 1 for at in by_depth.values()):
            for depth, at in by_depth.items():
                by_tokens = [(test["tokens"].count(), test) for test in at]
                charts += _pair(f"{title}, depth {depth:,}", "tokens", by_tokens)
        else:
            for tokens, at in run.grouped(of_kind, lambda test: test["tokens"].count()).items():
                by_end = [(test["depth"].count() + tokens, test) for test in at]
                charts += _pair(f"{title}, {tokens:,} tokens", "tokens in the cache at the end", by_end)
    return charts


def _kind(test: Node) -> tuple[str, int]:
    return WORK[test["kind"].text()], batch.count() if (batch := test.get("batch_size")) else 1


def _pair(title: str, against: str, tests: Sequence[tuple[int, Node]]) -> list[Chart]:
    speed = chart.arms(lambda arm: [_speed(length, test[arm]) for length, test in tests])
    memory = chart.arms(lambda arm: [chart.point(n, test[arm]["peak_memory_mb"].amount()) for n, test in tests])
    return [
        chart.chart(f"{title}: tokens per second", chart.SPEED, against, speed),
        chart.chart(f"{title}: peak memory", chart.MEMORY, against, memory),
    ]


def _speed(length: int, arm: Node) -> Point | None:
    mean, deviation = arm["tokens_per_s"].amount(), amount(arm, "tokens_per_s_sd")
    band = (mean - deviation, mean + deviation) if mean is not None and deviation else ()
    return chart.point(length, mean, *band)
