"""The backend's operators in torch's library `omniplat`, registered when this module is imported.

Tensors arrive as a list beside their names, all else as constants of a traced graph. Inside, they call the vendor's
operators, which a tracer never sees: some of those have no fake implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat_ascend.kernels.experts import EXPERTS, experts
from omniplat_ascend.kernels.products import PRODUCTS, int4_transformed

_LIBRARY = new_library()
#: Where the operators run: the device, and the CPU under an emulation.
_KEYS = ("PrivateUse1", "CPU")


def _linear(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    clip_ratio: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)
    held = dict(zip(names, tensors, strict=True))
    if clip_ratio:
        y = int4_transformed(rows, held, float(clip_ratio), out_dtype)
    else:
        y = PRODUCTS[product](rows, held, bias, rounding, out_dtype)
    return y.view(*x.shape[:-1], out_features)


def _linear_fake(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    clip_ratio: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


def _moe(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    activation: str,
    parameters: Sequence[str],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if topk_ids.numel() == 0:
        return x.new_zeros(x.shape, dtype=out_dtype)
    held = dict(zip(names, tensors, strict=True))
    limit, alpha = (float(text) for text in parameters)
    rows = x.contiguous()
    how = EXPERTS[product]
    return experts(rows, held, topk_ids, topk_weights, expert_map, how, rounding, activation, limit, alpha).to(
        out_dtype
    )


def linear(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    clip_ratio: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [..., K] through one of `PRODUCTS` to [..., N] in `out_dtype`; transformed before where there is a
    `clip_ratio`."""
    y: torch.Tensor = torch.ops.omniplat.ascend_linear(
        x, tensors, bias, names, product, rounding, clip_ratio, out_features, out_dtype
    )
    return y


def moe(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    names: Sequence[str],
    product: str,
    rounding: str,
    activation: str,
    parameters: Sequence[str],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`x` [M, K] through its experts by one of `EXPERTS`, [M, K] in `out_dtype`."""
    y: torch.Tensor = torch.ops.omniplat.ascend_moe(
        x, tensors, topk_ids, topk_weights, expert_map, names, product, rounding, activation, parameters, out_dtype
    )
    return y


register(
    _LIBRARY,
    "ascend_linear(Tensor x, Tensor[] tensors, Tensor? bias, str[] names, str product, str rounding, "
    "str clip_ratio, int out_features, ScalarType out_dtype) -> Tensor",
    dict.fromkeys(_KEYS, _linear),
    _linear_fake,
)
register(
    _LIBRARY,
    "ascend_moe(Tensor x, Tensor[] tensors, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, str[] names, "
    "str product, str rounding, str activation, str[] parameters, ScalarType out_dtype) -> Tensor",
    dict.fromkeys(_KEYS, _moe),
    experts_fake,
)
