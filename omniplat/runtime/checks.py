"""Checks that run before a kernel does, and that trace: one operator that hands on what it has looked at."""

from __future__ import annotations

import torch

from omniplat.errors import UsageError

_LIBRARY = torch.library.Library("omniplat", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("checked_ids(Tensor topk_ids, int experts) -> Tensor")  # type: ignore[no-untyped-call]


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


_LIBRARY.impl("checked_ids", _on_device, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("checked_ids", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("omniplat::checked_ids", _fake, lib=_LIBRARY)
