"""`flash-eval kernels`: time, arithmetic and memory of the attention kernels themselves, side by side."""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from flash_evals import implementations, kernel_results, machine, options, runner
from flash_evals.contest import Contest
from flash_evals.errors import EvalError
from flash_evals.implementations import IMPLEMENTATIONS
from flash_evals.kernel_results import Settings
from flash_evals.measure import memory_method
from flash_evals.output import Outputs
from flash_evals.page import drawing
from flash_evals.page import kernels as page
from flash_evals.workload import GROUP_SIZE, ITEM_SIZE, PASSES, Heads, Pass, Workload

KV_BITS = (2, 3, 4, 6, 8)  # what mlx-lm offers
QUICK = {"seq_len": "128,512", "repetitions": 3, "max_seconds": 2.0}


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    return lambda text: names[names.index(text)]


def _implementations(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    """In the order of IMPLEMENTATIONS: the others are compared with the first."""
    installed = implementations.installed()
    if value is None:
        return installed
    known = list(IMPLEMENTATIONS)
    asked = options.listed(_one_of(known), ", ".join(known))(context, parameter, value)
    if missing := [name for name in asked if name not in installed]:
        why = f"it is not installed: pip install {implementations.TORCH}"
        raise EvalError(f"--impl {missing[0]}: {'it is for a CPU' if machine.kind() == 'gpu' else why}")
    return [name for name in known if name in asked]


def _quick(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.default_map = QUICK


def _list_option(
    name: str, default: str, metavar: str, read: Callable[[str], object], what: str, text: str
) -> Callable[..., Any]:
    check = options.listed(read, what)
    return click.option(name, default=default, show_default=True, metavar=metavar, callback=check, help=text)


def _kv_bits(text: str) -> int | None:
    return None if text == "none" else KV_BITS[[str(bits) for bits in KV_BITS].index(text)]


@click.command("kernels")
@_list_option(
    "--shape",
    "14/2x64",
    "H/KxD,...",
    Heads.parse,
    "query heads / key-value heads x head_dim, such as 14/2x64,",
    "Query heads / key-value heads x head_dim.",
)
@click.option(
    "-b",
    "--batch-size",
    default=1,
    show_default=True,
    callback=options.at_least(1),
    help="Sequences in one call.",
)
@_list_option("--seq-len", "512,1024,2048", "N,...", options.length, "numbers of keys", "Numbers of keys.")
@click.option(
    "--query-len",
    type=int,
    callback=options.at_least(1),
    help="Number of queries; 1 is a decode step.  [default: as many as keys, a prefill]",
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="Whether a query sees no key after itself.")
@click.option(
    "--window",
    type=int,
    callback=options.at_least(1),
    help="Sliding window: a query sees itself and the keys before it, so many in all.  [default: no window]",
)
@_list_option(
    "--dtype",
    "float32",
    "DTYPE,...",
    _one_of(list(ITEM_SIZE)),
    ", ".join(ITEM_SIZE),
    f"Of queries, keys and values: {', '.join(ITEM_SIZE)}.",
)
@_list_option(
    "--kv-bits",
    "none",
    "BITS,...",
    _kv_bits,
    f"none, {', '.join(map(str, KV_BITS))}",
    f"Keys and values of so many bits, quantised in groups of {GROUP_SIZE}: flash and mlx alone take them.",
)
@click.option(
    "--pass",
    "passes",
    default=PASSES[0],
    show_default=True,
    metavar="PASS,...",
    callback=options.listed(_one_of(PASSES), ", ".join(PASSES)),
    help=f"Of {', '.join(PASSES)}: what is timed.",
)
@click.option(
    "--impl",
    metavar="NAME,...",
    callback=_implementations,
    help=f"Of {', '.join(IMPLEMENTATIONS)}.  [default: all that are installed]",
)
@options.repetitions(9, "Trials of each implementation and configuration; what warms up is not counted.")
@click.option(
    "--max-seconds",
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    callback=options.at_least(0),
    help="An implementation that has spent so long on one configuration takes no further trials there; 0: no limit.",
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
@options.outputs
@options.plot("Draw time, memory and the share of the peak against the length into this .png or .svg file.")
def command(
    shape: list[Heads],
    batch_size: int,
    seq_len: list[int],
    query_len: int | None,
    causal: bool,
    window: int | None,
    dtype: list[str],
    kv_bits: list[int | None],
    passes: list[Pass],
    impl: list[str],
    repetitions: int,
    max_seconds: float,
    seed: int,
    outputs: Outputs,
    plot_file: Path | None,
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
    if window and not causal:
        raise EvalError(f"--window {window} is causal, and does not go with --no-causal")
    if query_len and causal and query_len > min(seq_len):
        raise EvalError(
            f"--query-len must be at most --seq-len, {min(seq_len)}, not {query_len}: the first queries would see "
            "no key, for which implementations have different answers"
        )
    workloads = [
        Workload(heads, batch_size, query_len or keys, keys, causal, window, name, pass_, bits)
        for heads in shape
        for name in dtype
        for bits in kv_bits
        for keys in seq_len
        for pass_ in passes
    ]
    if decode := [work.pass_ for work in workloads if work.is_decode and work.pass_ != "forward"]:
        raise EvalError(f"--pass {decode[0]} takes at least 2 queries: a single one is a decode step, and forward only")
    if any(kv_bits):
        _check_quantised(shape, passes, impl)
    described_machine = machine.describe(("torch",) if "torch" in impl else ())
    contests = {
        Contest(workload): [name for name in impl if not workload.kv_bits or name in implementations.QUANTISED]
        for workload in workloads
    }

    def work() -> Generator[None, None, None]:
        for contest, names in contests.items():
            yield from contest.hold(names, repetitions, max_seconds, seed)

    _, stopped = runner.run(work(), "trials", repetitions * sum(map(len, contests.values())))
    settings = options.given(Settings, memory=memory_method(), interrupted=stopped is not None)
    entries = kernel_results.entries(contests, settings, described_machine)

    found = page.description(entries)
    title = f"{found.facts[0]} · {described_machine.processor}, {described_machine.device}"
    draw = partial(drawing.save, plot_file, title, found.charts) if plot_file else None
    outputs.deliver(found, kernel_results.csv_rows(entries), draw)
    runner.end(stopped)


def _check_quantised(shape: list[Heads], passes: list[Pass], impl: list[str]) -> None:
    """Raises EvalError for what does not go with --kv-bits."""
    if passes != ["forward"]:
        raise EvalError("--kv-bits goes with --pass forward: there is no gradient through quantised keys and values")
    for heads in shape:
        if heads.dim % GROUP_SIZE:
            raise EvalError(
                f"--kv-bits takes head_dims that are multiples of {GROUP_SIZE}, its groups, not {heads.dim}"
            )
    if not set(impl) & set(implementations.QUANTISED):
        raise EvalError(f"--kv-bits goes with --impl {', '.join(implementations.QUANTISED)}, not {', '.join(impl)}")
