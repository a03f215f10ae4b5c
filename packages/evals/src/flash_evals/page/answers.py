"""The questions that people have, and what the result files say to each: a word, and a sentence for each run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_evals.claims import NOTHING, Ratio, times
from flash_evals.page.html import Content, Html, figure, tag
from flash_evals.page.run import MLX, Comparison, Run, Training

NOT_MEASURED = "Not measured"


@dataclass(frozen=True)
class Answer:
    question: str
    word: str
    says: Sequence[tuple[Run, Content]]  # a sentence of each run that has something to say
    missing: str  # the command that would


def answers(runs: Sequence[Run]) -> list[Answer]:
    return [same_predictions(runs), faster(runs), less_memory(runs), training_fits(runs)]


def same_predictions(runs: Sequence[Run]) -> Answer:
    says: list[tuple[Run, Content]] = []
    verdicts: list[bool | None] = []
    for run in runs:
        if run.predictions is not None:
            says.append((run, run.predictions.says if run.ran else "the patch never ran"))
            verdicts.append(run.predictions.same if run.ran else None)
    return Answer("Same predictions?", _of_all(verdicts), says, "perplexity")


def _of_all(verdicts: Sequence[bool | None]) -> str:
    if not verdicts:
        return NOT_MEASURED
    if None in verdicts and len(set(verdicts)) == 1:
        return "Not known"
    if len(set(verdicts)) == 1:
        return "Yes" if verdicts[0] else "No"
    return f"In {verdicts.count(True)} of {len(verdicts)} runs"


def faster(runs: Sequence[Run]) -> Answer:
    return _compared(runs, "Faster?", lambda each: each.speed, better=1, what="as fast", worse="slower")


def less_memory(runs: Sequence[Run]) -> Answer:
    return _compared(runs, "Less memory?", lambda each: each.memory, better=-1, what="the memory", worse="more")


def _compared(
    runs: Sequence[Run], question: str, ratio: Callable[[Comparison], Ratio], better: int, what: str, worse: str
) -> Answer:
    """The word is of the comparisons with MLX's own attention, where flash ran; the sentences are of all."""
    says: list[tuple[Run, Content]] = []
    signs: list[int] = []
    for run in runs:
        if run.comparisons and not run.ran:
            says.append((run, "the patch never ran: both columns are MLX's own attention"))
        elif run.comparisons:
            says.append((run, _sentence(run.comparisons, ratio, what)))
            of_mlx = [ratio(each).sign for each in run.comparisons if each.against in MLX]
            signs += [sign * better for sign in of_mlx if sign is not None]
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
    groups: dict[tuple[str, str], list[Ratio]] = {}
    for each in comparisons:
        groups.setdefault((each.work, each.against), []).append(ratio(each))
    parts: list[Content] = []
    for (work, against), ratios in groups.items():
        whom = "" if against == "off" else f" {'as' if what == 'as fast' else 'of'} {against}"
        level = sum(each.sign == 0 for each in ratios)
        where = f" in {level} of {len(ratios)}" if level < len(ratios) else ""
        overlap = f" ({NOTHING}{where})" if level else ""
        values = sorted(each.value for each in ratios if each.value is not None)
        parts.append([", " if parts else "", f"{work} ", _range(values), f" {what}{whom}{overlap}"])
    return parts


def _range(ratios: Sequence[float]) -> Content:
    if not ratios:
        return figure(None, times)
    low, high = figure(ratios[0], times), figure(ratios[-1], times)
    return low if times(ratios[0]) == times(ratios[-1]) else [low, " to ", high]


def training_fits(runs: Sequence[Run]) -> Answer:
    """A length that was skipped did not fit without the patch; whether it fits with it was not tried."""
    says: list[tuple[Run, Content]] = []
    training = [(run, run.training) for run in runs if run.training]
    for run, trained in training:
        also = "".join(f"; skipped {reason}" for reason in trained.skipped)
        also += "" if run.ran else "; the patch never ran"
        says.append((run, [trained.says, also]))
    return Answer("Does training fit?", _fits([trained for _, trained in training]), says, "finetune")


def _fits(training: Sequence[Training]) -> str:
    if not training:
        return NOT_MEASURED
    if any(trained.skipped for trained in training):
        return "Not at every length"
    longest = {trained.longest for trained in training}
    return f"Yes, up to {longest.pop():,} tokens" if len(longest) == 1 else "Yes"


def card(answer: Answer, anchor: Callable[[Run], str]) -> Html:
    """A sentence names the command; and the run, where the command has several."""
    commands = [run.command for run, _ in answer.says]
    sentences = [
        tag(
            "li",
            tag("a", run.command, href=f"#{anchor(run)}"),
            f", {run.title}: " if commands.count(run.command) > 1 else ": ",
            says,
            ".",
        )
        for run, says in answer.says
    ] or [tag("li", "No file of ", tag("code", f"flash-eval {answer.missing}"), " is here.")]
    return tag(
        "section",
        tag("h2", answer.question),
        tag("p", answer.word, class_="answer"),
        tag("ul", sentences),
        class_="card",
    )
