"""int4 in groups by the kernels of auto-round-lib, with inputs in f16.

The library's weights are a blob that only it can read: it is made when a layer is prepared. Its products are asked for
in f16, since those in int8 quantize inputs, in a granularity that is not documented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch

from omniplat.errors import BackendLoadError
from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import new_library, register
from omniplat.runtime.tensors import WeightTensors
from omniplat_xpu.kernels import vendor

_COMPUTE, _WEIGHT, _SCALE = "fp16", "int4", "fp16"
_ASYMMETRIC = False


def auto_round(name: str) -> Callable[..., torch.Tensor]:
    """A function of auto_round_kernel. Raises BackendLoadError."""
    try:
        found: Callable[..., torch.Tensor] = getattr(import_module("auto_round_kernel"), name)
    except (ImportError, OSError, AttributeError) as exc:
        raise BackendLoadError("xpu", f"auto_round_kernel.{name} of auto-round-lib: {exc}") from exc
    return found


@dataclass(frozen=True, slots=True)
class AutoRoundConfig:
    """`group_size` is the number of columns that share a scale: all of them where there is one per row."""

    group_size: int
    out_features: int
    in_features: int


class AutoRoundLinear(LinearKernel[AutoRoundConfig]):
    """Buffers: `blob` int8 [bytes], codes and f16 scales as the library packs them."""

    name: ClassVar[str] = "auto_round_linear"
    config_type = AutoRoundConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[AutoRoundConfig]:
        """Raises UnsupportedCombinationError for what is not declared, and for scales beyond the range of f16."""
        vendor.require(weight, spec, self.name)
        vendor.require_dtype(vendor.layer_dtype(spec), torch.float16, spec.name)
        scale = vendor.half_scale(weight, spec, self.name).t().contiguous()
        group = weight.in_features // scale.shape[0]
        no_zero_points = torch.empty(0, dtype=torch.int8, device=scale.device)
        blob = auto_round("repack_quantized_weight")(
            _signed(weight.tensors["codes"]), scale, no_zero_points, group, _COMPUTE, _WEIGHT, _SCALE, _ASYMMETRIC
        )
        return Prepared({"blob": blob}, AutoRoundConfig(group, weight.out_features, weight.in_features))

    def apply(
        self,
        config: AutoRoundConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.xpu_auto_round_linear(
            x, tensors["blob"], bias, config.out_features, config.group_size, out_dtype
        )
        return y


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Canonical nibbles [N, K/2], two's complement, as int8 [K, N]."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    return ((nibbles ^ 8).to(torch.int8) - 8).t().contiguous()


# -- the operator -----------------------------------------------------------------------------------------------


def _auto_round_linear(
    x: torch.Tensor,
    blob: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    vendor.require_dtype(x.dtype, torch.float16, "auto_round_linear")
    vendor.require_dtype(out_dtype, torch.float16, "auto_round_linear")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], features))
    return auto_round("woqgemm_linear")(
        x, blob, bias, features, x.shape[-1], group_size, _COMPUTE, _WEIGHT, _SCALE, _ASYMMETRIC
    )


def _fake(
    x: torch.Tensor, blob: torch.Tensor, bias: torch.Tensor | None, features: int, *arguments: object
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], features))


_LIBRARY = new_library()
register(
    _LIBRARY,
    "xpu_auto_round_linear(Tensor x, Tensor blob, Tensor? bias, int features, int group_size, ScalarType out_dtype) "
    "-> Tensor",
    {"CompositeExplicitAutograd": _auto_round_linear},
    _fake,
)
