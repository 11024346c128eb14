"""`quant_method: fp8`: per-tensor FP8, DeepSeek's blocks, transformers' FineGrainedFP8, FBGEMM, DeepSeek-V4.

Metadata says whether there are blocks and whether activations are static. It does not say whether a scale covers a
tensor or a row, and DeepSeek-V4 says outside of `quantization_config` what its routed experts are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import Nothing, Pattern
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import skip_rules, unlisted_head
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

_ELEMENTS = {"": "fp8_e4m3", "e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_ROUTED = Pattern(re.compile(r"(?:.*\.)?experts\.(?:\d+\.)?\w"))
#: `quant_method: fp8` without it names serialized weights; engines write False when they quantize while loading.
_SERIALIZED = "is_checkpoint_fp8_serialized"
_SKIP_LISTS = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    name: str = "fp8"

    def claims(self, source: Fields) -> bool:
        return source.values.get("quant_method") in ("fp8", "fbgemm_fp8", "deepseek_v4_fp8")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        rules = skip_rules(source, _SKIP_LISTS, parts_of)
        if source.string("quant_method") == "fbgemm_fp8":
            token = at_run_time(parse_activation_id("fp8-token"), "")
            default = Declared(Scheme(parse_weight_id("fp8-channel"), token))
            return Declaration(self.name, source.file, default, rules, default_key="quant_method=fbgemm_fp8")
        if not source.boolean(_SERIALIZED, True):
            return Declaration(self.name, source.file, NOT_QUANTIZED, rules, default_key=f"{_SERIALIZED}=false")
        default = _default(source)
        return Declaration(
            self.name,
            source.file,
            default,
            (*rules, *_expert_rules(source, default)),
            default_key=_default_key(source),
            unlisted=unlisted_head(rules),
        )


def _default_key(source: Fields) -> str:
    block = source.values.get("weight_block_size")
    return f"weight_block_size={block}" if block is not None else "quant_method=fp8"


def _default(source: Fields) -> Declared:
    fmt = source.string("fmt").lower()
    if fmt not in _ELEMENTS:
        raise UnsupportedOptionError(
            f"fmt {fmt!r} is none of {', '.join(filter(None, _ELEMENTS))}", file=source.file, key=source.path("fmt")
        )
    element = _ELEMENTS[fmt]
    scheme = source.string("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise UnsupportedOptionError(
            f"{scheme!r} is neither dynamic nor static", file=source.file, key=source.path("activation_scheme")
        )
    block = _block(source)
    if block is None:
        activation = "fp8-tensor-static" if scheme == "static" else "fp8-token"
        weight = TensorQuant(element, "tensor")
        return Declared(Scheme(weight, at_run_time(parse_activation_id(activation), "")), open_granularity=True)
    if block == (1, 32):
        return Declared(Scheme(parse_weight_id("mxfp8"), at_run_time(parse_activation_id("mxfp8"), "rceil")))
    if scheme == "static":
        activation_quant = parse_activation_id("fp8-tensor-static")
    else:
        activation_quant = TensorQuant("fp8_e4m3", "group", block[1], dynamic=True)
        if source.string("scale_fmt") == "ue8m0":
            activation_quant = replace(activation_quant, scale_format="e8m0")
    return Declared(Scheme(TensorQuant(element, "block", block=block), at_run_time(activation_quant, "ceil")))


def _block(source: Fields) -> tuple[int, int] | None:
    value = source.values.get("weight_block_size")
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ):
        raise source.wrong("weight_block_size", "two positive integers")
    return value[0], value[1]


def _expert_rules(source: Fields, default: Declared) -> tuple[Rule, ...]:
    """What config.json says of the routed experts beside `quantization_config`.

    DeepSeek-V4 without `expert_dtype` is FP8 in its base checkpoints, while vLLM then assumes MXFP4.
    """
    outer = source.outer
    holder = source if source.has("expert_dtype") else outer
    dtype = holder.string("expert_dtype").lower()
    algorithm = outer.string("moe_quant_algo").upper()
    if algorithm == "NVFP4":
        declared = Declared(Scheme(parse_weight_id("nvfp4"), at_run_time(parse_activation_id("nvfp4"), "")))
        return (Rule("moe_quant_algo=NVFP4", "moe_quant_algo", "experts", _ROUTED, _ROUTED, _ROUTED, declared),)
    experts = Declared(Scheme(parse_weight_id("mxfp4"), default.scheme.activation))
    if dtype == "fp4":
        return (Rule("expert_dtype=fp4", "expert_dtype", "experts", _ROUTED, _ROUTED, _ROUTED, experts),)
    if dtype not in ("", "fp8"):
        raise UnsupportedOptionError(
            f"expert_dtype {dtype!r} is neither fp4 nor fp8", file=holder.file, key=holder.path("expert_dtype")
        )
    if not dtype and outer.string("model_type").startswith("deepseek_v4"):
        nothing = Nothing()
        key = "expert_dtype (absent)"
        return (Rule(key, "expert_dtype", "experts", nothing, nothing, _ROUTED, experts, must_hit=False),)
    return ()


FORMAT = Fp8Format()
