"""Writes tests/data/blocks/*.safetensors: outputs of whole blocks, from the models' own code on dequantized weights.

    make vllm VLLM_RUN=tests/goldens/make_blocks.py

Qwen3 and Qwen3-MoE run in transformers, HunyuanImage-3 in vllm-omni (its own modules and its own `load_weights`, which
puts fused rows in order). Everything is float32. What these see and a golden of one linear layer cannot: in which
order the rows of a fused tensor lie, which half is the gate, which expert is which.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from omniplat.api import make_planned
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.tools.convert import convert
from tests.goldens.blocks import BLOCKS, DATA, POSITIONS, source_of


def main() -> None:
    torch.set_default_dtype(torch.float32)
    DATA.mkdir(exist_ok=True)
    for name in BLOCKS:
        with TemporaryDirectory() as folder, torch.no_grad():
            plain = Path(folder) / "plain"
            planned = make_planned(source_of(name), "cpu")
            convert(open_checkpoint(source_of(name)), planned.resolutions, plain, "f32")
            x = torch.randn(POSITIONS, 256, generator=torch.Generator().manual_seed(0))
            outputs = hunyuan(plain, x) if name == "hunyuan-image-3" else qwen(plain, x)
        save_file({"x": x, **{key: y.contiguous() for key, y in outputs.items()}}, DATA / f"{name}.safetensors")
        print(name, {key: float(y.norm()) for key, y in outputs.items()})


def qwen(folder: Path, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer 0 of Qwen3 or Qwen3-MoE."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.vllm.engine import tensors_of

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", torch_dtype=torch.float32)
    tensors = dict(tensors_of(folder))
    layer = model.model.layers[0]
    wanted = layer.state_dict()
    loaded = {key.removeprefix("model.layers.0."): t.float() for key, t in tensors.items() if ".layers.0." in key}
    fused: dict[str, torch.Tensor] = {}
    if config.model_type == "qwen3_moe" and "mlp.experts.gate_up_proj" in wanted:
        experts = range(config.num_experts)
        pairs = [[loaded.pop(f"mlp.experts.{e}.{half}_proj.weight") for half in ("gate", "up")] for e in experts]
        fused["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused["mlp.experts.down_proj"] = torch.stack([loaded.pop(f"mlp.experts.{e}.down_proj.weight") for e in experts])
    layer.load_state_dict(loaded | fused, strict=True)
    hidden = x.unsqueeze(0)
    position = torch.arange(POSITIONS).unsqueeze(0)
    rotary = model.model.rotary_emb(hidden, position)
    mask = torch.full((POSITIONS, POSITIONS), float("-inf")).triu(1)[None, None]
    attention = layer.self_attn(hidden, position_embeddings=rotary, attention_mask=mask)[0]
    mlp: Any = layer.mlp(hidden)
    mlp = mlp[0] if isinstance(mlp, tuple) else mlp
    return {"attention": attention[0], "experts" if fused else "mlp": mlp.reshape(POSITIONS, -1)}


def hunyuan(folder: Path, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer 0 of HunyuanImage-3: attention, the experts with their routing, and the shared gated MLP."""
    from tests.vllm.engine import engine, free_port, start
    from tests.vllm.hunyuan import build, load

    start(0, 1, free_port())
    with engine(1):
        model = build(folder, None, 1)
        load(model, folder)
        layer = model.layers[0]
        attention = layer.self_attn(torch.arange(POSITIONS), x.unsqueeze(0))[0]
        shared = layer.mlp.shared_mlp(x)
        return {"attention": attention[0], "mlp": shared, "experts": layer.mlp(x)}


if __name__ == "__main__":
    main()
