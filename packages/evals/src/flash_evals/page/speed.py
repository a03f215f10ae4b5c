"""Result files of `speed` on the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flash_evals.claims import Ratio, quotient
from flash_evals.measure import ARMS, Arm
from flash_evals.page import chart, run, units
from flash_evals.page.chart import Point, Series
from flash_evals.page.html import Content, Html, facts, figure, table
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Ran, Run

WORK = {"prompt": "prompts", "generation": "generation"}

Key = TypeVar("Key")


@dataclass(frozen=True)
class Rate:
    """Of one arm in one test."""

    mean: float | None  # tokens/s
    sd: float | None
    memory: float | None  # MB
    attention: float | None  # its share of the time
    accepted: float | None  # of the tokens that a draft model guessed

    @classmethod
    def read(cls, node: Node) -> "Rate":
        return cls(
            node["tokens_per_s"].amount(),
            amount(node, "tokens_per_s_sd"),
            node["peak_memory_mb"].amount(),
            amount(node, "attention_share"),
            amount(node, "accepted_share"),
        )


@dataclass(frozen=True)
class Test:
    name: str
    kind: str
    tokens: int
    depth: int
    batch: int  # prompts at once
    arms: dict[Arm, Rate]
    speed: Ratio  # of the medians
    memory: Ratio

    @classmethod
    def read(cls, node: Node) -> "Test":
        if node["kind"].text() not in WORK:
            raise node["kind"].expected(" or ".join(WORK))
        arms = {name: Rate.read(node[name]) for name in ARMS}
        memory = quotient(arms["on"].memory, arms["off"].memory)
        return cls(
            node["test"].text(),
            node["kind"].text(),
            node["tokens"].count(),
            node["depth"].count(),
            batch.count() if (batch := node.get("batch_size")) else 1,
            arms,
            run.ratio(node, "tokens_per_s", node["ratio"].amount()),
            run.ratio(node, "peak_memory_mb", memory),
        )


def read(file: str, node: Node) -> list[Run]:
    tests = [Test.read(test) for test in node["results"].items()]
    if not tests:
        raise Unusable("it has no results")
    flash = Ran.read(node["flash"])
    return [
        Run(
            file,
            "speed",
            node["model"]["name"].text(),
            [
                run.model(node["model"]),
                f"{node['settings']['repetitions'].count()} repetitions, off and on taking turns",
                node["machine"]["device"].text(),
            ],
            [_table(tests), _charts(tests), facts([("flash", str(flash))])],
            run.about((part, node.get(part)) for part in ("model", "draft_model", "settings", "machine")),
            bool(flash.calls),
            run.interrupted(node),
            [Comparison(WORK[test.kind], "off", test.speed, test.memory) for test in tests],
        )
    ]


def _table(tests: Sequence[Test]) -> Html:
    rates = [rate for test in tests for rate in test.arms.values()]
    attention = any(rate.attention is not None for rate in rates)
    accepted = any(rate.accepted is not None for rate in rates)
    return table(
        "Mean ± standard deviation of the repetitions; patch off and on",
        [
            "test",
            ("tokens/s", (*ARMS, "on/off")),
            ("peak memory", (*ARMS, "on/off")),
            *([("attention", ARMS)] if attention else []),
            *([("accepted", ARMS)] if accepted else []),
        ],
        [
            [
                test.name,
                *([figure(rate.mean, units.rate), _deviation(rate)] for rate in test.arms.values()),
                run.times(test.speed),
                *(figure(rate.memory, units.megabytes) for rate in test.arms.values()),
                run.times(test.memory),
                *(figure(rate.attention, units.share) for rate in test.arms.values() if attention),
                *(figure(rate.accepted, units.share) for rate in test.arms.values() if accepted),
            ]
            for test in tests
        ],
    )


def _deviation(rate: Rate) -> Content:
    return [" ± ", figure(rate.sd, units.rate)] if rate.sd is not None else ""


def _charts(tests: Sequence[Test]) -> Html:
    """Of each kind: against its tokens, at each depth; against the depth where the tokens do not vary."""
    charts: list[Html | None] = []
    for kind, of_kind in _grouped(tests, lambda test: (WORK[test.kind], test.batch)):
        by_depth = _grouped(of_kind, lambda test: test.depth)
        if any(len(at) > 1 for _, at in by_depth):
            for depth, at in by_depth:
                charts += _pair(f"{_title(*kind)}, depth {depth:,}", "tokens", at, lambda test: test.tokens)
        else:
            for tokens, of_length in _grouped(of_kind, lambda test: test.tokens):
                title = f"{_title(*kind)}, {tokens:,} tokens"
                charts += _pair(
                    title, "tokens in the cache at the end", of_length, lambda test: test.depth + test.tokens
                )
    return chart.row(charts)


def _title(work: str, batch: int) -> str:
    return f"{work.capitalize()}, {batch} at once" if batch > 1 else work.capitalize()


def _grouped(tests: Sequence[Test], key: Callable[[Test], Key]) -> list[tuple[Key, list[Test]]]:
    groups: dict[Key, list[Test]] = {}
    for test in tests:
        groups.setdefault(key(test), []).append(test)
    return list(groups.items())


def _pair(title: str, against: str, tests: Sequence[Test], length: Callable[[Test], int]) -> list[Html | None]:
    def series(point: Callable[[int, Rate], Point | None]) -> list[Series]:
        return [
            Series(f"patch {name}", name, [at for test in tests if (at := point(length(test), test.arms[name]))])
            for name in ARMS
        ]

    speed = chart.lines(f"{title}: tokens per second", chart.SPEED, against, series(_speed))
    return [speed, chart.lines(f"{title}: peak memory", chart.MEMORY, against, series(_memory))]


def _speed(length: int, rate: Rate) -> Point | None:
    if rate.mean is None:
        return None
    low, high = (rate.mean - rate.sd, rate.mean + rate.sd) if rate.sd else (None, None)
    return Point(length, rate.mean, low, high)


def _memory(length: int, rate: Rate) -> Point | None:
    return Point(length, rate.memory) if rate.memory is not None else None
