"""Experts over AITER's fused_moe, which quantizes inputs and what lies between the two products itself.

A slot that chooses nothing, or an expert that is elsewhere, gets the id one beyond the last, which a mask leaves out:
ids are local ones by then, so that the mask's order is that of the weights. A weight of 0 would not do, since 0 times
what overflowed is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.errors import UsageError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.portable.reencode import reencode
from omniplat.runtime.finite import e8m0_scale, fp8_codes, multipliers
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.routing import local_ids
from omniplat.runtime.tensors import WeightTensors
from omniplat_rocm.kernels import vendor
from omniplat_rocm.kernels.vendor import aiter, require_half


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`quant_type` is the name of AITER's constant, `dtype` that of the codes; `gate_mode` says how rows of w13 lie, ""
    where gate comes first; `limit` is the activation's, as text: a compiler takes a float for an input that varies."""

    quant_type: str
    dtype: str
    gate_mode: str
    experts: int
    limit: str


class FusedMoe(MoeKernel[ExpertsConfig]):
    """fp8 with a scale per row. Buffers, for w13 and w2: `codes` [E, N, K] in tiles of 16 x 16, and `scale` f32
    [E, N, 1]."""

    name: ClassVar[str] = "fused_moe_fp8"
    config_type = ExpertsConfig
    quant_type: ClassVar[str] = "per_Token"
    gate_mode: ClassVar[str] = ""

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[ExpertsConfig]:
        """Raises UnsupportedCombinationError for what is not declared; InvalidCheckpointError for NaN, and for scales
        that span too many binades to be rewritten."""
        vendor.layer_dtype(spec)
        tensors = {}
        dtype = torch.uint8
        for prefix, weight in (("w13_", w13), ("w2_", w2)):
            vendor.require(weight, spec, self.name)
            codes, scale = self._weight(weight, spec)
            dtype = codes.dtype
            codes, scale = self._laid_out(codes.contiguous(), scale.contiguous(), gate_up=prefix == "w13_")
            tensors[prefix + "codes"] = codes.view(torch.uint8)
            tensors[prefix + "scale"] = scale
        limit = (spec.moe or MoeSpec(w13.experts, w2.in_features)).limit
        name = str(dtype).removeprefix("torch.")
        return Prepared(tensors, ExpertsConfig(self.quant_type, name, self.gate_mode, w13.experts, repr(limit)))

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [E, N, K] in the dtype that the product knows them by, and scales in the one that it reads."""
        return _device_fp8(fp8_codes(weight.tensors["codes"], spec.name), multipliers(weight, spec.name))

    def _laid_out(
        self, codes: torch.Tensor, scale: torch.Tensor, *, gate_up: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `_weight` gave, contiguous, as the product reads it; `gate_up` for w13."""
        return aiter("ops.shuffle", "shuffle_weight")(codes, layout=(16, 16)), scale

    def apply(
        self,
        config: ExpertsConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.rocm_experts(
            x,
            tensors["w13_codes"],
            tensors["w13_scale"],
            tensors["w2_codes"],
            tensors["w2_scale"],
            topk_ids,
            topk_weights,
            expert_map,
            config.quant_type,
            config.dtype,
            config.gate_mode,
            activation,
            config.limit,
            out_dtype,
        )
        return y


class FusedMoeFnuz(FusedMoe):
    """The same on gfx942."""

    name: ClassVar[str] = "fused_moe_fp8_fnuz"


class FusedMoeBlock(FusedMoe):
    """fp8 with scales of blocks of 128 x 128: `scale` f32 [E, N/128, K/128]."""

    name: ClassVar[str] = "fused_moe_fp8_block"
    quant_type: ClassVar[str] = "per_128x128"


class FusedMoeBlockFnuz(FusedMoeBlock):
    """The same on gfx942."""

    name: ClassVar[str] = "fused_moe_fp8_block_fnuz"


class FusedMoeInt8(FusedMoe):
    """int8 with a scale per row."""

    name: ClassVar[str] = "fused_moe_int8"

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.tensors["codes"].contiguous().view(torch.int8), weight.tensors["scale"].to(torch.float32)


class FusedMoeMxfp4(FusedMoe):
    """MXFP4: `codes` [E, N, K/2] in tiles, `scale` bytes of all experts, shuffled, rows padded to a multiple of 256."""

    name: ClassVar[str] = "fused_moe_mxfp4"
    quant_type: ClassVar[str] = "per_1x32"

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        codes = weight.tensors["codes"].contiguous().view(aiter("", "dtypes").fp4x2)
        return codes, e8m0_scale(weight.tensors["scale"], spec.name)

    def _laid_out(
        self, codes: torch.Tensor, scale: torch.Tensor, *, gate_up: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shuffled = aiter("utility.fp4_utils", "e8m0_shuffle")(scale.view(-1, scale.shape[-1]))
        return super()._laid_out(codes, shuffled, gate_up=gate_up)


class FusedMoeMxfp4Even(FusedMoeMxfp4):
    """With the quantizer of releases before 0.1.16."""

    name: ClassVar[str] = "fused_moe_mxfp4_even"


class FusedMoeMxfp8(FusedMoe):
    """MXFP8: `codes` [E, N, K] in tiles, of w13 16 rows of gate and 16 of up in turns; `scale` bytes of all experts,
    shuffled, in the order of the codes. Laid out as AITER's op_tests/test_moe_2stage.py does."""

    name: ClassVar[str] = "fused_moe_mxfp8"
    quant_type: ClassVar[str] = "per_1x32"
    gate_mode: ClassVar[str] = "interleave"

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        codes = fp8_codes(weight.tensors["codes"], spec.name).view(aiter("", "dtypes").fp8)
        return codes, e8m0_scale(weight.tensors["scale"], spec.name)

    def _laid_out(
        self, codes: torch.Tensor, scale: torch.Tensor, *, gate_up: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = scale.view(-1, scale.shape[-1])
        if gate_up:
            scale = aiter("ops.shuffle", "shuffle_scale_a16w4")(rows, codes.shape[0], True)
        else:
            scale = aiter("utility.fp4_utils", "e8m0_shuffle")(rows)
        return aiter("ops.shuffle", "shuffle_weight_a16w4")(codes, 16, gate_up), scale


class ReencodedMoeMxfp8(FusedMoe):
    """MXFP8 weights with one power of two per row, by fp8 with a scale per token (`omniplat.reencoding`)."""

    name: ClassVar[str] = "reencoded_moe_mxfp8"

    def _weight(self, weight: WeightTensors, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._weight(reencode(weight, vendor.capability(self.name).via, spec.name), spec)


class ReencodedMoeMxfp8Fnuz(ReencodedMoeMxfp8):
    """The same on gfx942."""

    name: ClassVar[str] = "reencoded_moe_mxfp8_fnuz"


class ReencodedMoeMxfp4(ReencodedMoeMxfp8):
    """MXFP4 weights likewise, in twice their size; inputs keep more than was declared."""

    name: ClassVar[str] = "reencoded_moe_mxfp4"


def _device_fp8(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of e4m3fn and their scales as the device's fp8."""
    dtype = aiter("", "dtypes").fp8
    if dtype == torch.float8_e4m3fnuz:
        codes, scale = vendor.to_fnuz(codes, scale)
    return codes.view(dtype), scale


# -- the operator -----------------------------------------------------------------------------------------------

_LIBRARY = new_library()
#: omniplat's names of activations -> AITER's.
_ACTIVATIONS = {"silu": "Silu"}


def _experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    quant_type: str,
    dtype: str,
    gate_mode: str,
    activation: str,
    limit: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    require_half(out_dtype, "fused_moe")
    if x.numel() == 0 or topk_ids.shape[1] == 0:
        return torch.zeros(x.shape, dtype=out_dtype, device=x.device)
    if activation not in _ACTIVATIONS:
        raise UsageError(f"fused_moe takes {', '.join(_ACTIVATIONS)}, not {activation}")
    ids, weights, mask = _chosen(topk_ids, topk_weights, expert_map, w13.shape[0])
    first, second = (_marked(codes.view(getattr(torch, dtype))) for codes in (w13, w2))
    # Given only where they say something: older releases do not take them.
    said: dict[str, float | str] = {"swiglu_limit": float(limit)} if float(limit) else {}
    if gate_mode:
        said["gate_mode"] = gate_mode
    y: torch.Tensor = aiter("fused_moe", "fused_moe")(
        x.to(out_dtype).contiguous(),
        first,
        second,
        weights,
        ids,
        expert_mask=mask,
        activation=getattr(aiter("", "ActivationType"), _ACTIVATIONS[activation]),
        quant_type=getattr(aiter("", "QuantType"), quant_type),
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        **said,
    )
    return y


def _marked(weight: torch.Tensor) -> torch.Tensor:
    """AITER chooses kernels for shuffled weights by an attribute, which a view loses."""
    weight.is_shuffled = True  # type: ignore[attr-defined]
    return weight


def _chosen(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids int32 [M, T], weights f32 [M, T], and the mask int32 [E + 1]."""
    local = local_ids(topk_ids, expert_map)
    ids = torch.where(local < 0, experts, local).to(torch.int32)
    mask = F.pad(torch.ones(experts, dtype=torch.int32, device=topk_ids.device), (0, 1))
    return ids.contiguous(), topk_weights.to(torch.float32).contiguous(), mask


register(
    _LIBRARY,
    "rocm_experts(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor topk_ids, "
    "Tensor topk_weights, Tensor? expert_map, str quant_type, str dtype, str gate_mode, str activation, str limit, "
    "ScalarType out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": _experts},
    experts_fake,
)
