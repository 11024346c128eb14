"""Cases: which layers each check runs, generated from a backend's capabilities. Ids are stable between runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from omniplat.capability import Capability
from omniplat.conformance.catalog import (
    activation_ids,
    declared_activations,
    declared_weights,
    fitting,
    scheme_of,
    weight_ids,
)
from omniplat.conformance.subject import Subject
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.scheme import Scheme

PROFILES = ("full", "quick")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gating:
    """What experts compute between their two products: the fields of `MoeSpec` of the same names."""

    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 1.0


SILU = Gating()


@dataclass(frozen=True, slots=True)
class Case:
    """One layer of one capability. `dtype` is that of input and output; `rows` M, `n` N, `k` K, `inner`, `experts` and
    `gating` those of a layer of experts, `w2_scheme` where w2 has another scheme than w13. `variant` tells cases apart
    that differ in nothing else."""

    capability: Capability
    scheme: Scheme
    dtype: str
    rows: int
    n: int
    k: int
    inner: int = 0
    experts: int = 0
    bias: bool = False
    variant: str = ""
    gating: Gating = SILU
    w2_scheme: Scheme | None = None

    @property
    def id(self) -> str:
        size = f"{self.experts}x{self.inner}x{self.k}" if self.experts else f"{self.n}x{self.k}"
        words = [self.capability.name, self.scheme.id, self.dtype, f"m{self.rows}", size]
        words += ["bias"] * self.bias + [self.variant] * bool(self.variant)
        return "-".join(words)

    @property
    def spec(self) -> LayerSpec:
        if self.experts:
            parts = (self.inner, self.inner)
            moe = replace(moe_spec(self.experts, self.inner, self.gating), w2_scheme=self.w2_scheme)
            return LayerSpec("c", "moe", self.k, self.k, self.scheme, self.dtype, self.bias, parts, moe)
        return LayerSpec("c", "linear", self.n, self.k, self.scheme, self.dtype, self.bias, (self.n,))

    def rng(self) -> np.random.Generator:
        """Random numbers of this case alone, the same in every run."""
        return np.random.default_rng(zlib.crc32(self.id.encode()))


def moe_spec(experts: int, inner: int, gating: Gating) -> MoeSpec:
    return MoeSpec(experts, inner, gating.activation, limit=gating.limit, alpha=gating.alpha)


def schemes_of(subject: Subject, capability: Capability, profile: str) -> tuple[Scheme, ...]:
    """Schemes that together name every weight and every activation that the capability declares.

    Each weight stands with its first activation, each activation with the first weight; quick: the first of each
    element and each activation pattern.
    """
    from omniplat.conformance.weights import columns_unit

    weights = [w for w in declared_weights(capability, weight_ids(subject.spec)) if is_buildable(w)]
    activations = [a for a in declared_activations(capability, activation_ids(subject.spec)) if _fits(a, weights)]
    if profile == "quick":
        weights, activations = spread(weights, 6), spread(activations, 4)
    pairs = [(w, activations[i % len(activations)]) for i, w in enumerate(weights)] if activations else []
    pairs += [(weights[i % len(weights)], a) for i, a in enumerate(activations)] if weights else []
    if profile == "full":
        pairs += [(w, activations[0]) for w in weights] if activations else []
    found = []
    for weight, activation in dict.fromkeys(pairs):
        scheme = scheme_of(weight, activation)
        columns_unit(scheme)
        found.append(scheme)
    return tuple(found)


def schemes_once(subject: Subject, capability: Capability, profile: str) -> tuple[Scheme, ...]:
    """As `schemes_of`, each weight once: for checks that write a file for every scheme."""
    found, weights, activations = [], set(), set()
    for scheme in schemes_of(subject, capability, profile):
        if scheme.weight_id not in weights or scheme.activation_id not in activations:
            found.append(scheme)
            weights.add(scheme.weight_id)
            activations.add(scheme.activation_id)
    return tuple(spread(found, 4)) if profile == "quick" else tuple(found)


def spread(items: list[T], count: int) -> list[T]:
    """At most `count` of the items, evenly apart, the first among them."""
    step = max(1, -(-len(items) // count))
    return items[::step]


def is_buildable(weight: str) -> bool:
    """False for opaque weights that have no canonical form: SVDQuant without groups, GGUF types nobody decodes."""
    if weight.startswith("gguf-"):
        return _gguf_decodes(weight)
    return weight != "svdq-int4"


def _gguf_decodes(weight: str) -> bool:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        return False
    try:
        kind = GGMLQuantizationType[weight.removeprefix("gguf-").upper()]
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


def _fits(activation: str, weights: list[str]) -> bool:
    """SVDQuant's and bitsandbytes' activations belong to their own weights."""
    if activation.startswith("svdq-"):
        return any(weight.startswith("svdq-") for weight in weights)
    return activation != "int8-bnb" or "int8-bnb" in weights


def sizes_for(
    capability: Capability, scheme: Scheme, *, n: int = 40, k: int = 96, inner: int = 64
) -> tuple[int, int, int]:
    """(N, K, I) near the wanted sizes that scheme and shape rules allow."""
    from omniplat.conformance.weights import columns_unit

    unit = columns_unit(scheme)
    rules = {dim: [r for r in capability.shapes if r.dim == dim] for dim in ("in", "out", "intermediate")}
    hidden = fitting(k, rules["in"], unit)
    if capability.op == "moe":
        hidden = fitting(k, rules["in"] + rules["out"], unit)
    return fitting(n, rules["out"]), hidden, fitting(inner, rules["intermediate"], unit)


def experts_for(capability: Capability, wanted: int = 5) -> int:
    return fitting(wanted, [rule for rule in capability.shapes if rule.dim == "experts"])


def case_of(
    capability: Capability,
    scheme: Scheme,
    *,
    dtype: str = "",
    rows: int = 7,
    n: int = 40,
    k: int = 96,
    inner: int = 64,
    bias: bool = False,
    variant: str = "",
) -> Case:
    """A case in sizes that are legal for the capability, in its first dtype unless one is given."""
    n, k, inner = sizes_for(capability, scheme, n=n, k=k, inner=inner)
    is_moe = capability.op == "moe"
    return Case(
        capability,
        scheme,
        dtype or capability.dtypes[0],
        rows,
        k if is_moe else n,
        k,
        inner if is_moe else 0,
        experts_for(capability) if is_moe else 0,
        bias,
        variant,
    )


def numeric_cases(subject: Subject, profile: str, op: str) -> Iterator[Case]:
    """One case per scheme of `schemes_of`, the dtypes taking turns."""
    for capability in subject.spec.capabilities:
        if capability.op != op:
            continue
        for index, scheme in enumerate(schemes_of(subject, capability, profile)):
            dtype = capability.dtypes[index % len(capability.dtypes)]
            yield case_of(capability, scheme, dtype=dtype, bias=capability.bias and index % 2 == 1)


def representative(subject: Subject, op: str = "") -> Iterator[Case]:
    """One case per capability: its first scheme."""
    for capability in subject.spec.capabilities:
        if op and capability.op != op:
            continue
        for scheme in schemes_of(subject, capability, "quick")[:1]:
            yield case_of(capability, scheme, bias=capability.bias)
