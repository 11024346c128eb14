"""transformers, PEFT and accelerate themselves. Each test is skipped, and says so, where its library is
not installed: `pip install transformers peft accelerate` beside the `dev` extra runs them all."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import omniplat
from omniplat import oracle
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import parse_weight_id

IDS = torch.arange(7)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def qwen3(*, experts: bool = False, tied: bool = False) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    if experts:
        config = transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, tie_word_embeddings=tied
        )
        return transformers.Qwen3MoeForCausalLM(config).eval()
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


class Checkpoint:
    """A model's weights as int8 per channel on disk, weight only, and the values that those codes stand for."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.stored: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
        for name, tensor in model.state_dict().items():
            owner, _, leaf = name.rpartition(".")
            if owner in linears and leaf == "weight":
                self.values[name] = self._quantize(name, tensor)
            elif owner.endswith(".experts"):
                self.values[name] = torch.stack([self._expert(owner, leaf, i, t) for i, t in enumerate(tensor)])
            else:
                self.values[name] = tensor
                if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
                    self.stored[name] = tensor.contiguous()
        scheme = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
        quantization = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
            "ignore": [] if model.config.tie_word_embeddings else ["lm_head", r"re:.*mlp\.gate$"],
        }
        save_file(self.stored, folder / "model.safetensors")
        config = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))

    def _quantize(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = oracle.quantize_weight(tensor.detach().numpy(), parse_weight_id("int8-channel"))
        self.stored[name] = to_tensor(np.asarray(made.tensors["codes"]))
        self.stored[f"{name}_scale"] = to_tensor(np.asarray(made.tensors["scale"]))
        return torch.from_numpy(oracle.dequantize(made)).float()

    def _expert(self, owner: str, leaf: str, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if leaf == "down_proj":
            return self._quantize(f"{owner}.{index}.down_proj.weight", tensor)
        gate, up = tensor.chunk(2)
        parts = (("gate_proj", gate), ("up_proj", up))
        return torch.cat([self._quantize(f"{owner}.{index}.{name}.weight", part) for name, part in parts])


@pytest.mark.parametrize("experts", [False, True])
def test_transformers_models_are_filled(experts: bool, tmp_path: Path) -> None:
    model = qwen3(experts=experts)
    expected = copy.deepcopy(model)
    expected.load_state_dict(Checkpoint(model, tmp_path).values)
    plan = omniplat.load_into(model, tmp_path, "cpu")
    assert isinstance(model.model.layers[1].self_attn.k_proj, ModelLinear)
    assert isinstance(model.model.layers[1].mlp.experts, ModelExperts) == experts if experts else True
    assert plan.summary.unsupported == plan.summary.invalid == 0
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(UsageError, match=r"inv_freq: a buffer on meta"):
        omniplat.load_into(empty, tmp_path, "cpu")


def test_weights_that_a_transformers_model_ties_stay_tied(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = qwen3(tied=True)
    checkpoint = Checkpoint(model, tmp_path)
    expected = copy.deepcopy(model)
    expected.load_state_dict(checkpoint.values)
    with accelerate.init_empty_weights():
        empty = type(model)(model.config).eval()
    omniplat.load_into(empty, tmp_path, "cpu")
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    torch.testing.assert_close(logits(empty), logits(expected), rtol=1e-4, atol=1e-5)
