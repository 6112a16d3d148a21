"""Rename: the map from the names of a generation to those of a live state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import Refused


class Rename:
    """Maps a stored name to a live one: by an exact rule, else by the longest matching prefix, else to itself.

    Raises Refused for a rule of which only one side ends in ".".
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        for old, new in rules.items():
            if old.endswith(".") != new.endswith("."):
                raise Refused(f"rename {old!r} -> {new!r}: a prefix and a name", todo='Let both end in ".", or none.')
        self._rules = rules
        self._prefixes = sorted((old for old in rules if old.endswith(".")), key=len, reverse=True)

    def name(self, name: str) -> str:
        """The live name of a tensor or parameter."""
        if name in self._rules:
            return self._rules[name]
        prefix = next((one for one in self._prefixes if name.startswith(one)), None)
        return name if prefix is None else self._rules[prefix] + name[len(prefix) :]

    def entry(self, name: str) -> str:
        """The live name of a top-level entry, to which a rule for `name.` applies too."""
        return self._rules.get(name) or self._rules.get(f"{name}.", f"{name}.")[:-1]

    def unused(self, stored: Iterable[str]) -> list[str]:
        """Why each rule renames nothing of these names, of tensors and entries, that renames nothing."""
        known, found = {*stored}, list[str]()
        for old in self._rules:
            below = old if old.endswith(".") else f"{old}."
            if below == old and old[:-1] in known:  # an entry without tensors
                continue
            if old not in known and not any(one.startswith(below) for one in known):
                found.append(f"rename {old!r}: nothing in the generation has this name")
            elif old not in known and below != old:
                found.append(f"rename {old!r}: this is the name of no tensor; {below!r} renames all below it")
        return found

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Live name -> stored name, of tensors. Raises Refused where two stored names get one live name."""
        return _inverse((self.name(old), old) for old in stored)

    def entries(self, stored: Iterable[str]) -> dict[str, str]:
        """Live name -> stored name, of top-level entries. Raises Refused where two get one live name."""
        return _inverse((self.entry(old), old) for old in stored)


def _inverse(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for new, old in pairs:
        if new in renamed:
            raise Refused(f"rename makes {new} of both {renamed[new]} and {old}", safe="Nothing was touched.")
        renamed[new] = old
    return renamed
