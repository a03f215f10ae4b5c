"""Tests how WikiText is detokenised and cut into pages, and original_length(), which counts original characters."""

import pytest
from flash_evals.work import wikitext
from hypothesis import given
from hypothesis import strategies as st

PAGE = (
    " = Homarus gammarus = \n \n It grows to 60 cm ( 24 in ) , and 5 @.@ 5 – 6 kilograms . \n \n = = Names = = \n \n"
    " It is \" lobster red \" only when cooked : the lobster 's own colour is blue ; its readers ' is N today . \n"
)
PLAIN = (
    " = Homarus gammarus =\n\nIt grows to 60 cm (24 in), and 5.5 – 6 kilograms.\n\n== Names ==\n\n"
    "It is \"lobster red\" only when cooked: the lobster's own colour is blue; its readers' is 1 today.\n"
)


DETOKENISED = {
    "red @-@ tipped": "red-tipped",
    "1 @,@ 234 @.@ 5 kg": "1,234.5 kg",
    "one , two ; three : four . five ! six ? seven": "one, two; three: four. five! six? seven",
    "at the end .": "at the end .",  # a mark loses its space only if another space follows it
    "( 24 in ) [ sic ] { x }": "(24 in) [sic] {x}",
    "( a (": "( a (",
    "the ' crusher ' claw": "the 'crusher' claw",
    "the readers ' choice": "the readers' choice",
    "= = = Claws = = =": "=== Claws ===",
    "= = = = Left = = = =": "==== Left ====",
    "20 ° C": "20°C",
    "N lobsters": "N lobsters",
    "user@example.org @ home": "user@example.org @ home",
    "": "",
    PAGE: PLAIN,
}


@pytest.mark.parametrize("tokenised", DETOKENISED)
def test_detokenised(tokenised):
    assert wikitext.detokenised(tokenised) == DETOKENISED[tokenised]


def test_a_quote_without_its_partner_stays_on_its_page():
    pages = ' = One = \n a " b\n = Two = \n the " crusher " claw'
    assert wikitext.detokenised(pages) == ' = One =\na " b\n = Two =\nthe "crusher" claw'


def test_pages_are_the_lines_of_the_file_between_two_headings():
    """pages() joins the hub's rows to the pages of lm-evaluation-harness. A section's heading begins no page."""
    one = ["", " = One = \n", "", " Text . \n", "", " = = Section = = \n", " More . \n", ""]
    two = [" = Two = \n", "", " End . \n"]
    first, second = wikitext.pages(one + two)
    assert first == " = One = \n \n Text . \n \n = = Section = = \n More . \n "
    assert second == " = Two = \n \n End . \n"
    assert wikitext.pages(["", ""]) == []
    for line in (" = One = ", " = One = Two = ", " = = One = = ", " = One ", " = One = = ", " = = ", " x = 1 "):
        is_heading = line in (" = One = ", " = One = Two = ")
        assert len(wikitext.pages(["before\n", f"{line}\n"])) == 1 + is_heading


# Texts that consist of the patterns of the rules. Several rules may apply to the same place.
TEXTS = st.lists(
    st.sampled_from([*" @-,.:;!?()[]{}\"'=°\nsNa1é", " @-@ ", " @,@ ", " , ", " N ", " 's", "\n = a = \n"]), max_size=40
).map("".join)


@given(TEXTS)
def test_what_is_read_stands_for_a_part_of_the_original(original):
    """For each prefix of the detokenised text, original_length() finds the prefix of the original that it comes from.
    The two prefixes differ only in characters that the rules remove or replace. Their last characters correspond.
    """
    read = wikitext.detokenised(original)

    def kept(text):
        return "".join(c for c in text if not c.isspace() and c != "@").replace("N", "1")

    before = 0
    for end in range(1, len(read) + 1):
        length = wikitext.original_length(original, read[:end])
        assert kept(original[:length]) == kept(read[:end])
        assert original[length - 1] == read[end - 1] or (original[length - 1], read[end - 1]) == ("N", "1")
        assert length > before
        before = length
