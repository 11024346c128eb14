"""A transformers model with the producer's own weights: what a served checkpoint has to say.

Weights are the producer's dequantized ones (goldens; the oracle's, where the repository keeps those of some modules
only), activations are quantized by the oracle where the plan executes quantized ones. Nothing of what loads or runs a
checkpoint inside vLLM is used.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.reader import ShardReader
from omniplat.oracle import dequantize
from omniplat.oracle.quantize import quantize_activation
from omniplat.planner import Planned
from omniplat.scheme import TensorQuant
from tests.goldens.check import _canonical, as_hqq_computes, computes_in_bf16, rounds_to_bf16
from tests.goldens.entries import Entry
from tests.vllm.engine import tensors_of

_STATIC = ("input_scale", "input_zero_point", "input_global_scale")


class Reference:
    """The model of one entry in float32."""

    def __init__(self, entry: Entry, planned: Planned) -> None:
        config = json.loads((entry.checkpoint / "config.json").read_text())
        config.pop("quantization_config", None)
        config["dtype"] = "float32"
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        self._weights = {
            name.removesuffix(".weight"): torch.from_numpy(value.copy())
            for name, value in entry.goldens().items()
            if name.endswith(".weight")
        }
        self._canonical: dict[str, CanonicalWeight] = {}
        self._activations: dict[str, TensorQuant] = {}
        reader = ShardReader(planned.resolutions[0].component.root)
        for item in planned.layers:
            if item.layer.status != "ok":
                continue
            for module in item.packed.modules:
                self._canonical[module.name] = _canonical(module, reader)
                executed = str(item.layer.executes).rpartition("/")[2]
                if executed != "a16":
                    assert executed == module.scheme.activation_id, f"{module.name} executes {executed}"
                    assert module.scheme.activation is not None
                    self._activations[module.name] = module.scheme.activation
        self._refine(entry.name)
        self._fill(entry)

    def _refine(self, name: str) -> None:
        """Exact weights in place of goldens that the producer rounded, once they are seen to round to them, and where
        the repository keeps no golden of a module."""
        for module, canonical in self._canonical.items():
            golden = self._weights.get(module)
            if golden is not None and not rounds_to_bf16(name):
                continue
            if golden is not None:
                exact = as_hqq_computes(canonical) if computes_in_bf16(name) else dequantize(canonical)
                rounded = torch.from_numpy(exact).to(torch.bfloat16)
                assert torch.equal(rounded, golden.to(torch.bfloat16)), module
            self._weights[module] = torch.from_numpy(dequantize(canonical)).float()

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """log p of every token after each prefix of `tokens`, [len(tokens), vocabulary], float64."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()

    def _fill(self, entry: Entry) -> None:
        plain = {name: tensor for name, tensor in tensors_of(entry.checkpoint) if tensor.dtype.is_floating_point}
        with torch.no_grad():
            for name, module in list(self.model.named_modules()):
                if name.endswith(".experts"):
                    self.model.set_submodule(name, _Experts(self, name, module.num_experts))
            for name, parameter in self.model.named_parameters():
                module, _, leaf = name.rpartition(".")
                golden = self._weights.get(module) if leaf == "weight" else None
                parameter.copy_(plain[name] if golden is None else golden)
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear) and name in self._canonical:
                    module.register_forward_pre_hook(partial(self._quantized, name))

    def _quantized(self, name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (self.seen_by(name, inputs[0]), *inputs[1:])

    def seen_by(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What is left of an input once the module called `name` has smoothed and quantized it."""
        tensors: dict[str, Array] = dict(self._canonical[name].tensors)
        values = x.double().numpy()
        if "pre_scale" in tensors:
            values = values * tensors["pre_scale"].astype(np.float64)
        if name in self._activations:
            static: dict[str, Any] = {role: tensors[role] for role in _STATIC if role in tensors}
            values = quantize_activation(values, self._activations[name], **static)
        return torch.from_numpy(np.asarray(values, np.float32))

    def expert(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.seen_by(name, x), self._weights[name].float())


class _Experts(nn.Module):
    """Routed experts, one by one."""

    def __init__(self, reference: Reference, name: str, count: int) -> None:
        super().__init__()
        self.reference, self.name, self.count = (reference,), name, count

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        linear = self.reference[0].expert
        for expert in range(self.count):
            rows, slots = torch.where(ids == expert)
            if len(rows):
                at = f"{self.name}.{expert}"
                inner = F.silu(linear(f"{at}.gate_proj", x[rows])) * linear(f"{at}.up_proj", x[rows])
                out.index_add_(0, rows, linear(f"{at}.down_proj", inner) * weights[rows, slots, None])
        return out
