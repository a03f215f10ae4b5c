"""Everything in mlx-lm that the patch exchanges: attributes, with what belongs there and what the patch puts in.

Of four kinds: the seam, MLX under the name `mx` in a module that calls MLX's attention itself, functions that
write attention out, and those that make masks.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx

from . import described_masks, ours, registry
from .described_masks import Describe
from .direct import GLOBAL, standing_in
from .hand_written import HAND_WRITTEN, HandWritten
from .registry import BASE, CACHE, PACKAGE, SEAM
from .route import Attention, Way, for_every_model, routing


@dataclass(frozen=True)
class Place:
    """One attribute of a module, or of a class in it."""

    module: str  # the module's name: what a request for models goes by
    owner: Any
    attribute: str
    is_original: Callable[[Any], bool]  # whether something is mlx-lm's own
    make: Callable[[Any, Way], Any]  # what the patch puts in the place of mlx-lm's own
    check: Callable[[Any], None]  # raises RuntimeError if mlx-lm's own is not what this was tested with
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

    @property
    def original(self) -> Any:
        """mlx-lm's own, be it here or replaced by the patch; None where another library's object is."""
        held = self.held
        if made := ours.known(held):
            return made.original
        return held if self.is_original(held) else None

    @property
    def way(self) -> Way | None:
        """Whose calls are flash attention here; None where nothing of the patch is."""
        made = ours.known(self.held)
        return made.way if made else None

    def exchange(self, original: Any, way: Way | None) -> None:
        """Makes this way the place's, or gives it mlx-lm's own back."""
        self.put(ours.instead_of(original, way, self.make) if way else original)

    def put(self, what: object) -> None:
        setattr(self.owner, self.attribute, what)


def places() -> Iterator[Place]:
    """Those that exist now: of the modules that are imported."""
    for name, module in registry.holders():
        yield Place(name, module, SEAM, registry.is_original, routing, _check_seam)
    for stem in registry.patched_by("mx.fast"):
        module_of = sys.modules.get(f"{PACKAGE}.{stem}")
        if module_of is not None and GLOBAL in vars(module_of):
            yield Place(module_of.__name__, module_of, GLOBAL, lambda held: held is mx, standing_in, lambda mlx: None)
    for what in HAND_WRITTEN:
        module_of = sys.modules.get(f"{PACKAGE}.{what.module}")
        if module_of is not None:
            yield from _hand_written(module_of, what)
    yield from _mask_places()


def _check_seam(original: Attention) -> None:
    registry.check_signature(original, tested=routing(original, for_every_model))


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

    yield Place(module.__name__, owner, attribute, is_original, what.make, lambda original: what.check())


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
    path = f"{owner.__name__}.{attribute}" if isinstance(owner, type) else attribute
    return Place(
        module,
        owner,
        attribute,
        is_original=partial(registry.is_original, module=home, path=path),
        make=lambda original, way: described_masks.describing(original, describe),
        check=partial(registry.check_signature, tested=describe),
        for_all=True,
    )
