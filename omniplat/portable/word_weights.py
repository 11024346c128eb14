"""Weights of 4 and 8 bits as the weight-only kernels hold them: which can be held, and in which buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
import torch
import torch.nn.functional as F

from omniplat.errors import InvalidCheckpointError
from omniplat.legality import DUAL_COLUMNS
from omniplat.oracle.codecs import element_values
from omniplat.portable.decoded import DECODED_EXPERTS, DECODED_WEIGHTS
from omniplat.portable.words import DEPTH, TABLES, from_words, parts_of, to_words
from omniplat.runtime.finite import e8m0_scale, fp8_codes
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant

#: element -> bits of a code. Integers are held as what they are above their smallest, so that none is negative.
_BITS = {"fp4_e2m1": 4, "int4": 4, "uint4": 4, "nf4": 4, "fp4_bnb": 4, "fp8_e4m3": 8, "int8": 8, "uint8": 8}
_ROLES = frozenset({"codes", "scale", "zero_point", "global_scale", "scale2", "pre_scale", "bias"})
#: What static activations bring; nothing is quantized here.
_UNUSED = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_SCALES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
#: How much smaller, as a power of two, a code's bits are when they stand in a bf16: what packed scales make up for.
_RAISED = {"fp4_e2m1": 126, "fp8_e4m3": 120}
#: e4m3 scales are held as this power of two less, and rows make up for it: raised they would exceed bf16.
_LOWERED_E4M3 = 8


@dataclass(frozen=True, slots=True)
class WordForm:
    """What the buffers hold.

    `element`   of the codes; `bits` of one and `depth` columns of a part (`omniplat.portable.words`).
    `scale`     how scales are stored: "e8m0", "e4m3", "f32", "bf16", "f16", or "none" where only rows have one. Or all
                of a block's parts in one number: "packed_e8m0", as bytes; "packed_bf16". Those are 2^`raised` times
                what they stand for (`omniplat.portable.words_ptx`).
    `group`     columns that share a scale, `rows` rows that do (blocks). Packed scales of half a part's columns stand
                in two numbers: of the first halves of a block's parts, then of the others.
    """

    element: str
    bits: int
    depth: int
    scale: str
    group: int
    rows: int
    out_features: int
    in_features: int
    raised: int = 0

    @property
    def is_packed(self) -> bool:
        """True where scales of a block's parts are one number, or two."""
        return self.scale.startswith("packed")

    @property
    def halves(self) -> int:
        """Packed numbers of a block."""
        return max(1, self.depth // self.group)


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
    elif quant.second_scale == "dual":
        scale = "f32"
    elif quant.scale_format in ("e8m0", "e4m3") and weight.tensors["scale"].element_size() == 1:
        scale = quant.scale_format
    else:
        scale = _SCALES[_float_scale(weight.tensors["scale"]).dtype]
    bits = _BITS[quant.element]
    depth = DEPTH if group % DEPTH == 0 or group == columns else DEPTH // 2
    raised = 0
    of_parts = quant.granularity == "group" and group in (DEPTH, DEPTH // 2)
    if of_parts and scale in ("e8m0", "e4m3") and quant.element in _RAISED:
        # a number of less than 4 bytes goes through no pipeline
        scale = "packed_e8m0" if scale == "e8m0" and bits == 4 and group == DEPTH else "packed_bf16"
        raised, depth = _RAISED[quant.element], DEPTH
    return WordForm(quant.element, bits, depth, scale, group, rows, weight.out_features, columns, raised)


def _float_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype in _SCALES else scale.to(torch.float32)


def _scales(weight: WeightTensors, form: WordForm, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales as the form says; f32 [..., N], what whole rows are scaled by beside them: scales of rows, NVFP4's global
    scale, and what packing moved there."""
    scale = weight.tensors["scale"]
    if form.scale == "none":
        empty = torch.empty((*weight.tensors["codes"].shape[:-2], 1, 0), dtype=torch.float32, device=scale.device)
        return empty, scale.to(torch.float32).squeeze(-1).contiguous()
    if weight.scheme.weight.second_scale == "dual":
        return _both_levels(weight, name), None
    row = weight.tensors.get("global_scale")
    row = None if row is None else row.to(torch.float32).squeeze(-1).contiguous()
    if form.raised and weight.scheme.weight.scale_format == "e8m0":
        return _packed_e8m0(e8m0_scale(scale, name), row, form)
    if form.raised:
        held = scale.view(torch.float8_e4m3fn).to(torch.float32) * 2.0 ** (form.raised - _LOWERED_E4M3)
        lowered = scale.new_full(scale.shape[:-1], 2.0**_LOWERED_E4M3, dtype=torch.float32)
        return _packed(held.to(torch.bfloat16).view(torch.int16), form), lowered if row is None else lowered * row
    if form.scale == "e8m0":
        return e8m0_scale(scale, name).contiguous(), row
    return (scale.view(torch.uint8) if form.scale == "e4m3" else _float_scale(scale)).contiguous(), row


def _both_levels(weight: WeightTensors, name: str) -> torch.Tensor:
    """Products of a dual-level weight's scales, f32 [..., N, K/32], exact: those of groups that hold zeros alone are 0
    where float32 has no normal number for them."""
    level1 = e8m0_scale(weight.tensors["scale"], name)
    level0 = weight.tensors["scale2"].to(torch.float64)
    # the bits of 2^(byte - 127) in float64
    power = ((level1.to(torch.int64) + (1023 - 127)) << 52).view(torch.float64)
    each = DUAL_COLUMNS // weight.scheme.weight.group_size
    product = power * level0.repeat_interleave(each, dim=-1)[..., : power.shape[-1]]
    if not bool(product.isfinite().all()):
        raise InvalidCheckpointError("a scale is not finite", key=name)
    held = product.to(torch.float32)
    normal = torch.finfo(torch.float32)
    unfit = (product != 0) & ((product.abs() < normal.tiny) | (product.abs() > normal.max))
    if bool(unfit.any()):
        magnitudes = weight.tensors["codes"].view(torch.uint8) & 0x77
        occupied = magnitudes.reshape(*level1.shape, -1).amax(-1) > 0
        if bool((unfit & occupied).any()):
            raise InvalidCheckpointError("the product of a group's two scales leaves float32's normal range", key=name)
        held = held.masked_fill(unfit, 0.0)
    return held.contiguous()


def _packed_e8m0(
    scale: torch.Tensor, row: torch.Tensor | None, form: WordForm
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exponents raised. Rows whose largest would no longer be a bf16's are lowered as a whole; what then lies under
    the smallest exponent is 2^-127 of the row's largest, and less than a rounding of it."""
    most = 254 - form.raised
    excess = (scale.amax(-1, keepdim=True).to(torch.int16) - most).clamp_min(0)
    held = (scale.to(torch.int16) - excess).clamp_min(0) + form.raised
    if bool(excess.any()):
        lowered = torch.exp2(excess.squeeze(-1).to(torch.float32))
        row = lowered if row is None else lowered * row
    return _packed(held.to(torch.uint8) if form.scale == "packed_e8m0" else held << 7, form), row


def _packed(scale: torch.Tensor, form: WordForm) -> torch.Tensor:
    """Scales of a block's parts side by side in a number for each half; zeros fill up the last block."""
    parts = parts_of(form.bits)
    whole = F.pad(scale, (0, -scale.shape[-1] % (parts * form.halves)))
    whole = whole.reshape(*scale.shape[:-1], -1, parts, form.halves).transpose(-1, -2).flatten(-3).contiguous()
    return whole.view(torch.int32 if parts * whole.element_size() == 4 else torch.int64)


def _unpacked(scale: torch.Tensor, form: WordForm) -> torch.Tensor:
    """What `_packed` packed, as bytes or bf16."""
    single = scale.view(torch.uint8 if form.scale == "packed_e8m0" else torch.bfloat16)
    return single.reshape(len(scale), -1, form.halves, parts_of(form.bits)).transpose(-1, -2).flatten(1)


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
    `scale` as the form says: packed, [blocks * halves, N], so that those of a tile's rows lie side by side, else [N, G]
    or [ceil(N/bn), ceil(K/bk)] of blocks, so that a row's next ones are in the cache; `zero` uint8 or f32 [N, G];
    `row_scale` f32 [N], one factor for each row; `table` f32 [16], of codes that are no numbers, in the order that they
    are held in; `pre_scale` f32 [K]. Experts lead, but for `table`. Raises InvalidCheckpointError, naming the layer
    `name`, for codes and e8m0 scales of NaN, and for two levels of scales whose product is no normal float32."""
    codes = weight.tensors["codes"]
    rows = _bytes_of(codes.reshape(-1, codes.shape[-1]), weight.scheme.weight, name)
    scale, row_scale = _scales(weight, form, name)
    if form.is_packed:
        scale = scale.transpose(-1, -2).contiguous()
    words = to_words(rows, form.element, form.bits, form.depth).view(*codes.shape[:-1], -1)
    tensors = {"words": words, "scale": scale}
    if row_scale is not None:
        tensors["row_scale"] = row_scale
    if "zero_point" in weight.tensors:
        zero = weight.tensors["zero_point"]
        tensors["zero"] = zero.to(torch.float32 if zero.is_floating_point() else torch.uint8).contiguous()
    if form.element in TABLES:
        tensors["table"] = code_values(form.element)[list(TABLES[form.element])].to(codes.device)
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
    codes = from_words(words, form.element, form.bits, form.depth, form.in_features)
    weight = code_values(form.element).to(words.device)[codes.to(torch.int64)]
    if form.scale != "none":
        column = torch.arange(form.in_features, device=words.device) // form.group
        row = torch.arange(form.out_features, device=words.device) // form.rows
        if zero is not None:
            weight = weight - zero.to(torch.float32)[row][:, column]
        stored = _unpacked(scale.t().contiguous(), form) if form.is_packed else scale
        weight = weight * _multipliers(stored, form)[row][:, column]
    return weight if row_scale is None else weight * row_scale[:, None]


@lru_cache(maxsize=16)
def code_values(element: str) -> torch.Tensor:
    """f32: what each held code stands for."""
    if element in ("int4", "int8", "uint4", "uint8"):
        count = 2 ** _BITS[element]
        return torch.arange(count, dtype=torch.float32) - (count // 2 if element.startswith("int") else 0)
    return torch.tensor([float(value) for value in element_values(element)], dtype=torch.float32)


def _multipliers(scale: torch.Tensor, form: WordForm) -> torch.Tensor:
    if form.scale.endswith("e8m0"):
        exponent = scale.view(torch.uint8).to(torch.int32) - 127 - form.raised
        return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=scale.device), exponent).float()
    if form.scale == "packed_bf16":
        return scale.to(torch.float32) * 2.0**-form.raised
    return (scale.view(torch.float8_e4m3fn) if form.scale == "e4m3" else scale).to(torch.float32)
