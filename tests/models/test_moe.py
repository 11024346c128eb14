"""What configurations say about experts: how many a row chooses, how, and with which activation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import omniplat
from omniplat.layer import MoeSpec, Routing
from omniplat.models.builtin import FAMILIES
from omniplat.models.moe import moe_spec, router_of
from omniplat.packing import family_of
from tests.support.checkpoints import bf16, mxfp4, write_checkpoint

SOFTMAX = Routing("softmax")
RENORMALIZED = Routing("softmax", renormalize=True)


def spec_of(config: dict[str, Any], name: str = "model.layers.1.mlp.experts", *, bias: bool = False) -> MoeSpec:
    router = router_of(family_of(config, FAMILIES), config, name)
    return moe_spec(config, name, router, 8, 64, correction_bias=bias)


@pytest.mark.parametrize(
    ("config", "top_k", "routing"),
    [
        ({"model_type": "qwen2_moe", "num_experts_per_tok": 4, "norm_topk_prob": False}, 4, SOFTMAX),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True}, 8, RENORMALIZED),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 8}, 8, SOFTMAX),
        ({"model_type": "qwen3_next", "num_experts_per_tok": 10}, 10, RENORMALIZED),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, 2, RENORMALIZED),
        ({"model_type": "hunyuan_image_3_moe", "moe_topk": [8, 6]}, 6, RENORMALIZED),
        ({"model_type": "hunyuan_image_3_moe", "moe_topk": 8}, 8, RENORMALIZED),
        ({"model_type": "gpt_oss", "num_experts_per_tok": 4}, 4, RENORMALIZED),
        ({"model_type": "granitemoe", "num_experts_per_tok": 2}, 2, RENORMALIZED),
        ({"model_type": "olmoe", "num_experts_per_tok": 8}, 8, SOFTMAX),
        ({"model_type": "minimax_m2", "num_experts_per_tok": 8}, 8, Routing("sigmoid", renormalize=True)),
        (
            {
                "model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "group_limited_greedy",
                "n_group": 8, "topk_group": 3, "norm_topk_prob": False, "routed_scaling_factor": 16,
                "scoring_func": "softmax",
            },
            6,
            Routing("softmax", 8, 3, "max", scale=16.0),
        ),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "greedy", "n_group": 8},
            6,
            SOFTMAX,
        ),
        (
            {
                "model_type": "kimi_linear", "num_experts_per_token": 8, "moe_renormalize": True,
                "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
                "routed_scaling_factor": 2.446,
            },
            8,
            Routing("sigmoid", group_score="top2", renormalize=True, scale=2.446),
        ),
        ({"model_type": "llama4", "num_experts_per_tok": 1}, 1, Routing(renormalize=True)),
        ({"model_type": "deepseek_v4", "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus"}, 6,
         Routing(renormalize=True)),
        ({"model_type": "never-seen", "num_experts_per_tok": 3}, 3, Routing(renormalize=True)),
        ({"model_type": "qwen3_moe"}, 0, SOFTMAX),
    ],
)  # fmt: skip
def test_routing_of_a_family(config: dict[str, Any], top_k: int, routing: Routing) -> None:
    found = spec_of(config)
    assert (found.top_k, found.routing) == (top_k, routing)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2", "glm4_moe", "dots1"])
def test_sigmoid_in_groups_with_a_correction(kind: str) -> None:
    config = {
        "model_type": kind, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    }  # fmt: skip
    expected = Routing("sigmoid", 8, 4, "top2", True, True, 2.5)
    assert spec_of(config, bias=True).routing == expected


def test_every_part_of_an_omni_model_has_its_own_experts() -> None:
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "audio_config": {"hidden_act": "gelu"},
            "text_config": {"num_experts_per_tok": 8, "norm_topk_prob": True, "hidden_act": "silu"},
        },
        "talker_config": {
            "model_type": "qwen3_omni_moe_talker",
            "text_config": {"num_experts_per_tok": 6, "hidden_act": "gelu_pytorch_tanh"},
        },
    }
    thinker = spec_of(config, "thinker.model.layers.0.mlp.experts")
    talker = spec_of(config, "talker.model.layers.0.mlp.experts")
    assert (thinker.top_k, thinker.activation, thinker.routing) == (8, "silu", RENORMALIZED)
    assert (talker.top_k, talker.activation, talker.routing) == (6, "gelu_tanh", SOFTMAX)


def test_activations_and_their_parameters() -> None:
    plain = spec_of({"model_type": "qwen3_moe", "hidden_act": "silu"})
    assert (plain.activation, plain.limit, plain.alpha) == ("silu", 0.0, 1.0)
    ours = spec_of({"model_type": "gpt_oss", "hidden_act": "silu"})
    assert (ours.activation, ours.limit, ours.alpha) == ("swiglu-oai", 7.0, 1.702)
    told = spec_of({"model_type": "gpt_oss", "swiglu_limit": 5, "swiglu_alpha": 1.5})
    assert (told.limit, told.alpha) == (5.0, 1.5)
    clamped = spec_of({"model_type": "deepseek_v4", "swiglu_limit": 10.0})
    assert (clamped.activation, clamped.limit, clamped.alpha) == ("silu", 10.0, 1.0)
    assert spec_of({"model_type": "minimax_m3", "hidden_act": "swigluoai"}).activation == "swiglu-oai"
    assert spec_of({"model_type": "x", "hidden_act": "tanhish"}).activation == "tanhish"


@pytest.mark.parametrize("value", [True, "8", None, 0, [True]])
def test_what_is_no_count_counts_as_untold(value: object) -> None:
    assert spec_of({"model_type": "qwen3_moe", "num_experts_per_tok": value}).top_k == 0


def test_the_plan_tells_of_router_and_shared_expert(tmp_path: Path) -> None:
    name, tensors = "model.layers.0.mlp", {}
    for expert in range(2):
        for leaf, n, k in (("gate_proj", 64, 128), ("up_proj", 64, 128), ("down_proj", 128, 64)):
            tensors |= mxfp4(f"{name}.experts.{expert}.{leaf}", n, k)
    for leaf, n, k in (("gate_proj", 64, 128), ("up_proj", 64, 128), ("down_proj", 128, 64)):
        tensors[f"{name}.shared_expert.{leaf}.weight"] = bf16(n, k)
    tensors |= {f"{name}.gate.weight": bf16(2, 128), f"{name}.shared_expert_gate.weight": bf16(1, 128)}
    quantization = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32,
        "data_type": "mx_fp",
    }  # fmt: skip
    config: dict[str, Any] = {"model_type": "qwen2_moe", "num_experts_per_tok": 2, "quantization_config": quantization}
    plan = omniplat.plan(write_checkpoint(tmp_path, config, tensors), "cpu")
    details = plan.layer(f"{name}.experts").details["moe"]
    assert details["router"] == "gate"
    assert details["shared"] == [f"shared_expert.{n}_proj" for n in ("gate", "up", "down")] + ["shared_expert_gate"]
    assert (details["top_k"], details["activation"]) == (2, "silu")
    assert details["routing"]["scoring"] == "softmax"
    assert "moe" not in plan.layer(f"{name}.gate").details
    assert omniplat.Plan.from_json(plan.to_json()) == plan

    config["hidden_act"] = "tanhish"
    refused = omniplat.plan(write_checkpoint(tmp_path, config, tensors), "cpu").layer(f"{name}.experts")
    assert refused.status == "unsupported"
    assert {
        "rule": "moe activation",
        "needed": "silu, gelu, gelu_tanh, relu2, swiglu-oai",
        "found": "tanhish",
    } in [trace.rejected for trace in refused.trace]
