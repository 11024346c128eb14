"""NVIDIA ModelOpt checkpoints: one `quant_algo` with an exclusion list, or a whitelist of layers (MIXED_PRECISION).

Two spellings of the same content exist: flat in config.json (`ignore`) and nested in hf_quant_config.json
(`quantization.exclude_modules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omniplat.errors import IncompleteMetadataError, UnsupportedOptionError
from omniplat.formats.base import literal_matcher
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.kv_cache import declares_kv_cache
from omniplat.formats.matching import Contains, Exact, bounded_glob, glob
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import named
from omniplat.scheme import Scheme, TensorQuant, parse_activation_id, parse_weight_id

#: quant_algo -> (weight id, activation id); `{g}` is the group size. The keys are upper case; ModelOpt writes
#: the names it has no alias for in lower case.
_ALGORITHMS: dict[str, tuple[str, str]] = {
    "FP8": ("fp8-tensor", "fp8-tensor-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel", "fp8-token"),
    "FP8_PB_WO": ("fp8-block128x128", "a16"),
    # The same with weights that are stored quantized already, and engines' name for it in mixed checkpoints.
    "FP8_PB_REAL": ("fp8-block128x128", "a16"),
    "FP8_BLOCK_SCALES": ("fp8-block128x128", "a16"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", "a16"),
    "W4A8_NVFP4_FP8": ("nvfp4", "fp8-tensor-static"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "MXFP4": ("mxfp4", "mxfp4"),
    # Its preset is not calibrated: the input's scale is that of each batch.
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8-tensor"),
    "W4A16_AWQ": ("int4-g{g}", "a16"),
    "W4A8_AWQ": ("int4-g{g}", "fp8-tensor-static"),
    "W8A16": ("int8-channel", "a16"),
    "W8A8_SQ_PER_CHANNEL": ("int8-channel", "int8-tensor-static"),
}
_DEFAULT_GROUP = 128
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOptFormat:
    name: str = "modelopt"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if isinstance(method, str):
            return method.lower().startswith("modelopt")
        producer = source.values.get("producer")
        return isinstance(producer, dict) and producer.get("name") == "modelopt"

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        nested = source.child("quantization")
        fields = nested if nested is not None else source
        algorithm = fields.string("quant_algo")
        rules = [
            _exclude_rule(name, entry, parts_of)
            for name in ("ignore", "exclude_modules")
            for entry in fields.strings(name)
        ]
        if algorithm.upper() == MIXED:
            layers = list(fields.children("quantized_layers"))
            if not layers:
                raise IncompleteMetadataError(
                    "MIXED_PRECISION lists no layers", file=fields.file, key=fields.path("quantized_layers")
                )
            rules += [_layer_rule(name, layer, parts_of) for name, layer in layers]
            default, default_key = NOT_QUANTIZED, "quantized_layers"
        elif not algorithm and declares_kv_cache(fields):
            # Only the cache is quantized.
            default, default_key = NOT_QUANTIZED, "quant_algo=null"
        elif not fields.has("quant_algo"):
            raise IncompleteMetadataError("names no algorithm", file=fields.file, key=fields.path("quant_algo"))
        else:
            default, default_key = _declared(algorithm, fields, source), f"quant_algo={algorithm}"
        schemes = [default.scheme, *(rule.declared.scheme for rule in rules)]
        notes = _single_file_notes(source, schemes)
        return Declaration(self.name, source.file, default, tuple(rules), default_key=default_key, notes=notes)


def _single_file_notes(source: Fields, schemes: Sequence[Scheme]) -> tuple[str, ...]:
    """Exports of one file may lay NVFP4 scales out in tiles of 128 x 4; where nothing is padded no shape shows it."""
    if not source.key.startswith("__metadata__") or all(scheme.weight_id != "nvfp4" for scheme in schemes):
        return ()
    return ("block scales of a single-file NVFP4 export may be tiled and the file does not say: they are read as rows",)


def _declared(algorithm: str, fields: Fields, source: Fields) -> Declared:
    try:
        weight, activation = _ALGORITHMS[algorithm.upper()]
    except KeyError:
        raise UnsupportedOptionError(
            f"quant_algo {algorithm!r} is none of {', '.join(sorted((*_ALGORITHMS, MIXED)))}",
            file=fields.file,
            key=fields.path("quant_algo"),
        ) from None
    if _weight_only(source):
        activation = "a16"
    stated = fields.integer("group_size", 0) or _group_of(source)
    is_open = weight == "nvfp4" and not stated
    group = stated or _DEFAULT_GROUP
    if weight == "nvfp4" and group == 32:
        weight = "nvfp4-g32"
        activation = "nvfp4-g32" if activation == "nvfp4" else activation
    quant = parse_activation_id(activation)
    if quant is not None:
        quant = _with_rules(quant)
    return Declared(Scheme(parse_weight_id(weight.format(g=group)), quant), open_granularity=is_open)


def _with_rules(quant: TensorQuant) -> TensorQuant:
    """ModelOpt's run-time quantizers: MX scales round up, so that the largest value never saturates; FP8 multiplies
    by the reciprocal of its scale; NVFP4 keeps local scales at or above the smallest e4m3 number."""
    if quant.is_microscaled:
        rule = "ceil"
    elif quant.second_scale == "global":
        rule = "absmax-clamped"
    else:
        rule = "" if quant.is_integer else "absmax-reciprocal"
    return replace(quant, scale_rule=rule, rounding="nearest-even")


def _group_of(source: Fields) -> int:
    """The weights' group size of the flat spelling, which keeps it in its groups; 0 where it has none."""
    for _, group in source.children("config_groups"):
        weights = group.child("weights")
        if weights is not None:
            return weights.integer("group_size", 0)
    return 0


def _weight_only(source: Fields) -> bool:
    """True when every group spells out that activations are not quantized."""
    groups = [group for _, group in source.children("config_groups")]
    return bool(groups) and all(
        "input_activations" in group.values and group.values["input_activations"] is None for group in groups
    )


def _exclude_rule(kind: str, entry: str, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    key = f"{kind}[{entry!r}]"
    if any(char in entry for char in "*?["):
        matcher = glob(entry)
        return Rule(key, "ignore", entry, bounded_glob(entry), matcher, matcher, NOT_QUANTIZED, -1)
    # ModelOpt writes whole names; engines take an entry for a part of one.
    return Rule(
        key,
        "ignore",
        entry,
        named(entry, parts_of),
        literal_matcher(entry, parts_of),
        Contains(entry),
        NOT_QUANTIZED,
        -1,
    )


def _layer_rule(name: str, layer: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    algorithm = layer.string("quant_algo")
    declared = _declared(algorithm, layer, layer) if algorithm or "quant_algo" not in layer.values else NOT_QUANTIZED
    literal = literal_matcher(name, parts_of)
    return Rule(f"quantized_layers[{name!r}]", "quantized_layers", name, literal, literal, Exact(name), declared)


FORMAT = ModelOptFormat()
