"""What a perplexity is of: joined or separate documents, a BOS or none, detokenised or not; all of it named."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from flash_evals import models, paired, reading
from flash_evals.data import Text
from flash_evals.models import LoadedModel
from flash_evals.reading import Rules

Invoke = Callable[..., click.testing.Result]

DOCUMENTS = [
    "The lobster of the eastern Atlantic is blue; only cooking makes it “lobster red”.\n",
    "",
    "It weighs 5 – 6 kilograms, and carries its eggs for a year.",
    "Naïve readers take it for a crab — it is none.\n\n",
]
TOKENISED = ' = Lobster = \n \n It weighs 0 @.@ 7 – 2 @.@ 2 kg ( 1 @.@ 5 – 4 @.@ 9 lb ) , and is " lobster red " . \n'


def rules(**changed: Any) -> Rules:
    standard: dict[str, Any] = {
        "context": 24,
        "stride": None,
        "scoring": "rolling",
        "documents": "joined",
        "bos": "auto",
        "detokenise": None,
    }
    return Rules(**{**standard, **changed})


@pytest.fixture
def evaluate(invoke: Invoke, model_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command on these documents, and gives the result file and the page."""

    def run(documents: list[str], *arguments: object) -> dict[str, Any]:
        texts, out = tmp_path / "texts.jsonl", tmp_path / "out.json"
        texts.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        always = ("--model", model_folder, "--dataset", texts, "--context", 24)
        page = invoke("perplexity", *always, "--json", out, *arguments)
        assert (page.exit_code, page.stderr) == (0, ""), page.output
        return {**json.loads(out.read_text()), "page": page.stdout}

    return run


def cost(result: dict[str, Any]) -> float:
    """Of all tokens together."""
    total: float = math.log(result["off"]["ppl"]) * result["tokens"]
    return total


@pytest.mark.parametrize("bos", ["always", "never"])
def test_separate_documents_are_scored_as_if_there_were_no_others(
    evaluate: Callable[..., dict[str, Any]], bos: str
) -> None:
    together = evaluate(DOCUMENTS, "--documents", "separate", "--bos", bos, "--batch-size", 3)
    alone = [evaluate([document], "--bos", bos) for document in DOCUMENTS if document]
    for figure in ("tokens", "words", "bytes"):
        assert together[figure] == sum(result[figure] for result in alone)
    assert cost(together) == pytest.approx(sum(map(cost, alone)), rel=1e-6)
    assert together["settings"]["documents"] == "separate"
    assert ", documents one by one · " in together["page"]

    joined = evaluate(DOCUMENTS, "--documents", "joined", "--bos", bos)
    assert joined["bytes"] == together["bytes"] + len("\n\n") * 3
    assert joined["settings"]["documents"] == "joined"
    assert "one by one" not in joined["page"]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_padding_is_neither_scored_nor_counted(loaded: LoadedModel, batch_size: int) -> None:
    """The scores of windows of many lengths, each read alone: the batch changes them by no more than rounding."""
    read = reading.read(loaded, Text(DOCUMENTS, "some", "some"), rules(documents="separate", context=128))
    assert len({window.end - window.begin for window in read.plan}) > 2
    alone = list(paired.measured(loaded.model, read.ids, read.plan, 1))
    batches = list(paired.measured(loaded.model, read.ids, read.plan, batch_size))
    assert sum(b.tokens_read for b in batches) == sum(window.end - window.begin for window in read.plan)
    for arm in ("off", "on"):
        scores, expected = (np.concatenate([b.scores[arm].nll for b in some]) for some in (batches, alone))
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_a_document_of_one_token_is_left_out(evaluate: Callable[..., dict[str, Any]]) -> None:
    """There is nothing to predict it from. With a BOS there is."""
    without = evaluate(DOCUMENTS, "--documents", "separate", "--bos", "never")
    more = evaluate([*DOCUMENTS, "T"], "--documents", "separate", "--bos", "never")
    for figure in ("tokens", "words", "bytes"):
        assert more[figure] == without[figure]
    with_bos = evaluate([*DOCUMENTS, "T"], "--documents", "separate", "--bos", "always")
    assert with_bos["words"] == without["words"] + 1


@pytest.mark.parametrize(
    ("has_bos", "option", "named", "on_the_page"),
    [
        (False, "auto", None, "no BOS"),
        (True, "auto", "bos", "BOS"),
        (False, "always", "eos", "EOS as BOS"),
        (True, "always", "bos", "BOS"),
        (False, "never", None, "no BOS"),
        (True, "never", None, "no BOS"),
    ],
)
def test_bos(
    evaluate: Callable[..., dict[str, Any]],
    make_model: Callable[..., Path],
    has_bos: bool,
    option: str,
    named: str | None,
    on_the_page: str,
) -> None:
    """With one, the first token is scored too."""
    folder = make_model(bos=has_bos)
    tokens = len(models.load(str(folder)).tokenizer.encode(DOCUMENTS[0], add_special_tokens=False))
    result = evaluate(DOCUMENTS[:1], "--model", folder, "--bos", option)
    assert result["settings"]["bos"] == named
    assert result["tokens"] == tokens - (named is None)
    assert f"stride 24, {on_the_page} · " in result["page"]


def test_each_separate_document_has_its_own_bos(loaded: LoadedModel) -> None:
    read = reading.read(loaded, Text(DOCUMENTS, "some", "some"), rules(documents="separate", bos="always"))
    eos = loaded.tokenizer.eos_token_id
    assert [read.ids[window.begin] for window in read.plan if read.ids[window.begin] == eos] == [eos] * 3
    joined = reading.read(loaded, Text(DOCUMENTS, "some", "some"), rules(bos="always"))
    assert np.flatnonzero(joined.ids == eos).tolist() == [0]


def test_always_takes_a_token_to_put_there(
    refused: Callable[..., str], model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "eos_token": None}))
    line = refused("perplexity", "--model", folder, "--dataset", text_file, "--context", 24, "--bos", "always")
    assert line == "Error: --bos always: the tokenizer of model has neither a BOS nor an EOS"


def test_words_and_bytes_are_those_of_the_original(evaluate: Callable[..., dict[str, Any]]) -> None:
    read = evaluate([TOKENISED], "--detokenise")
    plain = evaluate([TOKENISED])
    assert read["settings"]["detokenised"] is True
    assert plain["settings"]["detokenised"] is False
    assert read["tokens"] < plain["tokens"]
    for result in (read, plain):
        assert (result["words"], result["bytes"]) == (len(TOKENISED.split()), len(TOKENISED.encode()))
        assert result["dataset"]["bytes"] == len(TOKENISED.encode())
        assert math.log(result["off"]["byte_ppl"]) == pytest.approx(cost(result) / len(TOKENISED.encode()))
    assert ", detokenised · " in read["page"]
    assert "detokenised" not in plain["page"]


@pytest.mark.parametrize(("option", "expected"), [(None, True), (True, True), (False, False)])
def test_wikitext_is_detokenised_unless_told_otherwise(
    loaded: LoadedModel, option: bool | None, expected: bool
) -> None:
    read = reading.read(loaded, Text([TOKENISED], "some", "some", tokenised=True), rules(detokenise=option))
    assert read.settings["detokenised"] is expected
    assert loaded.tokenizer.decode(read.ids.tolist()).count("@") == (0 if expected else 8)


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_of_a_part_the_words_that_were_scored_count(loaded: LoadedModel, documents: str) -> None:
    """Window by window to the end: the original words whose beginning was read."""
    text = Text([TOKENISED, TOKENISED[::-1], TOKENISED], "some", "some", separator="\n", tokenised=True)
    read = reading.read(loaded, text, rules(documents=documents, context=8))
    marks = str.maketrans("", "", " \n@")
    sizes = [read.size_up_to(window) for window in read.plan]
    for window, size in zip(read.plan, sizes, strict=True):
        # As many characters that no rule takes away as in what was read.
        seen = loaded.tokenizer.decode(read.ids[: window.end + 1].tolist())
        solid = len(re.sub("\ufffd+$", "–", seen).translate(marks))  # a character counts with its first byte
        original = text.text
        position = next(p for p in range(len(original) + 1) if len(original[:p].translate(marks)) >= solid)
        assert size.words == len(original[:position].split())
    assert sizes == sorted(sizes)
    separators = 2 if documents == "joined" else 0
    assert sizes[-1] == (3 * len(TOKENISED.split()), 3 * len(TOKENISED.encode()) + separators)


def test_half_windows_are_named_and_have_no_words(evaluate: Callable[..., dict[str, Any]]) -> None:
    result = evaluate(DOCUMENTS, "--scoring", "half", "--context", 20)
    chunks = result["windows"]["planned"]
    assert result["tokens"] == chunks * 9
    assert (result["words"], result["bytes"]) == (None, None)
    assert result["settings"]["scoring"] == "half"
    assert result["settings"]["stride"] is None
    for arm in ("off", "on"):
        assert [result[arm][figure] for figure in ("word_ppl", "byte_ppl", "bits_per_byte")] == [None] * 3
    assert "context 20, second half of each chunk scored, as llama-perplexity does, no BOS · " in result["page"]
    lines = [" ".join(line.split()) for line in result["page"].splitlines()]
    assert "word / byte perplexity – / – – / –" in lines
    assert "bits per byte – –" in lines
    assert evaluate(DOCUMENTS)["settings"]["scoring"] == "rolling"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scoring", "half", "--stride", "8"], "--stride has no meaning with --scoring half"),
        (["--scoring", "half", "--documents", "separate"], "--documents separate has no meaning with --scoring half"),
        (["--scoring", "half", "--context", "2"], "--scoring half takes a --context of at least 3, not 2"),
        (
            ["--scoring", "half", "--context", "40"],
            "--scoring half takes a --context of them, 40",
        ),
        (
            ["--documents", "separate"],
            "the longest document of short.txt has 1 tokens for this model",
        ),
    ],
)
def test_refused(
    refused: Callable[..., str], model_folder: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("T")
    assert says in refused("perplexity", "--model", model_folder, "--dataset", text, "--context", 24, *arguments)
