"""models.toml, mlx-lm's modules and the README's table say the same: a new module of mlx-lm fails here."""

import ast
import importlib.util
import tomllib
from pathlib import Path

import mlxlm_flash_patch
from mlxlm_flash_patch.hand_written import HAND_WRITTEN
from mlxlm_flash_patch.registry import SEAM, model_types, models_folder, patched_by

PACKAGE = Path(mlxlm_flash_patch.__file__).parents[2]
SOURCES = {file.stem: ast.parse(file.read_text()) for file in models_folder().glob("*.py") if file.stem != "__init__"}
HELPERS = tomllib.loads((Path(mlxlm_flash_patch.__file__).parent / "models.toml").read_text())["helpers"]


def imports(module):
    """(sibling module, name) for each import of the package's own."""
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                yield (node.module, alias.name) if node.module else (alias.name, None)


def calls(module, of):
    """Whether the module calls what is written like this."""
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == of for node in ast.walk(SOURCES[module]))


def by(module):
    """How it is to be patched, as its source has it."""
    found = ["seam"] * (("base", SEAM) in imports(module) and calls(module, SEAM))
    found += ["mx.fast"] * calls(module, f"mx.fast.{SEAM}")
    return (*found, *("hand-written" for what in HAND_WRITTEN if what.module == module))


def through(module):
    """The modules with attention that it is built of."""
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
        assert entry.is_patched != bool(entry.without), model_type
        assert bool(entry.caches) + bool(entry.untested) == entry.is_patched, model_type


def test_softmax_is_of_scores_only_where_it_says_so():
    """Where a matrix product feeds a softmax in one function, attention is written out."""

    def writes_out(function):
        text = ast.unparse(function)
        return "mx.softmax(scores" in text and "scores @" in text

    found = {
        module
        for module, tree in SOURCES.items()
        if any(isinstance(node, ast.FunctionDef) and writes_out(node) for node in ast.walk(tree))
    }
    assert found == {*patched_by("hand-written"), "olmo"}
    assert model_types()["olmo"].without


def test_the_readme_has_the_table():
    spec = importlib.util.spec_from_file_location("write_table", PACKAGE / "scripts" / "write_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.README.read_text()
    assert script.with_table(text) == text, "run scripts/write_table.py"
