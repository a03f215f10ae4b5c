"""`mlxlm-flash hook`: one start-up file beside this package, put in and taken out.

Python runs the lines of a .pth file that begin with `import` whenever it starts. Unless MLXLM_FLASH is set, this one
looks into os.environ and does nothing else; with it, mlxlm_flash_startup waits for mlx-lm.
"""

import contextlib
import os
import site
import sys
import tempfile
from enum import Enum
from importlib.metadata import distribution
from pathlib import Path

# Sorts behind the .pth files of editable installs (`_editable_…`, `__editable__…`), which make packages importable.
NAME = "mlxlm-flash.pth"


class State(Enum):
    INSTALLED = "installed"
    OTHER = "installed by another version of mlxlm-flash-patch"
    ABSENT = "not installed"


def path() -> Path:
    """Where the start-up file is, or would be: in the folder that holds this package's metadata.

    Raises LookupError if Python reads no .pth files there, as after `pip install --target`.
    """
    folder = Path(str(distribution("mlxlm-flash-patch").locate_file("")))
    # Whether user site-packages are read depends on the flags of this very process: they count as read.
    read = [Path(f).resolve() for f in [*site.getsitepackages(), site.getusersitepackages()]]
    if folder.resolve() not in read:
        raise LookupError(f"{folder} holds mlxlm-flash-patch, and is no site-packages folder of {sys.prefix}")
    return folder / NAME


def state() -> State:
    """Raises what path() does."""
    try:
        held = path().read_text(encoding="ascii")
    except FileNotFoundError:
        return State.ABSENT
    except UnicodeDecodeError:
        return State.OTHER
    return State.INSTALLED if held == _line(path()) else State.OTHER


def install() -> Path:
    """Writes the file, whole or not at all. Raises OSError, and what path() does."""
    target = path()
    descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f"{NAME}.")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(_line(target))
        os.chmod(draft, 0o644)  # the environment's other users start Python too
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return target


def remove() -> bool:
    """Takes the file away, whichever version wrote it; False if there was none. Raises what install() does."""
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


def _line(target: Path) -> str:
    """One line, as .pth files want it. Nothing may come out of it: an exception at start-up ends up on every screen,
    and one from a full or closed stderr would end Python."""
    gone = (
        "[mlxlm-flash] MLXLM_FLASH is set, and mlxlm-flash-patch is not installed any more: "
        f"flash attention stays off. Delete {target}\n"
    )
    program = (
        "try:\n import mlxlm_flash_startup; mlxlm_flash_startup.arm()\n"
        "except Exception:\n"
        " try:\n"
        "  import sys\n"
        # In a virtual environment Python runs a start-up file twice.
        f"  if not hasattr(sys, '_mlxlm_flash'): sys._mlxlm_flash = sys.stderr.write({gone!a})\n"
        " except Exception: pass\n"
    )
    return f'import os; os.environ.get("MLXLM_FLASH", "0") == "0" or exec({program!a})\n'
