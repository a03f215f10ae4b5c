"""`--resume` continues a stopped run from its file. Nothing is lost, and nothing counts twice."""

import errno
import fcntl
import os
import resource

import pytest
from flash_evals.work import machine, paired
from msgspec.structs import replace

from tests.promises import promise

COMMAND = ("perplexity", "--batch-size", 2)


@pytest.fixture
def path(tmp_path):
    """The path of the file that is resumed."""
    return tmp_path / "run.jsonl"


def lines(path):
    return path.read_text().splitlines(keepends=True)


@promise("a run that is stopped and resumed ends with the same scores")
@pytest.mark.rotate(1, default=7)
@pytest.mark.parametrize(("whole", "half"), [(0, 0), (0, 5), (0, 300), (1, 0), (1, 20), (2, 20), (4, 0)])
def test_it_goes_on_behind_what_the_file_holds(run_command, path, same_scores, monkeypatch, whole, half):
    """The file has `whole` lines, then `half` characters of an incomplete line, which is ignored. Each line except the
    first holds a batch.
    """
    at_once = run_command(*COMMAND, "--save-logprobs", path)
    held, batches = lines(path), max(0, whole - 1)
    path.write_text("".join(held[:whole]) + held[whole][:half])
    resumed = run_command(*COMMAND, "--resume", path)
    same_scores(resumed, at_once)
    assert resumed["trials"][:batches] == at_once["trials"][:batches]
    assert len(resumed["trials"]) == len(at_once["trials"])
    assert resumed["windows"]["resumed"] == 2 * batches
    said = f"{2 * batches} windows are from an earlier run that this one resumed.\n"
    assert (said in resumed["page"]) is (batches > 0)

    # The file now holds a complete run. Resuming that run shows its results, and measures nothing.
    monkeypatch.setattr(paired, "run", None)
    again = run_command(*COMMAND, "--resume", path)
    same_scores(again, at_once)
    assert again["trials"] == resumed["trials"]
    assert again["ranks"] == {"size": 1, "tokens_per_s": {}}  # this run has read no tokens


def test_the_file_of_another_run_is_refused(run_command, refused, perplexity, path, monkeypatch, make_model):
    """A file must hold the scores of one run. Models with the same name and shape are told apart by their weights."""
    described = machine.describe()
    run_command(*COMMAND, "--resume", path, "--max-windows", 4)
    before, model = path.read_bytes(), make_model(rope_theta=100.0)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"--resume {path}: another run is writing this file" in refused(*perplexity, "--resume", path)

    def says(said, *arguments):
        assert f"--resume {path} {said}" in refused(*perplexity, "--resume", path, *arguments)

    says("was written by a different run: stride 24, this run has 12", "--stride", 12)
    says("was written by a different run: arm both, this run has on", "--arm", "on")
    says("was written by a different run: precision input, this run has float32", "--precision", "float32")
    says("holds 4 windows, more than --max-windows 2", "--max-windows", 2)
    says("was written by a different run: weights ", "--model", model)
    monkeypatch.setattr(machine, "describe", lambda: replace(described, versions={**described.versions, "mlx": "9.9"}))
    says(f"was written by a different run: mlx {described.versions['mlx']}, this run has 9.9")
    assert path.read_bytes() == before


def test_a_batch_is_on_the_disk_before_the_next_begins(run_command, path, monkeypatch):
    measure, on_disk, seen = paired._measure, [], []
    monkeypatch.setattr(os, "fsync", lambda _: on_disk.append(len(lines(path))))
    monkeypatch.setattr(paired, "_measure", lambda *a, **others: seen.append(on_disk[-1]) or measure(*a, **others))
    batches = len(run_command(*COMMAND, "--resume", path)["trials"])
    assert seen == [1, *range(1, 1 + batches)]  # at the warm-up, only the header is on the disk


NO_SCORE_FILE = "is not a score file of flash-eval perplexity, version 3: write a new one with --save-logprobs"
# (number of a line, the text to replace there, its replacement, the error)
BREAK = [
    (0, "version 3", "version 2", NO_SCORE_FILE),
    (0, '"weights"', '"waits"', "is broken after 0 batches: "),
    (1, "\n", "\n\n", "is broken after 1 batches: "),
    (2, '"flash"', '"flash', "is broken after 1 batches: "),
    (2, '"off":{', '"of":{', "is broken after 1 batches: a trial lacks the figures of patch off"),
    (2, '"windows":2', '"windows":1', "is broken after 1 batches: "),
    (2, '"scores":"', '"scores":"AAAA', "is broken after 1 batches: "),
]


@pytest.mark.slow("3 seconds")
def test_a_broken_file_is_refused_and_left_alone(run_command, refused, perplexity, path):
    run_command(*COMMAND, "--save-logprobs", path)
    whole, texts = lines(path), {"no line": NO_SCORE_FILE}
    for number, old, new, said in BREAK:
        assert old in whole[number]
        broken = whole[number].replace(old, new)
        texts["".join([*whole[:number], broken, *whole[number + 1 :]])] = said
    for text, said in texts.items():
        path.write_text(text)
        assert f"--resume {path} {said}" in refused(*perplexity, "--resume", path)
        assert path.read_text() == text


@promise("a full disk is reported and loses no results")
@pytest.mark.slow("9 seconds")
@pytest.mark.parametrize("fitting", [0, 2])
def test_a_disk_that_fills_up_keeps_the_results_so_far(run_command, invoke, perplexity, path, fitting):
    """A limit on the file's size stands for the full disk. The page includes the batch that did not fit into the file.
    A later run continues after the batches in the file, even with another batch size.
    """
    whole = run_command(*COMMAND, "--save-logprobs", path)
    kept = lines(path)
    path.unlink()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    fits = len("".join(kept[: 1 + fitting])) + len(kept[1 + fitting]) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (fits, most))
    try:
        done = invoke(*perplexity, "--resume", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (done.exit_code, done.stderr) == (2, f"Error: cannot write {path}: {os.strerror(errno.EFBIG)}\n")
    shown = f"{2 * (fitting + 1)} of {whole['windows']['planned']} windows"
    assert done.stdout.endswith(f"The run was interrupted: the figures are of the {shown} that were finished.\n")
    resumed = run_command(*COMMAND, "--resume", path, "--batch-size", 1)
    assert resumed["windows"]["resumed"] == 2 * fitting
    assert [trial["windows"] for trial in resumed["trials"]][: fitting + 1] == [2] * fitting + [1]
    assert resumed["on"]["ppl"] == pytest.approx(whole["on"]["ppl"], rel=1e-6)
