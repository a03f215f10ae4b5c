"""Reads a result file, and nothing of it that is not what it must be: the file may come from anywhere."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Kind = TypeVar("Kind")


class Unusable(Exception):
    """The message says why a file has no place on the page."""


@dataclass(frozen=True)
class Node:
    """A value of a result file that knows where it stands. Its methods raise Unusable for another type."""

    value: Any
    where: str = ""

    def __getitem__(self, key: str) -> "Node":
        """Must be there, and may be null."""
        if key not in self.dict():
            raise Unusable(f"{self.where or 'the file'} has no {key!r}")
        return Node(self.value[key], f"{self.where}.{key}" if self.where else key)

    def get(self, key: str) -> "Node | None":
        """None if it is not there, or null."""
        return None if self.dict().get(key) is None else self[key]

    def dict(self) -> dict[str, Any]:
        return self._typed(dict, "names and values")

    def items(self) -> list["Node"]:
        values = self._typed(list, "a list")
        return [Node(value, f"{self.where}[{number}]") for number, value in enumerate(values)]

    def text(self) -> str:
        return self._typed(str, "a text")

    def flag(self) -> bool:
        return self._typed(bool, "true or false")

    def count(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 2**63:
            raise self.expected("a whole number")
        return self.value

    def number(self) -> float | None:
        """None for null, and for what is not finite."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.expected("a number")
        try:
            return self.value if math.isfinite(self.value) else None
        except OverflowError:
            return None

    def amount(self) -> float | None:
        """A number that cannot be negative, such as a time."""
        number = self.number()
        if number is not None and number < 0:
            raise self.expected("a number that is not negative")
        return number

    def expected(self, what: str) -> Unusable:
        came = json.dumps(self.value, ensure_ascii=False)
        return Unusable(f"{self.where or 'the file'} is not {what}: {came if len(came) <= 40 else came[:39] + '…'}")

    def _typed(self, kind: type[Kind], what: str) -> Kind:
        if not isinstance(self.value, kind):
            raise self.expected(what)
        return self.value


def amount(node: Node, key: str) -> float | None:
    """A figure that newer and older files may lack."""
    found = node.get(key)
    return found.amount() if found else None


def load(path: Path) -> Node:
    """Raises Unusable for a file that cannot be read, or is no JSON."""
    try:
        return Node(json.loads(path.read_bytes()))
    except OSError as error:
        raise Unusable(error.strerror or type(error).__name__) from error
    except json.JSONDecodeError as error:
        raise Unusable(f"no JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Unusable(f"no JSON that can be read: {str(error).splitlines()[0]}") from error
