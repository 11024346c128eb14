"""The kernel contract: what a backend's kernel class looks like, for linear layers and for experts.

A kernel has no state. Once per layer, `prepare` turns the canonical tensors of a weight into named tensors in
whatever layout the kernel reads, plus a small config. From then on `apply` is all that runs, and it is one
call of an operator registered through `torch.library`: with a fake implementation, so that it traces under
`torch.compile(fullgraph=True)` with any number of rows, and without side effects.

What `apply` computes does not depend on the number of rows. A kernel may pick among implementations of the
same numerics by it, inside its one operator, from one set of tensors.

The config is a frozen dataclass of strings, numbers, booleans and tuples of those: it is hashable, it is a
constant to the compiler, and it survives JSON (`encode_config`, `decode_config`), so a layer can be rebuilt
from a description and a state dict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch

from omniplat.errors import BackendLoadError, UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.tensors import WeightTensors

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Prepared(Generic[C]):
    """The result of `prepare`: tensors that the layer registers as buffers, and the config that reads them.

    Buffer names are identifiers; `bias` is taken by the layer itself.
    """

    tensors: Mapping[str, torch.Tensor]
    config: C


class LinearKernel(ABC, Generic[C]):
    """A kernel for `y = x @ W^T + bias`.

    `name` is the kernel's name in the plan, `config_type` the dataclass of its configs.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]

    @abstractmethod
    def prepare(self, weight: WeightTensors, spec: LayerSpec) -> Prepared[C]:
        """Lay `weight` out for this kernel. The result may share memory with it; `bias` is not part of it.

        Raises InvalidCheckpointError for values that no kernel may run (a NaN code, say).
        """

    @abstractmethod
    def apply(
        self,
        config: C,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        """`x` [..., K] in bf16, f16 or f32, of any strides, to [..., N] in `out_dtype`, contiguous.

        Every leading shape is legal, also one with no rows. `bias` [N] is added before the one rounding to
        `out_dtype`. No argument but `workspace` is written to.
        """

    def workspace_bytes(self, config: C) -> int:
        """Bytes of scratch memory that `apply` needs to find initialised; 0 for none."""
        return 0


class MoeKernel(ABC, Generic[C]):
    """A kernel for the experts of a mixture-of-experts layer; routing is an input.

    For a row x with experts e_t and weights p_t: `y = sum_t p_t * w2[e_t] @ act(gate, up)` with
    `[gate; up] = w13[e_t] @ x`. Gate rows come first in w13.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]

    @abstractmethod
    def prepare(self, w13: WeightTensors, w2: WeightTensors, spec: LayerSpec) -> Prepared[C]:
        """Lay stacked weights out: w13 [E, 2I, K] and w2 [E, K, I], biases [E, 2I] and [E, K] among them.

        The activation's parameters, `spec.moe.limit` and `spec.moe.alpha`, belong into the config.
        """

    @abstractmethod
    def apply(
        self,
        config: C,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        """`x` [M, K] to [M, K] in `out_dtype`.

        `topk_ids` int32 or int64 [M, T] and `topk_weights` f32 [M, T]; `expert_map` int32 [global experts]
        gives the local index of an expert, or -1 for one that another rank holds, whose contribution is 0. Ids are
        known to be in range (`checked_ids`); -1 contributes nothing. `activation` is one of
        `omniplat.layer.ACTIVATIONS`. x is quantized once for all experts, unless they differ in how they see it.
        """

    def workspace_bytes(self, config: C) -> int:
        """Bytes of scratch memory that `apply` needs to find initialised; 0 for none."""
        return 0


Kernel = LinearKernel[Any] | MoeKernel[Any]


class Workspaces:
    """Zero-initialised scratch tensors, one per (device, stream): what kernels share and may leave dirty.

    Kernels on one stream run one after another, so one tensor of the largest size serves all of them. A tensor
    that was handed out stays valid when a larger one replaces it. A copy, also by pickle, is empty.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Workspaces], tuple[()]]:
        return Workspaces, ()

    def get(self, device: torch.device, stream: int, nbytes: int) -> torch.Tensor | None:
        """A uint8 tensor of at least `nbytes` on `device` for `stream` (its id); None for 0 bytes."""
        if nbytes <= 0:
            return None
        with self._lock:
            held = self._tensors.get((device, stream))
            if held is None or held.numel() < nbytes:
                held = torch.zeros(nbytes, dtype=torch.uint8, device=device)
                self._tensors[device, stream] = held
            return held


def encode_config(config: Any) -> str:
    """A kernel's config as JSON with sorted keys."""
    return msgspec.json.encode(config, order="sorted").decode()


def decode_config(kernel: Kernel, text: str) -> Any:
    """The inverse of `encode_config`; raises UsageError when `text` is no config of this kernel."""
    try:
        return msgspec.json.decode(text.encode(), type=kernel.config_type)
    except msgspec.MsgspecError as exc:
        raise UsageError(f"{kernel.name}: {text!r} is not a config of this kernel: {exc}") from exc


def impl_of(kernel: Kernel) -> str:
    """The `module:Class` string that `load_kernel` takes."""
    return f"{type(kernel).__module__}:{type(kernel).__qualname__}"


def load_kernel(impl: str) -> Kernel:
    """Instantiate the kernel behind a capability's `impl` ("module:Class"); raises BackendLoadError."""
    module, _, name = impl.partition(":")
    try:
        kernel = getattr(import_module(module), name)()
    except Exception as exc:
        raise BackendLoadError(impl, f"{type(exc).__name__}: {exc}") from exc
    if not isinstance(kernel, (LinearKernel, MoeKernel)):
        raise BackendLoadError(impl, "is neither a LinearKernel nor a MoeKernel")
    return kernel
