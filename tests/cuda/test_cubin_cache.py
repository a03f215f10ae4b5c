"""Machine code is cached on disk. A process loads it only if GPU, compiler and source text are the same."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.emulators import fake_gpu
from tests.promises import promise

LOADED = "loads text of kernel\n"
COMPILED = "compiles text of kernel --gpu-architecture=sm_90a\n" + LOADED


@pytest.fixture
def kept(tmp_path):
    """Compiles a kernel into a cache. Returns the cached file, and a version of fake_gpu.said() that uses the cache."""

    def said(**answers):
        return fake_gpu.said(FLASHATTN_CACHE=str(tmp_path), **answers)

    assert said() == COMPILED
    assert said() == LOADED
    [file] = (tmp_path / "cubins").iterdir()
    return file, said


def cut(whole):
    return whole[: len(whole) // 2]


def flipped(place):
    return lambda whole: whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


BREAKS = [cut, lambda whole: b"", lambda whole: whole + b"more", *map(flipped, (0, 20, -10, -1))]


@promise("a broken file of machine code is compiled anew")
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_file_is_compiled_anew(kept, broken):
    file, said = kept
    whole = file.read_bytes()
    file.write_bytes(broken(whole))
    assert said() == COMPILED
    assert file.read_bytes() == whole


def test_a_file_of_something_else_is_not_used(kept):
    file, said = kept
    whole = file.read_bytes()
    assert "compiles text of other" in said(kernel="other")
    [other] = set(file.parent.iterdir()) - {file}
    file.write_bytes(other.read_bytes())
    assert said() == COMPILED
    assert file.read_bytes() == whole


@promise("what others may write to is not used")
@pytest.mark.parametrize("writable", [0o020, 0o002], ids=["by its group", "by everybody"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_may_write_to_is_not_used(kept, what, writable):
    file, said = kept
    path = file if what == "file" else file.parent
    path.chmod(path.stat().st_mode | writable)
    assert said() == COMPILED


@promise("only the user may read or write the cache folder")
def test_only_its_user_may_read_it(tmp_path):
    before = os.umask(0)
    try:
        fake_gpu.said(FLASHATTN_CACHE=str(tmp_path / "new" / "cache"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*") if path.is_dir()}
    assert modes == {"cache": 0o700, "cubins": 0o700}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


@promise("machine code on disk serves only the same text, GPU and NVRTC")
@pytest.mark.parametrize("difference", [{"MINOR": "1"}, {"MAJOR": "8"}, {"kernel": "other"}])
def test_another_compiler_gpu_or_text_is_compiled(kept, difference):
    _, said = kept
    assert said(**difference).startswith("compiles")
    assert said(**difference).startswith("loads")
    assert said() == LOADED


FOLDERS = {"FLASHATTN_CACHE": "cubins", "XDG_CACHE_HOME": "flashattn/cubins", "HOME": ".cache/flashattn/cubins"}


@pytest.mark.parametrize("first", range(len(FOLDERS)))
def test_where_machine_code_is_kept(tmp_path, first):
    """The first variable of FOLDERS that is set must determine the folder."""
    names = list(FOLDERS)[first:]
    fake_gpu.said(**{name: str(tmp_path / name) for name in names})
    [file] = (file for file in tmp_path.rglob("*") if file.is_file())
    assert file.parent == tmp_path / names[0] / FOLDERS[names[0]]


@pytest.mark.parametrize("folder", ["", "/proc/none", "/dev/null"])
def test_without_a_folder_nothing_is_kept(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [fake_gpu.said(FLASHATTN_CACHE=folder) for _ in range(2)] == [COMPILED] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_nothing(kept):
    """In this test a limit on the size of files takes the place of a full disk."""
    file, said = kept
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, most))
    try:
        assert "loads text of other" in said(kernel="other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert list(file.parent.iterdir()) == [file]


def test_many_writers_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: fake_gpu.said(FLASHATTN_CACHE=str(tmp_path)), range(16)))
    assert set(answers) <= {COMPILED, LOADED}
    assert len(list((tmp_path / "cubins").iterdir())) == 1
    assert fake_gpu.said(FLASHATTN_CACHE=str(tmp_path)) == LOADED
