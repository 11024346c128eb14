"""Where Triton's kernels can run: on a CUDA device, or anywhere under its interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniplat.portable.quantize import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = [
    pytest.mark.skipif(not has_triton(), reason="triton is not installed"),
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device, and TRITON_INTERPRET is not 1"
    ),
]
#: Triton's compiler and what binds arguments for it, which need no device, and which the interpreter stands in for.
needs_compiler = pytest.mark.skipif(
    INTERPRETED or not has_triton(),
    reason="interpreted: test_without_the_interpreter runs it" if has_triton() else "triton is not installed",
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
#: Where Triton's form of something runs.
TRITON_DEVICE = "cpu" if INTERPRETED else "cuda"


def run_without_interpreter(file: str) -> None:
    """Run the tests of `file` in a process without the interpreter; to be called where this one has it."""
    if not has_triton():
        pytest.skip("triton is not installed")
    if not INTERPRETED:
        pytest.skip("the tests above ran in this very process")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout, done.stdout[-4000:]
    assert needs_compiler.kwargs["reason"] not in done.stdout, done.stdout[-4000:]
