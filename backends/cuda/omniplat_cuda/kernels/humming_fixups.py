"""Schedules of humming's heuristics that are known to be wrong, and what takes their place. Data: imports nothing.

Both come from vLLM's fused_humming_moe.py, where they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Change = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fixup:
    """`change` gives the fields of a schedule that are replaced, none where it is right.

    `gemm_types` and `input_bits` say where it is asked.
    """

    gemm_types: tuple[str, ...]
    input_bits: tuple[int, ...]
    change: Change
    reason: str


def _shorter_block(schedule: Mapping[str, Any]) -> dict[str, Any]:
    rows, columns, depth = schedule["block_shape"]
    warp_rows, warp_columns, warp_depth = schedule["warp_shape"]
    if depth <= 128 or not schedule.get("use_tma"):
        return {}
    return {"block_shape": (rows, columns, 128), "warp_shape": (warp_rows, warp_columns, min(warp_depth, 128))}


def _wider_warp(schedule: Mapping[str, Any]) -> dict[str, Any]:
    rows, columns, depth = schedule["warp_shape"]
    # four warps side by side form the group that a WGMMA needs
    if columns >= 32 or schedule["block_shape"][1] % 128:
        return {}
    return {"warp_shape": (rows, 32, depth)}


FIXUPS = (
    Fixup(
        ("indexed",),
        (8, 16),
        _shorter_block,
        "the driver refuses TMA descriptors of tiles of 256 columns of K: CUDA_ERROR_MISALIGNED_ADDRESS",
    ),
    Fixup(("indexed",), (8,), _wider_warp, "outputs of 8-bit inputs by warps of 16 columns were wrong"),
)


def fixed(schedule: Mapping[str, Any], gemm_type: str, input_bits: int) -> dict[str, Any]:
    """A schedule, with what is known to be wrong replaced."""
    result = dict(schedule)
    for fixup in FIXUPS:
        if gemm_type in fixup.gemm_types and input_bits in fixup.input_bits:
            result |= fixup.change(result)
    return result
