"""mlxlm-flash run mlx_lm.server and mlx_lm.chat: programs that talk for as long as somebody talks to them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RAN = re.compile(r"^\[mlxlm-flash\] flash attention ran: cpu_prefill \d+, cpu_decode \d+ · fallbacks: none$", re.M)
PROMPTS = ["Attention is all you need", "The class", "x", "A window of keys, and a longer prompt than all the others"]


@contextlib.contextmanager
def served(folder, command, env):
    """While this command, of mlx_lm.server, runs: ask(prompt) for 8 tokens, and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]

    arguments = [*command, "--model", folder, "--port", port]
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(1200):  # two minutes: the machine may be busy
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
                    break
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.1)
            yield ask, process
        finally:
            process.kill()


@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("options", "number", "returncodes"),
    [
        ((), signal.SIGINT, {0, -signal.SIGABRT}),
        (("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"), signal.SIGTERM, {-signal.SIGTERM}),
    ],
    ids=["batched", "kv_bits"],
)
def test_server(chat_folder, options, number, returncodes):
    """Requests that come at the same time, and once more when there are prompt caches, are answered as without it.

    Ctrl-C is an end, which the server sees to itself; SIGTERM is the end of everything. After the last line of Python
    the stock server, too, often aborts while MLX's threads are taken down.
    """
    run = [Path(sys.executable).parent / "mlxlm-flash", "run", "mlx_lm.server", *options]
    answers = {}
    for flash in ("0", "strict"):
        env = {**os.environ, "MLXLM_FLASH": flash, "HF_HUB_OFFLINE": "1"}
        with served(chat_folder, run, env) as (ask, process), ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers[flash] = [ask(PROMPTS[0]), *pool.map(ask, PROMPTS), *pool.map(ask, PROMPTS)]
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode in returncodes
    assert answers["strict"] == answers["0"]
    assert all(answers["0"])
    assert bool(RAN.search(stderr)) == (number == signal.SIGINT)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("said", ["Attention is\nAttention is\nr\nAttention is\nq\n", "Attention is\n"])
def test_chat_through_a_pipe(command, chat_folder, said):
    """`q` ends it, `r` begins anew; so does the end of what is piped in, with an error of mlx-lm's own."""
    arguments = ("mlxlm-flash", "run", "mlx_lm.chat", "--model", chat_folder, "--max-tokens", "8")
    off, on = (command(*arguments, input=said, flash=flash) for flash in ("0", "strict"))
    assert on.returncode == off.returncode == int("q" not in said)
    conversation, expected = (re.sub(r"[\d.]+ tok/s", "", done.stdout) for done in (on, off))
    assert conversation == expected
    assert RAN.search(on.stderr.splitlines()[-1])
