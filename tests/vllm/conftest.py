"""These tests run in the environment that `environment.sh` builds; elsewhere every file says why it is skipped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

REASON = "vLLM is not installed here: `make vllm` runs these in an environment of their own"


class _NotRun(pytest.Module):
    """A file of tests that is not imported: what it imports is not there."""

    def collect(self) -> NoReturn:
        pytest.skip(REASON, allow_module_level=True)


if find_spec("vllm") is None:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _NotRun.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def one_rank() -> None:
    """vLLM's process group of one, in this process."""
    from tests.vllm.engine import free_port, start

    start(0, 1, free_port())
