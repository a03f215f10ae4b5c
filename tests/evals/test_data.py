"""Where the text comes from, byte by byte, and what is said when there is none."""

import hashlib
import json
import platform
from pathlib import Path

import pyarrow as pa
import pytest
from flash_evals import data, pydoc_text
from flash_evals.errors import EvalError
from pyarrow import parquet

DOCUMENTS = ["One line.\r\nAnother – “quoted”.\n", "", "Third document."]
JOINED = "\n\n".join(DOCUMENTS)


def write(path: Path, column: str = "text") -> Path:
    """The documents in the format that the suffix says."""
    if path.suffix == ".txt":
        path.write_bytes(JOINED.encode())
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: document}) + "\n" for document in DOCUMENTS))
    else:
        parquet.write_table(pa.table({column: DOCUMENTS, "n": [1, 2, 3]}), path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_file_is_read_byte_for_byte(suffix: str, tmp_path: Path) -> None:
    text = data.load(str(write(tmp_path / f"some{suffix}")))
    assert text.text == JOINED
    assert text.name == f"some{suffix}"
    assert len(text.documents) == (1 if suffix == ".txt" else 3)
    described = text.describe()
    assert described["fingerprint"] == "sha256:" + hashlib.sha256(JOINED.encode()).hexdigest()
    assert (described["words"], described["bytes"]) == (7, len(JOINED.encode()))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_column_can_be_named(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"some{suffix}", column="page")
    assert data.load(str(path), column="page").text == JOINED
    with pytest.raises(EvalError, match=r"column 'text'.*it has: page"):
        data.load(str(path))


def test_a_folder_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "test-00000.parquet")
    parquet.write_table(pa.table({"text": ["for training"], "n": [1]}), folder / "train-00000.parquet")
    assert data.load(str(folder)).text == JOINED
    assert data.load(str(folder), split="train").text == "for training"
    with pytest.raises(EvalError, match="Unknown split"):
        data.load(str(folder), split="nonsense")
    with pytest.raises(EvalError, match=r"'n' of .* holds int64, not text"):
        data.load(str(folder), column="n")


def test_pydoc_is_the_held_out_part_and_names_its_python() -> None:
    text = data.load("pydoc")
    assert text.text == "\n\n".join(pydoc_text.documents("heldout"))
    assert text.revision == f"CPython {platform.python_version()}"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n \t", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "cannot read .*utf-8"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b"{broken", "cannot read"),
        ("a.jsonl", b'{"text": 5}', "row 1 of .* has no text in a column 'text'"),
        ("a.jsonl", b'{"text": "half a pair: \\ud83d"}', "holds characters that are no text"),
        ("a.jsonl", b"[1]", "row 1 of .* has no text in a column 'text'"),
        ("a.parquet", b"no parquet at all", "cannot read"),
        ("a.csv", b"text", "not a .txt, .jsonl or .parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EvalError, match=says):
        data.load(str(path))


@pytest.mark.parametrize("path", ["missing.txt", "./missing", "/no/such/folder", "~/no-such-file.parquet", "a/b/c"])
def test_no_such_file(path: str) -> None:
    with pytest.raises(EvalError, match="no such file or folder"):
        data.load(path)


@pytest.mark.parametrize("options", [{"config": "a"}, {"split": "a"}, {"column": "a"}])
def test_an_option_without_a_meaning_is_refused(options: dict[str, str], text_file: Path) -> None:
    for dataset in ("pydoc", str(text_file)):
        with pytest.raises(EvalError, match=r"--(config|split|text-column) has no meaning for"):
            data.load(dataset, **options)
