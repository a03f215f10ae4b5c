"""Runs a program with mlx.launch, as two processes on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
MLX_LAUNCH = "from mlx._distributed_utils.launch import main; main()"  # also works if MLX is only on PYTHONPATH


def launch(*program, **variables):
    """Runs two processes of a program, with `variables` in their environment. Returns their stdout and stderr."""
    options = ["-n", "2", "--backend", "ring", "--starting-port", str(_two_free_ports())]
    # The processes have a session of their own, so that the test can kill both ranks if they wait for each other.
    with subprocess.Popen(
        [sys.executable, "-c", MLX_LAUNCH, *options, *map(str, program)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _two_free_ports():
    """The first of two adjacent free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
