"""Parses paths that users give. URLs and typing errors are refused, so that no folder of such a name is created.

Every path of a run is parsed here, and so is every file name that the command line reads or writes. The disk is only
asked whether a path exists literally: if it does, a dollar sign or white space at its ends belongs to the name.
"""

from __future__ import annotations

import os
import re
import reprlib

from ..errors import NotARun, Refused

SLOTS = "slots://"
"""The prefix of the absolute path of a run in slots."""

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/+")
"""The scheme of a URL. One slash is enough, because pathlib turns two slashes into one."""
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
"""An environment variable, as `os.path.expandvars` would replace it."""
_SAFE = "Nothing was touched."


def parsed(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Parse the path of a run. Returns its absolute directory, with `~` expanded, and whether the run is in slots.

    Raises NotARun for slots without an absolute path; Refused if `path` is not a path, and in the cases of `local`.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise Refused(
            f"path={reprlib.repr(path)} is not the path of a directory",
            safe=_SAFE,
            todo=f"Give the directory of the run as text or as a pathlib.Path, or {SLOTS}/its/path.",
        )
    if isinstance(path, str) and text.startswith(SLOTS):
        root = local(text.removeprefix(SLOTS), "path")
        if not os.path.isabs(root):
            raise NotARun(f"{text} has no absolute path", safe=_SAFE, todo=f"Write {SLOTS}{os.path.abspath(root)}")
        return os.path.normpath(root), True
    scheme, colon, rest = text.partition(":")
    if colon and scheme.lower() == "slots":
        meant = "/" + os.path.abspath(rest).lstrip("/")
        raise Refused(
            f"path={text!r} is neither a directory nor slots",
            safe=_SAFE,
            todo=f"Write {SLOTS}{meant} (in small letters, as text), or ./{text} for a folder of that name.",
        )
    return os.path.abspath(local(text, "path")), False


def local(text: str, argument: str) -> str:
    """Check a path on this machine and expand `~`. `argument`: the name of the parameter in error texts.

    Raises Refused for a URL, an environment variable that was not expanded, white space at either end, and `~name` of
    an unknown user.
    """
    given = f"{argument}={text!r}"
    if scheme := _SCHEME.match(text):
        mounted = f"/{text[scheme.end() :]}" if scheme[1].lower() == "file" else "the directory where it is mounted"
        raise Refused(
            f"{given} is a URL, and only mounted file systems are read and written",
            safe=_SAFE,
            todo=f"Give {mounted}, or ./{text} for a folder of that name.",
        )
    if text != text.strip() and not os.path.lexists(text):
        raise Refused(
            f"{given} begins or ends with white space",
            safe=_SAFE,
            todo="Remove it: a line that was read from a file or a command ends with a newline. If the folder "
            "really has this name, create it first.",
        )
    variables = [*_VARIABLE.finditer(text)]
    if variables and not os.path.lexists(os.path.expanduser(_up_to(text, variables[-1].end()))):
        raise Refused(
            f"{given} holds the environment variable {variables[-1][0]}, which was not expanded",
            safe=_SAFE,
            todo="Expand it: with os.path.expandvars(path), or in a shell without single quotes. If the folder "
            "really has this name, create it first.",
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise Refused(
            f"{given}: there is no user {expanded.partition('/')[0]}",
            safe=_SAFE,
            todo="Give the directory in full; for a name that begins with ~ write ./~name.",
        )
    return expanded


def _up_to(text: str, position: int) -> str:
    """Cut a path at the end of the component that contains `position`."""
    end = text.find("/", position)
    return text if end < 0 else text[:end]
