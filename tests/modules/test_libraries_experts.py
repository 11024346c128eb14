"""Mixtures of experts of transformers, with experts in one tensor: quantized online, and filled from checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
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
from omniplat.modules.experts import Gate, experts_form
from omniplat.modules.layers import ModelExperts
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import parse_weight_id
from tests.modules.test_libraries import SIZES, logits, qwen3
from tests.modules.test_libraries_names import library, mixtral

EXPERTS = "model.layers.1.mlp.experts"


def qwen3_moe() -> Any:
    return qwen3(experts=True)


def gpt_oss() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 64}
    config = library().GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    model = library().GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_(std=0.1)
    return model


FORMS = {
    qwen3_moe: (False, False, Gate("silu")),
    mixtral: (False, False, Gate("silu")),
    gpt_oss: (True, True, Gate("swiglu-oai", 7.0, 1.702)),
}


def rounded(stack: torch.Tensor, weight_id: str, *, transposed: bool) -> torch.Tensor:
    """What is left of a stack, in the model's own layout, with every expert rounded by itself."""
    values = stack.detach().transpose(1, 2) if transposed else stack.detach()
    made = oracle.quantize_weight(values.float().numpy(), parse_weight_id(weight_id))
    back = torch.from_numpy(oracle.dequantize(made)).float()
    return back.transpose(1, 2).contiguous() if transposed else back


@pytest.mark.parametrize("build", FORMS)
def test_experts_are_quantized_online(build: Callable[[], Any]) -> None:
    model = build()
    transposed, interleaved, gate = FORMS[build]
    form = experts_form(model.get_submodule(EXPERTS))
    assert (form.transposed, form.interleaved, form.gate) == (transposed, interleaved, gate)
    only_experts = {EXPERTS: {"method": "int4", "group_size": 32}}
    expected = copy.deepcopy(model)
    stack = expected.get_submodule(EXPERTS)
    for leaf in ("gate_up_proj", "down_proj"):
        values = rounded(getattr(stack, leaf), "int4-g32", transposed=transposed)
        getattr(stack, leaf).data.copy_(values)
    before = logits(model)
    plan = omniplat.quantize_model(model, only_experts, "cpu")
    assert plan.layer(EXPERTS).executes == "int4-g32/a16"
    assert isinstance(model.get_submodule(EXPERTS), ModelExperts)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model), before, rtol=1e-4, atol=1e-5)
    omniplat.restore(model)
    assert torch.equal(logits(model), before)
    with torch.device("meta"):
        empty = type(model)(model.config)
    for name, buffer in model.named_buffers():
        empty.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
    omniplat.quantize_model(empty.eval(), "mxfp8", "cpu", weights=model.state_dict())
    omniplat.quantize_model(model, "mxfp8", "cpu")
    assert torch.equal(logits(empty), logits(model))


def test_a_checkpoint_of_gpt_oss_fills_its_experts(tmp_path: Path) -> None:
    model = gpt_oss()
    stored = dict(model.state_dict())
    expected = copy.deepcopy(model)
    for name, parameter in expected.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values = parameter.detach().transpose(1, 2).numpy()
            made = oracle.quantize_weight(values, parse_weight_id("mxfp4"))
            codes = np.asarray(made.tensors["codes"])
            del stored[name]
            stored[f"{name}_blocks"] = to_tensor(codes).reshape(*values.shape[:2], -1, 16)
            stored[f"{name}_scales"] = to_tensor(np.asarray(made.tensors["scale"]))
            parameter.data.copy_(torch.from_numpy(oracle.dequantize(made)).transpose(1, 2))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    omniplat.load_into(model, tmp_path, "cpu")
    assert isinstance(model.get_submodule(EXPERTS), ModelExperts)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-3, atol=1e-4)
    other = gpt_oss()
    other.get_submodule(EXPERTS).limit = 6.5
    with pytest.raises(UsageError, match=r"experts: computes Gate.*limit=6.5.*; the checkpoint's configuration says"):
        omniplat.load_into(other, tmp_path, "cpu")


def test_experts_of_other_forms_are_refused_with_the_reason() -> None:
    transformers = library()
    text = {**SIZES, "num_local_experts": 2, "intermediate_size_mlp": 96, "tie_word_embeddings": False}
    model: nn.Module = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**text, interleave_moe_layer_step=1)
    )
    with pytest.raises(UsageError, match=r"feed_forward.experts is Llama4TextExperts, called with \(hidden_states\)"):
        omniplat.quantize_model(model, "mxfp8", "cpu")
