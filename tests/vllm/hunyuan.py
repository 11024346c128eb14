"""Layers of vllm-omni's own HunyuanImage-3, with its own weight loading, on CPU.

Only the softmax of the attention is replaced: vllm-omni has none for CPUs. Projections, norms, rotary embedding,
routing, experts and `load_weights` are its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer as source
from torch import nn
from vllm.distributed import get_pp_group
from vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3 import HunyuanImage3Pipeline

from tests.vllm.engine import tensors_of

MAPPER = HunyuanImage3Pipeline.hf_to_vllm_mapper


class PlainAttention(nn.Module):
    """Causal attention of one sequence; several query heads share one of keys and values."""

    def __init__(self, num_heads: int, num_kv_heads: int, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = num_heads, num_kv_heads, softmax_scale
        self.dim = round(softmax_scale**-2)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.reshape(-1, heads, self.dim) for t, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        y = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=self.scale, enable_gqa=True
        )
        return y.transpose(0, 1).contiguous()


class Layers(source.HunyuanImage3Model):
    """The decoder layers alone, in a model that loads as the whole one does."""

    def __init__(self, config: source.HunyuanImage3Config, quant_config: Any, count: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.quant_config = quant_config
        self.num_redundant_experts = 0
        with mock.patch.multiple(source, Attention=PlainAttention, ImageKVCacheManager=mock.Mock()):
            layers = [source.HunyuanImage3DecoderLayer(config, quant_config, i, f"layers.{i}") for i in range(count)]
        self.layers = nn.ModuleList(layers)


def build(folder: Path, quant_config: Any, count: int) -> Layers:
    """The first `count` layers of the model that `folder` holds, in torch's default dtype, not loaded yet."""
    return Layers(config_of(folder), quant_config, count)


def build_whole(folder: Path, quant_config: Any) -> source.HunyuanImage3Model:
    """The model that `folder` holds, by vllm-omni's own constructor, not loaded yet. The pipeline of one stage is
    vLLM's: vllm-omni's own groups come with a whole engine."""
    replaced = {"Attention": PlainAttention, "ImageKVCacheManager": mock.Mock(), "get_pp_group": get_pp_group}
    with mock.patch.multiple(source, **replaced):
        return source.HunyuanImage3Model(config_of(folder), quant_config, "")


def config_of(folder: Path) -> source.HunyuanImage3Config:
    config = json.loads((folder / "config.json").read_text())
    return source.HunyuanImage3Config(
        **{key: value for key, value in config.items() if key not in ("quantization_config", "vit")}
    )


def load(model: Layers, folder: Path) -> None:
    """Load by vllm-omni's own code, then let every method process its layer."""

    def wanted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(folder):
            if name.startswith(tuple(f"model.layers.{i}." for i in range(len(model.layers)))):
                yield name.removeprefix("model."), tensor

    model.load_weights(wanted())
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
