"""Stands in for torchvision where only its names are imported: every use of one raises."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

__version__ = "0.28.0"


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"torchvision.{name} is not available in this environment")

    return type(name, (), {"__init__": refuse})
