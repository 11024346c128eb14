"""The two operators of the cpu backend, registered in torch's library `omniplat` when this module is imported.

Tensors arrive as a list beside their role names, and the scheme as JSON: all of them constants of a traced graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import torch

from omniplat.reference.linear import linear
from omniplat.reference.moe import Experts, experts
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.scheme import Scheme

_LIBRARY = new_library()


def encode_scheme(scheme: Scheme) -> str:
    """All fields of `scheme` as JSON: an id alone would lose the rules by which activations are quantized."""
    return msgspec.json.encode(scheme, order="sorted").decode()


@lru_cache(maxsize=1024)
def decode_scheme(text: str) -> Scheme:
    return msgspec.json.decode(text.encode(), type=Scheme)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: the decoder reads them so, and few of torch's tools know more of fp8 than its name."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor


def _linear(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    scheme: str,
    out_features: int,
    splits: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    roles = dict(zip(names, tensors, strict=True))
    y = linear(rows, decode_scheme(scheme), roles, bias, out_dtype, splits)
    return y.view(*x.shape[:-1], out_features)


def _linear_fake(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    scheme: str,
    out_features: int,
    splits: int,
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
    w13_scheme: str,
    w2_scheme: str,
    splits: Sequence[int],
    activation: str,
    parameters: Sequence[str],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    roles = dict(zip(names, tensors, strict=True))
    limit, alpha = (float(text) for text in parameters)
    w13, w2 = splits
    how = Experts(decode_scheme(w13_scheme), decode_scheme(w2_scheme), (w13, w2), activation, limit, alpha)
    return experts(x, roles, how, topk_ids, topk_weights, expert_map, out_dtype)


register(
    _LIBRARY,
    "reference_linear(Tensor x, Tensor[] tensors, Tensor? bias, str[] names, str scheme, int out_features, "
    "int splits, ScalarType out_dtype) -> Tensor",
    {"CPU": _linear},
    _linear_fake,
)
register(
    _LIBRARY,
    "reference_moe(Tensor x, Tensor[] tensors, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, "
    "str[] names, str w13_scheme, str w2_scheme, int[] splits, str activation, str[] parameters, "
    "ScalarType out_dtype) -> Tensor",
    {"CPU": _moe},
    experts_fake,
)
