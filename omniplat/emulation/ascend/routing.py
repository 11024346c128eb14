"""Sorting the rows of a layer by the experts that they chose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniplat.emulation.core import Emulation


def moe_init_routing_v2(
    emulation: Emulation,
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_moe_init_routing_v2 without dropping and without quantization.

    Returns rows by expert [M * T, H], where each went (`row_idx_type` 0: int32 [M * T], -1 for experts out of range),
    int64 rows per expert (`expert_tokens_num_type` 1; 0: their cumulative sum), and a scale that means nothing. Rows
    behind the last expert are not written on the device: NaN here.
    """
    op = "npu_moe_init_routing_v2"
    require = emulation.require
    if quant_mode != -1 or drop_pad_mode or scale is not None or offset is not None or x_dtype is not None:
        raise NotImplementedError(f"{op}: quantization, scales and dropping are not emulated")
    if expert_tokens_num_type not in (0, 1) or active_num not in (-1, 0, expert_idx.numel()):
        raise NotImplementedError(f"{op}: key-value counts and a limited active_num are not emulated")
    require(op, x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8), f"x cannot be {x.dtype}")
    require(op, x.dim() == 2 and expert_idx.dim() == 2 and len(x) == len(expert_idx), "x and expert_idx are matrices")
    require(op, expert_idx.dtype == torch.int32, f"expert_idx is {expert_idx.dtype}, needed int32")
    low, high = active_expert_range or (0, expert_num)
    require(op, 0 <= low < high <= expert_num, f"active_expert_range [{low}, {high}) of {expert_num} experts")
    ids = expert_idx.reshape(-1).to(torch.int64)
    require(op, bool(((ids >= 0) & (ids < expert_num)).all()), f"an id is none of {expert_num} experts")
    active = (ids >= low) & (ids < high)
    order = torch.argsort(torch.where(active, ids, expert_num), stable=True)
    available = int(active.sum())
    rows = torch.empty((len(ids), x.shape[1]), dtype=x.dtype)
    rows.fill_(torch.nan if x.dtype.is_floating_point else 127)
    rows[:available] = x[order[:available] // expert_idx.shape[1]]
    if row_idx_type == 0:
        where = torch.full((len(ids),), -1, dtype=torch.int32)
        where[order[:available]] = torch.arange(available, dtype=torch.int32)
    else:
        where = order.to(torch.int32)
    counts = torch.bincount(ids[active] - low, minlength=high - low)
    if not expert_tokens_num_flag:
        counts = torch.empty(0, dtype=torch.int64)
    elif expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    return rows, where, counts, torch.full((len(ids),), torch.nan)
