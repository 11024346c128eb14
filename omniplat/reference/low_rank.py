"""SVDQuant layers on the CPU: the 4-bit residual like any other weight, and the low-rank pair in float32 beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.reference.linear import linear
from omniplat.reference.ops import as_bytes, decode_scheme, encode_scheme
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import new_library, register
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme, TensorQuant, low_rank_base

_LIBRARY = new_library()
_PAIR = ("low_rank_down", "low_rank_up")


@dataclass(frozen=True, slots=True)
class LowRankConfig:
    """Role names in the order of the operator's tensor list, and the residual's scheme as JSON."""

    names: tuple[str, ...]
    scheme: str
    out_features: int
    in_features: int


class LowRankLinear(LinearKernel[LowRankConfig]):
    """y = Q(x * pre_scale) R^T + (x D) U^T + bias: the residual is decoded in row tiles, the pair is kept in f32."""

    name: ClassVar[str] = "low_rank_linear"
    config_type = LowRankConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LowRankConfig]:
        """Raises UnsupportedCombinationError for weights without a low-rank pair, and for other activations."""
        base, declared = low_rank_base(weight.scheme.weight), weight.scheme.activation
        if base is None or (declared is not None and low_rank_base(declared) is None):
            raise UnsupportedCombinationError(
                "cpu", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs a low-rank pair, and its input"]
            )
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weight.tensors.items():
            if name in _PAIR:
                tensors[name] = tensor.to(torch.float32)
            elif name != "bias":
                tensors[name] = as_bytes(tensor)
        activation = _activation(weight.scheme.activation)
        if activation is not None and activation.second_scale == "global":
            # SVDQuant's run-time NVFP4 has no second level: its group scales stand alone.
            tensors["input_global_scale"] = torch.ones(1, dtype=torch.float32)
        scheme = encode_scheme(Scheme(base, activation, weight.scheme.pre_scale))
        return Prepared(tensors, LowRankConfig(tuple(tensors), scheme, weight.out_features, weight.in_features))

    def apply(
        self,
        config: LowRankConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        held = [tensors[name] for name in config.names]
        y: torch.Tensor = torch.ops.omniplat.reference_low_rank_linear(
            x, held, bias, list(config.names), config.scheme, config.out_features, out_dtype
        )
        return y


def _activation(quant: TensorQuant | None) -> TensorQuant | None:
    return quant if quant is None else low_rank_base(quant) or quant


def _run(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    scheme: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    roles = dict(zip(names, tensors, strict=True))
    down, up = (roles.pop(role) for role in _PAIR)
    y = linear(rows, decode_scheme(scheme), roles, None, torch.float32)
    y = y.addmm(rows.to(torch.float32) @ down, up.t())
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype).view(*x.shape[:-1], out_features)


def _fake(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    names: Sequence[str],
    scheme: str,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


register(
    _LIBRARY,
    "reference_low_rank_linear(Tensor x, Tensor[] tensors, Tensor? bias, str[] names, str scheme, "
    "int out_features, ScalarType out_dtype) -> Tensor",
    {"CPU": _run},
    _fake,
)
