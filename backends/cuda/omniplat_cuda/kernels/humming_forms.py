"""Weights in the layout that humming takes in, before it lays them out for a device: plain torch, any device.

For N rows and K columns, filled up to multiples of 256 rows and 128 columns:

    weight          int32 [N, K * bits / 32], codes from the low bits upwards; signed integers are held as what they are
                    above their smallest number
    weight_scale    group: [N, K / group], channel: [N, 1], in the layer's dtype, or uint8, bytes of e8m0 or e4m3;
                    block: f32 [N / rows, K / group]; tensor: f32 [1]
    weight_scale_2  tensor: f32 [1]; channel: [N] in the layer's dtype
    zero_point      int32 [N * bits / 32, K / group], packed like codes, but along N; or [N, K / group] in the layer's
                    dtype where a zero point is no code
    bias            [N] in the layer's dtype (of experts: a linear layer keeps its own)

Experts lead, and take the place of [1]. Scales are rounded to the layer's dtype where they are stored finer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import torch
import torch.nn.functional as F

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.word_weights import code_values
from omniplat.runtime.finite import e8m0_scale, fp8_codes, multipliers
from omniplat.runtime.tensors import DTYPES, WeightTensors

#: What vLLM asks humming for, and so what is tried most.
ROWS, COLUMNS = 256, 128
#: Canonical tensors that are read; `pre_scale` is left to the kernel.
ROLES = ("codes", "scale", "zero_point", "global_scale", "pre_scale")

#: What a row's scales may span where they are folded into e4m3 weights.
_BINADES = 11

#: element -> humming's name of the codes, bits of one.
_CODES = {
    "fp4_e2m1": ("float4e2m1", 4),
    "fp8_e4m3": ("float8e4m3", 8),
    "int4": ("uint4", 4),
    "uint4": ("uint4", 4),
    "int8": ("uint8", 8),
    "uint8": ("uint8", 8),
    "int8_bnb": ("uint8", 8),
}
_SCALES = {"e8m0": "float8e8m0", "e4m3": "float8e4m3"}
#: humming's name of scales of 8 bits -> torch's dtype, as which humming takes them. Buffers hold their bytes.
_BYTES = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}
_FLOATS = {"bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, slots=True)
class HummingForm:
    """What the tensors of a weight hold.

    `scale`     what shares one: "tensor", "channel", "group" or "block", of `group` columns and `rows` rows;
    `scale_dtype`  humming's name of its format.
    `second`    the scale above: "", "tensor" or "channel". `zero`: "", "int" (packed) or "float".
    `compute`   the layer's dtype, "bf16" or "f16". `experts`: 0 for a plain weight.
    """

    element: str
    scale: str
    scale_dtype: str
    group: int
    rows: int
    second: str
    zero: str
    bias: bool
    compute: str
    out_features: int
    in_features: int
    experts: int

    @property
    def codes(self) -> str:
        """humming's name of the codes' format."""
        return _CODES[self.element][0]

    @property
    def bits(self) -> int:
        return _CODES[self.element][1]

    @property
    def offset(self) -> int:
        """What is added to integers so that none is negative."""
        return _offset(self.element)

    @property
    def padded(self) -> tuple[int, int]:
        """N and K of the tensors."""
        return -(-self.out_features // ROWS) * ROWS, -(-self.in_features // COLUMNS) * COLUMNS

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.compute]


def encode_form(form: HummingForm) -> str:
    return msgspec.json.encode(form, order="sorted").decode()


@lru_cache(maxsize=4096)
def decode_form(text: str) -> HummingForm:
    return msgspec.json.decode(text.encode(), type=HummingForm)


def form_of(weight: WeightTensors, spec: LayerSpec) -> HummingForm:
    """Raises UnsupportedCombinationError for zero points that neither a code nor the layer's dtype holds, and for
    unsigned codes without any."""
    quant = weight.scheme.weight
    group, rows = 0, 1
    scale, scale_dtype = "channel", _FLOATS[spec.dtype]
    if quant.granularity == "group":
        group = quant.group_size
        scale, scale_dtype = "group", _SCALES.get(quant.scale_format, scale_dtype)
    elif quant.granularity == "block":
        rows, group = quant.block
        scale, scale_dtype = "block", "float32"
    elif "zero_point" not in weight.tensors and _is_one(weight.tensors["scale"]):
        scale, scale_dtype = "tensor", "float32"
    second = ""
    if "global_scale" in weight.tensors:
        second = "tensor" if _is_one(weight.tensors["global_scale"]) else "channel"
    return HummingForm(
        element=quant.element,
        scale=scale,
        scale_dtype=scale_dtype,
        group=group,
        rows=rows,
        second=second,
        zero=_zero_of(weight, spec),
        bias=weight.experts > 0 and "bias" in weight.tensors,
        compute=spec.dtype,
        out_features=weight.out_features,
        in_features=weight.in_features,
        experts=weight.experts,
    )


def _is_one(scale: torch.Tensor) -> bool:
    """True where all rows of a weight, or of each expert, have the same scale [..., N, 1]."""
    return bool((scale == scale[..., :1, :]).all())


def _zero_of(weight: WeightTensors, spec: LayerSpec) -> str:
    element, zero = weight.scheme.weight.element, weight.tensors.get("zero_point")
    if zero is None and element.startswith("uint"):
        # without one humming takes the middle of the codes for 0
        reason = "humming  needs a zero point of unsigned codes, found none"
        raise UnsupportedCombinationError("cuda", spec.op, weight.scheme.id, [spec.name], [reason])
    if zero is None:
        return ""
    _, bits = _CODES[element]
    shifted = _shifted_zero(zero, element)
    is_code = not zero.is_floating_point() and bool(((shifted >= 0) & (shifted < 1 << bits)).all())
    if is_code:
        return "int"
    if bool((shifted.to(DTYPES[spec.dtype]).to(torch.float32) == shifted).all()):
        return "float"
    reason = f"humming  needs zero points that are numbers of {spec.dtype}, found others"
    raise UnsupportedCombinationError("cuda", spec.op, weight.scheme.id, [spec.name], [reason])


def _offset(element: str) -> int:
    """What codes of an element are held above their smallest by."""
    return 1 << (_CODES[element][1] - 1) if element.startswith("int") else 0


def _shifted_zero(zero: torch.Tensor, element: str) -> torch.Tensor:
    """Zero points of codes above their smallest, f32."""
    return zero.to(torch.float32) + _offset(element)


def input_tensors(weight: WeightTensors, form: HummingForm, name: str) -> dict[str, torch.Tensor]:
    """The tensors above. Raises InvalidCheckpointError, naming the layer, for codes and e8m0 scales of NaN."""
    rows, columns = form.padded
    code_bytes = _filled(_code_bytes(weight, form, name), rows, columns * form.bits // 8)
    tensors = {"weight": code_bytes.contiguous().view(torch.int32)}
    scale = weight.tensors["scale"]
    if form.scale == "tensor":
        tensors["weight_scale"] = scale[..., 0, 0].to(torch.float32).reshape(-1).contiguous()
    elif form.scale == "channel":
        tensors["weight_scale"] = _filled(scale.to(form.dtype), rows, 1)
    elif form.scale == "block":
        tensors["weight_scale"] = _filled(multipliers(weight, name), rows // form.rows, columns // form.group)
    else:
        tensors["weight_scale"] = _group_scale(scale, form, name)
    if form.second:
        second = weight.tensors["global_scale"][..., 0]
        one = second[..., 0].to(torch.float32).reshape(-1).contiguous()
        tensors["weight_scale_2"] = one if form.second == "tensor" else _filled_rows(second.to(form.dtype), rows)
    if form.zero:
        zero = _shifted_zero(weight.tensors["zero_point"], form.element)
        zero = _filled(zero, rows, columns // form.group if form.group else 1)
        tensors["zero_point"] = zero.to(form.dtype) if form.zero == "float" else _packed_rows(zero, form.bits)
    if form.bias:
        tensors["bias"] = _filled_rows(weight.tensors["bias"].to(form.dtype), rows)
    return tensors


def require_narrow_rows(weight: WeightTensors, name: str) -> None:
    """humming folds e8m0 scales into e4m3 weights, which reach 11 binades below the largest scale of a row.

    Raises InvalidCheckpointError, naming the layer, where groups that are not all zero lie lower.
    """
    scale = weight.tensors["scale"].view(torch.uint8).to(torch.int16)
    codes = weight.tensors["codes"].view(torch.uint8)
    holds = (codes.reshape(*scale.shape, -1) & 0x77).ne(0).any(-1)
    largest = torch.where(holds, scale, 0).amax(-1, keepdim=True)
    if bool((holds & (scale < largest - _BINADES)).any()):
        raise InvalidCheckpointError(f"scales of a row span more than {_BINADES} binades", key=name)


def _code_bytes(weight: WeightTensors, form: HummingForm, name: str) -> torch.Tensor:
    """uint8 [..., N, K * bits / 8]."""
    codes = weight.tensors["codes"]
    if form.element == "fp8_e4m3":
        return fp8_codes(codes, name)
    stored = codes.contiguous().view(torch.uint8)
    if not form.offset:
        return stored
    return stored ^ (0x88 if form.bits == 4 else 0x80)


def _group_scale(scale: torch.Tensor, form: HummingForm, name: str) -> torch.Tensor:
    rows, groups = form.padded[0], form.padded[1] // form.group
    if form.scale_dtype == "float8e8m0":
        return _filled(e8m0_scale(scale, name), rows, groups)
    if form.scale_dtype == "float8e4m3":
        return _filled(scale.contiguous().view(torch.uint8), rows, groups)
    return _filled(scale.to(form.dtype), rows, groups)


def as_numbers(scale: torch.Tensor, form: HummingForm) -> torch.Tensor:
    """`weight_scale` as humming takes it: bytes in their format."""
    return scale.view(_BYTES[form.scale_dtype]) if scale.dtype == torch.uint8 else scale


def as_bytes(scale: torch.Tensor) -> torch.Tensor:
    """`weight_scale` as a buffer: torch has operations on uint8 that it has on no number of 8 bits."""
    return scale.view(torch.uint8) if scale.dtype in _BYTES.values() else scale


def _filled(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., N, C] with zeros behind, contiguous."""
    missing = (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2])
    return F.pad(tensor, missing) if any(missing) else tensor.contiguous()


def _filled_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., N] with zeros behind, contiguous."""
    return _filled(tensor.unsqueeze(-1), rows, 1).squeeze(-1)


def _packed_rows(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of `bits` bits [..., N, G] to int32 [..., N * bits / 32, G]."""
    per_byte = 8 // bits
    numbers = zero.to(torch.uint8).transpose(-1, -2)
    parts = numbers.reshape(*numbers.shape[:-1], -1, per_byte)
    stored: torch.Tensor = parts[..., 0]
    for part in range(1, per_byte):
        stored = torch.bitwise_or(stored, parts[..., part] << (bits * part))
    return stored.contiguous().view(torch.int32).transpose(-1, -2).contiguous()


def dequantized(tensors: dict[str, torch.Tensor], form: HummingForm) -> torch.Tensor:
    """What `input_tensors` of one weight, or one expert's, stand for: f32 [N, K]."""
    rows, columns = form.padded
    codes = _unpacked(tensors["weight"], form.bits)
    if form.element.startswith("fp"):
        weight = code_values(form.element).to(codes.device)[codes.to(torch.int64)]
    else:
        weight = codes.to(torch.float32)
        groups = columns // form.group if form.group else 1
        zero = torch.full((rows, groups), float(form.offset), device=codes.device)
        if form.zero == "float":
            zero = tensors["zero_point"].to(torch.float32)
        elif form.zero == "int":
            zero = _unpacked(tensors["zero_point"].t().contiguous(), form.bits).t().to(torch.float32)
        weight = weight - zero.repeat_interleave(columns // groups, 1)
    scale = tensors["weight_scale"]
    if form.scale_dtype == "float8e8m0":
        scale = torch.exp2(scale.to(torch.float32) - 127.0)
    scale = as_numbers(scale, form).to(torch.float32)
    if form.scale == "tensor":
        weight = weight * scale.reshape(())
    else:
        across = scale.repeat_interleave(columns // scale.shape[1], 1)
        weight = weight * across.repeat_interleave(rows // scale.shape[0], 0)
    if form.second:
        weight = weight * tensors["weight_scale_2"].to(torch.float32).reshape(-1, 1)
    return weight[: form.out_features, : form.in_features]


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, W] to codes uint8 [R, W * 32 / bits]."""
    stored = words.view(torch.uint8)
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
