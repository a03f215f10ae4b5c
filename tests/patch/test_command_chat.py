"""mlxlm-flash run mlx_lm.chat and mlx_lm.server: programs that talk for as long as somebody talks to them."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

RAN = re.compile(
    r"^\[mlxlm-flash\] flash attention ran: cpu_prefill \d+, cpu_decode \d+ · fallbacks: none$", re.MULTILINE
)


def test_chat_through_a_pipe(command, chat_folder):
    """`q` ends it, `r` begins anew; so does the end of what is piped in, with an error of mlx-lm's own."""
    arguments = ("mlx_lm.chat", "--model", chat_folder, "--max-tokens", "8")
    for said in ("Attention is\nAttention is\nr\nAttention is\nq\n", "Attention is\n"):
        off = command("mlxlm-flash", "run", *arguments, input=said, flash="0")
        on = command("mlxlm-flash", "run", *arguments, input=said, flash="strict")
        assert on.returncode == off.returncode == int("q" not in said)
        conversation, expected = (re.sub(r"[\d.]+ tok/s", "", done.stdout) for done in (on, off))
        assert conversation == expected
        assert RAN.search(on.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("number", "returncodes"), [(signal.SIGINT, {0, -signal.SIGABRT}), (signal.SIGTERM, {-signal.SIGTERM})]
)
def test_server(served, number, returncodes):
    """Ctrl-C is an end, which the server sees to itself; SIGTERM is the end of everything, as without the patch.

    After the last line of Python the stock server, too, often aborts while MLX's threads are taken down.
    """
    run = [Path(sys.executable).parent / "mlxlm-flash", "run", "mlx_lm.server"]
    answers = {}
    for flash in ("0", "strict"):
        with served(run, {**os.environ, "MLXLM_FLASH": flash, "HF_HUB_OFFLINE": "1"}) as (ask, process):
            answers[flash] = ask("Attention is")["choices"][0]["text"]
            process.send_signal(number)
            _, stderr = process.communicate(timeout=30)
        assert process.returncode in returncodes
    assert answers["strict"] == answers["0"] != ""
    assert bool(RAN.search(stderr)) == (number == signal.SIGINT)
