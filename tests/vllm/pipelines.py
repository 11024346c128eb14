"""Tiny pipelines on disk, Qwen-Image and Wan: random weights in the real classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, UMT5Config, UMT5EncoderModel

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_TRANSFORMER = {
    "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "in_channels": 64, "joint_attention_dim": 128,
    "num_attention_heads": 4, "num_layers": 2, "out_channels": 16,
}  # fmt: skip


def write_pipeline(folder: Path, transformer: Path | None = None) -> Path:
    """A pipeline in `folder`, with the transformer that `transformer` holds, or a random one in bf16."""
    torch.manual_seed(0)
    folder.mkdir()
    classes = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    index = {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.40.0", **classes}
    (folder / "model_index.json").write_text(json.dumps(index))
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    vocabulary = _write_tokenizer(folder / "tokenizer")
    _text_encoder(vocabulary).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    _vae().to(torch.bfloat16).save_pretrained(folder / "vae")
    if transformer is not None:
        shutil.copytree(transformer, folder / "transformer")
    else:
        model = _randomize(QwenImageTransformer2DModel(**_TRANSFORMER))
        model.to(torch.bfloat16).save_pretrained(folder / "transformer")
    return folder


def _write_tokenizer(folder: Path) -> int:
    """One token for every byte."""
    folder.mkdir()
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + index) for index in range(len(hidden))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(_SPECIAL[1:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocabulary) + len(_SPECIAL)


def _text_encoder(vocabulary: int) -> Qwen2_5_VLForConditionalGeneration:
    text: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocabulary, "max_position_embeddings": 2048,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "rope_theta": 10000.0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def write_wan(folder: Path) -> Path:
    """A Wan 2.2 pipeline: two transformers of the same form, with other weights."""
    torch.manual_seed(0)
    folder.mkdir()
    classes = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.40.0", "boundary_ratio": 0.5, **classes}
    (folder / "model_index.json").write_text(json.dumps(index))
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True).save_pretrained(
        folder / "scheduler"
    )
    vocabulary = _write_tokenizer(folder / "tokenizer")
    text = UMT5Config(
        vocab_size=vocabulary, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, pad_token_id=0, eos_token_id=1
    )
    UMT5EncoderModel(text).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    vae.to(torch.bfloat16).save_pretrained(folder / "vae")
    for name in ("transformer", "transformer_2"):
        model = WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=32, in_channels=16, out_channels=16, text_dim=64, freq_dim=32,
            ffn_dim=256, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        )  # fmt: skip
        _randomize(model).to(torch.bfloat16).save_pretrained(folder / name)
    return folder


def _randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Weights that pass on what they get."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model
