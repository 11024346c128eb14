"""From canonical weights to running layers of the backend under test, and back to NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from omniplat.canonical import Array, CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance.cases import SILU, Gating, moe_spec
from omniplat.conformance.expected import Routing
from omniplat.conformance.subject import Subject
from omniplat.conformance.tolerances import Float64
from omniplat.layer import LayerSpec
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Workspaces
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.tensors import DTYPES, to_torch


def linear_layer(subject: Subject, capability: Capability, weight: CanonicalWeight, dtype: str) -> QuantLinear:
    """The layer that the load path would build of a canonical weight."""
    kernel = subject.kernel(capability)
    assert isinstance(kernel, LinearKernel), f"{capability.impl} is no LinearKernel"
    rows, columns = weight.out_features, weight.in_features
    bias = "bias" in weight.tensors
    spec = LayerSpec("conformance.linear", "linear", rows, columns, weight.scheme, dtype, bias, (rows,))
    tensors = to_torch(_owned(weight), device=subject.torch_device)
    layer = QuantLinear(spec, kernel, kernel.prepare(tensors, spec), tensors.tensors.get("bias"))
    return _with_workspace(layer, subject)


def expert_layer(
    subject: Subject,
    capability: Capability,
    w13: CanonicalWeight,
    w2: CanonicalWeight,
    dtype: str,
    gating: Gating = SILU,
) -> QuantExperts:
    """A layer of experts from stacked canonical weights."""
    kernel = subject.kernel(capability)
    assert isinstance(kernel, MoeKernel), f"{capability.impl} is no MoeKernel"
    count, inner = w13.tensors["codes"].shape[0], w2.in_features
    other = w2.scheme if w2.scheme != w13.scheme else None
    moe = replace(moe_spec(count, inner, gating), w2_scheme=other)
    bias = "bias" in w13.tensors
    rows = w2.out_features
    spec = LayerSpec("conformance.experts", "moe", rows, rows, w13.scheme, dtype, bias, (inner, inner), moe)
    device = subject.torch_device
    first, second = (to_torch(_owned(weight), experts=count, device=device) for weight in (w13, w2))
    return _with_workspace(QuantExperts(spec, kernel, kernel.prepare(first, second, spec)), subject)


L = TypeVar("L", QuantLinear, QuantExperts)


def _with_workspace(layer: L, subject: Subject) -> L:
    """The layer with scratch memory that nobody else uses, where its kernel asks for some."""
    needed = layer.kernel.workspace_bytes(layer.config)
    layer.workspace = Workspaces().get(subject.torch_device, 0, needed)
    return layer


def _owned(weight: CanonicalWeight) -> CanonicalWeight:
    """A copy: a kernel may keep the tensors that it is given."""
    return replace(weight, tensors={role: np.array(array) for role, array in weight.tensors.items()})


def to_input(x: Array, dtype: str, subject: Subject) -> torch.Tensor:
    """f32 numbers of the dtype as a tensor of it, on the device."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(DTYPES[dtype]).to(subject.torch_device)


def to_output(y: torch.Tensor) -> Float64:
    """float64, on the host."""
    return np.asarray(y.detach().to("cpu").to(torch.float64).numpy(), dtype=np.float64)


def run_linear(layer: QuantLinear, x: Array, dtype: str, subject: Subject) -> Float64:
    """The layer's output for `x`, checked for shape and dtype."""
    given = to_input(x, dtype, subject)
    y = layer(given)
    assert_output(y, (*given.shape[:-1], layer.spec.out_features), given.dtype)
    return to_output(y)


def routing_tensors(routing: Routing, subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    device = subject.torch_device
    ids = torch.from_numpy(np.ascontiguousarray(routing.ids)).to(device)
    return ids, torch.from_numpy(np.ascontiguousarray(routing.weights)).to(device)


def run_experts(
    layer: QuantExperts, x: Array, routing: Routing, dtype: str, subject: Subject, expert_map: Any = None
) -> Float64:
    """As `run_linear`; `expert_map` is an int32 array or None."""
    given = to_input(x, dtype, subject)
    ids, weights = routing_tensors(routing, subject)
    where = torch.from_numpy(expert_map).to(subject.torch_device) if expert_map is not None else None
    y = layer(given, ids, weights, where)
    assert_output(y, tuple(given.shape), given.dtype)
    return to_output(y)


def assert_output(y: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What every output looks like: the right shape and dtype, contiguous."""
    assert tuple(y.shape) == shape, f"the output is {list(y.shape)}, expected {list(shape)}"
    assert y.dtype == dtype, f"the output is {y.dtype}, expected {dtype}"
    assert y.is_contiguous(), "the output is not contiguous"


def make_routing(rows: int, experts: int, top: int, rng: np.random.Generator) -> Routing:
    """Every row chooses `top` different experts; the first rows choose the first and the last one."""
    order = rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)[:, :top].astype(np.int32)
    weights = rng.uniform(0.1, 1.0, (rows, top)).astype(np.float32)
    return Routing(np.ascontiguousarray(order), weights)
