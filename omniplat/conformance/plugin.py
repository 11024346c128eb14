"""The pytest plugin, loaded by pytest wherever omniplat is installed: it adds options and waits.

Without `--omniplat-backend` it changes nothing and imports nothing. With it, the functions of `omniplat.conformance`'s
suite become checks of that backend, and a report is kept. Nothing else of a run is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omniplat.emulation import Emulation

#: The name under which a running session is registered with pytest.
SESSION = "omniplat-conformance-session"
#: What marks a function as one of the suite's; the same as `checks.ATTRIBUTE`, which is not imported here.
_ATTRIBUTE = "omniplat_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("omniplat", "conformance of omniplat backends")
    group.addoption("--omniplat-backend", metavar="NAME", help="the backend that the conformance suite examines")
    group.addoption("--omniplat-emulate", metavar="D", help="emulate this device on the CPU, such as npu:a5")
    group.addoption("--omniplat-profile", metavar="P", default="full", help="full (default) or quick")
    group.addoption("--omniplat-report", metavar="FILE", help="write the report there, as JSON")
    group.addoption("--omniplat-known-failures", metavar="FILE", help="TOML: failures that are known")
    group.addoption("--omniplat-commit", metavar="ID", default="", help="the commit that the report is about")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--omniplat-backend")
    if not name:
        return
    from omniplat.conformance.session import start

    config.pluginmanager.register(start(config, name), SESSION)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not hasattr(metafunc.function, _ATTRIBUTE):
        return
    session = metafunc.config.pluginmanager.get_plugin(SESSION)
    if session is None:
        raise pytest.UsageError("the conformance suite needs a backend: --omniplat-backend NAME")
    session.generate(metafunc)


@pytest.fixture
def omniplat_emulate() -> Iterator[Callable[[str], Emulation]]:
    """`omniplat_emulate("npu:a5")` emulates a device until the test ends, which fails if calls were silently wrong."""
    from omniplat.emulation import emulate

    started: list[Emulation] = []
    with ExitStack() as stack:

        def start(device: str) -> Emulation:
            started.append(stack.enter_context(emulate(device)))
            return started[-1]

        yield start
        found = [violation for emulation in started for violation in emulation.violations]
    assert not found, "the vendor would silently get this wrong: " + "; ".join(map(str, found))
