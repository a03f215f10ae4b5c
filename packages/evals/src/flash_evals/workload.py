"""One attention problem: its shape, what its queries see, the pass, and the arithmetic and reading that this takes."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # the dtypes and their bytes
GROUP_SIZE = 64  # of quantised keys and values, as mlx-lm has it unless told otherwise

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
# As FlashAttention-2 counts (Dao 2023, arXiv:2307.08691, section 4.1): scores and output; scores again and gradients of
# probabilities, query, key and value. Softmax counts nothing.
PRODUCTS: dict[Pass, int] = {"forward": 2, "backward": 5, "forward_backward": 7}

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # query, key, value, and the cotangent of the output


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Heads":
        """`14/2x64`. Raises ValueError for what is no shape, and for one that no grouped-query attention has."""
        match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
        heads = cls(*map(int, match.groups())) if match else None
        if heads is None or 0 in (heads.query, heads.kv, heads.dim) or heads.query % heads.kv:
            raise ValueError(text)
        return heads

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}x{self.dim}"


@dataclass(frozen=True)
class Workload:
    heads: Heads
    batch_size: int
    query_len: int
    seq_len: int  # of the keys; queries and keys are aligned at the lower right
    causal: bool
    window: int | None  # causal, and only so many keys: itself and those before it
    dtype: str
    pass_: Pass = "forward"
    kv_bits: int | None = (
        None  # of an element of keys and values, quantised in groups of GROUP_SIZE; None: they are not
    )

    def __str__(self) -> str:
        kind = f"window {self.window}" if self.window else "causal" if self.causal else "not causal"
        kind += f", {self.kv_bits}-bit keys and values" if self.kv_bits else ""
        problem = f"{self.heads}, {self.query_len} queries, {self.seq_len} keys, {kind}, {self.dtype}"
        return problem if self.pass_ == "forward" else f"{problem}, {self.pass_}"

    @property
    def is_decode(self) -> bool:
        """One query: reading the keys and values bounds the time, not the arithmetic."""
        return self.query_len == 1

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head of which the query sees the key."""
        if not self.causal:
            return self.query_len * self.seq_len
        positions = range(self.seq_len - self.query_len, self.seq_len)
        return sum(min(position + 1, self.window or self.seq_len) for position in positions)

    @property
    def flops(self) -> int:
        """Of each product a multiplication and an addition for each visible pair and each of head_dim.

        What a causal or windowed mask hides is not counted, whether an implementation computes it or not.
        """
        return 2 * PRODUCTS[self.pass_] * self.heads.dim * self.visible_pairs * self.heads.query * self.batch_size

    @property
    def bytes_of_key(self) -> int:
        """Of one key of one head: quantised, each group has a scale and a bias beside its elements."""
        if self.kv_bits is None:
            return self.heads.dim * ITEM_SIZE[self.dtype]
        groups = self.heads.dim // GROUP_SIZE
        return self.heads.dim * self.kv_bits // 8 + 2 * groups * ITEM_SIZE[self.dtype]

    @property
    def bytes_read(self) -> int:
        """Forward: the key and the value of each position that some query sees, once."""
        seen = min(self.seq_len, self.window + self.query_len - 1) if self.window else self.seq_len
        return 2 * self.batch_size * self.heads.kv * seen * self.bytes_of_key

    @property
    def bytes_held(self) -> int:
        """query, key, value and output, and a float32 logsumexp a row: what memory linear in the length means.

        With gradients each of the four arrays has one, of the same shape: the output's is the cotangent.
        """
        rows, keys = self.heads.query * self.query_len, self.heads.kv * self.seq_len
        arrays = 2 * (rows * self.heads.dim * ITEM_SIZE[self.dtype] + keys * self.bytes_of_key)
        return self.batch_size * ((arrays if self.pass_ == "forward" else 2 * arrays) + 4 * rows)

    def visible(self) -> np.ndarray | None:
        """Which keys (columns) each query (row) sees, as bools; None if every query sees every key."""
        if self.visible_pairs == self.query_len * self.seq_len:
            return None
        positions = np.arange(self.seq_len, dtype=np.int32)
        distance = positions[-self.query_len :, None] - positions
        return np.asarray((distance >= 0) & (distance < (self.window or self.seq_len)))

    def inputs(self, seed: int) -> Inputs:
        """Normally distributed, in float32."""
        random = np.random.default_rng(seed)
        query = (self.batch_size, self.heads.query, self.query_len, self.heads.dim)
        key = (self.batch_size, self.heads.kv, self.seq_len, self.heads.dim)
        one, two, three, four = (random.standard_normal(shape, dtype=np.float32) for shape in (query, key, key, query))
        return one, two, three, four
