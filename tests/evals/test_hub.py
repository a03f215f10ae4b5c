"""Text and models from the hub: a server on loopback that speaks its protocol to the real clients, and none at all."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from loopback_hub import Files, Hub, Repo, serve
from pyarrow import parquet

FIRST, SECOND = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens

ROWS = ["", " = Robert <unk> = \n", "", " Robert is an English film , television and theatre actor . \n"]
OLD_ROWS = ["", " = Robert = \n", "", " Robert is an actor . \n"]
LONG_ROWS = [" = Valkyria Chronicles III = \n", " Senjō no Valkyria 3 is a tactical role @-@ playing game . \n"]
WIKITEXT_CARD = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - split: test
    path: wikitext-2-raw-v1/test-*
  - split: validation
    path: wikitext-2-raw-v1/validation-*
- config_name: wikitext-103-raw-v1
  data_files:
  - split: test
    path: wikitext-103-raw-v1/test-*
- config_name: numbers
  data_files:
  - split: test
    path: numbers/test-*
---
"""


def as_parquet(columns: dict[str, list[object]]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


def wikitext(rows: list[str]) -> Files:
    return {
        "README.md": WIKITEXT_CARD,
        "wikitext-2-raw-v1/test-00000-of-00001.parquet": as_parquet({"text": rows}),
        "wikitext-2-raw-v1/validation-00000-of-00001.parquet": as_parquet({"text": ["Only this . \n"]}),
        "wikitext-103-raw-v1/test-00000-of-00001.parquet": as_parquet({"text": LONG_ROWS}),
        "numbers/test-00000-of-00001.parquet": as_parquet({"n": [1, 2]}),
    }


def text_of(rows: list[str]) -> str:
    """The lines of WikiText's file, less a blank start; on the hub a blank line is empty."""
    return "".join(row or " \n" for row in rows).removeprefix(" \n")


def fingerprint(rows: list[str]) -> str:
    return "sha256:" + hashlib.sha256(text_of(rows).encode()).hexdigest()


def files_of(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="session")
def models(make_model: Callable[..., Path], model_folder: Path) -> dict[str, Path]:
    """Two versions of one model."""
    return {FIRST: make_model(hidden_size=64), SECOND: model_folder}


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    """A hub with WikiText (a few lines of it), a plain dataset and a model; all with a past."""
    plain = {"test.jsonl": b'{"text": "A dataset of one configuration."}\n'}
    with serve(
        {
            ("dataset", "Salesforce/wikitext"): Repo(
                {FIRST: wikitext(OLD_ROWS), SECOND: wikitext(ROWS)}, tags={"v1": FIRST}
            ),
            ("dataset", "someone/plain"): Repo({FIRST: plain}),
            ("dataset", "someone/gated"): Repo({FIRST: plain}, gated=True),
            ("model", "someone/tiny-qwen2"): Repo(
                {commit: files_of(folder) for commit, folder in models.items()}, tags={"v1": FIRST}
            ),
            ("model", "someone/gated"): Repo({FIRST: files_of(models[FIRST])}, gated=True),
        }
    ) as hub:
        yield hub


@pytest.fixture
def run(in_fresh_process: Callable[..., list[Any]], model_folder: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    """`flash-eval perplexity ARGUMENTS` for each list of arguments, with a cache that lasts for the test."""

    def run(address: str, *runs: list[object]) -> list[Any]:
        always = ["perplexity", "--model", model_folder, "--context", 32]
        return in_fresh_process(*(always + run for run in runs), HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))

    return run


@pytest.fixture
def results(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What `--json` writes, of runs that must succeed."""

    def results(address: str, *runs: list[object]) -> list[Any]:
        outcomes = run(address, *([*arguments, "-o", "json"] for arguments in runs))
        assert [(outcome.exit_code, outcome.stderr) for outcome in outcomes] == [(0, "")] * len(outcomes)
        return [json.loads(outcome.stdout) for outcome in outcomes]

    return results


def refusals(outcomes: list[Any]) -> list[str]:
    for outcome in outcomes:
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert outcome.stderr.startswith("Error: ")
        assert outcome.stderr.count("\n") == 1
    return [outcome.stderr for outcome in outcomes]


WIKITEXTS = {
    "wikitext": ("wikitext-2-raw-v1", ROWS),
    "wikitext-2": ("wikitext-2-raw-v1", ROWS),
    "wikitext-103": ("wikitext-103-raw-v1", LONG_ROWS),
}


def test_wikitext(hub: Hub, results: Callable[..., list[Any]]) -> None:
    """From the hub, and then from the cache, with the hub gone: the same text, and the commit still known."""
    runs = [["--dataset", name] for name in WIKITEXTS]
    online, offline = results(hub.address, *runs), results(NOWHERE, *runs)
    for from_hub, from_cache, (config, rows) in zip(online, offline, WIKITEXTS.values(), strict=True):
        text = text_of(rows)
        expected = {
            "name": f"Salesforce/wikitext {config} test",
            "revision": SECOND,
            "fingerprint": fingerprint(rows),
            "documents": 1,
            "words": len(text.split()),
            "bytes": len(text.encode()),
        }
        assert from_hub["dataset"].items() >= expected.items()
        assert from_hub["settings"]["detokenised"]
        assert from_cache["dataset"] == from_hub["dataset"]
        assert from_cache["off"]["ppl"] == from_hub["off"]["ppl"]
    assert hub.downloads["test-00000-of-00001.parquet"] == 2  # one for each configuration


def test_split_and_config(hub: Hub, results: Callable[..., list[Any]]) -> None:
    validation, long, plain = results(
        hub.address,
        ["--dataset", "wikitext", "--split", "validation"],
        ["--dataset", "Salesforce/wikitext", "--config", "wikitext-103-raw-v1"],
        ["--dataset", "someone/plain"],
    )
    assert validation["dataset"]["fingerprint"] == fingerprint(["Only this . \n"])
    assert long["dataset"]["fingerprint"] == fingerprint(LONG_ROWS)
    assert plain["dataset"].items() >= {"name": "someone/plain test", "config": None, "revision": FIRST}.items()


def test_revisions_of_a_dataset(hub: Hub, results: Callable[..., list[Any]]) -> None:
    """A branch, a tag, a commit; without a network each is what it was, not what was read last."""
    runs = [["--dataset", "wikitext", "--dataset-revision", revision] for revision in ("main", SECOND, "v1", FIRST)]
    runs.insert(0, ["--dataset", "wikitext"])
    online, offline = results(hub.address, *runs), results(NOWHERE, *runs)
    for result, (commit, rows) in zip(online, [(SECOND, ROWS)] * 3 + [(FIRST, OLD_ROWS)] * 2, strict=True):
        assert result["dataset"]["revision"] == commit
        assert result["dataset"]["fingerprint"] == fingerprint(rows)
    assert [result["dataset"] for result in offline] == [result["dataset"] for result in online]


def test_revisions_of_a_model(
    hub: Hub, models: dict[str, Path], results: Callable[..., list[Any]], text_file: Path
) -> None:
    """Each has the figures of its folder, from the hub and then from the cache."""
    repo = ["--dataset", text_file, "--model", "someone/tiny-qwen2"]
    runs = [repo, *([*repo, "--revision", revision] for revision in ("main", SECOND, "v1", FIRST))]
    folders = [["--dataset", text_file, "--model", folder] for folder in models.values()]
    online, (*offline, first, second) = results(hub.address, *runs), results(NOWHERE, *runs, *folders)
    local = dict(zip(models, (first, second), strict=True))
    assert local[FIRST]["off"]["ppl"] != local[SECOND]["off"]["ppl"]
    for results_ in (online, offline):
        for result, commit in zip(results_, [SECOND] * 3 + [FIRST] * 2, strict=True):
            assert result["model"].items() >= {"name": "tiny-qwen2", "revision": commit}.items()
            assert result["off"]["ppl"] == local[commit]["off"]["ppl"]
    assert hub.downloads["model.safetensors"] == 2


def test_every_command_takes_a_revision_and_names_the_commit(
    hub: Hub, in_fresh_process: Callable[..., list[Any]], text_file: Path, tmp_path: Path
) -> None:
    model = ["--model", "someone/tiny-qwen2", "--revision", "v1"]
    outcomes = in_fresh_process(
        ["perplexity", *model, "--dataset", text_file, "--context", 32],
        ["speed", *model, "-p", 8, "-g", 0, "-d", 0, "-r", 1],
        ["finetune", *model, "-p", 8, "-r", 1],
        HF_ENDPOINT=hub.address,
        HF_HOME=str(tmp_path),
    )
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.stderr
        assert outcome.stdout.startswith(f"tiny-qwen2, {FIRST}, ")


def test_a_commit_that_is_in_the_cache_needs_no_hub(
    hub: Hub, results: Callable[..., list[Any]], text_file: Path
) -> None:
    runs = [
        ["--dataset", "wikitext", "--dataset-revision", FIRST],
        ["--dataset", "someone/plain", "--dataset-revision", FIRST],
        ["--dataset", text_file, "--model", "someone/tiny-qwen2", "--revision", FIRST],
    ]
    results(hub.address, *runs)
    hub.requests.clear()
    results(hub.address, *runs)
    assert hub.requests == []


def test_what_the_hub_does_not_have(hub: Hub, run: Callable[..., list[Any]]) -> None:
    nobody = "f" * 40
    says = {
        ("--dataset", "wikitext", "--split", "nonsense"): 'Unknown split "nonsense"',
        ("--dataset", "wikitext", "--config", "nonsense"): "BuilderConfig 'nonsense' not found",
        ("--dataset", "wikitext", "--text-column", "page"): "no column 'page'; it has: text",
        ("--dataset", "wikitext", "--config", "numbers", "--text-column", "n"): "holds int64, not text",
        ("--dataset", "wikitext", "--dataset-revision", "v9"): "has no branch, tag or commit 'v9'",
        ("--dataset", "wikitext", "--dataset-revision", nobody): f"has no branch, tag or commit '{nobody}'",
        ("--dataset", "Salesforce/wikitext"): "Config name is missing",
        ("--dataset", "someone/nothing"): "the hub has no dataset of that name; for a private one: hf auth login",
        ("--dataset", "someone/gated"): "log in and accept the terms of dataset someone/gated: hf auth login",
        ("--dataset", "some one"): "neither a local path nor a hub id",
        ("--model", "someone/nothing"): "the hub has no model of that name; for a private one: hf auth login",
        ("--model", "someone/gated"): "log in and accept the terms of model someone/gated: hf auth login",
        ("--model", "someone/tiny-qwen2", "--revision", "v9"): "model someone/tiny-qwen2 on the hub has no branch, tag",
        ("--model", "someone/tiny-qwen2", "--revision", nobody): f"has no branch, tag or commit '{nobody}'",
    }
    for line, message in zip(refusals(run(hub.address, *map(list, says))), says.values(), strict=True):
        assert message in line


def test_no_network_and_nothing_cached(hub: Hub, run: Callable[..., list[Any]]) -> None:
    """One line with two commands that need neither; without the clients' own retries, which take half a minute."""
    hub.hangs_up = True
    works = {
        ("--dataset", "wikitext"): ("dataset Salesforce/wikitext", "--dataset FILE.txt"),
        ("--dataset", "someone/text"): ("dataset someone/text", "--dataset FILE.txt"),
        ("--dataset", "someone/text", "--dataset-revision", "v1"): (
            "dataset someone/text at revision v1",
            "--dataset FILE.txt",
        ),
        ("--model", "someone/tiny-qwen2"): ("model someone/tiny-qwen2", "--model FOLDER"),
        ("--model", "someone/tiny-qwen2", "--revision", FIRST): (
            f"model someone/tiny-qwen2 at revision {FIRST}",
            "--model FOLDER",
        ),
    }
    for (what, option), line in zip(works.values(), refusals(run(hub.address, *map(list, works))), strict=True):
        assert line == (
            f"Error: {what} is neither a local path nor in the cache, and the hub cannot be reached; "
            f"without a network use `flash-eval perplexity` or `flash-eval perplexity {option}`\n"
        )
    assert sum("/revision/" in request for request in hub.requests) == len(works)


def test_another_revision_or_configuration_in_the_cache_is_no_answer(
    hub: Hub, results: Callable[..., list[Any]], run: Callable[..., list[Any]], text_file: Path
) -> None:
    model = ["--dataset", text_file, "--model", "someone/tiny-qwen2"]
    results(hub.address, ["--dataset", "wikitext-2"], ["--dataset", "wikitext-103"], model)
    *lines, unclear = refusals(
        run(
            NOWHERE,
            ["--dataset", "wikitext", "--dataset-revision", "v1"],
            ["--dataset", "wikitext", "--dataset-revision", FIRST],
            [*model, "--revision", "v1"],
            [*model, "--revision", FIRST],
            ["--dataset", "Salesforce/wikitext"],
        )
    )
    for line in lines:
        assert "nor in the cache, and the hub cannot be reached" in line
    assert "choose one by --config: wikitext-103-raw-v1, wikitext-2-raw-v1" in unclear


def test_a_transfer_that_breaks_off_once(hub: Hub, results: Callable[..., list[Any]]) -> None:
    """The client asks again, and nothing of the first half is left in the text or the model."""
    hub.breaks_off.update({"model.safetensors": 1, "test-00000-of-00001.parquet": 1})
    wikitext = ["--dataset", "wikitext"]
    broken, local = results(hub.address, [*wikitext, "--model", "someone/tiny-qwen2"], wikitext)
    assert hub.breaks_off.total() == 0
    assert broken["dataset"]["fingerprint"] == fingerprint(ROWS)
    assert broken["off"]["ppl"] == local["off"]["ppl"]


def test_a_transfer_that_breaks_off_for_good(
    hub: Hub, results: Callable[..., list[Any]], run: Callable[..., list[Any]], text_file: Path
) -> None:
    """One line; the half that came is not taken for the whole later, and with a better network all is well."""
    model, dataset = ["--dataset", text_file, "--model", "someone/tiny-qwen2"], ["--dataset", "wikitext"]
    hub.breaks_off.update({"model.safetensors": 99, "test-00000-of-00001.parquet": 99})
    of_model, of_dataset = refusals(run(hub.address, model, dataset))
    assert "cannot download model someone/tiny-qwen2: peer closed connection" in of_model
    assert "cannot read Salesforce/wikitext: peer closed connection" in of_dataset
    for line in refusals(run(NOWHERE, model, dataset)):
        assert "nor in the cache, and the hub cannot be reached" in line
    hub.breaks_off.clear()
    for result in results(hub.address, model, dataset):
        assert (result["model"]["revision"] or result["dataset"]["revision"]) == SECOND
