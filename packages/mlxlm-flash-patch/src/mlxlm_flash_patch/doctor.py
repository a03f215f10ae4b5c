"""`mlxlm-flash doctor` prints one line for each finding. If something is slow or broken, the line names the cure.

doctor stops after a failure that makes all later checks pointless. Each check has its own imports, so doctor works even
if the package does not load.
"""

import contextlib
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PROMPT = 512  # tokens that a model reads
MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}


@dataclass(frozen=True)
class Finding:
    mark: str  # "warning": it works, but could be better. "problem": flash attention does not run, or runs wrongly
    subject: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.mark]} {self.subject}: {self.what}" + (f" · cure: {self.cure}" if self.cure else "")


ok, warning, problem = (partial(Finding, mark) for mark in MARKS)


def examine(model: str | None = None, with_kernels: bool = False, with_times: bool = False) -> Iterator[Finding]:
    """Runs the checks and yields their findings. The arguments are the options of the command."""
    for check in (versions, extension, backends, matrix_products, numbers, patched):
        broken = False
        for finding in check():
            broken |= finding.mark == "problem"
            yield finding
        if broken and check in (extension, backends):
            return
    if with_kernels:
        yield from kernels()
    if with_times:
        yield from times()
    if model is not None:
        yield from coverage(model)


def versions() -> Iterator[Finding]:
    for package in ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch"):
        try:
            yield ok("versions", f"{package} {version(package)}")
        except PackageNotFoundError:
            missing = warning if package == "mlx-lm" else problem  # the patch serves other programs without mlx-lm
            yield missing("versions", f"{package} is not installed", f"pip install {package}")


def extension() -> Iterator[Finding]:
    """Whether the compiled module loads."""
    try:
        from . import enable  # noqa: F401  raises the error of the first import
    except ImportError as error:
        cure = re.search(r"pip install .*", str(error))  # in the error for a wrong version of mlx
        again = "pip install --force-reinstall --no-deps flashattn-core"
        yield problem("extension", str(error).splitlines()[0], cure[0] if cure else again)
    else:
        yield ok("extension", "flashattn_core loads")


def backends() -> Iterator[Finding]:
    """Describes the backends."""
    import flashattn_core
    import mlx.core as mx

    try:
        described = flashattn_core.backends()
    except ValueError as error:
        what = str(error).removeprefix("[flash_attention] ")
        yield problem("cpu", what, f"unset {what.partition(' ')[0]}")  # the error begins with the variable's name
        return
    for name, description in described.items():
        what, _, cure = description.partition(": ")
        if not cure:
            yield ok(name, what)
        elif mx.cuda.is_available():  # MLX's default device is a GPU that flash attention cannot use
            yield problem(name, what, cure)
        else:
            yield warning(name, what, cure)


def matrix_products() -> Iterator[Finding]:
    """Names the BLAS that computes the linear layers. These take most of the time if contexts are short."""
    from .blas import INSTALL, blas, openblas

    library = blas()
    if library == "reference":
        cure = "pass --blas auto to `mlxlm-flash run` or flash-eval"
        cure = cure if openblas() else f"{INSTALL}, then {cure}"
        yield warning("BLAS", "MLX uses the slow reference BLAS, which limits tokens per second", cure)
    elif library:
        yield ok("BLAS", library)


def numbers() -> Iterator[Finding]:
    """Compares flash attention with reference_attention() on MLX's default device, for 20 queries and for one query."""
    import flashattn_core
    import mlx.core as mx
    import numpy as np
    from flashattn_core.reference import reference_attention

    key, value = (mx.random.normal((1, 2, 20, 32), key=mx.random.key(seed)) for seed in (1, 2))
    worst = 0.0
    try:
        for length in (20, 1):
            query = mx.random.normal((1, 4, length, 32), key=mx.random.key(0))
            out = flashattn_core.flash_attention(query, key, value, mask="causal")
            expected, _ = reference_attention(query, key, value, mask="causal")
            worst = max(worst, float(np.abs(np.asarray(out) - expected).max()))
    except Exception as error:  # a program's call would raise the same error
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield problem("self-test", what, "pip install --force-reinstall flashattn-core")
        return
    if worst < 1e-5:  # not if it is NaN
        yield ok("self-test", f"a prefill and a decode step are within {worst:.1e} of the reference")
    else:
        cure = "please report this finding with the whole output"
        yield problem("self-test", f"flash attention differs from the reference by {worst:.1e}", cure)


def patched() -> Iterator[Finding]:
    """Whether enable() works, and which functions it leaves alone."""
    from . import FlashFallbackWarning, enabled, status

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ImportError):  # without mlx-lm, the patch replaces only MLX's function
            import mlx_lm.models.base
            import mlx_lm.models.cache  # noqa: F401
        with enabled():
            count = len(status().patched)
    for said in caught:
        if issubclass(said.category, FlashFallbackWarning):
            yield warning("attention", str(said.message), "another release of mlx-lm or of mlxlm-flash-patch")
    yield ok("attention", f"the patch replaces {count} functions; those of gemma2 and gear follow on their import")


def times() -> Iterator[Finding]:
    """Times kernels and MLX's own attention. The last finding has lines for flashattn_core's csrc/call/costs.def."""
    from .tune import as_text, measured

    costs: dict[str, float] = {}
    try:
        for line in measured(costs):
            yield ok("tune", line)
        yield ok("tune", " ".join(as_text(costs).splitlines()))
    except (RuntimeError, ValueError) as error:  # on a CPU, too
        yield warning("tune", str(error))


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


def coverage(name: str) -> Iterator[Finding]:
    """Which attention calls of a model use flash attention while the model reads a prompt.

    The model needs no weights, because nothing is computed.
    """
    import mlx.core as mx
    from mlx_lm.utils import hf_repo_to_path, load_model

    from . import FlashFallbackWarning, enabled, status
    from .patch import tally
    from .router import trial

    folder = Path(name)
    try:
        model, config = load_model(folder if folder.is_dir() else hf_repo_to_path(name), lazy=True, strict=False)  # type: ignore[no-untyped-call]
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        cure = f"give --model a folder that mlx-lm can load, or run `hf download {name}` first"
        yield problem("model", f"mlx-lm cannot load {name}: {' '.join(str(error).split())}", cure)
        return
    model.set_dtype(getattr(mx, str(config.get("torch_dtype") or config.get("dtype")), mx.bfloat16))
    with enabled(), trial() as plans, warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashFallbackWarning)  # the finding has the reasons
        model(mx.zeros((1, PROMPT), mx.int32))
        fallbacks = status().fallbacks
    left = sum(plan.is_left for plan in plans)
    count = len(plans) + sum(fallbacks.values())
    what = f"{len(plans) - left} of {count} attention calls of a prompt use flash attention"
    if left:
        what += f"; {left} are left to MLX's own attention, which is estimated to be faster"
    if fallbacks:
        yield warning("model", f"{what}; others fall back: {tally(fallbacks)}")
    elif plans:
        yield ok("model", what)
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
        "findings": [asdict(finding) for finding in findings],
        "broken": marks.count("problem"),
        "could_be_better": marks.count("warning"),
    }
