"""AutoRound / INC checkpoints: one default scheme, `extra_config` overrides, blocks that are in scope.

The key of an override means different things to the tool that writes it and to engines that read it: the
producer takes any key that is no layer's name for a regular expression (re.search, `.` matches anything); vLLM
tries the exact name, then a dotted suffix, and a regular expression only if the key holds a metacharacter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import InvalidCheckpointError, UnsupportedOptionError
from omniplat.formats.base import literal_matcher
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Refusal, Rule, scope_entries
from omniplat.formats.matching import (
    AnyOf,
    AtOrBelow,
    Everything,
    Exact,
    Matcher,
    ModuleIndex,
    Pattern,
    Segments,
    Suffix,
    compile_regex,
)
from omniplat.formats.metadata import Fields
from omniplat.scheme import Scheme, TensorQuant, parse_weight_id

_METACHARACTERS = frozenset("*+?^$()[]{}|\\")

#: packing_format -> (packing, zero_offset); "" where the tensors' own names show the packing.
_PACKINGS: dict[str, tuple[str, int]] = {
    "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_gptq": ("gptq", 1),
    # other names of two of them, which the producer reads alike
    "auto_round:gptq": ("gptq", 1),
    "auto_round:awq": ("awq", 0),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:llm_compressor": ("", 0),
    "auto_round:fp8": ("", 0),
    "auto_round:fp8_static": ("", 0),
    "": ("gptq", 0),
}


@dataclass(frozen=True, slots=True)
class _ProducerKey:
    """The producer's reading of a key: the layer of that name, else a regular expression."""

    exact: Exact
    pattern: Matcher

    def hits(self, index: ModuleIndex) -> list[str]:
        return self.exact.hits(index) or self.pattern.hits(index)


@dataclass(frozen=True, slots=True)
class AutoRoundFormat:
    name: str = "auto-round"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if isinstance(method, str):
            return method.lower() in ("auto-round", "intel/auto-round", "auto_round", "inc")
        return method is None and "autoround_version" in source.values

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        packing_format = source.string("packing_format") or source.string("backend")
        if packing_format == "auto_round:fake":
            note = "packing format auto_round:fake stores dequantized weights: nothing is quantized"
            key = f"packing_format={packing_format}"
            return Declaration(self.name, source.file, NOT_QUANTIZED, default_key=key, notes=(note,))
        if packing_format not in _PACKINGS:
            raise UnsupportedOptionError(
                f"packing format {packing_format!r} is none of {', '.join(sorted(filter(None, _PACKINGS)))}",
                file=source.file,
                key=source.path("packing_format"),
            )
        packing, zero_offset = _PACKINGS[packing_format]
        default = Declared(_scheme(source, source), packing, zero_offset)
        rules = [_rule(key, override, source, default, parts_of) for key, override in source.children("extra_config")]
        name, blocks = _blocks(source)
        return Declaration(
            self.name,
            source.file,
            default,
            tuple(rules),
            scope=AnyOf(tuple(AtOrBelow(block) for block in blocks)) if blocks else None,
            scope_key=f"{name}={','.join(blocks)}" if blocks else "",
            scope_entries=scope_entries(name, ((block, AtOrBelow(block)) for block in blocks), default),
            default_key=_default_key(source),
            refusals=_rotations(source),
        )


def _rotations(source: Fields) -> tuple[Refusal, ...]:
    """Hadamard and SpinQuant rotations whose other half is computed on the activations at run time."""
    found = []
    rotation = source.child("rotation_config")
    if rotation is not None and rotation.values and rotation.boolean("allow_online_rotation", True):
        found.append(("rotation_config", rotation.string("algorithm", "hadamard")))
    spin = source.child("spinquant_config")
    if spin is not None and any(spin.boolean(name, False) for name in ("online_r1_rotation", "r3", "r4")):
        found.append(("spinquant_config", spin.string("algorithm", "spinquant")))
    return tuple(
        Refusal(Everything(), source.path(key), f"{name} rotation of activations at run time is not computed here")
        for key, name in found
    )


def _default_key(source: Fields) -> str:
    return f"bits={source.integer('bits', 4)}, data_type={source.string('data_type', 'int')}"


def _blocks(source: Fields) -> tuple[str, tuple[str, ...]]:
    """The key and the blocks in scope: a comma-separated string, a list, or a list of lists, under either spelling."""
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        value = source.values.get(name)
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        flat = [inner for item in items for inner in (item if isinstance(item, list) else [item])]
        if not all(isinstance(item, str) for item in flat):
            raise source.wrong(name, "a string or a list of strings")
        return name, tuple(part.strip().strip(".") for item in flat for part in item.split(",") if part.strip())
    return "", ()


def _rule(
    key: str, override: Fields, source: Fields, default: Declared, parts_of: Mapping[str, tuple[str, ...]]
) -> Rule:
    declared = replace(default, scheme=_scheme(override, source))
    if not declared.quantizes:
        declared = NOT_QUANTIZED
    is_pattern = any(char in _METACHARACTERS for char in key)
    expression = compile_regex(key, file=source.file, key=override.key)
    searched = Pattern(expression, "search")
    exact = Exact(key)
    literal: Matcher = searched if is_pattern else AnyOf((literal_matcher(key, parts_of), Segments(key)))
    consumer: Matcher = searched if is_pattern else AnyOf((exact, Suffix(key)))
    return Rule(
        f"extra_config[{key!r}]{_changes(override)}",
        "extra_config",
        key,
        literal,
        _ProducerKey(exact, searched),
        consumer,
        declared,
        rank=1 if is_pattern or key.startswith(".") or key.endswith(".") else 0,
    )


def _changes(override: Fields) -> str:
    return f".bits={override.values['bits']}" if "bits" in override.values else ""


def _scheme(override: Fields, base: Fields) -> Scheme:
    """The scheme of an override: its own fields, the rest inherited from the base configuration."""

    def integer(name: str, default: int) -> int:
        return override.integer(name, base.integer(name, default))

    def string(name: str, default: str) -> str:
        return override.string(name, base.string(name, default))

    bits = integer("bits", 4)
    data_type = string("data_type", "int").lower()
    if bits >= 16:
        return NOT_QUANTIZED.scheme
    if data_type in ("float", "fp16", "bf16"):
        # An override that names only the bits of a 16-bit default keeps integer codes.
        data_type = "int"
    symmetric = override.boolean("sym", base.boolean("sym", True))
    weight = _quant(data_type, bits, _group_size(override, base, "group_size", 128), symmetric, override, "bits")
    act_bits = integer("act_bits", 16)
    if act_bits >= 16:
        return Scheme(weight)
    if "act_bits" not in override.values and bits != base.integer("bits", 4):
        # An override of the weight bits alone keeps weight and activation of one MX width together.
        act_bits = bits if data_type.startswith("mx") else act_bits
    act_type = string("act_data_type", data_type).lower()
    group = _group_size(override, base, "act_group_size", 32)
    dynamic = override.boolean("act_dynamic", base.boolean("act_dynamic", True))
    act_symmetric = override.boolean("act_sym", base.boolean("act_sym", True))
    return Scheme(weight, _activation(act_type, act_bits, group, act_symmetric, dynamic, override))


def _group_size(override: Fields, base: Fields, name: str, default: int) -> int | tuple[int, int]:
    """group_size: an integer, or [rows, columns] for 2-D blocks."""
    for fields in (override, base):
        value = fields.values.get(name)
        if isinstance(value, list):
            if len(value) == 2 and all(isinstance(item, int) and item > 0 for item in value):
                return (value[0], value[1])
            raise fields.wrong(name, "an integer or two positive integers")
        if value is not None:
            return fields.integer(name, default)
    return default


def _named(data_type: str, bits: int) -> str:
    """The scheme id behind an MX or NV data type, whatever suffix (`_rceil`, `e4m3`) it carries; "" otherwise."""
    if data_type.startswith("mx_fp"):
        if "e5m2" in data_type:
            return "mxfp8e5m2"
        return {4: "mxfp4", 8: "mxfp8", 6: "mxfp6e3m2" if "e3m2" in data_type else "mxfp6e2m3"}.get(bits, "")
    if data_type.startswith("mx_int"):
        return {4: "mxint4", 8: "mxint8"}.get(bits, "")
    return "nvfp4" if data_type.startswith("nv_fp") and bits == 4 else ""


def _quant(
    data_type: str, bits: int, group: int | tuple[int, int], symmetric: bool, where: Fields, name: str
) -> TensorQuant:
    named = _named(data_type, bits)
    if named:
        return parse_weight_id(named)
    if data_type.startswith("fp") and bits == 8:
        element = "fp8_e5m2" if "e5m2" in data_type else "fp8_e4m3"
    elif data_type.startswith("int") and 2 <= bits <= 8:
        element = f"{'int' if symmetric else 'uint'}{bits}"
    else:
        raise UnsupportedOptionError(
            f"data_type {data_type!r} with {bits} bits is not known", file=where.file, key=where.path(name)
        )
    if isinstance(group, tuple):
        return TensorQuant(element, "block", block=group, symmetric=symmetric)
    if group == 0:
        return TensorQuant(element, "tensor", symmetric=symmetric)
    if group == -1:
        return TensorQuant(element, "channel", symmetric=symmetric)
    if group < 0:
        raise InvalidCheckpointError(f"must be -1, 0 or positive, found {group}", file=where.file, key=where.path(name))
    return TensorQuant(element, "group", group, symmetric=symmetric)


def _activation(
    data_type: str, bits: int, group: int | tuple[int, int], symmetric: bool, dynamic: bool, where: Fields
) -> TensorQuant:
    named = _named(data_type, bits)
    if named:
        quant = parse_weight_id(named)
        rule = "rceil" if data_type.endswith("_rceil") else "floor"
        rule = rule if quant.is_microscaled else "absmax-reciprocal"
        return replace(quant, dynamic=True, scale_rule=rule, rounding="nearest-even")
    if isinstance(group, tuple):
        group = group[1]
    quant = _quant(data_type, bits, group, symmetric, where, "act_bits")
    if quant.element.startswith("uint"):
        quant = replace(quant, element=quant.element.removeprefix("u"))
    granularity = {"channel": "token"}.get(quant.granularity, quant.granularity)
    rule = "" if quant.is_integer or not dynamic else "absmax-clamped"
    return replace(quant, granularity=granularity, dynamic=dynamic, scale_rule=rule, rounding="nearest-even")


FORMAT = AutoRoundFormat()
