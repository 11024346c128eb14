"""Linear layers whose weights stay in 4 or 8 bits and whose activations are not quantized.

`PortableLinear` is the kernel, `omniplat::weight_only_linear` its operator: Triton's form on devices that Triton
serves, plain torch elsewhere, which decodes the whole weight at every call and is there for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import msgspec
import torch
import torch.nn.functional as F

from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.oracle.codecs import element_values
from omniplat.portable.quantize import has_triton
from omniplat.portable.words import DEPTH, from_words, to_words
from omniplat.runtime.kernel import LinearKernel, Prepared
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import TensorQuant

#: element -> bits of a code. Integers are held as what they are above their smallest, so that none is negative.
_BITS = {"fp4_e2m1": 4, "int4": 4, "uint4": 4, "nf4": 4, "fp4_bnb": 4, "fp8_e4m3": 8, "int8": 8, "uint8": 8}
_TABLES = ("nf4", "fp4_bnb")
_ROLES = frozenset({"codes", "scale", "zero_point", "global_scale", "pre_scale", "bias"})
#: What static activations bring; nothing is quantized here.
_UNUSED = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_SCALES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_ARGUMENTS = (
    "(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? row_scale, Tensor? table, Tensor? pre_scale, "
    "Tensor? bias, str form, ScalarType out_dtype) -> Tensor"
)
_LIBRARY = torch.library.Library("omniplat", "FRAGMENT")  # type: ignore[no-untyped-call]


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


@dataclass(frozen=True, slots=True)
class WeightOnlyConfig:
    """`form` is a WordForm as JSON."""

    form: str


class PortableLinear(LinearKernel[WeightOnlyConfig]):
    """Buffers: `words` int16 [N, K * bits / 16] (K filled up to whole blocks); `scale` as stored, [N, G], or
    [ceil(N/bn), ceil(K/bk)] of blocks; `zero` uint8 or f32 [N, G]; `row_scale` f32 [N], one factor for each row;
    `table` f32 [16] of codes that are no numbers; `pre_scale` f32 [K]."""

    name: ClassVar[str] = "portable_linear"
    config_type = WeightOnlyConfig

    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[WeightOnlyConfig]:
        """Raises UnsupportedCombinationError for schemes it does not decode, InvalidCheckpointError for NaN codes."""
        quant = weight.scheme.weight
        if reason := why_not(weight):
            raise UnsupportedCombinationError(
                "portable", spec.op, weight.scheme.id, [spec.name], [f"{self.name}  needs {reason}"]
            )
        form = _form_of(weight)
        codes = _bytes_of(weight.tensors["codes"], quant, spec.name)
        tensors = {"words": to_words(codes, form.bits, form.depth), "scale": _stored_scale(weight, form)}
        if (row_scale := _row_scale(weight, form)) is not None:
            tensors["row_scale"] = row_scale
        if "zero_point" in weight.tensors:
            zero = weight.tensors["zero_point"]
            integers = not zero.is_floating_point()
            tensors["zero"] = (zero.to(torch.uint8) if integers else zero.to(torch.float32)).contiguous()
        if quant.element in _TABLES:
            tensors["table"] = _values(quant.element).to(codes.device)
        if "pre_scale" in weight.tensors:
            tensors["pre_scale"] = weight.tensors["pre_scale"].to(torch.float32).reshape(-1).contiguous()
        return Prepared(tensors, WeightOnlyConfig(msgspec.json.encode(form).decode()))

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


def why_not(weight: WeightTensors) -> str:
    """What keeps a weight from being decoded here; "" where nothing does."""
    quant = weight.scheme.weight
    if quant.element not in _BITS:
        return f"codes of {', '.join(_BITS)}"
    if quant.second_scale not in ("", "global"):
        return "one level of group scales"
    if weight.experts or not weight.tensors.keys() <= _ROLES | _UNUSED:
        return f"no roles but {', '.join(sorted(_ROLES))}"
    if quant.granularity == "group" and quant.group_size % 16:
        return "groups in multiples of 16 columns"
    if quant.granularity == "block" and quant.block[1] % 16:
        return "blocks in multiples of 16 columns"
    if quant.granularity not in ("tensor", "channel", "group", "block"):
        return "scales per tensor, row, group or block"
    if quant.element not in ("int4", "int8") and not quant.symmetric and "zero_point" not in weight.tensors:
        return "a zero point"
    return ""


def _form_of(weight: WeightTensors) -> WordForm:
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


def _stored_scale(weight: WeightTensors, form: WordForm) -> torch.Tensor:
    scale = weight.tensors["scale"]
    if form.scale == "none":
        return torch.empty((0, 0), dtype=torch.float32, device=scale.device)
    return (scale.view(torch.uint8) if form.scale in ("e8m0", "e4m3") else _float_scale(scale)).contiguous()


def _row_scale(weight: WeightTensors, form: WordForm) -> torch.Tensor | None:
    """f32 [N]: scales of whole rows, and NVFP4's global scale."""
    source = "scale" if form.scale == "none" else "global_scale"
    held = weight.tensors.get(source)
    return None if held is None else held.to(torch.float32).reshape(-1).contiguous()


def _bytes_of(codes: torch.Tensor, quant: TensorQuant, name: str) -> torch.Tensor:
    """One code a byte, uint8 [N, K]: bits of floats, numbers above the smallest of integers."""
    stored = codes.contiguous().view(torch.uint8)
    if quant.bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)
        return stored ^ 8 if quant.element == "int4" else stored
    if quant.element == "fp8_e4m3" and bool(((stored & 0x7F) == 0x7F).any()):
        raise InvalidCheckpointError("fp8_e4m3 weight holds NaN", key=name)
    return stored ^ 128 if quant.element == "int8" else stored


@lru_cache(maxsize=16)
def _values(element: str) -> torch.Tensor:
    """f32: what each held code stands for."""
    if element in ("int4", "int8", "uint4", "uint8"):
        count = 2 ** _BITS[element]
        return torch.arange(count, dtype=torch.float32) - (count // 2 if element.startswith("int") else 0)
    return torch.tensor([float(value) for value in element_values(element)], dtype=torch.float32)


@lru_cache(maxsize=4096)
def decode_form(text: str) -> WordForm:
    return msgspec.json.decode(text.encode(), type=WordForm)


def _smoothed(x: torch.Tensor, pre_scale: torch.Tensor | None) -> torch.Tensor:
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
    codes = from_words(words, held.bits, held.depth, held.in_features)
    weight = _values(held.element).to(x.device)[codes.to(torch.int64)]
    if held.scale != "none":
        column = torch.arange(held.in_features, device=x.device) // held.group
        row = torch.arange(held.out_features, device=x.device) // held.rows
        if zero is not None:
            weight = weight - zero.to(torch.float32)[row][:, column]
        weight = weight * _multipliers(scale, held.scale)[row][:, column]
    if row_scale is not None:
        weight = weight * row_scale[:, None]
    y = F.linear(_smoothed(x, pre_scale).to(torch.float32), weight)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype).view(*x.shape[:-1], held.out_features)


def _multipliers(scale: torch.Tensor, stored: str) -> torch.Tensor:
    if stored == "e8m0":
        exponent = scale.to(torch.int32) - 127
        return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64, device=scale.device), exponent).float()
    return (scale.view(torch.float8_e4m3fn) if stored == "e4m3" else scale).to(torch.float32)


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
    from omniplat.portable.weight_only_triton import folds, tile_of, weight_only_product

    held = decode_form(form)
    rows = _smoothed(x, pre_scale)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    y = torch.empty((len(rows), held.out_features), dtype=out_dtype, device=x.device)
    if len(rows):
        tile = tile_of(len(rows), folds(held, x.dtype))
        weight_only_product(rows, words, table, scale, zero, row_scale, bias, y, held, tile)
    return y.view(*x.shape[:-1], held.out_features)


def _fake(
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
    return x.new_empty((*x.shape[:-1], words.shape[0]), dtype=out_dtype)


_LIBRARY.define("weight_only_linear" + _ARGUMENTS)  # type: ignore[no-untyped-call]
_LIBRARY.impl("weight_only_linear", _plain, "CPU")  # type: ignore[no-untyped-call]
for _key in ("CUDA", "XPU"):
    _LIBRARY.impl("weight_only_linear", _on_device, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("omniplat::weight_only_linear", _fake, lib=_LIBRARY)
