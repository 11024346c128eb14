"""Weights of 4 and 8 bits as the weight-only kernels hold them: which can be held, and in which buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import torch

from omniplat.oracle.codecs import element_values
from omniplat.portable.decoded import DECODED_EXPERTS, DECODED_WEIGHTS
from omniplat.portable.words import DEPTH, from_words, to_words
from omniplat.runtime.finite import e8m0_scale, fp8_codes
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant

#: element -> bits of a code. Integers are held as what they are above their smallest, so that none is negative.
_BITS = {"fp4_e2m1": 4, "int4": 4, "uint4": 4, "nf4": 4, "fp4_bnb": 4, "fp8_e4m3": 8, "int8": 8, "uint8": 8}
_TABLES = ("nf4", "fp4_bnb")
_ROLES = frozenset({"codes", "scale", "zero_point", "global_scale", "pre_scale", "bias"})
#: What static activations bring; nothing is quantized here.
_UNUSED = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_SCALES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class WordForm:
    """What the buffers hold.

    `element`   of the codes; `bits` of one and `depth` columns of a part (`omniplat.portable.words`).
    `scale`     how scales are stored: "e8m0", "e4m3", "f32", "bf16", "f16", or "none" where only rows have one.
    `group`     columns that share a scale, `rows` rows that do (blocks).
    """

    element: str
    bits: int
    depth: int
    scale: str
    group: int
    rows: int
    out_features: int
    in_features: int


def why_not(weight: WeightTensors) -> str:
    """What keeps a weight from being decoded here; "" where nothing does."""
    quant = weight.scheme.weight
    decoded = DECODED_EXPERTS if weight.experts else DECODED_WEIGHTS
    if weight.scheme.weight_id not in decoded:
        return f"one of {', '.join(decoded)}"
    if not weight.tensors.keys() <= _ROLES | _UNUSED:
        return f"no roles but {', '.join(sorted(_ROLES))}"
    if quant.element not in ("int4", "int8") and not quant.symmetric and "zero_point" not in weight.tensors:
        return "a zero point"
    return ""


def form_of(weight: WeightTensors) -> WordForm:
    quant = weight.scheme.weight
    columns = weight.in_features
    group, rows = columns, 1
    if quant.granularity == "group":
        group = quant.group_size
    elif quant.granularity == "block":
        rows, group = quant.block
    per_row = quant.granularity in ("tensor", "channel") and "zero_point" not in weight.tensors
    if per_row:
        scale = "none"
    elif quant.scale_format in ("e8m0", "e4m3") and weight.tensors["scale"].element_size() == 1:
        scale = quant.scale_format
    else:
        scale = _SCALES[_float_scale(weight.tensors["scale"]).dtype]
    depth = DEPTH if group % DEPTH == 0 or per_row or quant.granularity in ("tensor", "channel") else DEPTH // 2
    return WordForm(quant.element, _BITS[quant.element], depth, scale, group, rows, weight.out_features, columns)


def _float_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype in _SCALES else scale.to(torch.float32)


def _stored_scale(weight: WeightTensors, form: WordForm, name: str) -> torch.Tensor:
    scale = weight.tensors["scale"]
    if form.scale == "none":
        return torch.empty((*weight.tensors["codes"].shape[:-2], 1, 0), dtype=torch.float32, device=scale.device)
    if form.scale == "e8m0":
        return e8m0_scale(scale, name).contiguous()
    return (scale.view(torch.uint8) if form.scale == "e4m3" else _float_scale(scale)).contiguous()


def _row_scale(weight: WeightTensors, form: WordForm) -> torch.Tensor | None:
    """f32 [..., N]: scales of whole rows, and NVFP4's global scale."""
    source = "scale" if form.scale == "none" else "global_scale"
    held = weight.tensors.get(source)
    return None if held is None else held.to(torch.float32).squeeze(-1).contiguous()


def _bytes_of(codes: torch.Tensor, quant: TensorQuant, name: str) -> torch.Tensor:
    """One code a byte, uint8 [N, K]: bits of floats, numbers above the smallest of integers."""
    if quant.element == "fp8_e4m3":
        return fp8_codes(codes, name)
    stored = codes.contiguous().view(torch.uint8)
    if quant.bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)
        return stored ^ 8 if quant.element == "int4" else stored
    return stored ^ 128 if quant.element == "int8" else stored


def encode_form(form: WordForm) -> str:
    return msgspec.json.encode(form).decode()


@lru_cache(maxsize=4096)
def decode_form(text: str) -> WordForm:
    return msgspec.json.decode(text.encode(), type=WordForm)


def word_tensors(weight: WeightTensors, form: WordForm, name: str) -> dict[str, torch.Tensor]:
    """The buffers of a weight that `why_not` allows: `words` int16 [N, K * bits / 16] (K filled up to whole blocks);
    `scale` as stored, [N, G], or [ceil(N/bn), ceil(K/bk)] of blocks; `zero` uint8 or f32 [N, G]; `row_scale` f32 [N],
    one factor for each row; `table` f32 [16] of codes that are no numbers; `pre_scale` f32 [K]. Experts lead, but for
    `table`. Raises InvalidCheckpointError, naming the layer `name`, for codes and e8m0 scales of NaN."""
    codes = weight.tensors["codes"]
    rows = _bytes_of(codes.reshape(-1, codes.shape[-1]), weight.scheme.weight, name)
    tensors = {
        "words": to_words(rows, form.bits, form.depth).view(*codes.shape[:-1], -1),
        "scale": _stored_scale(weight, form, name),
    }
    if (row_scale := _row_scale(weight, form)) is not None:
        tensors["row_scale"] = row_scale
    if "zero_point" in weight.tensors:
        zero = weight.tensors["zero_point"]
        tensors["zero"] = zero.to(torch.float32 if zero.is_floating_point() else torch.uint8).contiguous()
    if form.element in _TABLES:
        tensors["table"] = code_values(form.element).to(codes.device)
    if "pre_scale" in weight.tensors:
        tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
    return tensors


def dequantized(
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    form: WordForm,
) -> torch.Tensor:
    """The weight of one layer or expert, f32 [N, K]."""
    codes = from_words(words, form.bits, form.depth, form.in_features)
    weight = code_values(form.element).to(words.device)[codes.to(torch.int64)]
    if form.scale != "none":
        column = torch.arange(form.in_features, device=words.device) // form.group
        row = torch.arange(form.out_features, device=words.device) // form.rows
        if zero is not None:
            weight = weight - zero.to(torch.float32)[row][:, column]
        weight = weight * _multipliers(scale, form.scale)[row][:, column]
    return weight if row_scale is None else weight * row_scale[:, None]


@lru_cache(maxsize=16)
def code_values(element: str) -> torch.Tensor:
    """f32: what each held code stands for."""
    if element in ("int4", "int8", "uint4", "uint8"):
        count = 2 ** _BITS[element]
        return torch.arange(count, dtype=torch.float32) - (count // 2 if element.startswith("int") else 0)
    return torch.tensor([float(value) for value in element_values(element)], dtype=torch.float32)


def _multipliers(scale: torch.Tensor, stored: str) -> torch.Tensor:
    if stored == "e8m0":
        exponent = scale.to(torch.int32) - 127
        return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=scale.device), exponent).float()
    return (scale.view(torch.float8_e4m3fn) if stored == "e4m3" else scale).to(torch.float32)
