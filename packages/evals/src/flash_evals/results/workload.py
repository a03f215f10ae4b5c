"""Describes an attention problem: its shape, its mask, and how much each pass computes and reads."""

import re
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec import Struct

from flash_evals.results.record import Count

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # dtype -> bytes
GROUP_SIZE = 64  # elements that share a scale in quantised keys and values; mlx-lm's default

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
# How many matrix products a pass has, as FlashAttention-2 counts them (Dao 2023, arXiv:2307.08691, section 4.1). The
# forward pass computes scores and output. The backward pass computes the scores again, and the gradients of
# probabilities, query, key and value. Softmax is not counted.
PRODUCTS: dict[Pass, int] = {"forward": 2, "backward": 5, "forward_backward": 7}

Inputs = list[np.ndarray]  # query, key, value, and the output's cotangent


class Heads(NamedTuple):
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "Heads":
        """Reads `14/2x64`. Raises ValueError for other text, for a 0, or if num_kv_heads does not divide num_heads."""
        match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
        heads = cls(*map(int, match.groups())) if match else None
        if heads is None or 0 in heads or heads.num_heads % heads.num_kv_heads:
            raise ValueError(text)
        return heads


class Workload(Struct, frozen=True):
    batch_size: Count
    seq_len: Count  # the number of keys; the last query has the position of the last key
    query_len: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    causal: bool
    window: Count | None  # a query sees this many keys: its own and those before it; None: no window
    dtype: str
    kv_bits: Count | None  # bits per element of keys and values, in groups of GROUP_SIZE; None: not quantised

    def __str__(self) -> str:
        return f"{self.shape}, {self.query_len} queries, {self.seq_len} keys, {self.visible}, {self.storage}"

    @property
    def shape(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"

    @property
    def storage(self) -> str:
        """In words: `bfloat16`, `bfloat16, 8-bit K/V`."""
        return f"{self.dtype}, {self.kv_bits}-bit K/V" if self.kv_bits else self.dtype

    @property
    def visible(self) -> str:
        return f"window {self.window:,}" if self.window else "causal" if self.causal else "not causal"

    @property
    def is_decode(self) -> bool:
        """Whether there is only one query. Then the speed is limited by reading keys and values, not by arithmetic."""
        return self.query_len == 1

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs of one head are visible."""
        if not self.causal:
            return self.query_len * self.seq_len
        seen = range(self.seq_len - self.query_len + 1, self.seq_len + 1)  # keys that each query sees without a window
        return sum(min(keys, self.window or self.seq_len) for keys in seen)

    def flops(self, pass_: Pass) -> int:
        """Counts the arithmetic of a pass. In each of its matrix products, each visible (query, key) pair counts as
        head_dim multiplications and as many additions.

        Hidden pairs do not count, even if an implementation computes them.
        """
        return 2 * PRODUCTS[pass_] * self.head_dim * self.visible_pairs * self.num_heads * self.batch_size

    @property
    def bytes_of_key(self) -> int:
        """Bytes of one key of one head. If keys are quantised, this includes the scale and the bias of each group."""
        if self.kv_bits is None:
            return self.head_dim * ITEM_SIZE[self.dtype]
        return self.head_dim * self.kv_bits // 8 + self.head_dim // GROUP_SIZE * 2 * ITEM_SIZE[self.dtype]

    @property
    def bytes_read(self) -> int:
        """Bytes of the keys and values that at least one query sees, each counted once."""
        seen = min(self.seq_len, self.window + self.query_len - 1) if self.window else self.seq_len
        return 2 * self.batch_size * self.num_kv_heads * seen * self.bytes_of_key

    def bytes_held(self, pass_: Pass) -> int:
        """Bytes of query, key, value, output and one float32 logsumexp for each query of each head. Attention needs
        no more memory if it does not store the scores.

        A pass with gradients has four more arrays: the gradients of query, key and value, and the output's cotangent.
        """
        rows, keys = self.num_heads * self.query_len, self.num_kv_heads * self.seq_len
        arrays = 2 * (rows * self.head_dim * ITEM_SIZE[self.dtype] + keys * self.bytes_of_key)
        return self.batch_size * ((arrays if pass_ == "forward" else 2 * arrays) + 4 * rows)

    def mask(self) -> np.ndarray | None:
        """Which keys (columns) each query (row) sees, as bools; None if every query sees every key."""
        if self.visible_pairs == self.query_len * self.seq_len:
            return None
        positions = np.arange(self.seq_len, dtype=np.int32)
        distance = positions[-self.query_len :, None] - positions
        return np.asarray((distance >= 0) & (distance < (self.window or self.seq_len)))

    def inputs(self, seed: int) -> Inputs:
        """Normally distributed inputs, in float32."""
        random = np.random.default_rng(seed)
        query = (self.batch_size, self.num_heads, self.query_len, self.head_dim)
        key = (self.batch_size, self.num_kv_heads, self.seq_len, self.head_dim)
        return [random.standard_normal(shape, dtype=np.float32) for shape in (query, key, key, query)]
