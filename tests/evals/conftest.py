"""Fixtures for the tests of flash-evals: a tiny random Qwen2 model, small texts, and functions that run commands."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import click.testing
import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flash_evals.cli import main
from flash_evals.work import contest, implementations, machine, measure
from flash_evals.work.implementations import IMPLEMENTATIONS, RESULTS, Contestant, flash
from flash_evals.work.models import load

from tests.core.programs import python
from tests.evals.report_page import parse
from tests.patch.model_folders import write_model

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

TEXT = (
    "The lobster of the eastern Atlantic is blue; only cooking makes it “lobster red”.\n\n"
    "It weighs 5 – 6 kilograms, carries its eggs for a year, and has claws of two kinds: the crusher and the cutter.\n"
    "Naïve readers take it for a crab — it is none.\n"
) * 2


@pytest.fixture(autouse=True)
def openblas(monkeypatch):
    """Pretends that MLX uses OpenBLAS. With a slower BLAS, commands print a warning on stderr and on the page."""
    monkeypatch.setattr(machine, "blas", lambda: "openblas")


@pytest.fixture(scope="session")
def text():
    """A text of about 500 characters, some of which have two or three bytes."""
    return TEXT


@pytest.fixture(scope="session")
def documents():
    """Documents, of which one is empty and one has a single token."""
    return [*TEXT.split("\n")[:3], "T", "Naïve readers take it for a crab — it is none.\n\n"]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """make_model(**settings): writes a model folder in mlx-lm's layout. `settings` replace those in its config.json."""

    def make(bos=False, dtype=mx.float32, **settings):
        folder = tmp_path_factory.mktemp("model")
        write_model(folder, {**CONFIG, **settings}, dtype, TEXT, bos)
        return folder

    return make


@pytest.fixture(scope="session")
def model_folder(make_model):
    return make_model()


@pytest.fixture(scope="session")
def loaded(model_folder):
    return load(str(model_folder))


@pytest.fixture(scope="session")
def invoke():
    """invoke(*arguments, input=...): runs `flash-eval ...` in this process. `input` is its stdin."""
    return lambda *arguments, **stdin: click.testing.CliRunner().invoke(main, list(map(str, arguments)), **stdin)


# The hub's libraries read the environment variables when they are imported.
IN_A_FRESH_PROCESS = """
import json
from click.testing import CliRunner
from flash_evals.cli import main
from flash_evals.work import machine

machine.blas = lambda: "openblas"
results = [CliRunner().invoke(main, arguments) for arguments in {commands}]
names = ("exit_code", "stdout", "stderr")
print(json.dumps([{{name: getattr(result, name) for name in names}} for result in results]))
"""


@pytest.fixture
def in_fresh_process():
    """in_fresh_process(*commands, **environment): runs these commands in a new process, and returns their outcomes."""

    def run(*commands, **environment):
        code = IN_A_FRESH_PROCESS.format(commands=[list(map(str, command)) for command in commands])
        done = python(code, **environment)
        assert done.stderr == ""
        return [SimpleNamespace(**outcome) for outcome in json.loads(done.stdout)]

    return run


@pytest.fixture
def run_command(invoke, model_folder, text_file, tmp_path):
    """run_command(COMMAND, *options): runs `flash-eval COMMAND ...` on the tiny model and text. It must succeed.

    Returns the content of the result file, with the printed page as an additional item `page`. The given options
    override the default ones.
    """

    def run(command, *arguments):
        out = tmp_path / "out.json"
        text = ("--context", 24) if command == "perplexity" else ()
        text += ("--dataset", text_file) if text and "--dataset" not in arguments else ()
        result = invoke(command, "--model", model_folder, *text, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return {**json.loads(out.read_text()), "page": result.stdout}

    return run


@pytest.fixture
def small_run(model_folder, text_file):
    """small_run(command): arguments for a short run of this command."""
    model = ("--model", model_folder)
    runs = {
        "perplexity": (*model, "--dataset", text_file, "--context", 24, "--max-windows", 1),
        "speed": (*model, "-p", 8, "-g", 2, "-d", 0, "-r", 1),
        "finetune": (*model, "-p", 8, "-r", 1),
        "kernels": ("--shape", "2/1x8", "--seq-len", 4, "--impl", "flash", "-r", 1),
    }
    return lambda command: (command, *runs[command])


@pytest.fixture
def evaluate_documents(run_command, documents, tmp_path):
    """evaluate_documents(*options): runs `flash-eval perplexity ...` on `documents`."""
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return partial(run_command, "perplexity", "--dataset", path)


@pytest.fixture
def perplexity(model_folder, text_file):
    """Arguments for `flash-eval perplexity` with many batches."""
    return ["perplexity", "--model", model_folder, "--dataset", text_file, "--context", 24, "--batch-size", 2]


@pytest.fixture
def same_scores():
    """same_scores(a, b): checks that two results of `perplexity` have the same scores, bit for bit."""
    per_arm = ("ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte")

    def check(a, b):
        for figure in ("tokens", "words", "bytes", "paired", "flash"):
            assert a[figure] == b[figure]
        for arm in ("off", "on"):
            assert [a[arm][figure] for figure in per_arm] == [b[arm][figure] for figure in per_arm]

    return check


@pytest.fixture
def refused(invoke):
    """refused(*arguments): `flash-eval ...` must end with one line on stderr and exit code 2. Returns the line."""

    def run(*arguments):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        [line] = result.stderr.splitlines()
        assert line.startswith("Error: ")
        return line

    return run


RUNS = {
    "perplexity": ("--context", 32),
    "speed": ("-p", "8,16", "-g", 4, "-d", "0,32", "-r", 2),
    "finetune": ("-p", "8,16", "-r", 2),
    "kernels": ("--shape", "4/2x8", "--seq-len", "32,64", "--impl", "flash,mlx", "--pass", "forward,backward", "-r", 3),
}


# Imports all commands before any test. A module that is imported while a test runs may keep what the test patches.
for name in RUNS:
    import_module(f"flash_evals.commands.{name}")


@pytest.fixture(scope="session")
def results(invoke, model_folder, tmp_path_factory):
    """Maps the name of a command to the content of the --json file of a small run. Tests must not change the dict."""
    folder = tmp_path_factory.mktemp("results")
    text, out = folder / "text.txt", folder / "out.json"
    text.write_bytes(TEXT.encode())
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "blas", lambda: "openblas")
        make_quick(patched)
        # The tiny model may not enlarge the process's resident set, but MLX's allocator counts every byte.
        patched.setattr(measure, "memory_method", lambda: "peak of MLX's allocator")
        for name, options in RUNS.items():
            model = () if name == "kernels" else ("--model", model_folder)
            dataset = ("--dataset", text) if name == "perplexity" else ()
            done = invoke(name, *model, *dataset, *options, "--json", out)
            assert done.exit_code == 0, done.output
            found[name] = json.loads(out.read_text())
    return found


@pytest.fixture
def report(invoke, tmp_path):
    """report(*results, says=""): the HTML page of these results, each given as a path or as a file's content.

    `says` is what the command must print on stderr.
    """

    def run(*results, says=""):
        files = [result if isinstance(result, Path) else tmp_path / f"{n}.json" for n, result in enumerate(results)]
        for file, result in zip(files, results, strict=True):
            if not isinstance(result, Path):
                file.write_text(json.dumps(result))
        out = tmp_path / "page.html"
        done = invoke("report", *files, "--html", out)
        assert (done.exit_code, done.stdout, done.stderr) == (0, f"{out}\n", says), done.output
        return parse(out)

    return run


@pytest.fixture
def quick_machine(monkeypatch):
    """Makes `flash-eval kernels` quick: a trial is one call, peak speeds are constants, and torch is hidden."""
    make_quick(monkeypatch)


def make_quick(monkeypatch):
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0)
    monkeypatch.setattr(contest, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(flashattn_core, "peak_flops", lambda: 1e11)
    monkeypatch.setattr(flashattn_core, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)


@pytest.fixture
def run_kernels(invoke, tmp_path):
    """run_kernels(*options): runs a small `flash-eval kernels`. Returns the result file's entries, and the page.

    The options override the default options.
    """

    def run(*arguments):
        out = tmp_path / "out.json"
        result = invoke("kernels", "--shape", "4/2x8", "--seq-len", 32, "-r", 3, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return json.loads(out.read_text()), result.stdout

    return run


@pytest.fixture
def fake_implementation(monkeypatch):
    """fake_implementation(name, ...): flash attention runs in place of the implementation of this name.

    before() runs before each call, and preparing() runs before a call is prepared. `change` maps the name of a result
    to a function that changes this result.
    """

    def arrange(name, before=lambda: None, preparing=lambda: None, **change):
        class Fake(Contestant):
            def prepare(self):
                preparing()
                call = super().prepare()
                return lambda: before() or call()

            def as_numpy(self, results):
                named = zip(RESULTS[self.pass_], super().as_numpy(results), strict=True)
                return [change.get(what, np.asarray)(array) for what, array in named]

        monkeypatch.setitem(IMPLEMENTATIONS, name, partial(Fake, flash))

    return arrange
