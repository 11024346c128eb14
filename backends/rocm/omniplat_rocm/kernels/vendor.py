"""AITER, and what all kernels over it share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from omniplat.capability import Capability
from omniplat.errors import BackendLoadError, UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.tensors import DTYPES, WeightTensors
from omniplat_rocm.spec import SPEC

HALF = (torch.bfloat16, torch.float16)


def aiter(module: str, name: str) -> Any:
    """An attribute of a module of AITER's: "", "fused_moe", "ops.shuffle". Raises BackendLoadError."""
    path = f"aiter.{module}" if module else "aiter"
    try:
        return getattr(import_module(path), name)
    except (ImportError, OSError, AttributeError) as exc:
        raise BackendLoadError("rocm", f"{path}.{name} of amd-aiter: {exc}") from exc


def capability(name: str) -> Capability:
    """The declaration that a kernel stands behind."""
    return next(item for item in SPEC.capabilities if item.name == name)


def require(weight: WeightTensors, spec: LayerSpec, name: str, *roles: str) -> None:
    """Raise UnsupportedCombinationError for a weight that the capability does not declare."""
    require_declared("rocm", capability(name), weight, spec, ("codes", "scale", *roles))


def layer_dtype(spec: LayerSpec) -> torch.dtype:
    """The dtype of inputs and outputs. Raises UsageError for one that no product writes."""
    dtype = DTYPES[spec.dtype]
    require_half(dtype, spec.name)
    return dtype


def require_half(dtype: torch.dtype, what: str) -> None:
    """Raise UsageError for a dtype that no product writes."""
    if dtype not in HALF:
        raise UsageError(f"{what} computes in {HALF}, and was asked for {dtype}")


def is_fnuz() -> bool:
    """True where the matrix units read float8_e4m3fnuz: on gfx94x."""
    return bool(aiter("", "dtypes").fp8 == torch.float8_e4m3fnuz)


def to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of e4m3fn, none of them NaN, and scales, as e4m3fnuz: there the same bits mean half, and -0 is NaN."""
    return codes.masked_fill(codes == 0x80, 0), scale * 2.0
