"""The layers that stand where a model had its own: what models and their libraries ask of them beside `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omniplat.errors import UsageError
from omniplat.runtime.kernel import Prepared, Workspaces
from omniplat.runtime.layers import QuantExperts, QuantLinear

_NO_WEIGHT = (
    "has no weight in floating point: {name} is {scheme}. Merging an adapter into it, or reading the weight, needs the "
    "unquantized layer (omniplat.restore for a model that was quantized online)"
)


#: What autocast casts for a product.
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


class _NoGradient(torch.autograd.Function):
    """Hands on `y`, which was computed from `inputs`; a gradient that comes back is refused."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, name: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        raise UsageError(f"{ctx.name} is quantized and has no gradient: its kernels run forward only")


def _without_gradient(run: Callable[..., torch.Tensor], name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """`run(*inputs)`; where one of them wants a gradient, one that is refused when it is asked for."""
    if not (torch.is_grad_enabled() and any(item.requires_grad for item in inputs)):
        return run(*inputs)
    with torch.no_grad():
        y = run(*(item.detach() for item in inputs))
    refusing: torch.Tensor = _NoGradient.apply(y, name, *inputs)  # type: ignore[no-untyped-call]
    return refusing


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that autocast, where it is on, gives the input of a linear layer."""
    kind = x.device.type
    if x.dtype in _AUTOCAST and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class ModelLinear(QuantLinear):
    """In place of an `nn.Linear`. `original` is the layer that `restore` brings back, in a tuple so that it is no
    submodule; empty where there is none."""

    original: tuple[nn.Linear, ...] = ()

    @staticmethod
    def of(layer: QuantLinear, workspaces: Workspaces) -> ModelLinear:
        """The same layer, with the same tensors."""
        made = ModelLinear(layer.spec, layer.kernel, Prepared(layer._tensors(), layer.config), layer.bias)
        made.share_workspace(workspaces)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `QuantLinear.forward`, in autocast's dtype where that is on, as torch's linear layers; a gradient to `x`
        raises UsageError when it is computed."""
        return _without_gradient(super().forward, self.spec.name, _autocast(x))

    @property
    def in_features(self) -> int:
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        return self.spec.out_features

    @property
    def qweight(self) -> torch.Tensor:
        """The first of the layer's tensors, as bytes. PEFT asks for it by this name, to learn where a quantized layer
        lies; what it holds is the kernel's business."""
        return next(iter(self._tensors().values())).view(torch.uint8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "weight":
                raise
        text = _NO_WEIGHT.format(name=self.spec.name, scheme=self.spec.scheme.id)
        raise AttributeError(f"{type(self).__name__} {text}")


class ModelExperts(QuantExperts):
    """In place of a module that holds all experts of a layer and is called with the rows, ids and weights. `original`
    as in `ModelLinear`."""

    original: tuple[nn.Module, ...] = ()

    @staticmethod
    def of(layer: QuantExperts, workspaces: Workspaces) -> ModelExperts:
        """The same layer, with the same tensors."""
        made = ModelExperts(layer.spec, layer.kernel, Prepared(layer._tensors(), layer.config))
        made.share_workspace(workspaces)
        return made

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `QuantExperts.forward`, with weights in any floating-point dtype; a gradient to them or to `x` raises
        UsageError when it is computed."""

        def run(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return super(ModelExperts, self).forward(rows, topk_ids, weights.float(), expert_map)

        return _without_gradient(run, self.spec.name, x, topk_weights)
