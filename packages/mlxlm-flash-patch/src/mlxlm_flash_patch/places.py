"""Everything in mlx-lm that the patch exchanges: attributes, with what belongs there and what the patch puts in.

Of four kinds: the seam, MLX under the name `mx` in a module that calls MLX's attention itself, functions that
write attention out, and those that make masks.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx

from . import described_masks, registry
from .described_masks import Describe
from .direct import GLOBAL, instance_mx, routed_mx
from .hand_written import HAND_WRITTEN, HandWritten
from .registry import BASE, CACHE, PACKAGE, SEAM
from .route import Attention, instance_attention, route, routed_attention


@dataclass(frozen=True)
class Place:
    """One attribute of a module, or of a class in it."""

    module: str  # the module's name: what a request for models goes by
    owner: Any
    attribute: str
    ours: object  # what enable() puts there
    instead: object  # what it means in one model that was given to patch_model()
    is_original: Callable[[Any], bool]  # whether something is mlx-lm's own
    original: Callable[[], object]  # mlx-lm's own, for a place that never held it
    check: Callable[[Any], object]  # raises RuntimeError if mlx-lm's own is not what this was tested with
    for_all: bool = False  # belongs to every request, whichever models that names

    @property
    def name(self) -> str:
        """How it is spoken of: the module alone where it is the seam."""
        if self.attribute == SEAM:
            return self.module
        if isinstance(self.owner, ModuleType):
            return f"{self.module}.{self.attribute}"
        return f"{self.module}.{self.owner.__qualname__}.{self.attribute}"

    @property
    def key(self) -> tuple[int, str]:
        """The same for the same place. A module that is loaded again has other classes, and may be another object."""
        return id(self.owner), self.attribute

    @property
    def held(self) -> Any:
        return vars(self.owner).get(self.attribute)

    def put(self, what: object) -> None:
        setattr(self.owner, self.attribute, what)


def places() -> Iterator[Place]:
    """Those that exist now: of the modules that are imported."""
    for name, module in registry.holders():
        yield _seam(name, module)
    for stem in registry.patched_by("mx.fast"):
        module_of = sys.modules.get(f"{PACKAGE}.{stem}")
        if module_of is not None and GLOBAL in vars(module_of):
            yield _direct(module_of)
    for what in HAND_WRITTEN:
        module_of = sys.modules.get(f"{PACKAGE}.{what.module}")
        if module_of is not None:
            yield from _hand_written(module_of, what)
    yield from _mask_places()


def _seam(name: str, module: ModuleType) -> Place:
    return Place(
        name,
        module,
        SEAM,
        ours=routed_attention,
        instead=instance_attention,
        is_original=registry.is_original,
        original=lambda: route.original,
        check=_learn_original,
    )


def _learn_original(original: Attention) -> None:
    """Makes `original` what fallbacks go to."""
    registry.check_signature(original, tested=routed_attention)
    route.original = original


def _direct(module: ModuleType) -> Place:
    return Place(
        module.__name__,
        module,
        GLOBAL,
        ours=routed_mx,
        instead=instance_mx,
        is_original=lambda held: held is mx,
        original=lambda: mx,
        check=lambda held: None,
    )


def _hand_written(module: ModuleType, what: HandWritten) -> Iterator[Place]:
    owner: Any = module
    *classes, attribute = what.function.split(".")
    for name in classes:
        owner = vars(owner).get(name)
    if owner is None or attribute not in vars(owner):
        return  # another thread is at importing the module

    def is_original(held: object) -> bool:
        return (
            isinstance(held, FunctionType)
            and held.__globals__ is vars(module)
            and held.__code__.co_qualname == what.function
        )

    original: Any = inspect.unwrap(vars(owner)[attribute])
    known = is_original(original)
    yield Place(
        module.__name__,
        owner,
        attribute,
        ours=what.routed(original) if known else None,
        instead=what.always(original) if known else None,
        is_original=is_original,
        original=lambda: original,
        check=lambda held: what.check(),
    )


def _mask_places() -> Iterator[Place]:
    """Where mlx-lm makes masks of L*S: the function that the modules share, and two methods that do without it."""
    for name, module in registry.holders("create_causal_mask"):
        yield _mask_place(name, module, "create_causal_mask", BASE, described_masks.causal)
    classes = vars(sys.modules.get(CACHE, object))
    for name, describe in (
        ("RotatingKVCache", described_masks.rotating),
        ("BatchRotatingKVCache", described_masks.batch_rotating),
    ):
        if name in classes:  # not while another thread imports the module
            yield _mask_place(CACHE, classes[name], "make_mask", CACHE, describe)


def _mask_place(module: str, owner: Any, attribute: str, home: str, describe: Describe) -> Place:
    held = vars(owner)[attribute]
    path = f"{owner.__name__}.{attribute}" if isinstance(owner, type) else attribute
    is_original = partial(registry.is_original, module=home, path=path)
    original = described_masks.described(held)
    return Place(
        module,
        owner,
        attribute,
        ours=described_masks.describing(original, describe) if is_original(original) else None,
        instead=None,
        is_original=is_original,
        original=lambda: original,
        check=partial(registry.check_signature, tested=describe),
        for_all=True,
    )
