"""Parses paths and URLs that users give. Typing errors are refused, so that no folder of such a name is created.

Every path of a run is parsed here, and so is every file name that the command line reads or writes. The disk is only
asked whether a path exists literally: if it does, a dollar sign or white space at its ends belongs to the name. No
object store is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import NotARun, Refused
from ..format import layout

SLOTS = "slots://"
"""The prefix of the absolute path of a run in slots."""
MEMORY = "memory://"
"""The place of a tier in the memory of each machine; before an absolute path, the folder of one run there."""
STORES = ("s3", "gs", "az")
"""The schemes of object stores: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""
_MEANT = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az"}
"""schemes that other tools use -> the scheme that is meant"""
_KEY = re.compile(r"[A-Za-z0-9!_.'()=+@,:~$& -]+")
"""The characters of a name in an object store that every store and every tool accepts as they are."""

_NEAR_URL = re.compile(rf"({'|'.join([*STORES, *_MEANT])})(//+|:(?!/))", re.IGNORECASE)
"""A URL of an object store that lacks its colon or its slashes."""
_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/+")
"""The scheme of a URL. One slash is enough, because pathlib turns two slashes into one."""
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
"""An environment variable, as `os.path.expandvars` would replace it."""
_SAFE = "Nothing was touched."


_MOST_ENTRIES, _MOST_NAMED = 10_000, 5
"""How many entries of a folder are looked at for runs, and how many of these are named."""


class Place(NamedTuple):
    """Where a run is: an absolute directory, or the URL of a folder in an object store, without a slash at its end."""

    root: str
    kind: Literal["directory", "slots", "objects", "memory"]

    @property
    def url(self) -> str:
        """The text that names this place wherever a run is given."""
        return {"slots": SLOTS, "memory": MEMORY}.get(self.kind, "") + self.root


def lies_in(inner: Place, outer: Place) -> bool:
    """Whether one place is the other, or lies in it; of directories, links are followed."""
    if (inner.kind == "objects") != (outer.kind == "objects"):
        return False
    one, other = [at.root if at.kind == "objects" else os.path.realpath(at.root) for at in (inner, outer)]
    return one == other or one.startswith(other.rstrip("/") + "/")


def runs_near(root: str) -> str:
    """What to do for somebody who has named a place that holds no run: the run that it is a part of, else the runs in
    it or, if it does not exist, beside it. Looks at directories only.

    Example: `runs_near("/runs/a/gen")` is "It is a part of the run /runs/a."
    """
    folder = root if os.path.isdir(root) else os.path.dirname(root)
    if (above := _run_above(root)) is not None:
        return f"It is a part of the run {above}."
    with contextlib.suppress(OSError):
        with os.scandir(folder) as entries:
            found = sorted(
                one.path
                for one in islice(entries, _MOST_ENTRIES)
                if os.path.isfile(os.path.join(one.path, layout.HEADER))
            )
        if found:
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            return f"Check the path. Runs in {folder}: {', '.join(found[:_MOST_NAMED])}{more}."
    return "Check the path."


def require_in_no_run(place: Place, names: Collection[str]) -> None:
    """Raise NotARun for the place of a new run among the files of another one, through links. `names`: those of a run.
    Any other folder within a run may hold one."""
    if place.kind not in ("directory", "slots"):
        return
    real = os.path.realpath(place.root)
    above = _run_above(real)
    if above is not None and Path(real).relative_to(above).parts[0] in names:  # guard: no-run-within-a-run
        raise NotARun(
            f"{place.root} lies in the run {above}, and is no run itself",
            safe=_SAFE,
            todo=f"Give {above} to go on with that run, or a directory outside of it for another one.",
        )


def _run_above(root: str) -> str | None:
    """The nearest run in which a directory lies; None: there is none."""
    return next((str(one) for one in Path(root).parents if os.path.isfile(one / layout.HEADER)), None)


def parsed(path: str | os.PathLike[str]) -> Place:
    """The place that `_named` finds. Raises Refused too where its path is not UTF-8: the records of a run hold it."""
    found = _named(path)
    try:
        found.root.encode()
    except UnicodeEncodeError:
        raise Refused(
            f"path={found.root!a} has bytes that are not UTF-8",
            safe=_SAFE,
            todo="Rename it: the records of a run hold its path as text.",
        ) from None
    return found


def _named(path: str | os.PathLike[str]) -> Place:
    """Parse the path or URL of a run; `~` is expanded, and `file:///a/b` is the directory `/a/b`.

    Raises NotARun for slots without an absolute path; Refused if `path` is not a path, for a URL that names no place of
    a run, and in the cases of `absolute`.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise Refused(
            f"path={reprlib.repr(path)} is not the path of a directory",
            safe=_SAFE,
            todo=f"Give the directory of the run as text or as a pathlib.Path, or {SLOTS}/its/path.",
        )
    if isinstance(path, str) and text.startswith(SLOTS):
        root, given = local(text.removeprefix(SLOTS), "path"), f"path={text!r}"
        if not os.path.isabs(root):
            raise NotARun(f"{text} has no absolute path", safe=_SAFE, todo=f"Write {SLOTS}{_from_here(root, given)}")
        return Place(os.path.normpath(root), "slots")
    if (url := _SCHEME.match(text)) and url[1].lower() != "slots":
        return _of_url(text, url[1], text[url.end() :], is_text=isinstance(path, str))
    if (near := _NEAR_URL.match(text)) and not os.path.lexists(_up_to(text, near.end(1))):
        return _of_url(text, near[1], text[near.end() :], is_text=isinstance(path, str))
    scheme, colon, rest = text.partition(":")
    if colon and scheme.lower() == "memory" and not os.path.lexists(_up_to(text, len(scheme))):
        return _of_url(text, scheme, rest, is_text=False)
    if colon and scheme.lower() == "slots":
        meant = "/" + _from_here(rest, f"path={text!r}").lstrip("/")
        raise Refused(
            f"path={text!r} is neither a directory nor slots",
            safe=_SAFE,
            todo=f"Write {SLOTS}{meant} (in small letters, as text), or ./{text} for a folder of that name.",
        )
    return Place(absolute(text, "path"), "directory")


def _of_url(text: str, scheme: str, rest: str, is_text: bool) -> Place:
    """The place that a URL names. `rest`: what follows the slashes after the scheme."""
    given, lower = f"path={text!r}", scheme.lower()
    if lower == "file" and is_text and text.startswith(f"{scheme}:///"):
        return Place(os.path.abspath(local("/" + rest, "path")), "directory")
    if lower == "memory":
        if is_text and rest and text.startswith(f"{MEMORY}/"):
            return Place(os.path.normpath(f"/{rest}"), "memory")
        raise Refused(
            f"{given} names no run: memory is a tier of a run, which has its home elsewhere",
            safe=_SAFE,
            todo='Give the home, and tiers=[lastgood.Tier("memory://")] (in small letters, with two slashes). '
            "`lastgood tiers HOME` shows where its memory is.",
        )
    meant = _MEANT.get(lower, lower)
    if meant not in STORES:
        mounted = f"Give /{rest}" if lower == "file" else "Give the directory where it is mounted"
        raise Refused(
            f"{given} is a URL, but not that of a place for runs",
            safe=_SAFE,
            todo=f"{mounted}, s3://, gs://, az:// or {SLOTS}/, or ./{text} for a folder of that name.",
        )
    correct = f"{meant}://{rest.strip('/')}"
    if scheme != meant or not is_text or not text.startswith(f"{scheme}://") or text.startswith(f"{scheme}:///"):
        raise Refused(
            f"{given} is not the URL of a place in an object store",
            safe=_SAFE,
            todo=f"Write {correct if rest.strip('/') else f'{meant}://BUCKET/RUN'} (in small letters, as text, and "
            "with two slashes).",
        )
    for part in rest.rstrip("/").split("/"):
        if not _KEY.fullmatch(part) or part in (".", "..") or part != part.strip() or _VARIABLE.search(part):
            raise Refused(
                f"{given}: {part!r} cannot be part of a name in an object store",
                safe=_SAFE,
                todo=f"Write {meant}://BUCKET/RUN with letters, digits and -_.=: no empty part, no variable that was "
                "not expanded, no white space at the ends, no ? and no #.",
            )
    return Place(correct, "objects")


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


def absolute(text: str, argument: str) -> str:
    """The absolute path that `local` finds. Raises Refused too for a relative one in a folder that was deleted."""
    return _from_here(local(text, argument), f"{argument}={text!r}")


def _from_here(path: str, given: str) -> str:
    """A path as an absolute one. `given`: the argument with its value, for the error text."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise Refused(
            f"{given} is relative, and the current folder does not exist any more",
            safe=_SAFE,
            todo="Change to a folder that exists, or give the absolute path.",
        ) from error


def _up_to(text: str, position: int) -> str:
    """Cut a path at the end of the component that contains `position`."""
    end = text.find("/", position)
    return text if end < 0 else text[:end]


PEERS = "peers://"
"""The place of copies in the memory of other nodes; before what they survive: "node", "domain", or "process" alone
where a node is left out of them."""


def survived_by(place: str) -> frozenset[str]:
    """Which failures a generation survives in a place: "process", "power", "node", "domain" (`Save.durable`)."""
    if in_memory(place) or place == f"{PEERS}process":
        return frozenset({"process"})
    if place.startswith(PEERS):
        return frozenset({"process", "node", place.removeprefix(PEERS)})
    return frozenset({"process", "power", "node", "domain"} if in_object_store(place) else {"process", "power"})


def identity(path: str | os.PathLike[str]) -> str:
    """The same text for every way to write one place, through links or not. Raises as `parsed`."""
    place = parsed(path)
    return os.path.realpath(place.root) if place.kind == "directory" else place.url  # guard: one-text-for-a-directory


def in_memory(place: str) -> bool:
    """Whether a place, as tiers and messages name it, is in the memory of a machine."""
    return place.startswith(MEMORY)


def in_object_store(place: str) -> bool:
    """Whether a place, as tiers and messages name it, is in an object store."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme in STORES
