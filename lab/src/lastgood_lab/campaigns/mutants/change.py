"""Finds a named safeguard in source text and changes the statement that carries it.

A comment `# guard: name` names the statement on its line, or, on a line of its own, the next statement below. A marker
inside a statement of several lines names that statement. `# gap: name` is found in the same way. Changes are made to
the text, so comments and line breaks around the statement stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_BODIES = ("body", "orelse", "finalbody", "handlers")
_MARKER = re.compile(r"# (guard|gap): ([\w-]+(?:, [\w-]+)*)")

Node = ast.stmt | ast.ExceptHandler


class Unfit(Exception):
    """A change does not fit the source: its guard is missing, or its fragment does not occur exactly once."""


def marked_lines(source: str, kind: str = "guard") -> Iterator[tuple[str, int]]:
    """Each name in a marker of this kind in `source`, with the number of the line that holds its statement."""
    lines = source.splitlines()
    for index, line in enumerate(lines):
        for found in _MARKER.finditer(line):
            if found[1] == kind:
                at = _first_code_line(lines, index) + 1
                yield from ((name, at) for name in found[2].split(", "))


def _first_code_line(lines: list[str], index: int) -> int:
    """`index`, or, if that line is a comment, the index of the next line that is not."""
    code = (at for at in range(index, len(lines)) if not lines[at].lstrip().startswith("#"))
    return next(code, index)


@dataclass(frozen=True)
class Statement:
    """A marked statement. A compound statement is represented by its head, from its keyword to its colon."""

    source: bytes
    node: Node
    following: Node | None
    """the next statement of the same block"""

    @classmethod
    def of(cls, source: str, guard: str) -> Statement:
        """The statement that `guard` marks. Raises Unfit unless there is exactly one such marker."""
        at = [line for name, line in marked_lines(source) if name == guard]
        if len(at) != 1:
            raise Unfit(f"{guard} marks {len(at)} statements, not one")
        for block in _blocks(_parsed(source)):
            for index, node in enumerate(block):
                if node.lineno <= at[0] <= _end(node)[0] and at[0] <= _head_end(node)[0]:
                    return cls(source.encode(), node, block[index + 1] if index + 1 < len(block) else None)
        raise Unfit(f"{guard} is on line {at[0]}, which belongs to no statement")

    def text(self) -> str:
        """The text of the statement; of a compound statement, that of its head without the colon."""
        start, end = self._span(self.node, _head_end(self.node))
        return self.source[start:end].decode()

    def with_text(self, text: str) -> str:
        """The source with `text` instead of `self.text()`."""
        return self._replaced(self._span(self.node, _head_end(self.node)), text)

    def without(self, text: str) -> str:
        """The source with `text` instead of the whole statement, including its blocks."""
        return self._replaced(self._span(self.node, _end(self.node)), text)

    def with_condition(self, value: str) -> str:
        """The source with `value` as the condition of this `if`, `elif` or `while`."""
        if not isinstance(self.node, (ast.If, ast.While)):
            raise Unfit(f"the statement on line {self.node.lineno} has no condition")
        return self._replaced(self._span(self.node.test, _end(self.node.test)), value)

    def after_following(self) -> str:
        """The source with this statement moved behind the next one."""
        if self.following is None:
            raise Unfit(f"no statement follows line {self.node.lineno}")
        (a, b), (c, d) = self._span(self.node, _end(self.node)), self._span(self.following, _end(self.following))
        parts = self.source[:a], self.source[c:d], self.source[b:c], self.source[a:b], self.source[d:]
        return b"".join(parts).decode()

    def _replaced(self, span: tuple[int, int], text: str) -> str:
        return (self.source[: span[0]] + text.encode() + self.source[span[1] :]).decode()

    def _span(self, node: ast.expr | Node, end: tuple[int, int]) -> tuple[int, int]:
        return self._offset((node.lineno, node.col_offset)), self._offset(end)

    def _offset(self, place: tuple[int, int]) -> int:
        line, column = place
        return sum(map(len, self.source.splitlines(keepends=True)[: line - 1])) + column


@dataclass(frozen=True)
class Remove:
    """The whole statement is replaced by `pass`."""

    def apply(self, statement: Statement) -> str:
        return statement.without("pass")


@dataclass(frozen=True)
class Never:
    """The condition of the statement is always false."""

    def apply(self, statement: Statement) -> str:
        return statement.with_condition("False")


@dataclass(frozen=True)
class Always:
    """The condition of the statement is always true."""

    def apply(self, statement: Statement) -> str:
        return statement.with_condition("True")


@dataclass(frozen=True)
class Swap:
    """`other` replaces a fragment of the statement (of a compound one: of its head). It must occur exactly once."""

    fragment: str
    other: str

    def apply(self, statement: Statement) -> str:
        text = statement.text()
        if text.count(self.fragment) != 1:
            raise Unfit(f"{self.fragment!r} occurs {text.count(self.fragment)} times in {text!r}")
        return statement.with_text(text.replace(self.fragment, self.other))


@dataclass(frozen=True)
class Instead:
    """Other code replaces the whole statement."""

    code: str

    def apply(self, statement: Statement) -> str:
        return statement.without(textwrap.indent(self.code, " " * statement.node.col_offset).lstrip())


@dataclass(frozen=True)
class AfterNext:
    """The statement runs after the one that follows it."""

    def apply(self, statement: Statement) -> str:
        return statement.after_following()


@dataclass(frozen=True)
class Nothing:
    """No change: a control, on which every test of the file `test` must pass."""

    test: str

    def apply(self, statement: Statement) -> str:
        return statement.with_text(statement.text())


Change = Remove | Never | Always | Swap | Instead | AfterNext | Nothing


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)  # cached, because many mutants change the same file


def _blocks(node: ast.AST) -> Iterator[list[Node]]:
    for field in _BODIES:
        if isinstance(block := getattr(node, field, None), list):
            yield block
            for one in block:
                yield from _blocks(one)


def _end(node: ast.expr | Node) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _head_end(node: Node) -> tuple[int, int]:
    """The end of a statement; of a compound one, the end of the last expression before its first block."""
    blocks = [getattr(node, field, None) for field in _BODIES]
    if not any(isinstance(block, list) for block in blocks):
        return _end(node)
    inside = {id(one) for block in blocks if isinstance(block, list) for one in block}
    heads = [one for child in ast.iter_child_nodes(node) if id(child) not in inside for one in ast.walk(child)]
    return max((_end(one) for one in heads if isinstance(one, ast.expr)), default=(node.lineno, node.col_offset))
