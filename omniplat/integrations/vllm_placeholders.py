"""Parameters of vLLM's layers that stand for a checkpoint's tensors: no memory, and a loader of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.utils import set_weight_attrs

from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.integrations.vllm_names import parameter_name
from omniplat.integrations.vllm_offload import require_resident

#: vLLM's LoRA reads from a tensor of this name on which device a linear layer lies.
_WHERE = "weight_packed"


class Loading(Protocol):
    """A layer while its weights arrive: the tensors that may come, and the names of those that have not."""

    @property
    def leaves(self) -> tuple[str, ...]: ...

    @property
    def missing(self) -> tuple[str, ...]: ...

    @property
    def take(self) -> Callable[..., bool | None]: ...

    #: Whether the finished layer goes to host memory while others are still loaded.
    to_host: bool


def add_placeholders(layer: Module, name: str, loading: Loading) -> None:
    """Give `layer`, called `name`, a parameter for every tensor that the engine's loader may bring. Raises UsageError
    where the engine is asked to offload one of them."""
    require_resident(name, map(parameter_name, loading.leaves))
    for leaf in loading.leaves:
        param = Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        layer.register_parameter(parameter_name(leaf), param)
        # vllm-omni's loader asks: without it, it would take an absent scale for one that may be missing.
        set_weight_attrs(param, {"weight_loader": _Loader(loading, leaf), "is_checkpoint_required": True})


def remove_placeholders(layer: Module, loading: Loading) -> None:
    """Take those parameters away again. Raises InvalidCheckpointError where something has not come."""
    _require_complete(loading.missing)
    device = torch.device("cpu")
    for leaf in loading.leaves:
        name = parameter_name(leaf)
        device = getattr(layer, name).device
        delattr(layer, name)
    layer.register_buffer(_WHERE, torch.empty(0, dtype=torch.uint8, device=device), persistent=False)


class _Loader:
    """What the engine calls with the tensors of one parameter."""

    def __init__(self, loading: Loading, leaf: str) -> None:
        self._take = loading.take
        self._leaf = leaf

    def __call__(self, *args: Any, **kwargs: Any) -> bool | None:
        return self._take(self._leaf, *args, **kwargs)

    @property
    def __name__(self) -> str:
        """vLLM reads it when it is about to load weights into a model that runs, which these layers cannot do."""
        raise UsageError("weights cannot be loaded anew into layers that omniplat runs: load the model again")


def _require_complete(missing: Sequence[str]) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidCheckpointError(f"vLLM did not deliver it{more}", key=missing[0])
