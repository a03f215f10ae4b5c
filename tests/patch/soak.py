"""Does mixed work while the patch is switched on and off at random: `python -m tests.patch.soak --minutes 30`.

One process generates text, scores text and trains, in an order drawn from a seed. A round does one piece of work twice:
with the patch off and with the patch on. Rounds switch the patch on in several ways, and some rounds work in a second
thread. Some rounds have a disturbance: a bad call, a Ctrl-C, an import, or another thread that switches the patch.
After each round, soak_checks.py checks that the patch left nothing behind, and measures the memory in use. The first
failed check ends the process with exit code 1. Ctrl-C also ends it; the report then covers the finished rounds.
"""

import contextlib
import gc
import platform
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import flashattn_core
import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
from flash_evals.commands.runner import progress
from flash_evals.pages.description import columns
from flash_evals.results.arms import ARMS
from flash_evals.work import machine
from mlx_lm.generate import generation_stream

from tests.patch.soak_checks import GROWTH, Own, check_is_off, growth, occupied
from tests.patch.soak_switching import WAYS, SimulatedControlC, another_thread_switches, arrival, bad_call, control_c
from tests.patch.soak_work import KINDS, OTHER_TYPES, Broken, Kinds, Result, Run, Work, difference


@dataclass
class Seen:
    """Statistics of the rounds so far."""

    rounds: int = 0
    work: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    between: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # kind of work -> largest relative change by the patch
    near_ties: Counter[str] = field(default_factory=Counter)
    occupied: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GROWTH})


class Soak:
    """Works in rounds: each call of round() does one piece of work. `seen` has statistics of the rounds so far."""

    def __init__(
        self, seed: int, other_types: Sequence[str] = OTHER_TYPES, kinds: Collection[str] = tuple(KINDS)
    ) -> None:
        flash.disable()
        self.seed, self.rng = seed, random.Random(seed)
        self.of = Kinds(other_types)
        self.kinds = {kind: partial(KINDS[kind], self.of) for kind in kinds}
        # All rounds in a second thread use this one thread: MLX starts one more thread for each thread that generates.
        self.thread = ThreadPoolExecutor(1)
        self.seen = Seen()
        self.arrivals = ["qwen2", *other_types]
        for kind in self.kinds.values():  # the first use of each kind makes lasting objects, which are no leak
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
        gc.freeze()  # so that later collections and counts leave out the objects made so far

    def round(self) -> None:
        """Does one piece of work with the patch off and on, and records memory. Raises Broken if a check fails."""
        self._work()  # frees its models and results when it returns, so occupied() does not count them
        for name, value in occupied().items():
            self.seen.occupied[name].append(value)

    def _work(self) -> None:
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

    def _elsewhere(self, run: Run) -> Run:
        return lambda of: self.thread.submit(lambda: _waited_for(run(of))).result()

    def _off(self, run: Run, of: list[nn.Module]) -> Result:
        before = flashattn_core.stats()
        result = _waited_for(run(of))
        if ran := Counter(flashattn_core.stats()) - Counter(before):
            raise Broken(f"with the patch off, {dict(ran)} ran")
        return result

    def _on(self, run: Run, of: list[nn.Module], way: str, between: str, rng: random.Random) -> Result:
        classes = [(module, type(module)) for model in of for module in model.modules()]
        before = flashattn_core.stats()
        with contextlib.ExitStack() as stays:
            with WAYS[way](of), contextlib.ExitStack() as meanwhile:
                if between == "bad call":
                    bad_call(rng)
                elif between == "import":
                    stays.enter_context(arrival(f"mlx_lm.models.{rng.choice(self.arrivals)}"))
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
        """Does the work with the patch on. A Ctrl-C may cut the work short. The results are not compared."""
        of = work.models()
        classes = [(module, type(module)) for model in of for module in model.modules()]
        try:
            with control_c(seconds), WAYS[way](of):
                work.run(of)
        except SimulatedControlC:
            self.seen.between["cut short by Ctrl-C"] += 1
        finally:
            _waited_for(None)
        if way == "patch_model()":  # Ctrl-C may have interrupted unpatch_model()
            for model in of:
                flash.unpatch_model(model)
        with contextlib.suppress(flash.FlashNeverRanError):  # raised if no kernel ran before the Ctrl-C
            flash.disable()
        check_is_off(self.own, classes)

    def check_growth(self) -> None:
        """Raises Broken if a measure of GROWTH has grown too much. The message names all such measures."""
        too_much = [
            f"{name} grows: by {grown.after - grown.before:,.3g} in {self.seen.rounds:,} rounds"
            for name, values in self.seen.occupied.items()
            if (grown := growth(name, values)) and grown.after - grown.before > grown.allowed
        ]
        if too_much:
            raise Broken("; ".join(too_much))


def _waited_for(result: Any) -> Any:
    """Returns `result` once MLX's streams are idle. mlx-lm begins to compute the next token before it returns one."""
    mx.synchronize(generation_stream)
    mx.synchronize()
    return result


def run(soak: Soak, minutes: float, rounds: int | None) -> tuple[str | None, bool]:
    """Works for `rounds` rounds, or else for `minutes`. Returns a failed check's message, and whether Ctrl-C came."""
    begin, interrupted = time.monotonic(), False
    try:
        try:
            print(f"seed {soak.seed}", file=sys.stderr, flush=True)
            with progress() as shown:
                bar = shown.add_task("soak", total=rounds or round(minutes * 60))
                while soak.seen.rounds < rounds if rounds else time.monotonic() - begin < minutes * 60:
                    soak.round()
                    shown.update(bar, completed=soak.seen.rounds if rounds else round(time.monotonic() - begin))
        except KeyboardInterrupt:
            interrupted = True
        soak.check_growth()
    except Broken as broken:
        return str(broken), interrupted
    except Exception as error:  # a round must raise nothing but Broken
        traceback.print_exc()
        return f"{type(error).__name__}: {error}", interrupted
    return None, interrupted


def page(soak: Soak, seconds: float, broken: str | None, interrupted: bool) -> str:
    """The report that the command prints."""
    seen = soak.seen
    ended = ", ended by Ctrl-C" if interrupted else ""
    length = f"{seconds / 60:.1f} minutes, {seen.rounds:,} rounds{ended}"
    head = f"Soak, seed {soak.seed} · {length} · {platform.system()}, {machine.describe().device}"
    work = [("work, patch off and on", "rounds", "largest difference", "near-ties")]
    for kind, n in sorted(seen.work.items()):
        work.append((kind, f"{n:,}", f"{seen.worst[kind]:.1e}", f"{seen.near_ties[kind]}"))
    ways = [("switched on by", "rounds"), *((name, f"{n:,}") for name, n in seen.ways.most_common())]
    between = [("in between", "times"), *((name, f"{n:,}") for name, n in seen.between.most_common())]
    memory = [("occupied", "in the second quarter", "in the last", "more", "allowed")]
    for name, values in seen.occupied.items():
        if grown := growth(name, values):
            numbers = (grown.before, grown.after, grown.after - grown.before, grown.allowed)
            memory.append((name, *(f"{x:,.1f}" for x in numbers)))
    calls = ", ".join(f"{kernel} {n:,}" for kernel, n in sorted(seen.calls.items()))
    verdict = f"BROKEN: {broken}" if broken else "Everything held."
    tables = (columns(rows) for rows in (work, ways, between, memory))
    return "\n\n".join([head, *tables, f"kernel calls: {calls}\n{verdict}"])


@click.command()
@click.option("--minutes", default=30.0, show_default=True, help="How long.")
@click.option("--seed", type=int, help="Repeats a run's sequence of rounds.  [default: a new one, which is printed]")
def command(minutes: float, seed: int | None) -> None:
    """Mixed work while the patch is switched on and off at random, and checks after every round."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # because shells start background jobs with SIGINT ignored
    soak, begin = Soak(random.randrange(10**6) if seed is None else seed), time.monotonic()
    broken, interrupted = run(soak, minutes, None)
    # MLX caches compiled functions per thread, and aborts if a thread ends while Python exits. So end the thread here.
    soak.thread.shutdown()
    print(page(soak, time.monotonic() - begin, broken, interrupted))
    sys.exit(1 if broken else 130 if interrupted else 0)


if __name__ == "__main__":
    command()
