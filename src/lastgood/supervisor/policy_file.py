"""The policy file, `lastgood.yaml`: options of `lastgood run`, by the names of its flags. Starts nothing.

The file is a mapping of names to values:

    hang-timeout: 120
    remedies: [back]
    spawn: true

Invariants
  1. Values stay the texts that the file has, and are taken as the flag takes them. So 1:4 is not YAML's number 64.
  2. No object is made from a tag, and a key that stands there twice is an error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Refused
from ..extras import needed
from .option_values import LISTS, fault, meant

if TYPE_CHECKING:
    import yaml

NAME, MISTAKEN_NAME = "lastgood.yaml", "lastgood.yml"
_TAG = "tag:yaml.org,2002:"
_SWITCH = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
_NO_KEYS = ("help", "policy")
"""options that are no keys of the file"""
_NAMES = ("rdzv_id", "role")
"""options whose value is any name, also one that YAML takes for a switch, such as on"""
_WRONG_KINDS = {
    "null": "has no value",
    "bool": "does not take true or false",
    "timestamp": "does not take a date",
    "seq": "does not take a list",
    "map": "does not take a mapping",
}


@dataclass(frozen=True)
class Policy:
    """What a policy file says. `path`: of the file. `values`: destination of an option -> the text of its value; of a
    switch "1" or "0"."""

    path: str
    values: Mapping[str, str]


def found(given: str | None) -> str | None:
    """The path of the policy file; None: there is none. `given`: the path that the user has named.

    Raises Refused for a file in the current folder whose name is not quite NAME.
    """
    if given:
        return given
    if os.path.lexists(NAME):
        return NAME
    if os.path.exists(MISTAKEN_NAME):
        raise Refused(
            f"{MISTAKEN_NAME} is not read: a policy file is named {NAME}",
            safe="Nothing was started.",
            todo=f"Rename it, or give --policy {MISTAKEN_NAME}.",
        )
    return None


def read(path: str, options: Mapping[str, argparse.Action], named_by: str) -> Policy:
    """Read a policy file. An empty one says nothing.

    `options`: flag of `lastgood run` -> its action of argparse. `named_by`: the flag or variable that has the path.
    Raises Refused with the line of what cannot be meant, and NotInstalled without PyYAML.
    """
    with needed("cli", f"The policy file {path}"):
        import yaml
    try:
        with open(path, "rb") as file:
            root = yaml.compose(file.read(), Loader=yaml.SafeLoader)
    except OSError as error:
        todo = f"Correct {named_by}." if path != NAME else f"Make it readable; --policy {os.devnull} does without it."
        raise _refused(path, f"the policy file cannot be read: {error.strerror}", todo) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise _refused(f"{path}:{mark.line + 1}" if mark else path, f"no YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise _refused(path, f"no YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return Policy(path, {})
    if not isinstance(root, yaml.MappingNode):
        raise _refused(_place(path, root), "a policy file is a mapping of options to values", "Write hang-timeout: 60.")
    keys = {flag.removeprefix("--"): one for flag, one in options.items() if flag.startswith("--")}
    keys = {key: one for key, one in keys.items() if key not in _NO_KEYS}
    values = dict[str, str]()
    for key, value in root.value:
        name, place = str(key.value), _place(path, key)
        if name not in keys:
            raise _refused(place, f"unknown key {name}", f"{meant(name, keys)} Each long option is a key.".strip())
        if keys[name].dest in values:  # guard: repeated-key-refused
            raise _refused(place, f"{name} stands there twice")
        values[keys[name].dest] = _checked(value, keys[name], f"{_place(path, value)}: {name}")
    return Policy(path, values)


def _checked(value: yaml.Node, option: argparse.Action, place: str) -> str:
    """The text of one value, in the form of a variable of the environment. `place`: file, line and key, for errors."""
    if isinstance(option.const, bool):
        text = str(value.value).lower()
        if value.tag != f"{_TAG}bool" or text not in _SWITCH:
            raise _refused(place, "takes true or false")
        return _SWITCH[text]
    many = value.tag == f"{_TAG}seq" and option.type in LISTS
    text = ",".join(_text(one, option, place) for one in value.value) if many else _text(value, option, place)
    if why := fault(option, text):
        raise _refused(place, why)
    return text


def _text(value: yaml.Node, option: argparse.Action, place: str) -> str:
    kind = value.tag.removeprefix(_TAG)
    names = option.dest in _NAMES or option.type in LISTS
    taken = (kind == "timestamp" and option.type is None) or (kind in ("bool", "timestamp") and names)
    if kind not in ("str", "int", "float") and not taken:
        raise _refused(place, _WRONG_KINDS.get(kind, f"does not take {kind}"))
    text = str(value.value)
    return os.path.expanduser(text)  # as a shell does with a flag


def _place(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _refused(place: str, what: str, todo: str = "Correct the file; --policy /dev/null does without it.") -> Refused:
    return Refused(f"{place}: {what}", safe="Nothing was started.", todo=todo)
