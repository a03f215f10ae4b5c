"""The command line: help that comes at once, and one line for whatever is wrong, before any work starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import click.testing
import flashattn_core
import mlxlm_flash_startup
import pytest
from flash_evals import models
from flash_evals.cli import COMMANDS, main
from flash_evals.models import DEMO_MODEL

Invoke = Callable[..., click.testing.Result]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_command(invoke: Invoke, option: str) -> None:
    page = invoke(option)
    assert page.exit_code == 0
    assert all(name in page.output for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_names_every_option(invoke: Invoke, name: str) -> None:
    page = invoke(name, "-h")
    assert page.exit_code == 0
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Argument):  # named in the usage, told of in the text
            assert parameter.metavar
            assert parameter.metavar in page.output
            continue
        assert all(spelling in page.output for spelling in parameter.opts)
        assert isinstance(parameter, click.Option)
        assert parameter.help


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout.split()[-1] == version("flash-evals")


def test_help_does_not_wait_for_mlx() -> None:
    program = (
        "import sys\nfrom flash_evals.cli import main\n"
        "main(['-h'], standalone_mode=False)\nassert not {'mlx', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_demo_model_prints_its_folder(invoke: Invoke) -> None:
    assert invoke("demo-model").stdout == f"{DEMO_MODEL}\n"


def test_unknown_command(invoke: Invoke) -> None:
    assert invoke("nonsense").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", "1"], "--context must be at least 2, not 1"),
        (["--stride", "0", "--context", "64"], "--stride must be between 1 and the context of 64, not 0"),
        (["--stride", "65", "--context", "64"], "--stride must be between 1 and the context of 64, not 65"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--max-windows", "0"], "--max-windows must be at least 1, not 0"),
        (["--context", "129"], "--context needs 129 positions, "),
        (["--dataset", "missing.txt"], "no such file or folder: missing.txt"),
        (["--split", "test"], "--split has no meaning for the file"),
        (["--model", "./missing"], "no such model folder: ./missing"),
        (
            ["--json", "/no/such/folder/out.json"],
            "--json /no/such/folder/out.json: /no/such/folder cannot be written to",
        ),
        (["--csv", "/"], "--csv /: it is a folder"),
    ],
)
def test_refused(
    refused: Callable[..., str], model_folder: Path, text_file: Path, arguments: list[str], says: str
) -> None:
    assert says in refused("perplexity", "--model", model_folder, "--dataset", text_file, *arguments)


def test_a_text_of_one_token_is_refused(refused: Callable[..., str], model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("T")
    line = refused("perplexity", "--model", model_folder, "--dataset", path, "--context", 8)
    assert "short.txt has 1 tokens for this model" in line


def test_an_unwritable_result_file_is_found_before_the_work(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", None)
    assert "it is a folder" in refused("perplexity", "--json", tmp_path)


@pytest.mark.parametrize("command", ["perplexity", "speed", "finetune", "kernels"])
def test_nonsense_in_a_variable_is_named(
    refused: Callable[..., str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backends() -> dict[str, str]:
        raise ValueError("FLASHATTN_NUM_THREADS must be a positive number, not 'many'")

    monkeypatch.setattr(flashattn_core, "backends", backends)
    assert "FLASHATTN_NUM_THREADS" in refused(command)


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_full_disk_leaves_the_page_and_says_so(
    invoke: Invoke, model_folder: Path, text_file: Path, option: str
) -> None:
    page = invoke("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64, option, "/dev/full")
    assert page.exit_code == 2
    assert "token perplexity" in page.stdout
    assert page.stderr == "Error: cannot write /dev/full: No space left on device\n"


def test_one_file_for_two_results_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "out"
    line = refused("perplexity", "--json", file, "--csv", tmp_path / "." / "out")
    assert f"--json and --csv are the same file: {file}" in line


def test_as_a_person_runs_it(tmp_path: Path) -> None:
    """The installed command: no traceback, the line on stderr, nothing on stdout."""
    command = Path(sys.executable).parent / "flash-eval"
    done = subprocess.run(
        [command, "perplexity", "--model", tmp_path], capture_output=True, text=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: {tmp_path} is not a model folder in mlx-lm's layout: it has no config.json\n"


def test_a_start_up_file_that_would_patch_both_arms(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlxlm-flash hook` with MLXLM_FLASH=1: what is off is off here."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(mlxlm_flash_startup, "_armed", False)
    monkeypatch.setenv("MLXLM_FLASH", "1")
    mlxlm_flash_startup.arm()
    assert any(isinstance(finder, mlxlm_flash_startup.Watch) for finder in sys.meta_path)
    invoke("demo-model")
    assert not any(isinstance(finder, mlxlm_flash_startup.Watch) for finder in sys.meta_path)
