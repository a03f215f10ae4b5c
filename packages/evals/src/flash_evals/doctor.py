"""`flash-eval doctor`: what is here, what bounds the figures, what is broken; each finding with its cure.

The findings of `mlxlm-flash doctor` come first: the patch and all that it stands on. Then what measuring needs besides.
Nothing is imported before the check that is about it: doctor speaks where nothing can be measured.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from statistics import median
from typing import Any

import click
from mlxlm_flash_patch import doctor as patch_doctor
from mlxlm_flash_patch.doctor import Finding, Mark, ok, problem, warning

from flash_evals import data, hub, options, output
from flash_evals.errors import EvalError, first_line
from flash_evals.output import Outputs
from flash_evals.page.description import Description, Table
from flash_evals.record import Count, Record

ENABLES = {
    "datasets": "perplexity --dataset from the hub and from folders",
    "matplotlib": "report, and --plot of kernels and finetune",
    "torch": "kernels --impl torch",
}
STEADY = 0.8  # of the fastest measurement, within a second: what is slower has shared its time with others
LOGITS = 1e-3  # how far both arms' may be apart on the shipped model, whose largest are about 10; roundings make 1e-5
TF32_LOGITS = 1e-1  # the same where MLX multiplies in TF32
REINSTALL = "pip install --force-reinstall --no-deps"
REPORT = "please report it with this output"


@click.command("doctor")
@options.outputs_of("finding")
def command(outputs: Outputs) -> None:
    """What is here, what bounds the figures, what is broken, and the cures.

    \b
    ✓  fine
    !  works, and could be better
    ✗  broken: what is measured would be wrong, or nothing can be measured

    \b
    versions, MLXLM_FLASH, hook, extension, self-test, mlx-lm
                     the findings of `mlxlm-flash doctor`: whether flash attention
                     runs, computes what it should, and takes mlx-lm's calls
    cpu, metal, cuda instruction set and threads of flash's kernels; the GPU,
                     its architecture, driver and compiler, or what is missing
    BLAS             what multiplies MLX's matrices: on a Linux CPU the linear
                     layers bound all tokens/s, whatever attention does
    processor, threads, memory
                     what the machine has, and whether flash may use all of it
    multiply-adds    FLOP/s that flash's threads reach in registers, and
    memory reads     bytes/s from memory: no kernel on this CPU is faster
    matrix products  FLOP/s of MLX: in float32, beside the multiply-adds; of a
                     GPU also in bfloat16, beside the bytes/s of a memory copy
    peak memory      how the other commands measure it here
    demo model       that it loads, and that the patch changes who computes its
                     attention and not what comes out
    datasets, matplotlib, torch
                     whether installed, and for what
    cache, hub       where downloads go, and whether the hub answers; all but
                     --model HUB_ID and --dataset HUB_ID works without

    The machine is measured for some seconds. Exit code 1 if anything is broken. `mlxlm-flash doctor --model` says
    whether a model of yours is covered.
    """
    with output.progress() as progress:
        bar = progress.add_task("checks", total=1 + len(NEED_FLASH) + len(OTHERS))
        found = list(_guarded(patch_doctor.examine))
        flash_runs = all(finding.mark is not Mark.PROBLEM for finding in found)
        progress.advance(bar)
        for check in (*NEED_FLASH, *OTHERS):
            if flash_runs or check not in NEED_FLASH:
                found += _guarded(check)
            progress.advance(bar)
    described = None
    if flash_runs:
        from flash_evals import machine  # which cannot be imported where MLX does not load

        described = machine.describe()
    marks = [finding.mark for finding in found]
    findings = [{**vars(finding), "mark": finding.mark.name.lower()} for finding in found]
    result = Result(
        system=platform.platform(),
        python=platform.python_version(),
        environment=sys.prefix,
        findings=findings,
        broken=marks.count(Mark.PROBLEM),
        could_be_better=marks.count(Mark.WARNING),
        left_out=[] if flash_runs else [_name(check) for check in NEED_FLASH],
        machine=described,
    )
    outputs.deliver(description(result), findings)
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
        what = f"the check failed: {type(error).__name__}: {first_line(error)}"
        yield problem(_name(check), what, REPORT)


def _name(check: Callable[[], Iterator[Finding]]) -> str:
    return check.__name__.removeprefix("the_").replace("_", " ")


def hardware() -> Iterator[Finding]:
    """What the machine has, and whether flash may use all of it."""
    from flash_evals import implementations, machine

    cores, threads = os.cpu_count() or 1, implementations.threads()
    on_gpu = machine.kind() == "gpu"
    yield ok("processor", machine.describe().processor + ("" if on_gpu else f", {cores} cores"))
    if not on_gpu and threads < cores and "FLASHATTN_NUM_THREADS" not in os.environ:
        what = f"flash uses {threads} of {cores} cores, which are all that this process may have"
        yield warning("threads", what, "start it without taskset, or give the container more processors")
    yield ok("memory", f"{machine.physical_memory() / 1e9:.1f} GB, {machine.free_memory() / 1e9:.1f} GB of it free")


def bounds() -> Iterator[Finding]:
    """How fast the processor multiplies and reads, and whether it is left alone."""
    from flash_evals import machine

    if machine.kind() == "gpu":
        products = [f"{machine.peak_flops(each) / 1e12:,.1f} TFLOP/s in {each}" for each in ("bfloat16", "float32")]
        yield ok("matrix products", ", ".join(products) + (" (TF32)" if machine.tf32() else ""))
        yield ok("memory copy", f"{machine.bandwidth() / 1e9:,.0f} GB/s, reads and writes")
        return
    measured = machine.bounds()
    slowest, fastest = min(measured.multiply_adds), max(measured.multiply_adds)
    speeds = f"{slowest / 1e9:,.0f}–{fastest / 1e9:,.0f} GFLOP/s"
    if slowest < STEADY * fastest:
        cure = "stop what else runs, and let the machine cool down"
        yield warning("multiply-adds", f"{speeds} within seconds: times will scatter", cure)
    else:
        yield ok("multiply-adds", speeds)
    yield ok("memory reads", f"{median(measured.reads) / 1e9:,.0f} GB/s")
    speed = median(measured.matrix_products)
    share = speed / median(measured.multiply_adds)
    yield ok("matrix products", f"{speed / 1e9:,.1f} GFLOP/s, {share:.0%} of the multiply-adds")


def peak_memory() -> Iterator[Finding]:
    """How memory is measured."""
    from flash_evals import machine
    from flash_evals.measure import memory_method

    method = memory_method()
    if machine.kind() == "cpu" and sys.platform == "linux" and "resident" not in method:
        what = f"{method}: memory that a kernel takes by itself is not seen"
        yield warning("peak memory", what, "a system in which a process may write its own /proc/self/clear_refs")
    else:
        yield ok("peak memory", method)


def demo_model() -> Iterator[Finding]:
    """The shipped model loads, the patch takes its calls, and the logits stay the same."""
    import mlx.core as mx

    from flash_evals import machine, models
    from flash_evals.measure import ARMS, Flash, run

    try:
        loaded = models.load(None)
    except EvalError as error:
        yield problem("demo model", error.message, f"{REINSTALL} flash-evals")
        return
    tokens, flash = mx.arange(64)[None], Flash()

    def forward() -> mx.array:
        logits: mx.array = loaded.model(tokens)
        mx.eval(logits)
        return logits

    try:
        logits = {arm: run(arm, forward, tokens.size, flash)[0] for arm in ARMS}
    except EvalError as error:
        yield problem("demo model", error.message, "flash-eval switches the patch on and off by itself")
        return
    limit = TF32_LOGITS if machine.tf32() else LOGITS
    difference = float(mx.max(mx.abs(logits["on"] - logits["off"])))
    name = loaded.described.title
    if not flash.calls or flash.fallbacks:
        yield problem("demo model", f"{name}; flash: {flash}", f"{REINSTALL} mlxlm-flash-patch")
    elif not difference <= limit:  # NaN is no agreement either
        what = f"{name}: its logits differ by {difference:.1e} with the patch on"
        yield problem("demo model", what, REPORT)
    else:
        yield ok("demo model", f"{name}; flash: {flash}; max |Δlogit| {difference:.1e}")


def packages() -> Iterator[Finding]:
    """flash-evals itself, and what has a use where it is installed."""
    yield ok("versions", f"flash-evals {version('flash-evals')}")
    wanted = requires("flash-evals") or []
    for name, enables in ENABLES.items():
        try:
            yield ok(name, f"{version(name)}: {enables}")
        except PackageNotFoundError:
            [requirement] = [line.partition(";")[0].strip() for line in wanted if line.startswith(name)]
            yield warning(name, f"not installed: no {enables}", f"pip install '{requirement}'")


def caches() -> Iterator[Finding]:
    """Where downloads go."""
    import datasets  # type: ignore[import-untyped]
    from huggingface_hub import constants

    folders = {"HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_DATASETS_CACHE": datasets.config.HF_DATASETS_CACHE}
    for variable, folder in folders.items():
        path = Path(folder)
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if there.is_dir() and os.access(there, os.W_OK):
            yield ok("cache", f"{path}, {shutil.disk_usage(there).free / 1e9:,.0f} GB free")
        else:
            yield warning("cache", f"{path} cannot be written to: no downloads", f"{variable}=FOLDER")


def the_hub() -> Iterator[Finding]:
    """Whether it answers, and soon. Without it there is still enough to measure."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield ok("hub", "HF_HUB_OFFLINE is set: what is in the caches, and nothing else")
        return
    try:
        answers = hub.commit(data.WIKITEXT, "dataset", None) is not None
    except EvalError as error:
        yield warning("hub", f"{constants.ENDPOINT} answers: {error.message}", "another HF_ENDPOINT")
        return
    if answers:
        yield ok("hub", f"{constants.ENDPOINT} answers")
    else:
        what = f"{constants.ENDPOINT} does not answer: what is in the caches, and nothing else"
        yield warning("hub", what, "a network, HTTPS_PROXY or HF_ENDPOINT; --model FOLDER and --dataset FILE need none")


NEED_FLASH = (hardware, bounds, peak_memory, demo_model)
OTHERS = (packages, caches, the_hub)


def description(result: Result) -> Description:
    """The findings, a cure below what it cures."""
    rows = []
    for finding in result.findings:
        rows.append((Mark[finding["mark"].upper()].value, finding["subject"], finding["what"]))
        if finding["cure"]:
            rows.append(("", "", f"cure: {finding['cure']}"))
    notes = [f"broken: {result.broken} · could be better: {result.could_be_better}"]
    if result.left_out:
        notes.append(f"Left out, as flash attention does not run: {', '.join(result.left_out)}.")
    facts = [result.system, f"Python {result.python}", result.environment]
    return Description(result, facts, [Table("Findings", ["", "what", "finding"], rows)], notes)
