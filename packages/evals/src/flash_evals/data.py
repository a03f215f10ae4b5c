"""Where the text comes from: this Python's documentation, files, a folder, stdin, or the hub through `datasets`."""

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flash_evals import hub, pydoc_text, wikitext
from flash_evals.errors import EvalError, first_line
from flash_evals.record import Count, Record

# Between documents (rows of a dataset, lines of a .jsonl): a blank line, as transformers' guide to perplexity
# has it. It is part of the text, so it is scored and counted like the rest.
SEPARATOR = "\n\n"
WIKITEXT = "Salesforce/wikitext"
WIKITEXT_CONFIGS = {
    "wikitext": "wikitext-2-raw-v1",
    "wikitext-2": "wikitext-2-raw-v1",
    "wikitext-103": "wikitext-103-raw-v1",
}
NAMES = "pydoc", "-", *WIKITEXT_CONFIGS  # these are never files


class Part(NamedTuple):
    """Of a dataset."""

    config: str | None = None  # as the hub names it
    split: str | None = None  # "test" if not given
    column: str | None = None  # with the text; "text" if not given
    revision: str | None = None  # the hub's branch, tag or commit, "main" if not given


WHOLE = Part()
OPTIONS = Part("--config", "--split", "--text-column", "--dataset-revision")


class Dataset(Record):
    """A text as result files have it."""

    name: str  # as printed
    source: str  # what was asked for
    config: str | None
    split: str | None
    column: str | None
    revision: str | None  # the hub's commit, or the Python whose documentation it is
    fingerprint: str  # two runs with the same one are of the same characters
    documents: Count
    separator: str
    words: Count
    bytes: Count


@dataclass(frozen=True)
class Text:
    documents: Sequence[str]  # as they were published
    dataset: Dataset
    tokenised: bool  # as WikiText is

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
        """Named after its part, unless it has a `name`. Raises EvalError if these documents are no text."""
        name = name or " ".join(filter(None, (source, part.config, part.split)))
        text = separator.join(documents)
        if not text.strip():
            raise EvalError(f"{name} holds no text")
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise EvalError(f"{name} holds characters that are no text: {first_line(error)}") from error
        dataset = Dataset(
            name=name,
            source=source,
            **part._asdict(),
            fingerprint=f"sha256:{hashlib.sha256(content).hexdigest()}",
            documents=len(documents),
            separator=separator,
            words=len(text.split()),
            bytes=len(content),
        )
        return cls(documents, dataset, tokenised)


def load(*datasets: str, part: Part = WHOLE) -> Text:
    """The documents of a part of a dataset.

    One of `datasets` is "pydoc", "wikitext", "wikitext-2", "wikitext-103", "-" for stdin, a .txt, .jsonl or .parquet
    file, a folder that the `datasets` library can read, or a hub id; several are files, read one after the other.
    Raises EvalError: no such file, split, column or revision, no text, no network, a `part` that has no meaning.
    """
    dataset, path = datasets[0], Path(datasets[0])
    if len(datasets) > 1 or (path.is_file() and dataset not in NAMES):
        return _from_files(datasets, part)
    if dataset == "pydoc":
        _require_no(part, "pydoc")
        python = Part(revision=f"CPython {platform.python_version()}")
        return Text.of(pydoc_text.documents("heldout"), dataset, python, "pydoc topics, held out")
    if dataset == "-":
        _require_no(part, "stdin")
        return Text.of([_read_stdin()], "stdin")
    if dataset in WIKITEXT_CONFIGS:
        if dataset != "wikitext":
            _require_no(Part(config=part.config), dataset)
        return _from_hub(WIKITEXT, part._replace(config=part.config or WIKITEXT_CONFIGS[dataset]))
    if path.is_dir():
        _require_no(Part(revision=part.revision), f"the folder {dataset}")
        return _from_folder(dataset, part)
    if path.suffix in READERS or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1:
        raise EvalError(f"no such file or folder: {dataset}")
    return _from_hub(dataset, part)


def _require_no(part: Part, what: str) -> None:
    for option, value in zip(OPTIONS, part, strict=True):
        if value is not None:
            raise EvalError(f"{option} has no meaning for {what}")


def _from_files(files: Sequence[str], part: Part) -> Text:
    paths = [Path(file) for file in files]
    for path in paths:
        if path.suffix in READERS and not path.exists():
            raise EvalError(f"no such file or folder: {path}")
        if not path.is_file():
            raise EvalError(f"several --dataset are files, one after the other; {path} is none")
        if path.suffix not in READERS:
            raise EvalError(f"{path} is not a .txt, .jsonl or .parquet file")
    plain, column = all(path.suffix == ".txt" for path in paths), part.column or "text"
    _require_no(part if plain else part._replace(column=None), f"the file {paths[0]}" if len(paths) == 1 else "files")
    documents, name = _read_files(paths, column), ", ".join(path.name for path in paths)
    return Text.of(documents, ", ".join(files), Part(column=None if plain else column), name)


def _read_files(paths: Sequence[Path], column: str) -> list[str]:
    """Their documents, byte for byte."""
    documents: list[str] = []
    for path in paths:
        try:
            documents += READERS[path.suffix](path, column)
        except EvalError:
            raise
        except Exception as error:
            # pyarrow, json and the decoder each have their own classes for a file that is not what its name says.
            raise EvalError(f"cannot read {path}: {first_line(error)}") from error
    return documents


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise EvalError("--dataset - reads the text from stdin, which is a terminal: pipe a text into it")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise EvalError(f"cannot read stdin: {first_line(error)}") from error


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


def _from_folder(folder: str, part: Part) -> Text:
    """Which of its files make up a split, `datasets` finds out from their names or from the folder's README.md.

    If all are files that we can read, we do: `datasets` would cut a .txt into lines.
    """
    datasets, path = _quiet_datasets(), str(Path(folder).absolute())  # "text" alone is a builder's name to it
    split, column = part.split or "test", part.column or "text"
    try:
        builder = datasets.load_dataset_builder(path, part.config)
        splits = {str(name): [Path(file) for file in files] for name, files in builder.config.data_files.items()}
        ours = all(file.suffix in READERS for files in splits.values() for file in files)
        rows = None if ours else datasets.load_dataset(path, part.config, split=split)
    except Exception as error:
        raise EvalError(f"cannot read {folder}: {first_line(error.__cause__ or error)}") from error
    if rows is not None:
        documents = _column(rows, column, folder)
    elif split in splits:
        documents = _read_files(splits[split], column)
    else:
        raise EvalError(f"{folder} has no split {split!r}; it has: {', '.join(splits)} (--split)")
    return Text.of(documents, folder, Part(part.config, split, column))


def _from_hub(repo: str, part: Part) -> Text:
    """The commit that the hub names, which `datasets` downloads into its cache; without a network, one found there."""
    datasets = _quiet_datasets()
    split, column = part.split or "test", part.column or "text"
    commit = hub.commit(repo, "dataset", part.revision)
    online = commit is not None
    if not online:
        datasets.config.HF_HUB_OFFLINE = True  # it would ask again, for half a minute
        commit = hub.last_known_commit(repo, "dataset", part.revision)
    try:
        builder = datasets.load_dataset_builder(repo, part.config, revision=part.revision)
        if builder.hash != commit:
            # When the hub is silent, it takes the latest that it has in its cache, whatever commit that is.
            raise ConnectionError(f"the hub does not answer, and commit {commit} is not in the cache")
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    except Exception as error:
        if not online and isinstance(error, ConnectionError):
            raise hub.nothing_cached(repo, "dataset", part.revision, "--dataset FILE.txt") from error
        if isinstance(error, datasets.exceptions.DatasetNotFoundError) and "gated" in str(error):
            raise hub.gated(repo, "dataset") from error
        how = "" if online else " without a network"
        raise EvalError(f"cannot read {repo}{how}: {first_line(error.__cause__ or error)}") from error
    config = part.config or (None if builder.config.name == "default" else builder.config.name)
    documents, part = _column(rows, column, repo), Part(config, split, column, commit)
    if repo != WIKITEXT:
        return Text.of(documents, repo, part)
    # Its rows are the lines of a file: put together again as the pages that it consists of.
    return Text.of(wikitext.pages(documents), repo, part, separator="\n", tokenised=True)


def _quiet_datasets() -> Any:
    import datasets  # type: ignore[import-untyped]

    hub.quiet()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report its errors ourselves
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _column(rows: Any, column: str, where: str) -> list[str]:
    _require_text_column(where, column, {name: str(feature.dtype) for name, feature in rows.features.items()})
    return [row or "" for row in rows[column]]
