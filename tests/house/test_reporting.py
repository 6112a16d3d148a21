"""A report of a threat to the run reaches a person under any configuration of warnings and logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETUPS = {
    "nothing configured": "",
    "warnings filtered": "import warnings; warnings.filterwarnings('ignore')",
    "logging disabled": "import logging; logging.disable(logging.CRITICAL)",
    "a file handler only": "import logging; logging.basicConfig(filename='/dev/null', level=logging.DEBUG)",
    "the logger silenced": "import logging; logging.getLogger('lastgood').setLevel(logging.CRITICAL + 1)",
    "a filter that drops everything": "import logging; logging.getLogger('lastgood').addFilter(lambda _: False)",
    "a null handler": "import logging; logging.getLogger('lastgood').addHandler(logging.NullHandler())",
    "basicConfig": "import logging; logging.basicConfig()",
}


def stderr_of(*lines: str) -> str:
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize("setup", SETUPS)
def test_a_warning_reaches_stderr_once_under_any_configuration(setup: str) -> None:
    """29 saves in a row failed, and a script that filters warnings printed nothing and ended with exit code 0."""
    output = stderr_of(SETUPS[setup], "from lastgood import reporting", "reporting.threat('29 saves failed')")
    assert output.count("29 saves failed") == 1


def test_information_is_shown_by_default_and_can_be_silenced() -> None:
    """Every run printed the bound of the disk, and nothing could turn it off."""
    silence = "import logging; logging.getLogger('lastgood').setLevel(logging.WARNING)"
    report = ("from lastgood import reporting", "reporting.info('at most 3 GB')")
    assert stderr_of(*report) == "lastgood: at most 3 GB\n"
    assert stderr_of(silence, *report) == ""


def test_a_closed_stderr_does_not_raise() -> None:
    assert (
        stderr_of("import sys", "sys.stderr.close()", "from lastgood import reporting", "reporting.threat('x')") == ""
    )
