"""A tiny Qwen-Image pipeline on disk: random parts around a given transformer, all of them of the real classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

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
        model = QwenImageTransformer2DModel(**_TRANSFORMER)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
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
