"""Everything in mlx-lm that the patch exchanges: attributes, with what belongs there and what the patch puts in."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from . import described_masks, registry
from .described_masks import Describe
from .registry import BASE, CACHE, SEAM
from .route import Attention, route, routed_attention


@dataclass(frozen=True)
class Place:
    """One attribute of a module, or of a class in it."""

    module: str  # the module's name: what a request for models goes by
    owner: Any
    attribute: str
    ours: object  # what the patch puts there
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
    def held(self) -> Any:
        return vars(self.owner)[self.attribute]

    def put(self, what: object) -> None:
        setattr(self.owner, self.attribute, what)


def places() -> Iterator[Place]:
    """Those that exist now: of the modules that are imported."""
    for name, module in registry.holders():
        yield _seam(name, module)
    yield from _mask_places()


def _seam(name: str, module: ModuleType) -> Place:
    return Place(
        name,
        module,
        SEAM,
        ours=routed_attention,
        is_original=registry.is_original,
        original=lambda: route.original,
        check=learn_original,
    )


def learn_original(original: Attention) -> None:
    """Makes `original` what fallbacks go to."""
    registry.check_signature(original, tested=routed_attention)
    route.original = original


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
        is_original=is_original,
        original=lambda: original,
        check=partial(registry.check_signature, tested=describe),
        for_all=True,
    )
