"""Tests the wheels' metadata and files."""

import csv
import ctypes
import io
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import flashattn_core
import mlx.core as mx
import pytest
from flashattn_core import _ext
from release_table import releases

from tests.packaging.build_wheels import PACKAGES, ROOT, uv
from tests.packaging.virtual_environment import metadata
from tests.promises import promise

ABI3AUDIT = ("--no-project", "--with", "abi3audit==0.0.26", "abi3audit", "--report", "--assume-minimum-abi3", "3.11")
VERSION = flashattn_core.__version__
CORE = "flashattn-core"
MODULE = f"flashattn_core/_mlx_{releases()[-1].mlx.replace('.', '_')}/_ext.abi3.so"
COMMANDS = {
    CORE: {},
    "mlxlm-flash-patch": {"mlxlm-flash": "mlxlm_flash_patch.cli:main"},
    "flash-evals": {"flash-eval": "flash_evals.cli:main"},
}
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="ELF files are Linux's; tests/macos has the macOS wheel's"
)
in_its_wheel = pytest.param(CORE, marks=pytest.mark.nightly("compiles the extension"))
each = pytest.mark.parametrize("distribution", [in_its_wheel, *(name for name in PACKAGES if name != CORE)])


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def of_dist_info(wheel, name):
    [content] = [content for path, content in contents(wheel).items() if path.endswith(f".dist-info/{name}")]
    return content.decode()


@pytest.fixture(params=["installed", pytest.param("wheel", marks=pytest.mark.nightly("compiles the extension"))])
def module(request, wheel, tmp_path):
    """The extension module of this environment, or the one in the wheel."""
    if request.param == "installed":
        return Path(_ext.__file__)
    with zipfile.ZipFile(wheel(CORE)) as archive:
        return Path(archive.extract(MODULE, tmp_path))


def dynamic(module, tag):
    """The entries of the ELF file's dynamic section with this tag, such as NEEDED."""
    said = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", said)


@each
def test_tags(wheel, distribution):
    """One wheel of the extension fits every CPython from 3.11 on, and runs on any Linux on which MLX's wheel runs."""
    tag = wheel(distribution).stem.partition(f"-{VERSION}-")[2]
    if distribution == CORE:
        platform = r"manylinux_2_\d\d_(x86_64|aarch64)" if sys.platform == "linux" else r"macosx_1\d_0_arm64"
        assert re.fullmatch(rf"cp311-abi3-{platform}", tag)
        if tag.startswith("cp311-abi3-manylinux"):
            assert int(tag.split("_")[2]) <= 35
    else:
        assert tag == "py3-none-any"


@each
def test_metadata(wheel, distribution):
    said = metadata(wheel(distribution))
    assert (said["Name"], said["Version"], said["Requires-Python"]) == (distribution, VERSION, ">=3.11")
    assert (said["License-Expression"], said["License-File"]) == ("MIT", "LICENSE")
    assert of_dist_info(wheel(distribution), "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert said["Summary"]
    assert said["Description-Content-Type"] == "text/markdown"
    commands = of_dist_info(wheel(distribution), "entry_points.txt") if COMMANDS[distribution] else ""
    assert dict(re.findall(r"^(\S+) ?= ?(\S+)$", commands, re.MULTILINE)) == COMMANDS[distribution]


@promise("wheels hold the packages' files and nothing else")
@each
def test_files(wheel, distribution):
    """A wheel has the files of src/, the extension and the metadata, but no C++ sources, no tests and no libmlx."""
    source = ROOT / "packages" / PACKAGES[distribution] / "src"
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    if distribution == CORE:
        expected.add(MODULE)
        if sys.platform == "linux":
            expected.add("flashattn_core/libflashattn_kernels.so")
    found = contents(wheel(distribution))
    assert {name for name in found if ".dist-info/" not in name and not name.endswith("/")} == expected
    recorded = {row[0] for row in csv.reader(io.StringIO(of_dist_info(wheel(distribution), "RECORD")))}
    assert recorded == {name for name in found if not name.endswith("/")}


def test_the_extension_keeps_to_the_stable_abi(module):
    [audited] = json.loads(uv("run", *ABI3AUDIT, module))["specs"].values()
    assert audited["object"]["result"]["non_abi3_symbols"] == []
    assert audited["object"]["result"]["is_abi3_baseline_compatible"]


@on_linux
def test_the_extension_finds_libmlx_beside_itself(module):
    assert dynamic(module, "RUNPATH") == ["$ORIGIN/../../mlx/lib:$ORIGIN/.."]
    assert dynamic(module, "RPATH") == []


@on_linux
def test_the_extension_needs_nothing_but_the_system_s_libraries(module):
    system = re.compile(r"(libc|libm|libgcc_s|libstdc\+\+|libpthread|ld-linux-[\w-]+)\.so\.\d+")
    needed = [name for name in dynamic(module, "NEEDED") if not system.fullmatch(name)]
    assert sorted(needed) == ["libflashattn_kernels.so", "libmlx.so"]


@promise("one wheel serves MLX's CPU build and both of its CUDA builds")
@on_linux
def test_what_only_mlx_s_builds_for_cuda_have_is_weak(module):
    """The extension refers weakly to symbols that only MLX's builds for CUDA have, so it loads with any build."""
    symbols = subprocess.run(["readelf", "--dyn-syms", "-W", module], capture_output=True, text=True, check=True).stdout
    missing = dict(reversed(row) for row in re.findall(r"(GLOBAL|WEAK) +DEFAULT +UND (_ZN3mlx\S+)", symbols))
    libmlx = ctypes.CDLL(str(Path(mx.__file__).parent / "lib/libmlx.so"))
    found = {name: bind for name, bind in missing.items() if not hasattr(libmlx, name)}
    assert {"_ZN3mlx4core2cu19get_command_encoderENS0_6StreamE"} <= found.keys()
    assert set(found.values()) == {"WEAK"}


@pytest.mark.nightly("compiles the extension")
def test_no_fault_can_be_planted_in_it(wheel):
    assert not [name for name, content in contents(wheel(CORE)).items() if b"FLASHATTN_PLANT" in content]


@promise("wheels hold nothing of the building machine")
@each
def test_no_folder_of_the_machine_that_built_it(wheel, distribution):
    places = [str(ROOT), str(Path.home()), "/tmp/", "sdists-v", "builds-v"]
    for name, content in contents(wheel(distribution)).items():
        assert [place for place in places if place.encode() in content] == [], name
