"""Flash attention for unchanged MLX programs. Importing this package changes nothing; enable() does."""

try:
    import flashattn_core  # noqa: F401  first, because if MLX does not load, this import's error says what to install

    from .patch import FlashNeverRanError, Status, disable, enable, enabled, observe, patch_model, status, unpatch_model
    from .router import FlashFallbackError, FlashFallbackWarning
except ImportError as error:
    # MLX or flashattn_core does not load. Importing this package must work all the same, so that `mlxlm-flash doctor`
    # can start. The error is raised when a name of the package is used.
    _why = error

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
