"""One attention problem: its shape, its mask, and how much arithmetic and reading each pass needs."""

import re
from typing import Literal, NamedTuple, get_args

import numpy as np
from msgspec import Struct

from flash_evals.results.record import Count

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # dtype -> bytes
GROUP_SIZE = 64  # of quantised keys and values: mlx-lm's default

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
# How many matrix products a pass has, as FlashAttention-2 counts them (Dao 2023, arXiv:2307.08691, section 4.1). The
# forward pass computes scores and output; the backward pass computes the scores again, and the gradients of
# probabilities, query, key and value. Softmax is not counted.
PRODUCTS: dict[Pass, int] = {"forward": 2, "backward": 5, "forward_backward": 7}

Inputs = list[np.ndarray]  # query, key, value, and the output's cotangent


class Heads(NamedTuple):
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "Heads":
        """Reads `14/2x64`. Raises ValueError for other text, a 0, or query heads that key/value heads do not divide."""
        match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
        heads = cls(*map(int, match.groups())) if match else None
        if heads is None or 0 in heads or heads.num_heads % heads.num_kv_heads:
            raise ValueError(text)
        return heads


class Workload(Struct, frozen=True):
    batch_size: Count
    seq_len: Count  # keys; the last query stands at the last key
    query_len: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    causal: bool
    window: Count | None  # a query sees this many keys: its own and those before it; None: no window
    dtype: str
    kv_bits: Count | None  # per element of keys and values, in groups of GROUP_SIZE; None: not quantised

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
        """Says in words which keys a query sees."""
        return f"window {self.window:,}" if self.window else "causal" if self.causal else "not causal"

    @property
    def is_decode(self) -> bool:
        """Whether there is one query. Then reading the keys and values limits the speed, not arithmetic."""
        return self.query_len == 1

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs of one head are visible."""
        if not self.causal:
            return self.query_len * self.seq_len
        seen = range(self.seq_len - self.query_len + 1, self.seq_len + 1)  # keys of each query, without a window
        return sum(min(keys, self.window or self.seq_len) for keys in seen)

    def flops(self, pass_: Pass) -> int:
        """Counts, in each product, one multiplication and one addition for each visible pair and element of head_dim.

        Hidden pairs do not count, whether an implementation computes them or not.
        """
        return 2 * PRODUCTS[pass_] * self.head_dim * self.visible_pairs * self.num_heads * self.batch_size

    @property
    def bytes_of_key(self) -> int:
        """Bytes of one key of one head. If quantised, each group also has a scale and a bias."""
        if self.kv_bits is None:
            return self.head_dim * ITEM_SIZE[self.dtype]
        return self.head_dim * self.kv_bits // 8 + self.head_dim // GROUP_SIZE * 2 * ITEM_SIZE[self.dtype]

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that the forward pass must read: each position that some query sees, once."""
        seen = min(self.seq_len, self.window + self.query_len - 1) if self.window else self.seq_len
        return 2 * self.batch_size * self.num_kv_heads * seen * self.bytes_of_key

    def bytes_held(self, pass_: Pass) -> int:
        """Bytes of query, key, value, output and one float32 lse per row: what memory-linear attention needs.

        With gradients, each of the four arrays comes with another of its shape: its gradient or, for the output, the
        cotangent.
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
