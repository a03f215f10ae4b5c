"""Describes the result of `speed`: its table and charts."""

from collections.abc import Sequence

from flash_evals.pages import chart, units
from flash_evals.pages.chart import Chart, Point, by_arm
from flash_evals.pages.description import Comparison, Description, Table, grouped
from flash_evals.pages.units import figure
from flash_evals.results.arms import ARMS
from flash_evals.results.speed_result import Result, Summary, Test

WORK = {"prompt": "prompts", "generation": "generation"}


def description(result: Result) -> Description:
    draft, settings, tests = result.draft_model, result.settings, result.results
    drafted = [f"{settings.num_draft_tokens} tokens at a time drafted by {draft.title}"] if draft else []
    cached = [f"KV caches of {settings.kv_bits} bits"] if settings.kv_bits else []
    repeated = f"{settings.repetitions} repetitions, off and on taking turns"
    return Description(
        result,
        [result.model.title, *drafted, *cached, repeated, result.machine.device],
        [_table(tests, drafting=draft is not None)],
        [f"flash: {result.flash}", *result.machine.bounds],
        bool(result.flash.calls),
        "trials" if result.interrupted else "",
        command="speed",
        title=result.model.name,
        charts=[("", _charts(tests))],
        comparisons=[Comparison(WORK[test.kind], "off", test.speed, test.memory) for test in tests if not test.failed],
        about={"model": result.model, "draft model": draft, "settings": settings, "machine": result.machine},
    )


def _table(tests: Sequence[Test], drafting: bool) -> Table:
    speed, memory = ["patch off t/s", "patch on t/s", "on/off"], ["peak memory off", "on", "on/off"]
    accepted = ["accepted off", "on"] if drafting else []
    return Table(
        "Mean ± standard deviation of the repetitions; patch off and on",
        ["test", *speed, *memory, "attention off", "on", *accepted],
        [
            [
                test.test,
                *(test.failed.get(arm) or _rate(test[arm]) for arm in ARMS),
                units.ratio(test.speed),
                *_figures(test, "peak_memory_mb", units.megabytes),
                units.ratio(test.memory),
                *_figures(test, "attention_share", units.share),
                *(_figures(test, "accepted_share", units.share) if drafting else []),
            ]
            for test in tests
        ],
    )


def _figures(test: Test, name: str, shown: units.Shown) -> list[str]:
    return [figure(getattr(test[arm], name, None), shown) for arm in ARMS]


def _rate(arm: Summary | None) -> str:
    if arm is None:
        return units.DASH
    digits = 0 if arm.tokens_per_s >= 100 else 1  # the same number of digits as in units.rate()
    deviation = f" ± {arm.tokens_per_s_sd:,.{digits}f}" if arm.tokens_per_s_sd is not None else ""
    return units.rate(arm.tokens_per_s) + deviation


def _charts(tests: Sequence[Test]) -> list[Chart]:
    """Charts of speed and memory against a test's tokens or, if these do not vary, against the cache's final length."""
    charts: list[Chart] = []
    for (kind, batch), of_kind in grouped(tests, lambda test: (test.kind, test.batch_size)).items():
        title = WORK[kind].capitalize() + (f", {batch} at once" if batch > 1 else "")
        by_depth = grouped(of_kind, lambda test: test.depth)
        if any(len(at) > 1 for at in by_depth.values()):
            for depth, at in by_depth.items():
                charts += _pair(f"{title}, depth {depth:,}", "tokens", [(test.tokens, test) for test in at])
        else:
            for tokens, at in grouped(of_kind, lambda test: test.tokens).items():
                by_end = [(test.depth + tokens, test) for test in at]
                charts += _pair(f"{title}, {tokens:,} tokens", "tokens in the cache at the end", by_end)
    return charts


def _pair(title: str, against: str, tests: Sequence[tuple[int, Test]]) -> list[Chart]:
    speed = by_arm(lambda arm: [_speed(length, of) for length, test in tests if (of := test[arm])])
    memory = by_arm(lambda arm: [Point(length, of.peak_memory_mb) for length, test in tests if (of := test[arm])])
    return [
        Chart(f"{title}: tokens per second", chart.SPEED, against, speed),
        Chart(f"{title}: peak memory", chart.MEMORY, against, memory),
    ]


def _speed(length: int, arm: Summary) -> Point:
    mean, deviation = arm.tokens_per_s, arm.tokens_per_s_sd
    return Point(length, mean, mean - deviation, mean + deviation) if deviation else Point(length, mean)
