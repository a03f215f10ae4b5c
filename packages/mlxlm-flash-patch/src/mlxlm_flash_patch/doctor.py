"""`mlxlm-flash doctor` prints one line for each finding. If something is slow or broken, the line names the cure.

doctor stops after a failure that makes all later checks pointless. Each check has its own imports, so doctor works even
if the package does not load.
"""

import contextlib
import operator
import os
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from typing import Any

# Maps each Linux package that installs libmlx to the extra of mlx that requires the package.
LIBMLX = {"mlx-cuda-12": "mlx[cuda12]", "mlx-cuda-13": "mlx[cuda13]", "mlx-cpu": "mlx[cpu]"}
# This project's packages. They require certain versions of mlx, nanobind-backend, mlx-lm and click.
PINNED = ("flashattn-core", "mlxlm-flash-patch")
RELATIONS = {">=": operator.ge, "<=": operator.le}
CPU_VARIABLES = ("FLASHATTN_CPU_ISA", "FLASHATTN_NUM_THREADS")


class Mark(Enum):
    OK = "✓"
    WARNING = "!"  # works, but could be better
    PROBLEM = "✗"  # flash attention does not run, or runs wrongly


@dataclass(frozen=True)
class Finding:
    mark: Mark
    subject: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.mark.value} {self.subject}: {self.what}" + (f" · cure: {self.cure}" if self.cure else "")


ok = partial(Finding, Mark.OK)
warning = partial(Finding, Mark.WARNING)
problem = partial(Finding, Mark.PROBLEM)


def examine(model: str | None = None, with_kernels: bool = False, with_times: bool = False) -> Iterator[Finding]:
    """Runs the checks and yields their findings. The arguments are the command's options."""
    for check in (versions, variable, extension, cpu, matrix_products, numbers, seam, checks_before):
        broken = False
        for finding in check():
            broken |= finding.mark is Mark.PROBLEM
            yield finding
        if broken and check in (extension, cpu):
            return
    if with_kernels:
        yield from kernels()
    if with_times:
        yield from times()
    if model is not None:
        yield from coverage(model)


def versions() -> Iterator[Finding]:
    """Compares the installed versions with those that the packages in PINNED require."""
    for package in PINNED:
        try:
            required = requires(package) or []
        except PackageNotFoundError:
            yield problem("versions", f"{package} is not installed", f"pip install {package}")
            continue
        yield ok("versions", f"{package} {version(package)}")
        for line in required:
            # Requirements of extras end with a marker (`; extra == ...`), so they do not match.
            needed = re.fullmatch(r"([\w-]+)((?:(?:==|>=|<=)[\d.]+,?)+)", line)
            if needed and needed[1] not in PINNED:
                yield _needed(needed[1], dict(re.findall(r"(==|>=|<=)([\d.]+)", needed[2])))


def _needed(name: str, limits: dict[str, str]) -> Finding:
    """Compares an installed version with `limits`, such as ``{">=": "0.32.2", "<=": "0.32.4"}``."""
    extra = _mlx() if name == "mlx" else name
    newest = f"=={limits['<=']}" if "<=" in limits else ",".join(map("".join, limits.items()))
    cure = f"pip install '{extra}{newest}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        if limits.keys() == {">="}:
            return warning("versions", f"{name} is not installed, so the patch replaces only MLX's own function", cure)
        return problem("versions", f"{name} is not installed", cure)
    # "==" compares texts, because a pre-release is not the release itself.
    if all(
        found == limit if relation == "==" else RELATIONS[relation](_numbers(found), _numbers(limit))
        for relation, limit in limits.items()
    ):
        return ok("versions", f"{name} {found}")
    lowest = limits.get("==") or limits[">="]
    highest = f" to {limits['<=']}" if "<=" in limits else " or later" * (">=" in limits)
    return problem("versions", f"found {name} {found}, expected {lowest}{highest}", cure)


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def _mlx() -> str:
    """The pip requirement of mlx. Its extra, such as cpu in mlx[cpu], is the one that requires the installed libmlx.

    Another extra would overwrite that libmlx, because all of them install the same file.
    """
    installed = {distribution.name for distribution in distributions()}
    return next((extra for name, extra in LIBMLX.items() if name in installed), "mlx")


def variable() -> Iterator[Finding]:
    """Whether MLXLM_FLASH in the environment is valid."""
    from .modes import MODES

    mode = os.environ.get("MLXLM_FLASH")
    if mode is None or mode in MODES:
        yield ok("MLXLM_FLASH", mode or "not set")
    else:
        cure = f"unset MLXLM_FLASH, or set one of {', '.join(MODES)}"
        yield problem("MLXLM_FLASH", f"{mode!r} is not a valid value", cure)


def extension() -> Iterator[Finding]:
    """Whether the compiled module loads and takes MLX's arrays. With another nanobind ABI than MLX's it would not."""
    again = "pip install --force-reinstall --no-deps flashattn-core"
    try:
        from . import enable  # noqa: F401  raises the error of the first import
    except ImportError as error:
        what = str(error)
        cure = re.search(r"pip install .*", what)  # in the error for a wrong version of mlx
        yield problem("extension", what.splitlines()[0], cure[0] if cure else again)
        return
    import flashattn_core
    import mlx.core as mx

    try:
        flashattn_core.array_id(mx.array(0))
    except TypeError:
        yield problem("extension", "flashattn_core and mlx use different nanobind ABIs", again)
    else:
        yield ok("extension", "flashattn_core loads, and uses the same nanobind ABI as MLX")


def cpu() -> Iterator[Finding]:
    """Describes the backends, and the environment variables that change the CPU backend."""
    import flashattn_core

    try:
        backends = flashattn_core.backends()
    except ValueError as error:
        name = next(name for name in CPU_VARIABLES if name in str(error))
        yield problem("cpu", str(error).removeprefix("[flash_attention] "), f"unset {name}")
        return
    import mlx.core as mx

    for name, description in backends.items():
        what, _, cure = description.partition(": ")
        if not cure:
            yield ok(name, what)
        elif mx.cuda.is_available():  # MLX's default device is a GPU that flash attention cannot use
            yield problem(name, what, cure)
        else:
            yield warning(name, what, cure)
    threads, cores = int(backends["cpu"].split()[-2]), os.cpu_count() or 1
    if mx.default_device() == mx.cpu and threads < cores and "FLASHATTN_NUM_THREADS" not in os.environ:
        what = f"flash attention uses {threads} of {cores} cores, because this process may use no more"
        yield warning("threads", what, "start it without taskset, or give the container more processors")
    for name in CPU_VARIABLES:
        if name in os.environ:
            what = f"{name}={os.environ[name]} is set, which may make the CPU backend slower"
            yield warning("cpu", what, f"unset {name}")


def matrix_products() -> Iterator[Finding]:
    """Names the BLAS that computes the linear layers. These take most of the time if contexts are short."""
    from .blas import INSTALL, blas, openblas

    library = blas()
    if library == "reference":
        faster = openblas()
        cure = "" if faster else f"{INSTALL}, then "
        cure += f"pass --blas auto to `mlxlm-flash run` or flash-eval, or set LD_PRELOAD={faster or 'libopenblas.so.0'}"
        yield warning("BLAS", "MLX uses the slow reference BLAS, which limits tokens per second", cure)
    elif library:
        yield ok("BLAS", library)


def numbers() -> Iterator[Finding]:
    """Compares flash attention with reference_attention() on MLX's default device, for 20 queries and for one query."""
    try:
        errors = [_error(length) for length in (20, 1)]
    except Exception as error:  # a program's call would raise the same error
        said = " ".join(str(error).split())
        cure = "pip install --force-reinstall flashattn-core"
        yield problem("self-test", f"{type(error).__name__}: {said}", cure)
        return
    wrong = [error for error in errors if not error <= 1e-5]  # also NaN
    if wrong:
        cure = "please report this finding with the whole output"
        yield problem("self-test", f"flash attention differs from the reference by {wrong[0]:.1e}", cure)
    else:
        yield ok("self-test", f"a prefill and a decode step are within {max(errors):.1e} of the reference")


def checks_before() -> Iterator[Finding]:
    """Lists the checks that GPU kernels passed or failed on this machine in earlier runs."""
    from flashattn_core.check import survey

    passed, failed = survey.remembered()
    for software, count in passed.items():
        yield ok("checked", f"{count} programs passed their check on {software}")
    for file in failed:
        what = next(iter(file.read_text(errors="replace").splitlines()[1:]), "its file cannot be read")
        cure = f"send us {file}; delete that file once it is out of date"
        yield warning("checked", f"this kernel is not used: {what}", cure)


def times() -> Iterator[Finding]:
    """Times kernels and MLX's own attention. The last finding has lines for flashattn_core's csrc/call/costs.def."""
    import mlx.core as mx

    from .tune import costs, measured

    if mx.default_device() == mx.cpu:
        yield ok("tune", "on a CPU there is nothing to time")
        return
    found = []
    try:
        for each in measured():
            found.append(each)
            yield ok("tune", each.line)
    except (RuntimeError, ValueError) as error:
        yield problem("tune", str(error), "please report this finding")
    yield ok("tune", " ".join(costs(found).split("\n")).strip())


def kernels() -> Iterator[Finding]:
    """Compares the results of each GPU kernel with those of the CPU kernels, on typical attention calls."""
    import mlx.core as mx
    from flashattn_core import _ext
    from flashattn_core.check import survey

    backend: Any = _ext.backend_of(mx.default_device())
    if backend == "cpu":
        yield ok("kernels", "nothing to compare: this check compares a GPU's kernels with the CPU's")
        return
    for kernel, count, wrong in survey.of_backend(backend):
        if wrong:
            cure = f"report this, and leave FLASHATTN_CHECK unset: then {kernel} is not used"
            yield problem("kernels", f"{kernel}: {wrong}", cure)
        else:
            yield ok("kernels", f"{kernel} is right in {count} kinds of calls")


def _error(length: int) -> float:
    import flashattn_core
    import mlx.core as mx
    import numpy as np
    from flashattn_core.reference import reference_attention

    query = mx.random.normal((1, 4, length, 32), key=mx.random.key(0))
    key, value = (mx.random.normal((1, 2, 20, 32), key=mx.random.key(seed)) for seed in (1, 2))
    out = flashattn_core.flash_attention(query, key, value, mask="causal")
    expected, _ = reference_attention(query, key, value, mask="causal")
    return float(np.abs(np.asarray(out) - expected).max())


def seam() -> Iterator[Finding]:
    """Whether enable() works, and which functions it leaves alone."""
    from . import FlashFallbackWarning, enabled, status

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ImportError):  # without mlx-lm, the patch replaces only MLX's function
            import mlx_lm.models.base
            import mlx_lm.models.cache  # noqa: F401
        with enabled():
            now = status()
    cure = "install a tested release of mlx-lm, or switch the other library off"
    said = [str(each.message) for each in caught if issubclass(each.category, FlashFallbackWarning)]
    for text in said:
        yield warning("mlx-lm", text, cure)
    for name, holder in now.foreign.items():  # the patch warns of each only once in a process
        if not any(text.startswith(f"{name} ") for text in said):
            yield warning("mlx-lm", f"another library has replaced {name} with {holder}", cure)
    late = "functions of mlx-lm's gemma2, phi3small and gear follow when a program imports them"
    yield ok("attention", f"the patch replaces {len(now.patched)} functions ({late})")


def coverage(model: str) -> Iterator[Finding]:
    """Which attention calls of this model use flash attention while the model reads a prompt."""
    from .coverage import attention_of
    from .patch import tally

    try:
        seen, left, fallbacks = attention_of(model)
    except PermissionError as error:
        cure = "run the model with `mlxlm-flash run`, whose last line names the attention that ran"
        yield warning("model", str(error), cure)
        return
    except (AttributeError, ImportError, OSError, ValueError) as error:
        cure = f"give --model a folder that mlx-lm can load, or run `hf download {model}` first"
        yield problem("model", str(error), cure)
        return
    if fallbacks:
        what = f"{len(seen) - left} attention calls of a prompt use flash attention; others do not: {tally(fallbacks)}"
        yield warning("model", f"{what} · note: MLX's own attention computes the others")
    elif left:
        faster = f"{left} are left to MLX's own attention, which is estimated to be faster"
        yield ok("model", f"{len(seen) - left} attention calls of a prompt use flash attention, {faster}")
    elif seen:
        yield ok("model", f"all {len(seen)} attention calls of a prompt use flash attention")
    else:
        why = "the model has no softmax attention, or computes it with other MLX operations"
        yield warning("model", f"no attention call of a prompt uses flash attention · note: {why}")


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """What --json writes, and a user sends us."""
    marks = [finding.mark for finding in findings]
    return {
        "command": "mlxlm-flash doctor",
        "system": platform.platform(),
        "python": platform.python_version(),
        "findings": [{**asdict(finding), "mark": finding.mark.name.lower()} for finding in findings],
        "broken": marks.count(Mark.PROBLEM),
        "could_be_better": marks.count(Mark.WARNING),
    }
