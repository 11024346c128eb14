"""Kernels: correct ones, and subclasses that each get one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from omniplat.layer import LayerSpec
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme
from omniplat_zoo.ops import eight_bits, four_bits, int8, mlp
from omniplat_zoo.spec import EIGHT_BITS, EXPERTS, FOUR_BITS, INT8

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Config:
    fault: str
    experts: int = 0
    limit: float = 0.0
    alpha: float = 1.0


class CorrectInt8(LinearKernel[Config]):
    """int8 rows times int8 tokens, exactly."""

    name = "int8"
    config_type = Config
    fault = ""

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Config]:
        self.check(weight, spec)
        tensors = {"codes": weight.tensors["codes"], "scale": self.scale(weight.tensors["scale"])}
        return Prepared(tensors, Config(self.fault))

    def check(self, weight: WeightTensors, spec: LayerSpec) -> None:
        require_declared("zoo", INT8, weight, spec, ("codes", "scale"))

    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def quantize(self, weight: torch.Tensor, scheme: Scheme) -> WeightTensors:
        values = weight.float()
        scale = values.abs().amax(1, keepdim=True) / 127.0
        codes = self.rounded(torch.where(scale == 0, 0.0, values / torch.where(scale == 0, 1.0, scale)))
        tensors = {"codes": codes.clamp(-128, 127).to(torch.int8), "scale": scale}
        return WeightTensors(scheme, values.shape[0], values.shape[1], tensors)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return torch.round(values)

    def apply(
        self,
        config: Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        return int8(x, tensors["codes"], tensors["scale"], bias, config.fault, out_dtype)


class ScaleRowInt8(CorrectInt8):
    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.roll(1, 0)


class OnlineInt8(CorrectInt8):
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return torch.trunc(values + 0.5 * values.sign())


class Bf16FallbackInt8(CorrectInt8):
    fault = "bf16"


class OwnRuleInt8(CorrectInt8):
    def check(self, weight: WeightTensors, spec: LayerSpec) -> None:
        require_declared("zoo", replace(INT8, scale_rules=()), weight, spec, ("codes", "scale"))


class TiesAwayInt8(CorrectInt8):
    fault = "ties-away"


class PerTensorInt8(CorrectInt8):
    fault = "per-tensor"


class NoBiasInt8(CorrectInt8):
    fault = "no-bias"


class DeclaresMoreInt8(CorrectInt8):
    fault = "no-f16"


class KTailInt8(CorrectInt8):
    fault = "k-tail"


class NeedsK64Int8(CorrectInt8):
    fault = "k64"


class MutatesInt8(CorrectInt8):
    """Smooths its input in place: the values come back, but not all of their bits."""

    def apply(
        self,
        config: Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y = super().apply(config, tensors, x, bias, out_dtype, workspace)
        x.mul_(0.5)
        return y


class UnrepeatableInt8(CorrectInt8):
    fault = "unrepeatable"


class ColumnMajorInt8(CorrectInt8):
    fault = "column-major"


class DeclaresLessInt8(CorrectInt8):
    def check(self, weight: WeightTensors, spec: LayerSpec) -> None:
        """Takes whatever has codes and scales."""


class ValueErrorInt8(CorrectInt8):
    def check(self, weight: WeightTensors, spec: LayerSpec) -> None:
        if weight.scheme.id != "int8-channel/int8-token":
            raise ValueError(f"cannot run {weight.scheme.id}")
        super().check(weight, spec)


class CorrectFourBits(LinearKernel[Config]):
    """Weight-only: the weight is kept in f32."""

    name = "four_bits"
    config_type = Config
    low_first = True
    fault = ""

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Config]:
        roles = ("codes", "scale", "global_scale") if weight.scheme.weight_id == "nvfp4" else ("codes", "scale")
        require_declared("zoo", FOUR_BITS, weight, spec, roles)
        packed = weight.tensors["codes"].long()
        halves = (packed & 15, packed >> 4) if self.low_first else (packed >> 4, packed & 15)
        codes = torch.stack(halves, 2).flatten(1)
        if weight.scheme.weight.is_integer:
            values = torch.where(codes < 8, codes, codes - 16).float()
        else:
            values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device)[codes]
        scale = weight.tensors["scale"]
        scale = self.powers(scale) if scale.dtype == torch.uint8 else scale.float()
        values = values * scale.repeat_interleave(weight.scheme.weight.group_size, 1)
        if "global_scale" in weight.tensors:
            values = self.apply_global(values, weight.tensors["global_scale"])
        return Prepared({"weight": values}, Config(self.fault))

    def powers(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.int() - 127)

    def apply_global(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (values.double() * scale).float()

    def apply(
        self,
        config: Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        return four_bits(x, tensors["weight"], bias, config.fault, out_dtype)


class RoundsTwiceFourBits(CorrectFourBits):
    fault = "rounds-twice"


class Bf16InputFourBits(CorrectFourBits):
    fault = "bf16-input"


class Bf16BiasFourBits(CorrectFourBits):
    fault = "bf16-bias"


class NibblesFourBits(CorrectFourBits):
    low_first = False


class GlobalDividedFourBits(CorrectFourBits):
    def apply_global(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (values.double() / scale).float()


class E8m0NumberFourBits(CorrectFourBits):
    def powers(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.float()


class CorrectEightBits(LinearKernel[Config]):
    """Weight-only fp8 rows."""

    name = "eight_bits"
    config_type = Config

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[Config]:
        require_declared("zoo", EIGHT_BITS, weight, spec, ("codes", "scale"))
        return Prepared({"codes": weight.tensors["codes"], "scale": weight.tensors["scale"]}, Config(""))

    def apply(
        self,
        config: Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        return eight_bits(x, tensors["codes"], tensors["scale"], bias, out_dtype)


class CorrectExperts(MoeKernel[Config]):
    """Weight-only experts of rows of 8 bits."""

    name = "experts"
    config_type = Config
    fault = ""

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[Config]:
        tensors = {}
        for name, weight in (("w13", w13), ("w2", w2)):
            require_declared("zoo", EXPERTS, weight, spec, ("codes", "scale"))
            codes = weight.tensors["codes"]
            if self.fault == "one-scheme":
                codes = codes.view(w13.tensors["codes"].dtype)
            tensors[name] = codes.float() * weight.tensors["scale"].float()
            if "bias" in weight.tensors:
                tensors[f"{name}_bias"] = weight.tensors["bias"]
        assert spec.moe is not None
        return Prepared(tensors, Config(self.fault, w13.experts, spec.moe.limit, spec.moe.alpha))

    def apply(
        self,
        config: Config,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        biases = tensors.get("w13_bias"), tensors.get("w2_bias")
        weights = tensors["w13"], tensors["w2"]
        between = activation, config.limit, config.alpha, config.fault
        return mlp(x, *weights, *biases, topk_ids, topk_weights, expert_map, *between, out_dtype)


class SiluOnlyExperts(CorrectExperts):
    fault = "silu-only"


class OneSchemeExperts(CorrectExperts):
    fault = "one-scheme"


class TwoChoicesExperts(CorrectExperts):
    fault = "two-choices"


class NoLimitExperts(CorrectExperts):
    fault = "no-limit"


class ExpertOrderExperts(CorrectExperts):
    fault = "expert-order"


class RoutingWeightsExperts(CorrectExperts):
    fault = "routing-weights"


class UpFirstExperts(CorrectExperts):
    fault = "up-first"
