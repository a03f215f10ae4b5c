"""A short soak finds nothing wrong. For each planted fault or leak, a check of the soak fails."""

import dataclasses
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
from flashattn_core import NoKernelError, _ext
from mlx_lm.models import base
from mlxlm_flash_patch import mx_fast, patch, patch_points

from tests.patch import soak
from tests.patch.soak_work import KINDS, Result, difference

pytestmark = pytest.mark.slow("20 seconds")


@pytest.fixture(scope="module")
def made():
    """A Soak that does only the quickest kind of work."""
    soaked = soak.Soak(seed=0, other_types=("gemma2", "gpt_oss"), kinds=["another model type"])
    yield soaked
    soaked.thread.shutdown()
    gc.unfreeze()


@pytest.fixture
def quick(made, monkeypatch):
    """The Soak of the fixture made(), with its random numbers and statistics reset."""
    monkeypatch.setattr(made, "rng", random.Random(0))
    monkeypatch.setattr(made, "seen", soak.Seen())
    return made


@pytest.mark.rotate(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_work(kind):
    soaked = soak.Soak(seed=0, other_types=("gemma2", "gpt_oss"), kinds=[kind])
    try:
        assert soak.run(soaked, 0, rounds=2) == (None, False)
    finally:
        soaked.thread.shutdown()
        gc.unfreeze()
    assert soaked.seen.work == {kind: 2}


def test_all_ways_and_all_that_comes_between(quick):
    """80 rounds include every entry of WAYS and every disturbance. The report names all of them."""
    assert soak.run(quick, 0, rounds=80) == (None, False)
    assert set(quick.seen.ways) == set(soak.WAYS)
    between = {"nothing", "bad call", "Ctrl-C", "import", "switched by another thread", "in a second thread"}
    assert between <= set(quick.seen.between)
    page = soak.page(quick, 60.0, None, False)
    assert "Soak, seed 0 · 1.0 minutes, 80 rounds" in page
    assert all(name in page for name in ("another model type", *soak.WAYS, *between, *soak.GROWTH))
    assert page.endswith("Everything held.")


def test_a_seed_repeats_the_sequence(quick, monkeypatch):
    def sequence():
        monkeypatch.setattr(quick, "rng", random.Random(3))
        monkeypatch.setattr(quick, "seen", soak.Seen())
        soak.run(quick, 0, rounds=8)
        between = {
            name: n for name, n in quick.seen.between.items() if name != "cut short by Ctrl-C"
        }  # whether Ctrl-C comes in time varies
        return quick.seen.ways, between, quick.seen.worst

    assert sequence() == sequence()


STOP = threading.Event()
LEAKS = {
    "resident memory, MB": lambda: bytearray(os.urandom(1) * 500_000),
    "MLX, active, MB": lambda: mx.zeros((2000,)) + 1,
    "Python objects": lambda: [[] for _ in range(100)],
    "threads": lambda: threading.Thread(target=STOP.wait, daemon=True).start(),
    "file descriptors": lambda: open(os.devnull),  # noqa: SIM115
}


@pytest.mark.rotate(5)
@pytest.mark.parametrize("what", LEAKS)
def test_a_leak(what, quick, monkeypatch):
    kept = []
    STOP.clear()

    def leaky(rng):
        work = quick.of.other_type(rng)

        def run(models):
            kept.append(LEAKS[what]())
            mx.eval([x for x in kept if isinstance(x, mx.array)])
            return work.run(models)

        return dataclasses.replace(work, run=run)

    monkeypatch.setattr(quick, "kinds", {"leaky": leaky})
    broken, _ = soak.run(quick, 0, rounds=30)
    STOP.set()
    [x.close() for x in kept if hasattr(x, "close")]
    assert re.search(f"{what} grows: by", broken)


own_exchange, own_quick = patch_points.exchange, _ext.quick


def puts_another_back(pairs):
    own_exchange(pairs)
    if not patch_points._in_force:
        sys.modules["mlx_lm.models.gpt_oss"].scaled_dot_product_attention = lambda *args, **kwargs: None


def is_wrong(*arguments):
    out = own_quick(*arguments)
    return 1.01 * out if isinstance(out, mx.array) else out


def is_left_to_mlx(query, key, value, scale, _described, sinks, _rounds, mlx_attention, mask):
    return mlx_attention(query, key, value, scale=scale, mask=mask, sinks=sinks)


def refuses(*_, **__):
    raise NoKernelError("some reason")


FAULTS = {
    "another object is put back": ((patch_points, "exchange", puts_another_back), "gpt_oss.* is another object"),
    "something is left behind": ((patch_points, "take_out", lambda: None), "after switching off|with the patch off"),
    "the finder is left behind": ((sys, "meta_path", [*sys.meta_path, object()]), "sys.meta_path is"),
    "a wrong result": ((_ext, "quick", is_wrong), "another model type: the patch changes a result by"),
    "a fallback": ((mx_fast, "_attend", refuses), "some reason"),
    "a kernel that never runs": ((_ext, "quick", is_left_to_mlx), "no kernel ran|FlashNeverRanError"),
    "calls that are not counted": (
        (patch.Counts, "calls_since", lambda self: {"cpu_prefill": 1}),
        r"flash.status\(\) counts {'cpu_prefill': 1}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(fault, quick, monkeypatch):
    change, says = FAULTS[fault]
    gpt_oss = sys.modules["mlx_lm.models.gpt_oss"]
    own, masks = gpt_oss.scaled_dot_product_attention, base.create_causal_mask
    if fault == "a fallback":
        monkeypatch.setattr(_ext, "quick", lambda *_: None)
    monkeypatch.setattr(*change)
    try:
        assert re.search(says, soak.run(quick, 0, rounds=12)[0])
    finally:
        monkeypatch.undo()
        flash.disable()
        gpt_oss.scaled_dot_product_attention = own
    assert base.create_causal_mask is masks


def tokens(numbers, ids):
    return Result(np.array(numbers), np.array(ids))


def test_tokens_may_differ_at_a_near_tie_alone():
    off = tokens([-0.5, -0.69, -2.0], [3, 4, 5])
    assert difference(off, tokens([-0.5, -0.69, -2.0], [3, 4, 5]), 1e-3) == (0, False)
    assert difference(off, tokens([-0.5, -0.69, -7.0, -1.0], [3, 8, 9, 1]), 1e-3) == (0, True)
    with pytest.raises(soak.Broken, match="changes a result"):
        difference(off, tokens([-0.5, -0.5, -7.0], [3, 8, 9]), 1e-3)
    with pytest.raises(soak.Broken, match=r"\(3,\) numbers with the patch off, \(2,\) with it on"):
        difference(off, tokens([-0.5, -0.69], [3, 4]), 1e-3)
    with pytest.raises(soak.Broken, match="not finite"):
        difference(Result(np.array([1.0])), Result(np.array([np.nan])), 1e-3)


@pytest.mark.nightly("a process that prepares every kind of work")
def test_the_command_and_control_c():
    """At Ctrl-C the command prints the report of the rounds that were finished."""
    command = [sys.executable, "-m", soak.__name__, "--seed", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "seed 5\n"
        process.send_signal(signal.SIGINT)
        page, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert "ended by Ctrl-C" in page
