"""The layout of the package: ARCHITECTURE.md is its map, and no file or function exceeds its limit.

The names of tests are checked too: they are short and in plain English.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE, LAB = REPOSITORY / "src/lastgood", REPOSITORY / "lab/src/lastgood_lab"
TEST_NAME = 70
PRIVATE_LANGUAGE = (
    "tell|tells|told|telling|hear|hears|heard|hearing|say|says|said|saying|word|homeless|whoever|patience|gone|let_go"
    "|together|meet|meets|met|meeting|mourned|no_use"
)
"""words of the code's former private language, which no name contains (docs/glossary.md has the terms)"""
PRIVATE_IN_IDENTIFIERS = f"{PRIVATE_LANGUAGE}|home|homes|whose|who|look|looks"
"""the same for identifiers of the package; the name of a test is a sentence, where these are ordinary words"""
FILE_LINES, FUNCTION_LINES, PARAMETERS, COMPLEXITY = 450, 60, 8, 15
EXCEPTIONS = json.loads((Path(__file__).parent / "exceptions.json").read_text())
"""kind -> what is over its limit today, and its size: a size may shrink, and an entry that fits again must go"""


def test_the_map_names_every_file_and_no_other() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text().partition("src/lastgood/\n")[2].partition("```")[0]
    named, folder = set(), ""
    for line in page.splitlines():
        if found := re.match(r"  (\w+)/  ", line):
            folder = f"{found[1]}/"
        elif found := re.match(r"( +)((?:\w+\.py ?)+)", line):
            named |= {(folder if len(found[1]) == 4 else "") + name for name in found[2].split()}
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
    assert named == {name for name in files if not name.endswith("/__init__.py")}


def test_the_map_names_every_file_of_the_lab_and_no_other() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text().partition("src/lastgood_lab/\n")[2].partition("  tests/")[0]
    named = re.findall(r"^ {4}(\w+\.py) +\S", page, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in LAB.glob("*.py") if path.name != "__init__.py")


def sources() -> list[Path]:
    return [*SOURCE.rglob("*.py"), *LAB.rglob("*.py")]


def short(path: Path) -> str:
    """The path of a file, relative to its package; a path in the lab begins with `lastgood_lab/`."""
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else LAB.parent))


def files_over() -> dict[str, int]:
    lines = {short(path): len(path.read_text().splitlines()) for path in sources()}
    return {name: count for name, count in lines.items() if count > FILE_LINES}


def functions_over() -> dict[str, int]:
    found = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > FUNCTION_LINES:
                    found[f"{short(path)}: {node.name}"] = count
    return found


def contains_word(name: str, words: str) -> bool:
    """Whether an identifier, split at underscores and capitals, contains one of these words."""
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)
    return bool(re.search(f"_({words})_", f"_{'_'.join(parts).lower()}_"))


def identifiers(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.alias(name=name, asname=asname):
            return [asname or name]
    return []


def private_identifiers() -> dict[str, int]:
    """Identifiers of the package in the private language, and how often each file uses them."""
    found = Counter[str]()
    for path in SOURCE.rglob("*.py"):
        names = [name for node in ast.walk(ast.parse(path.read_text())) for name in identifiers(node)]
        found.update(
            f"{path.relative_to(SOURCE)}: {name}" for name in names if contains_word(name, PRIVATE_IN_IDENTIFIERS)
        )
    return dict(found)


def rule_broken(rule: str) -> dict[str, int]:
    """Functions that break a rule of ruff, and the number that the message gives first."""
    limits = [
        f"lint.mccabe.max-complexity={COMPLEXITY}",
        f"lint.pylint.max-args={PARAMETERS}",
    ]
    settings = [part for limit in limits for part in ("--config", limit)]
    call = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--select", rule, *settings]
    done = subprocess.run(
        [*call, "--output-format", "json", str(SOURCE), str(LAB)], capture_output=True, text=True, check=False
    )
    found = {}
    for one in json.loads(done.stdout):
        path, row = Path(one["filename"]), one["location"]["row"]
        name = re.search(r"def (\w+)", path.read_text().splitlines()[row - 1])
        size = re.search(r"\((\d+) > ", one["message"])
        assert name and size, one
        found[f"{short(path)}: {name[1]}"] = int(size[1])
    return found


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("file lines", files_over),
        ("function lines", functions_over),
        ("identifiers", private_identifiers),
        ("parameters", lambda: rule_broken("PLR0913")),
        ("complexity", lambda: rule_broken("C901")),
    ],
)
def test_only_listed_exceptions_exceed_their_limit(kind: str, over) -> None:
    today, listed = over(), EXCEPTIONS[kind]
    grown = {name: size for name, size in today.items() if size > listed.get(name, 0)}
    assert not grown, f"{kind}: over the limit, and not listed or grown: {grown}"
    assert not (listed.keys() - today.keys()), f"{kind}: fits again, remove it from the list"


def files_of_tests() -> list[Path]:
    return [path for root in ("tests", "lab/tests") for path in (REPOSITORY / root).rglob("test_*.py")]


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """Two files of the same name in two folders are one module for pytest: the second fails, and only in a full run."""
    names = Counter(path.name for path in files_of_tests())
    assert [name for name, count in names.items() if count > 1] == []


def names_of_tests() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in files_of_tests()]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [one.name for one in functions if one.name.startswith("test_")]


def test_names_of_tests_are_short_and_in_plain_english() -> None:
    names = names_of_tests()
    assert len(names) > 1000, "the search does not find the tests"
    long = [name for name in names if len(name) > TEST_NAME]
    assert not long, f"longer than {TEST_NAME} characters: {long}"
    private = [name for name in names if contains_word(name, PRIVATE_LANGUAGE)]
    assert not private, f"not in plain English: {private}"
