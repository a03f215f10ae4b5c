"""The command mlxlm-flash. Each subcommand has its own imports, so `doctor` works even if MLX does not load."""

import json
import os
import platform
import sys
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from flashattn_core.arguments import Precision

    from .run import Program

MODES = ("0", "1", "strict", "float32", "float32,strict")  # values of MLXLM_FLASH


class Refusal(click.ClickException):
    """Ends the command with one line on stderr and the exit code of a usage error."""

    exit_code = 2


def _preload(context: click.Context, parameter: click.Parameter, choice: str | None) -> None:
    if choice is not None:
        _require_package()
        from .blas import preload

        try:
            preload(choice)
        except ValueError as error:
            raise Refusal(str(error)) from error


# flash-eval has this option, too. The option is eager, so that the program restarts before it does any work.
blas_option = click.option(
    "--blas",
    metavar="PATH|auto",
    is_eager=True,
    expose_value=False,
    callback=_preload,
    help="Linux CPU only: restart the program with this BLAS library preloaded, for MLX's matrix products. auto: use "
    "OpenBLAS if MLX would otherwise use the slow reference BLAS.",
)


# flash-eval has these options, too. mlx_lm.generate has options of the same names.
kv_bits_option = click.option(
    "--kv-bits",
    type=click.Choice([8, 4]),
    help="Quantise the KV caches that mlx-lm makes, also rotating caches and batches.",
)
kv_group_size_option = click.option(
    "--kv-group-size",
    type=click.Choice([32, 64, 128]),
    default=64,
    show_default=True,
    help="Elements of a key or value that share a scale and a bias.",
)
quantized_kv_start_option = click.option(
    "--quantized-kv-start",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="Keep 16 bits in a cache until it holds N tokens.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlxlm-flash-patch", prog_name="mlxlm-flash")
def cli() -> None:
    """Run MLX programs with flash attention, without changing them."""


# Words after COMMAND reach the program unchanged, even -h. COMMAND itself may be -m.
@cli.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option(
    "--precision",
    type=click.Choice(["input", "float32"]),
    help="input (default): 16-bit results are as accurate as those of MLX's own attention. float32: cast to float32, "
    "compute, cast back.",
)
@kv_bits_option
@kv_group_size_option
@quantized_kv_start_option
@blas_option
@click.argument("command", metavar="COMMAND|SCRIPT|-m MODULE")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run(
    precision: "Precision | None", command: str, arguments: tuple[str, ...], **kv: int | None
) -> "tuple[Program, bool]":
    """Run a program with flash attention on.

    COMMAND is a command that a package in this environment installs, such as mlx_lm.generate. SCRIPT is a Python
    file, MODULE a module that `python -m` runs. The program gets ARGS, and keeps its exit code and streams.
    mlxlm-flash prints the settings to stderr at the start, and at the end which attention ran. With --kv-bits it also
    prints the most that the caches held at once.

    \b
      mlxlm-flash run mlx_lm.generate --model DIR --prompt "Hello"
      mlxlm-flash run my_script.py --its-option
      mlxlm-flash run python my_script.py --its-option
      mlxlm-flash run -m my_package.train

    \b
    MLXLM_FLASH in the environment:
      0               run without flash attention
      1               run with flash attention (default)
      strict          fail if a call falls back, or if flash attention never ran
      float32         use --precision float32 by default
      float32,strict  both of these
    """
    _require_package()
    from . import run as running
    from .blas import REFERENCE, blas

    mode = os.environ.get("MLXLM_FLASH", "1")
    if mode not in MODES:
        raise Refusal(f"MLXLM_FLASH is {mode!r}, expected one of {', '.join(MODES)}")
    try:
        program = running.find(command, arguments)
    except LookupError as error:
        raise Refusal(str(error)) from error
    is_launcher = os.path.basename(program.argv[0]) == "mlx.launch"
    strict = mode.endswith("strict") and not is_launcher
    if mode == "0":
        running.say("flash attention off: MLXLM_FLASH=0", sys.stderr)
    elif is_launcher:
        what = "the child processes of mlx.launch are not patched"
        cure = "to patch each of them: mlx.launch OPTIONS -- mlxlm-flash run COMMAND"
        running.say(f"flash attention off: {what}; {cure}", sys.stderr)
    else:
        running.switch_on(strict, precision or ("float32" if mode.startswith("float32") else "input"), **kv)
    if blas() == "reference":
        running.say(REFERENCE, sys.stderr)
    return program, strict


@cli.command()
def status() -> None:
    """Show versions, backends and the functions that the patch replaces."""
    _require_package()
    import flashattn_core

    from .patch import joined, versions
    from .patch_points import POINTS

    click.echo(joined(versions()))
    for backend, description in flashattn_core.backends().items():
        click.echo(f"{backend}: {description}")
    click.echo(f"functions that the patch replaces: {', '.join(point.name for point in POINTS)}")


@cli.command()
@click.option(
    "--model",
    metavar="DIR|ID",
    help="Check which attention calls of this model use flash attention. A hub id must be in the local hub cache.",
)
@click.option("--kernels", is_flag=True, help="Compare every GPU kernel's results with the CPU's; this takes minutes.")
@click.option("--tune", is_flag=True, help="Time the GPU kernels, as `mlxlm-flash tune` does; this takes a minute.")
@click.option("--json", "file", type=click.File("w", "utf-8", lazy=False), help="Write the findings to this file.")
@click.pass_context
def doctor(ctx: click.Context, model: str | None, kernels: bool, tune: bool, file: TextIO | None) -> None:
    """Look for what is broken or slow, and name the cure.

    Each line is one finding: ✓ fine, ! could be better, ✗ broken. The exit code is 1 if anything is broken. If
    something is wrong on your machine, send us the file that --json writes.
    """
    from .doctor import examine, report

    click.echo(f"environment: {sys.prefix}, Python {platform.python_version()}\n")
    findings = []
    try:
        for finding in examine(model, kernels, tune):
            click.echo(str(finding))
            findings.append(finding)
    finally:  # also after an error or Ctrl-C
        if file is not None:
            json.dump(report(findings), file, indent=1, ensure_ascii=False)
    result = report(findings)
    click.echo(f"\nbroken: {result['broken']} · could be better: {result['could_be_better']}")
    ctx.exit(1 if result["broken"] else 0)


@cli.command()
def tune() -> None:
    """Measure what flash attention costs on this GPU, beside MLX's own attention.

    Later programs leave a call to MLX where MLX's own attention is estimated to be faster. The costs of an NVIDIA H100
    and H200 are known. On other GPUs plain calls are left to MLX until you run this command. It takes a minute, and
    writes a file into your cache folder. To undo it, delete the file. On a CPU there is nothing to measure.
    """
    _require_package()
    from .tune import as_text, measured, write

    costs: dict[str, float] = {}
    try:
        for line in measured(costs):
            click.echo(line)
        text = as_text(costs)
        click.echo(f"\n{text}written to {write(text)}")
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from error


def _require_package() -> None:
    """Raises the stored error if MLX or flashattn_core failed to load. Importing MLX again may crash the process."""
    from . import enable  # noqa: F401


def main() -> None:
    """The command's entry point. It starts the program outside click, because click catches Ctrl-C and broken pipes."""
    try:
        program: tuple[Program, bool] | int | None = cli.main(prog_name="mlxlm-flash", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C
        sys.exit(130)
    except (ImportError, RuntimeError, ValueError) as error:
        click.ClickException(str(error)).show()
        sys.exit(1)
    if not isinstance(program, tuple):
        sys.exit(program)
    from .run import start

    start(*program)
