"""The table of what was measured on a machine: its file, and what it tells about other calls."""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core import tuned
from flashattn_core.tuned import Call, Measured, nearest

STEP = Call("bfloat16", 28, 4, 128, 1, 1024)
CPU = mx.Device(mx.cpu)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    return tmp_path


def measured(call, mlx=2e-3, ours=1e-3, mlx_bytes=100, our_bytes=100):
    return Measured(call, {"mlx": mlx, "cpu_decode": ours}, {"mlx": mlx_bytes, "cpu_decode": our_bytes})


def test_what_is_written_is_read():
    table = [measured(STEP), measured(replace(STEP, window=9, sinks=True, bits=4))]
    tuned.write(table, CPU)
    assert tuned.read(CPU) == table


def test_there_is_none_at_first():
    assert tuned.read(CPU) == []


@pytest.mark.parametrize("what", ["device", "mlx", "flashattn-core"])
def test_a_table_of_something_else_does_not_count(what, monkeypatch):
    here = tuned.software(CPU)
    monkeypatch.setattr(tuned, "software", lambda device: {**here, what: "another"})
    tuned.write([measured(STEP)], CPU)
    monkeypatch.setattr(tuned, "software", lambda device: here)
    assert tuned.read(CPU) == []


@pytest.mark.parametrize("text", ["", "[]", '{"device": 1}', "\x00"])
def test_a_file_that_is_no_table_is_named(cache, text):
    (cache / "tuned.json").write_text(text)
    with pytest.raises(ValueError, match=f"{cache}/tuned.json is no table of mlxlm-flash tune, delete it"):
        tuned.read(CPU)


def test_half_of_a_file_is_named(cache):
    file = tuned.write([measured(STEP)], CPU)
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match="delete it"):
        tuned.read(CPU)


def test_a_folder_that_cannot_be_written_keeps_the_error(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", "/dev/null")
    with pytest.raises(OSError, match="/dev/null"):
        tuned.write([measured(STEP)], CPU)
    assert tuned.read(CPU) == []


def test_the_nearest_call():
    table = [measured(replace(STEP, key_len=length)) for length in (128, 1024, 8192)]
    for length, expected in ((1, 128), (128, 128), (300, 128), (500, 1024), (5000, 8192), (10**6, 8192)):
        found = nearest(table, replace(STEP, key_len=length))
        assert found.call.key_len == expected


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"bits": 4}, {"sinks": True}], ids=str)
def test_what_tells_nothing_about_a_call(other):
    assert nearest([measured(STEP)], replace(STEP, **other)) is None


def test_float16_is_as_fast_as_bfloat16():
    assert nearest([measured(STEP)], replace(STEP, dtype="float16")) is not None


def test_when_flash_attention_is_worth_it():
    assert measured(STEP).is_worth_it()
    assert not measured(STEP, ours=3e-3).is_worth_it()
    assert measured(STEP, ours=3e-3, our_bytes=49).is_worth_it()
    assert Measured(STEP, {"cpu_decode": 1.0}, {"cpu_decode": 1}).is_worth_it()
