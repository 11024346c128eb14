"""How a function of `suite/` becomes the checks of a group: one for each case that its generator yields.

Checks take their subject and case as parameters, not as fixtures: nothing outside the suite can replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from omniplat.capability import Capability
from omniplat.conformance.subject import Obstacle, Subject

#: Groups, in the order in which they run.
GROUPS: tuple[str, ...] = (
    "manifest",
    "undeclared",
    "declared",
    "boundary",
    "contract",
    "packing",
    "split",
    "load",
    "online",
    "numerics",
)
#: The function attribute that holds a `Check`.
ATTRIBUTE = "omniplat_check"


class HasId(Protocol):
    """What a generator yields."""

    @property
    def id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Named:
    """A case that is no layer: a name, the capability it is about (None: the backend), and what the check reads."""

    id: str
    capability: Capability | None = None
    value: Any = None


Generator = Callable[[Subject, str], Iterable[HasId]]
F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Check:
    """`generate` takes the subject and the profile. `runs` is True where kernels run, and False where data is read."""

    group: str
    generate: Generator
    runs: bool = True


def check(group: str, generate: Generator, *, runs: bool = True) -> Callable[[F], F]:
    """Mark a function of the suite as a check of `group`."""
    assert group in GROUPS, group

    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, Check(group, generate, runs))
        return function

    return mark


def capability_of(case: object) -> Capability | None:
    return getattr(case, "capability", None)


def obstacle_of(found: Check, subject: Subject, case: object) -> Obstacle | None:
    """Why a check cannot run here; None where it can."""
    capability = capability_of(case)
    if not found.runs:
        return None
    if capability is not None:
        return subject.obstacle(capability)
    return Obstacle("no-device", f"no device: {subject.missing}") if subject.missing else None


def backend(subject: Subject, profile: str) -> Iterable[Named]:
    """One case: the backend itself."""
    return [Named(subject.spec.name)]


def capabilities(subject: Subject, profile: str) -> Iterable[Named]:
    """One case per capability."""
    return [Named(item.name, item) for item in subject.spec.capabilities]


#: How a skip that the suite itself decides begins: by whether it leaves the run partial. Any other skip does.
SUITE_SKIP: dict[bool, str] = {True: "[gap] ", False: "[not here] "}


def not_here(reason: str) -> NoReturn:
    """Skip a check that this installation cannot run, for a reason that says nothing about the backend."""
    import pytest

    pytest.skip(f"{SUITE_SKIP[False]}{reason}")
