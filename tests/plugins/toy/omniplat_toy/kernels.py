"""The toy's kernel: int8 rows with one scale each, computed in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat_toy.spec import SPEC


@dataclass(frozen=True)
class Int8RowsConfig:
    out_features: int


class Int8Rows(LinearKernel[Int8RowsConfig]):
    name = "int8_rows"
    config_type = Int8RowsConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Int8RowsConfig]:
        require_declared("toy", SPEC.capabilities[0], weight, spec, ("codes", "scale"))
        tensors = {"codes": weight.tensors["codes"], "scale": weight.tensors["scale"].float()}
        return Prepared(tensors, Int8RowsConfig(weight.out_features))

    def apply(
        self,
        config: Int8RowsConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        return int8_rows(x, tensors["codes"], tensors["scale"], bias, out_dtype)


@torch.library.custom_op("omniplat_toy::int8_rows", mutates_args=())
def int8_rows(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    y = x.float() @ codes.float().T * scale.reshape(-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


@int8_rows.register_fake
def _(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype)
