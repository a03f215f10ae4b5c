"""build.py and download.py say what a machine lacks for building the wheel. Tests are skipped with this message."""

import os

import pytest


@pytest.mark.skipif("UV" not in os.environ, reason="needs uv's own program, which `uv run pytest` names in UV")
def test_programs(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception) as skipped:
        run("build.py")
    assert str(skipped.value).splitlines() == [
        "clang++-19 is missing: apt-get install clang-19",
        "ld64.lld-19 is missing: apt-get install lld-19",
    ]


def test_network(run, monkeypatch, tmp_path):
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(pytest.skip.Exception, match=r"mlx==0\.1 for macOS could not be had\. uv says:\n(?s:.*)"):
        run("download.py", tmp_path, "mlx==0.1")
