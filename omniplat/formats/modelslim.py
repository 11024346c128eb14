"""msModelSlim checkpoints (Ascend): a flat map from tensor names to type strings beside the weights.

Both exporters write it: `quant_model_description.json` and `quant_model_description_<type>.json`. Every quantized
weight is listed by its exact name, so what is not listed is not quantized.

The type says how wide weight and activation are, not what shares a scale: `group_size` holds for one of the types of
a mixed checkpoint and is written whether or not any weight has groups. The tensors decide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import Exact
from omniplat.formats.metadata import Fields
from omniplat.scheme import Scheme, parse_activation_id, parse_weight_id

#: Type -> (weight id, activation id) of types whose granularity the type fixes.
_FIXED: dict[str, tuple[str, str]] = {
    "W8A8_MXFP8": ("mxfp8", "mxfp8"),
    "W4A4_MXFP4": ("mxfp4", "mxfp4"),
    "W4A8_MXFP": ("mxfp4", "mxfp8"),
    "W4A16_MXFP4": ("mxfp4", "a16"),
    "W4A4_MXFP4_DUALSCALE": ("mxfp4-dual", "mxfp4-dual"),
}
#: The same where the scales' shape decides; the ids are what a type is without groups.
_OPEN: dict[str, tuple[str, str]] = {
    "W8A8": ("int8-channel", "int8-tensor-static-asym"),
    "W8A8_DYNAMIC": ("int8-channel", "int8-token"),
    "W8A8_MIX": ("int8-channel", "int8-token"),
    "W8A16": ("int8-channel", "a16"),
    "W4A16": ("int4-channel", "a16"),
    "W4A8_DYNAMIC": ("int4-channel", "int8-token"),
    "W4A4_DYNAMIC": ("int4-channel", "int4-token"),
    "WFP8AFP8_DYNAMIC": ("fp8-channel", "fp8-token"),
    "W8A8FP8_DYNAMIC": ("fp8-channel", "fp8-token"),
}
_FLOAT = frozenset({"FLOAT", "W16A16"})

#: The part of a type's name that stands for a transformation of the input.
_FLATQUANT = "FLATQUANT"
#: Parts that stand for a residual beside the weight.
_RESIDUALS = {
    "SVD": "a low-rank residual of its own is added to the output",
}
#: Whole types that are understood as far as their name goes.
_UNSUPPORTED = {
    "W8A8S": "the weight is compressed as a sparse matrix",
    "W16A16S": "the weight is compressed as a sparse matrix",
    "W8A8_TIMESTEP": "the input scales change with the denoising step",
    "NF4": "the order of its blocks is not documented",
}

#: Types of attention and KV-cache quantization: their tensors are no matrices.
_ATTENTION = frozenset({"C8", "FAQUANT", "FAKQUANT", "INT8", "INT8_DYNAMIC", "FP8", "FP8_DYNAMIC"})

#: Leaves that stand beside a weight; a key that ends in one names no module.
_BESIDE = frozenset(
    {
        *("weight_scale", "weight_offset", "weight_scale_second", "weight_offset_second", "weight_dual_scale"),
        *("scale_bias", "quant_bias", "deq_scale", "input_scale", "input_offset", "bias", "mul_scale", "scale"),
        *("offset", "kv_cache_scale", "kv_cache_offset", "left_trans", "right_trans", "clip_ratio", "quant_type"),
    }
)
_WEIGHTS = ("weight", "weight_packed")


@dataclass(frozen=True, slots=True)
class ModelSlimFormat:
    name: str = "msmodelslim"

    def claims(self, source: Fields) -> bool:
        if "quant_method" in source.values:
            return source.values["quant_method"] in ("ascend", "msmodelslim")
        return "model_quant_type" in source.values or "quant_model_description" in source.file.rpartition("/")[2]

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        packs_int4 = source.has("version")
        rules = [_rule(module, key, source, packs_int4) for key, module in _weights(source)]
        overall = source.string("model_quant_type")
        return Declaration(
            self.name,
            source.file,
            NOT_QUANTIZED,
            tuple(rules),
            speaks_of_all=False,
            default_key=f"model_quant_type={overall}" if overall else "not listed",
        )


def _weights(source: Fields) -> Iterable[tuple[str, str]]:
    """(key, module) of the entries that name a weight."""
    for key, value in source.values.items():
        head, dot, leaf = key.rpartition(".")
        if not dot or leaf in _BESIDE:
            continue
        if leaf in _WEIGHTS:
            yield key, head
        elif isinstance(value, str) and value.upper() not in _FLOAT | _ATTENTION:
            # stacked experts are bare parameters: `experts.gate_up_proj`
            yield key, key


def _rule(module: str, key: str, source: Fields, packs_int4: bool) -> Rule:
    kind = source.string(key).upper()
    exact = Exact(module)
    is_float = kind in _FLOAT
    declared = NOT_QUANTIZED if is_float else _declared(kind, key, source, packs_int4)
    return Rule(f"{key}={kind}", "float" if is_float else "types", module, exact, exact, exact, declared)


def _declared(kind: str, key: str, source: Fields, packs_int4: bool) -> Declared:
    base = kind
    reasons = [reason for part, reason in _RESIDUALS.items() if part in kind.split("_")]
    for part in (*_RESIDUALS, _FLATQUANT):
        base = base.replace(f"_{part}", "")
    if kind in _UNSUPPORTED:
        reasons.append(_UNSUPPORTED[kind])
        base = {"W16A16S": "W8A16", "NF4": "W4A16"}.get(kind, "W8A8")
    if base in ("W4A4", "W4A8", "WFP8AFP8"):
        base += "_DYNAMIC"
    weight, activation = _FIXED.get(base) or _OPEN.get(base) or ("", "")
    if not weight:
        known = ", ".join(sorted((*_FIXED, *_OPEN, *_UNSUPPORTED, *_FLOAT)))
        raise UnsupportedOptionError(f"type {kind!r} is none of {known}", file=source.file, key=source.path(key))
    scheme = Scheme(parse_weight_id(weight), at_run_time(parse_activation_id(activation), "floor"))
    reason = f"{kind}: {'; '.join(reasons)}, which no kernel here does" if reasons else ""
    # W4A16 without groups is packed along K in the versioned layout; nothing else in the tensors tells.
    packing = "ascend_int4_k" if base == "W4A16" and packs_int4 else ""
    transformed = _FLATQUANT in kind.split("_")
    return Declared(scheme, packing, open_granularity=base in _OPEN, transformed=transformed, unsupported=reason)


FORMAT = ModelSlimFormat()
