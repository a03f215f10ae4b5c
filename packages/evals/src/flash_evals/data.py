"""Where the text comes from: this Python's documentation, a file, a folder, or the hub through `datasets`."""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flash_evals import hub, pydoc_text, wikitext
from flash_evals.errors import EvalError, first_line

# Between documents (rows of a dataset, lines of a .jsonl): a blank line, as transformers' guide to perplexity
# has it. It is part of the text, so it is scored and counted like the rest.
SEPARATOR = "\n\n"
WIKITEXT, WIKITEXT_CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"


@dataclass(frozen=True)
class Text:
    documents: Sequence[str]  # as they were published
    name: str  # as printed
    source: str  # what was asked for
    config: str | None = None
    split: str | None = None
    column: str | None = None
    revision: str | None = None  # the hub's commit, or the Python whose documentation it is
    separator: str = SEPARATOR
    tokenised: bool = False  # as WikiText is

    @cached_property
    def text(self) -> str:
        """All documents as one."""
        return self.separator.join(self.documents)

    @property
    def fingerprint(self) -> str:
        """Of the text itself: two runs with the same fingerprint are of the same characters."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """For the result files."""
        return {
            "name": self.name,
            "source": self.source,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "revision": self.revision,
            "fingerprint": f"sha256:{self.fingerprint}",
            "documents": len(self.documents),
            "separator": self.separator,
            "words": len(self.text.split()),
            "bytes": len(self.text.encode()),
        }


def load(dataset: str, config: str | None = None, split: str | None = None, column: str | None = None) -> Text:
    """The documents of a dataset.

    `dataset` is "pydoc", "wikitext", a .txt, .jsonl or .parquet file, a folder that `datasets` can read, or
    a hub id. The others choose a part: the hub's configuration, the split ("test" if not given), the column
    with the text ("text" if not given). Raises EvalError: no such file, split or column, no text, no
    network.
    """
    path = Path(dataset)
    if dataset == "pydoc":
        _has_no("pydoc", config=config, split=split, column=column)
        documents = pydoc_text.documents("heldout")
        python = f"CPython {platform.python_version()}"
        text = Text(documents, "pydoc topics, held out", dataset, revision=python)
    elif dataset == "wikitext":
        text = _in_pages(_from_datasets(WIKITEXT, config or WIKITEXT_CONFIG, split or "test", column or "text"))
    elif path.is_file():
        text = _from_file(path, config, split, column)
    elif path.is_dir():
        text = _from_datasets(str(path), config, split or "test", column or "text")
    elif path.suffix in READERS or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1:
        raise EvalError(f"no such file or folder: {dataset}")
    else:
        text = _from_datasets(dataset, config, split or "test", column or "text")
    if not text.text.strip():
        raise EvalError(f"{text.name} holds no text")
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        raise EvalError(f"{text.name} holds characters that are no text: {first_line(error)}") from error
    return text


def _has_no(what: str, **options: str | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise EvalError(f"--{'text-column' if option == 'column' else option} has no meaning for {what}")


def _from_file(path: Path, config: str | None, split: str | None, column: str | None) -> Text:
    if path.suffix not in READERS:
        raise EvalError(f"{path} is not a .txt, .jsonl or .parquet file")
    _has_no(
        f"the file {path}",
        config=config,
        split=split,
        **({"column": column} if path.suffix == ".txt" else {}),
    )
    try:
        documents = READERS[path.suffix](path, column or "text")
    except EvalError:
        raise
    except Exception as error:
        # pyarrow, json and the decoder each have their own classes for a file that is not what its name says.
        raise EvalError(f"cannot read {path}: {first_line(error)}") from error
    used = None if path.suffix == ".txt" else column or "text"
    return Text(documents, path.name, str(path), column=used)


def _read_txt(path: Path, column: str) -> list[str]:
    return [path.read_bytes().decode()]  # not read_text: the original bytes are counted, "\r\n" too


def _read_jsonl(path: Path, column: str) -> list[str]:
    rows = [json.loads(line) for line in path.read_bytes().decode().split("\n") if line.strip()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            has = f"; it has: {', '.join(row)}" if isinstance(row, dict) else ""
            raise EvalError(f"row {number} of {path} has no text in a column {column!r}{has}")
    return [row[column] for row in rows]


def _read_parquet(path: Path, column: str) -> list[str]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    table = parquet.read_table(path)
    _require_text_column(path, column, {field.name: str(field.type) for field in table.schema})
    return [row or "" for row in table[column].to_pylist()]


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _require_text_column(where: object, column: str, types: dict[str, str]) -> None:
    if column not in types:
        raise EvalError(f"{where} has no column {column!r}; it has: {', '.join(types)}")
    if types[column] not in ("string", "large_string", "string_view"):
        raise EvalError(f"the column {column!r} of {where} holds {types[column]}, not text")


def _from_datasets(source: str, config: str | None, split: str, column: str) -> Text:
    """A folder or a hub id, read by `datasets` and kept in its cache."""
    import datasets  # type: ignore[import-untyped]

    hub.quiet()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report its errors ourselves
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    local = Path(source).is_dir()
    online = not local and hub.revision(source, "dataset") is not None
    try:
        if local or online:
            rows = datasets.load_dataset(source, config, split=split)
        else:
            with hub.offline():
                rows = datasets.load_dataset(source, config, split=split)
    except Exception as error:
        cached = not isinstance(error, OSError) and "find cache" not in str(error)
        if local or online or cached:
            raise EvalError(f"cannot read {source}: {first_line(error.__cause__ or error)}") from error
        raise hub.nothing_cached(f"dataset {source}", "--dataset FILE.txt") from error

    _require_text_column(source, column, {name: str(feature.dtype) for name, feature in rows.features.items()})
    documents = [row or "" for row in rows[column]]
    revision = None if local else _revision(rows)
    name = " ".join(part for part in (source, config, split) if part)
    return Text(documents, name, source, config, split, column, revision)


def _in_pages(text: Text) -> Text:
    """WikiText's rows are the lines of a file: put together again as the pages it consists of."""
    return replace(text, documents=wikitext.pages(text.documents), separator="\n", tokenised=True)


def _revision(rows: Any) -> str | None:
    """The hub's commit: `datasets` keeps what it has read of it in a folder of that name."""
    folders = [part for file in rows.cache_files for part in Path(file["filename"]).parts]
    return next((folder for folder in folders if re.fullmatch("[0-9a-f]{40}", folder)), None)
