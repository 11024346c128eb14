"""Mixture-of-experts layers of real checkpoints: run whole, and computed in float64 from the producer's own weights.

The reference knows the models' code and the names in their checkpoints, and nothing of omniplat's: its own row orders,
its own routing, its own activation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from omniplat.api import make_planned
from omniplat.checkpoint.reader import ShardReader
from omniplat.oracle import dequantize
from omniplat.packed import PackedLayer, Part
from omniplat.planner import Planned, PlannedLayer
from omniplat.reading import read_canonical
from omniplat.runtime.moe import QuantMoE, load_moe_layers
from tests.goldens.check import rounds_to_bf16
from tests.goldens.entries import Entry, read_safetensors

_LINEAR = "omniplat.reference.kernels:DequantLinear"
_WORDS = ("-hy-", "moe", "gptoss")


def has_experts(entry: Entry) -> bool:
    return any(word in entry.name for word in _WORDS)


def check_layers(entry: Entry) -> None:
    """Every layer of the entry computes what the producer's weights say, with activations left alone."""
    reference = Reference(entry)
    # Where the producer rounded its weights to bf16, so are those of the reference.
    bound = 4e-3 if rounds_to_bf16(entry.name) else 2e-6
    count = 0
    for name, layer in layers_of(entry, activations=False):
        x = rows(layer.experts.spec.in_features)
        assert layer.routes
        with torch.inference_mode():
            assert distance(layer(x), reference(name, x.numpy())) <= bound, name
        count += 1
    assert count == reference.config["num_hidden_layers"]


def check_quantized_activations(entry: Entry) -> None:
    """Quantizing the activations of the entry's layers costs what their format costs."""
    exact = dict(layers_of(entry, activations=False))
    for name, layer in layers_of(entry, activations=True):
        x = rows(layer.experts.spec.in_features)
        with torch.inference_mode():
            error = distance(layer(x), exact[name](x).double().numpy())
        declared = layer.experts.spec.scheme.activation_id
        low, high = {"a16": (0.0, 1e-6), "mxfp4": (0.05, 0.4), "nvfp4": (0.05, 0.3)}.get(declared, (1e-3, 0.08))
        assert low <= error <= high, f"{name}: {error:.2e} with {declared}"


def layers_of(entry: Entry, *, activations: bool) -> Iterator[tuple[str, QuantMoE]]:
    """The layers of an entry by name; with `activations` False inputs are left as they are."""
    planned = make_planned(entry.checkpoint, "cpu")
    if not activations:
        planned = without_activations(planned)
    yield from load_moe_layers(planned, ShardReader(planned.resolutions[0].component.root))


def without_activations(planned: Planned) -> Planned:
    return replace(planned, layers=tuple(_without(item) for item in planned.layers))


def _without(item: PlannedLayer) -> PlannedLayer:
    capability = item.capability
    if capability is not None and capability.op == "linear":
        capability = replace(capability, impl=_LINEAR)
    return replace(item, packed=_in_float(item.packed), capability=capability)


def _in_float(layer: PackedLayer) -> PackedLayer:
    def bare(group: tuple[Part, ...]) -> tuple[Part, ...]:
        modules = (replace(part.module, scheme=part.module.scheme.with_activation(None)) for part in group)
        return tuple(replace(part, module=module) for part, module in zip(group, modules, strict=True))

    spec = replace(layer.spec, scheme=layer.spec.scheme.with_activation(None))
    if spec.moe is not None and spec.moe.w2_scheme is not None:
        spec = replace(spec, moe=replace(spec.moe, w2_scheme=spec.moe.w2_scheme.with_activation(None)))
    w13, w2 = (tuple(bare(group) for group in groups) for groups in (layer.w13, layer.w2))
    return replace(layer, spec=spec, parts=bare(layer.parts), w13=w13, w2=w2)


class Reference:
    """The layers of one entry in float64, activations left alone."""

    def __init__(self, entry: Entry) -> None:
        self.config: dict[str, Any] = json.loads((entry.checkpoint / "config.json").read_text())
        self.golden = entry.goldens()
        stored: dict[str, np.ndarray] = {}
        for shard in entry.checkpoint.glob("*.safetensors"):
            stored |= read_floats(shard.read_bytes())
        self.stored = stored
        planned = make_planned(entry.checkpoint, "cpu")
        self.modules = {module.name: module for item in planned.resolutions for module in item.modules}
        self.reader = ShardReader(planned.resolutions[0].component.root)

    def __call__(self, name: str, x: np.ndarray) -> np.ndarray:
        """What the layer called `name`, such as `model.layers.0.mlp`, makes of the rows `x`."""
        x = x.astype(np.float64)
        kind = self.config["model_type"]
        layer = int(name.split(".")[2])
        router = {"hunyuan_image_3_moe": "gate.wg", "gpt_oss": "router"}.get(kind, "gate")
        logits = x @ self.float(f"{name}.{router}.weight").T
        if kind == "gpt_oss":
            logits = logits + self.float(f"{name}.{router}.bias")
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
        top = self.config["moe_topk"][layer] if "moe_topk" in self.config else self.config["num_experts_per_tok"]
        y = np.zeros_like(x)
        for row, chosen in enumerate(np.argsort(-scores, axis=1)[:, :top]):
            weights = scores[row, chosen]
            if kind in ("hunyuan_image_3_moe", "gpt_oss") or self.config["norm_topk_prob"]:
                weights = weights / weights.sum()
            for expert, weight in zip(chosen, weights, strict=True):
                y[row] += weight * self.expert(name, int(expert), x[row : row + 1])[0]
        return y + self.shared(name, x)

    def expert(self, name: str, expert: int, x: np.ndarray) -> np.ndarray:
        if self.config["model_type"] != "gpt_oss":
            return self.mlp(f"{name}.experts.{expert}", x)
        both = x @ self.weight(f"{name}.experts.gate_up_proj")[expert]
        both = both + self.float(f"{name}.experts.gate_up_proj_bias")[expert]
        gate, up = np.minimum(both[:, ::2], 7.0), np.clip(both[:, 1::2], -7.0, 7.0)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        down: np.ndarray = hidden @ self.weight(f"{name}.experts.down_proj")[expert]
        return down + self.float(f"{name}.experts.down_proj_bias")[expert]

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        if f"{name}.gate_and_up_proj" in self.modules:
            up, gate = np.split(x @ self.weight(f"{name}.gate_and_up_proj").T, 2, axis=1)
        else:
            gate, up = (x @ self.weight(f"{name}.{leaf}_proj").T for leaf in ("gate", "up"))
        y: np.ndarray = (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"{name}.down_proj").T
        return y

    def shared(self, name: str, x: np.ndarray) -> np.ndarray:
        if f"{name}.shared_mlp.down_proj" in self.modules:
            return self.mlp(f"{name}.shared_mlp", x)
        if f"{name}.shared_expert.down_proj" in self.modules:
            gate = x @ self.float(f"{name}.shared_expert_gate.weight").T
            return self.mlp(f"{name}.shared_expert", x) / (1 + np.exp(-gate))
        return np.zeros_like(x)

    def weight(self, module: str) -> np.ndarray:
        """The producer's; where this repository has left it out, what the oracle makes of the stored one. Rows lie as
        on disk, stacks as [E, K, N]."""
        if f"{module}.weight" in self.golden:
            return self.golden[f"{module}.weight"].astype(np.float64)
        found = dequantize(read_canonical(self.modules[module], self.reader))
        return found.swapaxes(-1, -2) if found.ndim == 3 else found

    def float(self, tensor: str) -> np.ndarray:
        return self.stored[tensor].astype(np.float64)


def read_floats(blob: bytes) -> dict[str, np.ndarray]:
    """The bf16, f16 and f32 tensors of a shard."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    floats = {k: v for k, v in header.items() if k != "__metadata__" and v["dtype"] in ("BF16", "F16", "F32")}
    text = json.dumps(floats).encode()
    return read_safetensors(len(text).to_bytes(8, "little") + text + blob[8 + length :])


def distance(found: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found.double().numpy() - expected) / np.linalg.norm(expected))


def rows(hidden: int) -> torch.Tensor:
    """Rows that bf16 represents."""
    x = torch.randn(24, hidden, generator=torch.Generator().manual_seed(0))
    return x.to(torch.bfloat16).to(torch.float32)
