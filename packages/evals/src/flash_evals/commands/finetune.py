"""`flash-eval finetune`: LoRA training steps of several lengths, patch off and on."""

import click

from flash_evals.commands import options, runner
from flash_evals.commands.outputs import Outputs
from flash_evals.pages import finetune_page as page
from flash_evals.results.arms import Flash
from flash_evals.results.errors import EvalError
from flash_evals.results.finetune_result import Result, Settings, Skipped
from flash_evals.work import machine, models
from flash_evals.work.measure import memory_method


@click.command("finetune")
@options.model
@options.numbers(
    "-p", "--seq-len", of="tokens", least=1, default="512,1024,2048,4096,8192", text="Sequence lengths in tokens."
)
@options.number("-b", "--batch-size", least=1, default=1, text="Sequences in one step.")
@click.option(
    "--num-layers",
    type=int,
    help="Layers with adapters, counted from the last; -1: all.  [default: 16, or all if there are fewer]",
)
@options.number("--rank", least=1, default=8, text="Rank of the LoRA adapters.")
@click.option("--grad-checkpoint", is_flag=True, help="Save memory: compute each layer again for its gradient.")
@options.number(
    "--max-memory",
    least=0,
    type=float,
    metavar="GB",
    text="Skip lengths at which a step without the patch needs more memory than this.  [default: the free memory]",
)
@options.number(
    "--max-seconds",
    least=0,
    default=120.0,
    metavar="SECONDS",
    text="Stop the steps of a length after this time; 0: no limit.",
)
@options.repetitions(5, "Steps of each length and arm, after one that warms up.")
@options.seed("Seed of the random tokens and the adapters.")
@options.precision("input", "the patch")
@options.blas
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    num_layers: int | None,
    max_memory: float | None,
    **_: object,  # the other options, which are passed on to the settings unchanged
) -> None:
    """Compare time and memory of LoRA fine-tuning steps, patch off and patch on.

    \b
    step           median time of a training step (20th–80th percentile):
                   forward, gradient and Adam's update, compiled
    tokens/s       tokens of a step divided by its median time
    peak memory    the most that a step needs on top of the model, the
                   adapters and Adam's state
    loss           the loss before the last step
    steps          counted steps of each arm. A length that reaches
                   --max-seconds takes fewer than --repetitions. If the
                   warm-up alone reaches that time, it counts as a step.
    max |Δ|        largest difference between the two arms' losses at any step
    on/off         patch on divided by patch off; ~ marks no clear
                   difference: the steps overlap or are few
    flash:         with the patch on: calls of each flash kernel;
                   fallbacks (calls that flash attention cannot compute)
                   with the reason; and calls left to MLX's own attention,
                   because it is faster

    A step does what a step of mlx_lm.lora does, with its learning rate and scale. Both arms, patch off and patch on,
    begin with the same adapters, take turns at going first and learn from the same random tokens. Random tokens need
    the same time and memory as any text, but the loss says nothing about the model. Without the patch, attention's
    memory grows with the square of the length. flash-eval skips lengths that do not fit into memory, and names them.
    Ctrl-C ends the run and reports the finished steps.
    """
    from flash_evals.work import training  # imported here, so that -h need not wait for mlx-lm

    described_machine = machine.describe()
    loaded = models.load(model, revision)
    there = len(loaded.model.layers)
    layers = {None: min(training.DEFAULTS["num_layers"], there), -1: there}.get(num_layers, num_layers)
    if layers not in range(1, there + 1):  # mlx-lm would take 0 as all layers
        raise EvalError(f"--num-layers must be -1, or 1 to {there} (the layers of {loaded.name}), not {num_layers}")
    settings: Settings = options.given(
        Settings,
        num_layers=layers,
        learning_rate=training.DEFAULTS["learning_rate"],
        max_memory_gb=max_memory,
        memory=memory_method(),
    )
    for length in settings.seq_len:
        loaded.require_positions(length, f"--seq-len {length}")
    runner.say_what_bounds(described_machine)

    skipped: list[Skipped] = []
    with training.trainable(loaded.model, settings.num_layers, settings.rank, settings.grad_checkpoint, settings.seed):
        work, total = training.lengths(loaded, settings, skipped), len(settings.seq_len) * settings.repetitions
        measured, stopped = runner.collect(work, "steps, off and on", total)
    if not measured:
        raise EvalError("; ".join(length.reason for length in skipped))
    lengths = list({length.seq_len: length for length in measured}.values())
    result = Result(
        model=loaded.described,
        settings=settings,
        results=lengths,
        skipped=skipped,
        flash=Flash.sum(length.flash for length in lengths),
        interrupted=stopped is not None,
        machine=described_machine,
    )

    options.given(Outputs).deliver(page.description(result))
    runner.end(stopped)
