"""Reads models.toml, which describes every model type of mlx-lm and explains its fields."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    by: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    untested: str = ""
    without: str = ""


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


@cache
def model_types() -> dict[str, Entry]:
    types = dict.fromkeys(table()["usual"], Entry(by=("seam",), caches=("KVCache", "RotatingKVCache")))
    for name, fields in table()["model_types"].items():
        types[name] = Entry(**{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})
    return dict(sorted(types.items(), key=lambda item: item[0].lower()))


@cache
def supported() -> tuple[str, ...]:
    """The model types that have attention."""
    return tuple(sorted(name for name, entry in model_types().items() if not entry.without))
