"""compressed-tensors checkpoints (llm-compressor): groups of targets, each with its arguments, and an ignore list.

Targets and ignore entries are exact names, `re:` patterns (re.match) or class names. An exact name wins over a
pattern, a pattern over a class; an ignored module is never a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats import compressed_presets
from omniplat.formats.base import expand_fused, literal_matcher
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Refusal, Rule
from omniplat.formats.matching import (
    AnyOf,
    Exact,
    Except,
    Matcher,
    Nothing,
    Pattern,
    Where,
    bounded_regex,
    compile_regex,
)
from omniplat.formats.metadata import Fields
from omniplat.models.names import is_embedding
from omniplat.scheme import Scheme, TensorQuant, parse_weight_id

#: Formats whose tensors are understood. "" and mixed-precision leave it to the groups.
_FORMATS = frozenset(
    {
        *("", "dense", "mixed-precision", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"),
        # What the library calls weights that it has not compressed.
        "fakequant",
    }
)

#: Class names that stand for every linear layer; others (attention, experts' containers) name no 2-D weight.
_LINEAR_CLASSES = frozenset({"Linear", "LinearBase", "ParallelLMHead"})


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    name: str = "compressed-tensors"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return "config_groups" in source.values and "producer" not in source.values
        return method in ("compressed-tensors", "sparseml")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        written, source = source, compressed_presets.spelled_out(source)
        overall = source.string("format")
        _check_format(overall, source)
        sparsity = source.child("sparsity_config")
        if sparsity is not None and sparsity.string("format", "dense") != "dense":
            _check_format(sparsity.string("format"), sparsity)
        rules: list[Rule] = []
        default = NOT_QUANTIZED
        default_key = "config_groups"
        patterns: list[Rule] = []
        for position, entry in enumerate(source.strings("ignore")):
            rules.append(_ignore_rule(entry, position, source, parts_of))
        for group, fields in source.children("config_groups"):
            layout = fields.string("format", overall)
            _check_format(layout, fields)
            if _speaks_of_outputs(fields):
                continue
            if not fields.has("targets"):
                raise fields.wrong("targets", "a list of strings")
            is_open = compressed_presets.is_open(group, written)
            declared = Declared(_scheme(fields, layout), act_order=_act_order(fields), open_granularity=is_open)
            for target in fields.strings("targets"):
                key = f"config_groups.{group}.targets[{target!r}]"
                if target in _LINEAR_CLASSES:
                    default, default_key = declared, key
                else:
                    rule = _target_rule(key, target, declared, fields, parts_of)
                    if not declared.quantizes:
                        # Without weights it speaks of attention and what goes into its cache: no matrix has that name.
                        rule = replace(rule, must_hit=False)
                    (patterns if target.startswith("re:") else rules).append(rule)
        # Of several patterns that match, the producer takes the first in alphabetical order.
        rules += sorted(patterns, key=lambda rule: rule.text)
        refusals, not_layers = _transforms(source, parts_of)
        refusals += _not_computed(source, parts_of)
        return Declaration(
            self.name,
            source.file,
            default,
            (*rules, *_overridden(rules)),
            scope=Where(is_no_embedding),
            scope_key="class Linear",
            default_key=default_key,
            refusals=refusals,
            not_layers=not_layers,
        )


def is_no_embedding(name: str) -> bool:
    """The class Linear has no look-up tables among its members."""
    return not is_embedding(name)


#: Places of a transform that is folded into the stored weight; everywhere else it is computed at run time.
_FOLDED = ("weight_input", "weight_output")


def _transforms(source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[tuple[Refusal, ...], Matcher | None]:
    """Rotations (QuIP, SpinQuant) of inputs and outputs, and the matrices that are stored for them."""
    transforms = source.child("transform_config")
    refusals: list[Refusal] = []
    if transforms is None:
        return (), None
    for _, group in transforms.children("config_groups"):
        for use in group.listed("apply"):
            location = use.string("location")
            if location in _FOLDED:
                continue
            matched = AnyOf(tuple(_names(target, use, parts_of) for target in use.strings("targets")))
            ignored = AnyOf(tuple(_names(entry, use, parts_of) for entry in use.strings("ignore")))
            reason = f"{group.string('type', 'a')} transform of the {location} at run time is not computed here"
            refusals.append(Refusal(Except(matched, ignored), use.key, reason))
    return tuple(refusals), Where(_is_transform) if transforms.values.get("config_groups") else None


def _not_computed(source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[Refusal, ...]:
    """Groups that quantize the inputs of layers whose weights they leave as they are, or what layers put out."""
    ignored = AnyOf(tuple(_names(entry, source, parts_of) for entry in source.strings("ignore")))
    refusals: list[Refusal] = []
    for _, group in source.children("config_groups"):
        weights, outputs = group.child("weights"), group.child("output_activations")
        if weights is None and group.child("input_activations") is not None:
            place, reason = "input_activations", "quantized inputs of unquantized weights are not computed here"
        elif weights is not None and outputs is not None:
            place, reason = "output_activations", "quantized outputs are not computed here"
        else:
            continue
        matched = AnyOf(tuple(_names(target, group, parts_of) for target in group.strings("targets")))
        refusals.append(Refusal(Except(matched, ignored), group.path(place), reason))
    return tuple(refusals)


def _speaks_of_outputs(group: Fields) -> bool:
    """True for a group that quantizes outputs alone: what keys and values are in the cache, whatever their weights."""
    parts = [group.child(name) for name in ("weights", "input_activations", "output_activations")]
    return parts[:2] == [None, None] and parts[2] is not None


def _is_transform(name: str) -> bool:
    """Transforms are stored below the module that they belong to, as `<name>_input` or `<name>_output`."""
    return name.endswith(("_input", "_output"))


def _names(entry: str, fields: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Matcher:
    """Modules that a target names: a pattern, a class of layers, or a name."""
    if entry.startswith("re:"):
        return Pattern(compile_regex(entry.removeprefix("re:"), file=fields.file, key=fields.key, entry=entry))
    if entry in _LINEAR_CLASSES:
        return Where(is_no_embedding)
    return Where(is_embedding) if entry == "Embedding" else literal_matcher(entry, parts_of)


def _check_format(text: str, fields: Fields) -> None:
    if text not in _FORMATS:
        raise UnsupportedOptionError(
            f"format {text!r} is none of {', '.join(sorted(filter(None, _FORMATS)))}",
            file=fields.file,
            key=fields.path("format"),
        )


def _ignore_rule(entry: str, position: int, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    key = f"ignore[{entry!r}]"
    if entry.startswith("re:"):
        text = entry.removeprefix("re:")
        where = source.path(f"ignore[{position}]")
        producer: Matcher = Pattern(compile_regex(text, file=source.file, key=where, entry=entry))
        return Rule(
            key, "ignore", text, bounded_regex(text, file=source.file, key=where), producer, producer, NOT_QUANTIZED, -1
        )
    is_class = "." not in entry and entry[:1].isupper()
    literal = literal_matcher(entry, parts_of)
    consumer = AnyOf(tuple(Exact(name) for name in expand_fused(entry, parts_of)))
    return Rule(key, "ignore", entry, literal, literal, consumer, NOT_QUANTIZED, -1, must_hit=not is_class)


def _target_rule(
    key: str, target: str, declared: Declared, fields: Fields, parts_of: Mapping[str, tuple[str, ...]]
) -> Rule:
    if target.startswith("re:"):
        text = target.removeprefix("re:")
        where = fields.path("targets")
        producer: Matcher = Pattern(compile_regex(text, file=fields.file, key=where, entry=target))
        bounded = bounded_regex(text, file=fields.file, key=where)
        return Rule(key, "targets", text, bounded, producer, producer, declared, rank=1)
    if target == "Embedding":
        tables = Where(is_embedding)
        return Rule(key, "targets", target, tables, tables, tables, declared, rank=2)
    is_class = "." not in target and target[:1].isupper()
    if is_class:
        nothing = Nothing()
        return Rule(key, "targets", target, nothing, nothing, nothing, declared, rank=2, must_hit=False)
    exact = Exact(target)
    return Rule(key, "targets", target, AnyOf((exact, literal_matcher(target, parts_of))), exact, exact, declared)


def _overridden(rules: list[Rule]) -> list[Rule]:
    """A target that stands in two groups: the first wins for the producer, the last for engines that merge groups."""
    seen: dict[str, Rule] = {}
    last: list[Rule] = []
    nothing = Nothing()
    for rule in rules:
        if rule.kind != "targets":
            continue
        first = seen.setdefault(rule.text, rule)
        if first is not rule and first.declared != rule.declared:
            last.append(replace(rule, producer=nothing, literal=nothing, rank=rule.rank - 1, must_hit=False))
    return last


def _scheme(group: Fields, layout: str) -> Scheme:
    """The scheme of a group whose tensors have the format `layout`."""
    weights = group.child("weights")
    if weights is None:
        return NOT_QUANTIZED.scheme
    weight = _weight(weights, layout)
    inputs = group.child("input_activations")
    return Scheme(weight, _activation(inputs, layout) if inputs is not None else None)


def _act_order(group: Fields) -> bool:
    """True where columns are in groups of an order of their own. Ordered by "weight", or "static", they are not."""
    weights = group.child("weights")
    stated = weights.values.get("actorder") if weights is not None else None
    if weights is None or stated is None or isinstance(stated, bool):
        return bool(stated)
    if weights.string("actorder").lower() not in ("group", "dynamic", "weight", "static"):
        raise _unknown(weights, "actorder", stated)
    return weights.string("actorder").lower() in ("group", "dynamic")


def _unknown(args: Fields, name: str, found: object) -> UnsupportedOptionError:
    return UnsupportedOptionError(f"{found!r} is not known", file=args.file, key=args.path(name))


#: MXFP8 scales are rounded at FP4's mantissa width, not at that of their own elements.
_MX_RULES = {"fp8_e4m3": "even-m1"}
#: Bits -> element of floating-point codes.
_FLOATS = {4: "fp4_e2m1", 6: "fp6_e2m3", 8: "fp8_e4m3"}


def _element(args: Fields) -> tuple[str, int, str]:
    """(type, bits, element) of QuantizationArgs."""
    kind = args.string("type", "int").lower()
    bits = args.integer("num_bits", 8)
    if kind == "int" and 2 <= bits <= 8:
        return kind, bits, f"{'int' if args.boolean('symmetric', True) else 'uint'}{bits}"
    if kind == "float" and bits in _FLOATS:
        return kind, bits, _FLOATS[bits]
    raise _unknown(args, "num_bits", f"{kind}{bits}")


def _microscaled(args: Fields, bits: int, group: int, strategy: str, layout: str) -> TensorQuant | None:
    """NVFP4 and the MX formats as compressed-tensors writes them; None for anything else.

    8 bits in groups of 32 may have scales of any kind: their dtype tells, or the format, which implies it.
    """
    if bits == 4 and (strategy == "tensor_group" or group == 16):
        return parse_weight_id("nvfp4")
    if bits == 4 and group == 32:
        return parse_weight_id("mxfp4")
    if bits == 6 and group == 32:
        return parse_weight_id("mxfp6e2m3")
    scales = args.string("scale_dtype", "uint8" if layout == "mxfp8-quantized" else "")
    if bits == 8 and group == 32 and scales.endswith("uint8"):
        return parse_weight_id("mxfp8")
    return None


def _weight(args: Fields, layout: str) -> TensorQuant:
    kind, bits, element = _element(args)
    group = args.integer("group_size", 0)
    strategy = args.string("strategy") or ("group" if group > 0 else "tensor")
    symmetric = args.boolean("symmetric", True)
    if kind == "float":
        named = _microscaled(args, bits, group, strategy, layout)
        if named is not None:
            return named
        symmetric = True
    if strategy == "block":
        shape = args.values.get("block_structure")
        if isinstance(shape, str):
            shape = [int(part) if part.isdigit() else 0 for part in shape.lower().split("x")]
        if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(s, int) and s > 0 for s in shape)):
            raise args.wrong("block_structure", "two positive integers")
        return TensorQuant(element, "block", block=(shape[0], shape[1]), symmetric=symmetric)
    if strategy == "group":
        if group == -1:
            return TensorQuant(element, "channel", symmetric=symmetric)
        if group <= 0:
            raise args.wrong("group_size", "a positive integer")
        return TensorQuant(element, "group", group, symmetric=symmetric)
    if strategy in ("channel", "tensor"):
        return TensorQuant(element, strategy, symmetric=symmetric)
    raise _unknown(args, "strategy", strategy)


def _activation(args: Fields, layout: str) -> TensorQuant:
    kind, bits, element = _element(args)
    group = args.integer("group_size", 0)
    strategy = args.string("strategy") or ("group" if group > 0 else "tensor")
    dynamic = args.values.get("dynamic", False) not in (False, None)
    symmetric = args.boolean("symmetric", True)
    if kind == "float":
        named = _microscaled(args, bits, group, strategy, layout)
        if named is not None:
            rule = _MX_RULES.get(named.element, "even") if named.is_microscaled else ""
            return replace(named, dynamic=True, scale_rule=rule, rounding="nearest-even")
        symmetric = True
    # Symmetric integers divide by half the range of codes (127.5), floats by their largest value.
    half = kind == "int" and symmetric and dynamic
    # The element keeps its signed name: an activation id says asymmetric with a suffix.
    quant = TensorQuant(
        element.removeprefix("u"),
        "token",
        symmetric=symmetric,
        dynamic=dynamic,
        scale_rule="half-range" if half else "",
        rounding="nearest-even",
    )
    if strategy == "token" or strategy == "channel":
        return quant
    if strategy == "tensor":
        return replace(quant, granularity="tensor")
    if strategy == "group" and group > 0:
        return replace(quant, granularity="group", group_size=group)
    raise _unknown(args, "strategy", strategy)


FORMAT = CompressedTensorsFormat()
