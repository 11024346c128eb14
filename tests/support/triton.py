"""Where Triton's kernels can run: on a CUDA device, or anywhere under its interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

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
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
#: Where Triton's form of something runs.
TRITON_DEVICE = "cpu" if INTERPRETED else "cuda"
