"""Layers that compute in float64 what a quantized layer means: a dequantized weight, and inputs as the oracle leaves
them. They share no kernel with what they are compared to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from omniplat import oracle
from omniplat.canonical import Array
from omniplat.online import Method
from omniplat.scheme import TensorQuant

#: From a rounding error to the one that is used in its place.
Errors = Callable[[Array], Array]


class StandIn(nn.Module):
    """y = Q(x * pre_scale) W^T + b, in float64 and returned in x's dtype.

    `weight` is [N, K]; `inputs` are the static quantities of `oracle.quantize_activation`. `errors` changes what
    quantization does to inputs: the input plus `errors(Q(x) - x)` is used.
    """

    def __init__(
        self,
        weight: Array,
        activation: TensorQuant | None,
        bias: torch.Tensor | None = None,
        inputs: Mapping[str, Array] | None = None,
        pre_scale: Array | None = None,
        errors: Errors | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.from_numpy(np.asarray(weight, np.float64))
        self.bias = bias.detach().double() if bias is not None else None
        self.activation = activation
        self.inputs = dict(inputs or {})
        self.pre_scale = pre_scale
        self.errors = errors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.detach().double().numpy()
        if self.pre_scale is not None:
            values = values * self.pre_scale
        if self.activation is not None:
            rounded = oracle.quantize_activation(values, self.activation, **self.inputs)
            values = rounded if self.errors is None else values + self.errors(rounded - values)
        return nn.functional.linear(torch.from_numpy(values), self.weight, self.bias).to(x.dtype)


def online(linear: nn.Linear, method: Method, name: str = "", errors: Errors | None = None) -> StandIn:
    """What `linear` means once `method` has quantized it. `errors` is put in place of the weight's errors as well."""
    weight = linear.weight.detach().float().numpy()
    rounded = dequantized(weight, method)
    used = rounded if errors is None else weight + errors(rounded - weight)
    inputs = {"input_scale": np.float32(method.input_scales[name])} if name in method.input_scales else {}
    return StandIn(used, method.activation, linear.bias, inputs, errors=errors)


class StandInExperts(nn.Module):
    """All experts of a layer, each of three stand-ins, called as transformers calls them.

    `activation` is how the layer's input is quantized where all of its rows are quantized together.
    """

    def __init__(self, layers: Mapping[tuple[int, str], StandIn], activation: TensorQuant | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.activation = activation

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        y = torch.zeros_like(hidden_states)
        if self.activation is not None:
            hidden_states = torch.from_numpy(oracle.quantize_activation(hidden_states.numpy(), self.activation))
        for expert in top_k_index.unique().tolist():
            rows, slots = torch.nonzero(top_k_index == expert, as_tuple=True)
            x = hidden_states[rows]
            gate, up = (self.layers[expert, leaf](x) for leaf in ("gate_proj", "up_proj"))
            out = self.layers[expert, "down_proj"](nn.functional.silu(gate) * up)
            y.index_add_(0, rows, (out * top_k_weights[rows, slots, None]).to(y.dtype))
        return y


def online_experts(experts: nn.Module, method: Method) -> StandInExperts:
    """What stacked experts mean once `method` has quantized them: gate and up of an expert are one weight."""
    layers: dict[tuple[int, str], StandIn] = {}
    gate_up, down = (getattr(experts, name).detach().float().numpy() for name in ("gate_up_proj", "down_proj"))
    for expert in range(len(down)):
        gate, up = np.split(dequantized(gate_up[expert], method), 2)
        layers |= {(expert, "gate_proj"): StandIn(gate, None), (expert, "up_proj"): StandIn(up, None)}
        layers[expert, "down_proj"] = StandIn(dequantized(down[expert], method), method.activation)
    return StandInExperts(layers, method.activation)


def of_noise(linears: Mapping[str, nn.Linear], method: Method, seed: int) -> dict[str, StandIn]:
    """Stand-ins in which every rounding error, of weights and inputs, has a random sign: noise of the same sizes in the
    same places, which has nothing to do with the values."""
    random = np.random.default_rng(seed)

    def shuffled(errors: Array) -> Array:
        return errors * random.choice((-1.0, 1.0), size=errors.shape)

    return {name: online(layer, method, name, shuffled) for name, layer in linears.items()}


def dequantized(weight: Array, method: Method) -> Array:
    """The weight's values after rounding to nearest by the oracle, or by bitsandbytes itself: float64 [N, K]."""
    if method.name != "bitsandbytes":
        return oracle.dequantize(oracle.quantize_weight(weight, method.weight))
    from bitsandbytes import functional

    kind = "nf4" if method.weight.element == "nf4" else "fp4"
    packed, state = functional.quantize_4bit(
        torch.from_numpy(weight), blocksize=64, compress_statistics=method.compress_statistics, quant_type=kind
    )
    values: Array = functional.dequantize_4bit(packed, state).double().numpy()
    return values


def put_in_place(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Replace modules of `model` by name."""
    for name, layer in layers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)
