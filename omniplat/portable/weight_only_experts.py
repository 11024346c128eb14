"""Layers of experts whose weights stay in 4 or 8 bits and whose activations are not quantized.

`PortableExperts` is the kernel, `omniplat::weight_only_experts` its operator: Triton's form on devices that Triton
serves, plain torch elsewhere, expert by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.quantize import has_triton
from omniplat.portable.routing import sort_by_expert, weighted_sum
from omniplat.portable.word_weights import (
    WordForm,
    decode_form,
    dequantized,
    encode_form,
    form_of,
    why_not,
    word_tensors,
)
from omniplat.runtime.activate import activate
from omniplat.runtime.kernel import MoeKernel, Prepared
from omniplat.runtime.operators import experts_fake, new_library, register
from omniplat.runtime.tensors import WeightTensors

#: Buffers of one weight, in the order in which the operator takes them; it also takes the bias.
_BUFFERS = ("words", "scale", "zero", "row_scale", "table", "bias")
_LIBRARY = new_library()


@dataclass(frozen=True, slots=True)
class PortableExpertsConfig:
    """`w13` and `w2` are WordForms as JSON."""

    w13: str
    w2: str
    limit: float
    alpha: float


class PortableExperts(MoeKernel[PortableExpertsConfig]):
    """Buffers: those of `word_tensors` with leading experts, and the biases as stored, as `w13_*` and `w2_*`."""

    name: ClassVar[str] = "portable_moe"
    config_type = PortableExpertsConfig

    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[PortableExpertsConfig]:
        """Raises UnsupportedCombinationError for schemes it does not decode, InvalidCheckpointError for NaN codes."""
        tensors: dict[str, torch.Tensor] = {}
        forms = []
        for role, weight in (("w13", w13), ("w2", w2)):
            reason = "experts that are not smoothed" if "pre_scale" in weight.tensors else why_not(weight)
            if reason:
                raise UnsupportedCombinationError(
                    "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
                )
            form = form_of(weight)
            held = word_tensors(weight, form, f"{spec.name}.{role}")
            if "bias" in weight.tensors:
                held["bias"] = weight.tensors["bias"].contiguous()
            tensors |= {f"{role}_{name}": tensor for name, tensor in held.items()}
            forms.append(encode_form(form))
        assert spec.moe is not None
        first, second = forms
        return Prepared(tensors, PortableExpertsConfig(first, second, spec.moe.limit, spec.moe.alpha))

    def apply(
        self,
        config: PortableExpertsConfig,
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
        y: torch.Tensor = torch.ops.omniplat.weight_only_experts(
            x,
            topk_ids,
            topk_weights,
            expert_map,
            w13,
            w2,
            config.w13,
            config.w2,
            activation,
            config.limit,
            config.alpha,
            out_dtype,
        )
        return y


def _experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: list[torch.Tensor | None],
    w2: list[torch.Tensor | None],
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
    words = w13[0]
    assert words is not None
    first, second = decode_form(w13_form), decode_form(w2_form)
    in_triton = x.device.type != "cpu" and has_triton() and x.dtype in (torch.bfloat16, torch.float16)
    if not in_triton:
        order = sort_by_expert(topk_ids, expert_map, len(words))
        both = _by_expert(x.to(torch.float32)[order.rows], w13, first, order.ends)
        gate, up = both.chunk(2, dim=1)
        out = _by_expert(activate(gate, up, activation, limit, alpha), w2, second, order.ends)
        return weighted_sum(out, order.place, topk_weights, order.ends[-1:], out_dtype)
    from omniplat.portable import experts_triton
    from omniplat.portable.routing_triton import sort_in_tiles

    tokens = experts_triton.tokens_of(topk_ids.numel(), len(words), x.device)
    order, tiles = sort_in_tiles(topk_ids, expert_map, len(words), tokens)
    both = experts_triton.product(x, w13, first, tiles)
    hidden = experts_triton.activated(both, activation, limit, alpha)
    out = experts_triton.product(hidden, w2, second, experts_triton.in_place(tiles))
    return experts_triton.combine(out, order.place, topk_weights, order.ends[-1:], out_dtype)


def _by_expert(
    rows: torch.Tensor, buffers: list[torch.Tensor | None], form: WordForm, ends: torch.Tensor
) -> torch.Tensor:
    """`rows` f32 [R, K], sorted by expert, by their expert's weight: f32 [R, N]; NaN where there is no expert."""
    y = torch.full((len(rows), form.out_features), torch.nan, device=rows.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        words, scale, zero, row_scale, _, bias = (
            None if held is None else held[expert] if name != "table" else held
            for name, held in zip(_BUFFERS, buffers, strict=True)
        )
        assert words is not None
        assert scale is not None
        if end > start:
            weight = dequantized(words, scale, zero, row_scale, form)
            y[start:end] = F.linear(rows[start:end], weight, None if bias is None else bias.to(torch.float32))
        start = end
    return y


register(
    _LIBRARY,
    "weight_only_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, Tensor?[] w13, "
    "Tensor?[] w2, str w13_form, str w2_form, str activation, float limit, float alpha, ScalarType out_dtype) "
    "-> Tensor",
    dict.fromkeys(("CPU", "CUDA", "XPU"), _experts),
    experts_fake,
)
