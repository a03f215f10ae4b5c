"""What a long run shows on a terminal while it is at work, and does not leave there."""

import os
import pty
import subprocess
import sys
from pathlib import Path

FLASH_EVAL = Path(sys.executable).parent / "flash-eval"


def test_eta_speed_and_memory_on_a_terminal(model_folder: Path, text_file: Path) -> None:
    ours, theirs = pty.openpty()
    command = ["perplexity", "--model", model_folder, "--dataset", text_file, "--context", 24, "--stride", 2]
    with subprocess.Popen(
        [FLASH_EVAL, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150"},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.stdout
        page = process.stdout.read().decode()
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "windows, off and on" in text
    assert "0:00:0" in text  # the time that is left
    assert "tokens/s · peak " in text
    assert " MB" in text
    assert "tokens/s · peak" not in page
