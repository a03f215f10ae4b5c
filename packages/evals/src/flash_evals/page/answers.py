"""The questions that people have, and what the result files say to each: a word, and a sentence for each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_evals import finetune_result, perplexity_result
from flash_evals.claims import NOTHING, Ratio, times
from flash_evals.measure import ARMS
from flash_evals.page import perplexity, units
from flash_evals.page.description import Comparison, Description
from flash_evals.page.html import Content, Html, tag
from flash_evals.page.model import grouped
from flash_evals.page.units import Cell, figure

NOT_MEASURED = "Not measured"
MLX = ("off", "mlx")  # what is MLX's own attention
NOT_EVERYWHERE = "Not at every length"
NEVER_RAN = "the patch never ran"


@dataclass(frozen=True)
class Answer:
    question: str
    word: str
    says: Sequence[tuple[Description, Content]]  # a sentence of each that has something to say
    missing: str  # the command that would


def answers(found: Sequence[Description]) -> list[Answer]:
    return [same_predictions(found), faster(found), less_memory(found), training_fits(found)]


def same_predictions(found: Sequence[Description]) -> Answer:
    says: list[tuple[Description, Content]] = []
    verdicts: list[bool | None] = []
    for each in found:
        result = each.result
        if isinstance(result, perplexity_result.Result) and result.paired and perplexity.has_both_arms(result):
            known = each.ran and perplexity.comparable(result, result.paired)
            verdicts.append(result.paired.same if known else None)
            unknown = "there are figures that are not known or not finite" if each.ran else NEVER_RAN
            says.append((each, ["top-1 differs ", perplexity.difference(result, result.paired)] if known else unknown))
    return Answer("Same predictions?", _of_all(verdicts), says, "perplexity")


def _of_all(verdicts: Sequence[bool | None]) -> str:
    if not verdicts:
        return NOT_MEASURED
    if len(set(verdicts)) > 1:
        return f"In {verdicts.count(True)} of {len(verdicts)} runs"
    return "Not known" if verdicts[0] is None else "Yes" if verdicts[0] else "No"


def faster(found: Sequence[Description]) -> Answer:
    return _compared(found, "Faster?", lambda each: each.speed, better=1, what="as fast", worse="slower")


def less_memory(found: Sequence[Description]) -> Answer:
    return _compared(found, "Less memory?", lambda each: each.memory, better=-1, what="the memory", worse="more")


def _compared(
    found: Sequence[Description],
    question: str,
    ratio: Callable[[Comparison], Ratio],
    better: int,
    what: str,
    worse: str,
) -> Answer:
    """The word is of the comparisons with MLX's own attention, where flash ran; the sentences are of all."""
    compared = [each for each in found if each.comparisons]
    says = [(each, _sentence(each.comparisons, ratio, what) if each.ran else NEVER_RAN) for each in compared]
    of_mlx = [ratio(one) for each in compared if each.ran for one in each.comparisons if one.against in MLX]
    signs = [each.sign * better for each in of_mlx if each.sign is not None]
    return Answer(question, _word(signs, worse), says, "speed")


def _word(signs: Sequence[int], worse: str) -> str:
    better, not_better, tests = signs.count(1), signs.count(-1), len(signs)
    if not tests:
        return NOT_MEASURED
    if better == tests:
        return "Yes"
    if better == 0:
        return "No" if not_better else "No difference"
    return f"In {better} of {tests} tests" + (f", {worse} in {not_better}" if not_better else "")


def _sentence(comparisons: Sequence[Comparison], ratio: Callable[[Comparison], Ratio], what: str) -> Content:
    """`prompts 1.10x to 3.40x as fast, generation 0.98x as fast (no clear difference)`."""
    parts: list[Content] = []
    for (work, against), of_work in grouped(comparisons, lambda each: (each.work, each.against)).items():
        ratios = list(map(ratio, of_work))
        whom = "" if against == "off" else f" {'as' if what == 'as fast' else 'of'} {against}"
        level = sum(each.sign == 0 for each in ratios)
        where = f" in {level} of {len(ratios)}" if level < len(ratios) else ""
        overlap = f" ({NOTHING}{where})" if level else ""
        values = sorted(each.value for each in ratios if each.value is not None)
        parts.append([", " if parts else "", f"{work} ", _range(values), f" {what}{whom}{overlap}"])
    return parts


def _range(ratios: Sequence[float]) -> Cell:
    if not ratios:
        return units.DASH
    low, high = figure(ratios[0], times), figure(ratios[-1], times)
    return low if low == high else [low, " to ", high]


def training_fits(found: Sequence[Description]) -> Answer:
    """A length that was skipped did not fit without the patch; whether it fits with it was not tried."""
    says: list[tuple[Description, Content]] = []
    words: set[str] = set()
    for each in found:
        if isinstance(each.result, finetune_result.Result):
            longest = max(each.result.results, key=lambda length: length.seq_len)
            skipped = "".join(f"; skipped {length.reason}" for length in each.result.skipped)
            words.add(NOT_EVERYWHERE if skipped else f"Yes, up to {longest.seq_len:,} tokens")
            off, on = (figure(longest[arm].peak_memory_mb, units.megabytes) for arm in ARMS)
            took = [f"a step of {longest.seq_len:,} tokens took ", off, " with the patch off, ", on, " with it on"]
            says.append((each, [*took, skipped, "" if each.ran else f"; {NEVER_RAN}"]))
    several = NOT_EVERYWHERE if NOT_EVERYWHERE in words else "Yes"
    word = NOT_MEASURED if not words else words.pop() if len(words) == 1 else several
    return Answer("Does training fit?", word, says, "finetune")


def card(answer: Answer, anchor: Callable[[Description], str]) -> Html:
    """A sentence names the command; and the title, where the command has several."""
    commands = [each.command for each, _ in answer.says]
    sentences = [
        tag(
            "li",
            tag("a", each.command, href=f"#{anchor(each)}"),
            f", {each.title}: " if commands.count(each.command) > 1 else ": ",
            says,
            ".",
        )
        for each, says in answer.says
    ] or [tag("li", "No file of ", tag("code", f"flash-eval {answer.missing}"), " is here.")]
    return tag(
        "section",
        tag("h2", answer.question),
        tag("p", answer.word, class_="answer"),
        tag("ul", sentences),
        class_="card",
    )
