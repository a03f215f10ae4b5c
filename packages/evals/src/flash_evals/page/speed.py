"""Result files of `speed` on the page."""

from collections.abc import Sequence

from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Chart, Point
from flash_evals.page.html import Content, Html, figure, table
from flash_evals.page.run import Comparison, Run
from flash_evals.speed_result import Result, Summary, Test

WORK = {"prompt": "prompts", "generation": "generation"}


def read(file: str, result: Result) -> list[Run]:
    tests = result.results
    return [
        run.of_arms(
            file,
            result,
            result.model.name,
            [f"{result.settings.repetitions} repetitions, off and on taking turns"],
            [_table(tests), drawing.row(_charts(tests))],
            parts=("model", "draft_model", "settings", "machine"),
            comparisons=[Comparison(WORK[test.kind], "off", test.speed, test.memory) for test in tests],
        )
    ]


def _table(tests: Sequence[Test]) -> Html:
    names = {"attention": "attention_share", "accepted": "accepted_share"}
    both = [test[arm] for test in tests for arm in ARMS]
    shares = {name: key for name, key in names.items() if any(getattr(arm, key) is not None for arm in both)}
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
                test.test,
                *(_rate(test[arm]) for arm in ARMS),
                run.times(test.speed),
                *(figure(test[arm].peak_memory_mb, units.megabytes) for arm in ARMS),
                run.times(test.memory),
                *(figure(getattr(test[arm], key), units.share) for key in shares.values() for arm in ARMS),
            ]
            for test in tests
        ],
    )


def _rate(arm: Summary) -> list[Content]:
    mean, deviation = figure(arm.tokens_per_s, units.rate), arm.tokens_per_s_sd
    return [mean, *([" ± ", figure(deviation, units.rate)] if deviation is not None else [])]


def _charts(tests: Sequence[Test]) -> list[Chart]:
    """Of each kind: against its tokens, at each depth; against the depth where the tokens do not vary."""
    charts: list[Chart] = []
    for (kind, batch), of_kind in run.grouped(tests, lambda test: (test.kind, test.batch_size)).items():
        title = WORK[kind].capitalize() + (f", {batch} at once" if batch > 1 else "")
        by_depth = run.grouped(of_kind, lambda test: test.depth)
        if any(len(at) > 1 for at in by_depth.values()):
            for depth, at in by_depth.items():
                charts += _pair(f"{title}, depth {depth:,}", "tokens", [(test.tokens, test) for test in at])
        else:
            for tokens, at in run.grouped(of_kind, lambda test: test.tokens).items():
                by_end = [(test.depth + tokens, test) for test in at]
                charts += _pair(f"{title}, {tokens:,} tokens", "tokens in the cache at the end", by_end)
    return charts


def _pair(title: str, against: str, tests: Sequence[tuple[int, Test]]) -> list[Chart]:
    speed = chart.arms(lambda arm: [_speed(length, test[arm]) for length, test in tests])
    memory = chart.arms(lambda arm: [Point(length, test[arm].peak_memory_mb) for length, test in tests])
    return [
        chart.chart(f"{title}: tokens per second", chart.SPEED, against, speed),
        chart.chart(f"{title}: peak memory", chart.MEMORY, against, memory),
    ]


def _speed(length: int, arm: Summary) -> Point:
    mean, deviation = arm.tokens_per_s, arm.tokens_per_s_sd
    return Point(length, mean, mean - deviation, mean + deviation) if deviation else Point(length, mean)
