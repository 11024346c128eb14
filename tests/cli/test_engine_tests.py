"""What `pytest tests/vllm` says where vLLM is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_every_file_is_skipped_with_a_reason() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    count = len(list((ROOT / "tests" / "vllm").glob("test_*.py")))
    assert f"SKIPPED [{count}] " in done.stdout
    assert "vLLM is not installed here: `make vllm` runs these" in done.stdout
    assert f"{count} skipped" in done.stdout
