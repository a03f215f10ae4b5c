"""Where the text comes from, byte by byte, and what is said when there is none."""

import hashlib
import json
import os
import platform
import re
import sys
from pathlib import Path

import click.testing
import pyarrow as pa
import pytest
from flash_evals import data, pydoc_text
from flash_evals.cli import main
from flash_evals.errors import EvalError
from msgspec import to_builtins
from pyarrow import parquet

DOCUMENTS = ["One line.\r\nAnother – “quoted”.\n", "", "Third document."]
JOINED = "\n\n".join(DOCUMENTS)


def write(path, column="text"):
    """The documents in the format that the suffix says."""
    if path.suffix == ".txt":
        path.write_bytes(JOINED.encode())
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: document}) + "\n" for document in DOCUMENTS))
    else:
        parquet.write_table(pa.table({column: DOCUMENTS, "n": [1, 2, 3]}), path)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_file_is_read_byte_for_byte(suffix, tmp_path):
    text = data.load(str(write(tmp_path / f"some{suffix}")))
    assert (text.text, text.name) == (JOINED, f"some{suffix}")
    assert len(text.documents) == (1 if suffix == ".txt" else 3)
    fingerprint = "sha256:" + hashlib.sha256(JOINED.encode()).hexdigest()
    described = text.describe()
    assert (described.fingerprint, described.words, described.bytes) == (fingerprint, 7, len(JOINED.encode()))
    if suffix != ".txt":
        path = str(write(tmp_path / f"other{suffix}", column="page"))
        assert data.load(path, column="page").text == JOINED
        with pytest.raises(EvalError, match=r"column 'text'.*it has: page"):
            data.load(path)


def test_several_files_are_read_one_after_the_other(tmp_path, invoke, model_folder):
    files = [write(tmp_path / name) for name in ("b.txt", "a.jsonl", "c.parquet")]
    text = data.load(*map(str, files))
    assert text.text == "\n\n".join([JOINED] * 3)
    assert (text.name, len(text.documents)) == ("b.txt, a.jsonl, c.parquet", 7)
    repeated = [argument for file in files for argument in ("--dataset", file)]
    result = invoke("perplexity", "--model", model_folder, "--context", 32, "-o", "json", *repeated)
    assert json.loads(result.stdout)["dataset"] == to_builtins(text.describe())


@pytest.mark.parametrize("other", ["pydoc", "wikitext", "-", ".", "someone/text", "/no/such/folder"])
def test_several_are_files(other, text_file):
    with pytest.raises(EvalError, match=r"several --dataset are files, one after the other; .* is none"):
        data.load(str(text_file), other)
    with pytest.raises(EvalError, match=r"no such file or folder: missing.txt"):
        data.load(str(text_file), "missing.txt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Empty, for data files; what `datasets` makes of them is gone after the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_folder(suffix, folder, monkeypatch):
    """Split by the names of its files, each of them read as it would be alone."""
    for name in ("test-00000", "test-00001", "train"):
        write(folder / f"{name}{suffix}")
    text = data.load(str(folder))
    assert text.text == "\n\n".join([JOINED] * 2)
    assert (text.name, text.split) == (f"{folder} test", "test")
    assert data.load(str(folder), split="train").text == JOINED
    monkeypatch.chdir(folder.parent)
    folder.rename("text")  # as a format that `datasets` knows
    assert data.load("text", split="train").text == JOINED


def test_a_folder_whose_readme_says_what_it_holds(folder):
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: small\n  data_files: part/*.txt\n---\n")
    (folder / "part").mkdir()
    write(folder / "part" / "some.txt")
    write(folder / "other.txt")
    assert data.load(str(folder), config="small", split="train").text == JOINED


def test_what_a_folder_does_not_have(folder):
    def refused(says, **options):
        with pytest.raises(EvalError, match=says):
            data.load(str(folder), **options)

    refused(f"cannot read {folder}: .*doesn't contain any data files")
    csv_file = folder / "test.csv"  # which only `datasets` can read
    csv_file.write_text("text,n\nfirst,1\nsecond,2\n")
    assert data.load(str(folder)).text == "first\n\nsecond"
    refused("Unknown split", split="nonsense")
    refused("has no column 'nonsense'", column="nonsense")
    refused(r"'n' of .* holds int64, not text", column="n")
    csv_file.unlink()
    notes = write(folder / "notes.parquet")
    refused(r"has no split 'test'; it has: train \(--split\)")
    refused(r"'n' of .*notes.parquet holds int64, not text", split="train", column="n")
    refused("BuilderConfig 'nonsense' not found", config="nonsense")
    notes.write_bytes(b"no parquet at all")
    refused(r"cannot read .*notes.parquet", split="train")


def test_stdin(model_folder):
    def run(content):
        arguments = ["perplexity", "--model", str(model_folder), "--context", "32", "--dataset", "-", "-o", "json"]
        return click.testing.CliRunner().invoke(main, arguments, input=content)

    described = json.loads(run(JOINED.encode()).stdout)["dataset"]
    assert (described["name"], described["bytes"]) == ("stdin", len(JOINED.encode()))
    assert described["fingerprint"] == "sha256:" + hashlib.sha256(JOINED.encode()).hexdigest()
    for content, says in ((b"", "stdin holds no text"), (b"\xff", "cannot read stdin: .*utf-8")):
        result = run(content)
        assert (result.exit_code, result.stdout) == (2, "")
        assert re.search(says, result.stderr)


def test_stdin_that_is_a_terminal(monkeypatch):
    controller, terminal = os.openpty()
    with open(terminal) as stdin, open(controller):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(EvalError, match="stdin, which is a terminal: pipe a text into it"):
            data.load("-")


def test_pydoc_is_the_held_out_part_and_names_its_python(tmp_path, monkeypatch):
    """Also where a file has its name."""
    monkeypatch.chdir(tmp_path)
    Path("pydoc").write_text("a file")
    text = data.load("pydoc")
    assert text.text == "\n\n".join(pydoc_text.documents("heldout"))
    assert text.revision == f"CPython {platform.python_version()}"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b" \n\n \t", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "cannot read .*utf-8"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b"{broken", "cannot read"),
        ("a.jsonl", b'{"text": 5}', "row 1 of .* has no text in a column 'text'"),
        ("a.jsonl", b'{"text": "half a pair: \\ud83d"}', "holds characters that are no text"),
        ("a.jsonl", b"[1]", "row 1 of .* has no text in a column 'text'"),
        ("a.parquet", b"no parquet at all", "cannot read"),
        ("a.csv", b"text", "not a .txt, .jsonl or .parquet file"),
        ("missing.txt", None, "no such file or folder"),
        ("a/b/c", None, "no such file or folder"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(name, content, says, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    for spelling in (path, f"~/no-such-folder/{name}") if content is None else (path,):
        with pytest.raises(EvalError, match=says):
            data.load(str(spelling))


WITHOUT_MEANING = {
    "pydoc": ("config", "split", "column", "revision"),
    "-": ("config", "split", "column", "revision"),
    "text.txt": ("config", "split", "column", "revision"),
    "text.jsonl": ("config", "split", "revision"),
    ".": ("revision",),
    "wikitext-2": ("config",),
    "wikitext-103": ("config",),
}


@pytest.mark.parametrize("dataset", WITHOUT_MEANING)
def test_an_option_without_a_meaning_is_refused(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "text.jsonl"):
        write(Path(name))
    for option in WITHOUT_MEANING[dataset]:
        name = {"column": "--text-column", "revision": "--dataset-revision"}.get(option, f"--{option}")
        with pytest.raises(EvalError, match=f"{name} has no meaning for"):
            data.load(dataset, **{option: "a"})
