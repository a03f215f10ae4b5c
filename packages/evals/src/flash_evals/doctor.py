"""`flash-eval doctor`: what is here, what bounds the figures, what is broken; each finding with its cure.

The findings of `mlxlm-flash doctor` come first: the patch and all that it stands on. Then what measuring needs besides.
Nothing is imported before the check that is about it: doctor speaks where nothing can be measured.
"""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from statistics import median
from typing import Any

import click
from mlxlm_flash_patch import doctor as patch_doctor
from mlxlm_flash_patch.doctor import Finding, Mark, ok, problem, warning

from flash_evals import options, output
from flash_evals.errors import EvalError, one_line
from flash_evals.output import Outputs
from flash_evals.page.description import Description, Table
from flash_evals.record import Count, Record

STEADY = 0.8  # of the fastest measurement, within a second: what is slower has shared its time with others
# How far both arms' logits may be apart on the shipped model, whose largest are about 10: roundings make 1e-5.
LOGITS, TF32_LOGITS = 1e-3, 1e-1
REINSTALL = "pip install --force-reinstall --no-deps flash-evals mlxlm-flash-patch flashattn-core, or else report this"


@click.command("doctor")
@options.outputs_of("finding")
def command(outputs: Outputs) -> None:
    """What is here, what bounds the figures, what is broken, and the cures.

    \b
    ✓  fine
    !  works, and could be better
    ✗  broken: what is measured would be wrong, or nothing can be measured

    \b
    versions, MLXLM_FLASH, extension, self-test, attention, mlx-lm, cpu, metal,
    cuda, BLAS, checked
        what `mlxlm-flash doctor` finds: whether flash attention runs, computes
        what it should, and takes MLX's calls; what multiplies MLX's matrices
    processor, threads, memory, peak memory
        what the machine has, whether flash may use all of it, and how the other
        commands measure memory here
    multiply-adds, memory reads, matrix products, memory copy
        FLOP/s of flash's threads in registers, and bytes/s from memory: no kernel
        on this CPU is faster; FLOP/s of MLX, and bytes/s that a GPU copies
    model
        that the one in this package loads, and that the patch changes who
        computes its attention and not what comes out

    The machine is measured for some seconds. Exit code 1 if anything is broken. `mlxlm-flash doctor --model` says
    which attention of a model of yours is flash attention.
    """
    found = [*_guarded(patch_doctor.examine), ok("versions", f"flash-evals {version('flash-evals')}")]
    flash_runs = all(finding.mark is not Mark.PROBLEM for finding in found)
    described = None
    if flash_runs:
        from flash_evals import machine  # which cannot be imported where MLX does not load

        described = machine.describe()
        with output.progress() as progress:
            for check in progress.track(NEED_FLASH, description="checks"):
                found += _guarded(check)
    marks = [finding.mark for finding in found]
    findings = [{**vars(finding), "mark": finding.mark.name.lower()} for finding in found]
    result = Result(
        system=platform.platform(),
        python=platform.python_version(),
        environment=sys.prefix,
        findings=findings,
        broken=marks.count(Mark.PROBLEM),
        could_be_better=marks.count(Mark.WARNING),
        left_out=[] if flash_runs else [check.__name__ for check in NEED_FLASH],
        machine=described,
    )
    rows = [(f.mark.value, f.subject, f"{f.what} · cure: {f.cure}" if f.cure else f.what) for f in found]
    notes = [f"broken: {result.broken} · could be better: {result.could_be_better}"]
    if result.left_out:
        notes.append(f"Left out, as flash attention does not run: {', '.join(result.left_out)}.")
    facts = [result.system, f"Python {result.python}", result.environment]
    outputs.deliver(Description(result, facts, [Table("Findings", ["", "what", "finding"], rows)], notes), findings)
    if result.broken:
        sys.exit(1)


class Result(Record, tag_field="command", tag="doctor"):
    system: str
    python: str
    environment: str
    findings: list[dict[str, str]]  # mark (ok, warning, problem), subject, what, cure
    broken: Count
    could_be_better: Count
    left_out: list[str]
    machine: Any  # a machine.Machine, or null


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails is a finding, and costs none of the others."""
    try:
        yield from check()
    except Exception as error:
        yield problem(check.__name__, f"the check failed: {type(error).__name__}: {one_line(error)}", REINSTALL)


def hardware() -> Iterator[Finding]:
    """What the machine has, whether flash may use all of it, and how its memory is measured."""
    from flash_evals import implementations, machine, measure

    cores, threads = os.cpu_count() or 1, implementations.threads()
    on_gpu = machine.kind() == "gpu"
    yield ok("processor", machine.describe().processor + ("" if on_gpu else f", {cores} cores"))
    if not on_gpu and threads < cores and "FLASHATTN_NUM_THREADS" not in os.environ:
        what = f"flash uses {threads} of {cores} cores, which are all that this process may have"
        yield warning("threads", what, "start it without taskset, or give the container more processors")
    yield ok("memory", f"{machine.physical_memory() / 1e9:.1f} GB, {machine.free_memory() / 1e9:.1f} GB of it free")
    yield ok("peak memory", measure.memory_method())


def bounds() -> Iterator[Finding]:
    """How fast the processor multiplies and reads, and whether it is left alone."""
    from flash_evals import machine

    if machine.kind() == "gpu":
        products = [f"{machine.products(each) / 1e12:,.1f} TFLOP/s in {each}" for each in ("bfloat16", "float32")]
        yield ok("matrix products", ", ".join(products) + (" (TF32)" if machine.tf32() else ""))
        yield ok("memory copy", f"{machine.bandwidth() / 1e9:,.0f} GB/s, reads and writes")
        return
    multiply_adds = [machine.peak_flops("float32") for _ in range(5)]
    slowest, fastest = min(multiply_adds), max(multiply_adds)
    speeds = f"{slowest / 1e9:,.0f}–{fastest / 1e9:,.0f} GFLOP/s"
    if slowest < STEADY * fastest:
        yield warning("multiply-adds", f"{speeds}: times will scatter", "stop what else runs, and let it cool down")
    else:
        yield ok("multiply-adds", speeds)
    yield ok("memory reads", f"{machine.bandwidth() / 1e9:,.0f} GB/s")
    speed = machine.products("float32")
    yield ok("matrix products", f"{speed / 1e9:,.1f} GFLOP/s, {speed / median(multiply_adds):.0%} of the multiply-adds")


def model() -> Iterator[Finding]:
    """The shipped model loads, the patch takes its calls, and the logits stay the same."""
    import mlx.core as mx
    import numpy as np

    from flash_evals import machine, measure, models

    loaded, tokens, flash = models.load(None), mx.arange(64)[None], measure.Flash()
    try:
        off, on = (
            measure.run(arm, lambda: np.array(loaded.model(tokens)), tokens.size, flash)[0] for arm in measure.ARMS
        )
    except EvalError as error:
        yield problem("model", error.message, "flash-eval switches the patch on and off by itself")
        return
    difference = np.abs(on - off).max()
    what = f"{loaded.described.title}; flash: {flash}; max |Δlogit| {difference:.1e}"
    agree = difference <= (TF32_LOGITS if machine.tf32() else LOGITS)  # NaN does not
    is_well = (flash.calls or flash.left) and not flash.fallbacks and agree
    yield ok("model", what) if is_well else problem("model", what, REINSTALL)


NEED_FLASH = (hardware, bounds, model)
