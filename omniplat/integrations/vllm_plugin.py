"""Entry points by which vLLM and vllm-omni find omniplat. They register, and import nothing that the engine has not."""

from __future__ import annotations

from omniplat.integrations.dispatch import METHOD, OFF, dispatch_mode


def register() -> None:
    """`vllm.general_plugins`: called in every process of the engine, any number of times.

    Raises UsageError for an unknown value of OMNIPLAT_DISPATCH.
    """
    if dispatch_mode() == OFF:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from omniplat.integrations.vllm_config import OmniplatConfig

    register_quantization_config(METHOD)(OmniplatConfig)
