"""Layers of vLLM while their checkpoint modules arrive: what the weight loaders of `vllm.py` fill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from omniplat.engines import REORDERED
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.integrations.vllm_collect import ModuleTensors, leaf_of
from omniplat.integrations.vllm_names import EngineLayers, EnginePart, own_layers
from omniplat.integrations.vllm_plan import plan_for_rank
from omniplat.legality import rank_spec
from omniplat.packed import PackedLayer, Split
from omniplat.planner import PlannedLayer
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Workspaces, load_kernel
from omniplat.runtime.layers import CompositeLinear, QuantLinear
from omniplat.runtime.load import LinearLoader, MoeLoader, Slot
from omniplat.runtime.plain import PlainLinear
from omniplat.runtime.slicer import Rank

#: The submodule of vLLM's layer that runs it.
MEMBER = "omniplat"
#: vLLM runs shared experts on a stream of their own, beside the routed ones: those have scratch memory apart.
_BESIDE = 1
_QKV = {"q": 0, "k": 1, "v": 2}
#: vLLM's activations that the kernel contract knows, under the contract's names. The parameters of gpt-oss' own
#: (limit, alpha) are in the plan already, from the checkpoint's configuration.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "swigluoai": "swiglu-oai",
}


def attach(layer: Module, member: Module, to_host: bool) -> None:
    """Make `member` what runs `layer`, from host memory where it is only to be kept there."""
    layer.add_module(MEMBER, member.to("cpu") if to_host else member)


class LoadingLinear:
    """A linear layer of vLLM while its checkpoint modules arrive."""

    to_host = False

    def __init__(
        self,
        layer: LinearBase,
        parts: tuple[EnginePart, ...],
        layers: EngineLayers,
        slots: int,
        workspaces: Workspaces,
    ) -> None:
        """`slots` is the number of parts of vLLM's module."""
        self._workspaces = workspaces
        self._layer = layer
        self._prefix = layer.prefix
        self._by_position: dict[int, tuple[LinearLoader, int, ModuleTensors]] = {}
        self._loaders: list[tuple[str, LinearLoader]] = []
        self._single = len(parts) == 1
        leaves: dict[str, None] = {}
        rank = Rank(layer.tp_rank, layer.tp_size) if not _is_replicated(layer) else Rank()
        for planned, held in own_layers(parts):
            packed = _as_engine_splits(planned.packed, layer, tuple(part.position for part in held))
            if packed.spec.bias and not layer.has_bias:
                raise InvalidCheckpointError("has a bias, and vLLM's layer has none", key=held[0].name)
            loader = LinearLoader(packed, _linear_kernel(planned, packed, rank), rank)
            self._loaders.append((held[0].name.rpartition(".")[2], loader))
            for part in held:
                tensors = ModuleTensors(
                    packed.parts[part.index],
                    pieces=slots if self._single else 1,
                    reordered=layers.family.name in REORDERED,
                )
                self._by_position[part.position] = (loader, part.index, tensors)
                leaves |= dict.fromkeys(tensors.leaves)
                leaves |= dict.fromkeys(leaf_of(info, part.name) for info in layers.tensors(part.name))
        leaves.pop("bias", None)
        self.leaves = tuple(leaves)

    @property
    def sizes(self) -> tuple[int, tuple[int, ...]]:
        """(in features, out features by part) on this rank."""
        parts = tuple(rows for _, loader in self._loaders for rows in loader.spec.parts)
        return self._loaders[0][1].spec.in_features, parts

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for _, _, tensors in self._by_position.values() for name in tensors.missing)

    def take(
        self,
        leaf: str,
        param: Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: str | int | None = None,
    ) -> None:
        """The weight loader of one parameter."""
        number = _QKV.get(loaded_shard_id) if isinstance(loaded_shard_id, str) else loaded_shard_id
        position, piece = (0, number) if self._single else (number, None)
        if position not in self._by_position:
            raise InvalidCheckpointError(f"vLLM delivered {leaf} for part {loaded_shard_id!r}", key=self._prefix)
        loader, index, tensors = self._by_position[position]
        if not tensors.take(leaf, loaded_weight, piece):
            return
        loader.put(index, tensors.arrays())
        if not self.missing:
            attach(self._layer, self._finish(param.device), self.to_host)

    def _finish(self, device: torch.device) -> QuantLinear | CompositeLinear:
        held = {name: loader.finish(device, self._workspaces) for name, loader in self._loaders}
        return next(iter(held.values())) if len(held) == 1 else CompositeLinear(held)


class LoadingExperts:
    """A layer of experts of vLLM while its checkpoint modules arrive."""

    to_host = False

    def __init__(
        self, layer: RoutedExperts, planned: PlannedLayer, layers: EngineLayers, workspaces: Workspaces
    ) -> None:
        self._workspaces = workspaces
        parallel, packed = layer.moe_config.moe_parallel_config, planned.packed
        assert packed.spec.moe is not None
        moe = replace(packed.spec.moe, activation=moe_activation(layer))
        packed = replace(packed, spec=replace(packed.spec, moe=moe))
        rank = Rank(parallel.tp_rank, parallel.tp_size, parallel.ep_rank, parallel.ep_size)
        kernel = load_kernel(_impl(planned, packed, rank))
        assert isinstance(kernel, MoeKernel)
        self._layer = layer
        self._loader = loader = MoeLoader(packed, kernel, rank)
        _require_runs_of_experts(layer, loader.experts)
        self._tensors: dict[Slot, ModuleTensors] = {}
        self._fused = len(packed.w13[0]) == 1
        leaves: dict[str, None] = {}
        for slot in loader.slots():
            part = loader.part_of(slot)
            tensors = ModuleTensors(
                part,
                pieces=2 if not slot.down and self._fused else 1,
                reordered=layers.family.name in REORDERED,
                stacked=packed.stacked,
                bias=True,
            )
            self._tensors[slot] = tensors
            names = [*tensors.leaves]
            names += [
                leaf_of(info, part.module.name, stacked=packed.stacked) for info in layers.tensors(part.module.name)
            ]
            leaves |= dict.fromkeys(f"{'w2' if slot.down else 'w13'}_{name}" for name in names)
        self.leaves = tuple(leaves)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, hidden size, intermediate size) on this rank."""
        spec = self._loader.spec
        assert spec.moe is not None
        return spec.moe.experts, spec.in_features, spec.moe.intermediate

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for tensors in self._tensors.values() for name in tensors.missing)

    def take(
        self,
        leaf: str,
        param: Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """The weight loader of one parameter. False for an expert of another rank."""
        if expert_id not in self._loader.experts:
            return False if return_success else None
        number = int(shard_id == "w3")
        down = shard_id == "w2"
        slot = Slot(expert_id, 0 if down or self._fused else number, down)
        tensors = self._tensors[slot]
        name = leaf.removeprefix("w2_" if down else "w13_")
        if tensors.take(name, loaded_weight, number if self._fused and not down else None):
            self._loader.put(slot, tensors.arrays())
            if not self.missing:
                attach(self._layer, self._loader.finish(param.device, self._workspaces, _BESIDE), self.to_host)
        return True if return_success else None


def moe_activation(layer: RoutedExperts) -> str:
    """The activation of vLLM's experts by its name here. Raises UsageError for what the kernel contract cannot say."""
    activation = _ACTIVATIONS.get(str(layer.activation.value))
    if activation is None:
        raise UsageError(f"{layer.layer_name}: no kernel of omniplat knows the activation {layer.activation.value}")
    if layer.apply_router_weight_on_input:
        raise UsageError(f"{layer.layer_name}: weights of the router on the input are not part of the contract")
    if layer.moe_config.is_lora_enabled:
        raise UsageError(f"{layer.layer_name}: vLLM applies LoRA inside its own kernels of experts, not around others")
    return activation


def _impl(planned: PlannedLayer, packed: PackedLayer, rank: Rank) -> str:
    """The kernel that was planned; where ranks share the layer, the one for what each of them holds. How vLLM shares it
    is known by now: a plan can only guess it."""
    capability = planned.capability
    if rank.tp_size > 1 or rank.ep_size > 1:
        spec = rank_spec(packed.spec, packed.split, rank.tp_size, rank.ep_size)
        capability = plan_for_rank(replace(packed, spec=spec, split=Split()), planned.layer.scale_spans).capability
    if capability is None or not capability.impl:
        raise UsageError(f"{planned.layer.name} was planned without a kernel that runs")
    return capability.impl


def _linear_kernel(planned: PlannedLayer, packed: PackedLayer, rank: Rank) -> LinearKernel[Any]:
    if planned.layer.status == "unquantized":
        return PlainLinear()
    kernel = load_kernel(_impl(planned, packed, rank))
    assert isinstance(kernel, LinearKernel)
    return kernel


def _is_replicated(layer: LinearBase) -> bool:
    return not isinstance(layer, (ColumnParallelLinear, RowParallelLinear))


def _as_engine_splits(packed: PackedLayer, layer: LinearBase, positions: tuple[int, ...]) -> PackedLayer:
    """The layer with the split that vLLM's module makes: the table of the model's family can only guess it.

    `positions` are the places of the layer's checkpoint modules in vLLM's module.
    """
    sizes, kv, heads, kv_heads = [layer.output_size], [False], 0, 0
    style = "row" if isinstance(layer, RowParallelLinear) else "replicated" if _is_replicated(layer) else "column"
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        sizes = [heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
        kv = [False, True, True]
    elif isinstance(layer, MergedColumnParallelLinear):
        sizes = list(layer.output_sizes)
        kv = [False] * len(sizes)
    if len(positions) > 1 or (len(sizes) > 1 and packed.parts[0].module.out_features == sizes[positions[0]]):
        sizes, kv = [sizes[i] for i in positions], [kv[i] for i in positions]
    if sum(sizes) != packed.spec.out_features:
        raise InvalidCheckpointError(
            f"has {packed.spec.out_features} rows, vLLM's layer {sizes}", key=packed.parts[0].module.name
        )
    split = Split(style, heads, kv_heads, tuple(kv) if heads else ())
    return replace(packed, spec=replace(packed.spec, parts=tuple(sizes)), split=split)


def _require_runs_of_experts(layer: RoutedExperts, experts: range) -> None:
    """Raises UsageError where vLLM places experts differently: every rank holds a run of them."""
    placed = layer.expert_map
    if placed is None:
        return
    wanted = torch.full_like(placed, -1)
    wanted[experts.start : experts.stop] = torch.arange(len(experts), dtype=placed.dtype)
    if not torch.equal(placed.cpu(), wanted.cpu()):
        raise UsageError(
            f"{layer.layer_name}: experts are placed {placed.tolist()}; only runs of experts are supported"
        )
