"""The command mlxlm-flash. Each subcommand has its own imports, so `doctor` works even if MLX does not load."""

import errno
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .modes import MODES


class Refusal(click.ClickException):
    """Ends the command with one line on stderr and the exit code of a usage error."""

    exit_code = 2


@contextmanager
def full_disk() -> Iterator[None]:
    """Turns the error of a full disk into one line. flash-eval uses this, too."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left at exit, and would fail again
        raise Refusal(str(error)) from error


def _writable(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Raises BadParameter before the work starts if the file cannot be written. Leaves the file as it is."""
    if file is not None:
        is_new = not file.exists()
        try:
            file.open("a").close()
        except OSError as error:
            raise click.BadParameter(f"cannot write {file}: {error.strerror}") from error
        if is_new:
            file.unlink()
    return file


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


def _integer(context: click.Context, parameter: click.Parameter, given: str | None) -> int | None:
    return None if given is None else int(given)


# flash-eval has these options, too. mlx_lm.generate has options of the same names.
kv_bits_option = click.option(
    "--kv-bits",
    type=click.Choice(["8", "4"]),
    callback=_integer,
    help="Quantise the KV caches that mlx-lm makes, also rotating caches and batches.",
)
kv_group_size_option = click.option(
    "--kv-group-size",
    type=click.Choice(["32", "64", "128"]),
    callback=_integer,
    default="64",
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


# COMMAND may be -m, which is no option of `run`. Words after COMMAND reach the program unchanged, even -h.
@cli.command(
    options_metavar="[-h] [OPTIONS]",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
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
def run(command: str, arguments: tuple[str, ...], **settings: Any) -> tuple[Any, dict[str, Any]]:
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
    from .run import find

    try:
        return find(command, arguments), settings
    except LookupError as error:
        raise Refusal(str(error)) from error


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
    help="Check which attention calls of this model use flash attention. For a hub id, the local hub cache must "
    "already hold its config.json.",
)
@click.option("--kernels", is_flag=True, help="Compare every GPU kernel's results with the CPU's; this takes minutes.")
@click.option("--tune", is_flag=True, help="Time the GPU kernels, as `mlxlm-flash tune` does; this takes a minute.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path), callback=_writable, help="Write the findings to this file."
)
@click.pass_context
def doctor(ctx: click.Context, model: str | None, kernels: bool, tune: bool, file: Path | None) -> None:
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
            file.write_text(json.dumps(report(findings), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
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
    from .tune import costs, measured, write

    found = []
    try:
        for each in measured():
            found.append(each)
            click.echo(each.line)
        text = costs(found)
        click.echo(f"\n{text}written to {write(text)}")
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from error


def _require_package() -> None:
    """Raises the stored error if MLX or flashattn_core failed to load. Importing MLX again may crash the process."""
    from . import enable  # noqa: F401


def main() -> None:
    """The command's entry point. It starts the program outside click, because click catches Ctrl-C and broken pipes."""
    mode = os.environ.get("MLXLM_FLASH", "1")
    try:
        with full_disk():
            started = cli.main(prog_name="mlxlm-flash", standalone_mode=False)
        if not isinstance(started, tuple):  # the exit code of another command than `run`
            sys.exit(started)
        program, settings = started
        if mode not in MODES:
            raise Refusal(f"MLXLM_FLASH is {mode!r}, expected one of {', '.join(MODES)}")
        from . import run
        from .blas import REFERENCE, blas

        strict = mode.endswith("strict") and not program.is_launcher
        precision: Any = settings.pop("precision") or ("float32" if mode.startswith("float32") else "input")
        no_effect = ", and --kv-bits has no effect" if settings["kv_bits"] else ""
        if mode == "0":
            run.say(f"flash attention off: MLXLM_FLASH=0{no_effect}", sys.stderr)
        elif program.is_launcher:
            what = "the child processes of mlx.launch are not patched"
            cure = "to patch each of them: mlx.launch OPTIONS -- mlxlm-flash run COMMAND"
            run.say(f"flash attention off: {what}{no_effect}; {cure}", sys.stderr)
        else:
            run.switch_on(strict, precision, **settings)
        if blas() == "reference":
            run.say(REFERENCE, sys.stderr)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C
        sys.exit(130)
    except (ImportError, RuntimeError, ValueError) as error:
        click.ClickException(str(error)).show()
        sys.exit(1)
    run.start(program, strict)
