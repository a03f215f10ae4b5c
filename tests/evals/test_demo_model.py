"""The demo model in the package and the built-in text have the properties that the default commands need."""

from flash_evals.work.pydoc_text import HELD_OUT, documents


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
