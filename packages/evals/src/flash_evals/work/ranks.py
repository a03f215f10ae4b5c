"""Lets several processes, called ranks, share one run. `mlx.launch -n N` starts them; otherwise there is one rank.

All ranks do the same steps in the same order, and exchange messages after each step. A rank that fails sends its error
in this exchange, because otherwise the others would wait for it forever. Only rank 0 prints and writes.
"""

import io
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, TypeVar

import mlx.core as mx
import msgspec
import numpy as np

from flash_evals.results.errors import EvalError, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Message(msgspec.Struct):
    value: bytes = b""  # encoded
    interrupted: bool = False
    left: str = ""  # why this rank has left the run; empty if it has not


class Ranks:
    """This process's rank, and the number of ranks. At the end of the `with` block, each rank waits for all ranks.

    If there are several ranks, Ctrl-C lets the running step finish and keeps the step's results. Then all ranks raise
    KeyboardInterrupt. A second Ctrl-C ends the process.
    """

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        self.rank, self.size = (group.rank(), group.size()) if group else (0, 1)
        self._interrupted = False  # in this rank
        self._stop = False  # whether any rank was interrupted; the same in all ranks

    def all(self, work: Callable[[], Result], of: type[Result]) -> list[Result]:
        """Runs the work in each rank. Returns all ranks' results, in the ranks' order, to each rank. `of` is the type
        of a result. It consists of Records, NumPy arrays and what msgspec knows.

        If another rank has left the run, raises EvalError with its reason. If any rank was interrupted before its
        previous call of all() ended, raises KeyboardInterrupt.
        """
        if self.size == 1:
            return [work()]
        if self._stop:
            raise KeyboardInterrupt
        told = self._exchange(_Message(_encode(work()), self._interrupted))
        for rank, message in enumerate(told):
            if message.left:
                raise EvalError(f"rank {rank}: {message.left}")
        self._stop = any(message.interrupted for message in told)
        return [_decode(message.value, of) for message in told]

    def agree(self, value: Any, what: str) -> None:
        """Raises an EvalError that names `what` if `value` is not the same in all ranks."""
        mine = _encode(value)
        for rank, other in enumerate(self.all(lambda: mine, bytes)):
            if other != mine:
                raise EvalError(f"rank {rank} differs from rank {self.rank} in {what}")

    def each(self, work: Callable[[Item], Result], items: Sequence[Item], of: type[Result]) -> list[Result]:
        """Rank n applies `work` to items[n] (at most one item for each rank). Every rank gets all results, in order."""
        mine = items[self.rank : self.rank + 1]
        told = self.all(lambda: [work(item) for item in mine], list[of])  # type: ignore[valid-type]
        return [result for results in told for result in results]

    def __enter__(self) -> "Ranks":
        if self.size > 1:
            signal.signal(signal.SIGINT, self._note_interrupt)
            # If another rank dies, mlx.launch sends SIGTERM. This rank then ends at once, without waiting for any rank.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self.size == 1:
            return
        goodbye = _Message(left=_said(error) if error else "its process has ended")
        while not all(message.left for message in self._exchange(goodbye)):
            pass
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.rank and isinstance(error, EvalError | KeyboardInterrupt):
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else EvalError.exit_code)  # rank 0 says why

    def _note_interrupt(self, _: int, __: FrameType | None) -> None:
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _exchange(self, message: _Message) -> list[_Message]:
        mine = np.frombuffer(_encode(message), np.uint8)
        lengths = np.array(mx.distributed.all_gather(mx.array([mine.size])))
        rows = mx.distributed.all_gather(mx.array(np.pad(mine, (0, lengths.max() - mine.size))[None]))
        return [_decode(row[:length].tobytes(), _Message) for row, length in zip(np.array(rows), lengths, strict=True)]


def _encode(value: object) -> bytes:
    def array(given: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.save(file, given, allow_pickle=False)
        return file.getvalue()

    return msgspec.msgpack.encode(value, enc_hook=array)


def _decode(data: bytes, of: type[Result]) -> Result:
    return msgspec.msgpack.decode(data, type=of, dec_hook=lambda _, array: np.load(io.BytesIO(array)))


def _said(error: BaseException) -> str:
    said = error.message if isinstance(error, EvalError) else f"{type(error).__name__}: {one_line(error)}"
    return said.encode(errors="replace").decode()  # a file's name may hold what UTF-8 cannot encode


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that all ranks run together. The command gets a Ranks as its argument `ranks`."""

    @wraps(command)
    def with_ranks(*args: Any, **others: Any) -> None:
        with Ranks(mx.distributed.init()) as ranks:
            command(*args, ranks=ranks, **others)

    return with_ranks
