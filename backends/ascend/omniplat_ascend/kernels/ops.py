"""The backend's operators in torch's library `omniplat`, registered when this module is imported.

Tensors arrive as a list beside their names, all else as constants of a traced graph. Inside, they call the vendor's
operators, which a tracer never sees: some of those have no fake implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniplat_ascend.kernels.products import PRODUCTS

_LIBRARY = torch.library.Library("omniplat", "FRAGMENT")  # type: ignore[no-untyped-call]
#: Where the operators run: the device, and the CPU under an emulation.
_KEYS = ("PrivateUse1", "CPU")

_LIBRARY.define(  # type: ignore[no-untyped-call]
    "ascend_linear(Tensor x, Tensor[] tensors, Tensor? bias, str[] names, str product, str rounding, "
    "int out_features, ScalarType out_dtype) -> Tensor"
)


def _linear(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)
    y = PRODUCTS[product](rows, dict(zip(names, tensors, strict=True)), bias, rounding, out_dtype)
    return y.view(*x.shape[:-1], out_features)


def _linear_fake(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


def linear(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [..., K] through one of `PRODUCTS` to [..., N] in `out_dtype`."""
    y: torch.Tensor = torch.ops.omniplat.ascend_linear(
        x, tensors, bias, names, product, rounding, out_features, out_dtype
    )
    return y


for _key in _KEYS:
    _LIBRARY.impl("ascend_linear", _linear, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("omniplat::ascend_linear", _linear_fake, lib=_LIBRARY)
