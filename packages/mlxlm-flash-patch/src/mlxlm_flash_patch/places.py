"""Everything in mlx-lm that the patch exchanges: attributes, with what belongs there and what the patch puts in."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import described_masks, registry
from .described_masks import Describe
from .registry import BASE, CACHE, SEAM
from .route import route, routed_attention


@dataclass(frozen=True)
class Place:
    """One attribute of a module, or of a class in it."""

    module: str  # the module's name: what a request for models goes by
    owner: Any
    attribute: str
    ours: object  # what the patch puts there
    is_original: Callable[[Any], bool]  # whether something is mlx-lm's own
    original: Callable[[], object]  # mlx-lm's own, for a place that never held it
    tested: Callable[..., Any]  # takes what mlx-lm's own did when this was tested
    for_all: bool = False  # belongs to every request, whichever models that names

    @property
    def name(self) -> str:
        """How it is spoken of: the module alone where it is the seam."""
        if self.attribute == SEAM:
            return self.module
        owner = f"{self.module}.{self.owner.__name__}" if isinstance(self.owner, type) else self.module
        return f"{owner}.{self.attribute}"

    @property
    def held(self) -> Any:
        return vars(self.owner)[self.attribute]

    def put(self, what: object) -> None:
        setattr(self.owner, self.attribute, what)


def places() -> Iterator[Place]:
    """Those that exist now: of the modules that are imported."""
    for name, module in registry.holders():
        yield Place(
            name, module, SEAM, routed_attention, registry.is_original, lambda: route.original, tested=routed_attention
        )
    yield from _mask_places()


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
    ours = described_masks.describing(original, describe) if is_original(original) else None
    return Place(module, owner, attribute, ours, is_original, lambda: original, tested=describe, for_all=True)
