"""Result files of `finetune` on the page."""

from flash_evals.claims import Ratio, quotient
from flash_evals.measure import ARMS
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Chart
from flash_evals.page.html import Html, figure, table, tag
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Run, Training

FIGURES = (
    ("time", "seconds", units.seconds),
    ("tokens/s", "tokens_per_s", units.rate),
    ("peak memory", "peak_memory_mb", units.megabytes),
)


def read(file: str, node: Node) -> list[Run]:
    lengths, settings = _by_length(node), node["settings"]
    if not lengths:
        raise Unusable("it has no results")
    skipped = [each["reason"].text() for each in skips.items()] if (skips := node.get("skipped")) else []
    longest = lengths[-1]["seq_len"].count()
    off, on = (figure(lengths[-1][arm]["peak_memory_mb"].amount(), units.megabytes) for arm in ARMS)
    ratios = [_ratios(each) for each in lengths]
    return [
        run.of_arms(
            file,
            node,
            node["model"]["name"].text(),
            [
                f"LoRA of rank {settings['rank'].count()} in {settings['num_layers'].count()} layers",
                f"batch size {settings['batch_size'].count()}, random tokens",
            ],
            [
                _table(lengths),
                *(tag("p", f"Skipped {reason}.", class_="note") for reason in skipped),
                drawing.row(charts(node)),
            ],
            comparisons=[Comparison("steps", "off", speed, memory) for _, speed, memory in ratios],
            training=Training(
                longest,
                skipped,
                [f"a step of {longest:,} tokens took ", off, " with the patch off, ", on, " with it on"],
            ),
        )
    ]


def _by_length(node: Node) -> list[Node]:
    return sorted(node["results"].items(), key=lambda each: each["seq_len"].count())


def _ratios(node: Node) -> tuple[Ratio, Ratio, Ratio]:
    """On over off, of FIGURES."""
    speed = quotient(*(node[arm]["tokens_per_s"].amount() for arm in ("on", "off")))
    return (
        run.ratio(node, "seconds", node["time_ratio"].amount()),
        run.ratio(node, "seconds", speed),
        run.ratio(node, "peak_memory_mb", node["memory_ratio"].amount()),
    )


def _table(lengths: list[Node]) -> Html:
    return table(
        "A training step, patch off and on: its median time, and the largest difference of the losses",
        ["tokens", *((name, (*ARMS, "on/off")) for name, _, _ in FIGURES), "max |Δloss|"],
        [
            [
                units.whole(each["seq_len"].count()),
                *(
                    cell
                    for (_, key, shown), ratio in zip(FIGURES, _ratios(each), strict=True)
                    for cell in (*(figure(each[arm][key].amount(), shown) for arm in ARMS), run.times(ratio))
                ),
                figure(amount(each, "max_abs_dloss"), units.scientific),
            ]
            for each in lengths
        ],
    )


def charts(node: Node) -> list[Chart]:
    lengths = [(each["seq_len"].count(), each) for each in _by_length(node)]
    spread = ("seconds", "seconds_p20", "seconds_p80")
    times = chart.arms(lambda arm: [chart.point(n, *(amount(each[arm], key) for key in spread)) for n, each in lengths])
    memory = chart.arms(lambda arm: [chart.point(n, amount(each[arm], "peak_memory_mb")) for n, each in lengths])
    return [
        chart.chart("Time of a step", chart.TIME, "tokens in a sequence", times),
        chart.chart("Peak memory of a step", chart.MEMORY, "tokens in a sequence", memory),
    ]
