"""mlxlm-flash run mlx_lm.server: requests that come at the same time are answered as without it."""

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
from contextlib import contextmanager
from pathlib import Path

import pytest

PROMPTS = ["Attention is all you need", "The class", "x", "A window of keys, and a longer prompt than all the others"]


@contextmanager
def server(model, log, flash, *options):
    """The server's address, while it runs; it is ended as by Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).parent / "mlxlm-flash", "run", "mlx_lm.server", "--model", model]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "MLXLM_FLASH": flash}
    with open(log, "w") as stderr:
        process = subprocess.Popen([*command, "--port", str(port), *options], env=env, stderr=stderr)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(1200):  # two minutes: the machine may be busy
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def answer(address, prompt):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def answers(address):
    """To all prompts at once, and once more: then there are prompt caches."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [list(pool.map(lambda prompt: answer(address, prompt), PROMPTS)) for _ in range(2)]


@pytest.mark.parametrize(
    "options",
    [(), ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")],
    ids=["batched", "kv_bits"],
)
def test_concurrent_requests(model_folder, tmp_path, options):
    texts = {}
    for flash in ("0", "strict"):
        with server(model_folder, tmp_path / flash, flash, *options) as address:
            texts[flash] = answers(address)
    assert texts["strict"] == texts["0"]
    assert all(len(text) > 0 for round_ in texts["0"] for text in round_)
    said = (tmp_path / "strict").read_text()  # not the last line: mlx_lm.server aborts at its end, patched or not
    assert re.search(
        r"^\[mlxlm-flash\] flash attention ran: .*cpu_decode [\d,]+ · fallbacks: none$", said, re.MULTILINE
    )
