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

import pytest
from flash_evals import machine, paired
from msgspec.structs import replace

COMMAND = ("perplexity", "--batch-size", 2)  # of `evaluate`

# As in conftest.py, so that a run here may continue it.
ANOTHER_BLAS = """
from flash_evals import cli, machine
machine.blas = lambda: "openblas"
cli.main()
"""


@pytest.fixture
def path(tmp_path):
    """Of the file that is resumed."""
    return tmp_path / "run.jsonl"


def lines(path):
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(("whole", "half"), [(0, 0), (0, 5), (0, 300), (1, 0), (1, 20), (2, 20), (4, 0)])
def test_it_goes_on_behind_what_the_file_holds(evaluate, path, same_scores, monkeypatch, whole, half):
    """So many whole lines, of which the first is no batch, and so many characters of the next, which do not count."""
    at_once = evaluate("--save-logprobs", path)
    held, batches = lines(path), max(0, whole - 1)
    path.write_text("".join(held[:whole]) + held[whole][:half])
    resumed = evaluate("--resume", path)
    same_scores(resumed, at_once)
    assert resumed["trials"][:batches] == at_once["trials"][:batches]
    assert len(resumed["trials"]) == len(at_once["trials"])
    assert resumed["windows"]["resumed"] == 2 * batches
    assert (f"{2 * batches} windows are from an earlier run.\n" in resumed["page"]) is (batches > 0)

    # The file is now that of a whole run, and shows its results again without measuring anything.
    monkeypatch.setattr(paired, "run", None)
    again = evaluate("--resume", path)
    same_scores(again, at_once)
    assert again["trials"] == resumed["trials"]
    assert again["ranks"] == {"size": 1, "tokens_per_s": {}}  # of what was read now


@pytest.mark.long("a process for each kill, which imports for seconds")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_moment(evaluate, perplexity, path, same_scores, seed):
    """SIGKILL, as often as it takes, each time a little after the file has grown."""
    chance = random.Random(seed)
    flash_eval = [sys.executable, "-c", ANOTHER_BLAS, *map(str, perplexity), "--stride", "3"]
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
    same_scores(resumed, whole)


def test_the_file_of_another_run_is_refused(evaluate, refused, perplexity, path, monkeypatch, model_folder, make_model):
    """Its scores and times would be of two things; also where a model is called the same and looks the same."""
    described = machine.describe()
    evaluate("--resume", path, "--max-windows", 4)
    before, model = path.read_bytes(), make_model(rope_theta=100.0)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"--resume {path}: another run is writing it" in refused(*perplexity, "--resume", path)
    for arguments, said in (
        (("--stride", 12), "is of something else: stride 24, here 12"),
        (("--arm", "on"), "is of something else: arm both, here on"),
        (("--max-windows", 2), "holds 4 windows, --max-windows is 2"),
        (("--model", model), f"is of something else: model {model_folder.name}, here {model.name}; weights "),
    ):
        assert f"--resume {path} {said}" in refused(*perplexity, "--resume", path, *arguments)
    monkeypatch.setattr(machine, "describe", lambda: replace(described, versions={**described.versions, "mlx": "9.9"}))
    said = f"--resume {path} is of something else: mlx {described.versions['mlx']}, here 9.9"
    assert refused(*perplexity, "--resume", path).endswith(said)
    assert path.read_bytes() == before


def test_a_batch_is_on_the_disk_before_the_next_begins(evaluate, path, monkeypatch):
    measure, synchronise, on_disk, seen = paired._measure, os.fsync, [], []

    def counting(descriptor):
        synchronise(descriptor)
        on_disk.append(len(lines(path)))

    monkeypatch.setattr(os, "fsync", counting)
    monkeypatch.setattr(paired, "_measure", lambda *a, **others: seen.append(on_disk[-1]) or measure(*a, **others))
    batches = len(evaluate("--resume", path)["trials"])
    assert seen == [1, *range(1, 1 + batches)]  # the first is to warm up


def broken(line, key, value):
    batch = json.loads(line)
    (batch if key in batch else batch["trial"])[key] = value
    return json.dumps(batch) + "\n"


NO_SCORES, BEHIND = "is not a file of scores of flash-eval perplexity, version 3", "is broken behind"
BREAK = [
    (lambda head, *batches: ["a text"], NO_SCORES),
    (lambda head, *batches: batches, NO_SCORES),
    (lambda head, *batches: [head.replace("version 3", "version 2"), *batches], NO_SCORES),
    (lambda head, *batches: [head.replace('"weights"', '"waits"'), *batches], BEHIND),
    (lambda head, one, two, *more: [head, one, two[:40] + "\n", *more], f"{BEHIND} 1 batches: "),
    (lambda head, one, two, *_: [head, one, broken(two, "windows", 1)], f"{BEHIND} 1 batches: "),
    (lambda head, one, two, *_: [head, one, broken(two, "scores", "AAAA")], f"{BEHIND} 1 batches: "),
    (lambda head, *batches: [head, *batches, batches[-1]], BEHIND),
]


def test_a_broken_file_is_refused_and_left_alone(evaluate, refused, perplexity, path):
    evaluate("--save-logprobs", path)
    whole = lines(path)
    for breaks, said in BREAK:
        path.write_text("".join(breaks(*whole)))
        before = path.read_bytes()
        assert f"--resume {path} {said}" in refused(*perplexity, "--resume", path)
        assert path.read_bytes() == before


@pytest.mark.parametrize("fitting", [0, 2])
def test_a_disk_that_fills_up_keeps_the_results_so_far(evaluate, invoke, perplexity, path, same_scores, fitting):
    """The limit on the size of a file stands for the disk. What did fit is there to go on from, also in batches of
    another size; shown is also the batch that did not.
    """
    whole = evaluate("--save-logprobs", path)
    kept = lines(path)
    limit = len("".join(kept[: 1 + fitting])) + len(kept[1 + fitting]) // 2
    path.unlink()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        done = invoke(*perplexity, "--resume", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert done.exit_code == 2
    assert done.stderr == f"Error: cannot write {path}: {os.strerror(errno.EFBIG)}\n"
    shown, planned = 2 * (fitting + 1), whole["windows"]["planned"]
    assert done.stdout.endswith(
        f"Interrupted; the figures are of the {shown} of {planned} windows that were finished.\n"
    )
    before = path.read_bytes()
    resumed = evaluate("--resume", path)
    assert resumed["windows"]["resumed"] == 2 * fitting
    same_scores(resumed, whole)
    path.write_bytes(before)
    resumed = evaluate("--resume", path, "--batch-size", 1)
    assert [trial["windows"] for trial in resumed["trials"]][: fitting + 1] == [2] * fitting + [1]
    assert resumed["on"]["ppl"] == pytest.approx(whole["on"]["ppl"], rel=1e-6)
