"""Measures what users feel: whole models with the patch off and on, quantised caches, and the first use.

    python packages/evals/scripts/measure_gains.py gpu docs/results/h200.json           # behind it: names of runs
    uv run packages/evals/scripts/measure_gains.py cpu docs/results/cpu.json

gains.toml has the runs. OUT gets the rows of a run when the run ends. A run that OUT has from the same commit and
machine is not repeated; rows and notes from other commits or machines are dropped. Models are written to build/gains,
42 GB for a GPU. draw_gains.py writes the tables and the picture of the pages from OUT.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from flash_evals.results import finetune_result, kernels_result, speed_result
from flash_evals.results.arms import ARMS
from flash_evals.results.claims import Ratio
from flash_evals.results.errors import EvalError
from flash_evals.work import machine

SCRIPTS = Path(__file__).resolve().parent
RUNS = tomllib.loads((SCRIPTS / "gains.toml").read_text(encoding="utf-8"))
FOLDER = Path("build/gains")
PROGRAMS = {"python": [], "flash-eval": ["-m", "flash_evals"], "mlxlm-flash": ["-m", "mlxlm_flash_patch"]}
Figures = dict[str, dict[str, Any]]  # test -> figures


def call(command: str, *more: str) -> str:
    """Runs a command of gains.toml in FOLDER, also where the packages are not installed. Returns its stdout."""
    print(f"$ {command}", flush=True)
    words = [str(SCRIPTS / Path(word).name) if word.endswith(".py") else word for word in shlex.split(command)]
    environment = {**os.environ, **(dict([words.pop(0).split("=")]) if "=" in words[0] else {})}
    arguments = [sys.executable, *PROGRAMS[words[0]], *words[1:], *more]
    done = subprocess.run(arguments, env=environment, cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return done.stdout


def result_of(command: str, kind: Any) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        call(command, "--json", file.name)
        return msgspec.json.decode(file.read(), type=kind)


def compared(command: str) -> Figures:
    """Runs flash-eval speed or finetune."""
    result = result_of(command, speed_result.Result | finetune_result.Result)
    figures: Figures = {}
    for test in result.results:
        if isinstance(test, speed_result.Test) and test.failed:
            raise EvalError(f"{test.test} failed: {test.failed}")
        name = test.test if isinstance(test, speed_result.Test) else f"step{test.seq_len}"
        ratios = {"speed": test.speed, "memory": test.memory}
        figures[name] = {what: {"ratio": ratio.value, "is_clear": bool(ratio.sign)} for what, ratio in ratios.items()}
        for arm in ARMS:
            speed = spread(trial[arm].tokens_per_s for trial in test.trials)
            figures[name][arm] = {**speed, "peak_memory_mb": test[arm].peak_memory_mb}
    return figures


def spread(trials: Iterable[float]) -> dict[str, float]:
    ordered = sorted(trials)
    return {"tokens_per_s": median(ordered), "lowest": ordered[0], "highest": ordered[-1]}


def kernels(command: str) -> Figures:
    """Runs flash-eval kernels. Each other implementation gets the ratio of its time to flash's."""
    figures: Figures = {}
    for problem in kernels_result.by_problem(result_of(command, list[kernels_result.Entry])):
        flash = problem["flash"]
        for pass_, ours in flash.passes.items():
            row = figures[f"{flash.config.shape}, {flash.config.seq_len:,}, {flash.config.storage}, {pass_}"] = {}
            for impl, entry in problem.items():
                trials = entry.passes[pass_].trials
                row[impl] = {"ms": 1e3 * median(trials), "lowest": 1e3 * min(trials), "highest": 1e3 * max(trials)}
                if entry is not flash:
                    ratio = Ratio.of(median(trials) / median(ours.trials), trials, ours.trials)
                    row[impl]["flash_speed"] = {"ratio": ratio.value, "is_clear": bool(ratio.sign)}
            row["flash"]["speed"], row["flash"]["limit"] = flash.speed(pass_), flash.speed_bound
    return figures


def calls(command: str) -> Figures:
    """Runs measure_cuda_table.py. A call's figures are the cells of its row, named by their titles behind that of the
    way, such as "chain, µs default"."""
    rows = [line.strip("| ").split(" | ") for line in call(command).splitlines() if line.startswith("| ")]
    figures: Figures = {}
    names: list[str] = []
    for call_name, *cells in rows:
        if call_name == "call":
            ways = accumulate(cells, lambda way, title: title if title.endswith((", µs", ", MB")) else way)
            names = [title if title == way else f"{way} {title}" for way, title in zip(ways, cells, strict=True)]
        else:
            figures[call_name] = dict(zip(names, cells, strict=False))
    return figures


def benchmarked(command: str) -> Figures:
    """Runs mlx_lm.benchmark with the patch on. Its peak memory includes the weights."""
    trials = re.findall(r"^Trial.*?prompt_tps=(\S+), generation_tps=(\S+), peak_memory=(\S+),", call(command), re.M)
    prompt, generation, gigabytes = ([float(figure) for figure in each] for each in zip(*trials, strict=True))
    memory = {"peak_memory_with_weights_mb": 1000 * max(gigabytes)}
    return {"prompt": {"on": spread(prompt) | memory}, "generation": {"on": spread(generation) | memory}}


def first_used(command: str) -> Figures:
    seconds = json.loads(call(command))
    return {request: {arm: {"seconds": arms[arm]} for arm in ARMS} for request, arms in seconds.items()}


KINDS = {
    "kernels": kernels,
    "flash-eval": compared,
    "benchmark": benchmarked,
    "measure_first_use": first_used,
    "measure_cuda_table": calls,
}


def measured(
    name: str, command: str, models: dict[str, str], rows: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    for model in {*shlex.split(command)} & {*models}:
        if not (FOLDER / model).exists():
            call(models[model])
    figures = next(measure for word, measure in KINDS.items() if word in command)(command)
    names = rows or {test: test for test in figures}
    return [{"run": name, "name": names[test], "test": test, "command": command, **figures[test]} for test in names]


def said(*words: str) -> str | None:
    """What a program prints, or None if it is missing or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=SCRIPTS).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@click.command(help=__doc__)
@click.argument("device", type=click.Choice(["gpu", "cpu"]))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("names", metavar="[RUN]...", nargs=-1)
@click.option("--commit", help="Commit of the code, where there is no git.")
def main(device: str, out: Path, names: tuple[str, ...], commit: str | None) -> None:
    runs = dict(RUNS[device])
    models = runs.pop("models")
    if commit is None and (commit := said("git", "rev-parse", "--short=8", "HEAD")):
        changes = said("git", "status", "--porcelain", "--untracked-files=no", ":(top,exclude)docs/results")
        commit += "-dirty" * bool(changes)
    if commit is None or not {*names} <= {*runs}:
        raise click.UsageError(f"the runs are {', '.join(runs)}" if commit else "git finds no commit: give --commit")
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device == "gpu" else None
    here = {"commit": commit, "machine": {**msgspec.to_builtins(machine.describe()), "driver": driver}}
    found = json.loads(out.read_text()) if out.exists() else {}
    rows = found["rows"] if here.items() <= found.items() else []
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names or runs:
        if any(row["run"] == name for row in rows):
            continue
        try:
            rows += measured(name, models=models, **runs[name])
        except Exception:  # the other runs of a rented GPU go on
            traceback.print_exc()
            failed.append(name)
            continue
        rows.sort(key=lambda row: list(runs).index(row["run"]))
        out.write_text(json.dumps({**here, "models": models, "rows": rows}, indent=1) + "\n")
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
