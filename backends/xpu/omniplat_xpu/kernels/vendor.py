"""The operators of vllm-xpu-kernels, and what all kernels over them share."""

from __future__ import annotations

from importlib import import_module

import torch

from omniplat.capability import Capability
from omniplat.errors import BackendLoadError, UnsupportedCombinationError, UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.tensors import DTYPES, WeightTensors
from omniplat_xpu.spec import SPEC

#: Library of operators -> the module whose import registers it.
_MODULES = (
    ("_C", "vllm_xpu_kernels._C"),
    ("_moe_C", "vllm_xpu_kernels._moe_C"),
    ("_xpu_C", "vllm_xpu_kernels._xpu_C"),
)
HALF = (torch.bfloat16, torch.float16)


def operator(library: str, name: str) -> torch._ops.OpOverload:
    """An operator of the vendor's; its library is loaded where nobody has. Raises BackendLoadError."""
    packet = getattr(getattr(torch.ops, library), name, None)
    if packet is None:
        module = dict(_MODULES)[library]
        try:
            import_module(module)
            packet = getattr(getattr(torch.ops, library), name)
        except (ImportError, OSError, AttributeError) as exc:
            raise BackendLoadError("xpu", f"{library}::{name} of vllm-xpu-kernels: {exc}") from exc
    overload: torch._ops.OpOverload = packet.default
    return overload


def capability(name: str) -> Capability:
    """The declaration that a kernel stands behind."""
    return next(item for item in SPEC.capabilities if item.name == name)


def require(weight: WeightTensors, spec: LayerSpec, name: str, *roles: str) -> None:
    """Raise UnsupportedCombinationError for a weight that the capability does not declare."""
    require_declared("xpu", capability(name), weight, spec, ("codes", "scale", *roles))


def refuse(weight: WeightTensors, spec: LayerSpec, name: str, reason: str) -> UnsupportedCombinationError:
    """The error for a weight whose values this kernel cannot hold."""
    return UnsupportedCombinationError("xpu", spec.op, weight.scheme.id, [spec.name], [f"{name}  needs {reason}"])


def half_scale(weight: WeightTensors, spec: LayerSpec, name: str) -> torch.Tensor:
    """The weight's scales in f16. Raises UnsupportedCombinationError for those beyond its range."""
    stored = weight.tensors["scale"].to(torch.float32)
    scale = stored.to(torch.float16)
    if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) != (stored == 0)).any()):
        raise refuse(weight, spec, name, "scales within the range of float16")
    return scale


def layer_dtype(spec: LayerSpec) -> torch.dtype:
    """The dtype of inputs and outputs. Raises UsageError for one that no operator has."""
    dtype = DTYPES[spec.dtype]
    require_dtype(dtype, dtype, spec.name)
    return dtype


def require_dtype(found: torch.dtype, needed: torch.dtype, what: str) -> None:
    """Raise UsageError unless both are one of the operators' 16-bit dtypes, and the same."""
    if found != needed or needed not in HALF:
        raise UsageError(f"{what} computes in {needed}, of {HALF}, and was given {found}")
