"""Each block of code in the docs works. Shell commands and Python code run, and print the output that the page shows.

In a block marked `sh`, each line is a command. In a block marked `console`, a line that begins with `$` is a command,
and other lines are output. A block marked `text` is the output of the first command that runs in the block before it.
A page's blocks run one after the other in a copy of the repository. Their commands run without `uv run`, so they use
this environment. A flash-eval command on a page must have valid options. It runs in this process, with the smaller
sizes of SMALLEST. These are appended to its options, and so override them. The output must equal the page's output, but
numbers and words that depend on the machine may differ.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, chdir, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import click.testing
import flash_evals.cli
import mlxlm_flash_patch
import mlxlm_flash_patch.cli
import pytest
from flash_evals.results import claims
from flash_evals.work import contest, implementations
from flash_evals.work.models import DEMO_MODEL

from tests.promises import promise

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "packages/*/macos/README.md")
    for page in ROOT.glob(pattern)
)

# Maps each command that does not run to the reason. "…" stands for any ending.
NOT_RUN = {
    "pip install uv": "changes the machine",
    "apt-get install …": "changes the machine",
    "uv sync …": "builds the environment that this test runs in",
    "uv run pytest -n 2 --dist loadfile": "is what runs this test",
    "uv run pytest tests/metal | tee metal.log": "make test-metal runs it",
    "uv run ruff …": "make lint runs it",
    "uv run packages/flashattn-core/macos/build.py …": "downloads 150 MB; tests/macos/test_wheel.py runs it",
    "mlxlm-flash tune": "needs a GPU; tests/patch/test_tune.py runs it",
    "mlxlm-flash run --blas auto …": "needs OpenBLAS; tests/patch/test_blas.py runs it",
    'pip install "./packages/…': "brings another build of MLX than this environment's",
    "MLX_ENABLE_TF32=0 python packages/evals/scripts/measure_cuda_table.py": "needs an NVIDIA GPU",
    "MLX_ENABLE_TF32=0 python packages/evals/scripts/measure_cuda_gradients.py": "needs an NVIDIA GPU",
    "mlx.launch -n 2 --backend nccl …": "needs two NVIDIA GPUs",
    "python packages/evals/scripts/write_random_model.py …": "writes gigabytes",
    "mlxlm-flash run mlx_vlm.generate …": "needs mlx-vlm",
    "uv run pytest --all tests/programs": "installs other programs",
    "mlxlm-flash run mlx_lm.server …": "serves until it is stopped; tests/patch/test_command_server.py runs it",
    "lm_eval …": "another program",
    "llama-perplexity …": "another program",
    "llama-quantize …": "another program",
    "cmake …": "builds another program",
    "build/driver/parts_avx2": "cmake builds it, which is not run",
    "pip install --no-deps --target …": "downloads 93 MB",
    "flash-eval real-model …": "downloads 93 MB; the tests beside other programs run it",
    "flash-eval perplexity --model M --dataset W …": "needs that model and text; docs/flash-eval.md has the same",
    "flash-eval speed --blas auto …": "needs OpenBLAS; tests/patch/test_blas.py runs it",
    "FLASHATTN_CPU_ISA=avx2 flash-eval kernels …": "needs PyTorch",
    "flash-eval finetune --blas auto …": "needs OpenBLAS; tests/patch/test_blas.py runs it",
}

SMALLEST = {
    "perplexity": ["--max-windows", "2"],
    "speed": ["-p", "16", "-g", "2", "-d", "0", "-r", "1"],
    "finetune": ["-p", "128,256", "-r", "1"],
    "kernels": ["--seq-len", "64,128", "-r", "3", "--max-seconds", "1"],
    "benchmark": ["--model", "M", "-p", "16", "-g", "2", "-n", "1"],  # mlx_lm benchmark
}
# If a command on a page has one of these options, the option is appended again with this value. Other commands do not
# get the option, because a page may show its default value.
SMALLEST_IF_GIVEN = {"--context": "64", "--stride": "32", "--num-layers": "2"}

# Names that a page's Python uses without defining them.
GIVEN = {
    "packages/flashattn-core/README.md": "import mlx.core as mx; query = key = value = mx.ones((2, 4, 8, 16)); "
    "left_padding = mx.array([0, 3]); sinks = mx.zeros(4)",
}


class Block(NamedTuple):
    language: str
    text: str


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]


def commands(block):
    """The block's commands, without comments. A backslash at the end of a line continues the command."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "sh" or line.startswith("$ "):
            command = re.split(r"(?:^|\s)#", line.removeprefix("$ "))[0]
            if command.strip():
                yield " ".join(command.split())


def not_run(command):
    return [row for row in NOT_RUN if command == row or (row[-1] == "…" and command.startswith(row[:-1]))]


@pytest.fixture
def repository(tmp_path):
    """A copy of the repository, with the models, texts and programs that pages name."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    for name in ("M", "DIR", "my-model", "small-model"):
        (tmp_path / name).symlink_to(DEMO_MODEL)
    (tmp_path / "wiki.valid.raw").write_text("The lobster of the eastern Atlantic is blue.\n" * 20)
    (tmp_path / "my_package").mkdir()
    for name in ("my_script.py", "my_package/train.py"):
        (tmp_path / name).write_text("import mlx_lm\n")
    return tmp_path


@pytest.fixture
def _quick(monkeypatch):
    """Removes delays, and makes each ratio count as a clear difference. The short trials here would prove none.

    The outputs on the pages claim differences, because they come from many long trials.
    """
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0)
    monkeypatch.setattr(contest, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(claims.Ratio, "sign", property(lambda ratio: 1 if (ratio.value or 0) > 1 else -1))


# README's commands run every time, because most people use them. For the other pages, see rotate in tests/lanes.py.
TO_RUN = [
    pytest.param(page, marks=[] if page == "README.md" else pytest.mark.rotate(5))
    for page in PAGES
    if any(block.language for block in blocks(page))
]


@promise("commands in the docs run, and print the output shown")
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("page", TO_RUN)
def test_the_blocks_run(page, repository, monkeypatch):
    outputs = []  # stdout and stderr of the commands of one block
    names = {}
    exec(GIVEN.get(page, ""), names)
    with chdir(repository):
        for block in blocks(page):
            if block.language in ("sh", "console"):
                outputs = [run(command, monkeypatch) for command in commands(block) if not not_run(command)]
            elif block.language == "python":
                with redirect_stdout(io.StringIO()), ExitStack() as at_the_end:
                    at_the_end.callback(mlxlm_flash_patch.disable)
                    exec(compile(block.text, "a block", "exec"), names)
            shown = block.text if block.language == "text" else block.text.partition("\n")[2]
            if block.language in ("text", "console") and outputs and sys.platform == "linux":
                assert lines(shown) in [lines(stream) for stream in outputs[0]], shown + "\n".join(outputs[0])


def run(command, monkeypatch):
    command = command.replace("uv run ", "")
    words = shlex.split(command)
    if words[0] == "flash-eval":
        return run_flash_eval(words[1:], monkeypatch)
    if words[0] == "pytest":
        command += " --collect-only -q"
    elif words[0] == "make":
        command += " --dry-run"
    elif "flash-eval" in words and not words[0].startswith("mlxlm-flash"):
        command += " " + shlex.join(SMALLEST[words[words.index("flash-eval") + 1]])
    elif "benchmark" in words:
        command += " " + shlex.join(SMALLEST["benchmark"])
    elif words[0].endswith(".py"):
        command = f"python {command}"
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": programs, "GIT_DIR": str(ROOT / ".git"), "GIT_WORK_TREE": "."}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout, done.stderr


def run_flash_eval(words, monkeypatch):
    text = ""
    if "<" in words:
        text = Path(words[-1]).read_text()
        words = words[: words.index("<")]
    if words and words[0] in SMALLEST:
        with monkeypatch.context() as torch_is_installed:
            torch_is_installed.setattr(implementations, "find_spec", lambda name: name)
            # click keeps a command's first help option, so the first context must have the program's settings.
            context = click.Context(flash_evals.cli.main, **flash_evals.cli.main.context_settings)
            command = flash_evals.cli.main.get_command(context, words[0])
            command.make_context(words[0], words[1:], parent=context)
    done = click.testing.CliRunner().invoke(flash_evals.cli.main, smallest(words), input=text)
    assert done.exit_code == 0, f"{words}\n{done.output}"
    return done.stdout, done.stderr


def smallest(words):
    """The command's words, changed so that the command is quick, and needs neither a network nor torch."""
    words = [re.sub(",torch$", "", word) for word in words]
    for option, value in pairwise(words):
        if option == "--model" and not Path(value).exists():  # a model on the hub
            words[words.index(value)] = "M"
        if option == "--dataset" and value.startswith("wikitext"):
            words[words.index(value)] = "pydoc"
    given = [part for option, value in SMALLEST_IF_GIVEN.items() if option in words for part in (option, value)]
    return [*words, *SMALLEST.get(words[0], []), *given]


def lines(text):
    """The text's lines, with placeholders for figures and for words that depend on the machine."""
    for pattern, instead in (
        (r"AVX-512|AVX2|NEON|baseline", "AVX2"),
        (r"\btext [0-9a-f]{8}\b", "text 0"),
        (r"[-+]?\d[\d.,]*(?:e[-+]\d+)?", "0"),
        (r"\b0–0\b", "0"),  # if both ends of a range round to one number, only that number is printed
        (r"0 (?:µs|ms|s)\b", "0 s"),
        (r"\b(thread|call|fallback|shape)s\b", r"\1"),
        (r"[ \t]+", " "),
    ):
        text = re.sub(pattern, instead, text)
    return {line.strip() for line in text.splitlines() if line.strip()}


# Commands in a line of text do not run. Their names, options and files must exist.
INLINE = re.compile(
    r"(?:uv run |mlx\.launch -n \w+ |\w+=\S+ )*(?:flash-eval|mlxlm-flash|pytest|python|make|\S+\.py) \S"
)


def inline(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", text):
        command = " ".join(span.split())
        if INLINE.match(command):
            yield command


@pytest.mark.parametrize(("page", "command"), [(page, each) for page in PAGES for each in dict.fromkeys(inline(page))])
def test_commands_in_a_line_exist(page, command):
    words = shlex.split(re.split(r" [<>|] ", command.replace("uv run ", ""))[0])
    programs = {"flash-eval": flash_evals.cli.main, "mlxlm-flash": mlxlm_flash_patch.cli.cli}
    [program, *words] = words[next((n for n, word in enumerate(words) if word in programs), 0) :]
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program in programs:
        options_exist(programs[program], words)
    else:
        paths = [word for word in [program, *words] if re.search(r"\.py(::|$)", word) or word.startswith("tests/")]
        folders = (ROOT, (ROOT / page).parent)
        assert all(any((folder / path.partition("::")[0]).exists() for folder in folders) for path in paths), command


def options_exist(command, words):
    context = click.Context(command)
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0).rstrip(","))
        assert command
        if not words or command is mlxlm_flash_patch.cli.run:
            return
    known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    given = {word.partition("=")[0] for word in words if word.startswith("-") and len(word) > 1}
    assert given <= {*known, "-h", "--help"}, f"{command.name} has no {given - known}"
