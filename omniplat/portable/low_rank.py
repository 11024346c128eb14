"""SVDQuant layers whose 4-bit residual stays in words and whose input is not quantized.

`PortableLowRank` is the kernel, `omniplat::weight_only_low_rank_linear` its operator: the residual as in
`omniplat.portable.weight_only`, the low-rank pair, which sees the input before it is smoothed, by torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.quantize import has_triton
from omniplat.portable.weight_only import smoothed
from omniplat.portable.word_weights import decode_form, encode_form, form_of, why_not, word_tensors
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme, low_rank_base

_LIBRARY = new_library()
_PAIR = ("low_rank_down", "low_rank_up")


@dataclass(frozen=True, slots=True)
class LowRankConfig:
    """`form` is the residual's WordForm as JSON."""

    form: str


class PortableLowRank(LinearKernel[LowRankConfig]):
    """y = (x * pre_scale) R^T + (x D) U^T + bias.

    Buffers: those of `word_tensors` for R, and `low_rank_down` D [K, rank] and `low_rank_up` U [N, rank] as stored.
    """

    name: ClassVar[str] = "portable_low_rank"
    config_type = LowRankConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[LowRankConfig]:
        """Raises UnsupportedCombinationError for weights without a low-rank pair and for residuals that it does not
        decode."""
        base = low_rank_base(weight.scheme.weight)
        if base is None or weight.experts:
            raise self._refusal("a low-rank pair, and no experts", weight, spec)
        tensors = {role: tensor for role, tensor in weight.tensors.items() if role not in _PAIR}
        residual = replace(weight, scheme=Scheme(base, None, weight.scheme.pre_scale), tensors=tensors)
        if reason := why_not(residual):
            raise self._refusal(reason, weight, spec)
        form = form_of(residual)
        held = word_tensors(residual, form, spec.name)
        pair = {role: weight.tensors[role].contiguous() for role in _PAIR}
        return Prepared(held | pair, LowRankConfig(encode_form(form)))

    def _refusal(self, needed: str, weight: WeightTensors, spec: LayerSpec) -> UnsupportedCombinationError:
        return UnsupportedCombinationError(
            "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {needed}"]
        )

    def apply(
        self,
        config: LowRankConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        optional = (tensors.get(role) for role in ("row_scale", "pre_scale"))
        pair = (tensors[role] for role in _PAIR)
        y: torch.Tensor = torch.ops.omniplat.weight_only_low_rank_linear(
            x, tensors["words"], tensors["scale"], *optional, *pair, bias, config.form, out_dtype
        )
        return y


def _in_float32(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Both products in float32, and their sum rounded once."""
    y: torch.Tensor = torch.ops.omniplat.weight_only_linear(
        x, words, scale, None, row_scale, None, pre_scale, bias, form, torch.float32
    )
    middle = x.reshape(-1, x.shape[-1]).to(torch.float32) @ down.to(torch.float32)
    y.view(-1, y.shape[-1]).addmm_(middle, up.to(torch.float32).t())
    return y.to(out_dtype)


def on_device(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As `_in_float32`, but where all is bf16 the pair's middle and its product are rounded to it, which the bound of a
    layer with a pair allows for. f16 has too few exponents."""
    given = (x, down, up, *(() if bias is None else (bias,)))
    if not has_triton() or out_dtype != torch.bfloat16 or any(tensor.dtype != torch.bfloat16 for tensor in given):
        return _in_float32(x, words, scale, row_scale, pre_scale, down, up, bias, form, out_dtype)
    from omniplat.portable.weight_only_triton import most_tokens

    held = decode_form(form)
    rows = x.reshape(-1, x.shape[-1])
    middle = rows @ down
    if len(rows) > most_tokens(held, x.dtype, "", x.device):
        from omniplat.portable.decode_triton import decoded

        y = middle @ up.t() if bias is None else torch.addmm(bias, middle, up.t())
        # 2 bytes for each of its numbers while the call lasts
        weight = decoded(words, None, scale, None, row_scale, held, x.dtype)
        y.addmm_(smoothed(x, pre_scale), weight.t())
        return y.view(*x.shape[:-1], held.out_features)
    residual: torch.Tensor = torch.ops.omniplat.weight_only_linear(
        x, words, scale, None, row_scale, None, pre_scale, bias, form, torch.float32
    )
    return residual.add_((middle @ up.t()).view(residual.shape)).to(out_dtype)


register(
    _LIBRARY,
    "weight_only_low_rank_linear(Tensor x, Tensor words, Tensor scale, Tensor? row_scale, Tensor? pre_scale, "
    "Tensor low_rank_down, Tensor low_rank_up, Tensor? bias, str form, ScalarType out_dtype) -> Tensor",
    {"CPU": _in_float32, "CUDA": on_device, "XPU": on_device},
    linear_fake,
)
