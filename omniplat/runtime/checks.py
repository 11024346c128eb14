"""Checks that run before a kernel does, and that trace: one operator that hands on what it has looked at."""

from __future__ import annotations

import torch

from omniplat.errors import UsageError
from omniplat.runtime.operators import new_library, register

_LIBRARY = new_library()


def checked_ids(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """A copy of `topk_ids`, every one of them in -1..experts - 1.

    On a CPU anything else raises UsageError. Elsewhere the device itself asserts it: nothing waits for the answer, and
    the next synchronisation raises.
    """
    checked: torch.Tensor = torch.ops.omniplat.checked_ids(topk_ids, experts)
    return checked


def _message(experts: int) -> str:
    return f"topk_ids holds ids outside -1..{experts - 1}"


def _on_cpu(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    if topk_ids.numel():
        low, high = (int(value) for value in torch.aminmax(topk_ids))
        if low < -1 or high >= experts:
            raise UsageError(f"{_message(experts)}: {low}..{high}")
    return topk_ids.clone()


def _on_device(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    torch._assert_async(((topk_ids >= -1) & (topk_ids < experts)).all(), _message(experts))
    return topk_ids.clone()


def _fake(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.empty_like(topk_ids)


register(
    _LIBRARY,
    "checked_ids(Tensor topk_ids, int experts) -> Tensor",
    {"CompositeExplicitAutograd": _on_device, "CPU": _on_cpu},
    _fake,
)
