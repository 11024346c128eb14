"""Mixture of experts in float64: how logits choose experts, and what the chosen ones compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import erf, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array, CanonicalWeight
from omniplat.errors import UsageError
from omniplat.layer import MoeSpec, Routing
from omniplat.oracle.codecs import Float64
from omniplat.oracle.linear import linear
from omniplat.oracle.quantize import quantize_activation

Ids = NDArray[np.int64]

#: Roles through which an expert sees the layer's input in a way of its own.
INPUT_ROLES = ("pre_scale", "input_scale", "input_zero_point", "input_global_scale")


def route(logits: Array, top_k: int, routing: Routing, correction_bias: Array | None = None) -> tuple[Ids, Float64]:
    """The experts that each row of `logits` [..., E] chooses, best first, and their weights: [..., top_k] both.

    Of equal scores the lower id is the better one. Raises UsageError for a scoring that is not known, and for more
    experts than may be chosen.
    """
    scores = _scores(np.asarray(logits, np.float64), routing.scoring)
    experts = scores.shape[-1]
    choice = scores if correction_bias is None else scores + np.asarray(correction_bias, np.float64).reshape(experts)
    if routing.groups > 1:
        choice = _best_groups(choice, routing)
    if top_k * routing.groups > experts * routing.topk_groups or top_k < 1:
        raise UsageError(
            f"cannot choose {top_k} of {experts} experts in {routing.topk_groups} of {routing.groups} groups"
        )
    ids: Ids = np.argsort(-choice, axis=-1, kind="stable")[..., :top_k]
    weights: Float64 = np.take_along_axis(scores, ids, axis=-1)
    if routing.renormalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    return ids, weights * routing.scale


def _scores(logits: Float64, scoring: str) -> Float64:
    if scoring == "softmax":
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        softmax: Float64 = powers / powers.sum(-1, keepdims=True)
        return softmax
    if scoring == "sigmoid":
        sigmoid: Float64 = _sigmoid(logits)
        return sigmoid
    raise UsageError(f"scoring {scoring!r} is none of softmax, sigmoid")


def _best_groups(choice: Float64, routing: Routing) -> Float64:
    """`choice` with -inf for the experts of all groups but the best ones."""
    experts = choice.shape[-1]
    if experts % routing.groups:
        raise UsageError(f"{experts} experts do not form {routing.groups} groups")
    grouped = choice.reshape(*choice.shape[:-1], routing.groups, experts // routing.groups)
    worth = -np.sort(-grouped, axis=-1)[..., : 2 if routing.group_score == "top2" else 1].sum(-1)
    best = np.argsort(-worth, axis=-1, kind="stable")[..., : routing.topk_groups]
    kept = np.zeros(worth.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=-1)
    masked: Float64 = np.where(kept[..., None], grouped, -np.inf).reshape(choice.shape)
    return masked


def activate(gate: Float64, up: Float64, moe: MoeSpec) -> Float64:
    """What w2 sees of gate and up. Raises UsageError for an activation that is not known."""
    if moe.limit:
        gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
    if moe.activation == "swiglu-oai":
        return gate * _sigmoid(moe.alpha * gate) * (up + 1.0)
    return _activated(gate, moe.activation) * up


def _activated(gate: Float64, name: str) -> Float64:
    if name == "silu":
        return gate * _sigmoid(gate)
    if name == "gelu":
        halves = np.frompyfunc(lambda value: 0.5 * (1.0 + erf(value / sqrt(2.0))), 1, 1)
        gelu: Float64 = gate * halves(gate).astype(np.float64)
        return gelu
    if name == "gelu_tanh":
        inner = sqrt(2.0 / pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1.0 + np.tanh(inner))
    if name == "relu2":
        return np.square(np.maximum(gate, 0.0))
    raise UsageError(f"activation {name!r} is not known")


def _sigmoid(values: Float64) -> Float64:
    # Through tanh nothing overflows.
    return 0.5 * (1.0 + np.tanh(0.5 * values))


def expert_of(weight: CanonicalWeight, expert: int) -> CanonicalWeight:
    """One expert of a stacked weight."""
    return replace(weight, tensors={role: array[expert] for role, array in weight.tensors.items()})


def gated(
    x: Array,
    w13: CanonicalWeight,
    w2: CanonicalWeight,
    moe: MoeSpec,
    *,
    quantize: bool = True,
    middle: Callable[[Float64], Float64] | None = None,
) -> Float64:
    """A gated MLP, of an expert or of a shared one: [M, K] to [M, N]. Gate rows come first in `w13` [2I, K].

    `quantize` False leaves x as it is, for a caller who has quantized it; w2's input is quantized in either case, after
    `middle`, which rounds it to what a kernel keeps of it.
    """
    hidden = linear(x, w13, activation=quantize)
    gate, up = np.split(hidden, 2, axis=-1)
    activated = activate(gate, up, moe)
    return linear(activated if middle is None else middle(activated), w2)


def experts(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    w13: CanonicalWeight,
    w2: CanonicalWeight,
    moe: MoeSpec,
    *,
    expert_map: Array | None = None,
    middle: Callable[[Float64], Float64] | None = None,
) -> Float64:
    """`x` [M, K] through its experts: float64 [M, K]. `w13` [E, 2I, K] and `w2` [E, K, I] are stacked.

    The layer's input is quantized once, all rows together, where no expert has a static scale or a smoothing vector
    of its own. w2's input is quantized expert by expert. `expert_map` [all experts] gives the index of an expert in
    the stacks; an expert that it maps to -1 contributes nothing, and so does the id -1. `middle` as in `gated`. Raises
    UsageError for an id out of range.
    """
    values, ids = np.asarray(x, np.float64), np.asarray(topk_ids).astype(np.int64)
    held = w13.tensors["codes"].shape[0]
    known = held if expert_map is None else len(expert_map)
    if ids.size and (ids.min() < -1 or ids.max() >= known):
        raise UsageError(f"topk_ids holds ids outside -1..{known - 1}")
    if expert_map is not None:
        ids = np.where(ids < 0, -1, np.asarray(expert_map)[np.maximum(ids, 0)])
    y = np.zeros((len(values), w2.out_features))
    once = w13.scheme.activation is not None and not any(role in w13.tensors for role in INPUT_ROLES)
    if once and len(values):
        assert w13.scheme.activation is not None
        values = quantize_activation(values, w13.scheme.activation)
    for expert in range(held):
        rows, slots = np.nonzero(ids == expert)
        if len(rows):
            first, second = expert_of(w13, expert), expert_of(w2, expert)
            out = gated(values[rows], first, second, moe, quantize=not once, middle=middle)
            np.add.at(y, rows, np.asarray(topk_weights, np.float64)[rows, slots, None] * out)
    return y
