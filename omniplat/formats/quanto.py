"""quanto checkpoints: transformers' metadata, or quanto's own map from modules to types (quanto_qmap.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import Exact
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import named, segment_rules, unlisted_head
from omniplat.scheme import Scheme, TensorQuant

#: Names of quanto's types -> element; "" for none.
_WEIGHTS = {
    "int8": "int8",
    "qint8": "int8",
    "float8": "fp8_e4m3",
    "qfloat8": "fp8_e4m3",
    "qfloat8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "qfloat8_e5m2": "fp8_e5m2",
    "float8_e5m2": "fp8_e5m2",
    "int4": "uint4",
    "qint4": "uint4",
    "int2": "uint2",
    "qint2": "uint2",
    "": "",
    "none": "",
}


@dataclass(frozen=True, slots=True)
class QuantoFormat:
    name: str = "quanto"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return _is_map(source)
        return bool(method == "quanto")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        if _is_map(source):
            rules = tuple(
                _module_rule(name, _declared(fields, "weights", "activations"), parts_of)
                for name, fields in source.objects()
            )
            return Declaration(self.name, source.file, NOT_QUANTIZED, rules, default_key="quantization map")
        weights = "weights" if source.has("weights") else "weights_dtype"
        rules = segment_rules(source, ("modules_to_not_convert",), parts_of)
        return Declaration(
            self.name,
            source.file,
            _declared(source, weights, "activations"),
            rules,
            default_key=f"{weights}={source.string(weights)}",
            unlisted=unlisted_head(rules),
        )


def _is_map(source: Fields) -> bool:
    values = source.values.values()
    return bool(source.values) and all(isinstance(value, dict) and "weights" in value for value in values)


def _module_rule(name: str, declared: Declared, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    exact = Exact(name)
    return Rule(f"{name!r}", "quantization map", name, named(name, parts_of), exact, exact, declared)


def _declared(fields: Fields, weights: str, activations: str) -> Declared:
    kind = fields.string(weights).lower()
    element = _WEIGHTS.get(kind)
    if element is None:
        raise UnsupportedOptionError(f"{kind!r} has no scheme here", file=fields.file, key=fields.path(weights))
    if not element:
        return NOT_QUANTIZED
    if element.startswith("uint"):
        quant = TensorQuant(element, "group", 128, symmetric=False)
    else:
        quant = TensorQuant(element, "channel")
    return Declared(Scheme(quant, _activation(fields, activations)), open_granularity=True)


def _activation(fields: Fields, name: str) -> TensorQuant | None:
    kind = fields.string(name).lower()
    element = _WEIGHTS.get(kind)
    if element is None or element.startswith("uint"):
        raise UnsupportedOptionError(f"{kind!r} has no scheme here", file=fields.file, key=fields.path(name))
    # quanto calibrates one scale for each module's input
    return replace(TensorQuant(element, "tensor"), rounding="nearest-even") if element else None


FORMAT = QuantoFormat()
