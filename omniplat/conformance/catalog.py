"""The catalog: every scheme that the suite asks a backend about. Finite, so that "everything else" can be enumerated.

What a capability declares is read here a second time, as sets of points, independently of `match.decide`: a planner
that refused or accepted too much would contradict it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import filter as fnmatch_filter
from functools import lru_cache
from math import lcm

from omniplat.backend import BackendSpec
from omniplat.capability import Capability, ShapeRule, compare_activation
from omniplat.device import ARCHITECTURES
from omniplat.errors import InvalidSchemeError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.oracle.codecs import ROUNDINGS
from omniplat.oracle.scales import E8M0_RULES
from omniplat.scheme import Scheme, TensorQuant, low_rank_base, parse_activation_id, parse_weight_id

OPS = ("linear", "moe")
DTYPES = ("bf16", "f16", "f32")

_BITS = range(2, 9)
_TAILS = ("tensor", "channel", "g32", "g64", "g128", "block128x128")

WEIGHTS: tuple[str, ...] = (
    *("bf16", "mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxint8", "mxint4", "mxfp4-dual", "nvfp4"),
    *(f"{stem}-{tail}" for stem in ("fp8", "fp8e5m2") for tail in _TAILS),
    *(f"{stem}{bits}-{tail}" for stem in ("int", "uint") for bits in _BITS for tail in _TAILS),
    *("uint4-block64x1", "uint8-block64x1", "uint4-block1x64", "uint8-block1x128"),
    *("nf4-b64", "nf4-b128", "fp4bnb-b64", "int8-bnb", "svdq-nvfp4", "svdq-int4-g64", "svdq-int4"),
    *(f"gguf-{name}" for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")),
    *(f"gguf-{name}" for name in ("iq4_nl", "iq4_xs", "iq2_xxs", "iq3_s", "tq1_0", "tq2_0", "mxfp4", "nvfp4", "q8_k")),
)

ACTIVATIONS: tuple[str, ...] = (
    "a16",
    *("fp8-token", "fp8-tensor", "fp8-tensor-static", "fp8-g128", "fp8e5m2-token", "fp8e5m2-tensor"),
    *("fp8e5m2-tensor-static", "fp8e5m2-g128", "int8-tensor-asym"),
    *("int8-token", "int8-token-asym", "int8-tensor", "int8-tensor-static", "int8-tensor-static-asym", "int8-g128"),
    *("int4-token", "int4-g128", "int6-token"),
    *("mxfp8", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "mxint8", "mxint4", "mxfp4-dual", "nvfp4"),
    *("svdq-int4", "svdq-nvfp4", "int8-bnb"),
)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One combination of the catalog, without an architecture."""

    op: str
    weight: str
    activation: str
    dtype: str

    @property
    def scheme(self) -> Scheme:
        return scheme_of(self.weight, self.activation)


@lru_cache(maxsize=1 << 14)
def scheme_of(weight: str, activation: str) -> Scheme:
    return Scheme(parse_weight_id(weight), parse_activation_id(activation))


def weight_ids(spec: BackendSpec) -> tuple[str, ...]:
    """The catalog's weights and those that the backend's patterns spell out."""
    literal = (text for capability in spec.capabilities for text in capability.weights)
    return tuple(dict.fromkeys((*WEIGHTS, *_parsed(literal, weight=True))))


def activation_ids(spec: BackendSpec) -> tuple[str, ...]:
    """The catalog's activations and those that the backend's patterns spell out."""
    literal = (text for capability in spec.capabilities for text in (*capability.activations, capability.executes))
    return tuple(dict.fromkeys((*ACTIVATIONS, *_parsed(literal, weight=False))))


def _parsed(texts: Iterable[str], *, weight: bool) -> list[str]:
    found = []
    for text in texts:
        try:
            parse_weight_id(text) if weight else parse_activation_id(text)
        except InvalidSchemeError:
            continue
        found.append(text)
    return found


def declared_weights(capability: Capability, weights: Iterable[str]) -> tuple[str, ...]:
    """Those of `weights` that a pattern of the capability names, in order."""
    every = tuple(weights)
    named = {text for pattern in capability.weights for text in fnmatch_filter(every, pattern)}
    return tuple(text for text in every if text in named)


def declared_activations(capability: Capability, activations: Iterable[str]) -> tuple[str, ...]:
    """Declared activations that the capability accepts: its patterns, or whatever its one `executes` may stand for."""
    every = tuple(activations)
    if capability.executes:
        return tuple(text for text in every if compare_activation(text, capability.executes) != "changed")
    named = {text for pattern in capability.activations for text in fnmatch_filter(every, pattern)}
    return tuple(text for text in every if text in named)


def rule_variants(quant: TensorQuant | None) -> tuple[TensorQuant, ...]:
    """An activation by every rule for its scales and every rounding that mean something for it."""
    if quant is None or quant.element.endswith("bnb"):
        return ()
    base = low_rank_base(quant) or quant
    if base.scale_format == "e8m0":
        rules: tuple[str, ...] = E8M0_RULES
    elif not base.symmetric:
        rules = ("absmax",)
    elif base.is_integer:
        rules = ("absmax", "half-range", "absmax-reciprocal")
    else:
        rules = ("absmax", "absmax-clamped", "absmax-reciprocal")
    if not base.dynamic and base.scale_format != "e8m0":
        # the scale is given: what is left is whether values are divided by it
        rules = tuple(rule for rule in rules if rule in ("absmax", "absmax-reciprocal"))
    return tuple(replace(quant, scale_rule=rule, rounding=rounding) for rule in rules for rounding in ROUNDINGS)


def archs_of(spec: BackendSpec) -> tuple[tuple[str, str], ...]:
    """(kind, arch) of every architecture of the backend's kinds."""
    return tuple((kind, arch) for kind in spec.kinds for arch in ARCHITECTURES.get(kind, ()))


def roomy_sizes(capability: Capability) -> dict[str, int]:
    """Sizes that satisfy every shape rule of a capability and divide into all groups and blocks of the catalog."""
    sizes = {}
    for dim, start in (("in", 512), ("out", 256), ("intermediate", 512), ("experts", 4)):
        sizes[dim] = fitting(start, [rule for rule in capability.shapes if rule.dim == dim])
    return sizes


def fitting(size: int, rules: Iterable[ShapeRule], unit: int = 1) -> int:
    """The size nearest `size` from above, or else from below, that all rules and the multiple `unit` allow."""
    held = tuple(rules)
    step = lcm(unit, *(rule.multiple_of for rule in held))
    top = min((rule.maximum for rule in held if rule.maximum), default=0)
    low = max((rule.minimum for rule in held), default=1)
    wanted = -(-max(size, low, 1) // step) * step
    return wanted if not top or wanted <= top else top // step * step


def layer_spec(
    op: str,
    scheme: Scheme,
    dtype: str,
    *,
    out_features: int,
    in_features: int,
    intermediate: int = 0,
    experts: int = 0,
    bias: bool = False,
    name: str = "conformance.layer",
) -> LayerSpec:
    """The LayerSpec of one case; for experts both feature counts are the hidden size."""
    if op == "moe":
        moe = MoeSpec(experts, intermediate)
        rows = (intermediate, intermediate)
        return LayerSpec(name, op, in_features, in_features, scheme, dtype, bias, rows, moe)
    return LayerSpec(name, op, out_features, in_features, scheme, dtype, bias, (out_features,))


def roomy_spec(capability: Capability, point: Point, *, bias: bool = False) -> LayerSpec:
    """A layer of a point in sizes that the capability's shape rules allow."""
    sizes = roomy_sizes(capability)
    return layer_spec(
        point.op,
        point.scheme,
        point.dtype,
        out_features=sizes["out"],
        in_features=sizes["in"],
        intermediate=sizes["intermediate"],
        experts=sizes["experts"],
        bias=bias,
    )
