"""torch's own tests of torch.distributed.checkpoint, with torch's storage and with lastgood's, on CPU under gloo.

    python -m lastgood_lab.campaigns.dcp_torch_tests --tests pytorch/test/distributed/checkpoint

torch's wheel does not contain these files: take them from the source of the installed version. They need the packages
expecttest and zstandard. A test counts if it passes with torch's own storage. It must then pass with lastgood's
storage, too, unless its subject is torch's own files (see SUBJECTS). Tests for accelerators run too, as far as they
work without one. Writes lab/reports/dcp_torch_tests.json and .md. The exit code is 1 if a test that counts fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

import lastgood
from lastgood_lab.campaigns.reports import report

HERE = Path(__file__).resolve().parent
FILE_SECONDS = 1500
"""the timeout for the tests of one file"""

SUBJECTS = {
    "test_overwrite": "its subject is torch's overwrite=False, which guards its files; a run keeps both saves",
    "test_torch_save_to_dcp": "its subject is torch's folder, with other files in it; a run refuses such a folder",
}
"""name of a test (without its parameters) -> why it can pass only with torch's own files"""


def outcomes(file: Path, storage: str) -> dict[str, str]:
    """The outcome of each test of a file: "passed", "skipped", or its error. `storage`: "torch" or "lastgood"."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as results:
        environment = os.environ | {
            "DCP_STORAGE": storage,
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # compiling on each rank takes minutes, and does not concern the storage
            "PYTHONPATH": os.pathsep.join([str(HERE / "dcp_shim"), str(Path(lastgood.__path__[0]).parent)]),
        }
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            f"--junitxml={results.name}",
            f"--rootdir={file.parent}",
        ]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(file)],
            env=environment,
            cwd=file.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=FILE_SECONDS,
            check=False,
        )
        text = Path(results.name).read_bytes()
    found = {}
    for case in ElementTree.fromstring(text or b"<none/>").iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problem = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            found[name] = "passed"
        elif problem.tag == "skipped":
            found[name] = "skipped"
        else:
            found[name] = last_error(problem.text or problem.get("message") or "")
    return found


def last_error(text: str) -> str:
    """The line of a traceback that names the error, without the path of torch's installation."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if "Error" in line or "Exception" in line]
    return re.sub(r"\S*/site-packages/", "", (lines[-1] if lines else text.strip()[-200:])[:300])


def reason(test: str) -> str:
    """Why this test can pass only with torch's own files; empty if it has no such reason."""
    name = test.rpartition(".")[2]
    return next((why for subject, why in SUBJECTS.items() if name == subject or name.startswith(f"{subject}_")), "")


def verdict(theirs: str, ours: str, why: str) -> str:
    """The verdict on a test from its outcomes with torch's storage and with lastgood's; `why` is its `reason`."""
    if theirs != "passed":
        return "does not run here"
    if ours == "passed":
        return "passes over both"
    return "torch's files" if why else "FAILS over lastgood"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the folder of torch's test files")
    parser.add_argument("--only", default="", help="only files whose name contains this text")
    parser.add_argument("--source", default="", help="the origin of the test files, for the report")
    options = parser.parse_args()
    begun = time.monotonic()
    rows = []
    for file in sorted(options.tests.rglob("test_*.py")):
        if options.only not in file.name:
            continue
        # lastgood first, because one of torch's tests leaves its files in a folder with a fixed name.
        ours = outcomes(file, "lastgood")
        theirs = outcomes(file, "torch")
        for test in sorted(theirs.keys() | ours.keys()):
            found = [theirs.get(test, "absent"), ours.get(test, "absent"), reason(test)]
            rows.append({"file": file.name, "test": test, "torch": found[0], "lastgood": found[1], "reason": found[2]})
            rows[-1]["verdict"] = verdict(*found)
            print(f"{file.name} {test}: {rows[-1]['verdict']}", flush=True)
    counts = Counter(row["verdict"] for row in rows)
    facts = {
        "command": "python -m lastgood_lab.campaigns.dcp_torch_tests --tests FOLDER",
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "tests_from": options.source,
        "tests": len(rows),
        "pass_over_torch_storage": sum(row["torch"] == "passed" for row in rows),
        **{key.replace(" ", "_"): count for key, count in sorted(counts.items())},
        "seconds": round(time.monotonic() - begun),
        "results": rows,
    }
    lines = ["| file | test | with torch's storage | with lastgood's storage | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        cells = [row["file"], row["test"], row["torch"], row["reason"] or row["lastgood"], row["verdict"]]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ")[:160] for cell in cells) + " |")
    report("dcp_torch_tests", "torch's own tests of distributed checkpoints", facts, ["\n".join(lines)])
    return 1 if counts["FAILS over lastgood"] else 0


if __name__ == "__main__":
    sys.exit(main())
