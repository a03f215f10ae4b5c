"""`flash-eval demo-model`: prints the folder of the model that comes with this package."""

import click

from flash_evals.work.models import DEMO_MODEL


@click.command("demo-model")
def command() -> None:
    """Print the folder of the model that comes with this package, a small Qwen2 in mlx-lm's layout.

    mlx_lm.generate --model "$(flash-eval demo-model)" --prompt "The for statement"
    """
    click.echo(DEMO_MODEL)
