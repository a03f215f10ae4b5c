"""Runs mlx-lm's own tests four times: `python -m tests.patch.upstream FOLDER [PYTEST ARGUMENTS]`.

In the four runs the patch is off, on, on with strict, and on without descriptions of masks. In the last run, kernels
read mlx-lm's mask arrays. FOLDER holds the tests of the installed mlx-lm. They are part of its source distribution
(`pip download --no-deps --no-binary mlx-lm mlx-lm==VERSION`).

The script prints the differences between the runs. It exits with 1 if a test passes with the patch off and fails with
the patch on. If a test's calls fall back, it may fail with strict. The runs need no network, because the shipped demo
model replaces the one model that most of these tests download. A test that needs another model, Metal or a missing
package fails in all four runs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flash_evals.work.models import DEMO_MODEL
from mlxlm_flash_patch import described_masks

ARMS = ("off", "on", "strict", "arrays")
MODEL = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Outcome:
    """The outcome of one test, the kernels that ran in it, and its calls that fell back."""

    word: str = "passed"
    calls: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


class Watch:
    """A pytest plugin that records the outcome of each test. The outcome of a subtest counts for its test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logstart(self, nodeid):
        mx.random.seed(0)  # so that random models are the same in all runs
        self.before = counts()

    def pytest_runtest_logreport(self, report):
        outcome = self.outcomes.setdefault(report.nodeid, Outcome())
        if report.outcome != "passed" and outcome.word != "failed":
            outcome.word = report.outcome

    def pytest_runtest_logfinish(self, nodeid):
        outcome = self.outcomes[nodeid]
        outcome.calls, outcome.fallbacks = (now - then for now, then in zip(counts(), self.before, strict=True))


def counts() -> tuple[Counter[str], Counter[str]]:
    now = flash.status()
    return Counter(now.calls), Counter(now.fallbacks)


def run(arm: str, arguments: list[str]) -> dict[str, Outcome]:
    if arm != "off":
        flash.enable(strict=arm == "strict")
    if arm == "arrays":
        described_masks._remember = lambda *_: None
    watch = Watch()
    pytest.main(["-q", "--tb=short", "--continue-on-collection-errors", *arguments], plugins=[watch])
    return watch.outcomes


def stand_in(hub: Path) -> None:
    """Puts the demo model where huggingface_hub looks for MODEL, as if it had been downloaded."""
    repository = hub / f"models--{MODEL.replace('/', '--')}"
    snapshot = repository / "snapshots" / "demo"
    shutil.copytree(DEMO_MODEL, snapshot)
    settings = json.loads((snapshot / "tokenizer_config.json").read_text())
    (snapshot / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("demo")


def main(folder: str, *arguments: str) -> int:
    with tempfile.TemporaryDirectory() as hub:
        stand_in(Path(hub))
        os.environ.update(HF_HUB_CACHE=hub, HF_HUB_OFFLINE="1")  # the processes below read these
        runs = {}
        for arm in ARMS:
            print(f"\n=== {arm}", flush=True)
            # Each run has a process of its own, so that none affects the next.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                begin = perf_counter()
                runs[arm] = process.submit(run, arm, ["--rootdir", folder, folder, *arguments]).result()
                print(f"{arm}: {perf_counter() - begin:.0f} s")
    return report(runs)


def report(runs: dict[str, dict[str, Outcome]]) -> int:
    """Prints tests whose outcomes differ or whose calls fell back, and totals of each run. Returns the exit code."""
    nothing = Outcome("missing")
    wrong = 0
    print("\noff     on      strict  arrays  test")
    for test, off in runs["off"].items():
        on, strict, arrays = (runs[arm].get(test, nothing) for arm in ARMS[1:])
        expected = [on.word, arrays.word] if on.fallbacks else [on.word, arrays.word, strict.word]
        is_wrong = off.word == "passed" and set(expected) != {"passed"}
        wrong += is_wrong
        if is_wrong or on.fallbacks or not off.word == on.word == strict.word == arrays.word:
            notes = [f"{reason} {n}" for reason, n in on.fallbacks.items()] + ["WRONG"] * is_wrong
            print(f"{off.word:8}{on.word:8}{strict.word:8}{arrays.word:8}{' · '.join([test, *notes])}")
    for arm, outcomes in runs.items():
        words = Counter(outcome.word for outcome in outcomes.values())
        through = sum(bool(outcome.calls) for outcome in outcomes.values())
        print(f"{arm}: {', '.join(f'{n} {word}' for word, n in words.items())}; flash attention ran in {through}")
    return 1 if wrong or not any(outcome.calls for outcome in runs["strict"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
