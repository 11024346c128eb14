"""Scales of the attention: those that vLLM would drop, by the name that it gives them, are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import Module
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from omniplat.errors import InvalidCheckpointError
from omniplat.formats.kv_cache import cache_scales
from omniplat.integrations.vllm_attention import attention_method

AT = "model.layers.0.self_attn"
DIALECTS = ("compressed-tensors", "modelopt", "inc", "quark", "fp8", "auto_gptq", "auto_awq")
#: Dialects that have an output's scale for one of the attention.
OF_OUTPUTS = ("quark", "fp8")
ANYWHERE = (
    *("q_scale", "k_scale", "v_scale", "attn.q_scale", "attn.k_scale", "attn.prob_scale", "kv_scale"),
    *("k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale", "k_cache.scale", "v_cache.scale"),
)
NOWHERE = ("q_proj.q_scale", "q_cache.scale", "kv_b_proj.k_scale", "o_proj.q_scale", "k_proj.kv_cache_scale")
OUTPUTS = ("q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale", "prob_output_scale")


def method(name: str, dialect: str) -> Any:
    """Of an attention that vLLM's config has no method for, in a checkpoint with one scale."""
    mapper = get_quantization_config(dialect).get_cache_scale_mapper
    native = SimpleNamespace(get_quant_method=lambda layer, prefix: None, get_cache_scale_mapper=mapper)
    layers = SimpleNamespace(cache_scales=cache_scales([f"{AT}.{name}"]))
    return attention_method(Module(), f"{AT}.attn", layers, native)  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [*ANYWHERE, *NOWHERE, *OUTPUTS])
def test_a_scale_is_loaded_or_refused(name: str, dialect: str) -> None:
    if name in ANYWHERE or (name in OUTPUTS and dialect in OF_OUTPUTS):
        assert isinstance(method(name, dialect), BaseKVCacheMethod)
    else:
        with pytest.raises(InvalidCheckpointError, match=f"{AT}.{name}: vLLM does not take this scale"):
            method(name, dialect)
