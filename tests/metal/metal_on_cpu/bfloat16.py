"""bfloat16 for numpy, which has none: the upper half of a float32, as uint16."""

import numpy as np


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even."""
    array = np.ascontiguousarray(array, np.float32)
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
