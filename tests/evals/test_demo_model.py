"""The demo model in the package and the built-in text have the properties that the default commands need."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from flash_evals.work.models import DEMO_MODEL
from flash_evals.work.pydoc_text import HELD_OUT, documents
from mlx_lm.utils import load
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def loaded():
    return load(str(DEMO_MODEL))


def test_the_text_is_split_by_whole_topics_and_nothing_held_out_is_learned():
    train, heldout = documents("train"), documents("heldout")
    assert all([*train, *heldout])
    assert 0 < len(heldout) <= len(HELD_OUT) < len(train)
    assert 0.07 < sum(map(len, heldout)) / sum(map(len, train + heldout)) < 0.11
    # Topics share some headings and phrases, so only sequences of 12 words are compared.
    trained, held_out = (
        {tuple(words[i : i + 12]) for words in map(str.split, texts) for i in range(len(words) - 11)}
        for texts in (train, heldout)
    )
    assert len(held_out & trained) / len(held_out) < 0.005


TEXTS = [
    "",
    "  leading and trailing  tabs\tand\r\nboth\n\n\nline ends\n",
    "def f(x):\n        return x  # eight spaces, don't won't it's 1234567890 ?!... a.b,c",
    "Straße, naïve, Ελλάδα, 漢字, العربية 👩‍👩‍👧‍👦 🇪🇺 \u00a0\u200b\ufeff \x00\x01\x7f",
]


def test_the_tokenizer_gives_back_every_text(loaded):
    """transformers loads tokenizer.json as its own Qwen2Tokenizer, which must give the same tokens as the file."""
    _, tokenizer = loaded
    file = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for text in (*TEXTS, *documents("train"), *documents("heldout")):
        ids = tokenizer.encode(text)
        assert ids == file.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert 0 not in ids  # nothing is added: no BOS, no EOS
    assert tokenizer.encode("a<|endoftext|>b")[1] == 0
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"  # composes characters, as Qwen2's tokenizer does


def test_attention_is_used(loaded):
    """The model predicts better with more context. A model that ignored its context would not test attention."""
    model, tokenizer = loaded
    long = [text for text in documents("heldout") if len(text) > 2000][:5]
    windows = mx.array([tokenizer.encode(text)[200:329] for text in long])
    # Predicts each of the last 64 tokens twice: from all earlier tokens of the window, and from one earlier token.
    pairs = mx.stack([windows[:, -65:-1], windows[:, -64:]], axis=-1).reshape(-1, 2)
    whole, short = (
        nn.losses.cross_entropy(model(tokens[:, :-1])[:, -scored:], tokens[:, -scored:], reduction="mean").item()
        for tokens, scored in ((windows, 64), (pairs, 1))
    )
    assert whole < short - 0.5
