"""`--resume`: a run goes on behind what its file holds, whatever stopped it: nothing is lost, nothing counted twice."""

import errno
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from flash_evals import machine, paired

Invoke = Callable[..., click.testing.Result]
SCORES = ("tokens", "words", "bytes", "paired", "flash")
PER_ARM = ("ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte")


@pytest.fixture
def command(model_folder: Path, text_file: Path) -> list[object]:
    return ["perplexity", "--model", model_folder, "--dataset", text_file, "--context", 24, "--batch-size", 2]


@pytest.fixture
def evaluate(invoke: Invoke, command: list[object], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*arguments: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        done = invoke(*command, "--json", out, *arguments)
        assert (done.exit_code, done.stderr) == (0, ""), done.output
        return {**json.loads(out.read_text()), "page": done.stdout}

    return run


def assert_same_scores(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    for figure in SCORES:
        assert a[figure] == b[figure]
    for arm in ("off", "on"):
        for figure in PER_ARM:
            assert a[arm][figure] == b[arm][figure]


def test_a_file_that_is_not_there_is_begun(evaluate: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    whole, kept = evaluate(), evaluate("--resume", tmp_path / "run.jsonl")
    assert_same_scores(kept, whole)
    assert kept["windows"]["resumed"] == 0
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1 + len(whole["trials"])


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("half_a_line", ["", '{"windows": 2, "tok'])
def test_it_goes_on_behind_what_the_file_holds(
    evaluate: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
    half_a_line: str,
) -> None:
    """The batches it holds are not read again, and half a line does not count."""
    path = tmp_path / "run.jsonl"
    whole = evaluate("--save-logprobs", path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: 1 + batches]) + half_a_line)
    first_windows = []
    measured = paired.measured

    def spy(model: Any, ids: Any, plan: Any, *others: Any) -> Any:
        first_windows.extend(plan[:1])
        return measured(model, ids, plan, *others)

    monkeypatch.setattr(paired, "measured", spy)
    resumed = evaluate("--resume", path)
    assert [window.begin for window in first_windows] == [batches * 2 * 24]
    assert_same_scores(resumed, whole)
    assert resumed["windows"]["resumed"] == 2 * batches
    assert f"{2 * batches} windows are from an earlier run.\n" in resumed["page"]
    assert [trial["windows"] for trial in resumed["trials"]] == [trial["windows"] for trial in whole["trials"]]

    # The file is now that of a whole run, and shows its results again without measuring anything.
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(paired, "_measure", never)
    again = evaluate("--resume", path)
    assert_same_scores(again, whole)
    assert again["trials"] == resumed["trials"]


def test_with_another_batch_size(evaluate: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As one does when the memory was too small."""
    path = tmp_path / "run.jsonl"
    evaluate("--resume", path, "--max-windows", 4)
    resumed, whole = evaluate("--resume", path, "--batch-size", 1), evaluate()
    assert resumed["windows"]["finished"] == whole["windows"]["finished"]
    assert [trial["windows"] for trial in resumed["trials"]][:4] == [2, 2, 1, 1]
    for arm in ("off", "on"):
        assert resumed[arm]["ppl"] == pytest.approx(whole[arm]["ppl"], rel=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment(
    evaluate: Callable[..., dict[str, Any]], command: list[object], tmp_path: Path, seed: int
) -> None:
    """SIGKILL, as often as it takes, each time a little after the file has grown."""
    path = tmp_path / "run.jsonl"
    chance = random.Random(seed)
    flash_eval = [str(Path(sys.executable).parent / "flash-eval"), *map(str, command), "--stride", "3"]
    whole = evaluate("--stride", 3)
    kills = 0
    for _ in range(2):
        before = path.stat().st_size if path.exists() else 0
        with subprocess.Popen([*flash_eval, "--resume", str(path)], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (path.exists() and path.stat().st_size > before + 3000):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.02))
            process.kill()
        kills += process.returncode == -signal.SIGKILL
    assert kills, "all runs were over before they were killed"
    resumed = evaluate("--stride", 3, "--resume", path)
    assert 0 < resumed["windows"]["resumed"] < resumed["windows"]["planned"]
    assert_same_scores(resumed, whole)


def test_after_ctrl_c(
    evaluate: Callable[..., dict[str, Any]],
    invoke: Invoke,
    command: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, measure, batches = tmp_path / "run.jsonl", paired._measure, []
    whole = evaluate()

    def interrupted(*arguments: Any, **others: Any) -> Any:
        batches.append(arguments)
        if len(batches) == 3:
            signal.raise_signal(signal.SIGINT)
        return measure(*arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(paired, "_measure", interrupted)
        assert invoke(*command, "--resume", path).exit_code == 130
    resumed = evaluate("--resume", path)
    assert resumed["windows"]["resumed"] == 4
    assert_same_scores(resumed, whole)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stride", 12), "is of something else: stride 24, here 12"),
        (("--arm", "on"), "is of another run: arm off+on, here on"),
        (("--max-windows", 2), "holds 4 windows, --max-windows is 2"),
    ],
)
def test_the_file_of_another_run_is_refused(
    evaluate: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    command: list[object],
    tmp_path: Path,
    arguments: tuple[object, ...],
    said: str,
) -> None:
    path = tmp_path / "run.jsonl"
    evaluate("--resume", path, "--max-windows", 4)
    before = path.read_bytes()
    assert f"--resume {path} {said}" in refused(*command, "--resume", path, *arguments)
    assert path.read_bytes() == before


def test_the_file_of_other_versions_is_refused(
    evaluate: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    command: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scores and times would be of two things."""
    path, described = tmp_path / "run.jsonl", machine.describe()
    evaluate("--resume", path, "--max-windows", 4)
    versions = {**described["versions"], "mlx": "9.9"}
    monkeypatch.setattr(machine, "describe", lambda: {**described, "versions": versions})
    line = refused(*command, "--resume", path)
    assert line.endswith(f"--resume {path} is of another run: mlx {described['versions']['mlx']}, here 9.9")


def test_a_batch_is_on_the_disk_before_the_next_begins(
    evaluate: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure, synchronise, lines = tmp_path / "run.jsonl", paired._measure, os.fsync, []

    def counting(descriptor: int) -> None:
        synchronise(descriptor)
        lines.append(path.read_bytes().count(b"\n"))

    seen = []
    monkeypatch.setattr(os, "fsync", counting)
    monkeypatch.setattr(paired, "_measure", lambda *args, **others: seen.append(lines[-1]) or measure(*args, **others))
    batches = len(evaluate("--resume", path)["trials"])
    assert seen == list(range(1, 1 + batches))


def test_the_file_of_another_model_is_refused(
    evaluate: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    make_model: Callable[..., Path],
    command: list[object],
    tmp_path: Path,
) -> None:
    """Also if it is called the same and looks the same from outside."""
    path = tmp_path / "run.jsonl"
    evaluate("--resume", path, "--max-windows", 4)
    line = refused(*command, "--resume", path, "--model", make_model(rope_theta=100.0))
    assert f"--resume {path} is of another run: weights sha256:" in line


def broken(line: str, key: str, value: Any) -> str:
    return json.dumps({**json.loads(line), key: value}) + "\n"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (lambda lines: ["notes of mine"], "is not a file of flash-eval perplexity's scores"),
        (lambda lines: ["notes\n", "of mine\n"], "is not a file of flash-eval perplexity's scores"),
        (lambda lines: lines[1:], "is not a file of flash-eval perplexity's scores"),
        (lambda lines: [lines[0][:-3] + "\n", *lines[1:]], "is broken in line 1"),
        (lambda lines: [lines[0].replace('"weights"', '"waits"'), *lines[1:]], "is broken in line 1"),
        (lambda lines: [lines[0], "\n", *lines[1:]], "is broken in line 2"),
        (lambda lines: [*lines[:2], lines[2][:40] + "\n", *lines[3:]], "is broken in line 3"),
        (lambda lines: [*lines[:2], "[]\n"], "is broken in line 3"),
        (lambda lines: [*lines[:2], broken(lines[2], "windows", 1)], "is broken in line 3"),
        (lambda lines: [*lines[:2], broken(lines[2], "windows", -1)], "is broken in line 3"),
        (lambda lines: [*lines[:2], broken(lines[2], "off", {})], "is broken in line 3"),
        (lambda lines: [*lines[:2], broken(lines[2], "kl", [0.0])], "is broken in line 3"),
        (lambda lines: [*lines[:2], broken(lines[2], "order", ["on"])], "is broken in line 3"),
        (lambda lines: [*lines, lines[-1]], "is broken in line"),
    ],
)
def test_a_broken_file_is_refused_and_left_alone(
    evaluate: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    command: list[object],
    tmp_path: Path,
    breaks: Callable[[list[str]], list[str]],
    said: str,
) -> None:
    path = tmp_path / "run.jsonl"
    evaluate("--save-logprobs", path)
    path.write_text("".join(breaks(path.read_text().splitlines(keepends=True))))
    before = path.read_bytes()
    assert f"--resume {path} {said}" in refused(*command, "--resume", path)
    assert path.read_bytes() == before


def test_a_header_cut_in_half_is_begun_again(evaluate: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = evaluate("--save-logprobs", path)
    for length in (0, 5, 300):
        path.write_bytes(path.read_bytes()[:length])
        assert_same_scores(evaluate("--resume", path), whole)


def test_two_runs_at_once_are_refused(refused: Callable[..., str], command: list[object], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"--resume {path}: another run is writing it" in refused(*command, "--resume", path)


@pytest.mark.parametrize("option", ["--save-logprobs", "--resume"])
def test_a_full_disk_before_anything_is_measured(
    refused: Callable[..., str], command: list[object], option: str
) -> None:
    assert refused(*command, option, "/dev/full") == "Error: cannot write /dev/full: No space left on device"


@pytest.mark.parametrize("fitting", [0, 2])
def test_a_disk_that_fills_up_keeps_the_results_so_far(
    evaluate: Callable[..., dict[str, Any]], command: list[object], tmp_path: Path, fitting: int
) -> None:
    """The limit on the size of a file stands for the disk. What did fit is there to go on from; shown is also the batch
    that did not.
    """
    path, whole_path = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    whole = evaluate("--save-logprobs", whole_path)
    lines = whole_path.read_text().splitlines(keepends=True)
    limit = len("".join(lines[: 1 + fitting])) + len(lines[1 + fitting]) // 2
    done = subprocess.run(
        [Path(sys.executable).parent / "flash-eval", *map(str, command), "--resume", path],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"Error: cannot write {path}: {os.strerror(errno.EFBIG)}\n"
    shown, planned = 2 * (fitting + 1), whole["windows"]["planned"]
    assert done.stdout.endswith(f"Interrupted after {shown} of {planned} windows; the figures are of those.\n")
    resumed = evaluate("--resume", path)
    assert resumed["windows"]["resumed"] == 2 * fitting
    assert_same_scores(resumed, whole)
