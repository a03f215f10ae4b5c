"""Texts and models come from the Hugging Face Hub. Its real clients read from a local server or from their cache."""

import hashlib
import json

import pytest

from tests.evals.loopback_hub import Repo, dataset, serve
from tests.promises import promise

pytestmark = pytest.mark.slow("imports datasets and starts a server")

FIRST, SECOND = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
NOWHERE = "http://127.0.0.1:9"  # the discard port, on which nothing listens
NOT_CACHED = "is neither a local path nor in the cache, and the hub cannot be reached; "

ROWS = ["", " = Robert = \n", "", " He is an actor , and no page . \n", "", " = Castle = \n", " A second . \n"]
OLD_ROWS = ["", " = Robert = \n", "", " Robert is an actor . \n"]
LONG_ROWS = [" = Valkyria Chronicles III = \n", " Senjō no Valkyria 3 is a tactical role @-@ playing game . \n"]
ONLY = ["Only this . \n"]


def wikitext(rows):
    return dataset(
        {
            "wikitext-2-raw-v1/test": {"text": rows},
            "wikitext-2-raw-v1/validation": {"text": ONLY},
            "wikitext-103-raw-v1/test": {"text": LONG_ROWS},
            "numbers/test": {"n": [1, 2]},
        }
    )


def described(rows, config="wikitext-2-raw-v1", split="test", commit=SECOND):
    """Returns a result's description of these rows of WikiText. An empty row becomes a blank line, except the first."""
    text = "".join(row or " \n" for row in rows).removeprefix(" \n")
    return {
        "name": f"Salesforce/wikitext {config} {split}",
        "revision": commit,
        "fingerprint": "sha256:" + hashlib.sha256(text.encode()).hexdigest(),
        "documents": max(1, sum(row.startswith(" = ") for row in rows)),
        "words": len(text.split()),
        "bytes": len(text.encode()),
    }


@pytest.fixture
def folders(make_model, model_folder):
    """Two versions of a model, as {commit: folder}."""
    return {FIRST: make_model(hidden_size=64), SECOND: model_folder}


@pytest.fixture
def hub(folders):
    """A hub with a few lines of WikiText, a plain dataset and a model. WikiText and the model have two commits."""
    plain = {"test.jsonl": b'{"text": "A dataset of one configuration."}\n'}
    tiny = {commit: {file.name: file.read_bytes() for file in folder.iterdir()} for commit, folder in folders.items()}
    repos = {
        ("dataset", "Salesforce/wikitext"): Repo({FIRST: wikitext(OLD_ROWS), SECOND: wikitext(ROWS)}, {"v1": FIRST}),
        ("dataset", "someone/plain"): Repo({FIRST: plain}),
        ("dataset", "someone/gated"): Repo({FIRST: plain}, gated=True),
        ("model", "someone/tiny-qwen2"): Repo(tiny, {"v1": FIRST}),
        ("model", "someone/gated"): Repo(tiny, gated=True),
    }
    with serve(repos) as hub:
        yield hub


@pytest.fixture
def run(in_fresh_process, model_folder, tmp_path):
    """run(address, *options): runs `flash-eval perplexity` once for each of `options`, all in one process. `address` is
    the address of the hub. Returns a list with the result or the error line of each run.
    """
    always = ["perplexity", "--model", model_folder, "--context", 32, "-o", "json"]

    def result(outcome):
        if outcome.exit_code == 0:
            assert outcome.stderr == ""
            return json.loads(outcome.stdout)
        assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
        assert outcome.stderr.startswith("Error: ")
        return outcome.stderr

    def run(address, *options):
        commands = [[*always, *text.split()] for text in options]
        return list(map(result, in_fresh_process(*commands, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))))

    return run


@pytest.mark.slow("6 seconds")
def test_datasets(hub, run):
    """Options name a dataset, its configuration and split, and its revision, which is a branch, tag or commit."""
    new, old = described(ROWS), described(OLD_ROWS, commit=FIRST)
    long = described(LONG_ROWS, "wikitext-103-raw-v1")
    runs = {
        "wikitext": new,
        "Salesforce/wikitext --config wikitext-103-raw-v1": long,
        "wikitext --split validation": described(ONLY, split="validation"),
        "wikitext --dataset-revision main": new,
        f"wikitext --dataset-revision {SECOND}": new,
        "wikitext --dataset-revision v1": old,
        f"wikitext --dataset-revision {FIRST}": old,
        "someone/plain": {"name": "someone/plain test", "config": None, "revision": FIRST},
    }
    for result, expected in zip(run(hub.address, *(f"--dataset {text}" for text in runs)), runs.values(), strict=True):
        assert result["dataset"].items() >= expected.items()
        assert result["settings"]["detokenised"] is ("config" not in expected)


@pytest.mark.slow("11 seconds")
def test_revisions_of_a_model(hub, folders, run, text_file):
    """A revision of a model gives the same results from the hub, from the cache and from a folder with its files."""
    repo = f"--dataset {text_file} --model someone/tiny-qwen2"
    named = [f"{repo} --revision {revision}" for revision in ("main", SECOND, "v1", FIRST)]
    first, second = run(hub.address, *(f"--dataset {text_file} --model {folder}" for folder in folders.values()))
    assert first["off"]["ppl"] != second["off"]["ppl"]
    online = run(hub.address, repo)
    assert all(NOT_CACHED in line for line in run(NOWHERE, *named[2:]))
    online += run(hub.address, *named)
    for found in (online, run(NOWHERE, repo, *named)):
        for result, commit, local in zip(found, [SECOND] * 3 + [FIRST] * 2, [second] * 3 + [first] * 2, strict=True):
            assert result["model"].items() >= {"name": "tiny-qwen2", "revision": commit}.items()
            assert result["off"]["ppl"] == local["off"]["ppl"]
    assert hub.downloads["model.safetensors"] == 2


@pytest.mark.slow("3 seconds")
def test_what_the_hub_does_not_have(hub, run):
    says = {
        "--dataset wikitext --split nonsense": 'Unknown split "nonsense"',
        "--dataset wikitext --config nonsense": "BuilderConfig 'nonsense' not found",
        "--dataset wikitext --text-column page": "no column 'page'; its columns are: text",
        "--dataset wikitext --config numbers --text-column n": "holds int64, not text",
        "--dataset wikitext --dataset-revision v9": "has no branch, tag or commit 'v9'",
        "--dataset Salesforce/wikitext": "Config name is missing",
        "--dataset someone/nothing": "the hub shows you no dataset someone/nothing",
        "--dataset someone/gated": "is a gated dataset on the Hub. You must be authenticated",
        "--model someone/nothing": "the hub shows you no model someone/nothing",
        "--model someone/gated": "shows you no model someone/gated; if it is private, run: hf auth login",
        "--model someone/tiny-qwen2 --revision v9": "model someone/tiny-qwen2 on the hub has no branch, tag",
    }
    for line, message in zip(run(hub.address, *says), says.values(), strict=True):
        assert message in line


@promise("without a network and a cached file, a command names commands that work")
@pytest.mark.slow("2 seconds")
def test_no_network_and_nothing_cached(hub, run):
    """The error is one line, with two commands that need no network. The clients do not spend 30 s on retries."""
    hub.hangs_up = True
    dataset, model = "--dataset someone/text", "--model someone/tiny-qwen2"
    works = {
        "--dataset wikitext": ("dataset Salesforce/wikitext", "--dataset FILE.txt"),
        dataset: ("dataset someone/text", "--dataset FILE.txt"),
        f"{dataset} --dataset-revision v1": ("dataset someone/text at revision v1", "--dataset FILE.txt"),
        model: ("model someone/tiny-qwen2", "--model FOLDER"),
        f"{model} --revision {FIRST}": (f"model someone/tiny-qwen2 at revision {FIRST}", "--model FOLDER"),
    }
    for (what, option), line in zip(works.values(), run(hub.address, *works), strict=True):
        use = f"without a network use `flash-eval perplexity` or `flash-eval perplexity {option}`\n"
        assert line == f"Error: {what} {NOT_CACHED}{use}"
    # Each run made one request. The hub's client adds a request about "agent-harnesses", which does not count.
    assert sum("agent-harnesses" not in request for request in hub.requests) == len(works)
