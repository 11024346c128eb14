"""Layers of experts over humming's indexed products: rows are read where they lie, in tiles by expert.

`HummingExperts` is the kernel, `omniplat::cuda_humming_experts` its operator. On the CPU weights stay as humming takes
them in and are decoded expert by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from omniplat.capability import Capability
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.routing import sort_by_expert, weighted_sum
from omniplat.runtime.activate import activate
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.tensors import WeightTensors
from omniplat_cuda.capabilities import humming as declared
from omniplat_cuda.kernels.humming import aligned, laid_out
from omniplat_cuda.kernels.humming_forms import (
    ROLES,
    HummingForm,
    decode_form,
    dequantized,
    encode_form,
    form_of,
    input_tensors,
)

if TYPE_CHECKING:
    from omniplat_cuda.kernels.align_triton import Tiles
    from omniplat_cuda.kernels.humming_runtime import Key

_LIBRARY = new_library()
#: Buffers of one weight, in the order in which the operator takes them.
_BUFFERS = ("weight", "weight_scale", "weight_scale_2", "zero_point", "bias")


@dataclass(frozen=True, slots=True)
class HummingExpertsConfig:
    """`*_layer` are humming's descriptions of the laid out tensors, as JSON, and "" on the CPU; `w13` and `w2` are
    HummingForms, as JSON."""

    w13_layer: str
    w2_layer: str
    w13: str
    w2: str
    limit: float
    alpha: float


class HummingExperts(MoeKernel[HummingExpertsConfig]):
    """Buffers: those of `HummingLinear` with leading experts, and `bias`, as `w13_*` and `w2_*`.

    For few rows programs share K: their sums are rounded to the layer's dtype before they are added up, in any order,
    unless torch is told to use deterministic algorithms.
    """

    name: ClassVar[str] = "humming_moe"
    config_type = HummingExpertsConfig
    capability: ClassVar[Capability] = declared.MOE_A16

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[HummingExpertsConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare, and for zero points that the
        layer's dtype does not hold; InvalidCheckpointError for NaN."""
        tensors: dict[str, torch.Tensor] = {}
        described: list[str] = []
        for role, weight in (("w13", w13), ("w2", w2)):
            require_declared("cuda", self.capability, weight, spec, ROLES)
            if "pre_scale" in weight.tensors:
                reason = f"{self.name}  needs experts that are not smoothed, found {role} with pre_scale"
                raise UnsupportedCombinationError("cuda", spec.op, weight.scheme.id, [spec.name], [reason])
            form = form_of(weight, spec)
            layer, held = laid_out(input_tensors(weight, form, f"{spec.name}.{role}"), form, "")
            tensors |= {f"{role}_{name}": tensor for name, tensor in held.items()}
            described += [layer, encode_form(form)]
        assert spec.moe is not None
        w13_layer, w13_form, w2_layer, w2_form = described
        config = HummingExpertsConfig(w13_layer, w2_layer, w13_form, w2_form, spec.moe.limit, spec.moe.alpha)
        return Prepared(tensors, config)

    def apply(
        self,
        config: HummingExpertsConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        w13, w2 = ([tensors.get(f"{role}_{name}") for name in _BUFFERS] for role in ("w13", "w2"))
        y: torch.Tensor = torch.ops.omniplat.cuda_humming_experts(
            x,
            topk_ids,
            topk_weights,
            expert_map,
            w13,
            w2,
            config.w13_layer,
            config.w2_layer,
            config.w13,
            config.w2,
            activation,
            config.limit,
            config.alpha,
            out_dtype,
        )
        return y


class HummingExpertsByRow(HummingExperts):
    name: ClassVar[str] = "humming_moe_rows"
    capability: ClassVar[Capability] = declared.MOE_BY_ROW


class HummingExpertsTuring(HummingExperts):
    name: ClassVar[str] = "humming_moe_turing"
    capability: ClassVar[Capability] = declared.MOE_TURING


def _on_device(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: list[torch.Tensor | None],
    w2: list[torch.Tensor | None],
    w13_layer: str,
    w2_layer: str,
    w13_form: str,
    w2_form: str,
    activation: str,
    limit: float,
    alpha: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`w13` and `w2` are the tensors of `_BUFFERS`, None for those that there are not."""
    if not len(x):
        return x.new_empty(x.shape, dtype=out_dtype)
    from omniplat.portable.experts_triton import activated, combine
    from omniplat_cuda.kernels.align_triton import align
    from omniplat_cuda.kernels.humming_runtime import Key, bucket_of, tile_rows

    first_form, second_form = decode_form(w13_form), decode_form(w2_form)
    experts = first_form.experts
    slots = topk_ids.shape[1]
    # of ranks that share the experts, each has its part of the pairs
    pairs = topk_ids.numel() if expert_map is None else -(-topk_ids.numel() * experts // len(expert_map))
    bucket, device = bucket_of(pairs, "indexed"), x.get_device()
    whole_sums = torch.are_deterministic_algorithms_enabled()
    first, second = (Key(layer, "indexed", bucket, device, whole_sums) for layer in (w13_layer, w2_layer))
    tiles = align(topk_ids, expert_map, experts, tile_rows(first))
    both = _product(first, first_form, aligned(x, first_form.dtype), w13, tiles, slots)
    hidden = activated(both, activation, limit, alpha)
    if tile_rows(second) != tile_rows(first):
        tiles = align(topk_ids, expert_map, experts, tile_rows(second))
    out = _product(second, second_form, hidden, w2, tiles, 1)
    return combine(out, tiles.place, topk_weights, tiles.pairs, out_dtype)


def _product(
    key: Key, form: HummingForm, x: torch.Tensor, buffers: list[torch.Tensor | None], tiles: Tiles, slots: int
) -> torch.Tensor:
    """Every pair's row of `x`, `slots` pairs to a row, by its expert: [pairs, N]; rows of nobody hold anything."""
    from omniplat_cuda.kernels.humming_runtime import launch

    weight, scale, second, zero, bias = buffers
    assert weight is not None
    assert scale is not None
    return launch(key, form, x, weight, scale, second, zero, bias=bias, routing=tiles.routing, slots=slots)


def _plain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: list[torch.Tensor | None],
    w2: list[torch.Tensor | None],
    w13_layer: str,
    w2_layer: str,
    w13_form: str,
    w2_form: str,
    activation: str,
    limit: float,
    alpha: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Expert by expert, weights whole in float32."""
    if not len(x):
        return x.new_empty(x.shape, dtype=out_dtype)
    first, second = decode_form(w13_form), decode_form(w2_form)
    order = sort_by_expert(topk_ids, expert_map, first.experts)
    both = _by_expert(x.to(first.dtype)[order.rows], w13, first, order.ends)
    gate, up = both.to(torch.float32).chunk(2, dim=1)
    hidden = activate(gate, up, activation, limit, alpha).to(second.dtype)
    out = _by_expert(hidden, w2, second, order.ends)
    return weighted_sum(out, order.place, topk_weights, order.ends[-1:], out_dtype)


def _by_expert(
    rows: torch.Tensor, buffers: list[torch.Tensor | None], form: HummingForm, ends: torch.Tensor
) -> torch.Tensor:
    """`rows` [R, K], sorted by expert, by their expert's weight: [R, N]; NaN where there is no expert."""
    y = torch.full((len(rows), form.out_features), torch.nan, dtype=form.dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        named = zip(_BUFFERS, buffers, strict=True)
        held = {name: tensor[expert] for name, tensor in named if tensor is not None}
        if end > start:
            bias = held["bias"][: form.out_features].to(torch.float32) if form.bias else None
            product = F.linear(rows[start:end].to(torch.float32), dequantized(held, form), bias)
            y[start:end] = product.to(form.dtype)
        start = end
    return y


register(
    _LIBRARY,
    "cuda_humming_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor?[] w13, "
    "Tensor?[] w2, str w13_layer, str w2_layer, str w13_form, str w2_form, str activation, float limit, float alpha, "
    "ScalarType out_dtype) -> Tensor",
    {"CPU": _plain, "CUDA": _on_device},
    experts_fake,
)
