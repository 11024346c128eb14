"""Whole blocks of a model, computed with omniplat's layers: attention, a gated MLP, experts with their router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

from omniplat.api import make_planned
from omniplat.checkpoint.reader import ShardReader
from omniplat.packed import PackedLayer, Part
from omniplat.planner import Planned
from omniplat.roworder import AS_IS
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.load import load_layer

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "blocks"
POSITIONS = 12

#: Golden -> the checkpoint whose dequantized weights made it, and its blocks.
BLOCKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hunyuan-image-3": ("examples/hunyuan-image3-mxfp4-mxfp8/checkpoint", ("attention", "mlp", "experts")),
    "qwen3": ("tests/data/checkpoints/ar016-qwen3-w4a16/checkpoint", ("attention", "mlp")),
    "qwen3-moe": ("tests/data/checkpoints/lc-qwen3moe-mxfp4/checkpoint", ("attention", "experts")),
}


def source_of(name: str) -> Path:
    return ROOT / BLOCKS[name][0]


@dataclass(frozen=True)
class Loaded:
    """Layer 0 of a checkpoint: quantized layers by the end of their name, and the tensors that are not quantized.

    Activations are left in float32, as they were when the goldens were made.
    """

    layers: Mapping[str, nn.Module]
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]


def load(name: str, *, ordered: bool = True) -> Loaded:
    """`ordered` False ignores in which order fused rows lie on disk, and swaps k with v and gate with up elsewhere."""
    folder = source_of(name)
    planned = make_planned(folder, "cpu")
    head = "model.layers.0."
    layers = {
        item.packed.spec.name.removeprefix(head): _load(
            planned, _in_float(item.packed, ordered), str(item.capability.impl)
        )
        for item in planned.layers
        if item.packed.spec.name.startswith(head) and item.capability is not None
    }
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [key for key in file.keys() if key.startswith(head)]  # noqa: SIM118
            tensors |= {key.removeprefix(head): file.get_tensor(key) for key in names}
    floats = {key: tensor.float() for key, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    return Loaded(layers, floats, json.loads((folder / "config.json").read_text()))


def _load(planned: Planned, layer: PackedLayer, impl: str) -> nn.Module:
    return load_layer(layer, load_kernel(impl), ShardReader(planned.resolutions[0].component.root))


def _in_float(layer: PackedLayer, ordered: bool) -> PackedLayer:
    """The layer with activations that are not quantized."""

    def part_of(part: Part) -> Part:
        module = replace(part.module, scheme=part.module.scheme.with_activation(None))
        return Part(module, part.row_order if ordered else AS_IS)

    def in_order(group: tuple[Part, ...]) -> tuple[Part, ...]:
        parts = tuple(part_of(part) for part in group)
        return parts if ordered else (*parts[:-2], *reversed(parts[-2:]))

    spec = replace(layer.spec, scheme=layer.spec.scheme.with_activation(None))
    if spec.moe is not None and spec.moe.w2_scheme is not None:
        spec = replace(spec, moe=replace(spec.moe, w2_scheme=spec.moe.w2_scheme.with_activation(None)))
    w13, w2 = (tuple(in_order(group) for group in groups) for groups in (layer.w13, layer.w2))
    return replace(layer, spec=spec, parts=in_order(layer.parts), w13=w13, w2=w2)


def attention(loaded: Loaded, x: torch.Tensor) -> torch.Tensor:
    """Causal attention over one sequence, with normalized queries and keys and rotated positions."""
    config, layers = loaded.config, loaded.layers
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["attention_head_dim"]
    fused = layers["self_attn.qkv_proj"](x).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = (t.view(POSITIONS, -1, dim) for t in fused)
    if "self_attn.q_norm.weight" in loaded.tensors:  # Qwen normalizes, then rotates
        q, k = (_norm(t, loaded, f"self_attn.{n}_norm.weight") for t, n in ((q, "q"), (k, "k")))
        q, k = (_rotate(t, float(config.get("rope_theta") or _theta(config))) for t in (q, k))
    else:  # HunyuanImage-3 rotates, then normalizes
        q, k = (_rotate(t, float(config.get("rope_theta") or _theta(config))) for t in (q, k))
        q, k = (_norm(t, loaded, f"self_attn.{n}_layernorm.weight") for t, n in ((q, "query"), (k, "key")))
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    out: torch.Tensor = layers["self_attn.o_proj"](y.transpose(0, 1).reshape(POSITIONS, -1))
    return out


def mlp(loaded: Loaded, x: torch.Tensor) -> torch.Tensor:
    layers = loaded.layers
    prefix = "mlp.shared_mlp." if "mlp.shared_mlp.down_proj" in layers else "mlp."
    fused = next(layers[prefix + leaf] for leaf in ("gate_up_proj", "gate_and_up_proj") if prefix + leaf in layers)
    gate, up = fused(x).chunk(2, dim=-1)
    out: torch.Tensor = layers[f"{prefix}down_proj"](F.silu(gate) * up)
    return out


def experts(loaded: Loaded, x: torch.Tensor) -> torch.Tensor:
    """The routed experts; with HunyuanImage-3's shared MLP, which is one of them for every token."""
    router = next(loaded.tensors[key] for key in ("mlp.gate.weight", "mlp.gate.wg.weight") if key in loaded.tensors)
    top_k = loaded.config.get("num_experts_per_tok") or loaded.config["moe_topk"][0]
    weights, ids = torch.softmax(x @ router.t(), dim=-1).topk(top_k, dim=-1)
    y: torch.Tensor = loaded.layers["mlp.experts"](x, ids, weights / weights.sum(dim=-1, keepdim=True))
    return y + mlp(loaded, x) if "mlp.shared_mlp.down_proj" in loaded.layers else y


def _theta(config: Mapping[str, Any]) -> float:
    return float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0))


def _norm(t: torch.Tensor, loaded: Loaded, name: str) -> torch.Tensor:
    return F.rms_norm(t, t.shape[-1:], loaded.tensors[name], float(loaded.config["rms_norm_eps"]))


def _rotate(t: torch.Tensor, theta: float) -> torch.Tensor:
    half = t.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), frequencies).unsqueeze(1)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = t[..., :half], t[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
