"""Matching rules against checkpoint module names without comparing every rule with every module.

A `ModuleIndex` holds the sorted module names once. Each matcher answers with the set of names that it hits,
so literal entries cost a look-up or a bisection and only patterns scan the names.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import Protocol

from omniplat.errors import InvalidCheckpointError


class ModuleIndex:
    """The module names of one component, sorted; counts how often a pattern is evaluated against a name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names: list[str] = sorted(names)
        self._all = frozenset(self.names)
        self._reversed: list[str] = []
        self.pattern_evaluations = 0

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def with_prefix(self, prefix: str) -> list[str]:
        """All names that start with `prefix`."""
        start = bisect_left(self.names, prefix)
        end = bisect_left(self.names, prefix + "\U0010ffff", start)
        return self.names[start:end]

    def at_or_below(self, path: str) -> list[str]:
        """`path` itself and the names below it, on a dot boundary."""
        own = [path] if path in self._all else []
        return own + self.with_prefix(path + ".")

    def paths_ending_with(self, tail: str) -> list[str]:
        """Modules and what contains them whose path ends with `tail`, without regard to dots."""
        if not self._reversed:
            paths: set[str] = set()
            for name in self.names:
                while name and name not in paths:
                    paths.add(name)
                    name = name.rpartition(".")[0]
            self._reversed = sorted(path[::-1] for path in paths)
        key = tail[::-1]
        start = bisect_left(self._reversed, key)
        end = bisect_left(self._reversed, key + "\U0010ffff", start)
        return [path[::-1] for path in self._reversed[start:end]]

    def where(self, test: Callable[[str], object]) -> list[str]:
        """Names for which a pattern's `test` is true; every call counts."""
        self.pattern_evaluations += len(self.names)
        return [name for name in self.names if test(name)]


class Matcher(Protocol):
    """Answers which modules a rule names under one reading."""

    def hits(self, index: ModuleIndex) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Nothing:
    def hits(self, index: ModuleIndex) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class Exact:
    """The module of exactly this name."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        return [self.text] if self.text in index else []


@dataclass(frozen=True, slots=True)
class AtOrBelow:
    """The module of this name and all modules below it, bounded by dots."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        return index.at_or_below(self.text)


@dataclass(frozen=True, slots=True)
class Segments:
    """Modules whose path contains these dotted segments in a row, anywhere: `mlp.experts`, `gate`."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        path = self.text.strip(".")
        if not path:
            return []
        owners = [path, *index.paths_ending_with(f".{path}")]
        return sorted({name for owner in owners for name in index.at_or_below(owner)})


@dataclass(frozen=True, slots=True)
class Suffix:
    """Modules whose path ends with these dotted segments."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        own = [self.text] if self.text in index else []
        return own + [path for path in index.paths_ending_with(f".{self.text}") if path in index]


@dataclass(frozen=True, slots=True)
class EndsWith:
    """Modules whose name ends with the text, without regard to dots."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        return [path for path in index.paths_ending_with(self.text) if path in index]


@dataclass(frozen=True, slots=True)
class Contains:
    """Modules whose name contains the text anywhere.

    A dotted text that begins names of this checkpoint is looked for there only: what else it could hit it would
    hit by being repeated inside a longer path.
    """

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        rooted = index.with_prefix(self.text) if "." in self.text else []
        return rooted or index.where(lambda name: self.text in name)


@dataclass(frozen=True, slots=True)
class Everything:
    """Every module."""

    def hits(self, index: ModuleIndex) -> list[str]:
        return index.names


@dataclass(frozen=True, slots=True)
class Prefix:
    """Modules whose name starts with the text, without regard to dots."""

    text: str

    def hits(self, index: ModuleIndex) -> list[str]:
        return index.with_prefix(self.text)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Modules that a regular expression matches: `how` is "match" (from the start), "search" or "fullmatch"."""

    expression: re.Pattern[str]
    how: str = "match"

    def hits(self, index: ModuleIndex) -> list[str]:
        return index.where(getattr(self.expression, self.how))


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Modules that any of the matchers hits."""

    matchers: tuple[Matcher, ...]

    def hits(self, index: ModuleIndex) -> list[str]:
        return sorted({name for matcher in self.matchers for name in matcher.hits(index)})


def compile_regex(text: str, *, file: str, key: str) -> re.Pattern[str]:
    """Compiled `text`; raises InvalidCheckpointError naming file and key when it is no regular expression."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        raise InvalidCheckpointError(f"is not a regular expression: {exc}", file=file, key=key) from exc


def bounded_regex(text: str, *, file: str, key: str) -> Pattern:
    """The pattern, required to end where a module's path or one of its segments ends."""
    return Pattern(compile_regex(rf"(?:{text})(?:\..*)?\Z", file=file, key=key))


def glob(text: str) -> Pattern:
    """fnmatch over the whole name, as ModelOpt and Quark read their lists."""
    return Pattern(re.compile(translate(text)), "match")


def bounded_glob(text: str) -> Matcher:
    """The glob with a trailing `*` that does not cut a path segment: `layers.1*` is layer 1 and what is below."""
    if text.endswith("*") and not text.endswith((".*", "**")) and "*" not in text[:-1] and "?" not in text:
        return AtOrBelow(text[:-1])
    return glob(text)
