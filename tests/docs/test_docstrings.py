"""Every public name has a docstring, and a function's docstring names all its parameters."""

import dataclasses
import inspect
import re

import flashattn_core
import mlxlm_flash_patch
import pytest
from flashattn_core import masks, reference
from flashattn_core.arguments import Options

MASKS = ("Causal", "KeyRange", "Mask", "SlidingWindow", "Tree", "lower")
PUBLIC = {
    **{f"flashattn_core.{name}": getattr(flashattn_core, name) for name in flashattn_core.__all__},
    **{f"flashattn_core.masks.{name}": getattr(masks, name) for name in MASKS},
    "flashattn_core.masks.Tree.from_parents": masks.Tree.from_parents,
    "flashattn_core.reference.reference_attention": reference.reference_attention,
    **{f"mlxlm_flash_patch.{name}": getattr(mlxlm_flash_patch, name) for name in mlxlm_flash_patch.__all__},
}
# Maps a function to another function with the same parameters. The first one's docstring must name the second one, and
# need not list the parameters again.
AS = {
    "flashattn_core.quantized_flash_attention": "flash_attention",
    "flashattn_core.plan": "flash_attention",
    "flashattn_core.reference.reference_attention": "flash_attention",
    "mlxlm_flash_patch.enabled": "enable",
}
RAISE_ON_BAD_ARGUMENTS = (
    "flashattn_core.flash_attention",
    "flashattn_core.quantized_flash_attention",
    "flashattn_core.plan",
    "flashattn_core.backends",
    "flashattn_core.masks.SlidingWindow",
    "flashattn_core.masks.KeyRange",
    "flashattn_core.masks.Tree",
    "flashattn_core.masks.Tree.from_parents",
    "flashattn_core.masks.lower",
    "mlxlm_flash_patch.enable",
    "mlxlm_flash_patch.patch_model",
    "mlxlm_flash_patch.unpatch_model",
)


def own_docstring(name):
    """The docstring that is written for this name. One that is inherited, or that a dataclass generates, is ignored."""
    what = PUBLIC[name]
    text = inspect.cleandoc((vars(what).get("__doc__") if isinstance(what, type) else what.__doc__) or "")
    # nanobind puts the function's signature before the docstring.
    return text.partition("\n\n")[2] if text.startswith(f"{name.rpartition('.')[2]}(") else text


def parameters(what):
    if dataclasses.is_dataclass(what):
        return [field.name for field in dataclasses.fields(what) if field.init]
    if not inspect.isroutine(what) or inspect.isbuiltin(what):
        return []
    names = []
    for name, parameter in inspect.signature(what).parameters.items():
        # **options: Unpack[Options] stands for the fields of Options.
        unpacked = parameter.kind is parameter.VAR_KEYWORD and parameter.annotation == "Unpack[Options]"
        names += list(Options.__annotations__) if unpacked else [name]
    return names


@pytest.mark.parametrize("name", PUBLIC)
def test_it_names_the_parameters(name):
    text = own_docstring(name)
    assert text, f"{name} has no docstring"
    elsewhere = own_docstring(f"{name.partition('.')[0]}.{AS[name]}") if name in AS else ""
    assert AS.get(name, "") in text
    for parameter in parameters(PUBLIC[name]):
        assert re.search(rf"\b{parameter}\b", text + elsewhere), f"{name} does not say what {parameter} is"


@pytest.mark.parametrize("name", RAISE_ON_BAD_ARGUMENTS)
def test_it_says_what_it_raises(name):
    assert re.search(r"[Rr]aises:?\s", own_docstring(name))
    assert re.search(r"(Value|Type)Error", own_docstring(name))


@pytest.mark.parametrize("name", ["flash_attention", "quantized_flash_attention"])
def test_it_has_shapes(name):
    text = own_docstring(f"flashattn_core.{name}")
    assert all(shape in text for shape in ("(*B, H_q, L, D)", "(*B, H_kv, S, D)", "(*B, H_kv, S, D_v)"))
