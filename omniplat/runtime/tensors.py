"""Canonical arrays as torch tensors, without converting a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.device import Device
from omniplat.errors import BackendUnavailableError
from omniplat.scheme import Scheme

#: NumPy dtypes that torch.from_numpy does not know -> (dtype of the same width that it knows, torch dtype).
_BY_BYTES: dict[np.dtype[Any], tuple[np.dtype[Any], torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.dtype(np.int16), torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.dtype(np.uint8), torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.dtype(np.uint8), torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e4m3fnuz): (np.dtype(np.uint8), torch.float8_e4m3fnuz),
    np.dtype(ml_dtypes.float8_e5m2fnuz): (np.dtype(np.uint8), torch.float8_e5m2fnuz),
}
_TO_NUMPY: dict[torch.dtype, tuple[torch.dtype, np.dtype[Any]]] = {
    torch_dtype: (torch.int16 if torch_dtype is torch.bfloat16 else torch.uint8, numpy_dtype)
    for numpy_dtype, (_, torch_dtype) in _BY_BYTES.items()
}

#: Names of a LayerSpec's dtype.
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class WeightTensors:
    """A `CanonicalWeight` in torch: same roles, shapes and bytes (`omniplat.canonical` lists them).

    e8m0 scales are uint8. `experts` is 0 for a plain weight, else every tensor has that leading dimension.
    """

    scheme: Scheme
    out_features: int
    in_features: int
    tensors: Mapping[str, torch.Tensor]
    experts: int = 0

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def torch_kind(device: Device) -> str:
    """What torch calls the place where tensors of a device lie."""
    return "cpu" if device.emulated else {"rocm": "cuda"}.get(device.kind, device.kind)


def device_of(device: Device) -> torch.device:
    """Where a layer on `device` lies; raises BackendUnavailableError where torch cannot use it here."""
    try:
        found = torch.device(torch_kind(device))  # "npu" is no device before torch_npu is imported
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as exc:
        raise BackendUnavailableError(device.kind, str(exc).partition("\n")[0]) from exc
    return found


def to_tensor(array: Array) -> torch.Tensor:
    """`array` as a CPU tensor with the same bytes. Shares memory where the array is writable and contiguous."""
    array = np.asarray(array)
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = np.array(array, order="C", copy=True)
    known = _BY_BYTES.get(array.dtype)
    if known is None:
        return torch.from_numpy(array)
    storage, dtype = known
    return torch.from_numpy(array.view(storage)).view(dtype)


def to_array(tensor: torch.Tensor) -> Array:
    """The inverse of `to_tensor`, for a CPU tensor; shares memory where it is contiguous."""
    tensor = tensor.detach().contiguous()
    known = _TO_NUMPY.get(tensor.dtype)
    if known is None:
        plain: Array = tensor.numpy()
        return plain
    storage, dtype = known
    return tensor.view(storage).numpy().view(dtype)


def to_torch(weight: CanonicalWeight, *, experts: int = 0, device: torch.device | None = None) -> WeightTensors:
    """The torch form of `weight`, on `device` (CPU when None)."""
    tensors = {name: to_tensor(array) for name, array in weight.tensors.items()}
    if device is not None and device.type != "cpu":
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return WeightTensors(weight.scheme, weight.out_features, weight.in_features, tensors, experts)
