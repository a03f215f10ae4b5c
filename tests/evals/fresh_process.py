"""Runs `flash-eval` commands in new processes, in which the hub's libraries read the environment variables again.

Importing libraries takes seconds. So one server process imports them, and forks a process for each list of commands.
The server does not import MLX, because MLX's threads would not survive a fork.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

SERVER = """
import importlib, json, os, sys
import datasets, huggingface_hub.constants
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print(flush=True)
for line in sys.stdin:
    commands, environment = json.loads(line)
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.environ.update(environment)
        importlib.reload(huggingface_hub.constants)
        importlib.reload(datasets.config)
        from click.testing import CliRunner
        from flash_evals.work import machine
        from flash_evals.cli import main
        machine.blas = lambda: "openblas"  # as in conftest.py
        results = [CliRunner().invoke(main, arguments) for arguments in commands]
        names = ("exit_code", "stdout", "stderr")
        with open(writes, "w") as out:
            json.dump([{name: getattr(result, name) for name in names} for result in results], out)
        os._exit(0)
    os.close(writes)
    with open(reads) as outcomes:
        print(outcomes.read(), flush=True)
    os.wait()
"""


@pytest.fixture(scope="session")
def in_fresh_process(tmp_path_factory):
    """in_fresh_process(*commands, **environment): runs these commands in a new process, and returns their outcomes."""
    stderr = tmp_path_factory.mktemp("fresh") / "stderr"
    with (
        stderr.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as server,
    ):

        def run(*commands, **environment):
            before = stderr.stat().st_size
            server.stdin.write(json.dumps([[list(map(str, command)) for command in commands], environment]) + "\n")
            server.stdin.flush()
            outcomes = server.stdout.readline()
            assert stderr.read_text()[before:] == ""
            return [SimpleNamespace(**outcome) for outcome in json.loads(outcomes)]

        server.stdout.readline()  # waits for the imports
        yield run
        server.stdin.close()
