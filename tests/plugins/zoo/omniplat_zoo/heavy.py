"""A declaration that imports torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from omniplat_zoo.spec import CORRECT

SPEC = replace(CORRECT, name="zoo-heavy", install=f"made with torch {torch.__version__}")
