"""Writes measured figures into README, nvidia.md, linux.md and servers.md, and draws the README's picture.

    uv run packages/evals/scripts/draw_gains.py

The figures come from docs/results, whose files measure_gains.py writes.
"""

import json
import re
from pathlib import Path
from textwrap import fill
from typing import Any

from flash_evals.pages.colors import LIGHT
from flash_evals.pages.drawing import STYLE, svg_of
from flash_evals.pages.units import rate
from flash_evals.results.arms import ARMS
from flash_evals.results.claims import NOTHING, times

ROOT = Path(__file__).resolve().parents[3]
PICTURE = ROOT / "docs/pictures/gains.svg"
BEGIN, END = "<!-- gains: written by packages/evals/scripts/draw_gains.py -->\n\n", "<!-- end of gains -->\n"
WIDTH, ROW, LETTERS = 400, 54, 13  # points: the picture's width, a row's height, and the letters
LINE = 58  # letters of a name that fit into a line
ROOM = 1.5  # length of the axis / length of the longest bar: leaves room for the text beside the bar
Found = dict[str, Any]  # a file of docs/results, or one of its rows
CALLS = (  # the calls of nvidia.md; h200.json has the others
    "window 512, 28/4x128, 4096²",
    "window 128, sinks, 64/8x64, 4096²",
    "window 1024, 8/4x256, 8192²",
    "causal, 8/4x256, 4096²",
    "left-padded batch of 8, 14/2x64, 2048²",
    "float32, causal, 28/4x128, 4096²",
    "decode, 28/4x128, 32,768 keys",
    "decode, padded batch of 8, 28/4x128, 4,096 keys",
    "decode, sinks, 64/8x64, 8,192 keys",
    "8 queries, 28/4x128, 8,192 keys",
    "causal, 28/4x128, 4096²",
    "causal, 28/4x128, 16384²",
)


def read(name: str) -> Found:
    found: Found = json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))
    return found


def parts() -> dict[str, list[str]]:
    """The pages, each with the texts that this script writes there."""
    gpu, cpu = read("h200.json"), read("cpu.json")
    gpu_rows = [row for row in gpu["rows"] if "speed" in row]
    small = [row for row in gpu_rows if row["run"] == "small"]
    models = [row for row in cpu["rows"] if "speed" in row]
    cpu_rows = [row for row in models if not row["run"].endswith("-avx2")]
    with_openblas = [row for row in cpu_rows if "--blas auto" in row["command"]]
    with_avx2 = {row["name"]: ratio(row) for row in models if row["run"].endswith("-avx2")}
    avx2 = ["speed with `FLASHATTN_CPU_ISA=avx2`"] if with_avx2 else []
    on_cpu = [[*gain(row), *(with_avx2.get(row["name"], "") for _ in avx2)] for row in cpu_rows]
    bits = [row for row in gpu["rows"] if row["run"].startswith("kv")]
    card = f"[{gpu['machine']['processor']}](docs/nvidia.md#models-and-servers)"
    head = [f"one {card}, bfloat16, patch off → on", "speed", "peak memory beyond weights and filled cache"]
    return {
        "README.md": [
            table(head, [gain(row) for row in by_gain(gpu_rows)])
            + text(
                f"On a Linux CPU, {machine(cpu)}, [SmolLM2-135M](docs/linux.md#a-real-model) with OpenBLAS in float32 "
                f"gains up to {', '.join(largest(with_openblas))}."
            )
        ],
        "docs/nvidia.md": [
            text(f"{source('h200.json', gpu)} by these commands:")
            + commands(gpu, gpu_rows + bits)
            + "".join(text(f"S, {row['name']}: {gain(row)[1]}.") for row in small)
            + quantised(bits),
            single_calls(gpu),
        ],
        "docs/linux.md": [
            text(f"{source('cpu.json', cpu)} by these commands:")
            + commands(cpu, cpu_rows)
            + table(["float32, patch off → on", "speed", "memory", *avx2], on_cpu),
            kernels(cpu),
        ],
        "docs/servers.md": [first_use(gpu, [row for row in gpu["rows"] if row["run"] == "first-use"])],
    }


def single_calls(gpu: Found) -> str:
    """MLX's own attention and the patch's, in a chain of calls. A cell has MLX's figure, ours and the patch's."""
    rows = {row["name"]: row for row in gpu["rows"] if row["run"] == "calls"}
    if not rows:
        return ""
    shown = []
    for name in CALLS:
        own, _, patched = rows[name]["chain, µs"].split(" / ")
        gained, memory = rows[name]["chain, µs default"], rounded(rows[name]["memory, MB"])
        shown.append([name, rounded(f"{own} / {patched}"), gained, memory])
    head = ["call", "MLX's own / ours, µs", "gain", "MLX's own / ours, MB"]
    return text(f"{source('h200.json', gpu)} by this command:") + commands(gpu, [*rows.values()]) + table(head, shown)


def rounded(cell: str) -> str:
    return re.sub(r"[\d,.]+", lambda number: rate(float(number[0].replace(",", ""))), cell)


def kernels(cpu: Found) -> str:
    """A table of float32 calls for each run, and the commands that measured them. Columns are numbers of keys."""
    runs: dict[str, list[Found]] = {}
    for row in cpu["rows"]:
        if "torch" in row and ", float32, " in row["name"]:
            runs.setdefault(row["run"], []).append(row)
    every = [row for rows in runs.values() for row in rows]
    said = text(f"{source('cpu.json', cpu)} by these commands:") + commands(cpu, every) if every else ""
    tables: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for run, rows in runs.items():
        for row in rows:
            shape, _, _, pass_ = row["name"].rsplit(", ", 3)
            lengths = tuple(dict.fromkeys(other["name"].rsplit(", ", 3)[1] for other in rows))
            what = ", ".join([shape, *["decoding"] * (run == "decode"), *[pass_] * (pass_ != "forward")])
            flash, against = row["flash"], ratio({"speed": row["torch"]["flash_speed"]})
            cell = f"{rate(flash['ms'])} ms, {flash['speed'] / flash['limit']:.0%}, {against}"
            title = what + ", AVX2" * run.endswith("-avx2")
            tables.setdefault(lengths, {}).setdefault(title, []).append(cell)
    for lengths, cells in tables.items():
        said += table(["float32", *(f"{keys} keys" for keys in lengths)], [[name, *row] for name, row in cells.items()])
    return said


def largest(rows: list[Found]) -> list[str]:
    """The largest gain of prompts, of generation and of training, each in words."""
    best: dict[str, Found] = {}
    for row in sorted(rows, key=lambda row: -float(row["speed"]["ratio"])):
        if row["speed"]["is_clear"]:
            best.setdefault(row["test"][:2], row)  # pp512, tg64, step1024
    return [f"{times(row['speed']['ratio'])} for {row['name']}" for row in best.values()]


def by_gain(rows: list[Found]) -> list[Found]:
    """The README's rows, the largest gain first. Those without any clear difference become one row, at the end."""
    clear: list[Found] = []
    others: dict[str, list[str]] = {}
    for row in rows:
        if row["run"] == "small":
            continue  # nvidia.md names it among the limits
        if any(row.get(what, {}).get("is_clear") for what in ("speed", "memory")):
            clear.append(row)
        else:
            model, _, what = row["name"].partition(", ")
            others.setdefault(model, []).append(what)
    joined = "; ".join(f"{model}, {' · '.join(each)}" for model, each in others.items())
    none = [{"name": joined, "speed": {"is_clear": False}}] if joined else []
    return sorted(clear, key=lambda row: -float(row["speed"]["ratio"] or 1)) + none


def gain(row: Found) -> list[str]:
    """The row's name, its speed and its memory, as the cells of a table."""
    largest = max(row.get(arm, {}).get("peak_memory_mb", 0) for arm in ARMS)
    memory = both(row, "peak_memory_mb", *((1000, "GB") if largest >= 1000 else (1, "MB")))
    return [row["name"], ", ".join(filter(None, [both(row, "tokens_per_s", 1, "tokens/s"), ratio(row)])), memory]


def ratio(row: Found) -> str:
    return times(row["speed"]["ratio"]) if row["speed"]["is_clear"] else NOTHING


def both(row: Found, figure: str, size: float, unit: str) -> str:
    """Patch off → on, or nothing if that is not known."""
    known = [rate(row[arm][figure] / size) for arm in ARMS if figure in row.get(arm, {})]
    return f"{' → '.join(known)} {unit}" if known else ""


def quantised(rows: list[Found]) -> str:
    """A table with a row for each number of bits. Its runs are named kv16, kv8 and kv4."""
    shown: dict[str, list[str]] = {}
    for row in rows:
        bits = row["run"].removeprefix("kv")
        memory = f"{row['on']['peak_memory_with_weights_mb'] / 1000:.1f} GB"
        middle, lowest, highest = (rate(row["on"][which]) for which in ("tokens_per_s", "lowest", "highest"))
        shown[bits] = [*shown.get(bits, [bits])[:2], f"{middle} ({lowest} to {highest})", memory]
    head = [
        "bits of the KV cache, with the patch",
        *(f"{row['name']}, tokens/s" for row in rows[:2]),
        "peak memory with the weights",
    ]
    return table(head, list(shown.values())) if rows else ""


def first_use(gpu: Found, rows: list[Found]) -> str:
    head = ["first request of its kind in a fresh container", "patch off", "patch on"]
    shown = [[row["name"], *(seconds(row[arm]["seconds"]) for arm in ARMS)] for row in rows]
    return text(f"{source('h200.json', gpu)}.") + table(head, shown) if rows else ""


def seconds(trials: list[float]) -> str:
    shown = dict.fromkeys(f"{each:.3g}" if each >= 1 else f"{each:.2f}" for each in (min(trials), max(trials)))
    return f"{' to '.join(shown)} s"


def machine(found: Found) -> str:
    described = found["machine"]
    driver = described.get("driver")
    more = f"driver {driver}" if driver else described["device"].removeprefix("cpu, ")
    return f"{described['processor']} ({more})"


def source(name: str, found: Found) -> str:
    by = f"one {machine(found)} with mlx {found['machine']['versions']['mlx']} at commit {found['commit']}"
    notes = " and a note" if "note" in found else ""
    return f"[{name}](results/{name}) has the figures{notes}, measured on {by}"


def commands(found: Found, rows: list[Found]) -> str:
    """The commands of these rows, each model's after the command that writes the model."""
    lines: dict[str, None] = {}
    for command in [row["command"] for row in rows]:
        lines |= dict.fromkeys(write for name, write in found["models"].items() if name in command.split())
        lines[command] = None
    return "```sh\n" + "".join(f"{line}\n" for line in lines) + "```\n\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:], "\n"])


def text(sentence: str) -> str:
    return fill(sentence, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"


def picture() -> bytes:
    """Speed (thick) and memory (thin) with the patch on, relative to the patch off. Rows without a gain are grey."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    gpu = read("h200.json")
    rows = by_gain([row for row in gpu["rows"] if "speed" in row])
    with context(["default", {**STYLE, "axes.grid": False, "font.size": LETTERS}]):
        drawn = Figure((WIDTH / 72, (len(rows) + 0.4) * ROW / 72))
        ax = drawn.add_axes((0.01, 0, 0.98, 1))
        for top, row in enumerate(rows):
            speed, memory = row["speed"].get("ratio") or 1, row.get("memory", {}).get("ratio")
            is_gain = row["speed"]["is_clear"] and speed > 1
            said = f"{times(speed)} the speed" if row["speed"]["is_clear"] else NOTHING
            name = fill(row["name"], LINE)
            lower = 0.27 * name.count("\n")  # the last row has several names, and no bar for memory
            ax.text(0, top + 0.22 + lower / 2, name, va="center", color=LIGHT["ink"], linespacing=1.1)
            bar(ax, top + 0.5 + lower, 0.26, speed, said, LIGHT["on" if is_gain else "soft"])
            if memory:
                bar(
                    ax, top + 0.77, 0.1, memory, f"{times(memory)} the memory", LIGHT["naive" if memory < 1 else "soft"]
                )
            ax.plot([1, 1], [top + 0.37 + lower, top + 0.9], color=LIGHT["ink"], linewidth=1)
        said = f"line: patch off = 1 · {gpu['machine']['processor']}, bfloat16"
        ax.text(0, len(rows) + 0.15, said, va="center", color=LIGHT["soft"])
        ax.set_xlim(0, ROOM * max(row["speed"].get("ratio") or 1 for row in rows))
        ax.set_ylim(len(rows) + 0.4, 0)
        ax.set_axis_off()
        return svg_of(drawn)


def bar(ax: Any, middle: float, height: float, length: float, said: str, color: str) -> None:
    ax.barh(middle, length, height, color=color)
    ax.text(max(length, 1) + 0.04, middle, said, va="center", color=color)


def with_parts(page: str, parts: list[str]) -> str:
    before, *rest = page.split(BEGIN)
    for part, old in zip(parts, rest, strict=True):
        before += BEGIN + part.rstrip() + "\n" + END + old.split(END)[1]
    return before


def main() -> None:
    for path, texts in parts().items():
        page = (ROOT / path).read_text(encoding="utf-8")
        (ROOT / path).write_text(with_parts(page, texts), encoding="utf-8")
    PICTURE.write_bytes(picture())


if __name__ == "__main__":
    main()
