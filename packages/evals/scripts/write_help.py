"""Writes docs/commands.md, the help of every command: `uv run packages/evals/scripts/write_help.py`."""

from collections.abc import Iterator
from pathlib import Path

import click
import flash_evals.cli
import mlxlm_flash_patch.cli

DOCUMENT = Path(__file__).parents[3] / "docs" / "commands.md"
WIDTH = 88  # columns
PROGRAMS = {"flash-eval": flash_evals.cli.main, "mlxlm-flash": mlxlm_flash_patch.cli.cli}
HEAD = """\
# Commands

This page shows the help of each command (`-h`). `packages/evals/scripts/write_help.py` writes it from the commands.
"""


def document() -> str:
    sections = [HEAD]
    for name, program in PROGRAMS.items():
        for path, page in pages(program, name):
            sections.append(f"{'##' if path == name else '###'} {path}\n\n```\n{page}\n```\n")
    return "\n".join(sections)


def pages(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yields (the words that run the command, its help), then the same for all its subcommands."""
    context = click.Context(
        command,
        parent,
        info_name=name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **command.context_settings | {"help_option_names": []},
    )
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from pages(below, each, context)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
