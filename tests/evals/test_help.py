"""What `-h` says: it is in the docs, a test stands behind each option, and each figure of a page is explained."""

import inspect
import re
import runpy
from functools import cache
from pathlib import Path

import click
import click.testing
import pytest
from flash_evals.cli import COMMANDS, main

SCRIPT = Path(__file__).parents[2] / "packages" / "evals" / "scripts" / "write_help.py"


def command(name):
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def test_the_docs_have_the_help():
    script = runpy.run_path(str(SCRIPT))
    document, pages = script["document"](), dict(script["pages"](main, "flash-eval"))
    assert script["DOCUMENT"].read_text(encoding="utf-8") == document, "run packages/evals/scripts/write_help.py"
    assert list(pages) == ["flash-eval", *(f"flash-eval {name}" for name in COMMANDS)]
    assert "mlxlm-flash hook install" in document


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_fits(name):
    """What is laid out by hand, and not by click, has its place in a terminal of 80 columns, behind click's two."""
    blocks = inspect.cleandoc(command(name).help or "").split("\n\n")
    lines = [line for block in blocks if block.startswith("\b") for line in block.splitlines()]
    assert [line for line in lines if len(line) > 78] == []


# A word in quotes that may be an argument: not what is looked for in a page, as in `"--json" in line`.
ARGUMENT = re.compile(r'"(-{0,2}[a-z][\w-]*)"(?! (?:not )?in )')


@cache
def passed():
    """The arguments in each other file of this folder, and the words of its name."""
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    return {path: {*ARGUMENT.findall(path.read_text(encoding="utf-8")), *path.stem.split("_")} for path in files}


def unexercised(name, of):
    """The options that no file about the command passes."""
    about = [arguments for arguments in passed().values() if name in arguments]
    for option in of.params:
        spellings = {*option.opts, *option.secondary_opts}
        if isinstance(option, click.Option) and not any(spellings & arguments for arguments in about):
            yield option.opts[-1]


@pytest.mark.parametrize("name", ["cli", *COMMANDS])
def test_a_test_stands_behind_every_option(name):
    missing = list(unexercised(name, main if name == "cli" else command(name)))
    assert not missing, f"no test of flash-eval {name} passes {', '.join(missing)}"
    new = click.Command(name, params=[click.Option(["-r", "-q"]), click.Option(["-z", "--no-such-option"])])
    assert "--no-such-option" in unexercised(name, new)


# Small runs, and what their pages show beside the tables.
PAGES = {
    "perplexity": (
        ["--context", 32, "--max-windows", 1],
        ["ΔNLL", "top-1 agreement", "max |Δlogit|", "mean KL", "Same predictions", "flash:", "fallbacks"],
    ),
    "speed": (["-p", 8, "-g", 2, "-d", "0,8", "-r", 2], ["tg2 @ d8", "±", "flash:", "fallbacks"]),
    "finetune": (["-p", 16, "-r", 1], ["on/off", "max |Δ|", "flash:", "fallbacks"]),
    "kernels": (
        ["--seq-len", "16,32", "--quick", "--impl", "flash,naive"],
        ["peak ", "reads ", "faster", "flash against"],
    ),
    "kernels, passes": (["--seq-len", 16, "--quick", "--impl", "flash", "--pass", "forward,backward"], []),
    "kernels, decoding": (["--seq-len", 16, "--query-len", 1, "--quick", "--impl", "flash"], []),
}
EXAMPLES = {"tg2 @ d8": "tg32 @ d2048"}  # of which the help speaks by example
ARM = re.compile(r"^(patch )?(off|on)( |$)|( |^)(off|on)$")


def labels(page):
    """What stands at the head of the columns of a page in Markdown, and before its rows where they have names."""
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    head, _, *body = rows
    yield from head
    if not head[0]:
        yield from (row[0] for row in body)


@pytest.mark.parametrize("name", PAGES)
def test_the_help_explains_every_figure(invoke, model_folder, text_file, name):
    arguments, others = PAGES[name]
    which = name.partition(",")[0]
    source = [] if which == "kernels" else ["--model", model_folder]
    source += ["--dataset", text_file] if which == "perplexity" else []
    done = invoke(which, *source, *arguments, "-o", "md")
    assert done.exit_code == 0, done.output
    page = done.stdout.replace("\\|", "|")
    explained = " ".join(invoke(which, "-h").output.split())
    for label in labels(page):
        assert ARM.sub("", label) in explained, f"{which} -h does not say what {label!r} is"
    for label in others:
        assert label in page
        assert EXAMPLES.get(label, label).strip() in explained, f"{which} -h does not say what {label!r} is"
