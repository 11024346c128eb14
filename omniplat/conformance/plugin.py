"""The pytest plugin, loaded by pytest wherever omniplat is installed: it adds options and waits.

Without `--omniplat-backend` it changes nothing and imports nothing. With it, the functions of `omniplat.conformance`'s
suite become checks of that backend, and a report is kept. Nothing else of a run is touched.
"""

from __future__ import annotations

import pytest

#: The name under which a running session is registered with pytest.
SESSION = "omniplat-conformance-session"
#: What marks a function as one of the suite's; the same as `checks.ATTRIBUTE`, which is not imported here.
_ATTRIBUTE = "omniplat_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("omniplat", "conformance of omniplat backends")
    group.addoption("--omniplat-backend", metavar="NAME", help="the backend that the conformance suite examines")
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
