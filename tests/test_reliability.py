"""Each promise in docs/dev/reliability.md names tests that exist, and a mutation in tests/mutations breaks it."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MUTATIONS = runpy.run_path(str(TESTS / "mutations"))["MUTATIONS"]
PAGE = (ROOT / "docs" / "dev" / "reliability.md").read_text()
TEST = re.compile(r"`([^`]+)`")


PROMISES = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for table in re.findall(r"^\| promise \| tests \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in table.splitlines()
]


@cache
def functions_in(file):
    """The names of the file's test functions, and of its test methods as Class::name."""
    tree = ast.parse((TESTS / file).read_text())
    classes = {"": tree} | {f"{node.name}::": node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        prefix + node.name
        for prefix, inside in classes.items()
        for node in inside.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def exists(test):
    file, _, name = test.partition("::")
    return (TESTS / file).is_file() and (not name or name in functions_in(file))


def test_the_page_has_every_group():
    groups = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert groups == [
        "Results", "Masks", "Gradients", "Memory", "The process", "The patch", "Evaluation", "Packaging", "Metal",
        "Speed",
    ]  # fmt: skip
    assert PAGE.count("| promise | tests |") == len(groups) - 1  # Speed has no table


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0])
def test_each_promise_names_tests_that_exist(row):
    promise, tests = row
    names = TEST.findall(tests)
    assert promise
    assert names
    assert tests == ", ".join(f"`{name}`" for name in names)  # the cell has only tests
    assert [name for name in names if not ("::" in name and exists(name))] == []


def test_a_test_that_is_gone_would_be_found():
    assert exists("test_reliability.py::test_a_test_that_is_gone_would_be_found")
    assert not exists("test_reliability.py::test_that_is_gone")
    assert not exists("core/test_that_is_gone.py::test_at_all")


def test_the_page_says_what_runs_each_test():
    makefile = (ROOT / "Makefile").read_text()
    runs = {
        folder
        for folders, target in re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \| `make ([\w-]+)` \|$", PAGE, re.MULTILINE)
        for folder in re.findall(r"`(\w+)/`", folders)
        if re.search(rf"^{target}:\n\t.* tests/{folder}\b", makefile, re.MULTILINE)
        and re.search(rf"^PARTS = .*\b{target}\b", makefile, re.MULTILINE)
    }
    assert {name.partition("/")[0] for _, tests in PROMISES for name in TEST.findall(tests)} <= runs


def test_no_promise_stands_there_twice():
    promises = [promise for promise, _ in PROMISES]
    assert len(promises) == len(set(promises))


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0])
def test_each_promise_can_be_broken(row):
    assert {mutation.function for mutation in MUTATIONS} & set(TEST.findall(row[1]))


def test_no_mutation_stands_there_twice():
    assert len({mutation.broken for mutation in MUTATIONS}) == len(MUTATIONS)


def test_few_are_noticed_only_at_night():
    assert sum(bool(mutation.nightly) for mutation in MUTATIONS) <= 10


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.broken)
def test_what_a_mutation_changes_is_there_once(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert any(mutation.function in TEST.findall(tests) for _, tests in PROMISES)
