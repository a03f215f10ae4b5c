"""Loads a text from this Python's documentation, files, stdin, or the hub (with the library `datasets`)."""

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple, replace

from flash_evals.results.errors import EvalError, failing
from flash_evals.results.provenance import Dataset, Part
from flash_evals.work import hub, pydoc_text, wikitext

# A blank line separates documents, as in transformers' guide to perplexity. It is scored and counted like other text.
SEPARATOR = "\n\n"
WIKITEXT = "Salesforce/wikitext"


WHOLE = Part()
OPTIONS = ("--config", "--split", "--text-column", "--dataset-revision")


@dataclass(frozen=True)
class Text:
    documents: Sequence[str]  # as published, before any detokenising
    dataset: Dataset
    tokenised: bool  # whether the documents are tokenised as WikiText is

    @classmethod
    def of(
        cls,
        documents: Sequence[str],
        source: str,
        part: Part = WHOLE,
        name: str | None = None,
        separator: str = SEPARATOR,
        tokenised: bool = False,
    ) -> "Text":
        """Makes a Text. Its default name is source, config and split. Raises EvalError for empty or invalid text."""
        name = name or " ".join(filter(None, (source, part.config, part.split)))
        text = separator.join(documents)
        if not text.strip():
            raise EvalError(f"{name} holds no text")
        with failing(f"{name} holds characters that are not valid text"):
            content = text.encode()
        dataset = Dataset(
            name=name,
            source=source,
            **asdict(part),
            fingerprint=f"sha256:{hashlib.sha256(content).hexdigest()}",
            documents=len(documents),
            separator=separator,
            words=len(text.split()),
            bytes=len(content),
        )
        return cls(documents, dataset, tokenised)


def load(*datasets: str, part: Part = WHOLE) -> Text:
    """Loads the documents of a part of a dataset.

    `datasets` is one of these: "pydoc", "wikitext", "-" for stdin, a .txt, .jsonl or .parquet file, or a hub id.
    Several files are read one after another.

    Raises EvalError if a file, split, column or revision does not exist, if there is no text, if the hub is needed and
    cannot be reached, or if an option of `part` has no meaning for the dataset.
    """
    match datasets:
        case ("pydoc",):
            _require_no(part, "pydoc")
            python = Part(revision=f"CPython {platform.python_version()}")
            return Text.of(pydoc_text.documents("heldout"), "pydoc", python, "pydoc topics, held out")
        case ("-",):
            _require_no(part, "stdin")
            with failing("cannot read stdin"):
                return Text.of([sys.stdin.buffer.read().decode()], "stdin")
        case ("wikitext",):
            return _from_hub(WIKITEXT, replace(part, config=part.config or "wikitext-2-raw-v1"))
        case (repo,) if not Path(repo).exists() and Path(repo).suffix not in READERS:
            return _from_hub(repo, part)
    return _from_files(datasets, part)


def _require_no(part: Part, what: str) -> None:
    for option, value in zip(OPTIONS, astuple(part), strict=True):
        if value is not None:
            raise EvalError(f"{option} has no meaning for {what}")


def _from_files(files: Sequence[str], part: Part) -> Text:
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file() or path.suffix not in READERS:
            several = "several --dataset options must be files: " if len(files) > 1 else ""
            raise EvalError(f"{several}expected an existing .txt, .jsonl or .parquet file, not {path}")
    plain, column, source = all(path.suffix == ".txt" for path in paths), part.column or "text", ", ".join(files)
    _require_no(part if plain else replace(part, column=None), source)
    documents: list[str] = []
    for path in paths:
        with failing(f"cannot read {path}", (Exception,)):
            documents += READERS[path.suffix](path, column)
    name = ", ".join(path.name for path in paths)
    return Text.of(documents, source, Part(column=None if plain else column), name)


def _read_txt(path: Path, column: str) -> list[str]:
    return [path.read_bytes().decode()]  # not read_text(), because that would change "\r\n" to "\n"


def _read_jsonl(path: Path, column: str) -> list[str]:
    row: Any = msgspec.defstruct("Row", [("text", str)], rename={"text": column})
    rows = [json.loads(line) for line in path.read_bytes().decode().split("\n") if line.strip()]
    return [each.text for each in msgspec.convert(rows, list[row])]


def _read_parquet(path: Path, column: str) -> list[str]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    return _column(parquet.read_table(path), column, path)


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _from_hub(repo: str, part: Part) -> Text:
    """Reads a split of a dataset, at the commit that hub.reading() yields. Without a network, reads the cache."""
    import datasets  # type: ignore[import-untyped]

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # flash-eval itself reports the errors of `datasets`
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    split, column = part.split or "test", part.column or "text"
    with hub.reading(repo, "dataset", part.revision) as (commit, online):
        datasets.config.HF_HUB_OFFLINE = not online  # without a network, `datasets` would retry for half a minute
        builder = datasets.load_dataset_builder(repo, part.config, revision=part.revision)
        if builder.hash != commit:
            # If the hub does not answer, `datasets` reads the latest commit in its cache, which may be another commit.
            raise ConnectionError(f"the hub does not answer, and commit {commit} is not in the cache")
        try:
            builder.download_and_prepare()
        except Exception as error:
            raise error.__cause__ or error from None  # the message of `datasets` only says that an error occurred
        table = builder.as_dataset(split).with_format("arrow")[:]
    config = part.config or (None if builder.config.name == "default" else builder.config.name)
    documents, part = _column(table, column, repo), Part(config, split, column, commit)
    if repo != WIKITEXT:
        return Text.of(documents, repo, part)
    # Each row of WikiText is a line of a file. pages() joins the lines to pages.
    return Text.of(wikitext.pages(documents), repo, part, separator="\n", tokenised=True)


def _column(table: Any, column: str, where: object) -> list[str]:
    """A text column of a pyarrow table. Raises EvalError if it is missing or holds no text."""
    types = {field.name: str(field.type) for field in table.schema}
    if column not in types:
        raise EvalError(f"{where} has no column {column!r}; its columns are: {', '.join(types)}")
    if types[column] not in ("string", "large_string", "string_view"):
        raise EvalError(f"the column {column!r} of {where} holds {types[column]}, not text")
    return [row or "" for row in table[column].to_pylist()]
