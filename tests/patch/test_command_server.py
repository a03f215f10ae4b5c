"""mlxlm-flash run works for long-running programs that answer requests: mlx_lm.server and mlx_lm.chat."""

import contextlib
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
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import load

from tests.promises import promise

pytestmark = pytest.mark.slow("starts servers")

RAN = re.compile(
    r"^\[mlxlm-flash\] flash attention ran: cpu_decode [\d,]+, cpu_prefill [\d,]+ · fallbacks: none$", re.M
)
HELD = r"\[mlxlm-flash\] quantised KV caches held at most ([\d.]+) MB; in 16 bits: ([\d.]+) MB"
TEXT = "It is not the length of a prompt alone, but how many of them come at once. " * 40
PROMPTS = ["Attention is all you need", "The class", "x", "A window of keys, and a longer prompt than all the others"]


def opened(request):
    while True:
        try:
            return urllib.request.urlopen(request, timeout=120)
        except ConnectionResetError:  # Python's HTTP server queues only 5 new connections
            time.sleep(0.1)


@pytest.fixture
def served(chat_folder, tmp_path):
    """served(flash, number, work, *options): runs a server. Returns work(ask), and the server's stderr and exit code.

    mlx_lm.server runs with `options` under mlxlm-flash with `run_options` and MLXLM_FLASH=flash. After work(), it gets
    signal `number`.
    ask(prompt) returns the server's answer of 8 tokens. With stream=True, the answer comes in pieces. With
    hang_up_after=N, the client leaves after N pieces.
    """

    def serve(flash, number, work, *options, run_options=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address, log = f"http://127.0.0.1:{port}", tmp_path / flash

        def ask(prompt, hang_up_after=None, **more):
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
            with opened(request) as answer:
                if not body.get("stream"):
                    return json.load(answer)["choices"][0]["text"]
                events = (line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: "))
                pieces = itertools.islice((event for event in events if b"[DONE]" not in event), hang_up_after)
                return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)

        command = [Path(sys.executable).parent / "mlxlm-flash", "run", *run_options, "mlx_lm.server", *options]
        command += ["--model", chat_folder, "--port", port]
        env = {**os.environ, "MLXLM_FLASH": flash, "HF_HUB_OFFLINE": "1"}
        with (
            log.open("w") as stderr,
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr) as process,
        ):
            try:
                for _ in range(1200):  # two minutes: the machine may be busy
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=60):
                        break
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                answers = work(ask)
                process.send_signal(number)
                process.wait(timeout=60)
            finally:
                process.kill()
        return answers, log.read_text(), process.returncode

    return serve


@promise("a server gives several clients mlx-lm's own answers")
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("options", "number", "returncodes"),
    [
        ((), signal.SIGINT, {0, -signal.SIGABRT}),
        (("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"), signal.SIGTERM, {-signal.SIGTERM}),
    ],
    ids=["batched", "kv_bits"],
)
def test_server(served, options, number, returncodes):
    """The server gives the same answers with the patch as without it, even to simultaneous requests.

    Each prompt comes twice. The second time, it is in the server's prompt cache. Ctrl-C shuts the server down, and
    SIGTERM kills it. While the server shuts down, it often aborts, with or without the patch.
    """

    def work(ask):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return [ask(PROMPTS[0]), *pool.map(ask, PROMPTS), *pool.map(ask, PROMPTS)]

    off, _, _ = served("0", number, work, *options)
    on, stderr, returncode = served("strict", number, work, *options)
    assert returncode in returncodes
    assert on == off
    assert all(off)
    assert bool(RAN.search(stderr)) == (number == signal.SIGINT)


@promise("with kv_bits, a server answers in batches as mlx-lm answers one by one")
def test_quantised_caches(served, chat_folder):
    """The server serves 16 clients in batches with caches of 8 bits, and takes prompts from its prompt cache.

    Clients hang up in the middle of a quarter of the streams. All other answers equal those that mlx-lm gives to each
    request alone, with its own QuantizedKVCache.
    """
    requests = [(TEXT[19 * i :][: (12, 90, 700, 300)[i % 4]], 8 + i, i % 4 == 3) for i in range(16)]
    requests += [(TEXT[19 * i :][:400], 8, False) for i in (2, 6, 10)]  # their beginnings are in the prompt cache

    def work(ask):
        def answer(request):
            prompt, length, hangs_up = request
            return ask(prompt, max_tokens=length, **({"stream": True, "hang_up_after": 2} if hangs_up else {}))

        with ThreadPoolExecutor(16) as pool:
            return [*pool.map(answer, requests[:16]), *pool.map(answer, requests[16:])]

    options = ("--kv-bits", "8", "--kv-group-size", "32")
    answers, stderr, returncode = served("strict", signal.SIGINT, work, run_options=options)
    assert returncode in {0, -signal.SIGABRT}
    assert RAN.search(stderr)
    held, unquantised = map(float, re.search(HELD, stderr).groups())
    # For 32 elements: 32 bytes, and a scale and a bias, which are float32 in this model; 16 bits take 64 bytes.
    assert held == pytest.approx(40 / 64 * unquantised, abs=0.1)
    model, tokenizer = load(str(chat_folder))
    for (prompt, length, hangs_up), answer in zip(requests, answers, strict=True):
        if not hangs_up:
            caches = [QuantizedKVCache(32, 8) for _ in model.layers]
            assert answer == "".join(
                s.text for s in stream_generate(model, tokenizer, prompt, length, prompt_cache=caches)
            )


@pytest.mark.rotate(2)
@pytest.mark.parametrize("said", ["Attention is\nAttention is\nr\nAttention is\nq\n", "Attention is\n"])
def test_chat_through_a_pipe(command, chat_folder, said):
    """`q` ends the chat, and `r` restarts it. Input that ends without `q` ends the chat with mlx-lm's own error."""
    arguments = ("mlxlm-flash", "run", "mlx_lm.chat", "--model", chat_folder, "--max-tokens", "8")
    off, on = (command(*arguments, input=said, flash=flash) for flash in ("0", "strict"))
    assert on.returncode == off.returncode == int("q" not in said)
    conversation, expected = (re.sub(r"[\d.]+ tok/s", "", done.stdout) for done in (on, off))
    assert conversation == expected
    assert RAN.search(on.stderr.splitlines()[-1])
