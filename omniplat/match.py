"""Holding one layer against the capabilities of a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from omniplat.capability import Accepted, Capability, Decision, Rejected, compare_activation, matches, unfit, unfollowed
from omniplat.device import Device
from omniplat.host import installed_version
from omniplat.layer import LayerSpec
from omniplat.reencoding import span_limit
from omniplat.scheme import Scheme

#: What a caller may allow beyond the default rules (`--allow`).
ALLOWANCES = ("activation-change", "requantize", "dequantize", "model-advice")
PREFERENCES = ("memory", "speed")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the caller allows and prefers."""

    allow: frozenset[str] = frozenset()
    prefer: str = "memory"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One capability and its answer."""

    capability: Capability
    decision: Decision


@dataclass(frozen=True, slots=True)
class Match:
    """The chosen capability (None when no one accepts) and the answers of all that were asked.

    `alternative` is what runs the layer where the chosen one refuses its values: a re-encoding depends on scales.
    `faster` is what the other preference would choose, None where it would choose the same.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    alternative: Candidate | None = None
    faster: Candidate | None = None


def decide(
    capability: Capability, spec: LayerSpec, device: Device, policy: Policy, spans: Mapping[str, int] | None = None
) -> Decision:
    """The first rule of `capability` that refuses the layer, or its acceptance.

    `spans` are what the preflight found: weight id -> largest span of a row's scales, in binades.
    """
    if capability.op != spec.op:
        return Rejected("op", capability.op, spec.op)
    instead = ""
    schemes = tuple(filter(None, (spec.scheme, spec.moe.w2_scheme if spec.moe else None)))
    for scheme in schemes:
        if not matches(capability.weights, scheme.weight_id):
            return Rejected("weight", ", ".join(capability.weights), scheme.weight_id)
        declared = scheme.activation_id
        if not capability.executes:
            if not matches(capability.activations, declared):
                return Rejected("activation", ", ".join(capability.activations), declared)
        elif compare_activation(declared, capability.executes) == "changed" and "activation-change" not in policy.allow:
            return Rejected("activation", f"{capability.executes} or below", declared)
        other = unfollowed(capability, scheme.activation)
        if other is not None and not capability.substitutes:
            return other
        if (refusal := _transform_refusal(capability, scheme)) is not None:
            return refusal
        instead = instead or (f"{other.rule} {other.found}" if other is not None else "")
    if capability.archs and device.arch not in capability.archs:
        return Rejected("arch", ", ".join(capability.archs), device.arch)
    if spec.dtype not in capability.dtypes:
        return Rejected("dtype", ", ".join(capability.dtypes), spec.dtype)
    if spec.bias and not capability.bias:
        return Rejected("bias", "none", "bias")
    extras = (*spec.extras, *(("pre_scale",) if any(scheme.pre_scale for scheme in schemes) else ()))
    for extra in extras:
        if extra in capability.refuses:
            return Rejected("tensors", f"no {extra}", extra)
    if spec.moe is not None and spec.moe.activation not in capability.moe_activations:
        return Rejected("moe activation", ", ".join(capability.moe_activations), spec.moe.activation)
    sizes = {"in": spec.in_features, "out": spec.out_features}
    if spec.moe is not None:
        sizes |= {"intermediate": spec.moe.intermediate, "experts": spec.moe.experts}
    if (unfitting := unfit(capability, sizes)) is not None:
        return unfitting
    if not (device.described and capability.assumed):
        for text in capability.requires:
            missing = unmet(text, device)
            if missing:
                return Rejected("distribution", text, missing)
    for source, span in (spans or {}).items():
        limit = span_limit(source, capability.via)
        if limit is not None and span > limit:
            return Rejected("span of scales", f"<= {limit} binades for {capability.via}", f"{span}")
    executes = "+".join(f"{scheme.weight_id}/{capability.executes or scheme.activation_id}" for scheme in schemes)
    return Accepted(executes, capability.via, instead)


def _transform_refusal(capability: Capability, scheme: Scheme) -> Rejected | None:
    """Why the capability cannot transform inputs as the scheme says; None where it can, and where nothing is said."""
    if not scheme.is_transformed:
        return None
    if not capability.transforms:
        left, right = scheme.transform
        return Rejected("transform of the input", "none", f"{left} x {left} and {right} x {right}")
    for rule in capability.transforms:
        size = scheme.transform[0 if rule.dim == "left" else 1]
        if not rule.accepts(size):
            return Rejected(f"{rule.dim} transform", rule.needed, str(size))
    return None


def unmet(requirement: str, device: Device) -> str:
    """What is there where `requirement` is not met; "" where it is.

    An emulated device has the versions that it emulates, and needs no other distribution; a described one has those
    that its description lists.
    """
    needed = Requirement(requirement)
    if device.emulated or device.described:
        found = device.versions.get(needed.name, "")
        if not found and device.described:
            return "not described"
        return "" if not found or needed.specifier.contains(found, prereleases=True) else found
    found = installed_version(needed.name)
    if not found:
        return "not installed"
    return "" if needed.specifier.contains(found, prereleases=True) else found


def match(
    spec: LayerSpec,
    capabilities: Sequence[Capability],
    device: Device,
    policy: Policy,
    spans: Mapping[str, int] | None = None,
) -> Match:
    """Ask every capability; choose what has a kernel, by resident size (unless speed is preferred), priority, then
    name. `spans` as in `decide`."""
    candidates = tuple(Candidate(cap, decide(cap, spec, device, policy, spans)) for cap in capabilities)
    accepted = [item for item in candidates if isinstance(item.decision, Accepted)]
    if not accepted:
        return Match(None, candidates)
    chosen = _best(accepted, policy.prefer)
    fixed = [item for item in accepted if not item.capability.via]
    alternative = _best(fixed, policy.prefer) if chosen.capability.via and fixed else None
    faster = _best(accepted, "speed")
    return Match(chosen, candidates, alternative, faster if faster is not chosen else None)


def _best(accepted: Sequence[Candidate], prefer: str) -> Candidate:
    """What can be loaded before what can only be planned; then what stays within the stored size, unless speed is
    preferred; then priority, then name."""

    def order(item: Candidate) -> tuple[bool, bool, int, str]:
        grows = prefer == "memory" and item.capability.resident > 1.0
        return not item.capability.impl, grows, -item.capability.priority, item.capability.name

    return min(accepted, key=order)
