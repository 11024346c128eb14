"""What `omniplat run` measures of a mixture-of-experts layer as a whole: router, routed experts and shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omniplat.canonical import Array
from omniplat.layer import MoeSpec
from omniplat.moe_block import MoeBlock
from omniplat.oracle.moe import route
from omniplat.packed import Part
from omniplat.planner import Planned, PlannedLayer
from omniplat.reading import TensorReader
from omniplat.runtime.activate import activate
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.moe import QuantMoE, load_moe
from omniplat.runtime.tensors import DTYPES, to_array, to_tensor
from omniplat.tools.fidelity import (
    Distance,
    LayerFidelity,
    Originals,
    expected_experts,
    input_dtype,
    inputs,
    measure,
    median_seconds,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class MoeFidelity:
    """One layer with its router. `output` is None without an original; `shared` names what the shared expert packs."""

    name: str
    router: str
    top_k: int
    shared: tuple[str, ...]
    rows: int
    seconds: float
    finite: bool
    output: Distance | None = None


class _WithFloats:
    """Originals; for what the checkpoint has not quantized and they lack, the checkpoint itself."""

    def __init__(self, originals: Originals, parts: Mapping[str, Part], reader: TensorReader) -> None:
        self._originals = originals
        self._parts = parts
        self._reader = reader

    def weight(self, module: str) -> Array | None:
        found = self._originals.weight(module)
        part = self._parts.get(module)
        if found is None and part is not None and part.module.status == "unquantized":
            return self._reader.read(part.module.tensors["codes"])
        return found


def measure_moe(
    planned: Planned,
    item: PlannedLayer,
    experts: QuantExperts,
    reader: TensorReader,
    originals: Originals | None = None,
    *,
    rows: int = 32,
    seed: int = 0,
    repeats: int = 3,
) -> tuple[LayerFidelity, MoeFidelity | None]:
    """The routed experts, which were loaded for `item`, and the layer around them.

    The checkpoint's own router chooses for both. Where there is none, or nothing says how it chooses, experts are
    chosen at random and there is no figure of the whole. Raises InvalidCheckpointError as `measure` does.
    """
    whole = load_moe(planned, item, reader, experts=experts)
    router = whole.route if whole.routes else None
    dtype = input_dtype(item)
    alone = measure(
        experts, item.packed, reader, originals, rows=rows, seed=seed, repeats=repeats, router=router, dtype=dtype
    )
    block = item.packed.block
    if block is None or router is None:
        return alone, None
    x = inputs(item.packed, rows, seed)
    with torch.inference_mode():
        found = whole(x.to(dtype)).to(torch.float64)
        timed = x.to(DTYPES.get(item.packed.spec.dtype, torch.bfloat16))
        seconds = median_seconds(whole, timed, (), repeats)
    output = None
    if originals is not None:
        expected = _expected(planned, item, block, whole, originals, reader, x)
        if expected is not None:
            output = Distance(float((found - expected).square().sum()), float(expected.square().sum()))
    return alone, MoeFidelity(
        block.name,
        block.router,
        whole.moe.top_k,
        block.shared,
        rows,
        seconds,
        bool(torch.isfinite(found).all()),
        output,
    )


def _expected(
    planned: Planned,
    item: PlannedLayer,
    block: MoeBlock,
    whole: QuantMoE,
    originals: Originals,
    reader: TensorReader,
    x: torch.Tensor,
) -> torch.Tensor | None:
    """What the original computes, float64; None where it lacks a part that is quantized. Biases and the correction of
    scores are those of the checkpoint: they are not quantized."""
    parts = {
        part.module.name: part
        for other in planned.layers
        if other.layer.component == item.layer.component
        for part in other.packed.parts
    }
    originals = _WithFloats(originals, parts, reader)
    names = [module.name for module in item.packed.modules]
    if any(originals.weight(name) is None for name in (*names, block.router, *block.shared)):
        return None
    rows = x.to(torch.float64)
    assert whole.router is not None
    logits = rows @ rows_of([parts[block.router]], originals).t()
    if whole.router.bias is not None:
        logits = logits + whole.router.bias.to(torch.float64)
    bias = whole.correction_bias
    ids, weights = route(
        to_array(logits),
        whole.moe.top_k,
        whole.moe.routing,
        to_array(bias.to(torch.float32)) if bias is not None else None,
    )
    y = expected_experts(whole.experts, item.packed, originals, x, to_tensor(ids), to_tensor(weights))
    if not block.shared_down:
        return y
    up, down = [parts[name] for name in block.shared_up], [parts[block.shared_down]]
    beside = _gated(rows, up, down, originals, whole)
    if block.shared_gate:
        beside = beside * torch.sigmoid(rows @ rows_of([parts[block.shared_gate]], originals).t())
    return y + beside


def _gated(x: torch.Tensor, up: list[Part], down: list[Part], originals: Originals, whole: QuantMoE) -> torch.Tensor:
    moe: MoeSpec = whole.moe
    gate, other = (x @ rows_of(up, originals).t()).chunk(2, dim=1)
    y = activate(gate, other, moe.activation, moe.limit, moe.alpha) @ rows_of(down, originals).t()
    layer = whole.shared.down if whole.shared is not None else None
    if isinstance(layer, QuantLinear) and layer.bias is not None:
        y = y + layer.bias.to(torch.float64)
    return y
