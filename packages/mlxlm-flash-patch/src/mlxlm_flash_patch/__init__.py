"""Flash attention for unchanged MLX programs. Importing this package changes nothing; enable() does."""

try:
    import flashattn_core  # noqa: F401  first: if MLX does not load, this error says what to install

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
except ImportError as error:  # flashattn_core does not load. Using a name of this package raises this error, and
    _why = error  # importing the package does not: `mlxlm-flash doctor` must be able to start

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
