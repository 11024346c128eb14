"""A TensorQuant as text: a constant of a traced graph, and part of a kernel's config."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from omniplat.scheme import TensorQuant


def encode_quant(quant: TensorQuant) -> str:
    """All fields of `quant` as JSON: its id alone would lose the rules by which values are quantized."""
    return msgspec.json.encode(quant, order="sorted").decode()


@lru_cache(maxsize=256)
def decode_quant(text: str) -> TensorQuant:
    """The inverse of `encode_quant`."""
    return msgspec.json.decode(text.encode(), type=TensorQuant)
