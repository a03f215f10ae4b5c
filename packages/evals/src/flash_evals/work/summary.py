"""Computes the result of `perplexity` from its batches and, with --compare, a score file."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

import numpy as np

from flash_evals.results.arms import Flash, Measurement
from flash_evals.results.perplexity_result import (
    NAMES,
    Column,
    Compared,
    Name,
    Paired,
    Reading,
    Result,
    Together,
    Windows,
)
from flash_evals.work import scoring
from flash_evals.work.paired import Batch
from flash_evals.work.plan import Plan
from flash_evals.work.score_file import SCORED_ARE, Header, Kept, differences, windows_in


def result(
    header: Header, planned: Plan, windows: int, earlier: Sequence[Batch], batches: Sequence[Batch], other: Kept | None
) -> Result:
    """Sums up `batches`. `earlier`: the batches among them that --resume found. `other`: the --compare file, if any."""
    arms, trials = header.settings.arms, [batch.trial for batch in batches]
    tokens = np.concatenate([batch.scores for batch in batches])
    scores: dict[Name, np.ndarray] = {arm: tokens[arm] for arm in arms}
    took: dict[Name, list[Measurement]] = {arm: [trial[arm] for trial in trials] for arm in arms}
    finished, flash, compared, paired = windows_in(batches), Flash.sum(batch.flash for batch in batches), None, None
    if other:
        ends = accumulate(batch.trial.windows for batch in other.batches)
        # Takes the batches of the file up to the last window that this run has read.
        first = other.batches[: bisect_left(list(ends), finished) + 1]
        compared = _compared(other, [batch.trial for batch in first], header)
        scores[compared.column] = np.concatenate([batch.scores[compared.arm] for batch in first])[: len(tokens)]
        took[compared.column] = compared.trials
        if compared.column == "on":
            flash = Flash.sum(batch.flash for batch in first)
    names = [name for name in NAMES if name in scores]
    if len(names) == 2:
        one, two = (scores[name] for name in names)
        paired = Paired(
            (names[0], names[1]),
            *scoring.mean(two["nll"] - one["nll"]),
            max_abs_dlogit=float(tokens["dlogit"].max()),
            mean_kl=scoring.mean(tokens["kl"])[0],
            top1_agreement=float(scoring.top1_agrees(one["first"], two["first"]).mean()),
        )
    new = trials[len(earlier) :]
    of_ranks = [[trial for trial in new if trial.rank == rank] for rank in {trial.rank for trial in new}]
    speeds = {arm: [median(trial[arm].tokens_per_s for trial in of_rank) for of_rank in of_ranks] for arm in arms}
    words, n_bytes = planned.size_up_to(planned.windows[finished - 1])
    return Result(
        model=header.model,
        dataset=header.dataset,
        settings=header.settings,
        tokens=len(tokens),
        words=words,
        bytes=n_bytes,
        **{str(name): column(scores[name]["nll"], took[name], words, n_bytes) for name in names},
        paired=paired,
        compared=compared,
        flash=flash,
        trials=trials,
        ranks=Together(header.ranks, {arm: sum(of_arm) for arm, of_arm in speeds.items() if of_arm}),
        windows=Windows(windows, finished, windows_in(earlier)),
        interrupted=finished < windows,
        machine=header.machine,
    )


def _compared(other: Kept, trials: Sequence[Reading], header: Header) -> Compared:
    [live], theirs = header.settings.arms, other.header
    arm = next((name for name in theirs.settings.arms if name != live), live)
    return Compared(
        file=str(other.path),
        arm=arm,
        column="other" if arm == live else arm,
        differs_in=differences(theirs, header, lambda key: key not in (*SCORED_ARE, "arm", "max_windows")),
        model=theirs.model,
        batch_size=theirs.settings.batch_size,
        ranks=theirs.ranks,
        machine=theirs.machine,
        trials=[trial[arm] for trial in trials],
    )


def column(nll: np.ndarray, trials: Sequence[Measurement], words: int | None, n_bytes: int | None) -> Column:
    """Computes one arm's figures from the cost of each scored token and the number of words and bytes in their text.

    The token perplexity's standard error is the standard error of the mean cost, times the perplexity (delta method).
    """
    average, error = scoring.mean(nll)
    ppl, total = scoring.exp(average), average * len(nll)
    speed, memory = median(trial.tokens_per_s for trial in trials), max(trial.peak_memory_mb for trial in trials)
    found = Column(ppl=ppl, ppl_se=ppl * error, tokens_per_s=speed, peak_memory_mb=memory)
    if n_bytes:
        # There are no words if all tokens so far are white space.
        found.word_ppl = scoring.exp(total / words) if words else math.inf
        found.byte_ppl = scoring.exp(total / n_bytes)
        found.bits_per_byte = total / n_bytes / math.log(2)
    return found
