"""The soak (soak.py) runs, and sees what it is there to see: each of its checks is shown to fail."""

import dataclasses
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import mlxlm_flash_patch as flash
import numpy as np
import pytest
import soak
from mlx_lm.models import base
from mlxlm_flash_patch import patch, route
from mlxlm_flash_patch.places import Place
from soak_work import Result, difference


@pytest.fixture(scope="module")
def one():
    """A soak, with all kinds of work."""
    soaked = soak.Soak(seed=0, other_types=("gemma2", "gpt_oss"))
    yield soaked
    soaked.thread.shutdown()
    gc.unfreeze()


@pytest.fixture
def quick(one, monkeypatch):
    """The same with the quickest kind of work alone, from its start."""
    monkeypatch.setattr(one, "kinds", {"logits": one.of.other_type})
    monkeypatch.setattr(one, "rng", random.Random(0))
    monkeypatch.setattr(one, "seen", soak.Seen())
    return one


def test_all_kinds_of_work(one):
    """Each kind, twice; then a page that names them."""
    for kind, work in one.of.all().items():
        one.kinds = {kind: work}
        assert soak.run(one, 0, rounds=one.seen.rounds + 2) == (None, False)
    one.kinds = one.of.all()
    assert set(one.seen.work.values()) == {2}
    assert {"cpu_prefill", "cpu_decode", "cpu_backward"} == set(one.seen.calls)

    page = soak.render(json.loads(json.dumps(soak.summary(one, 60.0, None, False))))
    assert f"Soak, seed 0 · 1.0 minutes, {2 * len(one.kinds)} rounds" in page
    assert all(name in page for name in (*one.kinds, *soak.GROWTH))
    assert page.endswith("Everything held.")


def test_all_ways_and_all_that_comes_between(quick):
    assert soak.run(quick, 0, rounds=150) == (None, False)
    assert set(quick.seen.ways) == set(soak.WAYS)
    between = {"nothing", "bad call", "Ctrl-C", "import", "switched by another thread", "in a second thread"}
    assert between <= set(quick.seen.between)


def test_a_seed_repeats_the_sequence(quick, monkeypatch):
    def sequence():
        monkeypatch.setattr(quick, "rng", random.Random(3))
        monkeypatch.setattr(quick, "seen", soak.Seen())
        soak.run(quick, 0, rounds=8)
        between = {name: n for name, n in quick.seen.between.items() if name != "cut short by Ctrl-C"}  # that is timing
        return quick.seen.ways, between, quick.seen.worst

    assert sequence() == sequence()


LEAKS = {
    "resident memory": lambda: bytearray(os.urandom(1) * 500_000),
    "MLX, active": lambda: mx.zeros((1000,)) + 1,
    "Python objects": lambda: [[] for _ in range(100)],
    "threads": lambda: threading.Thread(target=STOP.wait, daemon=True).start(),
    "file descriptors": lambda: open(os.devnull),  # noqa: SIM115
}
STOP = threading.Event()


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
    broken, _ = soak.run(quick, 0, rounds=40)
    STOP.set()
    [x.close() for x in kept if hasattr(x, "close")]
    assert re.search(rf"{what}(, MB)? grows: by", broken)


def broken_by(quick):
    broken, interrupted = soak.run(quick, 0, rounds=12)
    assert not interrupted
    return broken


def test_another_object_is_put_back(quick, monkeypatch):
    exchange = Place.exchange

    def another(place, original, way):
        is_seam = place.name == "mlx_lm.models.gpt_oss" and way is None
        exchange(place, (lambda *args, **kwargs: None) if is_seam else original, way)

    own = vars(sys.modules["mlx_lm.models.gpt_oss"])["scaled_dot_product_attention"]
    monkeypatch.setattr(Place, "exchange", another)
    try:
        assert re.search("left alone: mlx_lm.models.gpt_oss holds|gpt_oss.* is another object", broken_by(quick))
    finally:
        sys.modules["mlx_lm.models.gpt_oss"].scaled_dot_product_attention = own


def test_something_is_left_behind(quick, monkeypatch):
    own = base.create_causal_mask
    exchange = Place.exchange
    monkeypatch.setattr(Place, "exchange", lambda place, original, way: way and exchange(place, original, way))
    try:
        assert broken_by(quick)
    finally:
        monkeypatch.undo()
        flash.disable()
    assert base.create_causal_mask is own


def test_the_finder_is_left_behind(quick, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, object()])
    assert "sys.meta_path is" in broken_by(quick)


def test_a_wrong_result(quick, monkeypatch):
    right = route.flash_attention
    monkeypatch.setattr(route, "flash_attention", lambda *args, **kwargs: 1.01 * right(*args, **kwargs))
    assert "logits: the patch changes a result by" in broken_by(quick)


def test_a_fallback(quick, too_wide):
    assert too_wide in broken_by(quick)


def test_a_kernel_that_never_runs(quick, monkeypatch):
    monkeypatch.setattr(route, "attend", lambda *_, **__: None)
    assert re.search("no kernel ran|FlashNeverRanError", broken_by(quick))


def test_calls_that_are_not_counted(quick, monkeypatch):
    monkeypatch.setattr(patch, "_calls_since", lambda before: {"cpu_prefill": 1})
    assert "flash.status() counts {'cpu_prefill': 1}" in broken_by(quick)


def test_flash_where_it_is_off(quick, monkeypatch):
    with flash.enabled():
        monkeypatch.setattr(quick.own, "check", lambda: None)
        assert re.search("with the patch off|after switching off", broken_by(quick))


def tokens(numbers, ids):
    return Result(np.array(numbers), np.array(ids))


def test_tokens_may_differ_at_a_near_tie_alone():
    off = tokens([-0.5, -0.69, -2.0], [3, 4, 5])
    assert difference(off, tokens([-0.5, -0.69, -2.0], [3, 4, 5]), 1e-3) == (0, False)
    assert difference(off, tokens([-0.5, -0.69, -7.0, -1.0], [3, 8, 9, 1]), 1e-3) == (0, True)
    with pytest.raises(soak.Broken, match="changes a result"):
        difference(off, tokens([-0.5, -0.5, -7.0], [3, 8, 9]), 1e-3)
    with pytest.raises(soak.Broken, match="3 tokens with the patch off, 2 with it on"):
        difference(off, tokens([-0.5, -0.69], [3, 4]), 1e-3)
    with pytest.raises(soak.Broken, match="not finite"):
        difference(Result(np.array([1.0])), Result(np.array([np.nan])), 1e-3)


def test_the_command_and_control_c(tmp_path):
    """The page and the file, of the rounds that were finished."""
    command = [sys.executable, Path(soak.__file__), "--seed", "5", "--json", tmp_path / "soak.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "seed 5\n"
        process.send_signal(signal.SIGINT)
        page, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert "ended by Ctrl-C" in page
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["interrupted"]
    assert result["seed"] == 5
