"""What enable(kv_bits=...) asks for."""

from dataclasses import dataclass

from flashattn_core.argument_types import integer


@dataclass(frozen=True)
class KVBits:
    """How new caches store keys and values: in so many bits, with a scale and a bias for each group of elements.

    A cache keeps 16 bits until it holds `start` tokens.
    """

    bits: int
    group_size: int = 64
    start: int = 0

    def __post_init__(self) -> None:
        for name, given, known in (("kv_bits", self.bits, (4, 8)), ("kv_group_size", self.group_size, (32, 64, 128))):
            if integer(given) not in known:
                raise ValueError(f"[enable] {name} is {given!r}, expected one of {', '.join(map(str, known))}")
        start = integer(self.start)
        if start is None or start < 0:
            raise ValueError(f"[enable] quantized_kv_start is {self.start!r}, expected a whole number, at least 0")


wanted: KVBits | None = None  # what new caches get; None: they hold 16 bits
