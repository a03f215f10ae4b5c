"""`flash-eval perplexity` can put a BOS before a text, and can detokenise the text. The result names both choices."""

import re
from dataclasses import replace

import pytest
from flash_evals.work import models, plan
from flash_evals.work.data import Text
from flash_evals.work.plan import Rules

TOKENISED = ' = Lobster = \n \n It weighs 0 @.@ 7 – 2 @.@ 2 kg ( 1 @.@ 5 – 4 @.@ 9 lb ) , and is " lobster red " . \n'
STANDARD = Rules(24, None, "rolling", "joined", "auto", None)


@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize(
    ("has_bos", "option", "named", "on_the_page"),
    [
        (True, "auto", "bos", "BOS"),
        (False, "always", "eos", "EOS as BOS"),
        (True, "never", None, "no BOS"),
    ],
)
def test_bos(run_command, make_model, text, has_bos, option, named, on_the_page):
    """After a BOS, the text's first token is scored, too."""
    folder = make_model(bos=has_bos)
    tokens = len(models.load(str(folder)).tokenizer.encode(text, add_special_tokens=False))
    result = run_command("perplexity", "--model", folder, "--bos", option)
    assert result["settings"]["bos"] == named
    assert result["tokens"] == tokens - (named is None)
    assert f"stride 24, {on_the_page} · " in result["page"]


def test_words_and_bytes_are_those_of_the_original(run_command, tmp_path):
    (tmp_path / "text.txt").write_text(TOKENISED)
    result = run_command("perplexity", "--dataset", tmp_path / "text.txt", "--detokenise")
    assert (result["words"], result["bytes"]) == (len(TOKENISED.split()), len(TOKENISED.encode()))
    assert result["settings"]["detokenised"] is True
    assert "no BOS, detokenised · " in result["page"]


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_of_a_part_the_words_that_were_scored_count(loaded, documents):
    """size_up_to() counts a word of the original text if the model has read the word's beginning."""
    originals = [TOKENISED, TOKENISED[::-1], f"{TOKENISED} "]
    joined = "\n".join(originals)
    text = Text.of(originals, "some", separator="\n", tokenised=True)
    read = plan.make(loaded, text, replace(STANDARD, documents=documents, context=8))
    sizes = [read.size_up_to(window) for window in read.windows]
    # ends[n - 1] is the position in `joined` just after the n-th character that the detokeniser keeps.
    ends = [n for n, character in enumerate(joined, 1) if character not in " \n@"]
    for window, (words, _) in zip(read.windows, sizes, strict=True):
        seen = loaded.tokenizer.decode(read.ids[: window.end + 1].tolist())
        # If only some bytes of the last character have been read, the character counts, too.
        solid = sum(character not in " \n@" for character in re.sub("\ufffd+$", "–", seen))
        assert words == len(joined[: ends[solid - 1]].split())
    assert sizes == sorted(sizes)
    spaces = 3 if documents == "joined" else 1
    assert sizes[-1] == (3 * len(TOKENISED.split()), 3 * len(TOKENISED.encode()) + spaces)
