"""The table of what was measured on a machine: its file, and what it tells about other calls."""

import resource
from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core import _ext, tuned
from flashattn_core.arguments import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from flashattn_core.tuned import Call, Measured, call_of, nearest

STEP = Call("bfloat16", 28, 4, 128, 1, 1024)
CPU = mx.Device(mx.cpu)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    tuned._tables.clear()
    yield tmp_path
    tuned._tables.clear()


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


@pytest.mark.parametrize(
    "change", [('"bfloat16"', '"float99"'), ("1024", '"many"'), ("cpu_decode", "a_kernel"), ("false", "0")]
)
def test_a_table_with_a_wrong_value_is_named(cache, change):
    file = tuned.write([measured(STEP)], CPU)
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ValueError, match="delete it"):
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


def test_a_full_disk_leaves_the_table_as_it_was(cache):
    tuned.write([measured(STEP)], CPU)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            tuned.write([measured(STEP)] * 9, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tuned.read(CPU) == [measured(STEP)]
    assert [file.name for file in cache.iterdir()] == ["tuned.json"]


def test_the_nearest_call():
    table = [measured(replace(STEP, key_len=length)) for length in (128, 1024, 8192)]
    for length, expected in ((1, 128), (128, 128), (300, 128), (500, 1024), (5000, 8192), (10**6, 8192)):
        found = nearest(table, replace(STEP, key_len=length))
        assert found.call.key_len == expected


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"bits": 4}], ids=str)
def test_what_tells_nothing_about_a_call(other):
    assert nearest([measured(STEP)], replace(STEP, **other)) is None


@pytest.mark.parametrize("flag", [{"sinks": True}, {"softcap": True}, {"padded": True}, {"window": 1024}], ids=str)
def test_what_a_call_has_counts_more_than_its_lengths(flag):
    with_flag = replace(STEP, **flag, query_len=64, key_len=2**16)
    for near, far in ((with_flag, STEP), (STEP, with_flag)):
        found = nearest([measured(near), measured(far)], replace(near, query_len=16, key_len=2**13))
        assert found.call == near


def test_the_call_of_arguments():
    query, key = mx.zeros((3, 4, 1, 64), mx.float16), mx.zeros((3, 2, 100, 64), mx.float16)
    plain = Call("float16", 4, 2, 64, 1, 100, batch_size=3)
    assert call_of(lowered(query, key, key, None, Causal())) == plain
    assert call_of(lowered(query, key, key, None, SlidingWindow(9))) == replace(plain, window=9)
    assert call_of(lowered(query, key, key, None, Causal() & KeyRange(4))) == replace(plain, padded=True)
    more = {"softcap": 5.0, "sinks": mx.zeros(4, mx.float16)}
    assert call_of(lowered(query, key, key, None, **more)) == replace(plain, softcap=True, sinks=True)
    stored = mx.quantize(key, bits=4)
    assert call_of(lowered(query, stored, stored, None, bits=4, group_size=64)) == replace(plain, bits=4)


def test_a_call_without_elements_is_like_others():
    assert nearest([measured(STEP)], replace(STEP, query_len=0, key_len=0, batch_size=0)) is not None


def test_the_users_table_goes_before_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_BROUGHT", tmp_path)
    assert tuned.here(CPU) == []
    (tmp_path / "one.json").write_text(tuned.in_json([measured(STEP)], CPU))
    tuned._tables.clear()
    assert tuned.here(CPU) == [measured(STEP)]
    own = [measured(replace(STEP, window=5)), measured(STEP, ours=9.0)]
    tuned.write(own[:1], CPU)
    assert tuned.here(CPU) == [own[0], measured(STEP)]
    tuned.write(own, CPU)
    assert tuned.here(CPU) == own


def test_a_table_that_cannot_be_read_is_said_once_and_kernels_are_chosen_without_it(cache):
    (cache / "tuned.json").write_text("half")
    with pytest.warns(tuned.TableWarning, match="delete it"):
        assert tuned.here(CPU) == []
    assert tuned.here(CPU) == []


def test_what_is_preferred():
    both = Measured(STEP, {"cpu_prefill": 3e-3, "cpu_decode": 1e-3}, {"cpu_prefill": 100, "cpu_decode": 100})
    tuned.write([both], CPU)
    query, key = mx.zeros((1, 4, 1, 64), mx.float16), mx.zeros((1, 2, 100, 64), mx.float16)
    assert tuned.preferred(lowered(query, key, key, None), CPU, "cpu_prefill") == "cpu_decode"
    assert tuned.preferred(lowered(*(x.astype(mx.float32) for x in (query, key, key)), None), CPU, "cpu_prefill") == ""


def test_a_kernel_that_is_newer_than_the_table_keeps_its_place():
    tuned.write([measured(STEP)], CPU)
    query, key = mx.zeros((1, 4, 1, 64), mx.bfloat16), mx.zeros((1, 2, 100, 64), mx.bfloat16)
    assert tuned.preferred(lowered(query, key, key, None), CPU, "cpu_prefill") == ""


def test_the_usual_kernel_stays_where_another_is_hardly_faster():
    times = Measured(STEP, {"mlx": 1.0, "usual": 3.0, "other": 2.8, "slow": 9.0}, {})
    assert times.fastest("usual") == "usual"
    assert times.fastest("slow") == times.fastest("unknown") == times.fastest() == "other"


def test_whether_it_is_worth_it_depends_on_the_kernel_that_is_taken():
    row = Measured(STEP, {"mlx": 1.0, "usual": 1.05, "other": 0.97}, dict.fromkeys(("mlx", "usual", "other"), 0))
    assert row.is_worth_it()
    assert not row.is_worth_it("usual")
    assert row.is_worth_it("other")
    assert row.is_worth_it("unknown")


def test_bits_are_compared():
    rows = [measured(replace(STEP, bits=bits)) for bits in (4, 8)]
    for bits, expected in ((4, 4), (8, 8), (6, 8), (2, 4)):
        assert nearest(rows, replace(STEP, bits=bits)).call.bits == expected


def test_a_row_in_which_all_of_our_kernels_failed_tells_nothing():
    alone = Measured(STEP, {"mlx": 1.0}, {"mlx": 1})
    assert nearest([alone], STEP) is None
    assert nearest([alone, measured(replace(STEP, key_len=4096))], STEP).call.key_len == 4096


def test_float16_is_as_fast_as_bfloat16():
    assert nearest([measured(STEP)], replace(STEP, dtype="float16")) is not None


def test_when_flash_attention_is_worth_it():
    assert measured(STEP).is_worth_it()
    assert not measured(STEP, ours=3e-3).is_worth_it()
    assert measured(STEP, ours=3e-3, mlx_bytes=10**9, our_bytes=10**9 // 2 - 1).is_worth_it()
    assert not measured(STEP, ours=3e-3, mlx_bytes=10**9, our_bytes=10**9 // 2).is_worth_it()
    assert not measured(STEP, ours=3e-3, mlx_bytes=1000, our_bytes=1).is_worth_it()  # what is little is no matter
    assert Measured(STEP, {"cpu_decode": 1.0}, {"cpu_decode": 1}).is_worth_it()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_the_tables_that_the_package_brings(device, monkeypatch):
    here = tuned.software(CPU)
    monkeypatch.setattr(tuned, "software", lambda _: here | {"device": device})
    table = tuned.brought(CPU)
    assert len(table) > 140
    assert len({each.call for each in table}) == len(table)
    assert {name for each in table for name in each.seconds} <= {tuned.MLX, *_ext.kernels("cuda")}
    assert all(each.seconds.keys() == each.bytes.keys() for each in table)
