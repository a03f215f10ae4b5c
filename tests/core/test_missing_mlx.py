"""Without mlx, or without the part of it that computes, the import says what to install."""

import re
import sys
from importlib.metadata import requires

import pytest

# What a missing distribution, and a missing libmlx, look like to an import.
LACKING = {
    "mlx": "import sys; sys.modules['mlx'] = None",
    "libmlx": """
import sys
class NoLibrary:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")
sys.meta_path.insert(0, NoLibrary())
""",
}


@pytest.mark.parametrize("what", LACKING)
def test_the_import_says_what_to_install(run_python, what):
    done = run_python(LACKING[what] + "\nimport flashattn_core")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    found = re.fullmatch(
        r"ImportError: flashattn_core needs mlx, which does not load: .+\. pip install '(.+)'(.*)", last
    )
    assert found, done.stderr
    if sys.platform == "linux":
        extras = [line.partition("extra == ")[2].strip("\"'") for line in requires("flashattn-core") if "mlx[" in line]
        assert found[1] == f"flashattn-core[{extras[0]}]"
        assert re.findall(r"\[(\w+)\]", found[2]) == extras[1:]
    else:
        assert found[1] in requires("flashattn-core")
