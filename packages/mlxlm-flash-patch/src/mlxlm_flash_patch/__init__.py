"""Flash attention for mlx-lm, without touching your scripts. Importing changes nothing: enable() does."""

from .instance import patch_model, unpatch_model
from .patch import FlashNeverRanError, disable, enable, enabled
from .route import FlashFallbackError, FlashFallbackWarning
from .status import Status, status

__all__ = [
    "FlashFallbackError",
    "FlashFallbackWarning",
    "FlashNeverRanError",
    "Status",
    "disable",
    "enable",
    "enabled",
    "patch_model",
    "status",
    "unpatch_model",
]
