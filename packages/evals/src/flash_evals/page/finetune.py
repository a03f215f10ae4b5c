"""Result files of `finetune` on the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from flash_evals.claims import Ratio, quotient
from flash_evals.measure import ARMS, Arm
from flash_evals.page import chart, run, units
from flash_evals.page.chart import Point, Series
from flash_evals.page.html import Html, facts, figure, table, tag
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Ran, Run, Training


@dataclass(frozen=True)
class Steps:
    """Of one arm at one length."""

    seconds: float | None
    low: float | None  # 20th percentile
    high: float | None  # 80th
    speed: float | None  # tokens/s
    memory: float | None  # MB
    loss: float | None

    @classmethod
    def read(cls, node: Node) -> "Steps":
        return cls(
            node["seconds"].amount(),
            amount(node, "seconds_p20"),
            amount(node, "seconds_p80"),
            node["tokens_per_s"].amount(),
            node["peak_memory_mb"].amount(),
            node["loss"].number(),
        )


@dataclass(frozen=True)
class Length:
    tokens: int
    arms: dict[Arm, Steps]
    time: Ratio  # on/off
    speed: Ratio
    memory: Ratio
    max_abs_dloss: float | None

    @classmethod
    def read(cls, node: Node) -> "Length":
        arms = {name: Steps.read(node[name]) for name in ARMS}
        speed = quotient(arms["on"].speed, arms["off"].speed)
        return cls(
            node["seq_len"].count(),
            arms,
            run.ratio(node, "seconds", node["time_ratio"].amount()),
            run.ratio(node, "seconds", speed),
            run.ratio(node, "peak_memory_mb", node["memory_ratio"].amount()),
            amount(node, "max_abs_dloss"),
        )


def read(file: str, node: Node) -> list[Run]:
    lengths = sorted((Length.read(each) for each in node["results"].items()), key=lambda length: length.tokens)
    if not lengths:
        raise Unusable("it has no results")
    skipped = [each["reason"].text() for each in skips.items()] if (skips := node.get("skipped")) else []
    flash, settings = Ran.read(node["flash"]), node["settings"]
    return [
        Run(
            file,
            "finetune",
            node["model"]["name"].text(),
            [
                run.model(node["model"]),
                f"LoRA of rank {settings['rank'].count()} in {settings['num_layers'].count()} layers",
                f"batch size {settings['batch_size'].count()}, random tokens",
                node["machine"]["device"].text(),
            ],
            [_table(lengths), *_skipped(skipped), _charts(lengths), facts([("flash", str(flash))])],
            run.about((part, node.get(part)) for part in ("model", "settings", "machine")),
            bool(flash.calls),
            run.interrupted(node),
            [Comparison("steps", "off", each.speed, each.memory) for each in lengths],
            training=_training(lengths, skipped),
        )
    ]


def _table(lengths: Sequence[Length]) -> Html:
    compared = (*ARMS, "on/off")
    return table(
        "A training step, patch off and on: its median time, and the largest difference of the losses",
        ["tokens", ("time", compared), ("tokens/s", compared), ("peak memory", compared), "max |Δloss|"],
        [
            [
                units.whole(each.tokens),
                *(figure(steps.seconds, units.seconds) for steps in each.arms.values()),
                run.times(each.time),
                *(figure(steps.speed, units.rate) for steps in each.arms.values()),
                run.times(each.speed),
                *(figure(steps.memory, units.megabytes) for steps in each.arms.values()),
                run.times(each.memory),
                figure(each.max_abs_dloss, units.scientific),
            ]
            for each in lengths
        ],
    )


def _skipped(reasons: Sequence[str]) -> list[Html]:
    return [tag("p", f"Skipped {reason}.", class_="note") for reason in reasons]


def _charts(lengths: Sequence[Length]) -> Html:
    times = [
        Series(
            f"patch {name}",
            name,
            [
                Point(each.tokens, steps.seconds, steps.low, steps.high)
                for each in lengths
                if (steps := each.arms[name]).seconds is not None
            ],
        )
        for name in ARMS
    ]
    memory = [
        Series(
            f"patch {name}",
            name,
            [Point(each.tokens, steps.memory) for each in lengths if (steps := each.arms[name]).memory is not None],
        )
        for name in ARMS
    ]
    against = "tokens in a sequence"
    return chart.row(
        [
            chart.lines("Time of a step", chart.TIME, against, times),
            chart.lines("Peak memory of a step", chart.MEMORY, against, memory),
        ]
    )


def _training(lengths: Sequence[Length], skipped: Sequence[str]) -> Training:
    longest = lengths[-1]
    off, on = (figure(longest.arms[name].memory, units.megabytes) for name in ARMS)
    return Training(
        longest.tokens,
        skipped,
        [f"a step of {longest.tokens:,} tokens took ", off, " with the patch off, ", on, " with it on"],
    )
