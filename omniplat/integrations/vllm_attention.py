"""Attention layers of a checkpoint that omniplat runs: their scales and their cache are the engine's."""

from __future__ import annotations

from torch.nn import Module
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from omniplat.errors import InvalidCheckpointError
from omniplat.integrations.vllm_names import EngineLayers

#: Parameters of vLLM's attention that hold scales.
_PARAMETERS = (".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point")


def attention_method(
    layer: Module, prefix: str, layers: EngineLayers, native: QuantizationConfig | None
) -> QuantizeMethodBase | None:
    """vLLM's own method: that of its config for this metadata, else its common one where scales are stored.

    vLLM's loader drops scales of an attention that has no method, without a word: none is None here while the
    checkpoint has scales. Raises InvalidCheckpointError for scales under names that vLLM does not take.
    """
    method = native.get_quant_method(layer, prefix) if native is not None else None
    scales = layers.cache_scales
    mapper = (native or QuantizationConfig).get_cache_scale_mapper()
    for name in scales:
        if not all(_is_parameter(mapped) for mapped in mapper.apply_list([name])):
            raise InvalidCheckpointError("vLLM does not take this scale of the KV cache by its name", key=name)
    if not scales or isinstance(method, BaseKVCacheMethod):
        return method
    return BaseKVCacheMethod(native)


def _is_parameter(name: str) -> bool:
    """Whether vLLM's name for a scale is one of an attention's: of a projection's, it only moves the end."""
    return name.endswith(_PARAMETERS) and "_proj." not in name
