"""Reads and writes the file with the scores of a `perplexity` run, for --resume and --compare.

Each line of the file is JSON. The first line is a Header, which says what was scored. Every other line has a batch of
windows, in the order of the plan, and is on disk before the next batch begins. Half a line at the end is ignored.
"""

import fcntl
import hashlib
import json
import os
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import to_builtins

from flash_evals.results.errors import EvalError
from flash_evals.results.perplexity_result import Settings
from flash_evals.results.provenance import Dataset, Machine, Model
from flash_evals.results.record import Count, Record
from flash_evals.work.models import LoadedModel, parameters
from flash_evals.work.paired import SCORED, Batch
from flash_evals.work.scoring import Window

FORMAT = "flash-eval perplexity, version 3"
BEGINS = f'{{"file":"{FORMAT}",'.encode()
# Two runs can be compared token by token only if they agree in the facts() of SCORED_ARE. A run with --resume may
# differ from the run that began the file only in the facts() of MAY_CHANGE.
SCORED_ARE = ("text", "tokens", "context", "stride", "scoring", "documents", "bos", "detokenised", "top1_tie")
MAY_CHANGE = ("batch_size", "ranks", "max_windows", "model", "python")
# Compressed scores take about ten bytes per token and arm, because most tokens have no ties.
ENCODER = msgspec.json.Encoder(enc_hook=lambda scores: zlib.compress(scores.tobytes()))
DECODER = msgspec.json.Decoder(Batch, dec_hook=lambda _, text: np.frombuffer(zlib.decompress(b64decode(text)), SCORED))


class Header(Record, tag_field="file", tag=FORMAT):
    """Everything on which the scores in a file depend."""

    tokens: str  # fingerprint of the token ids
    weights: str  # fingerprint_of_weights()
    model: Model
    dataset: Dataset
    settings: Settings
    ranks: Count
    machine: Machine

    def facts(self) -> dict[str, Any]:
        text = {"text": self.dataset.fingerprint.removeprefix("sha256:")[:16], "tokens": self.tokens}
        model = {"model": self.model.name, "dtype": self.model.dtype, "weights": self.weights, "ranks": self.ranks}
        machine = {key: getattr(self.machine, key) for key in ("processor", "device", "blas", "python")}
        return {**text, **to_builtins(self.settings), **model, **machine, **self.machine.versions}


def differences(theirs: Header, here: Header, matters: Callable[[str], bool]) -> list[str]:
    """Describes the facts that differ, such as `stride 12, this run has 24`. `matters` selects facts by name."""
    one, other = theirs.facts(), here.facts()
    found = [key for key in one | other if matters(key) and one.get(key) != other.get(key)]
    return [f"{key.replace('_', ' ')} {one.get(key)}, this run has {other.get(key)}" for key in found]


class Kept(NamedTuple):
    """The content of a score file."""

    path: Path
    header: Header
    batches: list[Batch]


def fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def fingerprint_of_weights(loaded: LoadedModel) -> str:
    """Hashes the config and each parameter's name, shape, dtype and sum of bit patterns."""
    said = json.dumps(loaded.config, sort_keys=True, default=str)
    for name, parameter in sorted(parameters(loaded.model).items()):
        bits = parameter.reshape(-1).view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[parameter.itemsize])
        said += f"{name} {parameter.shape} {parameter.dtype} {mx.sum(bits).item()}"
    return fingerprint(said.encode())


def windows_in(batches: Sequence[Batch]) -> int:
    return sum(batch.trial.windows for batch in batches)


def read(path: Path, here: Header, windows: Sequence[Window], at_least: int) -> Kept:
    """Reads the --compare file. Raises EvalError if the file cannot be read, is broken, differs from this run in
    SCORED_ARE, or has fewer than `at_least` windows.
    """
    with _failing(f"--compare cannot read {path}"):
        content = path.read_bytes()
    kept = _parsed(path, "--compare", content, here, windows)
    if (held := windows_in(kept.batches)) < at_least:
        raise EvalError(
            f"--compare {path} holds only {held:,} of the {at_least:,} windows: "
            f"finish that run with --resume, or give --max-windows {held}"
        )
    return kept


def _parsed(path: Path, option: str, content: bytes, here: Header, windows: Sequence[Window]) -> Kept:
    if not content.startswith(BEGINS) or b"\n" not in content:
        raise EvalError(f"{option} {path} is not a score file of {FORMAT}: write a new one with --save-logprobs")
    batches: list[Batch] = []
    try:
        first, *others = content.split(b"\n")[:-1]
        header = msgspec.json.decode(first, type=Header)
        compare = option == "--compare"
        wrong = differences(header, here, lambda key: key in SCORED_ARE if compare else key not in MAY_CHANGE)
        if wrong:
            raise EvalError(f"{option} {path} was written by a different run: {'; '.join(wrong)}")
        for line in others:
            batch = DECODER.decode(line)
            part, windows = windows[: batch.trial.windows], windows[batch.trial.windows :]
            for arm in header.settings.arms:
                batch.trial[arm]  # raises ValueError if that arm is missing
            if len(part) != batch.trial.windows or len(batch.scores) != sum(
                window.end + 1 - window.first_scored for window in part
            ):
                raise ValueError(f"{len(batch.scores)} scores do not fit {batch.trial.windows} windows")
            batches.append(batch)
    except (ValueError, zlib.error) as error:  # msgspec's errors are ValueErrors
        raise EvalError(f"{option} {path} is broken after {len(batches):,} batches: {error}") from error
    return Kept(path, header, batches)


@contextmanager
def appending(
    path: Path | None, here: Header, windows: Sequence[Window], *, resume: bool
) -> Iterator[tuple[list[Batch], Callable[[Batch], None]]]:
    """Yields the batches that a file has (none without `resume`), and a function that appends a batch.

    The function returns once the batch is on disk. Without a path, it saves nothing. Raises EvalError, and leaves the
    file unchanged, if the file cannot be written, is in use by another run, or is from a run with other settings.
    """
    if path is None:
        yield [], lambda _: None
        return
    option = "--resume" if resume else "--save-logprobs"

    def append(line: Header | Batch) -> None:
        data = ENCODER.encode(line) + b"\n"
        with _failing(f"cannot write {path}"):
            while data:
                data = data[file.write(data) :]
            os.fsync(file)

    with _failing(f"cannot write {path}"):
        file = path.open("ab+", buffering=0)  # a buffer would repeat its data after a failed write
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvalError(f"{option} {path}: another run is writing this file") from None
        content = path.read_bytes() if resume and path.is_file() else b""  # a device such as /dev/stdin may have no end
        end, batches = content.rfind(b"\n") + 1, []
        if end or not BEGINS.startswith(content[: len(BEGINS)]):
            batches = _parsed(path, option, content, here, windows).batches
        with _failing(f"cannot write {path}"):
            file.truncate(end)
        if not end:
            append(here)
        yield batches, append


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turns an OSError into an EvalError that begins with `what` and gives the reason."""
    try:
        yield
    except OSError as error:
        raise EvalError(f"{what}: {error.strerror}") from error
