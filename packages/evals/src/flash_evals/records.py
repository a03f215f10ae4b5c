"""The file a run of `perplexity` keeps its scores in: to continue it, and to compare another run with it.

JSON lines. The first says what the scores are of; each other one holds a batch of windows, in the order of the plan,
and is on the disk before the next batch begins. A run that was killed may leave half a line at the end: it does not
count.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from flash_evals.errors import EvalError
from flash_evals.measure import Arm, Flash, Trial
from flash_evals.models import LoadedModel
from flash_evals.output import finite
from flash_evals.paired import Batch, Scores
from flash_evals.scoring import Window

KIND = {"file": "flash-eval perplexity", "version": 1}  # what the first line begins with
BEGINS = json.dumps(KIND).removesuffix("}").encode()


@dataclass(frozen=True)
class Header:
    """What scores are of. A file is of the same tokens if `text`, `tokens` and `scoring` are the same."""

    text: str  # fingerprint
    tokens: str  # fingerprint of the ids
    scoring: dict[str, Any]  # settings that change a score
    arms: list[Arm]
    weights: str  # fingerprint
    model: dict[str, Any]
    dataset: dict[str, Any]
    batch_size: int
    ranks: int
    machine: dict[str, Any]

    def __post_init__(self) -> None:
        """Raises TypeError or KeyError for what a broken file may hold."""
        self.of_the_run()
        self.of_the_conditions()

    def of_the_scores(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, **self.scoring}

    def of_the_run(self) -> dict[str, Any]:
        """What must not change between two parts of one run; the batch size and the ranks may."""
        machine = {key: self.machine[key] for key in ("processor", "device", "blas", "versions")}
        return {**self.of_the_scores(), "arm": "+".join(self.arms), "weights": self.weights, **machine}

    def of_the_conditions(self) -> dict[str, Any]:
        """What two runs that are compared may differ in."""
        model = {"model": self.model["name"], "dtype": self.model["dtype"], "weights": self.weights}
        machine = {key: self.machine[key] for key in ("processor", "device", "blas", "python", "versions")}
        return {**model, "batch_size": self.batch_size, "ranks": self.ranks, **machine}


def differences(theirs: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """`stride 12, here 24` for each entry that is not the same."""
    found = []
    for key in {**theirs, **here}:
        a, b = theirs.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b)
        elif a != b:
            found.append(f"{key.replace('_', ' ')} {_short(a)}, here {_short(b)}")
    return found


def _short(value: Any) -> Any:
    return value[:15] if isinstance(value, str) and value.startswith("sha256:") else value


def fingerprint_of_ids(ids: np.ndarray) -> str:
    return f"sha256:{hashlib.sha256(ids.astype('<i4').tobytes()).hexdigest()}"


def fingerprint_of_weights(loaded: LoadedModel) -> str:
    """Of the config and, for each parameter, of the sum of its bits: takes as long as reading them once."""
    digest = hashlib.sha256(json.dumps(loaded.config, sort_keys=True, default=str).encode())
    parameters: list[tuple[str, mx.array]] = tree_flatten(loaded.model.parameters())  # type: ignore[assignment]
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        bits = parameter.reshape(-1).view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[parameter.itemsize])
        digest.update(f"{name} {parameter.shape} {parameter.dtype} {mx.sum(bits).item()}".encode())
    return f"sha256:{digest.hexdigest()}"


class Kept(NamedTuple):
    """What a file holds."""

    path: Path
    header: Header
    batches: list[Batch]


def windows(batches: Sequence[Batch]) -> int:
    return sum(batch.windows for batch in batches)


def read(path: Path, here: Header, plan: Sequence[Window], at_least: int) -> Kept:
    """The file to --compare with, which holds the first windows of the plan, and not too few of them.

    Raises EvalError: not such a file, other tokens, another text, other scoring.
    """
    option = "--compare"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvalError(f"{option} cannot read {path}: {error.strerror}") from error
    kept = _parsed(path, option, _whole_lines(content), here, plan)
    if (held := windows(kept.batches)) < at_least:
        raise EvalError(
            f"{option} {path} holds {held:,} of the {at_least:,} windows: "
            f"finish it with --resume, or take --max-windows {held}"
        )
    return kept


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _parsed(path: Path, option: str, lines: bytes, here: Header, plan: Sequence[Window]) -> Kept:
    if not lines.startswith(BEGINS):
        raise EvalError(f"{option} {path} is not a file of flash-eval perplexity's scores")
    first, *others = lines.splitlines()
    number, done = 1, 0
    try:
        described = json.loads(first)
        header = Header(**{key: value for key, value in described.items() if key not in KIND})
        if wrong := differences(header.of_the_scores(), here.of_the_scores()):
            raise EvalError(f"{option} {path} is of something else: {'; '.join(wrong)}")
        if header.arms not in (["off"], ["on"], ["off", "on"]):
            raise ValueError(f"arms {header.arms}")
        kept = Kept(path, header, [])
        for line in others:
            number += 1
            kept.batches.append(_batch(json.loads(line), header.arms, plan, done))
            done += kept.batches[-1].windows
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EvalError(f"{option} {path} is broken in line {number}: {error!r}") from error
    return kept


@contextmanager
def appending(
    path: Path | None, here: Header, plan: Sequence[Window], *, resume: bool
) -> Iterator[tuple[list[Batch], Callable[[Batch], None]]]:
    """The batches that a file holds, none if this is not to `resume`, and how to append one behind them.

    An appended batch is on the disk. Without a path nothing is kept. Raises EvalError, with the file as it was: it
    cannot be written, another run is writing it, it is of another run.
    """
    if path is None:
        yield [], lambda _: None
        return
    option = "--resume" if resume else "--save-logprobs"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise EvalError(f"{option} cannot write {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvalError(f"{option} {path}: another run is writing it") from None
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)  # not a device
        content = path.read_bytes() if regular and resume else b""
        whole = _whole_lines(content)
        batches: list[Batch] = []
        if whole or not BEGINS.startswith(content[: len(BEGINS)]):
            kept = _parsed(path, option, whole, here, plan)
            if wrong := differences(kept.header.of_the_run(), here.of_the_run()):
                raise EvalError(f"{option} {path} is of another run: {'; '.join(wrong)}")
            batches = kept.batches
        if regular:
            os.ftruncate(descriptor, len(whole))
            os.lseek(descriptor, 0, os.SEEK_END)
        if not whole:
            _write(path, descriptor, {**KIND, **vars(here)})
        yield batches, lambda batch: _write(path, descriptor, _described(batch))
    finally:
        os.close(descriptor)


def _write(path: Path, descriptor: int, line: dict[str, Any]) -> None:
    """Not through a buffer, which would come back to what the disk did not take."""
    data = json.dumps(finite(line), ensure_ascii=False).encode() + b"\n"
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)
    except OSError as error:
        raise EvalError(f"cannot write {path}: {error.strerror}") from error


def _described(batch: Batch) -> dict[str, Any]:
    return {
        "windows": batch.windows,
        "tokens": batch.tokens_read,
        "rank": batch.rank,
        "order": batch.order,
        **{
            name: {
                "seconds": trial.seconds,
                "peak_memory": trial.peak_memory,
                "nll": _numbers(batch.scores[name].nll),
                "top1": batch.scores[name].top1.tolist(),
                "ties": batch.scores[name].ties.tolist(),
            }
            for name, trial in batch.trials.items()
        },
        "kl": None if batch.kl is None else _numbers(batch.kl),
        "max_abs_dlogit": batch.max_abs_dlogit,
        "flash": batch.flash.describe(),
    }


def _numbers(values: np.ndarray) -> list[float]:
    """float32 with the digits it takes to get them back, and no more."""
    return [float(text) for text in values.astype(str)]


def _batch(line: dict[str, Any], arms: Sequence[Arm], plan: Sequence[Window], done: int) -> Batch:
    """`done` windows into the plan. Raises ValueError, TypeError or KeyError for what `_described` cannot write."""
    part = plan[done : done + line["windows"]]
    if len(part) != line["windows"] or not part:
        raise ValueError(f"{line['windows']} windows, {len(plan) - done} are left")
    tokens = sum(window.end + 1 - window.first_scored for window in part)
    if sorted(line["order"]) != sorted(arms):
        raise ValueError(f"arms {line['order']}")
    scores: dict[Arm, Scores] = {}
    trials: dict[Arm, Trial] = {}
    for name in arms:
        held = line[name]
        ties = np.array(held["ties"], np.int32).reshape(-1, 2)
        scores[name] = Scores(np.array(held["nll"], np.float32), np.array(held["top1"], np.int32), ties)
        trials[name] = Trial(float(held["seconds"]), int(held["peak_memory"]))
        if scores[name].nll.shape != (tokens,) or scores[name].top1.shape != (tokens,):
            raise ValueError(f"not {tokens} tokens")
        if ties.size and not 0 <= ties[:, 0].min() <= ties[:, 0].max() < tokens:
            raise ValueError("ties of tokens that are not there")
    kl, dlogit = None, None
    if len(arms) > 1:
        kl = np.array(line["kl"], np.float32)
        dlogit = np.nan if line["max_abs_dlogit"] is None else float(line["max_abs_dlogit"])
        if kl.shape != (tokens,):
            raise ValueError(f"not {tokens} tokens")
    flash = Flash.of(line["flash"])
    order = tuple(line["order"])
    return Batch(len(part), int(line["tokens"]), int(line["rank"]), order, trials, scores, kl, dlogit, flash)
