"""Layers: `nn.Module`s that hold what a kernel prepared and call it. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch
from torch import nn

from omniplat.errors import UsageError
from omniplat.layer import LayerSpec
from omniplat.runtime.checks import checked_ids
from omniplat.runtime.kernel import (
    Kernel,
    LinearKernel,
    MoeKernel,
    Prepared,
    Workspaces,
    decode_config,
    encode_config,
    impl_of,
    load_kernel,
)
from omniplat.runtime.tensors import DTYPES

#: Dtypes of inputs.
_INPUTS = frozenset(DTYPES.values())


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """What `rebuild` needs beside a state dict. Plain data; `to_json` and `from_json`.

    `impl` names the kernel, `config` is its config as JSON, `buffers` maps names to (dtype, shape).
    """

    spec: LayerSpec
    impl: str
    config: str
    buffers: Mapping[str, tuple[str, tuple[int, ...]]]

    def to_json(self) -> str:
        return msgspec.json.encode(self, order="sorted").decode()

    @staticmethod
    def from_json(text: str) -> LayerDescription:
        """Raises UsageError when `text` describes no layer."""
        try:
            return msgspec.json.decode(text.encode(), type=LayerDescription)
        except msgspec.MsgspecError as exc:
            raise UsageError(f"not the description of a layer: {exc}") from exc


class KeepsDtypes(nn.Module):
    """A module whose tensors follow the model's moves (`.to(device)`) but no casts (`.half()`): a scale in another
    dtype is another scale, and fp8 codes count as floating point to torch."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeepsDtypes:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call, no-any-return]


class _KernelLayer(KeepsDtypes):
    """Buffers of one kernel. The state dict carries the kernel's config, so that bytes of another scheme or
    kernel whose shapes happen to agree cannot be loaded into this layer."""

    kernel: Kernel
    workspace: torch.Tensor | None

    def __init__(self, spec: LayerSpec, kernel: Kernel, prepared: Prepared[Any]) -> None:
        super().__init__()
        self.spec = spec
        self.kernel = kernel
        self.config = prepared.config
        self.workspace = None
        self._names = tuple(prepared.tensors)
        for name, tensor in prepared.tensors.items():
            if name == "bias":
                raise UsageError(f"{kernel.name} prepared a buffer named bias, which belongs to the layer")
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _KernelLayer:
        super()._apply(fn, recurse)
        if self.workspace is not None:
            self.workspace = torch.zeros_like(self.workspace, device=fn(self.workspace).device)
        return self

    def _tensors(self) -> dict[str, torch.Tensor]:
        # not by getattr: a module looks for a buffer everywhere else first
        buffers = self._buffers
        return {name: cast(torch.Tensor, buffers[name]) for name in self._names}

    def share_workspace(self, workspaces: Workspaces, stream: int = 0) -> None:
        """Take the kernel's scratch memory from what layers share that never run at the same time.

        `stream` is any number that tells such groups apart: an engine that runs two layers beside each other gives
        them different ones. To be called once the layer's buffers are on their device.
        """
        device = next((buffer.device for buffer in self.buffers()), torch.device("cpu"))
        self.workspace = workspaces.get(device, stream, self.kernel.workspace_bytes(self.config))

    def _require_input(self, x: torch.Tensor) -> None:
        """Kernels take an input for what they were made for: of a narrower one a device's would read beyond its end."""
        if x.shape[-1] != self.spec.in_features or x.dtype not in _INPUTS:
            raise UsageError(
                f"{self.spec.name or self.spec.op} takes [..., {self.spec.in_features}] in bf16, f16 or f32, "
                f"found {list(x.shape)} in {str(x.dtype).removeprefix('torch.')}"
            )

    @property
    def nbytes(self) -> int:
        """Resident bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def describe(self) -> LayerDescription:
        buffers = {
            name: (str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
            for name, buffer in self.named_buffers()
        }
        return LayerDescription(self.spec, impl_of(self.kernel), encode_config(self.config), buffers)

    def get_extra_state(self) -> torch.Tensor:
        """Kernel and config as UTF-8 bytes: a tensor, so that safetensors can store the state dict."""
        return torch.frombuffer(bytearray(self._identity().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raises UsageError when the state dict belongs to a layer with another kernel or config."""
        found = bytes(state.cpu().tolist()).decode(errors="replace")
        if found != self._identity():
            raise UsageError(f"{self.spec.name}: the state is that of {found}, this layer is {self._identity()}")

    def _identity(self) -> str:
        return f"{self.kernel.name} {encode_config(self.config)}"

    def extra_repr(self) -> str:
        spec = self.spec
        return (
            f"{spec.name or spec.op}, in={spec.in_features}, out={spec.out_features}, scheme={spec.scheme.id}, "
            f"kernel={self.kernel.name}"
        )


class QuantLinear(_KernelLayer):
    """`y = x @ W^T + bias` with a quantized weight.

    `forward` takes [..., K] in bf16, f16 or f32, any strides, also no rows, and returns [..., N] in x's dtype,
    or in `out_dtype` where one was given. It raises UsageError for another width or dtype.
    """

    kernel: LinearKernel[Any]
    bias: torch.Tensor | None

    def __init__(
        self,
        spec: LayerSpec,
        kernel: LinearKernel[Any],
        prepared: Prepared[Any],
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(spec, kernel, prepared)
        self.out_dtype = out_dtype
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self._buffers["bias"])

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `forward`, with a bias that somebody else holds: an engine that has loaded and cut it."""
        self._require_input(x)
        out_dtype = self.out_dtype or x.dtype
        return self.kernel.apply(self.config, self._tensors(), x, bias, out_dtype, self.workspace)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class QuantExperts(_KernelLayer):
    """The experts of a mixture-of-experts layer, with stacked quantized weights. Routing is an input."""

    kernel: MoeKernel[Any]

    def __init__(self, spec: LayerSpec, kernel: MoeKernel[Any], prepared: Prepared[Any]) -> None:
        super().__init__(spec, kernel, prepared)
        if spec.moe is None:
            raise UsageError(f"{spec.name} has no experts")
        self.activation = spec.moe.activation

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` [..., K], `topk_ids` and `topk_weights` [..., T]; returns [..., K] in x's dtype.

        An id of -1, or one that `expert_map` maps to -1, contributes nothing. Raises UsageError for an input of another
        width or dtype, and for ids that are not integers, out of range (on another device than the CPU: see
        `checked_ids`), or not as many as their weights.
        """
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.shape != topk_weights.shape:
            raise UsageError(
                f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)}: needed "
                "int32 or int64 ids, and a weight for each"
            )
        self._require_input(x)
        slots = topk_ids.shape[-1]
        assert self.spec.moe is not None
        known = self.spec.moe.experts if expert_map is None else expert_map.shape[0]
        rows = self.kernel.apply(
            self.config,
            self._tensors(),
            x.reshape(-1, x.shape[-1]),
            checked_ids(topk_ids.reshape(-1, slots), known),
            topk_weights.reshape(-1, slots),
            expert_map,
            self.activation,
            x.dtype,
            self.workspace,
        )
        return rows.reshape(x.shape)

    def extra_repr(self) -> str:
        moe = self.spec.moe
        assert moe is not None
        return f"{super().extra_repr()}, experts={moe.experts}, intermediate={moe.intermediate}"


class CompositeLinear(nn.Module):
    """One engine module whose parts have different schemes: the parts' outputs, concatenated along N."""

    def __init__(self, parts: Mapping[str, QuantLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(parts))
        self._sizes = [part.spec.out_features for part in parts.values()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts.values()], dim=-1)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `forward`, with a bias of all parts that somebody else holds."""
        parts = [cast(QuantLinear, part) for part in self.parts.values()]
        biases = torch.split(bias, self._sizes) if bias is not None else [None] * len(parts)
        return torch.cat([part.run(x, held) for part, held in zip(parts, biases, strict=True)], dim=-1)


def rebuild(description: LayerDescription, state: Mapping[str, torch.Tensor]) -> QuantLinear | QuantExperts:
    """A layer from its description and state dict; the layer takes over the tensors without a copy.

    Raises UsageError when the state belongs to another layer.
    """
    kernel = load_kernel(description.impl)
    config = decode_config(kernel, description.config)
    empty = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in description.buffers.items()
    }
    bias = empty.pop("bias", None)
    layer: QuantLinear | QuantExperts
    if isinstance(kernel, LinearKernel):
        layer = QuantLinear(description.spec, kernel, Prepared(empty, config), bias)
    else:
        layer = QuantExperts(description.spec, kernel, Prepared(empty, config))
    try:
        layer.load_state_dict(dict(state), strict=True, assign=True)
    except RuntimeError as exc:
        raise UsageError(f"{description.spec.name}: {exc}") from exc
    layer.share_workspace(Workspaces())
    return layer
