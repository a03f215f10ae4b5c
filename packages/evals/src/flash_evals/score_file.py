"""The file a run of `perplexity` keeps its scores in: to continue it, and to compare another run with it.

JSON lines. The first says what the scores are of; each other one holds a batch of windows, in the order of the plan,
and is on the disk before the next batch begins. A run that was killed may leave half a line at the end: it does not
count.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import to_builtins

from flash_evals import plan
from flash_evals.data import Dataset
from flash_evals.errors import EvalError
from flash_evals.machine import Machine
from flash_evals.measure import Arm
from flash_evals.models import LoadedModel, Model, parameters
from flash_evals.paired import Batch
from flash_evals.record import Count, Record
from flash_evals.scoring import Window

VERSION = 2  # of the format
BEGINS = b'{"file":"flash-eval perplexity",'


class Versioned(Record, tag_field="file", tag="flash-eval perplexity"):
    version: int = VERSION


class Header(Versioned, kw_only=True):
    """What scores are of. A file is of the same tokens if `text`, `tokens` and `scoring` are the same."""

    text: str  # fingerprint
    tokens: str  # fingerprint of the ids
    scoring: plan.Settings  # what changes a score
    arms: list[Arm]
    weights: str  # fingerprint
    model: Model
    dataset: Dataset
    batch_size: Count
    ranks: Count
    machine: Machine

    def of_the_scores(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens, **to_builtins(self.scoring)}

    def of_the_run(self) -> dict[str, Any]:
        """What must not change between two parts of one run; the batch size and the ranks may."""
        machine = {key: getattr(self.machine, key) for key in ("processor", "device", "blas", "versions")}
        return {**self.of_the_scores(), "arm": "+".join(self.arms), "weights": self.weights, **machine}

    def of_the_conditions(self) -> dict[str, Any]:
        """What two runs that are compared may differ in."""
        model = {"model": self.model.name, "dtype": self.model.dtype, "weights": self.weights}
        machine = {key: getattr(self.machine, key) for key in ("processor", "device", "blas", "python", "versions")}
        return {**model, "batch_size": self.batch_size, "ranks": self.ranks, **machine}


def _as_list(array: np.ndarray) -> list[float]:
    """float32 with the digits it takes to get them back, and no more."""
    return [float(text) for text in array.astype(str)] if array.dtype == np.float32 else array.tolist()


ENCODER = msgspec.json.Encoder(enc_hook=_as_list)
DECODER = msgspec.json.Decoder(Batch, dec_hook=lambda _, values: np.array(values, np.float64))  # null is NaN


def _require(batch: Batch, arms: Sequence[Arm], windows: Sequence[Window]) -> None:
    """Raises ValueError if the batch is not of these arms and the first of these windows."""
    trial, scores = batch.trial, batch.scores.values()
    part = windows[: trial.windows]
    if len(part) != trial.windows or not part:
        raise ValueError(f"{trial.windows} windows, {len(windows)} are left")
    if not sorted(trial.order) == sorted(batch.scores) == sorted(arms) or (batch.kl is None) is (len(arms) > 1):
        raise ValueError(f"arms {trial.order}")
    for name in arms:
        trial[name]  # raises ValueError if it is not there
    tokens = sum(window.end + 1 - window.first_scored for window in part)
    arrays = [array for of_arm in scores for array in (of_arm.nll, of_arm.top1)]
    if any(array.shape != (tokens,) for array in (*arrays, *([] if batch.kl is None else [batch.kl]))):
        raise ValueError(f"not {tokens} tokens")
    if any(not 0 <= token < tokens for of_arm in scores for token in of_arm.ties[:, 0]):
        raise ValueError("ties of tokens that are not there")


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
    for name, parameter in sorted(parameters(loaded.model).items()):
        bits = parameter.reshape(-1).view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[parameter.itemsize])
        digest.update(f"{name} {parameter.shape} {parameter.dtype} {mx.sum(bits).item()}".encode())
    return f"sha256:{digest.hexdigest()}"


class Kept(NamedTuple):
    """What a file holds."""

    path: Path
    header: Header
    batches: list[Batch]


def windows_in(batches: Sequence[Batch]) -> int:
    return sum(batch.trial.windows for batch in batches)


def read(path: Path, here: Header, windows: Sequence[Window], at_least: int) -> Kept:
    """The file to --compare with, which holds the first of these windows, and not too few of them.

    Raises EvalError: not such a file, other tokens, another text, other scoring.
    """
    option = "--compare"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvalError(f"{option} cannot read {path}: {error.strerror}") from error
    kept = _parsed(path, option, _whole_lines(content), here, windows)
    if (held := windows_in(kept.batches)) < at_least:
        raise EvalError(
            f"{option} {path} holds {held:,} of the {at_least:,} windows: "
            f"finish it with --resume, or take --max-windows {held}"
        )
    return kept


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _parsed(path: Path, option: str, lines: bytes, here: Header, windows: Sequence[Window]) -> Kept:
    if not lines.startswith(BEGINS):
        raise EvalError(f"{option} {path} is not a file of flash-eval perplexity's scores")
    number, done = 1, 0
    try:
        first, *others = lines.splitlines()
        if (found := msgspec.json.decode(first, type=Versioned).version) != VERSION:
            raise EvalError(f"{option} {path} is a score file of version {found}, expected {VERSION}: write it anew")
        header = msgspec.json.decode(first, type=Header)
        if wrong := differences(header.of_the_scores(), here.of_the_scores()):
            raise EvalError(f"{option} {path} is of something else: {'; '.join(wrong)}")
        if header.arms not in (["off"], ["on"], ["off", "on"]):
            raise ValueError(f"arms {header.arms}")
        kept = Kept(path, header, [])
        for line in others:
            number += 1
            batch = DECODER.decode(line)
            _require(batch, header.arms, windows[done:])
            kept.batches.append(batch)
            done += batch.trial.windows
    except ValueError as error:  # msgspec's are, too
        raise EvalError(f"{option} {path} is broken in line {number}: {error}") from error
    return kept


@contextmanager
def appending(
    path: Path | None, here: Header, windows: Sequence[Window], *, resume: bool
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
        file = path.open("ab+", buffering=0)  # a buffer would come back to what the disk did not take
    except OSError as error:
        raise EvalError(f"{option} cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvalError(f"{option} {path}: another run is writing it") from None
        regular = path.is_file()  # not a device
        content = path.read_bytes() if regular and resume else b""
        whole = _whole_lines(content)
        batches: list[Batch] = []
        if whole or not BEGINS.startswith(content[: len(BEGINS)]):
            _, header, batches = _parsed(path, option, whole, here, windows)
            if wrong := differences(header.of_the_run(), here.of_the_run()):
                raise EvalError(f"{option} {path} is of another run: {'; '.join(wrong)}")
        if regular:
            file.truncate(len(whole))
        if not whole:
            _write(path, file, regular, here)
        yield batches, lambda batch: _write(path, file, regular, batch)


def _write(path: Path, file: FileIO, regular: bool, line: Header | Batch) -> None:
    data = ENCODER.encode(line) + b"\n"
    try:
        while data:
            data = data[file.write(data) :]
        if regular:
            os.fsync(file)
    except OSError as error:
        raise EvalError(f"cannot write {path}: {error.strerror}") from error
