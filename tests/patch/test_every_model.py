"""Every place in every module of mlx-lm gets what the patch puts there, and its own back; none is forgotten."""

import importlib
import pkgutil

import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from mlxlm_flash_patch.hand_written import HAND_WRITTEN
from mlxlm_flash_patch.places import places
from mlxlm_flash_patch.registry import SEAM, is_mlx_lm, model_types, patched_by, supported


@pytest.fixture(scope="module")
def modules():
    """All of mlx_lm.models that can be imported here: name → module."""
    found = {}
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            found[info.name] = importlib.import_module(f"mlx_lm.models.{info.name}")
        except SystemExit:  # olmo calls exit() when a package of its own is missing
            assert info.name == "olmo"
    return found


def names(model_type):
    """The places of a model type's own module, as status() names them."""
    name, by = f"mlx_lm.models.{model_type}", model_types()[model_type].by
    found = {name} if "seam" in by else set()
    found |= {f"{name}.mx"} if "mx.fast" in by else set()
    return found | {f"{name}.{what.function}" for what in HAND_WRITTEN if what.module == model_type}


def test_all_are_patched_and_restored(modules, original):
    def own():
        attention = [place for place in places() if is_mlx_lm(place.module) and not place.for_all]
        return {place.name for place in attention if place.is_original(place.held)}

    everything = {"mlx_lm.models.base"}.union(*map(names, supported()))
    assert own() == everything
    flash.enable()
    assert own() == set()
    assert set(flash.status().patched) == everything
    flash.disable()
    assert own() == everything
    assert all(vars(modules[name])[SEAM] is original for name in patched_by("seam"))


@pytest.mark.usefixtures("modules")
@pytest.mark.rotate(10)
@pytest.mark.parametrize("name", supported())
def test_each_by_name(name):
    flash.enable(name)
    entry = model_types()[name]
    assert set(flash.status().patched) == set().union(*map(names, [name] if entry.by else entry.through))


def test_nothing_else_of_the_modules_changes(modules):
    """Nor of their classes, but for what is written out, and what makes masks."""
    shared = {SEAM, "create_causal_mask"}
    allowed = {f"mlx_lm.models.{what.module}.{what.function}" for what in HAND_WRITTEN}
    allowed |= {place.name for place in places() if place.for_all}

    def contents():
        held = {}
        for name, module in modules.items():
            owners = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
            for owner in [module, *owners]:
                prefix = f"mlx_lm.models.{name}" + (f".{owner.__qualname__}" if owner is not module else "")
                held |= {f"{prefix}.{key}": id(value) for key, value in vars(owner).items() if key not in shared}
        direct = {f"mlx_lm.models.{name}.mx" for name in patched_by("mx.fast")}
        return {name: value for name, value in held.items() if name not in allowed | direct}

    before = contents()
    with flash.enabled():
        assert contents() == before
    assert contents() == before
