"""mlxlm-flash run mlx_lm.server and mlx_lm.chat: long-running programs that answer requests."""

import contextlib
import functools
import itertools
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

pytestmark = pytest.mark.slow("starts servers")

RAN = re.compile(
    r"^\[mlxlm-flash\] flash attention ran: cpu_prefill [\d,]+, cpu_decode [\d,]+ · fallbacks: none$", re.M
)
PROMPTS = ["Attention is all you need", "The class", "x", "A window of keys, and a longer prompt than all the others"]

TEXT = "It is not the length of a prompt alone, but how many of them come at once. " * 40


@contextlib.contextmanager
def served(folder, command, env, log):
    """Runs this command of mlx_lm.server. Yields ask(prompt, **more), for 8 tokens, and the process. `log` gets stderr.

    With stream=True the answer comes in pieces; with hang_up_after=N the client leaves after N of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"

    def ask(prompt, hang_up_after=None, **more):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            if not body.get("stream"):
                return json.load(answer)["choices"][0]["text"]
            events = (line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: "))
            pieces = itertools.islice((event for event in events if b"[DONE]" not in event), hang_up_after)
            return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)

    arguments = [*command, "--model", folder, "--port", port]
    with (
        log.open("w") as stderr,
        subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL, stderr=stderr) as process,
    ):
        try:
            for _ in range(1200):  # two minutes: the machine may be busy
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
                    break
                assert process.poll() is None, log.read_text()
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
def test_server(chat_folder, tmp_path, options, number, returncodes):
    """The server answers simultaneous requests, and the same again with prompt caches, as it does without the patch.

    At Ctrl-C the server shuts down by itself; SIGTERM kills it. At exit, the unpatched server, too, often aborts while
    MLX's threads end.
    """
    run = [Path(sys.executable).parent / "mlxlm-flash", "run", "mlx_lm.server", *options]
    answers = {}
    for flash in ("0", "strict"):
        env = {**os.environ, "MLXLM_FLASH": flash, "HF_HUB_OFFLINE": "1"}
        log = tmp_path / flash
        with served(chat_folder, run, env, log) as (ask, process), ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers[flash] = [ask(PROMPTS[0]), *pool.map(ask, PROMPTS), *pool.map(ask, PROMPTS)]
            process.send_signal(number)
            process.wait(timeout=60)
        assert process.returncode in returncodes
    assert answers["strict"] == answers["0"]
    assert all(answers["0"])
    assert bool(RAN.search(log.read_text())) == (number == signal.SIGINT)


@pytest.mark.nightly("forty requests to two servers")
def test_eight_clients(chat_folder, tmp_path):
    """Eight clients send five requests each at once, of 12 to 1,200 bytes; every other answer is a stream.

    Two clients hang up in the middle of each of their streams. The others, and later clients, get the unpatched
    server's answers. The server ends at Ctrl-C, often by an abort, as it does without the patch.
    """

    def client(ask, number):
        answers = []
        for turn in range(5):
            prompt = TEXT[17 * (5 * number + turn) :][: (12, 90, 1200, 300)[(number + turn) % 4]]
            stream = (number + turn) % 2 == 1
            if stream and number in (3, 6):
                ask(prompt, stream=True, max_tokens=200, hang_up_after=3)
            else:
                answers.append(ask(prompt, stream=stream, max_tokens=8 + 4 * turn))
        return answers

    answers = {}
    for flash in ("0", "strict"):
        env, log = {**os.environ, "MLXLM_FLASH": flash, "HF_HUB_OFFLINE": "1"}, tmp_path / flash
        run = [Path(sys.executable).parent / "mlxlm-flash", "run", "mlx_lm.server"]
        with served(chat_folder, run, env, log) as (ask, process), ThreadPoolExecutor(8) as pool:
            answers[flash] = [*pool.map(functools.partial(client, ask), range(8)), ask(PROMPTS[0])]
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        assert process.returncode in {0, -signal.SIGABRT}
    assert answers["strict"] == answers["0"]
    assert all(itertools.chain(*answers["0"]))
    assert RAN.search(log.read_text())


@pytest.mark.rotate(2)
@pytest.mark.parametrize("said", ["Attention is\nAttention is\nr\nAttention is\nq\n", "Attention is\n"])
def test_chat_through_a_pipe(command, chat_folder, said):
    """`q` ends the chat, `r` restarts it; the end of the piped input ends it, too, with mlx-lm's own error."""
    arguments = ("mlxlm-flash", "run", "mlx_lm.chat", "--model", chat_folder, "--max-tokens", "8")
    off, on = (command(*arguments, input=said, flash=flash) for flash in ("0", "strict"))
    assert on.returncode == off.returncode == int("q" not in said)
    conversation, expected = (re.sub(r"[\d.]+ tok/s", "", done.stdout) for done in (on, off))
    assert conversation == expected
    assert RAN.search(on.stderr.splitlines()[-1])
