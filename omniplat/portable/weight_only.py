"""Linear layers whose weights stay in 4 or 8 bits and whose activations are not quantized.

`PortableLinear` is the kernel, `omniplat::weight_only_linear` its operator: Triton's form on devices that Triton
serves, plain torch elsewhere, which decodes the whole weight at every call and is there for tests.
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
from omniplat.portable.word_weights import decode_form, dequantized, encode_form, form_of, why_not, word_tensors
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import linear_fake, new_library, register
from omniplat.runtime.tensors import WeightTensors

_LIBRARY = new_library()


@dataclass(frozen=True, slots=True)
class WeightOnlyConfig:
    """`form` is a WordForm as JSON."""

    form: str


class PortableLinear(LinearKernel[WeightOnlyConfig]):
    """Buffers: see `word_tensors`."""

    name: ClassVar[str] = "portable_linear"
    config_type = WeightOnlyConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[WeightOnlyConfig]:
        """Raises UnsupportedCombinationError for schemes it does not decode, InvalidCheckpointError for NaN codes."""
        reason = "a weight without experts" if weight.experts else why_not(weight)
        if reason:
            raise UnsupportedCombinationError(
                "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        form = form_of(weight)
        return Prepared(word_tensors(weight, form, spec.name), WeightOnlyConfig(encode_form(form)))

    def apply(
        self,
        config: WeightOnlyConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        optional = (tensors.get(role) for role in ("zero", "row_scale", "table", "pre_scale"))
        y: torch.Tensor = torch.ops.omniplat.weight_only_linear(
            x, tensors["words"], tensors["scale"], *optional, bias, config.form, out_dtype
        )
        return y


def smoothed(x: torch.Tensor, pre_scale: torch.Tensor | None) -> torch.Tensor:
    """Rows [M, K] of `x` [..., K], times `pre_scale` f32 [K] where there is one, in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if pre_scale is None else (rows.to(torch.float32) * pre_scale).to(x.dtype)


def _plain(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    table: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The whole weight in float32, then one product."""
    held = decode_form(form)
    weight = dequantized(words, scale, zero, row_scale, held)
    y = F.linear(smoothed(x, pre_scale).to(torch.float32), weight)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype).view(*x.shape[:-1], held.out_features)


def _on_device(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    table: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    form: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if not has_triton() or x.dtype not in (torch.bfloat16, torch.float16):
        return _plain(x, words, scale, zero, row_scale, table, pre_scale, bias, form, out_dtype)
    from omniplat.portable.weight_only_triton import most_tokens, tile_of, weight_only_product
    from omniplat.portable.word_decode_triton import kind_of_zero

    held = decode_form(form)
    rows = x if x.dim() == 2 and pre_scale is None else smoothed(x, pre_scale)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, kind = rows.shape[0], kind_of_zero(zero)
    one_dtype = x.dtype == out_dtype and (bias is None or bias.dtype == x.dtype)
    if count > most_tokens(held, x.dtype, kind, x.device) and x.dtype == torch.bfloat16 and one_dtype:
        from omniplat.portable.decode_triton import decoded

        # 2 bytes for each of its numbers while the call lasts; f16 has too few exponents for that
        weight = decoded(words, table, scale, zero, row_scale, held, x.dtype)
        return F.linear(rows, weight, bias).view(*x.shape[:-1], held.out_features)
    y = torch.empty((*x.shape[:-1], held.out_features), dtype=out_dtype, device=x.device)
    if count:
        tile = tile_of(count, held, x.dtype, kind, x.device)
        weight_only_product(rows, words, table, scale, zero, row_scale, bias, y, held, tile)
    return y


register(
    _LIBRARY,
    "weight_only_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? row_scale, Tensor? table, "
    "Tensor? pre_scale, Tensor? bias, str form, ScalarType out_dtype) -> Tensor",
    {"CPU": _plain, "CUDA": _on_device, "XPU": _on_device},
    linear_fake,
)
