"""Flash attention for MLX programs, without touching them. Importing changes nothing: enable() does."""

try:
    import flashattn_core  # noqa: F401  first: it has the cure where MLX does not load

    from .patch import (
        FlashNeverRanError,
        Status,
        disable,
        enable,
        enabled,
        observe,
        patch_model,
        status,
        unpatch_model,
    )
    from .router import FlashFallbackError, FlashFallbackWarning
except ImportError as error:  # flashattn_core does not load: what it says is said again by whatever is used,
    _why = error  # and not by the import, or `mlxlm-flash doctor` could not be reached

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise _why
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FlashFallbackError",
    "FlashFallbackWarning",
    "FlashNeverRanError",
    "Status",
    "disable",
    "enable",
    "enabled",
    "observe",
    "patch_model",
    "status",
    "unpatch_model",
]
