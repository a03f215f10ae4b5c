"""The picture in README.md is the picture that the command in docs/linux.md draws from the result files."""

import re
import shlex
from pathlib import Path

import draw_gains
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"uv run packages/evals/scripts/draw_gains\.py (.*?)\n```", re.S)


def test_the_picture_is_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    [given] = COMMAND.findall(Path("docs/linux.md").read_text(encoding="utf-8"))
    picture, *files = shlex.split(given.replace("\\\n", " "))
    done = CliRunner().invoke(draw_gains.main, [str(tmp_path / "again.svg"), *files])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again.svg").read_bytes() == Path(picture).read_bytes()
