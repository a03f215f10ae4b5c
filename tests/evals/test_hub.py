"""Models and texts come from the Hugging Face Hub or, if it does not answer, from its cache."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest
from flash_evals.results.errors import EvalError
from flash_evals.results.provenance import Part
from flash_evals.work import data
from huggingface_hub import HfApi, constants, errors

from tests.promises import promise

pytestmark = pytest.mark.slow("imports datasets for seconds")

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """The hub's address is one where nothing listens, and its cache is empty."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@promise("without a network and a cached file, a command names commands that work")
def test_no_network_and_nothing_cached(refused, text_file):
    works = {
        "--dataset wikitext": ("dataset Salesforce/wikitext", "--dataset FILE.txt"),
        "--dataset someone/text --dataset-revision v1": ("dataset someone/text at revision v1", "--dataset FILE.txt"),
        f"--dataset {text_file} --model someone/tiny": ("model someone/tiny", "--model FOLDER"),
    }
    for options, (what, option) in works.items():
        says = f"{what} is neither a local path nor in the cache, and the hub cannot be reached; without a network use"
        use = f"`flash-eval perplexity` or `flash-eval perplexity {option}`"
        assert refused("perplexity", *options.split()) == f"Error: {says} {use}"


def test_a_cached_model_needs_no_network(run_command, model_folder, tmp_path):
    """The result names the commit. Another revision is not in the cache."""
    cached = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(model_folder, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    for revision in ((), ("--revision", COMMIT)):
        result = run_command("perplexity", "--max-windows", 1, "--model", "someone/tiny", *revision)
        assert (result["model"]["name"], result["model"]["revision"]) == ("tiny", COMMIT)
    with pytest.raises(AssertionError, match="model someone/tiny at revision v1 is neither"):
        run_command("perplexity", "--model", "someone/tiny", "--revision", "v1")


@pytest.fixture
def text_on_the_hub(monkeypatch, tmp_path):
    """text_on_the_hub(commit): the hub answers with COMMIT, and the library `datasets` has read this commit."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text(json.dumps({"text": "A text."}) + "\n")
    own = datasets.load_dataset_builder

    def answers(commit):
        builder = own(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
        builder.hash = commit
        monkeypatch.setattr(datasets, "load_dataset_builder", Mock(return_value=builder))
        monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: SimpleNamespace(sha=COMMIT))

    return answers


def test_a_text_of_the_hub(text_on_the_hub):
    text_on_the_hub(COMMIT)
    text = data.load("someone/text", part=Part(revision="v1"))
    assert (text.documents, text.dataset.name, text.dataset.revision) == (["A text."], "someone/text test", COMMIT)
    assert datasets.load_dataset_builder.call_args.kwargs == {"revision": "v1"}


def test_another_commit_in_the_cache_is_refused(text_on_the_hub):
    """If the hub stops answering, `datasets` reads the newest commit in its cache, which may be another one."""
    text_on_the_hub(OTHER)
    with pytest.raises(EvalError, match=f"cannot read dataset someone/text: .* commit {COMMIT} is not in the cache"):
        data.load("someone/text")


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_the_hub_does_not_have(refused, monkeypatch, text_file, kind):
    error = errors.RevisionNotFoundError("404: no revision v9", response=Mock())
    monkeypatch.setattr(HfApi, "repo_info", Mock(side_effect=error))
    given = ("--dataset", text_file, "--model") if kind == "model" else ("--dataset",)
    assert refused("perplexity", *given, "someone/thing") == f"Error: cannot read {kind} someone/thing: {error}"
