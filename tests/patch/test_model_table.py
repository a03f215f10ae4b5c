"""models.toml agrees with the sources of mlx-lm's modules. These tests fail for a new module of mlx-lm."""

import ast
from pathlib import Path

import mlx_lm
import pytest
from mlxlm_flash_patch.patch_points import POINTS

from tests.patch.model_types import model_types, supported, table

pytestmark = pytest.mark.slow("3 seconds")

SEAM = "scaled_dot_product_attention"
FOLDER = Path(mlx_lm.__file__).parent / "models"
SOURCES = {file.stem: ast.parse(file.read_text()) for file in FOLDER.glob("*.py") if file.stem != "__init__"}
HELPERS = table()["helpers"]
WRITTEN_OUT = {name for point in POINTS if (name := point.module.rpartition(".")[2]) in model_types()}


def imports(module):
    """Yields (sibling module, imported name or None) for each of the module's relative imports."""
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                yield (node.module, alias.name) if node.module else (alias.name, None)


def calls(module, of):
    """Whether the module's source contains a call of `of`, such as mx.fast.scaled_dot_product_attention."""
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == of for node in ast.walk(SOURCES[module]))


def by(module):
    """The value of the field `by` in models.toml, according to the module's source."""
    found = ["seam"] * (("base", SEAM) in imports(module) and calls(module, SEAM))
    found += ["mx.fast"] * calls(module, f"mx.fast.{SEAM}")
    return (*found, *(["hand-written"] * (module in WRITTEN_OUT)))


def through(module):
    """The modules with attention that this module imports, directly or through other modules."""
    siblings = {name for name, _ in imports(module)} - set(HELPERS)
    return {lender for name in siblings for lender in ([name] if by(name) else through(name))}


def test_every_module_is_in_it():
    assert sorted([*model_types(), *HELPERS]) == sorted(SOURCES)
    for module in model_types():
        assert any(isinstance(n, ast.ClassDef) and n.name == "ModelArgs" for n in SOURCES[module].body), module


def test_it_says_what_the_sources_say():
    for model_type, entry in model_types().items():
        assert entry.by == by(model_type), model_type
        assert set(entry.through) == (set() if entry.by else through(model_type)), model_type
        assert bool(entry.by or entry.through) != bool(entry.without), model_type
        assert bool(entry.caches) + bool(entry.untested) == (model_type in supported()), model_type
