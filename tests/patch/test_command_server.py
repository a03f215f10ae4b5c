"""mlxlm-flash run works for long-running programs that answer requests: mlx_lm.server and mlx_lm.chat."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.utils import load

from tests.patch.two_ranks import PROGRAMS
from tests.promises import promise

pytestmark = pytest.mark.slow("starts servers")

RAN = re.compile(
    r"^\[mlxlm-flash\] flash attention ran: cpu_prefill [\d,]+, cpu_decode [\d,]+ · fallbacks: none$", re.M
)
PROMPTS = ["Attention is all you need", "The class", "x", "A window of keys, and a longer prompt than all the others"]
TEXT = "It is not the length of a prompt alone, but how many of them come at once. " * 40


@pytest.fixture
def served(chat_folder, tmp_path):
    """served(flash, number, work, *options): runs a server. Returns work(ask), and the server's stderr and exit code.

    mlx_lm.server runs under mlxlm-flash with `options` and MLXLM_FLASH=flash. After work(), it gets signal `number`.
    ask(prompt) returns the server's answer of 8 tokens. With stream=True, the answer comes in pieces. With
    hang_up_after=N, the client leaves after N pieces.
    """

    def serve(flash, number, work, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        address, log = f"http://127.0.0.1:{port}", tmp_path / flash

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

        command = [PROGRAMS / "mlxlm-flash", "run", "mlx_lm.server", *options, "--model", chat_folder, "--port", port]
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


@pytest.mark.nightly("forty requests to a server")
def test_eight_clients(served, chat_folder):
    """Eight clients work at once. Each sends five requests of 12 to 1,200 bytes. Every other answer is a stream.

    Two clients hang up in the middle of each of their streams. All other answers must equal those that mlx-lm gives to
    each request alone, without the patch.

    Requests share batches at random, and rounding errors depend on the batch. So the prompts are chosen such that every
    token is clearly more probable than the second best. At Ctrl-C the server often aborts, with or without the patch.
    """
    requests = [[] for _ in range(8)]
    for client, turn in itertools.product(range(8), range(5)):
        prompt = TEXT[37 * (5 * client + turn) :][: (12, 90, 1200, 300)[(client + turn) % 4]]
        options = {"max_tokens": 8 + 4 * turn, "stream": (client + turn) % 2 == 1}
        if options["stream"] and client in (3, 6):
            options = {"max_tokens": 200, "stream": True, "hang_up_after": 3}
        requests[client].append((prompt, options))

    def work(ask):
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda mine: [ask(prompt, **options) for prompt, options in mine], requests)
            return [*itertools.chain(*answers), ask(PROMPTS[0])]

    answers, stderr, returncode = served("strict", signal.SIGINT, work)
    assert returncode in {0, -signal.SIGABRT}
    assert RAN.search(stderr)
    model, tokenizer = load(str(chat_folder))
    for (prompt, options), answer in zip([*itertools.chain(*requests), (PROMPTS[0], {})], answers, strict=True):
        if "hang_up_after" not in options:
            steps = list(stream_generate(model, tokenizer, prompt, options.get("max_tokens", 8)))
            best = mx.sort(mx.stack([step.logprobs for step in steps]), axis=-1)[:, -2:]
            assert (best[:, 1] - best[:, 0]).min() > 0.005  # rounding moves these by 1e-5
            assert answer == "".join(step.text for step in steps) != ""


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
