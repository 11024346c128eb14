"""AITER's layouts of weights and scales, and their inverses. From aiter/ops/shuffle.py of ROCm/aiter at e4048607."""

from __future__ import annotations

import hashlib

import torch

from omniplat.emulation.core import Emulation

#: What the emulation finds where AITER leaves memory uninitialised: e8m0's NaN.
UNINITIALISED = 0xFF


def padded_scales(rows: int, groups: int) -> tuple[int, int]:
    """The shape of shuffled scales: rows in multiples of 256, groups in multiples of 8."""
    return -(-rows // 256) * 256, -(-groups // 8) * 8


def shuffle_weight_bytes(x: torch.Tensor, layout: tuple[int, int]) -> torch.Tensor:
    """uint8 [..., N, B] in tiles of `layout`: N a multiple of its first number, B of twice its second."""
    high, wide = layout
    *lead, rows, columns = x.shape
    tiles = x.reshape(-1, rows // high, high, columns // (2 * wide), 2 * wide // 16, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(*lead, rows, columns)


def unshuffle_weight_bytes(x: torch.Tensor, layout: tuple[int, int] = (16, 16)) -> torch.Tensor:
    """The inverse of `shuffle_weight_bytes`."""
    high, wide = layout
    *lead, rows, columns = x.shape
    tiles = x.reshape(-1, rows // high, columns // (2 * wide), 2 * wide // 16, high, 16)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(*lead, rows, columns)


def interleave_gate_up(x: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ...], gate rows first, with 16 rows of gate and 16 of up in turns. `I` is a multiple of 16."""
    experts, rows = x.shape[:2]
    return x.reshape(experts, 2, rows // 32, 16, -1).transpose(1, 2).reshape(x.shape)


def separate_gate_up(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_gate_up`."""
    experts, rows = x.shape[:2]
    return x.reshape(experts, rows // 32, 2, 16, -1).transpose(1, 2).reshape(x.shape)


def shuffle_scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [M, G] in the order that the MX products read, padded; padding is `UNINITIALISED`."""
    rows, groups = padded_scales(*scale.shape)
    held = torch.full((rows, groups), UNINITIALISED, dtype=torch.uint8)
    held[: scale.shape[0], : scale.shape[1]] = scale
    return tile_scale_bytes(held)


def tile_scale_bytes(held: torch.Tensor) -> torch.Tensor:
    """uint8 [M, G], whole tiles of 32 x 8, in the order that the MX products read."""
    rows, groups = held.shape
    return held.reshape(rows // 32, 2, 16, groups // 8, 2, 4).permute(0, 3, 5, 2, 4, 1).reshape(rows, groups)


def unshuffle_scale_bytes(scale: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The first `rows` and `groups` of what `shuffle_scale_bytes` was given."""
    high, wide = scale.shape
    tiles = scale.reshape(high // 32, wide // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2)
    return tiles.reshape(high, wide)[:rows, :groups]


def shuffle_weight(
    emulation: Emulation,
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    use_int4: bool = False,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> torch.Tensor:
    """A copy in tiles, marked by the attribute `is_shuffled`, which does not survive `.to`, `.view` or a Parameter; the
    emulation remembers its bytes beside it."""
    op = "aiter.ops.shuffle.shuffle_weight"
    emulation.require(op, not use_int4 and not is_guinterleave, "only the plain layout is emulated")
    emulation.require(op, x.element_size() == 1, f"only elements of one byte are emulated, found {x.dtype}")
    high, wide = layout[0], 2 * layout[1]
    emulation.require(op, x.shape[-2] % high == 0, f"{x.shape[-2]} % {high} == {x.shape[-2] % high}")
    emulation.require(op, x.shape[-1] % wide == 0, f"{x.shape[-1]} % {wide} == {x.shape[-1] % wide}")
    emulation.require(op, x.is_contiguous(), "view size is not compatible with input tensor's size and stride")
    shuffled = shuffle_weight_bytes(x.view(torch.uint8), layout).view(x.dtype)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    emulation.laid_out.add((tuple(layout), _digest(shuffled)))
    return shuffled


def note_unshuffled(emulation: Emulation, op: str, weight: torch.Tensor) -> None:
    """Record a weight that `shuffle_weight` has not laid out in tiles of 16 x 16, which products read all the same."""
    if ((16, 16), _digest(weight)) not in emulation.laid_out:
        emulation.record(op, "weight-not-shuffled", f"a weight {list(weight.shape)} in no tiles is read in tiles")


def _digest(x: torch.Tensor) -> bytes:
    return hashlib.blake2b(x.detach().contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


def shuffle_weight_a16w4(emulation: Emulation, src: torch.Tensor, NLane: int, gate_up: bool) -> torch.Tensor:
    """The layout of the products that take gate and up in turns: [E, N, B] in tiles of 16 x 16, of w1 (`gate_up`) after
    `interleave_gate_up`. Marked by `is_shuffled`."""
    op = "aiter.ops.shuffle.shuffle_weight_a16w4"
    emulation.require(op, NLane == 16, f"only 16 lanes are emulated, found {NLane}")
    emulation.require(op, src.element_size() == 1, f"only elements of one byte are emulated, found {src.dtype}")
    emulation.require(op, src.dim() == 3, f"not enough values to unpack: {list(src.shape)}")
    rows, columns = src.shape[1:]
    whole = rows % (32 if gate_up else 16) == 0 and columns % 64 == 0
    emulation.require(op, whole and src.is_contiguous(), f"shape is invalid for input of size {src.numel()}")
    held = src.view(torch.uint8)
    shuffled = shuffle_weight_bytes(interleave_gate_up(held) if gate_up else held, (16, 16)).view(src.dtype)
    shuffled.is_shuffled = True  # type: ignore[attr-defined]
    return shuffled


def shuffle_scale_a16w4(emulation: Emulation, src: torch.Tensor, experts_cnt: int, gate_up: bool) -> torch.Tensor:
    """e8m0 scales [E * N, G] for weights of `shuffle_weight_a16w4`, without padding."""
    op = "aiter.ops.shuffle.shuffle_scale_a16w4"
    emulation.require(op, src.dim() == 2, "scale must be a 2D tensor")
    emulation.require(op, src.element_size() == 1, f"only e8m0 scales are emulated, found {src.dtype}")
    rows, groups = src.shape[0] // experts_cnt, src.shape[1]
    emulation.require(op, rows % 32 == 0 and groups % 8 == 0, f"shape is invalid for input of size {src.numel()}")
    held = src.view(torch.uint8).view(experts_cnt, rows, groups)
    ordered = interleave_gate_up(held) if gate_up else held
    return tile_scale_bytes(ordered.reshape(-1, groups)).view(src.dtype)


def e8m0_shuffle(emulation: Emulation, scale: torch.Tensor) -> torch.Tensor:
    """e8m0 scales [M, G], shuffled and padded."""
    op = "aiter.utility.fp4_utils.e8m0_shuffle"
    emulation.require(op, scale.dim() == 2, "scale must be a 2D tensor")
    emulation.require(op, scale.element_size() == 1, f"only e8m0 scales are emulated, found {scale.dtype}")
    return shuffle_scale_bytes(scale.view(torch.uint8)).view(scale.dtype)
