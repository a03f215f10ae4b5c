"""Flash attention goes on when mlx-lm arrives: what the start-up file of `mlxlm-flash hook install` runs.

A module beside the package, not in it: while MLXLM_FLASH is set it runs in every Python process of the environment,
pip's too, and importing the package imports MLX. So it waits for mlx_lm.models.base, and imports next to nothing until
then: contextlib alone would cost more than all of this.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import TextIO

MODES = ("0", "1", "strict", "float32", "float32,strict")  # values of MLXLM_FLASH
BASE = "mlx_lm.models.base"  # every program that runs a model of mlx-lm imports it
_armed = False


def arm() -> None:
    """Watches for mlx-lm, if MLXLM_FLASH has it so. A value that means nothing is said, and the program goes on.

    Once: in a virtual environment Python runs a start-up file twice.
    """
    global _armed
    if _armed:
        return
    _armed = True
    mode = os.environ.get("MLXLM_FLASH", "0")
    if mode not in MODES:
        say(f"MLXLM_FLASH is {mode!r}, expected one of {', '.join(MODES)}: flash attention stays off", sys.stderr)
    elif mode != "0":
        sys.meta_path.insert(0, Watch(mode))


def is_strict(mode: str) -> bool:
    return mode.endswith("strict")


def disarm() -> None:
    """For a program that sees to the patch itself."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Watch)]


def say(line: str, stream: "TextIO | None") -> None:
    if stream is None:  # as sys.stderr is where the shell closed it; print() would take stdout
        return
    import contextlib

    with contextlib.suppress(OSError, ValueError):  # closed by now, or its disk is full
        print(f"[mlxlm-flash] {line}", file=stream, flush=True)


class Watch:
    """A finder that finds nothing of its own: it goes when BASE is looked for, and has the patch put in behind it."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.process: int | None = None  # the one that was patched
        if is_strict(mode):
            atexit.register(self.end)  # before anything of the program's: so it runs last

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != BASE:
            return None
        disarm()
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_patch(module: "ModuleType") -> None:
                del loader.exec_module  # the loader is as it was, before the module can see it
                execute(module)
                self.patch()

            loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

    def patch(self) -> None:
        """Puts the patch in. Where it cannot be, that is said; strict raises it, from the import of mlx-lm."""
        try:
            from mlxlm_flash_patch import launch

            launch.switch_on(self.mode)
        except (ImportError, RuntimeError, ValueError) as error:
            if is_strict(self.mode):
                raise
            say(f"flash attention stays off: {error}", sys.stderr)
        else:
            self.process = os.getpid()

    def end(self) -> None:
        """Under strict, a program without flash attention ends with 1, as under `mlxlm-flash run`.

        Its own exit code is not known here, so that a 2 becomes 1 as well. Nothing but C's own clean-up is left to
        be skipped: all threads and every other handler are through.
        """
        if self.process != os.getpid():  # never patched, or in a child that the program forked
            return
        import contextlib

        from mlxlm_flash_patch import launch

        if launch.flash_never_ran():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os._exit(1)
