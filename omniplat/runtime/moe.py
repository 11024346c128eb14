"""A mixture-of-experts layer whole: router, routed experts, shared expert, as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from omniplat.errors import BackendUnavailableError, InvalidCheckpointError, UsageError
from omniplat.layer import MoeSpec
from omniplat.planner import Planned, PlannedLayer
from omniplat.reading import TensorReader
from omniplat.runtime.activate import activate
from omniplat.runtime.kernel import LinearKernel, MoeKernel, load_kernel
from omniplat.runtime.layers import CompositeLinear, KeepsDtypes, QuantExperts, QuantLinear
from omniplat.runtime.load import load_layer
from omniplat.runtime.plain import PlainLinear
from omniplat.runtime.routing import route
from omniplat.runtime.slicer import WHOLE, Rank, expert_range
from omniplat.runtime.tensors import to_tensor


class GatedMlp(nn.Module):
    """A shared expert: two linear layers, each with its own scheme. The activation is taken in float32."""

    def __init__(self, up: QuantLinear | CompositeLinear, down: QuantLinear, moe: MoeSpec) -> None:
        super().__init__()
        self.up = up
        self.down = down
        self._moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).to(torch.float32).chunk(2, dim=-1)
        moe = self._moe
        hidden: torch.Tensor = self.down(activate(gate, up, moe.activation, moe.limit, moe.alpha).to(x.dtype))
        return hidden


class QuantMoE(KeepsDtypes):
    """A mixture-of-experts layer. What it returns is this rank's part: parts of all ranks are to be added up.

    `moe` counts all experts. Without a router, or with a routing that is not known, `forward` needs `topk_ids` and
    `topk_weights`. `expert_map` [all experts] gives the index of an expert among those that `experts` holds.
    """

    correction_bias: torch.Tensor | None
    expert_map: torch.Tensor | None

    def __init__(
        self,
        name: str,
        moe: MoeSpec,
        experts: QuantExperts,
        router: QuantLinear | None = None,
        *,
        correction_bias: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        shared: GatedMlp | None = None,
        shared_gate: QuantLinear | None = None,
    ) -> None:
        """Raises InvalidCheckpointError where router, correction or map are for another number of experts."""
        super().__init__()
        for what, tensor in (("the correction of its scores", correction_bias), ("its expert map", expert_map)):
            if tensor is not None and tensor.numel() != moe.experts:
                raise InvalidCheckpointError(f"{what} is for {tensor.numel()} experts, not {moe.experts}", key=name)
        if router is not None and router.spec.out_features != moe.experts:
            raise InvalidCheckpointError(
                f"its router chooses among {router.spec.out_features} experts, the layer has {moe.experts}", key=name
            )
        self.name = name
        self.moe = moe
        self.experts = experts
        self.router = router
        self.shared = shared
        self.shared_gate = shared_gate
        self.register_buffer("correction_bias", correction_bias)
        self.register_buffer("expert_map", expert_map)

    @property
    def routes(self) -> bool:
        """True where the layer can choose experts itself."""
        return self.router is not None and bool(self.moe.routing.scoring) and self.moe.top_k > 0

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`topk_ids` and `topk_weights` of the rows `x` [M, K]; logits and scores are float32.

        Raises UsageError where the checkpoint does not tell how.
        """
        if self.router is None or not self.routes:
            raise UsageError(f"{self.name}: nothing says how experts are chosen; bring topk_ids and topk_weights")
        return route(self.router(x.to(torch.float32)), self.moe.top_k, self.moe.routing, self.correction_bias)

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [..., K] to [..., K]; `topk_ids` and `topk_weights` [rows, T] where an engine routes."""
        rows = x.reshape(-1, x.shape[-1])
        if topk_ids is None or topk_weights is None:
            topk_ids, topk_weights = self.route(rows)
        y: torch.Tensor = self.experts(rows, topk_ids, topk_weights, self.expert_map)
        if self.shared is not None:
            beside = self.shared(rows)
            if self.shared_gate is not None:
                beside = beside * self.shared_gate(rows.to(torch.float32)).sigmoid().to(x.dtype)
            y = y + beside
        return y.reshape(x.shape)


def load_moe(
    planned: Planned,
    item: PlannedLayer,
    reader: TensorReader,
    *,
    rank: Rank = WHOLE,
    device: torch.device | None = None,
    experts: QuantExperts | None = None,
) -> QuantMoE:
    """Load what `rank` holds of the layer around the routed experts `item`; `experts` are taken where given.

    Router and gate are on every rank. The shared expert is shared by the tensor-parallel ranks, and of
    expert-parallel ones only the first has it. Raises InvalidCheckpointError; UsageError for an `item` without
    experts, and where ranks cannot share the layer like this.
    """
    packed, block = item.packed, item.packed.block
    moe = packed.spec.moe
    if moe is None or block is None:
        raise UsageError(f"{packed.spec.name} is no layer of experts")
    loader = _Loader(planned, packed.spec.component, reader, rank, device)
    if experts is None:
        kernel = load_kernel(_impl(item))
        if not isinstance(kernel, MoeKernel):
            raise UsageError(f"{kernel.name} is no kernel for experts")
        loaded = load_layer(packed, kernel, reader, rank=rank, device=device)
        assert isinstance(loaded, QuantExperts)
        experts = loaded
    router = loader.linear(block.router) if block.router else None
    shared = gate = None
    if block.shared_down and rank.ep_rank == 0:
        up = loader.up(block.shared_up)
        shared = GatedMlp(up, loader.linear(block.shared_down), moe)
        gate = loader.linear(block.shared_gate) if block.shared_gate else None
    bias = block.correction_bias
    correction = to_tensor(np.array(reader.read(bias)).reshape(-1)).to(device) if bias is not None else None
    mapping = expert_map_of(moe.experts, rank, device) if rank.ep_size > 1 else None
    return QuantMoE(
        block.name,
        moe,
        experts,
        router,
        correction_bias=correction,
        expert_map=mapping,
        shared=shared,
        shared_gate=gate,
    )


def load_moe_layers(
    planned: Planned, reader: TensorReader, *, component: str = "", rank: Rank = WHOLE
) -> Iterator[tuple[str, QuantMoE]]:
    """All layers with quantized experts of a component, one by one: (name, layer)."""
    for item in planned.layers:
        if item.layer.op == "moe" and item.layer.status == "ok" and item.layer.component == component:
            layer = load_moe(planned, item, reader, rank=rank)
            yield layer.name, layer


def expert_map_of(experts: int, rank: Rank, device: torch.device | None) -> torch.Tensor:
    """int32 [experts]: the index among the rank's own experts, -1 for those of others."""
    held = expert_range(experts, rank)
    mapping = torch.full((experts,), -1, dtype=torch.int32)
    mapping[held.start : held.stop] = torch.arange(len(held), dtype=torch.int32)
    return mapping.to(device)


class _Loader:
    """Loads the linear layers beside the experts: quantized ones by their kernel, others by torch's own."""

    def __init__(
        self, planned: Planned, component: str, reader: TensorReader, rank: Rank, device: torch.device | None
    ) -> None:
        self._owners = {
            module.name: item
            for item in planned.layers
            if item.layer.component == component and item.layer.op == "linear"
            for module in item.packed.modules
        }
        self._reader = reader
        self._rank = rank
        self._device = device

    def up(self, modules: tuple[str, ...]) -> QuantLinear | CompositeLinear:
        """Gate and up: one layer, or two where their schemes differ."""
        owners = {self._owner(name).layer.name: name for name in modules}
        parts = [self.linear(name) for name in owners.values()]
        if len(parts) == 1:
            return parts[0]
        return CompositeLinear({str(index): part for index, part in enumerate(parts)})

    def linear(self, module: str) -> QuantLinear:
        item = self._owner(module)
        kernel = PlainLinear() if item.layer.status == "unquantized" else load_kernel(_impl(item))
        if not isinstance(kernel, LinearKernel):
            raise UsageError(f"{kernel.name} is no kernel for linear layers")
        layer = load_layer(item.packed, kernel, self._reader, rank=self._rank, device=self._device)
        assert isinstance(layer, QuantLinear)
        return layer

    def _owner(self, module: str) -> PlannedLayer:
        item = self._owners.get(module)
        if item is None:
            raise InvalidCheckpointError("is part of no linear layer of the plan", key=module)
        return item


def _impl(item: PlannedLayer) -> str:
    if item.capability is None or not item.capability.impl:
        raise BackendUnavailableError(item.layer.backend or "no backend", f"no kernel runs {item.layer.name} here")
    return item.capability.impl
