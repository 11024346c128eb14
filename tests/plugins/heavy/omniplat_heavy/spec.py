"""A backend that imports torch where only data belongs. It works, and costs whoever loads it."""

from __future__ import annotations

import torch

from omniplat.backend import BackendSpec

SPEC = BackendSpec(
    name="heavy", api_version=1, kinds=("cpu",), capabilities=(), install=f"made with torch {torch.__version__}"
)
