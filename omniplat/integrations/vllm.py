"""vLLM: linear layers and experts that load and run through omniplat.

vLLM builds its own modules and hands checkpoint tensors to the `weight_loader` of their parameters. The parameters
here are empty: their loader collects the tensors of a checkpoint module and, when they are complete, runs the one load
path (`omniplat.runtime.load`). What comes out of it becomes a submodule, and `apply` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import Module
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from omniplat.errors import InvalidCheckpointError
from omniplat.integrations.online_layers import OnlineChoice, as_quantized
from omniplat.integrations.vllm_attention import attention_method
from omniplat.integrations.vllm_loading import MEMBER, LoadingExperts, LoadingLinear
from omniplat.integrations.vllm_names import EngineLayers, EnginePart
from omniplat.integrations.vllm_online import OnlineLoadingExperts, OnlineLoadingLinear
from omniplat.integrations.vllm_placeholders import Loading, add_placeholders, remove_placeholders
from omniplat.packed import PackedLayer
from omniplat.planner import PlannedLayer
from omniplat.runtime.kernel import Workspaces
from omniplat.runtime.layers import CompositeLinear, QuantExperts, QuantLinear


def method_for(
    layer: Module,
    prefix: str,
    layers: EngineLayers,
    workspaces: Workspaces,
    native: QuantizationConfig | None = None,
    online: OnlineChoice | None = None,
) -> QuantizeMethodBase | None:
    """What runs one of vLLM's layers; None where vLLM's own unquantized method does.

    Raises InvalidCheckpointError for a layer of which the checkpoint has nothing, UsageError where `online` cannot be
    meant for it.
    """
    if isinstance(layer, RoutedExperts):
        experts = layers.experts(prefix)
        if experts is None:
            raise InvalidCheckpointError("no experts of this name are in the checkpoint", key=prefix)
        if experts.layer.status != "unquantized":
            return OmniplatMoEMethod(layer, experts, layers, workspaces)
        if online is not None and online.takes(experts):
            return OmniplatOnlineMoEMethod(layer, as_quantized(experts.packed, online.scheme), workspaces)
        return None
    if isinstance(layer, AttentionLayerBase):
        return attention_method(layer, prefix, layers, native)
    if not isinstance(layer, LinearBase):
        return None
    parts = layers.linear(prefix)
    if not parts:
        raise InvalidCheckpointError("no weight of this name is in the checkpoint", key=prefix)
    if any(part.layer.layer.status != "unquantized" for part in parts):
        return OmniplatLinearMethod(parts, layers, workspaces)
    if online is not None and all(online.takes(part.layer) for part in parts):
        return OmniplatOnlineLinearMethod(as_quantized(parts[0].layer.packed, online.scheme), workspaces)
    return UnquantizedLinearMethod()


class _AwaitsTensors:
    """What methods of linear layers and of experts share: a layer is made once its tensors are there."""

    #: vllm-omni asks before it loads a model that is to be offloaded.
    supports_offload_after_quant = True
    _loading: Loading | None = None

    def enable_offload_after_quant(self) -> None:
        """Have each layer go to host memory as soon as it is made, which needs the device."""
        assert self._loading is not None
        self._loading.to_host = True

    def process_weights_after_loading(self, layer: Module) -> None:
        if self._loading is not None:
            remove_placeholders(layer, self._loading)
            self._loading = None


class _LinearMethod(_AwaitsTensors, LinearMethodBase):  # type: ignore[misc]
    """A linear layer of vLLM that runs as the member which loading gives it."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # vLLM holds the bias, cuts it, and leaves it out on all ranks but one of a row-parallel layer.
        return cast(QuantLinear | CompositeLinear, getattr(layer, MEMBER)).run(x, bias)


class OmniplatLinearMethod(_LinearMethod):
    """One of vLLM's linear layers: a single layer of the plan, or several that are run side by side."""

    def __init__(self, parts: Sequence[EnginePart], layers: EngineLayers, workspaces: Workspaces) -> None:
        super().__init__(workspaces)
        self._parts = tuple(parts)
        self._layers = layers

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UsageError where ranks cannot share the layer, InvalidCheckpointError where sizes differ."""
        assert isinstance(layer, LinearBase)
        loading = LoadingLinear(layer, self._parts, self._layers, len(output_partition_sizes), self._workspaces)
        if loading.sizes != (input_size_per_partition, tuple(output_partition_sizes)):
            needed = f"{output_partition_sizes} x {input_size_per_partition}"
            found = f"{list(loading.sizes[1])} x {loading.sizes[0]}"
            raise InvalidCheckpointError(
                f"vLLM's layer is {needed} on this rank, the checkpoint's {found}", key=layer.prefix
            )
        add_placeholders(layer, layer.prefix, loading)
        self._loading = loading


class OmniplatOnlineLinearMethod(_LinearMethod):
    """One of vLLM's linear layers whose weight arrives in 16 bit; `packed` is what it will be."""

    def __init__(self, packed: PackedLayer, workspaces: Workspaces) -> None:
        super().__init__(workspaces)
        self._packed = packed

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UnsupportedCombinationError where no kernel runs what this rank holds."""
        assert isinstance(layer, LinearBase)
        loading = OnlineLoadingLinear(
            layer,
            self._packed,
            input_size_per_partition,
            list(output_partition_sizes),
            params_dtype,
            extra_weight_attrs["weight_loader"],
            self._workspaces,
        )
        add_placeholders(layer, layer.prefix, loading)
        self._loading = loading


class _MoEMethod(_AwaitsTensors, FusedMoEMethodBase):  # type: ignore[misc]
    """vLLM's layer of experts, with vLLM's routing."""

    def __init__(self, layer: RoutedExperts, workspaces: Workspaces) -> None:
        super().__init__(layer.moe_config)
        self._workspaces = workspaces

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: it describes vLLM's own kernels."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        experts = cast(QuantExperts, getattr(layer, MEMBER))
        y: torch.Tensor = experts(x, topk_ids, topk_weights, layer.expert_map)
        return y


class OmniplatMoEMethod(_MoEMethod):
    """Experts of a quantized checkpoint."""

    def __init__(
        self, layer: RoutedExperts, planned: PlannedLayer, layers: EngineLayers, workspaces: Workspaces
    ) -> None:
        super().__init__(layer, workspaces)
        self._planned = planned
        self._layers = layers

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UsageError where ranks cannot share the layer, InvalidCheckpointError where sizes differ,
        UsageError for what the kernel contract cannot say."""
        loading = LoadingExperts(layer, self._planned, self._layers, self._workspaces)
        found = loading.sizes
        if found != (num_experts, hidden_size, intermediate_size_per_partition):
            raise InvalidCheckpointError(
                f"vLLM's layer has {num_experts} experts of {intermediate_size_per_partition} x {hidden_size} on this "
                f"rank, the checkpoint's {found[0]} of {found[2]} x {found[1]}",
                key=layer.layer_name,
            )
        add_placeholders(layer, layer.layer_name, loading)
        self._loading = loading


class OmniplatOnlineMoEMethod(_MoEMethod):
    """Experts whose weights arrive in 16 bit; `packed` is what they will be."""

    def __init__(self, layer: RoutedExperts, packed: PackedLayer, workspaces: Workspaces) -> None:
        super().__init__(layer, workspaces)
        self._packed = packed

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UsageError for what the kernel contract cannot say, UnsupportedCombinationError without a kernel."""
        loading = OnlineLoadingExperts(layer, self._packed, self._workspaces)
        add_placeholders(layer, layer.layer_name, loading)
        self._loading = loading
