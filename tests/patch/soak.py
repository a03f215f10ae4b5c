"""Mixed work, the patch going in and out at random, for as long as you like: `python tests/patch/soak.py --minutes 30`.

One process generates, scores text and takes training steps, each with the patch off and on, in turns that a seed
decides. On is any of the ways to switch on; sometimes the work is another thread's, sometimes a bad call or a Ctrl-C
comes in between. After each round what must hold is checked, and what the process occupies is noted. The first thing
that does not hold ends the run, with exit code 1. Ctrl-C ends it early and reports what was seen so far.
"""

import _thread
import contextlib
import gc
import importlib
import json
import os
import platform
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import flashattn_core
import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import numpy as np
from flash_evals import machine, output
from flash_evals.measure import ARMS
from mlx_lm.generate import generation_stream
from soak_work import OTHER_TYPES, Broken, Kinds, Result, Work, difference

MB = 1e6

# --- switching on ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_enable(_: list[nn.Module]) -> Iterator[None]:
    flash.enable()
    try:
        yield
    finally:
        flash.disable()


@contextlib.contextmanager
def by_enable_strict(_: list[nn.Module]) -> Iterator[None]:
    flash.enable("qwen2")  # the second replaces the first
    flash.enable(strict=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(flash.FlashNeverRanError):  # a Ctrl-C may come first
            flash.disable()
        raise
    flash.disable()


@contextlib.contextmanager
def by_model_type(of: list[nn.Module]) -> Iterator[None]:
    flash.enable(["qwen2", *(model.model_type for model in of)])
    try:
        yield
    finally:
        flash.disable()


def by_enabled_block(_: list[nn.Module]) -> contextlib.AbstractContextManager[None]:
    return flash.enabled()


@contextlib.contextmanager
def by_nested_blocks(_: list[nn.Module]) -> Iterator[None]:
    with flash.enabled(), flash.enabled("gemma2"), flash.enabled(strict=True):
        yield


@contextlib.contextmanager
def by_patch_model(of: list[nn.Module]) -> Iterator[None]:
    for model in of:
        flash.patch_model(model)
    try:
        yield
    finally:
        for model in of:
            flash.unpatch_model(model)


WAYS = {
    "enable()": by_enable,
    "enable(strict=True)": by_enable_strict,
    "enable(model types)": by_model_type,
    "enabled() block": by_enabled_block,
    "nested blocks": by_nested_blocks,
    "patch_model()": by_patch_model,
}


# --- in between -----------------------------------------------------------------------------------------------------


def bad_call(rng: random.Random) -> None:
    """Something that must be refused, and that nothing may remember."""
    q, k = mx.zeros((1, 8, 4, 16)), mx.zeros((1, 3, 4, 16))
    bad: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: flashattn_core.flash_attention(q, k, k)),
        (ValueError, lambda: flashattn_core.flash_attention(q, q, q, mask=mx.zeros((3, 5)) > 0)),
        (ValueError, lambda: flash.enable("no such type")),
        (TypeError, lambda: flash.patch_model("no model")),  # type: ignore[arg-type]
        (ZeroDivisionError, lambda: _fails_in_a_block()),
    ]
    error, call = rng.choice(bad)
    try:
        call()
    except error:
        return
    raise Broken(f"a bad call is not refused with {error.__name__}")


def _fails_in_a_block() -> None:
    with flash.enabled(strict=True):
        raise ZeroDivisionError


class ControlC:
    """A Ctrl-C after some seconds, unless the block is over by then."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._press)
        self.pressed = False

    def _press(self) -> None:
        self.pressed = True
        _thread.interrupt_main()

    def __enter__(self) -> "ControlC":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()


@contextlib.contextmanager
def arrival(name: str) -> Iterator[None]:
    """The module imported again while the patch is on; the one that was there is put back at the end."""
    package, _, stem = name.rpartition(".")
    there = sys.modules.pop(name)
    try:
        importlib.import_module(name)
        yield
    finally:
        sys.modules[name] = there
        setattr(sys.modules[package], stem, there)


@contextlib.contextmanager
def another_thread_switches() -> Iterator[None]:
    """The patch goes in and out all the time, by a thread of its own."""
    done = threading.Event()

    def switch() -> None:
        while not done.is_set():
            with flash.enabled():
                done.wait(0.002)
            done.wait(0.002)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- what must hold -------------------------------------------------------------------------------------------------


def is_ours(value: object) -> bool:
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__module__", None), type(value).__module__, code and code.co_filename)
    return any("mlxlm_flash_patch" in str(name) for name in names)


class Own:
    """What mlx-lm's modules and classes hold without the patch, object by object, and where imports are looked for."""

    def __init__(self) -> None:
        self.finders = list(sys.meta_path)
        self.held = {
            (id(owner), attribute): (owner, value)
            for owner in self._owners()
            for attribute, value in vars(owner).items()
        }

    def check(self) -> None:
        """Raises Broken where something else is now. Modules that have come since must hold nothing of the patch."""
        if sys.meta_path != self.finders:
            raise Broken(f"sys.meta_path is {sys.meta_path}")
        for owner in self._owners():
            name = getattr(owner, "__qualname__", owner.__name__)
            for attribute, value in vars(owner).items():
                if is_ours(value):
                    raise Broken(f"{name}.{attribute} is the patch's")
                _, before = self.held.get((id(owner), attribute), (owner, value))
                is_submodule = value is sys.modules.get(f"{name}.{attribute}")  # may be the one that has arrived
                if value is not before and not is_submodule:
                    raise Broken(f"{name}.{attribute} is another object than before: {value}, not {before}")

    def _owners(self) -> Iterator[Any]:
        yield mx.fast
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "mlx_lm":
                yield module
                yield from (c for c in list(vars(module).values()) if isinstance(c, type) and c.__module__ == name)


def check_is_off(own: Own, classes: list[tuple[nn.Module, type]]) -> None:
    status = flash.status()
    if status.enabled or status.patched or status.instances or status.foreign:
        raise Broken(f"after switching off: {status}")
    if any(type(module) is not own_class for module, own_class in classes):
        raise Broken("a model has other classes than before patch_model()")
    own.check()


# --- what the process occupies --------------------------------------------------------------------------------------

GROWTH = {  # what is measured, in which unit; how much of it 1,000 rounds may add; and how much a shorter run may
    "resident memory": ("MB", 1.0, 4.0),  # the C library and MLX keep some of what is freed
    "MLX, active": ("MB", 0.1, 0.1),
    "MLX, freed and kept": ("MB", 1.0, 4.0),
    "Python objects": ("", 100.0, 500.0),
    "threads": ("", 0.1, 1.0),
    "file descriptors": ("", 0.1, 1.0),
}


def occupied() -> dict[str, float]:
    """After what is garbage has been given back; what MLX keeps of it for later, before."""
    gc.collect()
    kept = mx.get_cache_memory()
    mx.clear_cache()
    return {
        "resident memory": _resident() / MB,
        "MLX, active": mx.get_active_memory() / MB,
        "MLX, freed and kept": kept / MB,
        "Python objects": len(gc.get_objects()),
        "threads": _entries("/proc/self/task", threading.active_count()),
        "file descriptors": _entries("/proc/self/fd", 0) or _entries("/dev/fd", 0),
    }


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # macOS: the highest so far, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _entries(folder: str, otherwise: int) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return otherwise


@dataclass(frozen=True)
class Growth:
    """A straight line through what was measured after the first quarter of the rounds."""

    rounds: int
    first: float
    last: float
    per_1000: float
    error: float  # of per_1000, one standard error

    @classmethod
    def of(cls, values: Sequence[float]) -> "Growth | None":
        """None of fewer than ten rounds."""
        some = np.array(values[len(values) // 4 :], float)
        if len(some) < 10:
            return None
        x = np.arange(len(some)) - (len(some) - 1) / 2
        slope = float((x * some).sum() / (x * x).sum())
        rest = some - some.mean() - slope * x
        error = float(np.sqrt((rest * rest).sum() / (len(some) - 2) / (x * x).sum()))
        return cls(len(some), float(some[0]), float(some[-1]), slope * 1000, error * 1000)


# --- the run --------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the rounds so far have come to."""

    rounds: int = 0
    work: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    between: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # kind of work -> largest relative difference
    near_ties: Counter[str] = field(default_factory=Counter)
    occupied: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GROWTH})


class Soak:
    """A run that can be watched: `round()` after `round()`, and what was seen."""

    def __init__(self, seed: int, other_types: Sequence[str] = OTHER_TYPES) -> None:
        flash.disable()
        self.rng = random.Random(seed)
        self.of = Kinds(other_types)
        self.kinds = self.of.all()
        self.thread = ThreadPoolExecutor(1)  # one for all rounds: MLX keeps a thread for each that generates
        self.seen = Seen()
        for kind in self.kinds.values():  # what is made at first use, is made
            work = kind(random.Random(0))
            work.run(work.models())
            self.thread.submit(work.run, work.models()).result()
        self.own = Own()
        for way in WAYS.values():
            with way([self.of.demo.model]):
                work = self.of.perplexity(random.Random(0))
                work.run(work.models())
            self.own.check()
        gc.collect()
        gc.freeze()  # later collections, and counts of objects, are of what the rounds make

    def round(self) -> None:
        """One piece of work, patch off and on; then the checks. Raises Broken."""
        rng, seen = self.rng, self.seen
        kind, way = rng.choice(list(self.kinds)), rng.choice(list(WAYS))
        make = random.Random(rng.random())
        off_first, in_thread = rng.random() < 0.5, rng.random() < 0.2
        between = rng.choice(["", "", "", "bad call", "Ctrl-C", "import", "switched by another thread"])
        work = self.kinds[kind](make)

        results: dict[str, Result] = {}
        if between == "Ctrl-C":
            self._interrupted(work, way, rng.uniform(0, 0.3))
        for arm in ARMS if off_first else ARMS[::-1]:
            of = work.models()
            run = self._elsewhere(work.run) if in_thread else work.run
            results[arm] = self._off(run, of) if arm == "off" else self._on(run, of, way, between, rng)
        try:
            worst, tie = difference(results["off"], results["on"], work.tolerance)
        except Broken as broken:
            raise Broken(f"{kind}: {broken}") from None
        seen.rounds += 1
        seen.work[kind] += 1
        seen.ways[way] += 1
        seen.between.update([between or "nothing", *(["in a second thread"] if in_thread else [])])
        seen.near_ties[kind] += tie
        seen.worst[kind] = max(seen.worst.get(kind, 0.0), worst)
        for name, value in occupied().items():
            seen.occupied[name].append(value)

    def _elsewhere(self, run: Callable[[list[nn.Module]], Result]) -> Callable[[list[nn.Module]], Result]:
        def elsewhere(of: list[nn.Module]) -> Result:
            answer: Future[Result] = self.thread.submit(lambda: _waited_for(run(of)))
            return answer.result()

        return elsewhere

    def _off(self, run: Callable[[list[nn.Module]], Result], of: list[nn.Module]) -> Result:
        before = flashattn_core.stats()
        result = _waited_for(run(of))
        if ran := Counter(flashattn_core.stats()) - Counter(before):
            raise Broken(f"with the patch off, {dict(ran)} ran")
        return result

    def _on(
        self, run: Callable[[list[nn.Module]], Result], of: list[nn.Module], way: str, between: str, rng: random.Random
    ) -> Result:
        classes = [(module, type(module)) for model in of for module in model.modules()]
        before = flashattn_core.stats()
        with contextlib.ExitStack() as stays:
            with WAYS[way](of), contextlib.ExitStack() as meanwhile:
                if between == "bad call":
                    bad_call(rng)
                elif between == "import":
                    stays.enter_context(arrival(f"mlx_lm.models.{rng.choice(('qwen2', *self.of.others))}"))
                elif between == "switched by another thread":
                    meanwhile.enter_context(another_thread_switches())
                result = _waited_for(run(of))
                status = flash.status()
            check_is_off(self.own, classes)
        ran = Counter(flashattn_core.stats()) - Counter(before)
        if not ran:
            raise Broken(f"switched on by {way}, no kernel ran")
        if status.fallbacks:
            raise Broken(f"switched on by {way}, calls fell back: {dict(status.fallbacks)}")
        if between != "switched by another thread" and Counter(status.calls) != ran:
            raise Broken(f"{dict(ran)} ran, flash.status() counts {dict(status.calls)}")
        self.seen.calls += ran
        return result

    def _interrupted(self, work: Work, way: str, seconds: float) -> None:
        """As `_on`, with a Ctrl-C in between; what comes out of it is not compared with anything."""
        of = work.models()
        classes = [(module, type(module)) for model in of for module in model.modules()]
        control_c = ControlC(seconds)
        try:
            with control_c, WAYS[way](of):
                work.run(of)
        except KeyboardInterrupt:
            if not control_c.pressed:  # someone has really pressed it
                raise
            self.seen.between["cut short by Ctrl-C"] += 1
        finally:
            _waited_for(None)
        if way == "patch_model()":  # not a block of the package's own: it may have been left at any point
            for model in of:
                flash.unpatch_model(model)
        flash.disable()
        check_is_off(self.own, classes)

    def growth(self) -> dict[str, Growth | None]:
        return {name: Growth.of(values) for name, values in self.seen.occupied.items()}

    def check_growth(self) -> None:
        """Raises Broken for what has grown by more than GROWTH allows."""
        for name, growth in self.growth().items():
            unit, in_1000, in_few = GROWTH[name]
            grown = growth.per_1000 * growth.rounds / 1000 if growth else 0.0
            if growth and grown > max(in_few, in_1000 * growth.rounds / 1000):
                raise Broken(f"{name} grows: by {grown:,.3g} {unit} in {growth.rounds:,} rounds".replace("  ", " "))


def _waited_for(result: Any) -> Any:
    """With nothing under way any more: mlx-lm's loops are a step ahead of what they yield."""
    mx.synchronize(generation_stream)
    mx.synchronize()
    return result


def run(soak: Soak, minutes: float, rounds: int | None) -> tuple[str | None, bool]:
    """Rounds until the time is over, or so many. Gives what did not hold, and whether Ctrl-C ended it."""
    begin = time.monotonic()
    try:
        with output.progress() as progress:
            bar = progress.add_task("soak", total=rounds or round(minutes * 60))
            while soak.seen.rounds < rounds if rounds else time.monotonic() - begin < minutes * 60:
                soak.round()
                done = soak.seen.rounds if rounds else round(time.monotonic() - begin)
                progress.update(bar, completed=done)
        soak.check_growth()
    except Broken as broken:
        return str(broken), False
    except KeyboardInterrupt:
        return None, True
    except Exception as error:  # nothing in a round may raise
        traceback.print_exc()
        return f"{type(error).__name__}: {error}", False
    return None, False


def summary(soak: Soak, seed: int, seconds: float, broken: str | None, interrupted: bool) -> dict[str, Any]:
    """For the JSON file."""
    seen = soak.seen
    return {
        "command": "soak",
        "seed": seed,
        "seconds": seconds,
        "rounds": seen.rounds,
        "broken": broken,
        "interrupted": interrupted,
        "work": {
            kind: {"rounds": n, "worst": seen.worst[kind], "near_ties": seen.near_ties[kind]}
            for kind, n in sorted(seen.work.items())
        },
        "ways": dict(seen.ways.most_common()),
        "between": dict(seen.between.most_common()),
        "calls": dict(sorted(seen.calls.items())),
        "growth": {name: vars(growth) if growth else None for name, growth in soak.growth().items()},
        "occupied": seen.occupied,
        "machine": machine.describe(),
    }


def render(result: dict[str, Any]) -> str:
    """What docs/reliability.md quotes."""
    device, system = result["machine"]["device"], platform.system()
    ended = ", ended by Ctrl-C" if result["interrupted"] else ""
    minutes, rounds, seed = result["seconds"] / 60, result["rounds"], result["seed"]
    head = f"Soak, seed {seed} · {minutes:.1f} minutes, {rounds:,} rounds{ended} · {system}, {device}"
    work = [("work, patch off and on", "rounds", "largest difference", "near-ties")]
    work += [
        (kind, f"{of['rounds']:,}", f"{of['worst']:.1e}", f"{of['near_ties']}") for kind, of in result["work"].items()
    ]
    ways = [("switched on by", "rounds"), *((name, f"{n:,}") for name, n in result["ways"].items())]
    between = [("in between", "times"), *((name, f"{n:,}") for name, n in result["between"].items())]
    memory = [("occupied", "after a quarter", "at the end", "slope in 1,000 rounds", "bound")]
    for name, growth in result["growth"].items():
        if growth:
            slope = f"{growth['per_1000']:+.3f} ± {growth['error']:.3f}"
            memory.append(
                (_with_unit(name), f"{growth['first']:,.1f}", f"{growth['last']:,.1f}", slope, f"{GROWTH[name][1]:g}")
            )
    calls = ", ".join(f"{kernel} {n:,}" for kernel, n in result["calls"].items())
    verdict = f"BROKEN: {result['broken']}" if result["broken"] else "Everything held."
    tables = (output.columns(rows) for rows in (work, ways, between, memory))
    return "\n\n".join([head, *tables, f"kernel calls: {calls} · fallbacks: none\n{verdict}"])


def _with_unit(name: str) -> str:
    unit = GROWTH[name][0]
    return f"{name}, {unit}" if unit else name


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="How long.")
@click.option("--rounds", type=int, help="So many rounds instead, however long they take.")
@click.option("--seed", type=int, help="Repeats a run's sequence of rounds.  [default: a new one, which is printed]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything that was measured here.")
def command(minutes: float, rounds: int | None, seed: int | None, json_file: Path | None) -> None:
    """Mixed work with the patch going in and out at random, and checks after every round."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell in the background ignores it
    seed = random.randrange(10**6) if seed is None else seed
    soak, begin = Soak(seed), time.monotonic()
    print(f"seed {seed}", file=sys.stderr, flush=True)
    broken, interrupted = run(soak, minutes, rounds)
    result = summary(soak, seed, time.monotonic() - begin, broken, interrupted)
    print(render(result))
    if json_file:
        json_file.write_text(json.dumps(result))
    sys.exit(1 if broken else 130 if interrupted else 0)


if __name__ == "__main__":
    command()
