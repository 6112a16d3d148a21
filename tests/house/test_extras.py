"""The package without torch, without typer and rich, and without the lab: what works, and what the errors say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lastgood
from commands import registered
from lastgood.errors import NotInstalled, Refused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "parity"
WITHOUT = """
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
"""


def without(packages: set[str], program: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python in which these packages cannot be imported."""
    code = WITHOUT.format(packages=packages) + program
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def lastgood_without(packages: set[str], *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command `lastgood` in a Python in which these packages cannot be imported."""
    return without(packages, "from lastgood.__main__ import main\nsys.exit(main())", *args)


def test_a_run_is_read_and_verified_without_torch_typer_and_rich() -> None:
    program = """
import hashlib, json
import lastgood
run = lastgood.open(sys.argv[1])
content = run.content()
print(json.dumps({
    "steps": [one.step for one in run.generations()],
    "good": run.verify().good,
    "note": content.values()["note"],
    "shape": run.array("model.weight").shape,
    "digests": {name: hashlib.sha256(run.array(name).tobytes()).hexdigest() for name in content.names()},
}))
"""
    done = without({"torch", "typer", "rich"}, program, GOLDEN)
    assert done.returncode == 0, done.stderr
    expected = json.loads((ROOT / "tests" / "golden" / "golden.json").read_text())["parity"]
    assert json.loads(done.stdout) == {
        "steps": [one.step for one in lastgood.open(GOLDEN).generations()],
        "good": True,
        "note": "naïve ✓",
        "shape": [3, 6],
        "digests": expected,
    }


def test_each_public_name_that_needs_torch_explains_how_to_install_it() -> None:
    program = """
import lastgood
from lastgood.errors import NotInstalled

def refusal(attempt):
    try:
        attempt()
    except NotInstalled as error:
        return str(error)

for name in lastgood.__all__:
    if found := refusal(lambda: getattr(lastgood, name)):
        print(name, found, sep=": ")
print(refusal(lambda: lastgood.open(sys.argv[1]).tensor("model.weight")))
print(refusal(lambda: __import__("lastgood.integrations.transformers")))
"""
    done = without({"torch"}, program, GOLDEN)
    assert done.returncode == 0, done.stderr
    sentence = "{} needs the package torch, which is not installed. Nothing was touched. "
    sentence += "Install it: pip install 'lastgood[torch]'."
    names = ["Audit", "Checkpointer", "Loaded", "Restored", "ResumableSampler", "dcp", "load", "save"]
    lines = [f"{name}: {sentence.format(f'lastgood.{name}')}" for name in names]
    assert done.stdout.splitlines() == [*lines, sentence.format("Run.tensor"), sentence.format("lastgood.integrations")]


@pytest.mark.parametrize(
    ("framework", "hidden", "missing"),
    [
        ("transformers", {"transformers"}, "transformers"),
        ("transformers", {"accelerate"}, "accelerate"),
        ("accelerate", {"accelerate"}, "accelerate"),
        ("lightning", {"torchmetrics"}, "torchmetrics"),
        ("lightning", {"lightning", "pytorch_lightning"}, "pytorch_lightning"),
    ],
)
def test_an_integration_without_its_framework_names_the_extra(framework: str, hidden: set[str], missing: str) -> None:
    """Importing an integration raised a ModuleNotFoundError, which does not name the extra to install."""
    done = without(hidden, f"import lastgood.integrations.{framework}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"lastgood.errors.NotInstalled: lastgood.integrations.{framework} needs the package {missing}, which is not "
        f"installed. Nothing was touched. Install it: pip install 'lastgood[{framework}]'."
    )


def test_a_package_that_lightning_lacks_is_named_itself() -> None:
    """A broken installation of lightning was reported as a missing pytorch_lightning."""
    done = without({"lightning_utilities", "pytorch_lightning"}, "import lastgood.integrations.lightning")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'lightning_utilities")


def test_training_needs_no_command_line() -> None:
    program = "import lastgood; lastgood.Checkpointer, lastgood.dcp, lastgood.load, lastgood.ResumableSampler"
    done = without({"typer", "rich"}, program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_without_its_packages_prints_one_line_and_exits_3(package: str) -> None:
    done = lastgood_without({package}, "ls", GOLDEN)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"lastgood: The command line of lastgood needs the package {package}, which is not installed. "
        "Nothing was touched. Install it: pip install 'lastgood[cli]'.\n"
    )


def test_an_unrelated_missing_package_is_not_reported_as_an_extra() -> None:
    """A broken installation must not be reported as an extra that was not chosen."""
    done = lastgood_without({"msgspec"}, "ls", GOLDEN)
    assert done.returncode == 1 and "No module named 'msgspec'" in done.stderr


def test_the_commands_that_need_torch_are_refused_by_name_without_it(tmp_path: Path) -> None:
    assert lastgood_without({"torch"}, "verify", GOLDEN).returncode == 0
    assert lastgood_without({"torch"}, "export", GOLDEN, "--to", tmp_path / "m.safetensors").returncode == 0
    torch.save({"weight": torch.zeros(2)}, tmp_path / "given.pt")
    for args in (
        ["export", GOLDEN, "--to", tmp_path / "m.pt"],
        ["export", GOLDEN, "--to", tmp_path / "m.dcp"],
        ["import", tmp_path / "given.pt", tmp_path / "new"],
    ):
        done = lastgood_without({"torch"}, *args)
        assert done.returncode == 3 and "pip install 'lastgood[torch]'" in done.stderr, args
    assert sorted(one.name for one in tmp_path.iterdir()) == ["given.pt", "m.safetensors"]


@pytest.mark.parametrize("args", [["bench", "durable", "--out", "x"], ["lab"], ["report", "a", "b"], ["bench", "-h"]])
def test_a_command_of_the_lab_is_refused_by_name_without_the_lab(args, call_json, monkeypatch) -> None:
    registered(monkeypatch, {})
    code, answer = call_json(*args)
    assert code == 3 and answer["error"] == "NotInstalled"
    assert answer["message"] == f"`lastgood {args[0]}` needs the package lastgood-lab, which is not installed"
    assert answer["todo"] == "Install it: pip install ./lab, in a checkout of lastgood"


def test_the_help_lists_the_commands_that_are_installed(call, monkeypatch) -> None:
    def listed() -> set[str]:
        return set(re.findall(r"^\W+(\w+) ", call("--help")[1], re.M))

    registered(monkeypatch, {})
    assert "verify" in listed() and not {"bench", "report"} & listed()
    registered(monkeypatch, {"bench": "lastgood_lab.command:app", "report": "lastgood_lab.command:report"})
    assert {"verify", "bench", "report"} <= listed()


def test_a_tensor_is_read_as_an_array_unless_numpy_lacks_its_dtype(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "turned": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
        "one": torch.tensor(True),
        "none": torch.empty(0, 4, dtype=torch.complex64),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    lastgood.save(tmp_path, state)
    run = lastgood.open(tmp_path)
    for name in ("turned", "one", "none"):
        array = run.array(name)
        assert np.array_equal(array, state[name].numpy()) and array.dtype == state[name].numpy().dtype
    with pytest.raises(Refused, match=r"half is of dtype bfloat16, which NumPy does not have.*Run\.tensor"):
        run.array("half")


def test_an_error_of_a_missing_package_names_it_and_the_command() -> None:
    error = NotInstalled("lastgood.load", "torch", "pip install 'lastgood[torch]'")
    assert (error.package, error.command) == ("torch", "pip install 'lastgood[torch]'")
    assert isinstance(error, ImportError), "`except ImportError` around an optional import must continue to work"


def test_the_packages_that_are_always_installed_are_four() -> None:
    (listed,) = re.findall(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert sorted(re.findall(r'"(\w+)', listed)) == ["blake3", "msgspec", "numpy", "xxhash"]


def test_each_extra_that_a_page_or_an_example_names_exists() -> None:
    """An example said to install `lastgood[train,objects]`, which pip answers with a warning and without torch."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    named = {page.name: re.findall(r"(?:lastgood|\.)\[([a-z,]+)\]", page.read_text()) for page in pages}
    assert named["object_store.py"] and named["README.md"]
    missing = {(page, one) for page, found in named.items() for names in found for one in names.split(",")}
    assert {(page, one) for page, one in missing if one not in extras} == set()


def test_the_lab_has_the_version_of_lastgood_and_requires_it() -> None:
    core, lab = ((ROOT / folder / "pyproject.toml").read_text() for folder in (".", "lab"))
    (version,) = re.findall(r'^version = "(.+)"$', core, re.M)
    assert version == lastgood.__version__
    assert f'\nversion = "{version}"\n' in lab and f'"lastgood[cli,torch]=={version}"' in lab
