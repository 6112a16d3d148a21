"""What a rank leaves of the error that ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from lastgood.errors import TierDown
from lastgood.supervisor import program
from mounts import small_tmpfs

SCRIPT = """
import resource, sys
from lastgood.io import heartbeat
from lastgood.supervisor import program

path = sys.argv[1]
if sys.argv[2] == "no room":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
heartbeat.note_failed = lambda: print("is shown as failed")
sys.excepthook = program._noting(path)
try:
    {}
except SystemExit as error:
    program._write_error(path, SystemExit, error, None)
    raise
"""


@pytest.mark.parametrize("where", ["", "no room", "gone"])
@pytest.mark.parametrize(("ends", "last"), [("raise ValueError('bad')", "ValueError: bad"), ("sys.exit('why')", "why")])
def test_an_error_that_cannot_be_noted_is_printed_as_ever(tmp_path: Path, where: str, ends: str, last: str) -> None:
    """A rank that failed because its disk was full printed an error of lastgood's own hook before its own error."""
    error_file = tmp_path / ("gone/error.json" if where == "gone" else "error.json")
    command = [sys.executable, "-c", SCRIPT.format(ends), str(error_file), where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == last
    assert "excepthook" not in done.stderr and "OSError" not in done.stderr and "No such file" not in done.stderr
    assert error_file.exists() == (where == "")
    assert ("is shown as failed" in done.stdout) == (where == "" and "ValueError" in ends)


def test_an_error_whose_text_cannot_be_made_is_noted(tmp_path: Path) -> None:
    """The hook failed with such an error, so the report named exit code 1 in place of the exception."""
    error_file = tmp_path / "error.json"
    raised = "raise type('NoText', (Exception,), {'__str__': lambda error: 1 / 0})()"
    command = [sys.executable, "-c", SCRIPT.format(raised), str(error_file), ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    what = "NoText: <exception str() failed>"
    assert done.stderr.splitlines()[-1].endswith(what) and "excepthook" not in done.stderr
    assert json.loads(error_file.read_text())["message"]["message"] == what


def test_the_traceback_of_a_syntax_error_has_no_frame_of_lastgood(tmp_path: Path) -> None:
    """It began with a frame of program.py, which had compiled the script."""
    script, error_file = tmp_path / "rank.py", tmp_path / "error.json"
    script.write_text("def (\n")
    what = json.dumps({"kind": "script", "name": str(script), "arguments": []})
    command = [sys.executable, "-m", "lastgood.supervisor.program", str(os.getpid()), what]
    environment = {**os.environ, program.ERROR_FILE: str(error_file)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    stack = json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    for text in (done.stderr, stack):
        assert text.lstrip().startswith(f'File "{script}", line 1\n') and text.endswith("SyntaxError: invalid syntax\n")


class TimedOut(Exception):
    """An error of a script, with a name that lastgood has too."""


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (TimedOut("no answer"), f"{__name__}.TimedOut"),
        (TierDown("no answer"), "TierDown"),
        (OSError("no answer"), "OSError"),
    ],
)
def test_an_error_named_like_one_of_lastgood_has_its_module(tmp_path: Path, error: Exception, name: str) -> None:
    """A script's own class TimedOut was taken for lastgood's, so its failures got no remedies."""
    assert program._write_error(str(tmp_path / "error.json"), type(error), error, None)
    written = msgspec.json.decode((tmp_path / "error.json").read_bytes())
    assert written["message"]["message"].startswith(f"{name}: no answer")


@pytest.mark.parametrize(("written", "name"), [("", f"{__name__}.TimedOut"), ("by the script", "TimedOut")])
def test_the_error_file_of_record_gets_the_module(tmp_path: Path, monkeypatch, written: str, name: str) -> None:
    """torch's `@record` had written the bare name of a script's own class TimedOut, and that file was kept."""
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    error = TimedOut("no answer")
    ErrorHandler().record_exception(TimedOut(written) if written else error)
    assert program._write_error(str(error_file), TimedOut, error, None)
    assert json.loads(error_file.read_text())["message"]["message"] == f"{name}: {written or error}"


def test_a_rank_that_fails_on_a_full_disk_and_does_not_end_is_named(tmp_path: Path) -> None:
    """Its error had no room on the disk, so the supervisor did not learn of it, and waited for the end of the rank:
    as long as for one that hangs."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nwhile True: print(4096 * 'x')\n"
    )
    lastgood = str(Path(sys.executable).with_name("lastgood"))
    with small_tmpfs(tmp_path / "logs", "64k") as logs:
        options = ["--spawn", "--log-dir", str(logs), "--redirects", "3", "--max-restarts", "0", str(script)]
        report = subprocess.run([lastgood, "run", *options], capture_output=True, text=True, timeout=60).stderr
    assert "rank 0 failed first: OSError: [Errno 28] No space left on device" in report
