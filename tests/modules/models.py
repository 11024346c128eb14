"""Small models of transformers and diffusers, built from configurations with seeded random weights, and their inputs.

Widths are multiples of 128, so that every method has whole groups and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

WIDTH = 128
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
#: What all of them read as text: five embeddings.
TEXT = 5


@dataclass(frozen=True)
class Model:
    """`build()` gives a model in evaluation mode; `inputs` are its keyword arguments. `sensitive` fits the linear
    layers that stay in 16 bit, whole names."""

    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], Mapping[str, Any]]
    sensitive: str


def make(name: str) -> tuple[Model, nn.Module]:
    """The model called `name`, built; skipped, saying so, where its library is not installed."""
    model = MODELS[name]
    pytest.importorskip(model.library, reason=f"{model.library} is not installed")
    torch.manual_seed(0)
    return model, model.build().eval()


def run(model: Model, module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The model's output for its inputs, in the dtype in which it comes."""
    with torch.no_grad():
        output = module(**model.inputs(dtype))
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output.sample
    return found


def _noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# --- language models -------------------------------------------------------------------------------------------------

LANGUAGE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def _qwen3() -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LANGUAGE))


def _qwen3_moe() -> nn.Module:
    import transformers

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LANGUAGE, **experts))


def _bert() -> nn.Module:
    import transformers

    sizes = {key: LANGUAGE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    return transformers.BertForTokenClassification(transformers.BertConfig(**sizes, num_attention_heads=4))


def tokens(dtype: torch.dtype) -> Mapping[str, Any]:
    return {"input_ids": torch.arange(7)[None]}


# --- diffusion transformers ------------------------------------------------------------------------------------------


def _qwen_image() -> nn.Module:
    import diffusers

    return diffusers.QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=2, joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12), **HEADS
    )


def qwen_image_inputs(dtype: torch.dtype) -> Mapping[str, Any]:
    return {
        "hidden_states": _noise(1, 6, 64, dtype=dtype),
        "encoder_hidden_states": _noise(1, TEXT, WIDTH, dtype=dtype),
        "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_shapes": [[(1, 2, 3)]],
    }


def wan(**config: Any) -> nn.Module:
    """A transformer of Wan 2.1 or 2.2."""
    import diffusers

    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 32, "ffn_dim": 2 * WIDTH}
    return diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), num_layers=2, **{**HEADS, **sizes, **config})


def wan_inputs(dtype: torch.dtype) -> Mapping[str, Any]:
    return {
        "hidden_states": _noise(1, 4, 2, 8, 8, dtype=dtype),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": _noise(1, TEXT, WIDTH, dtype=dtype),
    }


def _flux() -> nn.Module:
    import diffusers

    return diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, joint_attention_dim=WIDTH, pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12), guidance_embeds=True, **HEADS,
    )  # fmt: skip


def flux_inputs(dtype: torch.dtype) -> Mapping[str, Any]:
    return {
        "hidden_states": _noise(1, 6, 64, dtype=dtype),
        "encoder_hidden_states": _noise(1, TEXT, WIDTH, dtype=dtype),
        "pooled_projections": _noise(1, 64, dtype=dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "guidance": torch.tensor([3.5], dtype=dtype),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


MODELS: dict[str, Model] = {
    "qwen3": Model("transformers", _qwen3, tokens, r"lm_head"),
    "qwen3-moe": Model("transformers", _qwen3_moe, tokens, r"lm_head"),
    "bert": Model("transformers", _bert, tokens, "none"),
    "qwen-image": Model(
        "diffusers", _qwen_image, qwen_image_inputs,
        r"img_in|txt_in|time_text_embed\..*|.*\.(img|txt)_mod\.1|norm_out\.linear|proj_out",
    ),
    "wan": Model("diffusers", wan, wan_inputs, r"condition_embedder\..*|proj_out"),
    "flux": Model(
        "diffusers", _flux, flux_inputs,
        r"x_embedder|context_embedder|time_text_embed\..*|transformer_blocks\.\d\.norm1(_context)?\.linear"
        r"|single_transformer_blocks\.\d\.norm\.linear|norm_out\.linear|proj_out",
    ),
}  # fmt: skip
