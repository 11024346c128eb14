"""vLLM's Marlin: tiles of codes in 4 and 8 bits, and the product that decodes them.

From csrc/libtorch_stable/quantization/marlin of vllm-project/vllm: gptq_marlin_repack.cu for the tiles, marlin.cu for
checks, generate_kernels.py for what exists, marlin_template.h and dequant.h for the arithmetic. Orders of scales are
the lists of marlin_utils.py, inverted. Sums are f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from omniplat.emulation.core import Emulation
from omniplat.emulation.microscaling import e2m1_values, e8m0_values

#: Rows along K and columns along N of a tile.
_TILE_K, _TILE_N = 16, 64
#: Multiprocessors of the emulated device (H200): the least number of locks.
_PROCESSORS = 132
_HALF = (torch.float16, torch.bfloat16)
_PAIRS = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
_EIGHTHS = tuple(i + 8 * j for i in range(8) for j in range(8))
_MIDDLE_SWAPPED = (0, 2, 1, 3)
_EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A format of weights: bits of a code, groups that kernels exist for, in 16 columns (-1: one scale per row), and
    dtypes of inputs."""

    name: str
    bits: int
    groups: tuple[int, ...]
    inputs: tuple[torch.dtype, ...] = _HALF


#: (vLLM's number of the format, dtype of its scales) -> what kernels there are.
_KINDS: Mapping[tuple[int, torch.dtype | None], _Kind] = MappingProxyType(
    {
        (1125899906843648, None): _Kind("uint4", 4, (-1, 2, 4, 8)),
        (1125899907892224, None): _Kind("uint4b8", 4, (-1, 2, 4, 8)),
        (1125899923621888, None): _Kind("uint8b128", 8, (-1, 2, 4, 8)),
        (2814749767172868, None): _Kind("fp8", 8, (-1, 8)),
        (2814749767172868, torch.float8_e8m0fnu): _Kind("mxfp8", 8, (2,), (torch.bfloat16,)),
        (562949953487106, torch.float8_e8m0fnu): _Kind("mxfp4", 4, (2,), (torch.bfloat16,)),
        (562949953487106, torch.float8_e4m3fn): _Kind("nvfp4", 4, (1,)),
    }
)


def gptq_marlin_repack(
    emulation: Emulation, b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> torch.Tensor:
    """Words of codes along K [K * bits / 32, N] to tiles [K / 16, N * bits / 2]."""
    op = "_C::gptq_marlin_repack"
    emulation.require(op, not is_a_8bit, "tiles for inputs in 8 bits are not emulated")
    emulation.require(op, num_bits in (4, 8), f"num_bits must be 4 or 8. Got = {num_bits}")
    emulation.require(op, size_k % _TILE_K == 0, f"size_k = {size_k} is not divisible by tile_k_size = {_TILE_K}")
    emulation.require(op, size_n % _TILE_N == 0, f"size_n = {size_n} is not divisible by tile_n_size = {_TILE_N}")
    shape = (size_k * num_bits // 32, size_n)
    emulation.require(op, tuple(b_q_weight.shape) == shape, f"Shape mismatch: {list(b_q_weight.shape)} for {shape}")
    emulation.require(op, b_q_weight.is_contiguous(), "b_q_weight is not contiguous")
    emulation.require(op, b_q_weight.dtype == torch.int32, "b_q_weight type is not kInt")
    codes = _unpacked(b_q_weight.t(), num_bits).t()
    tiles = codes.reshape(size_k // _TILE_K, _TILE_K, size_n // _TILE_N, _TILE_N).transpose(1, 2).flatten(2)
    taken = tiles[:, :, _positions(num_bits)].view(size_k // _TILE_K, -1, 32 // num_bits)
    return _packed(taken, num_bits)


def _positions(bits: int) -> torch.Tensor:
    """For each code of a tile's words, from the lowest bits on, where it lies in the tile: 64 k + n."""
    order = _EVEN_FIRST if bits == 4 else _MIDDLE_SWAPPED
    places: dict[int, list[int]] = {}
    for warp in range(4):
        for thread in range(32):
            column, row = 16 * warp + thread // 4, 2 * (thread % 4)
            halves = [[_TILE_N * (row + step) + column + shift for step in (0, 1, 8, 9)] for shift in (0, 8)]
            if bits == 4:
                places[4 * thread + warp] = [(halves[0] + halves[1])[i] for i in order]
            else:
                for index, half in enumerate(halves):
                    places[8 * thread + 2 * warp + index] = [half[i] for i in order]
    return torch.tensor([place for word in sorted(places) for place in places[word]])


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W] to codes, int32 [..., W * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W, 32 / bits] to words int32 [..., W]."""
    words = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for index in range(codes.shape[-1]):
        words |= codes[..., index].to(torch.int64) << bits * index
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def marlin_gemm(
    emulation: Emulation,
    a: torch.Tensor,
    c_or_none: torch.Tensor | None,
    b_q_weight: torch.Tensor,
    b_bias_or_none: torch.Tensor | None,
    b_scales: torch.Tensor,
    a_scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    b_zeros_or_none: torch.Tensor | None,
    workspace: torch.Tensor,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
    use_atomic_add: bool,
    use_fp32_reduce: bool,
    is_zp_float: bool,
) -> torch.Tensor:
    """`a` [M, K] in 16 bits by the weight in tiles, scales [G, N] in their order: [M, N]."""
    op = "_C::marlin_gemm"
    forms = (c_or_none is None, a_scales is None, not use_atomic_add, use_fp32_reduce, not is_zp_float)
    emulation.require(op, all(forms), "only products of 16-bit inputs into a tensor of their own are emulated")
    kind = _kind_of(emulation, op, b_type_id, b_scales)
    _require_input(emulation, op, a, size_m, size_k, kind)
    _require_weight(emulation, op, b_q_weight, b_scales, size_n, size_k, kind)
    same = b_scales.element_size() == 1 or b_scales.dtype == a.dtype
    emulation.require(op, same, f"b_scales are {b_scales.dtype} and read as {a.dtype}")
    for name, given, owner in (("b_zeros", b_zeros_or_none, "uint4"), ("global_scale", global_scale, "nvfp4")):
        emulation.require(op, (given is not None) == (kind.name == owner), f"{name} is for {owner}, which needs it")
    emulation.require(op, workspace.numel() >= _PROCESSORS, f"workspace.numel is below {_PROCESSORS}")
    if workspace.dtype != torch.int32 or bool((workspace != 0).any()):
        emulation.record(op, "locks-taken", "blocks wait for ever where the workspace is not zero")
    if size_m == 0:
        return a.new_empty((0, size_n))
    codes = _codes(b_q_weight, size_k, size_n, kind.bits)
    scale = _scales(b_scales, kind.name)
    y = _product(a, codes, scale, b_zeros_or_none, kind)
    if global_scale is not None:
        y = y * (global_scale.to(torch.float32) * 2.0 ** -(119 if a.dtype == torch.bfloat16 else 7))
    y = y.to(a.dtype)
    if b_bias_or_none is not None:
        bias = b_bias_or_none
        emulation.require(op, bias.is_contiguous() and tuple(bias.shape) == (size_n,), "b_bias.size(0) != size_n")
        if bias.dtype != a.dtype:
            emulation.record(op, "bias-dtype", f"b_bias is {bias.dtype} and read as {a.dtype}")
        y = y + _restored(bias.unsqueeze(0), _PAIRS)
    return y


def _kind_of(emulation: Emulation, op: str, type_id: int, scales: torch.Tensor) -> _Kind:
    eight = scales.dtype if scales.element_size() == 1 else None
    kind = _KINDS.get((type_id, eight))
    emulation.require(op, kind is not None, f"no kernel for type {type_id} with scales in {scales.dtype}")
    assert kind is not None
    return kind


def _require_weight(
    emulation: Emulation,
    op: str,
    words: torch.Tensor,
    scales: torch.Tensor,
    size_n: int,
    size_k: int,
    kind: _Kind,
) -> None:
    emulation.require(op, scales.dim() == 2 and scales.shape[1] == size_n, f"b_scales is {list(scales.shape)}")
    emulation.require(op, scales.is_contiguous(), "b_scales is not contiguous")
    tiles = (size_k // _TILE_K, size_n * kind.bits // 2)
    emulation.require(op, tuple(words.shape) == tiles, f"b_q_weight is {list(words.shape)}, not {tiles}")
    emulation.require(op, words.is_contiguous(), "b_q_weight is not contiguous")
    fits = (size_k % 128 == 0 and size_n % 64 == 0) or (size_k % 64 == 0 and size_n % 128 == 0)
    blocks = size_k // len(scales) // 16 if len(scales) > 1 else -1
    emulation.require(op, fits and blocks in kind.groups, f"Unsupported shapes: N, K = [{size_n}, {size_k}], {blocks}")


def _require_input(emulation: Emulation, op: str, a: torch.Tensor, size_m: int, size_k: int, kind: _Kind) -> None:
    emulation.require(op, tuple(a.shape) == (size_m, size_k), f"Shape mismatch: a is {list(a.shape)}")
    emulation.require(op, a.dtype in kind.inputs, f"{kind.name} takes {kind.inputs}, found {a.dtype}")
    emulation.require(op, a.stride(1) == 1, "A.stride(1) is not 1")
    emulation.require(op, a.stride(0) % 8 == 0, "A.stride(0) must divisible by 8")
    emulation.require(op, a.data_ptr() % 16 == 0, "A must aligned to 16 bytes")


def _product(
    a: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, kind: _Kind
) -> torch.Tensor:
    """f32 [M, N]. Weights of groups are rounded to the input's dtype; one scale per row multiplies the sum, of codes in
    4 bits once that was rounded."""
    groups, size_n = scale.shape
    length = len(codes) // groups
    if kind.name == "fp8":
        scale = scale * 2.0 ** -(120 if a.dtype == torch.bfloat16 else 8)
    values = _values(codes, kind.name)
    if zeros is not None:
        points = _restored(_restored(_unpacked(zeros, 4), _EVEN_FIRST), _EIGHTHS)
        values = values - points.to(torch.float32).repeat_interleave(length, dim=0)
    x = a.to(torch.float32)
    if groups > 1:
        weight = values * scale.repeat_interleave(length, dim=0)
        return x @ weight.to(a.dtype).to(torch.float32)
    y = x @ values
    return (y if kind.bits == 8 else y.to(a.dtype).to(torch.float32)) * scale.view(1, size_n)


def _codes(tiles: torch.Tensor, size_k: int, size_n: int, bits: int) -> torch.Tensor:
    """Tiles to codes, int32 [K, N]."""
    flat = _unpacked(tiles, bits).view(size_k // _TILE_K, size_n // _TILE_N, _TILE_K * _TILE_N)
    places = torch.empty_like(flat)
    places[:, :, _positions(bits)] = flat
    return places.view(-1, size_n // _TILE_N, _TILE_K, _TILE_N).transpose(1, 2).reshape(size_k, size_n)


def _values(codes: torch.Tensor, name: str) -> torch.Tensor:
    """f32 numbers of codes."""
    if name in ("mxfp4", "nvfp4"):
        return e2m1_values(codes)
    if name in ("fp8", "mxfp8"):
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return codes.to(torch.float32) - {"uint4": 0.0, "uint4b8": 8.0, "uint8b128": 128.0}[name]


def _scales(stored: torch.Tensor, name: str) -> torch.Tensor:
    """f32 [G, N] in the order of rows; NVFP4's still raised."""
    if stored.element_size() == 2:
        return _restored(stored, _EIGHTHS if len(stored) > 1 else _PAIRS).to(torch.float32)
    held = _restored(_restored(stored.view(torch.uint8), _MIDDLE_SWAPPED), _EIGHTHS)
    if name != "nvfp4":
        return e8m0_values(held)
    # One more bit of exponent than e4m3 and no sign: the upper byte of f16, shifted by one.
    return (held.to(torch.int16) << 7).view(torch.float16).to(torch.float32) * 2.0**-7


def _restored(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Undo an order of runs of the last dimension: what was at `order[i]` of each run lies at i."""
    runs = values.reshape(-1, len(order))
    places = torch.empty_like(runs)
    places[:, torch.tensor(order)] = runs
    return places.view(values.shape)
