"""Proof that nothing of a checkpoint was read and no tensor was made while something ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo


@contextmanager
def nothing_is_read() -> Iterator[None]:
    """Within it, reading a tensor and calling any operator of torch raise AssertionError."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            raise AssertionError(f"{func} was called before the refusal")

    def refuse(self: ShardReader, info: TensorInfo) -> Any:
        raise AssertionError(f"{info.name} was read before the refusal")

    original = ShardReader.read
    ShardReader.read = refuse  # type: ignore[method-assign]
    try:
        with torch.no_grad(), NoTensor():  # type: ignore[no-untyped-call]
            yield
    finally:
        ShardReader.read = original  # type: ignore[method-assign]
