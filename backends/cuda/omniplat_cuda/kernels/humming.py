"""Linear layers over humming: weights of 4 and 8 bits, decoded in registers, by inputs of 16 or 8 bits.

`HummingLinear` and its kin are the kernels, `omniplat::cuda_humming_linear` is their operator. On the CPU a weight
stays as humming takes it in and is decoded whole at every call: slow, and enough to test the code around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omniplat.capability import Capability
from omniplat.layer import LayerSpec
from omniplat.portable.quantize import quantize_rows
from omniplat.runtime.declared import require_declared
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.operators import new_library, register
from omniplat.runtime.quant_text import decode_quant, encode_quant
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import parse_activation_id
from omniplat_cuda.capabilities import humming as declared
from omniplat_cuda.kernels.humming_forms import (
    ROLES,
    HummingForm,
    decode_form,
    dequantized,
    encode_form,
    form_of,
    input_tensors,
    require_narrow_rows,
)

_LIBRARY = new_library()
#: element of an input -> humming's name of it, torch's dtype.
_INPUTS = {"fp8_e4m3": ("float8e4m3", torch.float8_e4m3fn), "int8": ("int8", torch.int8)}


@dataclass(frozen=True, slots=True)
class HummingConfig:
    """`layer` is humming's description of the laid out tensors, as JSON, and "" on the CPU. `form` is a HummingForm,
    `activation` the input's TensorQuant, as JSON; "" for inputs of the layer's dtype."""

    layer: str
    form: str
    activation: str


class HummingLinear(LinearKernel[HummingConfig]):
    """Buffers: `weight`, `weight_scale`, `weight_scale_2` and `zero_point` as humming lays them out for the device (on
    the CPU as `humming_forms` says), `pre_scale` f32 [K]. A bias is added to the rounded product."""

    name: ClassVar[str] = "humming_linear"
    config_type = HummingConfig
    capability: ClassVar[Capability] = declared.A16

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[HummingConfig]:
        """Raises UnsupportedCombinationError for what the capability does not declare, and for zero points that the
        layer's dtype does not hold; InvalidCheckpointError for NaN, and for scales that span too many binades."""
        require_declared("cuda", self.capability, weight, spec, ROLES)
        executes = self.capability.executes
        quant = parse_activation_id(executes) if executes else weight.scheme.activation
        form = form_of(weight, spec)
        tensors = input_tensors(weight, form, spec.name)
        element = _INPUTS[quant.element][0] if quant is not None else ""
        if quant is not None and form.scale_dtype == "float8e8m0":
            require_narrow_rows(weight, spec.name)
        layer, tensors = laid_out(tensors, form, element)
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        activation = encode_quant(quant) if quant is not None else ""
        return Prepared(tensors, HummingConfig(layer, encode_form(form), activation))

    def apply(
        self,
        config: HummingConfig,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.omniplat.cuda_humming_linear(
            x,
            tensors["weight"],
            tensors["weight_scale"],
            tensors.get("weight_scale_2"),
            tensors.get("zero_point"),
            tensors.get("pre_scale"),
            bias,
            config.layer,
            config.form,
            config.activation,
            out_dtype,
        )
        return y


class HummingLinearTuring(HummingLinear):
    name: ClassVar[str] = "humming_linear_turing"
    capability: ClassVar[Capability] = declared.A16_TURING


class HummingLinearBlock(HummingLinear):
    name: ClassVar[str] = "humming_linear_block"
    capability: ClassVar[Capability] = declared.A16_BLOCK


class HummingLinearFp8(HummingLinear):
    name: ClassVar[str] = "humming_linear_fp8"
    capability: ClassVar[Capability] = declared.FP8


class HummingLinearMxfp4A8(HummingLinear):
    name: ClassVar[str] = "humming_linear_mxfp4_a8"
    capability: ClassVar[Capability] = declared.MXFP4_A8


def laid_out(
    tensors: dict[str, torch.Tensor], form: HummingForm, activation: str
) -> tuple[str, dict[str, torch.Tensor]]:
    """humming's description of a layer and its tensors, laid out for a CUDA device; "" and `tensors` elsewhere."""
    if not tensors["weight"].is_cuda:
        return "", tensors
    from omniplat_cuda.kernels import humming_runtime

    return humming_runtime.laid_out(tensors, form, activation)


def aligned(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`rows` [M, K] in `dtype`, as kernels read them: one behind the other, from a multiple of 16 bytes on."""
    rows = rows.to(dtype).contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _smoothed(x: torch.Tensor, pre_scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return aligned(rows if pre_scale is None else rows.to(torch.float32) * pre_scale, dtype)


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    layer: str,
    form: str,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The whole weight in float32, then one product."""
    held = decode_form(form)
    named = {"weight": weight, "weight_scale": weight_scale, "weight_scale_2": weight_scale_2, "zero_point": zero_point}
    matrix = dequantized({role: tensor for role, tensor in named.items() if tensor is not None}, held)
    rows = x.reshape(-1, x.shape[-1])
    if activation and len(rows):
        codes, scale = quantize_rows(rows, decode_quant(activation), pre_scale, None)
        values = codes.view(_INPUTS[decode_quant(activation).element][1]).to(torch.float32) * scale
    else:
        values = _smoothed(x, pre_scale, held.dtype).to(torch.float32)
    return _finished(F.linear(values, matrix).to(held.dtype), x, bias, out_dtype)


def _on_device(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    pre_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    layer: str,
    form: str,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    held = decode_form(form)
    count = x.numel() // held.in_features
    if not count:
        return x.new_empty((*x.shape[:-1], held.out_features), dtype=out_dtype)
    from omniplat_cuda.kernels.humming_runtime import Key, bucket_of, launch

    scale = None
    if activation:
        quant = decode_quant(activation)
        codes, scale = quantize_rows(x.reshape(-1, x.shape[-1]), quant, pre_scale, None)
        rows = codes.view(_INPUTS[quant.element][1])
    else:
        rows = _smoothed(x, pre_scale, held.dtype)
    key = Key(layer, "dense", bucket_of(count, "dense"), x.get_device(), whole_sums=True)
    y = launch(key, held, rows, weight, weight_scale, weight_scale_2, zero_point, input_scale=scale)
    return _finished(y, x, bias, out_dtype)


def _finished(y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The product [M, N] with its bias, in the shape and dtype of the output."""
    if bias is not None:
        y = y.add_(bias)
    return y.to(out_dtype).view(*x.shape[:-1], y.shape[-1])


def _fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    *_, form, _activation, dtype = arguments
    assert isinstance(form, str)
    assert isinstance(dtype, torch.dtype)
    return x.new_empty((*x.shape[:-1], decode_form(form).out_features), dtype=dtype)


register(
    _LIBRARY,
    "cuda_humming_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_scale_2, Tensor? zero_point, "
    "Tensor? pre_scale, Tensor? bias, str layer, str form, str activation, ScalarType out_dtype) -> Tensor",
    {"CPU": _plain, "CUDA": _on_device},
    _fake,
)
