"""What metadata says about the KV cache. Engines quantize it, not the plan's layers: here it is only checked.

A declared cache is FP8 (msModelSlim's may be int8) or it is refused; one with static scales has a scale for K and one
for V in every attention layer, and an engine runs a layer without them at scale 1.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from omniplat.checkpoint.folder import Component
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError, UnsupportedOptionError
from omniplat.findings import Finding, finding
from omniplat.formats.metadata import Fields

#: Keys that declare a quantized cache: compressed-tensors' and ModelOpt's flat spelling, ModelOpt's nested one.
_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
#: Quark's: layers by pattern, whose outputs go into the cache; and the patterns alone, of layers whose quantization is
#: in the configuration of the pattern, or in that of all layers.
_QUARK = "kv_cache_quant_config"
_QUARK_GROUP = "kv_cache_group"
#: msModelSlim's, in the description file: type -> whether its scales are stored.
_MODELSLIM = ("kv_quant_type", "kv_cache_type")
_MODELSLIM_TYPES = {
    "C8": True,
    "INT8": True,
    "FP8": True,
    "INT8_DYNAMIC": False,
    "FP8_DYNAMIC": False,
    "C8_DYNAMIC": False,
}
_FP8 = frozenset({"FP8", "FP8_E4M3"})
_NONE = frozenset({"", "NONE", "AUTO", "FLOAT"})
#: What may share a scale; a scheme that says nothing has one scale for each layer.
_STRATEGIES = ("tensor", "attn_head")

#: Projections that make a module an attention layer with a cache.
_PROJECTIONS = r"k_proj|qkv_proj|kv_b_proj|kv_a_proj_with_mqa|query_key_value|W?qkv|wqkv|c_attn"
_ATTENTION = re.compile(rf"(?P<layer>.+)\.(?:{_PROJECTIONS})\.(?:weight|weight_packed|qweight)")
#: Scales of K, of V and of both, of Q and of the softmax, under all the names that producers give them.
_SCALE = re.compile(
    r"(?P<layer>.+?)(?:\.attn)?(?:\.\w*_proj)?\.(?P<which>k|v|kv|q|prob)_scale"
    r"|(?P<layer_of_proj>.+)\.(?P<proj>k|v|q)_proj\.kv_cache_scale"
    r"|(?P<layer_of_output>.+)\.(?P<output>k|v|kv|q|qkv|kv_b)_proj\.output_scale"
    r"|(?P<layer_of_softmax>.+)\.(?P<softmax>prob)_output_scale"
    r"|(?P<layer_of_cache>.+)\.(?P<cache>k|v|q)_cache\.scale"
)
#: What is not kept in the cache: a layer needs no scale of these.
_NOT_CACHED = frozenset({"q", "prob"})
#: Encoders attend without a cache.
_NO_CACHE = re.compile(r"(^|[._])(visual|vision|audio|image|encoder)([._]|$)")


def declares_kv_cache(fields: Fields) -> bool:
    """True where the metadata asks for a quantized KV cache, of whatever kind."""
    return any(_is_declared(fields, key) for key in _KEYS)


def cache_scales(names: Iterable[str]) -> tuple[str, ...]:
    """Those of a component's tensors that are scales of the cache, or of the attention that reads it."""
    return tuple(name for name in names if _SCALE.fullmatch(name) is not None)


def kv_cache_findings(source: Fields, component: Component) -> list[Finding]:
    """Findings about the cache that `source` declares: a kind that is not known, or scales that are not there."""
    try:
        nested = source.values.get("quantization")
        fields = (source.child("quantization") if isinstance(nested, dict) else None) or source
        static = [key for key in _KEYS if _has_static_scales(fields, key)]
        static += [key for key, layers in _quark_layers(fields).items() if _quark_has_static_scales(layers)]
        static += [key for key in _MODELSLIM if _modelslim_has_static_scales(fields, key)]
    except InvalidCheckpointError as exc:
        code = "unsupported-option" if isinstance(exc, UnsupportedOptionError) else "metadata-unreadable"
        return [finding(code, exc.message, component=component.name, file=exc.file, rule=exc.key)]
    return _absent_scales(fields, static[0], component) if static else []


def _is_declared(fields: Fields, key: str) -> bool:
    value = fields.values.get(key)
    return value is not None and value != {} and not (isinstance(value, str) and value.upper() in _NONE)


def _has_static_scales(fields: Fields, key: str) -> bool:
    """True for an FP8 cache whose scales are stored. Raises where the declared cache is of another kind."""
    if not _is_declared(fields, key):
        return False
    value = fields.values[key]
    if isinstance(value, str):
        if value.upper() not in _FP8:
            raise UnsupportedOptionError(
                f"a KV cache of {value!r:.80} is not known, only FP8", file=fields.file, key=fields.path(key)
            )
        return True
    scheme = fields.child(key)
    assert scheme is not None
    bits, kind = scheme.integer("num_bits", 8), scheme.string("type", "int").lower()
    if (bits, kind) != (8, "float"):
        raise UnsupportedOptionError(
            f"a KV cache of {bits}-bit {kind} numbers is not known, only FP8 (num_bits 8, type float)",
            file=scheme.file,
            key=scheme.key,
        )
    strategy = scheme.string("strategy", _STRATEGIES[0])
    if strategy not in _STRATEGIES:
        raise UnsupportedOptionError(
            f"a KV cache with scales for each {strategy!r} is not known, only {' and '.join(_STRATEGIES)}",
            file=scheme.file,
            key=scheme.path("strategy"),
        )
    if not scheme.boolean("symmetric", True):
        raise UnsupportedOptionError("an asymmetric FP8 KV cache", file=scheme.file, key=scheme.path("symmetric"))
    return not scheme.boolean("dynamic", False)


def _quark_layers(fields: Fields) -> dict[str, list[Fields]]:
    """Configurations of layers whose outputs go into the cache, by the key that says that they do."""
    found = {_QUARK: [layer for _, layer in fields.children(_QUARK)]}
    export = fields.child("export")
    if export is None or not export.has(_QUARK_GROUP):
        return found
    layers = dict(fields.children("layer_quant_config"))
    whole = fields.child("global_quant_config")
    owners = (layers.get(pattern, whole) for pattern in export.strings(_QUARK_GROUP))
    return found | {f"export.{_QUARK_GROUP}": [owner for owner in owners if owner is not None]}


def _quark_has_static_scales(layers: Iterable[Fields]) -> bool:
    found = False
    for layer in layers:
        if not layer.has("output_tensors"):
            continue
        outputs = layer.child("output_tensors")
        assert outputs is not None
        kind = outputs.string("dtype")
        if kind.upper() not in _FP8:
            raise UnsupportedOptionError(
                f"a KV cache of {kind!r:.80} is not known, only fp8_e4m3", file=outputs.file, key=outputs.path("dtype")
            )
        found = found or not outputs.boolean("is_dynamic", False)
    return found


def _modelslim_has_static_scales(fields: Fields, key: str) -> bool:
    if not _is_declared(fields, key):
        return False
    kind = fields.string(key).upper()
    if kind not in _MODELSLIM_TYPES:
        raise UnsupportedOptionError(
            f"a KV cache of {kind!r:.80} is none of {', '.join(_MODELSLIM_TYPES)}",
            file=fields.file,
            key=fields.path(key),
        )
    return _MODELSLIM_TYPES[kind]


def _absent_scales(fields: Fields, key: str, component: Component) -> list[Finding]:
    layers, scaled = _layers(component.tensors.values())
    absent = sorted(layers - scaled)
    if scaled and not absent:
        return []
    counted = f"{len(layers - set(absent))} of {len(layers)} attention layers have" if layers else "no layer has"
    message = (
        f"{key} declares a KV cache with stored scales; {counted} k_scale and v_scale: "
        f"{'the others run' if scaled else 'it runs'} at scale 1.0"
    )
    return [
        finding(
            "missing-tensor",
            message,
            severity="warning",
            component=component.name,
            file=fields.file,
            rule=fields.path(key),
            modules=absent,
            fix="calibrate the KV cache, or run the engine with an unquantized one",
        )
    ]


def _layers(tensors: Iterable[TensorInfo]) -> tuple[set[str], set[str]]:
    """(attention layers with a cache, those of them with scales for K and V).

    Where some stack of layers has scales, stacks without any (encoders, drafts) are not counted.
    """
    layers: set[str] = set()
    compressed: set[str] = set()
    scales: dict[str, set[str]] = defaultdict(set)
    for info in tensors:
        if (match := _ATTENTION.fullmatch(info.name)) is not None:
            layers.add(match["layer"])
            if ".kv_" in info.name.removeprefix(match["layer"]):
                compressed.add(match["layer"])
        elif (match := _SCALE.fullmatch(info.name)) is not None:
            which = match["which"] or match["proj"] or match["output"] or match["softmax"] or match["cache"]
            if which in _NOT_CACHED:
                continue
            layer = match["layer"] or match["layer_of_proj"] or match["layer_of_output"] or match["layer_of_cache"]
            scales[layer].update(which.removeprefix("q").removesuffix("_b"))
    # MLA caches one latent vector: one scale is all it needs.
    scaled = {layer for layer, which in scales.items() if which >= {"k", "v"} or layer in compressed}
    layers |= scales.keys()
    stacks = {_stack(layer) for layer in scales}
    if stacks:
        return {layer for layer in layers if _stack(layer) in stacks}, scaled
    return {layer for layer in layers if _NO_CACHE.search(layer) is None}, scaled


def _stack(layer: str) -> str:
    """The path of the list that a layer stands in: what comes before its first number."""
    return re.split(r"\.\d+\.", layer, maxsplit=1)[0]
