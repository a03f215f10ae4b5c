"""Result files of `finetune` on the page."""

from collections.abc import Sequence

from flash_evals.finetune_result import Length, Result
from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Chart, Point
from flash_evals.page.html import Html, figure, table, tag
from flash_evals.page.run import Comparison, Run, Training

FIGURES = (
    ("time", "seconds", units.seconds),
    ("tokens/s", "tokens_per_s", units.rate),
    ("peak memory", "peak_memory_mb", units.megabytes),
)


def read(file: str, result: Result) -> list[Run]:
    lengths, settings = _by_length(result), result.settings
    longest, skipped = lengths[-1], [length.reason for length in result.skipped]
    off, on = (figure(longest[arm].peak_memory_mb, units.megabytes) for arm in ARMS)
    return [
        run.of_arms(
            file,
            result,
            result.model.name,
            [
                f"LoRA of rank {settings.rank} in {settings.num_layers} layers",
                f"batch size {settings.batch_size}, random tokens",
            ],
            [
                _table(lengths),
                *(tag("p", f"Skipped {reason}.", class_="note") for reason in skipped),
                drawing.row(charts(result)),
            ],
            comparisons=[Comparison("steps", "off", each.speed, each.memory) for each in lengths],
            training=Training(
                longest.seq_len,
                skipped,
                [f"a step of {longest.seq_len:,} tokens took ", off, " with the patch off, ", on, " with it on"],
            ),
        )
    ]


def _by_length(result: Result) -> list[Length]:
    return sorted(result.results, key=lambda length: length.seq_len)


def _table(lengths: Sequence[Length]) -> Html:
    return table(
        "A training step, patch off and on: its median time, and the largest difference of the losses",
        ["tokens", *((name, (*ARMS, "on/off")) for name, _, _ in FIGURES), "max |Δloss|"],
        [
            [
                units.whole(each.seq_len),
                *(
                    cell
                    for (_, key, shown), ratio in zip(FIGURES, (each.time, each.speed, each.memory), strict=True)
                    for cell in (*(figure(getattr(each[arm], key), shown) for arm in ARMS), run.times(ratio))
                ),
                figure(each.max_abs_dloss, units.scientific),
            ]
            for each in lengths
        ],
    )


def charts(result: Result) -> list[Chart]:
    lengths = _by_length(result)
    spread = ("seconds", "seconds_p20", "seconds_p80")
    times = chart.arms(lambda arm: [Point(n.seq_len, *(getattr(n[arm], key) for key in spread)) for n in lengths])
    memory = chart.arms(lambda arm: [Point(n.seq_len, n[arm].peak_memory_mb) for n in lengths])
    return [
        chart.chart("Time of a step", chart.TIME, "tokens in a sequence", times),
        chart.chart("Peak memory of a step", chart.MEMORY, "tokens in a sequence", memory),
    ]
