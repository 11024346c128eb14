"""AMD Quark checkpoints: one global specification, others by layer pattern and layer type, and exclusions.

Quark takes an entry as a glob over the whole name (`re:` entries as regular expressions); vLLM takes it as an exact
name unless it starts with `re:` or, in `layer_quant_config`, holds a `*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Refusal, Rule
from omniplat.formats.matching import (
    AnyOf,
    Everything,
    Exact,
    Except,
    Matcher,
    Nothing,
    Pattern,
    Suffix,
    bounded_glob,
    bounded_regex,
    compile_regex,
    glob,
)
from omniplat.formats.metadata import Fields
from omniplat.formats.quark_spec import quantity
from omniplat.formats.skiplists import named
from omniplat.scheme import Scheme

_GLOB = frozenset("*?[")
#: pack_method -> packing of 4-bit integers; "" is Quark's default.
_PACKINGS = {"reorder": "awq", "": "awq", "order": "int32_n"}


@dataclass(frozen=True, slots=True)
class QuarkFormat:
    name: str = "quark"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return "global_quant_config" in source.values
        return bool(method == "quark")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        export = source.child("export")
        method = export.string("pack_method") if export is not None else ""
        if export is not None and method not in _PACKINGS:
            raise UnsupportedOptionError(
                f"pack_method {method!r} is neither reorder nor order", file=export.file, key=export.path("pack_method")
            )
        packing = _PACKINGS[method]
        whole = source.child("global_quant_config")
        rules = [
            _exclusion(entry, position, source, parts_of) for position, entry in enumerate(source.strings("exclude"))
        ]
        excluded = AnyOf(tuple(rule.producer for rule in rules))
        layers = source.child("layer_quant_config")
        for pattern in layers.values if layers is not None else ():
            assert layers is not None
            own = layers.child(pattern)
            declared = _declared(own, packing) if own is not None else NOT_QUANTIZED
            rules.append(_layer_rule(pattern, declared, source, parts_of))
        for kind, fields in source.children("layer_type_quant_config"):
            rules.append(_type_rule(kind, _declared(fields, packing)))
        return Declaration(
            self.name,
            source.file,
            _declared(whole, packing) if whole is not None else NOT_QUANTIZED,
            tuple(rules),
            default_key="global_quant_config",
            refusals=_rotations(source, excluded),
            notes=_notes(whole),
        )


#: Rotations that are computed on activations at run time, and the layers whose inputs they rotate: SpinQuant's, and
#: QuaRot's Hadamard matrices. SpinQuant's r3 turns queries and keys alike, which changes no layer.
_ONLINE: dict[str, Matcher] = {
    "online_r1_rotation": Everything(),
    "online_had": Everything(),
    "r4": Suffix("down_proj"),
}


def _rotations(source: Fields, excluded: Matcher) -> tuple[Refusal, ...]:
    """Rotations whose other half is computed on the activations; one that is folded into the weights needs nothing."""
    value = source.values.get("algo_config")
    single = source.child("algo_config") if isinstance(value, dict) else None
    refusals = []
    for algorithm in (single,) if single is not None else source.listed("algo_config"):
        online = algorithm.child("online_config")
        layers = online.strings("online_rotation_layers") if online is not None else ()
        rotated: list[Matcher] = [Exact(layer) for layer in layers]
        rotated = rotated or [where for name, where in _ONLINE.items() if algorithm.boolean(name, False)]
        if rotated:
            reason = f"{algorithm.string('name', 'a')} of activations at run time is not computed here"
            refusals.append(Refusal(Except(AnyOf(tuple(rotated)), excluded), algorithm.key, reason))
    return tuple(refusals)


def _notes(whole: Fields | None) -> tuple[str, ...]:
    """Outputs are the cache's affair (`kv_cache.py`); a quantized bias is nobody's."""
    if whole is None or not whole.has("bias"):
        return ()
    return (f"{whole.path('bias')} has no effect here: biases are taken as they are stored",)


def _declared(fields: Fields, packing: str) -> Declared:
    weight = quantity(fields, "weight")
    if weight is None:
        return NOT_QUANTIZED
    activation = quantity(fields, "input_tensors", at_run_time=True)
    is_word = weight.is_integer and weight.bits == 4
    return Declared(Scheme(weight, activation), packing if is_word else "")


def _exclusion(entry: str, position: int, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    key = f"exclude[{entry!r}]"
    if entry.startswith("re:"):
        text = entry.removeprefix("re:")
        where = source.path(f"exclude[{position}]")
        matched: Matcher = Pattern(compile_regex(text, file=source.file, key=where, entry=entry))
        bounded = bounded_regex(text, file=source.file, key=where)
        return Rule(key, "exclude", text, bounded, matched, matched, NOT_QUANTIZED, -1)
    literal, producer, consumer = _readings(entry, parts_of)
    return Rule(key, "exclude", entry, literal, producer, consumer, NOT_QUANTIZED, -1)


def _readings(entry: str, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[Matcher, Matcher, Matcher]:
    """Literal, producer's and consumer's matcher of a name or glob."""
    if any(char in _GLOB for char in entry):
        return AnyOf((bounded_glob(entry), glob(f"{entry}.*"))), glob(entry), glob(entry)
    exact = Exact(entry)
    return named(entry, parts_of), exact, exact


def _layer_rule(pattern: str, declared: Declared, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    literal, producer, consumer = _readings(pattern, parts_of)
    return Rule(
        f"layer_quant_config[{pattern!r}]", "layer_quant_config", pattern, literal, producer, consumer, declared
    )


def _type_rule(kind: str, declared: Declared) -> Rule:
    """Keys are names of torch classes. All matrices but embeddings belong to a linear class; vLLM never matches one."""
    leaf = kind.strip("<>'").rpartition(".")[2]
    every: Matcher = Everything() if leaf.endswith("Linear") else Nothing()
    return Rule(
        f"layer_type_quant_config[{kind!r}]",
        "layer_type_quant_config",
        kind,
        every,
        every,
        Nothing(),
        replace(declared),
        rank=5,
        must_hit=False,
    )


FORMAT = QuarkFormat()
