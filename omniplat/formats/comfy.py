"""ComfyUI's single files (and BFL's, which follow it): per layer a format, in the safetensors metadata or in a marker.

Three spellings: `_quantization_metadata` in `__metadata__`, a `comfy_quant` tensor of JSON beside each weight, and the
old `scaled_fp8` marker of files whose every FP8 weight has a `scale_weight`. Only the tensors tell whether a layer's
input is quantized: with a static scale where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.base import at_run_time
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.markers import MARKER_KEYS
from omniplat.formats.matching import Exact
from omniplat.formats.metadata import Fields
from omniplat.formats.recognise.tiles import COMFY, COMFY_OPAQUE
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

#: Format -> (weight id, activation id).
_FORMATS: dict[str, tuple[str, str]] = {
    "float8_e4m3fn": ("fp8-tensor", "fp8-tensor-static"),
    "float8_e5m2": ("fp8e5m2-tensor", "fp8e5m2-tensor-static"),
    "float8_e4m3fn_rowwise": ("fp8-channel", "fp8-tensor-static"),
    "float8_e4m3fn_blockwise": ("fp8-block{g}x{g}", "fp8-tensor-static"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "int8_tensorwise": ("int8-tensor", "int8-token"),
    "int8_blockwise": ("int8-block{g}x{g}", "int8-token"),
}
#: Formats of which the name and the container are known: (weight id, why nothing runs them).
_OPAQUE: dict[str, tuple[str, str]] = {
    "convrot_w4a4": ("int4-channel", "the input is rotated by Hadamard blocks at run time"),
    "int4_tensorwise": ("int4-channel", "the input is rotated by Hadamard blocks at run time"),
    "svdquant_w4a4": ("int4-channel", "its low-rank pair lies under names of its own"),
    "awq_w4a16": ("int4-channel", "the order of its codes is not documented"),
    "asym_w4a8_int8": ("int4-channel", "the order of its codes is not documented"),
}
_DEFAULT_BLOCK = 128
#: A layer without these has its input quantized by nothing, or at run time.
_OPTIONAL = frozenset({"input_scale", "input_global_scale"})


@dataclass(frozen=True, slots=True)
class ComfyFormat:
    name: str = "comfyui"

    def claims(self, source: Fields) -> bool:
        if "quant_method" in source.values or "producer" in source.values:
            return False
        return "format_version" in source.values or source.key in MARKER_KEYS

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        if "scaled_fp8" in source.values:
            dtype = source.string("scaled_fp8")
            weight = "fp8e5m2-tensor" if dtype == "F8_E5M2" else "fp8-tensor"
            activation = parse_activation_id(f"{weight}-static")
            scheme = Scheme(parse_weight_id(weight), at_run_time(activation, ""))
            declared = Declared(scheme, missing_ok=_OPTIONAL, open_granularity=True)
            return Declaration(self.name, source.file, declared, speaks_of_all=False, default_key="scaled_fp8")
        version = source.string("format_version", "1.0")
        if not version.startswith("1"):
            raise UnsupportedOptionError(f"version {version!r} is not 1", file=source.file, key="format_version")
        rules = [_rule(name, layer) for name, layer in source.children("layers")]
        return Declaration(self.name, source.file, NOT_QUANTIZED, tuple(rules), default_key="layers")


def _rule(name: str, layer: Fields) -> Rule:
    kind = layer.string("format")
    exact = Exact(name)
    return Rule(f"layers[{name!r}].format={kind}", "layers", name, exact, exact, exact, _declared(kind, layer))


def _declared(kind: str, layer: Fields) -> Declared:
    if kind in _OPAQUE:
        weight, reason = _OPAQUE[kind]
        scheme = Scheme(parse_weight_id(weight))
        return Declared(scheme, COMFY_OPAQUE, unsupported=f"{kind}: {reason}, which no kernel here does")
    if kind not in _FORMATS:
        known = ", ".join(sorted((*_FORMATS, *_OPAQUE)))
        raise UnsupportedOptionError(f"format {kind!r} is none of {known}", file=layer.file, key=layer.path("format"))
    params = layer.child("params") or layer
    weight, activation = _FORMATS[kind]
    block = params.integer("group_size", params.integer("block_size", _DEFAULT_BLOCK))
    if block <= 0:
        raise layer.wrong("group_size", "a positive integer")
    quant: TensorQuant | None = parse_activation_id(activation)
    if layer.boolean("full_precision_matrix_mult", False):
        quant = None
    scheme = Scheme(parse_weight_id(weight.format(g=block)), at_run_time(quant, "rceil"))
    if params.boolean("convrot", False):
        reason = f"{kind} with convrot: the input is rotated by Hadamard blocks at run time, which no kernel here does"
        return Declared(scheme, COMFY_OPAQUE, unsupported=reason)
    is_open = "tensor" in weight
    return Declared(scheme, COMFY, missing_ok=_OPTIONAL, open_granularity=is_open)


FORMAT = ComfyFormat()
