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

KV_BITS = {"none": None, **{str(bits): bits for bits in (2, 3, 4, 6, 8)}}  # the widths that mlx-lm offers


def _some_of(known: Iterable[str], *option: str, help: str, **others: Any) -> Callable[..., Any]:
    """An option that takes some of the `known` names. In `help`, {} stands for the list of all `known` names."""
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
    help="Shapes: query heads / key-value heads x head_dim.",
)
@options.number("-b", "--batch-size", least=1, default=1, text="Sequences in one call.")
@options.numbers("--seq-len", of="keys", least=1, default="512,1024,2048", text="Numbers of keys to time.")
@options.number("--query-len", least=1, type=int, text="Queries; 1 means a decode step.  [default: as many as keys]")
@click.option("--causal/--no-causal", default=True, show_default=True, help="causal: a query sees no key after itself.")
@options.number(
    "--window", least=1, type=int, text="Sliding window: a query sees only this many keys.  [default: no window]"
)
@_some_of(ITEM_SIZE, "--dtype", metavar="DTYPE,...", default="float32", help="Dtypes of query, key and value: {}.")
@_some_of(
    KV_BITS,
    "--kv-bits",
    metavar="BITS,...",
    default="none",
    help=f"Bits of keys and values, quantised in groups of {GROUP_SIZE} (only flash and mlx): {{}}.",
)
@_some_of(PASSES, "--pass", "passes", metavar="PASS,...", default=PASSES[0], help="Passes to time: {}.")
@_some_of(
    IMPLEMENTATIONS, "--impl", metavar="NAME,...", help="Implementations to time: {}.  [default: all installed ones]"
)
@options.repetitions(9, "Trials of each implementation and configuration, after a warm-up.")
@options.number(
    "--max-seconds",
    least=0,
    default=30.0,
    metavar="SECONDS",
    text="Stop the trials of an implementation in a configuration after this time; 0: no limit.",
)
@options.seed("Seed of the random queries, keys, values and cotangents.")
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
    **_: object,  # the other options, which are passed on to the workloads and settings unchanged
) -> None:
    """Compare time, FLOP/s and memory of attention kernels.

    \b
    flash      flashattn_core.flash_attention
    mlx        mx.fast.scaled_dot_product_attention; for quantised keys
               and values mlx-lm's function, as MLX has none
    naive      softmax(query @ key.T) @ value in MLX operations
    torch      torch.nn.functional.scaled_dot_product_attention, with
               as many threads as flash; only on a CPU, with torch installed
    forward    computes the output
    backward   computes the gradients of query, key and value for a random
               cotangent; the forward pass before it is not timed
    forward_backward
               computes the output and the gradients
    time       median time of one call (20th–80th percentile of the trials)
    GFLOP/s    counts, for each key that a query sees, 4 * head_dim operations
               forward and 10 * head_dim backward, without recomputation
    of peak    GFLOP/s divided by the machine's peak. On a CPU, the peak is
               what flash's threads reach with multiply-adds in registers. On
               a GPU, it is what MLX reaches when it multiplies two matrices
               of 8192 x 8192 numbers of the same dtype (with CUDA, float32
               is multiplied as TF32).
    K/V GB/s   keys and values that one query reads per second; each visible
               one counts once
    of reads   K/V GB/s divided by the machine's reads. On a CPU, these are
               what flash's threads read from memory; on a GPU, what a copy
               reads and writes. The share exceeds 100 % where keys and
               values stay in the processor's caches.
    memory     what one call needs beyond its inputs; a backward pass
               includes the forward pass before it
    flash is   how many times faster or slower flash is than this row's
               implementation, by median times; or no clear difference, if
               the trials overlap or are few
    flash against
               flash's speed as a multiple of that implementation's:
               geometric mean and range over the shapes
    trials     number of trials: --repetitions, or fewer if --max-seconds
               ended them
    peak, reads
               the machine's peak and reads, measured in every round

    All implementations get the same random numbers, and flash-eval first compares their results. Then the
    implementations and the measurements of the machine take turns, in changing order. A trial repeats short calls
    until it takes 0.1 s. On a GPU, MLX evaluates these calls in 8 lots. mlx and naive write the whole score matrix, so
    leave them out for long sequences. Ctrl-C ends the run and reports the finished trials.
    """
    installed = implementations.installed()
    impl = [name for name in IMPLEMENTATIONS if name in (impl or installed)]
    if not set(impl) <= set(installed):
        raise EvalError(f"--impl torch needs MLX's CPU device, and pip install {implementations.TORCH}")
    problems: list[Workload] = [
        options.given(Workload, **heads._asdict(), dtype=name, kv_bits=bits, seq_len=keys, query_len=query_len or keys)
        for heads, name, bits, keys in product(shape, dtype, map(KV_BITS.get, kv_bits), seq_len)
    ]
    for problem in problems:
        _check(problem, passes, impl)
    if len({problem.is_decode for problem in problems}) > 1:
        raise EvalError("--seq-len 1 is a decode step, measured in GB/s: run it separately from longer --seq-len")
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
    options.given(Outputs).deliver(page.description(entries))
    runner.end(stopped)


def _check(work: Workload, passes: list[Pass], impl: list[str]) -> None:
    """Raises EvalError for options that do not go together."""
    keys, queries, dim, gradients = work.seq_len, work.query_len, work.head_dim, passes != ["forward"]
    quantised = ", ".join(QUANTISED)
    for wrong, why in (
        (work.window and not work.causal, f"--window {work.window} is causal: leave out --no-causal"),
        # With more queries than keys, the first queries see no key. Implementations return different things for these.
        (work.causal and queries > keys, f"--causal needs a --query-len of at most --seq-len {keys}, not {queries}"),
        (
            work.is_decode and gradients,
            "--pass with gradients needs at least 2 queries: a single query is a decode step",
        ),
        (work.kv_bits and gradients, "--kv-bits needs --pass forward: quantised keys and values have no gradient"),
        (work.kv_bits and dim % GROUP_SIZE, f"--kv-bits needs a multiple of {GROUP_SIZE} as head_dim, not {dim}"),
        (work.kv_bits and not {*impl} & {*QUANTISED}, f"--kv-bits needs --impl {quantised}, not {', '.join(impl)}"),
    ):
        if wrong:
            raise EvalError(why)
