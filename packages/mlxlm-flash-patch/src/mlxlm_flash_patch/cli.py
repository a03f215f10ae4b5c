"""The command mlxlm-flash: `run` puts flash attention under an unmodified program, `status` says what for."""

import os
import sys

import click
import flashattn_core

from . import launch
from .registry import supported
from .status import count, versions


class Refusal(click.ClickException):
    """What was asked cannot be done: one line on stderr, and the exit code of a usage error."""

    exit_code = 2


class Verbatim(click.Command):
    """Takes everything behind its own name as it is: an -h behind COMMAND belongs to COMMAND."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours = not args or args[0] in ("-h", "--help", "--")
        return super().parse_args(ctx, args if ours else ["--", *args])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlxlm-flash-patch", prog_name="mlxlm-flash")
def cli() -> None:
    """Flash attention for mlx-lm, without touching your scripts."""


@cli.command(cls=Verbatim, options_metavar="[-h]")
@click.argument("command", metavar="COMMAND|SCRIPT|-m MODULE")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run(command: str, arguments: tuple[str, ...]) -> launch.Program:
    """Run a program with flash attention on.

    COMMAND is a command of mlx-lm, such as mlx_lm.generate; SCRIPT is a Python file, MODULE what
    `python -m` takes. ARGS are the program's, and so are the exit code and the streams. One line on stderr
    says at the start what is on, and one at the end what ran.

    \b
      mlxlm-flash run mlx_lm.generate --model DIR --prompt "Hello"
      mlxlm-flash run my_script.py --its-option
      mlxlm-flash run -m my_package.train

    MLXLM_FLASH in the environment overrides: 0 runs the program without flash attention, 1 with it, and
    strict makes an error of every call that would go to mlx-lm's own attention, and of a program in which
    flash never ran.
    """
    try:
        return launch.find(command, arguments)
    except LookupError as error:
        raise Refusal(str(error)) from error


@cli.command()
def status() -> None:
    """Show versions, backends and the model types that would be patched."""
    click.echo(" · ".join(f"{name} {number}" for name, number in versions().items()))
    for backend, description in flashattn_core.backends().items():
        click.echo(f"{backend}: {description}")
    click.echo(f"{count(len(supported()), 'model type')}: {', '.join(supported())}")


def main() -> None:
    """Entry point. The program runs outside click, which has its own ways with Ctrl-C and broken pipes."""
    mode = os.environ.get("MLXLM_FLASH", "1")
    try:
        program = cli.main(prog_name="mlxlm-flash", standalone_mode=False)
        if not isinstance(program, launch.Program):
            sys.exit(program)
        if mode not in launch.MODES:
            raise Refusal(f"MLXLM_FLASH is {mode!r}, expected one of {', '.join(launch.MODES)}")
        try:
            launch.switch_on(mode)
        except (ImportError, RuntimeError) as error:
            raise click.ClickException(str(error)) from error
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    launch.start(program, mode)
