"""The questions at the top of the report page. Each answer has a word such as "Yes", and a sentence per result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_evals.pages import perplexity_page, units
from flash_evals.pages.description import Comparison, Description, grouped
from flash_evals.pages.units import figure
from flash_evals.results import finetune_result, perplexity_result
from flash_evals.results.arms import ARMS
from flash_evals.results.claims import NOTHING, Ratio, times

NOT_MEASURED = "Not measured"
MLX = ("off", "mlx")  # names of MLX's own attention in results
IT_NEVER_RAN = "the patch never ran"

Says = list[tuple[Description, str]]  # results, each with the sentence that answers the question


@dataclass(frozen=True)
class Card:
    question: str
    word: str
    says: Says
    missing: str  # the command that can answer the question

    @property
    def commands(self) -> list[str]:
        """For each sentence in `says`, the command that wrote the result."""
        return [each.command for each, _ in self.says]


def cards(found: Sequence[Description]) -> list[Card]:
    return [
        Card("Same predictions?", *same_predictions(found), "perplexity"),
        Card("Faster?", *_compared(found, lambda each: each.speed, 1, "as fast", "slower"), "speed"),
        Card("Less memory?", *_compared(found, lambda each: each.memory, -1, "the memory", "more"), "speed"),
        Card("Does training fit?", *training_fits(found), "finetune"),
    ]


def same_predictions(found: Sequence[Description]) -> tuple[str, Says]:
    says: Says = []
    verdicts: list[bool | None] = []
    for each in found:
        result = each.result
        if isinstance(result, perplexity_result.Result) and result.paired and result.paired.of == ARMS:
            same, sentence = perplexity_page.predictions(result, result.paired) if each.ran else (None, IT_NEVER_RAN)
            verdicts.append(same)
            says.append((each, sentence))
    if len(set(verdicts)) > 1:
        return f"In {verdicts.count(True)} of {len(verdicts)} runs", says
    return ({True: "Yes", False: "No", None: "Not known"}[verdicts[0]] if verdicts else NOT_MEASURED), says


def _compared(
    found: Sequence[Description], ratio: Callable[[Comparison], Ratio], better: int, what: str, worse: str
) -> tuple[str, Says]:
    """Returns a word for all comparisons with MLX's own attention where flash ran, and a sentence per result."""
    compared = [each for each in found if each.comparisons]
    says = [(each, _sentence(each.comparisons, ratio, what) if each.ran else IT_NEVER_RAN) for each in compared]
    of_mlx = [ratio(one).sign for each in compared if each.ran for one in each.comparisons if one.against in MLX]
    signs = [sign * better for sign in of_mlx if sign is not None]
    yes, no = signs.count(1), signs.count(-1)
    if not signs:
        word = NOT_MEASURED
    elif yes == len(signs):
        word = "Yes"
    elif yes:
        word = f"In {yes} of {len(signs)} tests" + (f", {worse} in {no}" if no else "")
    else:
        word = "No" if no else "No difference"
    return word, says


def _sentence(comparisons: Sequence[Comparison], ratio: Callable[[Comparison], Ratio], what: str) -> str:
    """Sums up: `prompts 1.10x to 3.40x as fast, generation 0.98x as fast (no clear difference)`."""
    parts = []
    for (work, against), of_work in grouped(comparisons, lambda each: (each.work, each.against)).items():
        ratios = list(map(ratio, of_work))
        whom = "" if against == "off" else f" {'as' if what == 'as fast' else 'of'} {against}"
        level = sum(each.sign == 0 for each in ratios)
        where = f" in {level} of {len(ratios)}" if level < len(ratios) else ""
        overlap = f" ({NOTHING}{where})" if level else ""
        values = sorted(each.value for each in ratios if each.value is not None)
        ends = dict.fromkeys(times(value) for value in (*values[:1], *values[-1:]))
        parts.append(f"{work} {' to '.join(ends) or units.DASH} {what}{whom}{overlap}")
    return ", ".join(parts)


def training_fits(found: Sequence[Description]) -> tuple[str, Says]:
    """Returns an answer such as "Yes", and a sentence for each result. The sentence also names the skipped lengths,
    which do not fit into memory without the patch.
    """
    says: Says = []
    longest, fits = set(), True
    for each in found:
        if isinstance(each.result, finetune_result.Result):
            length = max(each.result.results, key=lambda length: length.seq_len)
            skipped = [f"skipped {length.reason}" for length in each.result.skipped]
            longest.add(length.seq_len)
            fits = fits and not skipped
            off, on = (figure(length[arm].peak_memory_mb, units.megabytes) for arm in ARMS)
            took = f"a step of {length.seq_len:,} tokens needed {off} with the patch off, {on} with the patch on"
            says.append((each, "; ".join([took, *skipped, *([] if each.ran else [IT_NEVER_RAN])])))
    if not longest or not fits:
        return "Not at every length" if longest else NOT_MEASURED, says
    return f"Yes, up to {longest.pop():,} tokens" if len(longest) == 1 else "Yes", says
