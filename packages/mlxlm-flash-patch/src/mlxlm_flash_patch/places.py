"""Everything in mlx-lm that the patch exchanges: attributes, with what belongs there and what the patch puts in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import registry
from .registry import SEAM
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

    @property
    def name(self) -> str:
        """How it is spoken of: the module alone where it is the seam."""
        return self.module if self.attribute == SEAM else f"{self.module}.{self.attribute}"

    @property
    def held(self) -> Any:
        return vars(self.owner)[self.attribute]

    def put(self, what: object) -> None:
        setattr(self.owner, self.attribute, what)


def places() -> Iterator[Place]:
    """Those that exist now: of the modules that are imported."""
    for name, module in registry.holders():
        yield Place(name, module, SEAM, routed_attention, registry.is_original, lambda: route.original)
