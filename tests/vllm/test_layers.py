"""vLLM's real layers run omniplat's: with one rank, and with two processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import four_bit_checks, moving_checks, scheme_checks
from tests.vllm.checks import ALONE, CHECKS, SHARED
from tests.vllm.engine import free_port

ANYWHERE = CHECKS | four_bit_checks.CHECKS | scheme_checks.CHECKS
#: vllm-omni is imported by the last ones.
WITH_TWO = SHARED | four_bit_checks.SHARED | moving_checks.SHARED


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes says of every check."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    script = Path(__file__).with_name("worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(port), str(folder)], env=environment)
        for rank in (0, 1)
    ]
    try:
        for worker in workers:
            worker.wait(timeout=900)
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", [*ANYWHERE, *ALONE])
def test_one_rank(name: str, one_rank: None, tmp_path: Path) -> None:
    (ANYWHERE | ALONE)[name](0, 1, tmp_path)


@pytest.mark.parametrize("name", [*ANYWHERE, *WITH_TWO])
def test_two_ranks(name: str, two_ranks: list[dict[str, str]]) -> None:
    for rank, results in enumerate(two_ranks):
        assert name in results, f"rank {rank} did not get there"
        assert results[name] == "", f"rank {rank}:\n{results[name]}"
