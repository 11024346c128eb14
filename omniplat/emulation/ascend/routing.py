"""Sorting the rows of a layer by the experts that they chose, and adding up what those made of them."""

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


def moe_finalize_routing(
    emulation: Emulation,
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """npu_moe_finalize_routing: out[i] = sum over k of scales[i, k] * rows[where the k-th choice of token i went].

    `expanded_src_to_dst_row` int32 [M * T] is ordered by choices (`drop_pad_mode` 0 and 1) or by tokens (2 and 3). Rows
    are [M * T, H] where all of them are there (0 and 2), and [experts, capacity, H] where -1 says that one is not.
    """
    op = "npu_moe_finalize_routing"
    require = emulation.require
    mode = drop_pad_mode or 0
    require(op, mode in (0, 1, 2, 3), f"drop_pad_mode {mode} is none of 0 to 3")
    if skip1 is not None or skip2 is not None or bias is not None or scales is None:
        raise NotImplementedError(f"{op}: what is added to the sum, and sums without scales, are not emulated")
    rows, where = expanded_permuted_rows, expanded_src_to_dst_row
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    require(op, rows.dtype in kinds, f"expanded_permuted_rows cannot be {rows.dtype}")
    mixed = rows.dtype == torch.bfloat16 and scales.dtype == torch.float32
    fits = scales.dtype == rows.dtype or mixed or emulation.arch == "a5"
    require(op, fits, f"scales is {scales.dtype}, rows {rows.dtype}")
    require(op, scales.dim() == 2, f"scales is {list(scales.shape)}, needed [M, T]")
    tokens, choices = scales.shape
    fits = where.dtype == torch.int32 and tuple(where.shape) == (tokens * choices,)
    require(op, fits, f"expanded_src_to_dst_row is {where.dtype} {list(where.shape)}, needed int32 [M * T]")
    padded = mode in (1, 3)
    require(op, rows.dim() == (3 if padded else 2), f"rows are {list(rows.shape)} in drop_pad_mode {mode}")
    require(op, not padded or rows.shape[0] >= choices, f"{rows.shape[0]} experts for {choices} choices")
    flat = rows.reshape(-1, rows.shape[-1])
    require(op, padded or flat.shape[0] == tokens * choices, f"rows are {list(rows.shape)}, needed [M * T, H]")
    lowest = -1 if padded else 0
    inside = bool(((where >= lowest) & (where < flat.shape[0])).all())
    require(op, inside, f"expanded_src_to_dst_row leaves [{lowest}, {flat.shape[0]})")
    index = where.reshape(choices, tokens).t() if mode in (0, 1) else where.reshape(tokens, choices)
    y = torch.zeros((tokens, flat.shape[1]))
    for choice in range(choices):
        found = flat[index[:, choice].clamp(min=0).to(torch.int64)].to(torch.float32)
        # A row that is not there counts as zeros, whatever lies in the first one.
        found = torch.where(index[:, choice].unsqueeze(1) >= 0, found, 0.0)
        y = y + scales[:, choice].to(torch.float32).unsqueeze(1) * found
    return y.to(rows.dtype)
