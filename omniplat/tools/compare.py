"""What `omniplat compare` says of two sides: figures of what both have, and what only one has or has differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Figures = TypeVar("Figures")


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Something that was not compared, and why: one side lacks it, or has it in another size."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison(Generic[Figures]):
    """The figures of everything that both sides have, and what could not be compared."""

    items: tuple[Figures, ...]
    unmatched: tuple[Unmatched, ...]


def in_both(a: Mapping[str, T], b: Mapping[str, T], unmatched: list[Unmatched]) -> Iterator[tuple[str, T, T]]:
    """Name, A's and B's item of what both have, in A's order; what one of them lacks is added to `unmatched`."""
    for name, item in a.items():
        if name in b:
            yield name, item, b[name]
        else:
            unmatched.append(Unmatched(name, "only in A"))
    unmatched += [Unmatched(name, "only in B") for name in b if name not in a]
