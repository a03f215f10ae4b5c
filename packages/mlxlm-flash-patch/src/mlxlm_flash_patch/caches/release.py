"""Recognises the releases of mlx-lm whose caches were tested."""

import hashlib
import inspect
from importlib.metadata import version

from mlx_lm.models import cache

TEXT = "c96cb169fd5e0ec4"  # the hash of mlx_lm/models/cache.py in mlx-lm 0.32.0 to 0.32.2


def require_tested() -> None:
    """Raises RuntimeError if mlx-lm's caches are not those of a tested release."""
    try:
        is_known = hashlib.sha256(inspect.getsource(cache).encode()).hexdigest()[:16] == TEXT
    except OSError:
        is_known = False
    if not is_known:
        what = f"the source of mlx_lm.models.cache in mlx-lm {version('mlx-lm')} is another, or is missing"
        raise RuntimeError(f"[enable] kv_bits expects the caches of mlx-lm 0.32.0 to 0.32.2: {what}")
