"""The releases of torch-npu that the backend asks for are those that the emulation can run."""

from __future__ import annotations

import pytest
from omniplat_ascend.spec import SPEC
from packaging.requirements import Requirement
from packaging.version import Version

from omniplat.emulation.ascend import OPERATORS, VENDOR
from omniplat.emulation.schemas import of_version
from tests.packaging.pyproject import read


def torch_npu(requirements: tuple[str, ...]) -> Requirement:
    (found,) = (item for item in map(Requirement, requirements) if item.name == VENDOR.library)
    return found


def test_the_backend_takes_every_release_that_is_emulated() -> None:
    specifier = torch_npu(SPEC.distributions).specifier
    assert [version for version in VENDOR.known if not specifier.contains(version)] == []


def test_the_oldest_release_that_is_asked_for_is_emulated() -> None:
    """A lower bound below it would state a range that nothing here has seen."""
    (lowest,) = (item.version for item in torch_npu(SPEC.distributions).specifier if item.operator == ">=")
    assert Version(lowest).release[:2] == min(map(Version, VENDOR.known)).release[:2]


def test_the_extra_installs_what_the_backend_asks_for() -> None:
    assert torch_npu(tuple(read()["project"]["optional-dependencies"]["ascend"])) == torch_npu(SPEC.distributions)


@pytest.mark.parametrize("version", VENDOR.known)
def test_every_emulated_release_has_every_operator(version: str) -> None:
    assert {schema.qualified for schema in of_version(VENDOR.schemas, version)} == set(OPERATORS)
