"""`flash-eval kernels`: time, arithmetic and memory of the attention kernels themselves, side by side."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import click

from flash_evals.commands import options, runner
from flash_evals.commands.outputs import Outputs
from flash_evals.pages import kernels_page as page
from flash_evals.results import kernels_result
from flash_evals.results.errors import EvalError
from flash_evals.results.kernels_result import Settings
from flash_evals.results.workload import GROUP_SIZE, ITEM_SIZE, PASSES, Heads, Pass, Workload
from flash_evals.work import contest, implementations, machine
from flash_evals.work.implementations import IMPLEMENTATIONS, QUANTISED
from flash_evals.work.measure import memory_method

KV_BITS = {"none": None, **{str(bits): bits for bits in (2, 3, 4, 6, 8)}}  # what mlx-lm offers
QUICK = {"seq_len": "128,512", "repetitions": 3, "max_seconds": 2.0}


def _quick(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.default_map = QUICK


def _some_of(known: Iterable[str], *option: str, help: str, **others: Any) -> Callable[..., Any]:
    """An option that takes some of these names, which stand in its help for {}."""
    names = list(known)
    what = ", ".join(names)
    return options.several(
        *option, read=lambda item: names[names.index(item)], what=what, help=help.format(what), **others
    )


@click.command("kernels")
@options.several(
    "--shape",
    read=Heads.parse,
    what="query heads / key-value heads x head_dim, such as 14/2x64,",
    metavar="H/KxD,...",
    default="14/2x64",
    help="Query heads / key-value heads x head_dim.",
)
@options.number("-b", "--batch-size", least=1, default=1, text="Sequences in one call.")
@options.numbers("--seq-len", of="keys", least=1, default="512,1024,2048", text="Numbers of keys.")
@options.number("--query-len", least=1, type=int, text="Queries; 1 is a decode step.  [default: as many as keys]")
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether a query sees no key after itself.")
@options.number(
    "--window", least=1, type=int, text="Sliding window: keys that a query sees, up to its own.  [default: no window]"
)
@_some_of(ITEM_SIZE, "--dtype", metavar="DTYPE,...", default="float32", help="Of queries, keys and values: {}.")
@_some_of(
    KV_BITS,
    "--kv-bits",
    metavar="BITS,...",
    default="none",
    help=f"Bits of keys and values, quantised in groups of {GROUP_SIZE}, which flash and mlx alone take: {{}}.",
)
@_some_of(PASSES, "--pass", "passes", metavar="PASS,...", default=PASSES[0], help="What is timed, of {}.")
@_some_of(
    IMPLEMENTATIONS, "--impl", metavar="NAME,...", help="Who takes part, of {}.  [default: all that are installed]"
)
@options.repetitions(9, "Trials of each implementation and configuration; what warms up is not counted.")
@options.number(
    "--max-seconds",
    least=0,
    default=30.0,
    metavar="SECONDS",
    text="An implementation that has spent so long on one configuration takes no more trials there; 0: no limit.",
)
@click.option(
    "--quick",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_quick,
    help="Other defaults, for a first look: " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in QUICK.items()),
)
@options.seed("Of the random queries, keys, values and cotangents.")
@options.precision("float32", "flash")
@options.blas
@options.outputs
def command(
    shape: list[Heads],
    seq_len: list[int],
    query_len: int | None,
    dtype: list[str],
    kv_bits: list[str],
    passes: list[Pass],
    impl: list[str] | None,
    outputs: Outputs,
    **_: object,  # what workloads and settings take as it is
) -> None:
    """Time, FLOP/s and memory of the attention kernels, side by side.

    \b
    flash      flashattn_core.flash_attention
    mlx        mx.fast.scaled_dot_product_attention; for quantised keys
               and values mlx-lm's function: MLX has none
    naive      softmax(query @ key.T) @ value in MLX operations
    torch      torch.nn.functional.scaled_dot_product_attention, with
               as many threads as flash; on a CPU, when torch is installed
    forward    the output
    backward   the gradients of query, key and value for a random cotangent,
               from what the forward pass, which is not timed, has left
    forward_backward
               the output and the gradients
    time       median of the trials (20th–80th percentile), of one call
    GFLOP/s    for each key that a query sees 4 * head_dim forward and 10 *
               head_dim backward, whatever is computed again
    of peak    their share of what flash's threads reach with multiply-adds
               in registers; on a GPU, of MLX's matrix product of 8192 rows
               and columns in the same dtype (float32: TF32, with CUDA)
    K/V GB/s   for one query: each visible key and value read once
    of reads   their share of what flash's threads read from memory; on a
               GPU, of what a copy reads and writes; above 100 % where keys
               and values stay in the caches
    memory     what one call needs beyond its inputs; of backward the
               forward pass before it counts, too
    flash is   so many times faster or slower: the ratio of the medians; or
               no clear difference, if the trials overlap or are few
    flash against
               the geometric mean of these ratios, and their range
    trials     that count; fewer than --repetitions where --max-seconds
               ended them
    peak, reads
               those two bounds of the machine, measured in every round

    All see the same random numbers. Their results are compared first. Then they and the bounds of the machine take
    turns, in changing order. Short calls are repeated until a trial takes 20 ms; a GPU gets them in 8 lots, each
    evaluated at once. mlx and naive write the whole score matrix, so leave them out of long sequences. Ctrl-C ends the
    run and reports the finished trials.
    """
    installed = implementations.installed()
    impl = [name for name in IMPLEMENTATIONS if name in (impl or installed)]
    if not set(impl) <= set(installed):
        raise EvalError(f"--impl torch is not here: it takes a CPU, and pip install {implementations.TORCH}")
    problems: list[Workload] = [
        options.given(Workload, **heads._asdict(), dtype=name, kv_bits=bits, seq_len=keys, query_len=query_len or keys)
        for heads, name, bits, keys in product(shape, dtype, map(KV_BITS.get, kv_bits), seq_len)
    ]
    for problem in problems:
        _check(problem, passes, impl)
    if len({problem.is_decode for problem in problems}) > 1:
        raise EvalError("--seq-len 1 is a decode step, of which GB/s are shown: measure it apart from longer ones")
    described_machine = machine.describe(("torch",) if "torch" in impl else ())
    runner.say_what_bounds(described_machine)

    settings: Settings = options.given(Settings, memory=memory_method(), interrupted=False)
    contests = [
        (problem, pass_, [name for name in impl if not problem.kv_bits or name in QUANTISED])
        for problem, pass_ in product(problems, passes)
    ]
    work = (trial for each in contests for trial in contest.hold(*each, settings))
    total = settings.repetitions * sum(len(names) for *_, names in contests)
    trials, stopped = runner.collect(work, "trials", total)
    settings.interrupted = stopped is not None

    entries = list(kernels_result.entries(trials, settings, machine.kind(), described_machine))
    outputs.deliver(page.description(entries))
    runner.end(stopped)


def _check(work: Workload, passes: list[Pass], impl: list[str]) -> None:
    """Raises EvalError for options that do not go together."""
    keys, queries, dim, gradients = work.seq_len, work.query_len, work.head_dim, passes != ["forward"]
    quantised = ", ".join(QUANTISED)
    for wrong, why in (
        (work.window and not work.causal, f"--window {work.window} is causal, and does not go with --no-causal"),
        # The first queries would see no key, for which implementations have different answers.
        (work.causal and queries > keys, f"--causal takes a --query-len of at most --seq-len, {keys}, not {queries}"),
        (work.is_decode and gradients, "--pass takes at least 2 queries for gradients: a single one is a decode step"),
        (work.kv_bits and gradients, "--kv-bits goes with --pass forward: there is no gradient through quantised keys"),
        (work.kv_bits and dim % GROUP_SIZE, f"--kv-bits takes multiples of {GROUP_SIZE} as head_dim, not {dim}"),
        (work.kv_bits and not {*impl} & {*QUANTISED}, f"--kv-bits goes with --impl {quantised}, not {', '.join(impl)}"),
    ):
        if wrong:
            raise EvalError(why)
