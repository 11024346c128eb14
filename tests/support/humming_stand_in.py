"""A stand-in for humming on the CPU: the functions that the cuda backend calls, with humming's arguments and layouts.

Weights are not laid out for a device: a "kernel" decodes what `humming.transform` would be given. What is checked as
humming checks it: dtypes and shapes of the tensors, K and N of an input, locks that are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import omniplat_cuda.kernels
import pytest
import torch

_BYTES = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn, "float32": torch.float32}
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Layer:
    """What humming knows of a layer; `to_str` and back."""

    n: int
    k: int
    padded_n: int
    padded_k: int
    weight: dict[str, Any]
    activation: str
    experts: int
    bias: bool
    dtype: str

    def to_str(self) -> str:
        return json.dumps(vars(self))

    @property
    def a_dtype(self) -> SimpleNamespace:
        return SimpleNamespace(num_bits=8 if self.activation else 16)

    @property
    def bits(self) -> int:
        return 4 if self.weight["b_dtype"] in ("uint4", "float4e2m1") else 8

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of the tensors that humming's own schema asks for."""
        group = self.weight["weight_scale_group_size"] or self.padded_k
        scale_dtype = _BYTES.get(self.weight["bs_dtype"]) or _HALF[self.weight["bs_dtype"]]
        one = (self.experts or 1,)
        lead = (self.experts,) if self.experts else ()
        groups = self.padded_k // group
        rows = self.padded_n
        found = {"weight": ((*lead, rows, self.padded_k * self.bits // 32), torch.int32)}
        kind = self.weight["weight_scale_type"]
        block = rows // max(1, self.weight["weight_scale_group_size_n"])
        found["weight_scale"] = {
            "tensor": (one, torch.float32),
            "channel": ((*lead, rows, 1), scale_dtype),
            "group": ((*lead, rows, groups), scale_dtype),
            "block": ((*lead, block, groups), torch.float32),
        }[kind]
        second = self.weight["weight_scale_2_type"]
        if second:
            found["weight_scale_2"] = (one, torch.float32) if second == "tensor" else ((*lead, rows), _HALF[self.dtype])
        if self.weight["has_zero_point"]:
            packed = ((*lead, rows * self.bits // 32, groups), torch.int32)
            found["zero_point"] = (
                ((*lead, rows, groups), _HALF[self.dtype]) if self.weight["is_fp_zero_point"] else packed
            )
        if self.bias:
            found["bias"] = ((*lead, rows), _HALF[self.dtype])
        return found


def _prepare_layer_config(
    n: int, k: int, weight: dict[str, Any], activation: dict[str, Any] | None, **more: Any
) -> Layer:
    rows, columns = more["pad_n_to_multiple"], more["pad_k_to_multiple"]
    return Layer(
        n, k, -(-n // rows) * rows, -(-k // columns) * columns, weight, activation["a_dtype"] if activation else "",
        more["num_experts"], more["has_bias"], str(more["torch_dtype"]).removeprefix("torch."),
    )  # fmt: skip


def _transform(layer: Layer, tensors: dict[str, torch.Tensor], *, already_padded: bool) -> dict[str, torch.Tensor]:
    assert already_padded
    wanted = layer.shapes()
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == wanted
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    return tensors


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _dense(layer: Layer, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """One weight as humming's own `dequantize_weight` reads it, f32 [N, K] without what is filled up."""
    codes = _unpacked(tensors["weight"], layer.bits)
    name = layer.weight["b_dtype"]
    if name == "float4e2m1":
        weight = E2M1[codes]
    elif name == "float8e4m3":
        weight = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif "zero_point" in tensors:
        zero = tensors["zero_point"]
        if not zero.is_floating_point():
            zero = _unpacked(zero.t().contiguous(), layer.bits).t()
        weight = codes - zero.float().repeat_interleave(layer.padded_k // zero.shape[1], 1)
    else:
        weight = codes - float(2 ** (layer.bits - 1))
    scale = tensors["weight_scale"]
    scale = scale.float() if scale.dtype != torch.float8_e8m0fnu else torch.exp2(scale.view(torch.uint8).float() - 127)
    scale = scale.reshape(1, 1) if scale.ndim < 2 else scale
    for axis, size in ((0, layer.padded_n), (1, layer.padded_k)):
        scale = scale.repeat_interleave(size // scale.shape[axis], axis)
    weight = weight * scale
    if "weight_scale_2" in tensors:
        weight = weight * tensors["weight_scale_2"].float().reshape(-1, 1)
    return weight[: layer.n, : layer.k]


class Kernels:
    """Compiled kernels by number: what was asked for, and how often one was launched."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Layer, dict[str, Any], dict[str, Any]]] = []
        self.launched = 0

    def prepare_kernels(self, layer: str, compute: str, schedule: str, device: int) -> torch.Tensor:
        self.compiled.append((Layer(**json.loads(layer)), json.loads(compute), json.loads(schedule)))
        return torch.tensor([0, 1 << 30, len(self.compiled) - 1, 0])

    def launch_kernel(
        self,
        *,
        configs: torch.Tensor,
        inputs: torch.Tensor,
        input_scale: torch.Tensor | None,
        sorted_ids: torch.Tensor | None,
        expert_ids: torch.Tensor | None,
        num_tokens_padded: torch.Tensor | None,
        locks: torch.Tensor,
        top_k: int,
        bias: torch.Tensor | None,
        **weights: torch.Tensor | None,
    ) -> torch.Tensor:
        self.launched += 1
        layer, compute, schedule = self.compiled[int(configs[2])]
        tensors = {name: tensor for name, tensor in weights.items() if tensor is not None}
        assert inputs.is_contiguous()
        assert inputs.shape[1] == layer.k
        assert not locks.any()
        assert (input_scale is not None) == bool(layer.activation)
        x = inputs.float() if input_scale is None else inputs.float() * input_scale
        dtype = _HALF[layer.dtype]
        if compute["gemm_type"] == "dense":
            assert compute["use_batch_invariant"]
            return (x @ _dense(layer, tensors).t()).to(dtype)
        assert sorted_ids is not None
        assert expert_ids is not None
        assert num_tokens_padded is not None
        y = torch.full((len(x) * top_k, layer.n), torch.nan, dtype=dtype)
        rows = schedule["block_shape"][0]
        for tile in range(int(num_tokens_padded) // rows):
            expert = int(expert_ids[tile])
            weight = _dense(layer, {name: tensor[expert] for name, tensor in tensors.items()})
            ids = sorted_ids[tile * rows : (tile + 1) * rows]
            ids = ids[ids < len(y)].long()
            product = x[ids // top_k] @ weight.t()
            y[ids] = (product if bias is None else product + bias[expert, : layer.n].float()).to(dtype)
        return y


def _schedule(layer: Layer, *, shape_m: int, gemm_type: str, **more: Any) -> dict[str, Any]:
    """Tiles of other rows for other layers."""
    return {"block_shape": (24 if layer.k % 256 else 8, 128, 64), "warp_shape": (8, 32, 64), "use_tma": True}


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """`humming` is this module, and the CPU counts as a CUDA device, until the iterator goes on."""
    kernels = Kernels()

    def schema(**fields: Any) -> dict[str, Any]:
        return fields

    contents: dict[str, dict[str, Any]] = {
        "humming": {},
        "humming.kernel": {},
        "humming.utils": {},
        "humming.config": {"LayerConfig": Layer},
        "humming.kernel.humming": {"HummingKernel": kernels},
        "humming.ops": {"launch_kernel": kernels.launch_kernel},
        "humming.schema": {"HummingInputSchema": schema, "HummingWeightSchema": schema},
        "humming.transform": {
            "prepare_fp16_e8m0_scale": lambda layer, tensors: (layer, tensors),
            "prepare_layer_config": _prepare_layer_config,
            "transform_humming_tensors": _transform,
        },
        "humming.tune": {"get_heuristics_config": _schedule},
        "humming.utils.cpu": {"get_parallel_build_workers": lambda: 2},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    # the module that imports humming, imported anew
    monkeypatch.delitem(sys.modules, "omniplat_cuda.kernels.humming_runtime", raising=False)
    monkeypatch.delattr(omniplat_cuda.kernels, "humming_runtime", raising=False)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield kernels
    sys.modules.pop("omniplat_cuda.kernels.humming_runtime", None)
    vars(omniplat_cuda.kernels).pop("humming_runtime", None)
