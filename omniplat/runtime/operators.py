"""Registering operators in torch's library `omniplat`, and the forms of them that tracers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Operator = Callable[..., torch.Tensor]


def new_library() -> torch.library.Library:
    """A part of the library `omniplat`: what is registered through it is there as long as it is."""
    return torch.library.Library("omniplat", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(
    library: torch.library.Library, schema: str, implementations: Mapping[str, Operator], fake: Operator
) -> None:
    """Define the operator of `schema`, "name(arguments) -> Tensor", with an implementation for each dispatch key."""
    name = schema.partition("(")[0]
    library.define(schema)  # type: ignore[no-untyped-call]
    for key, implementation in implementations.items():
        library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"omniplat::{name}", fake, lib=library)


def linear_fake(x: torch.Tensor, weight: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Of operators that take x [..., K] and a weight of N rows first and the output's dtype last: [..., N]."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_last_dtype(arguments))


def experts_fake(x: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Of operators that take x first and the output's dtype last, and give a tensor of x's shape."""
    return x.new_empty(x.shape, dtype=_last_dtype(arguments))


def _last_dtype(arguments: tuple[object, ...]) -> torch.dtype:
    dtype = arguments[-1]
    assert isinstance(dtype, torch.dtype)
    return dtype
