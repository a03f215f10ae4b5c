"""The thread pool: its promises are checked by a program on top of the CPU backend alone, driver/pool.cpp."""

import os
import subprocess

import pytest


@pytest.mark.parametrize("threads", ["2", "3", "7"])
def test_promises(drivers, threads):
    done = subprocess.run(
        [drivers / "pool"],
        env={**os.environ, "FLASHATTN_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_system_without_more_threads(drivers):
    done = subprocess.run(
        [drivers / "pool", "no more threads"],
        env={**os.environ, "FLASHATTN_NUM_THREADS": "1024"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
