"""These tests run in the environment that `environment.sh` builds; elsewhere there is nothing to collect."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def one_rank() -> None:
    """vLLM's process group of one, in this process."""
    from tests.vllm.engine import free_port, start

    start(0, 1, free_port())
