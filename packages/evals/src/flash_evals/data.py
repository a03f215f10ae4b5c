"""Where the text comes from: this Python's documentation, files, a folder, stdin, or the hub through `datasets`."""

import glob
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

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

    def describe(self) -> "Dataset":
        """For the result files."""
        size = {"documents": len(self.documents), "words": len(self.text.split()), "bytes": len(self.text.encode())}
        return msgspec.convert({**vars(self), **size, "fingerprint": f"sha256:{self.fingerprint}"}, Dataset)


class Dataset(Record):
    """A text as result files have it: the fields of Text, and how much it is."""

    name: str
    source: str
    config: str | None
    split: str | None
    column: str | None
    revision: str | None
    fingerprint: str
    documents: Count
    separator: str
    words: Count
    bytes: Count


def load(
    *datasets: str,
    config: str | None = None,
    split: str | None = None,
    column: str | None = None,
    revision: str | None = None,
) -> Text:
    """The documents of a dataset.

    One of `datasets` is "pydoc", "wikitext", "wikitext-2", "wikitext-103", "-" for stdin, a .txt, .jsonl or .parquet
    file, a folder that the `datasets` library can read, or a hub id; several are files, read one after the other. The
    others choose a part: the hub's configuration, the split ("test" if not given), the column with the text ("text" if
    not given), the hub's branch, tag or commit ("main" if not given). Raises EvalError: no such file, split, column or
    revision, no text, no network.
    """
    text = _load(datasets, config, split, column, revision)
    if not text.text.strip():
        raise EvalError(f"{text.name} holds no text")
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        raise EvalError(f"{text.name} holds characters that are no text: {first_line(error)}") from error
    return text


def _load(
    datasets: Sequence[str], config: str | None, split: str | None, column: str | None, revision: str | None
) -> Text:
    dataset, path = datasets[0], Path(datasets[0])
    if len(datasets) > 1 or (path.is_file() and dataset not in NAMES):
        return _from_files(datasets, config=config, split=split, column=column, revision=revision)
    if dataset == "pydoc":
        _has_no("pydoc", config=config, split=split, column=column, revision=revision)
        documents = pydoc_text.documents("heldout")
        python = f"CPython {platform.python_version()}"
        return Text(documents, "pydoc topics, held out", dataset, revision=python)
    if dataset == "-":
        _has_no("stdin", config=config, split=split, column=column, revision=revision)
        return Text([_read_stdin()], "stdin", "stdin")
    if dataset in WIKITEXT_CONFIGS:
        if dataset != "wikitext":
            _has_no(dataset, config=config)
        return _from_hub(WIKITEXT, config or WIKITEXT_CONFIGS[dataset], split, column, revision)
    if path.is_dir():
        _has_no(f"the folder {dataset}", revision=revision)
        return _from_folder(dataset, config, split or "test", column)
    if path.suffix in READERS or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1:
        raise EvalError(f"no such file or folder: {dataset}")
    return _from_hub(dataset, config, split, column, revision)


OPTIONS = {"column": "--text-column", "revision": "--dataset-revision"}


def _has_no(what: str, **options: str | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise EvalError(f"{OPTIONS.get(option, f'--{option}')} has no meaning for {what}")


def _from_files(files: Sequence[str], column: str | None, **others: str | None) -> Text:
    paths = [Path(file) for file in files]
    for path in paths:
        if path.suffix in READERS and not path.exists():
            raise EvalError(f"no such file or folder: {path}")
        if not path.is_file():
            raise EvalError(f"several --dataset are files, one after the other; {path} is none")
        if path.suffix not in READERS:
            raise EvalError(f"{path} is not a .txt, .jsonl or .parquet file")
    plain = all(path.suffix == ".txt" for path in paths)
    what = f"the file {paths[0]}" if len(paths) == 1 else "files"
    _has_no(what, **others, **({"column": column} if plain else {}))
    documents = _read_files(paths, column or "text")
    name, source = ", ".join(path.name for path in paths), ", ".join(files)
    return Text(documents, name, source, column=None if plain else column or "text")


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


def _from_folder(folder: str, config: str | None, split: str, column: str | None) -> Text:
    """Which of its files make up a split, `datasets` finds out from their names or from the folder's README.md.

    If all are files that we can read, we do: `datasets` would cut a .txt into lines.
    """
    datasets, path = _quiet_datasets(), str(Path(folder).absolute())  # "text" alone is a builder's name to it
    try:
        builder = datasets.load_dataset_builder(path, config)
        splits = {str(name): [Path(file) for file in files] for name, files in builder.config.data_files.items()}
        ours = all(file.suffix in READERS for files in splits.values() for file in files)
        rows = None if ours else datasets.load_dataset(path, config, split=split)
    except Exception as error:
        raise EvalError(f"cannot read {folder}: {first_line(error.__cause__ or error)}") from error
    if rows is not None:
        documents = _column(rows, column or "text", folder)
    elif split in splits:
        documents = _read_files(splits[split], column or "text")
    else:
        raise EvalError(f"{folder} has no split {split!r}; it has: {', '.join(splits)} (--split)")
    return _made_of_rows(documents, folder, config, split, column)


def _from_hub(repo: str, config: str | None, split: str | None, column: str | None, revision: str | None) -> Text:
    """Downloaded by `datasets` into its cache, or found there: if a commit is named, or if there is no network."""
    datasets = _quiet_datasets()
    split = split or "test"
    builder = _cached(repo, config or "default", revision) if hub.is_commit(revision) else None
    commit = None if builder else hub.commit(repo, "dataset", revision)
    if builder is None and commit is None:
        builder = _cached(repo, config, hub.last_known_commit(repo, "dataset", revision), newest=revision is None)
        if builder is None:
            raise hub.nothing_cached(repo, "dataset", revision, "--dataset FILE.txt")
    try:
        if builder is None:
            builder = datasets.load_dataset_builder(repo, config, revision=revision)
            if builder.hash != commit:
                # It takes the latest in its cache when the hub falls silent, whatever revision that is.
                raise ConnectionError(f"the hub does not answer, and commit {commit} is not in the cache")
            builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    except Exception as error:
        if isinstance(error, datasets.exceptions.DatasetNotFoundError) and "gated" in str(error):
            raise hub.gated(repo, "dataset") from error
        raise EvalError(f"cannot read {repo}: {first_line(error.__cause__ or error)}") from error
    documents = _column(rows, column or "text", repo)
    if config is None and builder.config.name != "default":
        config = builder.config.name
    text = _made_of_rows(documents, repo, config, split, column, builder.hash)
    if repo != WIKITEXT:
        return text
    # Its rows are the lines of a file: put together again as the pages that it consists of.
    return replace(text, documents=wikitext.pages(text.documents), separator="\n", tokenised=True)


def _cached(repo: str, config: str | None, commit: str | None, newest: bool = False) -> Any:
    """What `datasets` has in its cache of a hub dataset at a commit, or of its `newest` if that is None; or None.

    Asked for a dataset without a network, `datasets` itself gives the one it has read last, whatever commit it is of.
    """
    import datasets  # type: ignore[import-untyped]
    from datasets.naming import camelcase_to_snakecase  # type: ignore[import-untyped]
    from datasets.packaged_modules.cache.cache import Cache  # type: ignore[import-untyped]

    if commit is None and not newest:
        return None
    *owner, name = repo.split("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE, "___".join([*owner, camelcase_to_snakecase(name)]))
    pattern = f"{glob.escape(config) if config else '*'}/*/{commit or '[0-9a-f]' * 40}/dataset_info.json"
    found = sorted((file.parent for file in folder.glob(pattern)), key=lambda folder: folder.stat().st_mtime)
    if not found:
        return None
    configs = sorted({folder.parts[-3] for folder in found})
    if len(configs) > 1:
        raise EvalError(f"the cache has {repo} in several configurations, choose one by --config: {', '.join(configs)}")
    config, version, commit = found[-1].parts[-3:]
    return Cache(dataset_name=name, repo_id=repo, config_name=config, version=version, hash=commit)


def _quiet_datasets() -> Any:
    import datasets

    hub.quiet()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report its errors ourselves
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _column(rows: Any, column: str, where: str) -> list[str]:
    _require_text_column(where, column, {name: str(feature.dtype) for name, feature in rows.features.items()})
    return [row or "" for row in rows[column]]


def _made_of_rows(
    documents: Sequence[str],
    source: str,
    config: str | None,
    split: str,
    column: str | None,
    commit: str | None = None,
) -> Text:
    name = " ".join(part for part in (source, config, split) if part)
    return Text(documents, name, source, config, split, column or "text", commit)
