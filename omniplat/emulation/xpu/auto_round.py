"""Weight-only products of auto-round-lib 0.16.0 on Xe2, as its sources have them: checks, packing and numerics.

From auto_round_kernel/__init__.py of the wheel, and wrapper/include/xpu_wrapper.hpp of intel/auto-round at 03f03075. On
the CPU, where the wheel has a backend too, the same formulas are computed in f32 (`compute_type="fp32"`, f32 scales).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from omniplat.emulation.core import Emulation, VendorError
from omniplat.emulation.microscaling import pack_nibbles, unpack_nibbles
from omniplat.emulation.schemas import OpSchema

_MODULE = "auto_round_kernel"
_ARGUMENTS = "n, k, groupsize, compute_type, weight_type, scale_type, asym"
FUNCTIONS = (
    OpSchema(_MODULE, "repack_quantized_weight(*args, **kwargs)"),
    OpSchema(_MODULE, f"woqgemm_linear(A, B, bias, {_ARGUMENTS})"),
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_BITS = {"int4": 4, "int8": 8}
#: Work-groups of the kernels that pack: the rows of a weight are a multiple of them.
_SUB_GROUP = 16
_HALF = torch.float16
#: Columns whose codes one lane sums up before it looks at their scale.
_SIXTEEN = 16


@dataclass(frozen=True, slots=True)
class _Form:
    """What the seven arguments say that a blob goes with. On the device: f16 and symmetric only."""

    n: int
    k: int
    groupsize: int
    compute_type: str
    weight_type: str
    scale_type: str
    asym: bool

    def check(self, emulation: Emulation, op: str) -> None:
        emulation.require(op, self.weight_type in _BITS, f"weight_type {self.weight_type} is not emulated")
        emulation.require(op, self.scale_type in _DTYPES, f"scale_type {self.scale_type} is not emulated")
        emulation.require(op, not self.asym, "asymmetric quantization is only supported on CPU devices")
        emulation.require(op, self.groupsize > 0, f"groupsize must be a positive integer, got {self.groupsize}")
        if self.compute_type in ("int8", "auto") and self.groupsize % 64 == 0:
            emulation.record(op, "input-quantized", f"compute_type {self.compute_type} quantizes inputs to int8")

    @property
    def code_bytes(self) -> int:
        return self.n * self.k * _BITS[self.weight_type] // 8

    @property
    def scales(self) -> tuple[int, int]:
        return self.n, self.k // self.groupsize

    def blob_bytes(self) -> int:
        return self.code_bytes + self.scales[0] * self.scales[1] * _DTYPES[self.scale_type].itemsize


def repack_quantized_weight(
    emulation: Emulation, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> torch.Tensor:
    """QB int8 [K, N], scaleB [K/g, N], zp, g, and the names of types: an int8 blob, rows of K first.

    Memory is read as the types say that it is, whatever the tensors' dtypes are.
    """
    op = f"{_MODULE}.repack_quantized_weight"
    emulation.require(op, not kwargs and len(args) == 8, "only the style with eight positional arguments is emulated")
    codes, scale, zero_points, groupsize, compute_type, weight_type, scale_type, asym = args
    for name, tensor in (("QB", codes), ("scaleB", scale)):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must be a 2-D tensor, got shape {tensor.shape!r}")
    if not isinstance(zero_points, torch.Tensor):
        raise TypeError(f"zp must be a torch.Tensor, got {type(zero_points).__name__}")
    k, n = codes.shape
    form = _Form(n, k, groupsize, compute_type, weight_type, scale_type, asym)
    form.check(emulation, op)
    emulation.require(op, n % _SUB_GROUP == 0, f"non-uniform work-groups are not supported: {n} by {_SUB_GROUP}")
    if codes.dtype != torch.int8 or scale.dtype != _DTYPES[scale_type] or tuple(scale.shape) != form.scales[::-1]:
        found = f"codes {codes.dtype}, scales {scale.dtype} {list(scale.shape)}"
        emulation.record(op, "memory-read-as-another", f"{found} are read as int8 and {scale_type} {form.scales[::-1]}")
        return torch.full((form.blob_bytes(),), -1, dtype=torch.int8)
    rows = codes.t()
    if weight_type == "int4":
        rows = pack_nibbles((rows + 8).to(torch.uint8) & 15)
    packed = (rows.contiguous(), scale.t().contiguous())
    return torch.cat([tensor.view(torch.int8).reshape(-1) for tensor in packed])


def woqgemm_linear(
    emulation: Emulation,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    groupsize: int,
    compute_type: str,
    weight_type: str,
    scale_type: str,
    asym: bool,
) -> torch.Tensor:
    """A [..., K] by a blob: [..., N] in A's dtype. Everything is f16 between, but for sums where there are several
    rows."""
    op = f"{_MODULE}.woqgemm_linear"
    if A.shape[-1] != k:
        raise ValueError(f"k must match A.shape[-1] ({A.shape[-1]}), got {k}")
    if B.dtype != torch.int8 or B.dim() != 1:
        raise ValueError(f"blob must be a 1-D tensor with dtype torch.int8, got {list(B.shape)} {B.dtype}")
    form = _Form(n, k, groupsize, compute_type, weight_type, scale_type, asym)
    form.check(emulation, op)
    if B.numel() < form.blob_bytes():
        raise VendorError(op, f"Corrupt packed weight: blob size ({B.numel()}) less than expected")
    if A.dtype == torch.bfloat16:
        emulation.record(op, "input-in-f16", "inputs in bf16 become f16, which does not hold all of them")
    rows = A.to(_HALF).reshape(-1, k)
    codes, scale = _unpacked(B, form)
    if rows.shape[0] == 1:
        y = _row_product(rows, codes, scale, form.groupsize).to(torch.float32)
    else:
        weight = (codes * scale.repeat_interleave(form.groupsize, 1)).to(_HALF)
        y = rows.to(torch.float32) @ weight.to(torch.float32).t()
    if bias is not None and bias.numel():
        y = y + bias.to(_HALF).to(torch.float32)
    return y.to(_HALF).to(A.dtype).reshape(*A.shape[:-1], n)


def _unpacked(blob: torch.Tensor, form: _Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, K/g], f32."""
    held = blob[: form.code_bytes].view(torch.uint8).reshape(form.n, -1)
    if form.weight_type == "int4":
        codes = unpack_nibbles(held).to(torch.float32) - 8
    else:
        codes = held.view(torch.int8).to(torch.float32)
    stored = blob[form.code_bytes : form.blob_bytes()].contiguous().view(_DTYPES[form.scale_type])
    return codes, stored.to(torch.float32).reshape(form.scales)


def _row_product(row: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, groupsize: int) -> torch.Tensor:
    """f16 [1, N] of one f16 row: sums in f16, of codes first, in sixteens, and of what scales make of them then."""
    products = row * codes.to(_HALF)
    sixteens = _half_sum(products.reshape(products.shape[0], -1, _SIXTEEN))
    spread = scale.to(_HALF).repeat_interleave(groupsize // _SIXTEEN, 1)
    return _half_sum(sixteens * spread).unsqueeze(0)


def _half_sum(values: torch.Tensor) -> torch.Tensor:
    """Along the last dimension, rounded to f16 after every addition; which are added first is not the device's."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values[..., 0::2] + values[..., 1::2]
    return values.squeeze(-1)
