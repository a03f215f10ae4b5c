"""Texts are read byte for byte from each kind of source. If a text cannot be read, the error says why."""

import hashlib
import json
import platform
from pathlib import Path

import pyarrow as pa
import pytest
from flash_evals.results.errors import EvalError
from flash_evals.results.provenance import Part
from flash_evals.work import data, pydoc_text
from msgspec import to_builtins
from pyarrow import parquet

pytestmark = pytest.mark.slow("imports datasets for seconds")

DOCUMENTS = ["One line.\r\nAnother – “quoted”.\n", "", "Third document."]
JOINED = "\n\n".join(DOCUMENTS)
FINGERPRINT = "sha256:" + hashlib.sha256(JOINED.encode()).hexdigest()


def write(path, column="text"):
    """Writes the documents in the format of the path's suffix."""
    if path.suffix == ".txt":
        path.write_bytes(JOINED.encode())
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: document}) + "\n" for document in DOCUMENTS))
    else:
        parquet.write_table(pa.table({column: DOCUMENTS, "n": [1, 2, 3]}), path)
    return path


def read(*datasets, **part):
    """The documents of these datasets, joined to one text."""
    text = data.load(*map(str, datasets), part=Part(**part))
    return text.dataset.separator.join(text.documents)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_file_is_read_byte_for_byte(suffix, tmp_path):
    path = write(tmp_path / f"some{suffix}")
    assert read(path) == JOINED
    described = data.load(str(path)).dataset
    documents, column = (1, None) if suffix == ".txt" else (3, "text")
    assert (described.name, described.documents, described.column) == (path.name, documents, column)
    assert (described.fingerprint, described.words, described.bytes) == (FINGERPRINT, 7, len(JOINED.encode()))
    if suffix != ".txt":
        path = write(path, column="page")
        assert read(path, column="page") == JOINED
        with pytest.raises(EvalError, match=f"{path.name}.*text"):
            read(path)


def test_several_files_are_read_one_after_the_other(tmp_path, run_command):
    files = [write(tmp_path / name) for name in ("b.txt", "a.jsonl", "c.parquet")]
    assert read(*files) == "\n\n".join([JOINED] * 3)
    found = run_command("perplexity", *(word for file in files for word in ("--dataset", file)))["dataset"]
    assert found == to_builtins(data.load(*map(str, files)).dataset)
    assert (found["name"], found["documents"]) == ("b.txt, a.jsonl, c.parquet", 7)


def test_stdin(invoke, model_folder):
    command = ["perplexity", "--model", model_folder, "--context", 32, "--dataset", "-", "-o", "json"]
    described = json.loads(invoke(*command, input=JOINED.encode()).stdout)["dataset"]
    assert (described["name"], described["fingerprint"]) == ("stdin", FINGERPRINT)
    assert invoke(*command, input=b"").stderr == "Error: stdin holds no text\n"
    assert invoke(*command, input=b"\xff").stderr.startswith("Error: cannot read stdin: 'utf-8'")


def test_pydoc_is_the_held_out_part_and_names_its_python(tmp_path, monkeypatch):
    """`pydoc` names the built-in text even if there is a file of this name."""
    monkeypatch.chdir(tmp_path)
    Path("pydoc").write_text("a file")
    text = data.load("pydoc")
    assert text.documents == pydoc_text.documents("heldout")
    assert text.dataset.revision == f"CPython {platform.python_version()}"


FILES = {
    "some.txt": b"text",
    "some.jsonl": b'{"text": "text"}',
    "some.csv": b"text",
    "blank.txt": b" \n\n \t",
    "empty.jsonl": b"",
    "latin.txt": b"\xff\xfe\x00",
    "broken.jsonl": b"{broken",
    "number.jsonl": b'{"text": 5}',
    "list.jsonl": b"[1]",
    "half.jsonl": b'{"text": "half a pair: \\ud83d"}',
    "broken.parquet": b"no parquet at all",
}
EVERY = ["--config", "--split", "--dataset-revision", "--text-column"]
NO_MEANING = {"pydoc": EVERY, "-": EVERY, "some.txt": EVERY, "some.jsonl": EVERY[:-1]}
NO_MEANING |= {"some.txt --dataset some.jsonl": ["--split"]}
REFUSED = {
    **{file: f"{file} holds no text" for file in ("blank.txt", "empty.jsonl")},
    **{file: f"cannot read {file}: " for file in FILES if file.startswith(("latin", "broken", "list"))},
    "half.jsonl": "half.jsonl holds characters that are not valid text",
    "number.jsonl": "cannot read number.jsonl: Expected `str`, got `int` - at `$[0].text`",
    **{file: f"expected an existing .txt, .jsonl or .parquet file, not {file}" for file in ("some.csv", "no.txt", ".")},
    **{path: f"no such file: {path}" for path in ("a/b/c", "/no", "./no", "~/no")},
    **{
        f"some.txt --dataset {other}": f"file, not {other}"
        for other in ("no.txt", "pydoc", "wikitext", "-", ".", "a/b")
    },
    **{f"{data} {option} a": f"{option} has no meaning for " for data, few in NO_MEANING.items() for option in few},
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused(refused, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert REFUSED[arguments] in refused("perplexity", "--dataset", *arguments.split())
