"""What can be said of a regular expression before it is run: which names it can match at all, and what that may cost.

A rule of a checkpoint may hold any expression, and Python's engine backtracks: `(a+)+$` never ends on a long name. Why
expressions are measured and refused, not run by another engine: docs/decisions/0004-regular-expressions-in-rules.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from math import factorial, inf
from typing import Any

#: Steps that one evaluation may need by its bound: about a second.
MAX_STEPS = 1e8

#: Python's own parser. What is asked of it here has kept its form since Python 2.
_PARSER: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
_ASSERTIONS = frozenset({"ASSERT", "ASSERT_NOT"})
_BEGINNINGS = frozenset({"AT_BEGINNING", "AT_BEGINNING_STRING"})
_ENDS = frozenset({"AT_END", "AT_END_STRING"})

#: (operation, argument) as the parser gives them.
_Item = tuple[Any, Any]


@dataclass(frozen=True)
class Shape:
    """The parsed expression. `how` is the method that evaluates it: "match", "search" or "fullmatch"."""

    expression: re.Pattern[str]
    how: str

    @cached_property
    def _items(self) -> list[_Item]:
        return list(_PARSER.parse(self.expression.pattern, self.expression.flags))

    @cached_property
    def _flat(self) -> list[_Item]:
        """The items with groups opened that change nothing but what a dot matches."""
        if self.expression.flags & ~(re.UNICODE | re.DOTALL):
            return []
        return list(_opened(self._items))

    @property
    def lead(self) -> tuple[str, ...]:
        """What every match starts with: literal texts with one arbitrary character between each two."""
        items = self._flat
        if items and _name(items[0][0]) == "AT" and _name(items[0][1]) in _BEGINNINGS:
            items = items[1:]
        elif self.how == "search":
            return ("",)
        texts = [""]
        for operation, argument in items:
            if _name(operation) == "LITERAL":
                texts[-1] += chr(argument)
            elif _name(operation) == "ANY":
                texts.append("")
            else:
                break
        return tuple(texts)

    @property
    def tail(self) -> str:
        """What every match ends with, where the expression reaches the end of the name; a line break may follow."""
        items = self._flat
        anchored = bool(items) and _name(items[-1][0]) == "AT" and _name(items[-1][1]) in _ENDS
        if not anchored and self.how != "fullmatch":
            return ""
        text = ""
        for operation, argument in reversed(items[:-1] if anchored else items):
            if _name(operation) != "LITERAL":
                break
            text = chr(argument) + text
        return text

    @property
    def inner(self) -> str:
        """The longest literal text that every match contains."""
        texts = [""]
        for operation, argument in self._flat:
            if _name(operation) == "LITERAL":
                texts[-1] += chr(argument)
            else:
                texts.append("")
        return max(texts, key=len)

    def steps(self, longest: int, digits: int) -> float:
        """A bound on the steps that one evaluation takes on a name of `longest` characters.

        `digits` is the length of the longest run of digits in a name. `inf` for repeated parts that repeat or choose
        themselves: the ways to match those grow exponentially.
        """
        starts = longest + 1 if self.how == "search" else 1
        return starts * _bound(self._items, max(longest, 1), max(digits, 1)).steps


@dataclass(frozen=True, slots=True)
class _Bound:
    """In how many ways a part can match at one place, and how many steps it takes to try them all."""

    ways: float
    steps: float


_ONE = _Bound(1, 1)


def _name(code: object) -> str:
    return str(code)


def _opened(items: Iterable[_Item]) -> Iterable[_Item]:
    for operation, argument in items:
        if _name(operation) == "SUBPATTERN" and not argument[1] & ~re.DOTALL and not argument[2]:
            yield from _opened(argument[3])
        elif _name(operation) == "ATOMIC_GROUP":
            yield from _opened(argument)
        else:
            yield operation, argument


def _bound(items: Sequence[_Item], longest: int, digits: int) -> _Bound:
    """Parts in a row: every way of the first is followed by trying the second, and so on."""
    ways, steps, free = 1.0, 1.0, 0
    for operation, argument in items:
        part = _bound_of(operation, argument, longest, digits)
        # Parts that can each take any share of a name take shares that follow each other.
        free += part.ways > digits
        steps += ways * part.steps / factorial(min(free, 20))
        ways *= part.ways
    return _Bound(ways / factorial(min(free, 20)), steps)


def _bound_of(operation: object, argument: Any, longest: int, digits: int) -> _Bound:
    name = _name(operation)
    if name == "SUBPATTERN":
        return _bound(argument[3], longest, digits)
    if name == "ATOMIC_GROUP":
        return _Bound(1, _bound(argument, longest, digits).steps)
    if name in _ASSERTIONS:
        return _Bound(1, _bound(argument[1], longest, digits).steps)
    if name == "BRANCH":
        return _either([_bound(branch, longest, digits) for branch in argument[1]])
    if name == "GROUPREF_EXISTS":
        return _either([_bound(branch, longest, digits) for branch in argument[1:] if branch is not None])
    if name == "GROUPREF":
        return _Bound(1, longest)
    if name in _REPEATS:
        repeat = _bound_of_repeat(int(argument[0]), int(argument[1]), argument[2], longest, digits)
        return _Bound(1, repeat.steps) if name == "POSSESSIVE_REPEAT" else repeat
    return _ONE


def _either(branches: Sequence[_Bound]) -> _Bound:
    return _Bound(sum(branch.ways for branch in branches), 1 + sum(branch.steps for branch in branches))


def _bound_of_repeat(least: int, most: int, body: Any, longest: int, digits: int) -> _Bound:
    once = _bound(body, longest, digits)
    if most <= 1:
        return _Bound(once.ways + (1 - least), once.steps + 1)
    low, high = (int(width) for width in body.getwidth())
    if once.ways == 1 and low == high and low > 0:
        times = min(most, (digits if _is_digit(body) else longest) // low)
        return _Bound(max(times - least + 1, 1), (times + 1) * once.steps)
    times = min(most, longest)
    if times >= 60 or once.ways > 1e5:
        return _Bound(inf, inf)
    ways = max(once.ways, 2) ** (times + 1)
    return _Bound(ways, ways * once.steps)


def _is_digit(body: Any) -> bool:
    """True for a single digit, as `\\d` and `[0-9]` are."""
    if len(body) != 1 or _name(body[0][0]) != "IN":
        return False
    return all(
        (_name(kind), _name(value)) == ("CATEGORY", "CATEGORY_DIGIT") or (_name(kind), value) == ("RANGE", (48, 57))
        for kind, value in body[0][1]
    )
