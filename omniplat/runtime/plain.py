"""torch's own linear layer as a kernel: for the parts of an engine's module that a checkpoint leaves unquantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.errors import UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """Nothing to configure."""


class PlainLinear(LinearKernel[PlainConfig]):
    """`torch.nn.functional.linear`, in the dtype of the input."""

    name: ClassVar[str] = "torch_linear"
    config_type = PlainConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[PlainConfig]:
        """Raises UsageError for a quantized weight."""
        if not weight.scheme.is_unquantized:
            raise UsageError(f"{spec.name} is {weight.scheme.id}: {self.name} runs unquantized weights")
        return Prepared({"weight": weight.tensors["codes"]}, PlainConfig())

    def apply(
        self,
        config: PlainConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        cast = bias.to(x.dtype) if bias is not None else None
        return F.linear(x, tensors["weight"].to(x.dtype), cast).to(out_dtype)
