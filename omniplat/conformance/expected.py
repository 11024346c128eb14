"""What the oracle says a layer computes, and how far from it rounding alone may lead. float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omniplat import oracle
from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance.cases import SILU, Gating, moe_spec
from omniplat.conformance.inputs import as_dtype
from omniplat.conformance.tolerances import UNITS, Float64, accumulation, operand_unit, rounding
from omniplat.layer import MoeSpec
from omniplat.oracle import moe as oracle_moe
from omniplat.oracle.dequantize import residual
from omniplat.scheme import Scheme, TensorQuant, low_rank_base, parse_activation_id

_STATIC = ("input_scale", "input_zero_point", "input_global_scale")


@dataclass(frozen=True, slots=True)
class Expected:
    """Outputs [M, N]: with the executed activation, without it, and the error that the bound tier allows."""

    y: Float64
    unquantized: Float64
    allowed: Float64


def executed_activation(capability: Capability, scheme: Scheme) -> TensorQuant | None:
    """How the capability's kernel quantizes the input of a layer of the scheme: by the rules of the checkpoint, or by
    its own where the checkpoint says none or one that the kernel does not follow."""
    quant = scheme.activation
    if capability.executes not in ("", scheme.activation_id):
        quant = parse_activation_id(capability.executes)
    if quant is None:
        return None
    rule = _followed(quant.scale_rule, capability.scale_rules)
    rounding = _followed(quant.rounding, capability.roundings)
    return replace(
        quant,
        element=capability.input_element or quant.element,
        scale_rule=rule,
        rounding=rounding,
        scale_format=capability.scale_format or quant.scale_format,
    )


def _followed(declared: str, own: tuple[str, ...]) -> str:
    return declared if not own or declared in own else own[0]


def reencoding_loss(weight: CanonicalWeight, capability: Capability) -> Float64 | float:
    """Per weight [N, K], what a re-encoding to FP8 with one scale per row may lose: its subnormals' half spacing.

    Groups at the top of their row keep their codes; the others move towards e4m3's subnormals.
    """
    quant = weight.scheme.weight
    if not capability.via.startswith("fp8") or quant.scale_format != "e8m0" or quant.granularity != "group":
        return 0.0
    exponents = weight.tensors["scale"].astype(np.int64) - 127
    top = exponents.max(axis=-1, keepdims=True)
    half = np.where(exponents < top, np.exp2(top - 10.0), 0.0)
    return np.repeat(half, quant.group_size, axis=-1)[..., : weight.in_features]


def linear(x: Array, weight: CanonicalWeight, capability: Capability, dtype: str) -> Expected:
    """A linear layer on `x` [M, K], f32 numbers of the dtype."""
    executed = executed_activation(capability, weight.scheme)
    if executed is not None and executed.element == "int8_bnb":
        executed = None
    used = replace(weight, scheme=weight.scheme.with_activation(executed))
    y = oracle.linear(x, used)
    unquantized = oracle.linear(x, used, activation=False)
    values = np.asarray(x, np.float64)
    if "pre_scale" in weight.tensors:
        values = values * weight.tensors["pre_scale"].astype(np.float64)
    if executed is not None:
        static = {role: weight.tensors[role] for role in _STATIC if role in weight.tensors}
        values = oracle.quantize_activation(values, executed, **static)
    base = low_rank_base(weight.scheme.weight)
    plain = residual(weight) if base is not None else weight
    dense = oracle.dequantize(plain)
    total = np.abs(values) @ np.abs(dense).T
    beside: Float64 | float = 0.0
    if base is not None:
        down, up = (np.abs(weight.tensors[role].astype(np.float64)) for role in ("low_rank_down", "low_rank_up"))
        beside = (np.abs(np.asarray(x, np.float64)) @ down) @ up.T
    if "bias" in weight.tensors:
        beside = beside + np.abs(weight.tensors["bias"].astype(np.float64))
    factor = accumulation(capability.accumulator, weight.in_features, base or weight.scheme.weight, executed)
    allowed = factor * (total + beside) + operand_unit(dense, dtype, executed) * total
    if base is not None:
        # The pair's two products are in the layer's dtype: the middle and both factors are rounded to it.
        allowed = allowed + 3 * operand_unit(np.full((1, 1), 0.1), dtype, None) * beside
    allowed = allowed + np.abs(values) @ np.broadcast_to(reencoding_loss(weight, capability), dense.shape).T
    if capability.rounds_before_bias and "bias" in weight.tensors:
        product = np.abs(y - weight.tensors["bias"].astype(np.float64))
        allowed = allowed + rounding(product + allowed, dtype)
    return Expected(y, unquantized, allowed + rounding(np.abs(y) + allowed, dtype))


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each row chose (-1: none), and with what weights."""

    ids: Array
    weights: Array


def experts(
    x: Array,
    w13: CanonicalWeight,
    w2: CanonicalWeight,
    routing: Routing,
    capability: Capability,
    dtype: str,
    gating: Gating = SILU,
    *,
    rounds_middle: bool = False,
) -> Expected:
    """A layer of experts, row by row of `x` [M, K]. `allowed` is infinite where activations are quantized.

    `rounds_middle`: what lies between the two products is rounded to the dtype before it is quantized, as many kernels
    do. Either is right, and where a row's middle is dominated by few values they differ by as much as the quantization.

    Two quantizations follow each other there: a value that is rounded to the next code in between moves the output by
    more than any rounding error, which the noise tier judges.
    """
    executed = executed_activation(capability, w13.scheme)
    moe = moe_spec(w13.tensors["codes"].shape[0], w2.in_features, gating)

    def as_middle(values: Float64) -> Float64:
        return as_dtype(values, dtype).astype(np.float64)

    middle = as_middle if rounds_middle and executed is not None else None

    def run(activation: TensorQuant | None) -> Float64:
        first, second = (replace(w, scheme=w.scheme.with_activation(activation)) for w in (w13, w2))
        return oracle_moe.experts(x, routing.ids, routing.weights, first, second, moe, middle=middle)

    y, unquantized = run(executed), run(None)
    if executed is not None:
        return Expected(y, unquantized, np.full(y.shape, np.inf))
    allowed = np.zeros(y.shape)
    for expert in np.unique(routing.ids[routing.ids >= 0]):
        at, slots = np.nonzero(routing.ids == expert)
        first, second = (oracle_moe.expert_of(weight, int(expert)) for weight in (w13, w2))
        share = np.abs(routing.weights[at, slots].astype(np.float64))[:, None]
        own = share * _mlp_allowed(x[at], first, second, capability, dtype, moe)
        np.add.at(allowed, at, own)
    # The weighted sum over the chosen experts is a handful of additions more.
    allowed = allowed + np.abs(y) * 8 * UNITS["f32"]
    return Expected(y, unquantized, allowed + rounding(np.abs(y) + allowed, dtype))


#: The steepest that silu, both forms of gelu and gpt-oss' gate get: gelu at the square root of 2.
_STEEPEST = 1.13


def _gated(gate: Float64, up: Float64, gate_error: Float64, up_error: Float64, moe: MoeSpec) -> tuple[Float64, Float64]:
    """What lies between the two products, and how far off it may be where gate and up are off by their errors.

    Clamping moves nothing further apart. The evaluation of an activation itself takes a few roundings of its argument.
    """
    hidden = oracle_moe.activate(gate, up, moe)
    if moe.limit:
        gate, up = np.minimum(gate, moe.limit), np.clip(up, -moe.limit, moe.limit)
    squares, shifts = moe.activation == "relu2", moe.activation == "swiglu-oai"
    factor = np.abs(up + 1.0 if shifts else up)
    alone = np.abs(oracle_moe.activate(gate, np.full_like(up, 0.0 if shifts else 1.0), replace(moe, limit=0.0)))
    steepness = 2 * (np.abs(gate) + gate_error) if squares else _STEEPEST
    evaluation = (np.square(gate) if squares else np.abs(gate)) * (np.abs(up) + shifts) * 2.0**-20
    return hidden, steepness * gate_error * (factor + up_error) + alone * up_error + evaluation


def _mlp_allowed(
    x: Array, w13: CanonicalWeight, w2: CanonicalWeight, capability: Capability, dtype: str, moe: MoeSpec
) -> Float64:
    """Error propagated through gate, up, their product and the second linear; the middle is rounded to the dtype."""
    plain = replace(capability, executes="a16")
    first = linear(x, w13, plain, dtype)
    inner = w13.out_features // 2
    gate, up = first.y[:, :inner], first.y[:, inner:]
    hidden, error = _gated(gate, up, first.allowed[:, :inner], first.allowed[:, inner:], moe)
    error = error + rounding(np.abs(hidden) + error, dtype)
    second = linear(hidden, w2, plain, dtype)
    return np.asarray(second.allowed + error @ np.abs(oracle.dequantize(w2)).T, np.float64)


def rounded(values: Array, dtype: str) -> Float64:
    """`values` as an output of the dtype."""
    return as_dtype(values, dtype).astype(np.float64)
