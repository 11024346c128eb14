"""Layers of vLLM whose weights arrive in 16 bit and are quantized as soon as a layer has its own.

vLLM's weight loaders cut and order what a rank holds, into a tensor that exists while one layer is loaded; from there
`omniplat.runtime.online` makes the layer. What is left of the parameters until then has no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.utils import set_weight_attrs

from omniplat.errors import InvalidCheckpointError
from omniplat.integrations.vllm_loading import MEMBER, attach, moe_activation
from omniplat.integrations.vllm_plan import plan_for_rank
from omniplat.packed import PackedLayer, Split
from omniplat.planner import PlannedLayer
from omniplat.portable.round_weight import rounding_on
from omniplat.runtime.kernel import LinearKernel, MoeKernel, Workspaces, load_kernel
from omniplat.runtime.online import OnlineExperts, OnlineLinear

Loader = Callable[..., Any]


class OnlineLoadingLinear:
    """A linear layer of vLLM that is quantized once all of its weight has come."""

    leaves = ("weight",)
    to_host = False

    def __init__(
        self,
        layer: LinearBase,
        packed: PackedLayer,
        columns: int,
        rows: list[int],
        dtype: torch.dtype,
        loader: Loader,
        workspaces: Workspaces,
    ) -> None:
        """`packed` is the layer as it will be; `columns` and `rows` (by part) are what this rank holds of it. Raises
        UnsupportedCombinationError where no kernel runs that."""
        spec = replace(
            packed.spec, in_features=columns, out_features=sum(rows), parts=tuple(rows), bias=False, name=layer.prefix
        )
        kernel = _kernel(plan_for_rank(replace(packed, spec=spec, split=Split())))
        assert isinstance(kernel, LinearKernel)
        self._layer = layer
        self._loader = loader
        self._dtype = dtype
        self._workspaces = workspaces
        self._rows = rows
        # the engine makes layers under the device that they are for
        self._online = OnlineLinear(spec, kernel, rounding_on(torch.get_default_device()))
        self._weight: Parameter | None = None
        self._come: set[str | int | None] = set()
        self._done = False

    @property
    def missing(self) -> tuple[str, ...]:
        return () if self._done else (f"{self._layer.prefix}.weight",)

    def take(
        self, leaf: str, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | int | None = None
    ) -> None:
        """The weight loader of the one parameter."""
        if self._done or loaded_shard_id in self._come:
            raise InvalidCheckpointError("was delivered twice", key=f"{self._layer.prefix}.{leaf}")
        if self._weight is None:
            size = (sum(self._rows), self._online.spec.in_features)
            self._weight = Parameter(torch.empty(size, dtype=self._dtype, device=param.device), requires_grad=False)
            set_weight_attrs(self._weight, {"input_dim": 1, "output_dim": 0, "weight_loader": self._loader})
        shard = () if loaded_shard_id is None else (loaded_shard_id,)
        self._loader(self._weight, loaded_weight, *shard)
        self._come.add(loaded_shard_id)
        # A weight without a number is all parts of the layer in one.
        if None in self._come or len(self._come) == len(self._rows):
            self._finish(param.device)

    def _finish(self, device: torch.device) -> None:
        assert self._weight is not None
        for index, part in enumerate(torch.split(self._weight.data, self._rows)):
            self._online.put(part, index)
        self._weight = None
        attach(self._layer, self._online.finish(device, self._workspaces), self.to_host)
        self._done = True


class OnlineLoadingExperts:
    """A layer of experts of vLLM, quantized expert by expert."""

    leaves = ("w13_weight", "w2_weight")
    to_host = False

    def __init__(self, layer: RoutedExperts, packed: PackedLayer, workspaces: Workspaces) -> None:
        """Raises UsageError for what the kernel contract cannot say, UnsupportedCombinationError without a kernel."""
        assert packed.spec.moe is not None
        self._inner = inner = layer.intermediate_size_per_partition
        moe = replace(
            packed.spec.moe, experts=layer.local_num_experts, intermediate=inner, activation=moe_activation(layer)
        )
        spec = replace(packed.spec, moe=moe, parts=(inner, inner), name=layer.layer_name)
        kernel = _kernel(plan_for_rank(replace(packed, spec=spec)))
        assert isinstance(kernel, MoeKernel)
        self._layer = layer
        self._workspaces = workspaces
        self._online = OnlineExperts(spec, kernel, rounding_on(torch.get_default_device()))

    @property
    def missing(self) -> tuple[str, ...]:
        return () if hasattr(self._layer, MEMBER) else self._online.missing

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
        """The weight loader of a parameter. False for an expert of another rank."""
        layer, inner = self._layer, self._inner
        expert = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if expert < 0:
            return False if return_success else None
        if hasattr(layer, MEMBER):
            raise InvalidCheckpointError("was delivered twice", key=f"{layer.layer_name}.{leaf}")
        first = layer.moe_config.tp_rank * inner
        if shard_id == "w2":
            self._online.put_w2(loaded_weight[:, first : first + inner], expert)
        else:
            start = inner if shard_id == "w3" else 0
            self._online.put_w13(loaded_weight[first : first + inner], expert, rows=range(start, start + inner))
        if self._online.complete:
            attach(layer, self._online.finish(param.device, self._workspaces), self.to_host)
        return True if return_success else None


def _kernel(planned: PlannedLayer) -> LinearKernel[Any] | MoeKernel[Any]:
    assert planned.capability is not None
    return load_kernel(planned.capability.impl)
