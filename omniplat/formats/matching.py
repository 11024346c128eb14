"""Matching rules against checkpoint module names without comparing every rule with every module.

A `ModuleIndex` holds the sorted module names once. Each matcher answers with the set of names that it hits,
so literal entries cost a look-up or a bisection. Patterns are evaluated against the names that hold their literal
parts, and scan all names only where they have none.
"""

from __future__ import annotations

import re
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Protocol

from omniplat.errors import InvalidCheckpointError, UnsupportedOptionError
from omniplat.formats.patterns import MAX_STEPS, Shape

#: Seconds that the patterns of one component may take in all; the last resort.
MAX_SECONDS = 60.0
#: Names so few that looking for a smaller set of them does not pay.
_FEW = 64
#: Longest regular expression.
MAX_PATTERN = 10_000


@dataclass(slots=True)
class _Spent:
    """What the patterns of one component have cost: time, and how often one was evaluated against a name."""

    seconds: float = 0.0
    evaluations: int = 0


class ModuleIndex:
    """The module names of one component, sorted; counts how often a pattern is evaluated against a name."""

    def __init__(self, names: Iterable[str], beside: ModuleIndex | None = None) -> None:
        """Other names of the modules of `beside` count together with those."""
        self.names: list[str] = sorted(names)
        self._all = frozenset(self.names)
        self._reversed: list[str] = []
        self._spent: _Spent = _Spent() if beside is None else beside._spent

    @property
    def pattern_evaluations(self) -> int:
        return self._spent.evaluations

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def with_prefix(self, prefix: str) -> list[str]:
        """All names that start with `prefix`."""
        return _with_prefix(self.names, prefix)

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
        return [path[::-1] for path in _with_prefix(self._reversed, tail[::-1])]

    def with_lead(self, texts: tuple[str, ...]) -> list[str]:
        """Names that start with `texts`, one arbitrary character between each two."""
        leads = [texts[0]]
        for text in texts[1:]:
            leads = [f"{lead}{char}{text}" for lead in leads for char in self._next_chars(lead)]
        return [name for lead in leads for name in self.with_prefix(lead)]

    def _next_chars(self, lead: str) -> list[str]:
        """The characters that follow `lead` in names."""
        found = []
        position = bisect_left(self.names, lead)
        while position < len(self.names) and self.names[position].startswith(lead):
            name = self.names[position]
            if len(name) == len(lead):
                position += 1
                continue
            found.append(name[len(lead)])
            position = _end_of(self.names, name[: len(lead) + 1], position)
        return found

    @cached_property
    def _by_segment(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name in self.names:
            for segment in name.split("."):
                found[segment].add(name)
        return found

    def around(self, text: str) -> Iterable[str]:
        """Names of which some may contain `text`, and others do not: those that have its dotted segments."""
        first, *rest = text.split(".")
        if not rest:
            return self._of_segments(lambda segment: first in segment)
        sets = [self._by_segment.get(segment, set()) for segment in rest[:-1]]
        if first:
            sets.append(self._of_segments(lambda segment: segment.endswith(first)))
        if rest[-1]:
            sets.append(self._of_segments(lambda segment: segment.startswith(rest[-1])))
        sets.sort(key=len)
        return sets[0].intersection(*sets[1:]) if sets else self.names

    def _of_segments(self, test: Callable[[str], bool]) -> set[str]:
        found = [names for segment, names in self._by_segment.items() if test(segment)]
        return found[0] if len(found) == 1 else set().union(*found)

    @cached_property
    def _longest(self) -> tuple[int, int]:
        """Lengths of the longest name, and of the longest run of digits in one."""
        runs = (len(run) for name in self.names for run in re.findall(r"\d+", name))
        return max(map(len, self.names), default=0), max(runs, default=0)

    def require_bounded(self, shape: Shape) -> None:
        """Raise UnsupportedOptionError for an expression that could take unboundedly long on these names."""
        if shape.steps(*self._longest) > MAX_STEPS:
            text = shape.expression.pattern
            raise UnsupportedOptionError(
                f"the regular expression {text!r:.120} repeats what repeats itself: it could take hours on a name"
            )

    def where(self, test: Callable[[str], object], names: Iterable[str] | None = None) -> list[str]:
        """Those of `names`, by default all, for which a pattern's `test` is true; every call counts."""
        found = []
        start = time.monotonic()
        for name in self.names if names is None else names:
            self._spent.evaluations += 1
            if test(name):
                found.append(name)
            if self._spent.seconds + time.monotonic() - start > MAX_SECONDS:
                raise UnsupportedOptionError(f"the patterns of the rules take more than {MAX_SECONDS:.0f} s")
        self._spent.seconds += time.monotonic() - start
        return found


def _with_prefix(texts: list[str], prefix: str) -> list[str]:
    """Those of the sorted `texts` that start with `prefix`."""
    start = bisect_left(texts, prefix)
    return texts[start : _end_of(texts, prefix, start)]


def _end_of(texts: list[str], prefix: str, start: int) -> int:
    """Where those of the sorted `texts` end that start with `prefix`: before the next greater text that does not."""
    last = prefix.rstrip(_LAST)
    return bisect_left(texts, last[:-1] + chr(ord(last[-1]) + 1), start) if last else len(texts)


#: The last character that a text can have.
_LAST = chr(sys.maxunicode)


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
        return rooted or index.where(lambda name: self.text in name, index.around(self.text))


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
        """Raises UnsupportedOptionError for an expression that could take unboundedly long."""
        shape = Shape(self.expression, self.how)
        index.require_bounded(shape)
        return index.where(getattr(self.expression, self.how), _candidates(shape, index))


@dataclass(frozen=True, slots=True)
class Where:
    """Modules whose name passes a test that is no pattern of the metadata, such as the names of embeddings."""

    test: Callable[[str], bool]

    def hits(self, index: ModuleIndex) -> list[str]:
        return [name for name in index.names if self.test(name)]


@dataclass(frozen=True, slots=True)
class Except:
    """What `matcher` hits without what `without` hits."""

    matcher: Matcher
    without: Matcher

    def hits(self, index: ModuleIndex) -> list[str]:
        dropped = frozenset(self.without.hits(index))
        return [name for name in self.matcher.hits(index) if name not in dropped]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Modules that any of the matchers hits."""

    matchers: tuple[Matcher, ...]

    def hits(self, index: ModuleIndex) -> list[str]:
        return sorted({name for matcher in self.matchers for name in matcher.hits(index)})


def _candidates(shape: Shape, index: ModuleIndex) -> Iterable[str]:
    """The names that hold what every match of an expression holds."""
    lead, tail = shape.lead, shape.tail
    found: Iterable[str] = index.names
    count = len(index.names)
    if lead[0]:
        found = led = index.with_lead(lead)
        count = len(led)
    if tail and count > _FEW:
        ends = [path for end in (tail, f"{tail}\n") for path in index.paths_ending_with(end) if path in index]
        if len(ends) < count:
            found, count = ends, len(ends)
    if count > _FEW and len(inner := shape.inner) > 1:
        found = set(index.around(inner)).intersection(found)
    return found


def compile_regex(text: str, *, file: str, key: str, entry: str = "") -> re.Pattern[str]:
    """Compiled `text`; raises InvalidCheckpointError naming file and key when it is no regular expression.

    `entry` is how the metadata writes it, where that is more than the expression.
    """
    if len(text) > MAX_PATTERN:
        raise UnsupportedOptionError(f"is a regular expression of {len(text)} characters", file=file, key=key)
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as exc:
        shown = repr(entry or text)[:MAX_SHOWN]
        raise InvalidCheckpointError(f"{shown} is not a regular expression: {exc}", file=file, key=key) from exc


#: Characters of an entry that a message shows.
MAX_SHOWN = 120

#: Flags of a whole expression stand at its start, and nowhere else.
_FLAGS = re.compile(r"(?:\(\?[aimsux]+\))*")


def bounded_regex(text: str, *, file: str, key: str) -> Pattern:
    """The pattern, required to end where a module's path or one of its segments ends."""
    match = _FLAGS.match(text)
    flags = match.group() if match is not None else ""
    bounded = rf"{flags}(?:{text.removeprefix(flags)})(?:\..*)?\Z"
    return Pattern(compile_regex(bounded, file=file, key=key, entry=text))


def glob(text: str) -> Pattern:
    """fnmatch over the whole name, as ModelOpt and Quark read their lists."""
    return Pattern(re.compile(translate(text)), "match")


def bounded_glob(text: str) -> Matcher:
    """The glob with a trailing `*` that does not cut a path segment: `layers.1*` is layer 1 and what is below."""
    if text.endswith("*") and not text.endswith((".*", "**")) and "*" not in text[:-1] and "?" not in text:
        return AtOrBelow(text[:-1])
    return glob(text)
