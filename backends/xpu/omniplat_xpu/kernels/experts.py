"""Experts over the vendor's grouped product: weights in 4 and 8 bits, inputs in 16.

Rows are gathered by expert, go through w13, the activation and w2, and are weighed and added up in f32. Ids are
mapped to local ones before the vendor sees them: its kernel would look up an id of -1 before the start of the map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.layer import LayerSpec, MoeSpec
from omniplat.runtime.activate import activate
from omniplat.runtime.finite import e8m0_scale, fp8_codes, multipliers
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.routing import local_ids
from omniplat.runtime.tensors import WeightTensors
from omniplat_xpu.kernels import vendor
from omniplat_xpu.kernels.vendor import operator, require_dtype

#: Numbers of chosen experts that the vendor's kernels are compiled for.
TOP_K = (1, 2, 4, 6, 7, 8, 10, 16)
_FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_CARRIERS = (("int4", torch.int8), ("fp4_e2m1", torch.float4_e2m1fn_x2), ("fp8_e4m3", torch.float8_e4m3fn))


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`elements` are the number formats of w13 and of w2. `parameters` holds limit and alpha of the activation, as
    text: a compiler takes a float for an input that varies."""

    elements: tuple[str, str]
    experts: int
    intermediate: int
    parameters: tuple[str, str]


class GroupedGemm(MoeKernel[ExpertsConfig]):
    """Buffers, for w13 (N = 2 I) and w2: `codes` [E, N, K/2], or [E, K, N] for fp8; `scale`; `bias` [E, N]."""

    name: ClassVar[str] = "grouped_gemm"
    config_type = ExpertsConfig

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[ExpertsConfig]:
        """Raises UnsupportedCombinationError for what is not declared, for more chosen experts than the vendor's
        kernels take, and for scales or biases that the layer's dtype cannot hold."""
        dtype = vendor.layer_dtype(spec)
        tensors = {}
        for prefix, weight in (("w13_", w13), ("w2_", w2)):
            vendor.require(weight, spec, self.name)
            tensors[prefix + "codes"] = self._codes(weight, spec)
            tensors[prefix + "scale"] = self._scale(weight, spec, dtype)
            if "bias" in weight.tensors:
                tensors[prefix + "bias"] = _same_in(weight.tensors["bias"], dtype, weight, spec, self.name)
        moe = spec.moe or MoeSpec(w13.experts, w2.in_features)
        if moe.top_k > TOP_K[-1]:
            raise vendor.refuse(w13, spec, self.name, f"at most {TOP_K[-1]} experts of a row")
        parameters = repr(moe.limit), repr(moe.alpha)
        elements = w13.scheme.weight.element, w2.scheme.weight.element
        return Prepared(tensors, ExpertsConfig(elements, w13.experts, w2.in_features, parameters))

    def _codes(self, weight: WeightTensors, spec: LayerSpec) -> torch.Tensor:
        if weight.scheme.weight.bits == 4:
            return weight.tensors["codes"].contiguous()
        return fp8_codes(weight.tensors["codes"], spec.name).transpose(1, 2).contiguous()

    def _scale(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
        """[E, N, K/g] in the layer's dtype for int4 (rounded to it), else bytes [E, N, K/32]."""
        scale = weight.tensors["scale"]
        if weight.scheme.weight.scale_format != "e8m0":
            return scale.to(dtype).contiguous()
        _require_representable(weight, spec, dtype, self.name)
        # Where both layouts have the same shape, the product reads the other one.
        is_ambiguous = weight.scheme.weight.bits == 8 and scale.shape[2] == weight.out_features
        return scale.transpose(1, 2).contiguous() if is_ambiguous else scale.contiguous()

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
        y: torch.Tensor = torch.ops.omniplat.xpu_experts(
            x,
            tensors["w13_codes"],
            tensors["w13_scale"],
            tensors.get("w13_bias"),
            tensors["w2_codes"],
            tensors["w2_scale"],
            tensors.get("w2_bias"),
            topk_ids,
            topk_weights,
            expert_map,
            list(config.elements),
            config.intermediate,
            activation,
            list(config.parameters),
            out_dtype,
        )
        return y


class GroupedGemmBlock(GroupedGemm):
    """fp8 with scales of blocks of 128 x 128: `codes` [E, K, N], `scale` f32 [E, K/128, N/128]."""

    name: ClassVar[str] = "grouped_gemm_fp8_block"

    def _scale(self, weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
        return multipliers(weight, spec.name).transpose(1, 2).contiguous()


def _same_in(
    tensor: torch.Tensor, dtype: torch.dtype, weight: WeightTensors, spec: LayerSpec, name: str
) -> torch.Tensor:
    """`tensor` in `dtype`, where that changes no value."""
    cast = tensor.to(dtype)
    if not bool((cast.to(torch.float32) == tensor.to(torch.float32)).all()):
        raise vendor.refuse(weight, spec, name, f"a bias of {dtype}")
    return cast.contiguous()


def _require_representable(weight: WeightTensors, spec: LayerSpec, dtype: torch.dtype, name: str) -> None:
    """The product multiplies weights in its own dtype, by scales in that dtype, and reads NaN as infinity."""
    scale = e8m0_scale(weight.tensors["scale"], spec.name)
    if dtype == torch.float16:
        magnitudes = weight.tensors["codes"].contiguous().view(torch.uint8) & (
            0x77 if weight.scheme.weight.bits == 4 else 0x7F
        )
        used = magnitudes.view(*scale.shape, -1).amax(-1) > 0
        exponent = scale.to(torch.int32) - 127
        if bool((used & ((exponent < -24) | (exponent > 15))).any()):
            raise vendor.refuse(weight, spec, name, "scales from 2^-24 to 2^15 for layers in float16")


# -- the operator -----------------------------------------------------------------------------------------------

_LIBRARY = new_library()


def _experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_bias: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    elements: list[str],
    intermediate: int,
    activation: str,
    parameters: list[str],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    require_dtype(x.dtype, out_dtype, "cutlass_grouped_gemm_interface")
    rows, columns = x.shape
    y = torch.zeros((rows, columns), dtype=out_dtype, device=x.device)
    if y.numel() == 0 or topk_ids.shape[1] == 0:
        return y
    ids, weights = _chosen(topk_ids, topk_weights, expert_map)
    count, top = w13.shape[0], ids.shape[1]
    w13, w2 = (codes.view(dict(_CARRIERS)[name]) for codes, name in zip((w13, w2), elements, strict=True))
    gathered = torch.empty((rows * top, columns), dtype=x.dtype, device=x.device)
    rows_per_expert = torch.zeros(count, dtype=torch.int32, device=x.device)
    row_of = torch.empty((rows, top), dtype=torch.int32, device=x.device)
    operator("_moe_C", "remap_hidden_states")(
        x.contiguous(), None, gathered, None, None, rows_per_expert, row_of, ids, count, count
    )
    product = operator("_xpu_C", "cutlass_grouped_gemm_interface")
    both = torch.empty((rows * top, 2 * intermediate), dtype=x.dtype, device=x.device)
    product(gathered, None, w13, w13_scale, w13_bias, both, rows_per_expert, 2 * intermediate, columns, count)
    hidden = _activated(both, activation, float(parameters[0]), float(parameters[1]))
    out = torch.empty((rows * top, columns), dtype=x.dtype, device=x.device)
    product(hidden, None, w2, w2_scale, w2_bias, out, rows_per_expert, columns, intermediate, count)
    operator("_moe_C", "moe_gather")(y, out, weights, row_of, count)
    return y


def _chosen(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids int32 [M, T] and weights f32 [M, T], contiguous, with T one of `TOP_K`: slots of -1 are added."""
    ids = local_ids(topk_ids, expert_map)
    missing = next(top for top in TOP_K if top >= ids.shape[1]) - ids.shape[1]
    padded = F.pad(ids.to(torch.int32), (0, missing), value=-1)
    return padded.contiguous(), F.pad(topk_weights.to(torch.float32), (0, missing)).contiguous()


def _activated(both: torch.Tensor, activation: str, limit: float, alpha: float) -> torch.Tensor:
    """[M, 2 I] to [M, I] in the same dtype, by the vendor's operator where it has one."""
    if activation in _FUSED_ACTIVATIONS and not limit:
        hidden = torch.empty((both.shape[0], both.shape[1] // 2), dtype=both.dtype, device=both.device)
        operator("_C", f"{activation}_and_mul")(hidden, both)
        return hidden
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    return activate(gate, up, activation, limit, alpha).to(both.dtype)


register(
    _LIBRARY,
    "xpu_experts(Tensor x, Tensor w13, Tensor w13_scale, Tensor? w13_bias, Tensor w2, Tensor w2_scale, "
    "Tensor? w2_bias, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, str[] elements, int intermediate, "
    "str activation, str[] parameters, ScalarType out_dtype) -> Tensor",
    {"CompositeExplicitAutograd": _experts},
    experts_fake,
)
