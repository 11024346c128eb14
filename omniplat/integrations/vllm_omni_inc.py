"""The config of quantized checkpoints in vllm-omni.

vllm-omni asks modulation and norm layers for their methods only where the config is one of AutoRound's: those alone,
it takes for stored. omniplat knows what is stored in every dialect, so this config is one of them.
"""

from __future__ import annotations

from vllm_omni.quantization.inc_config import OmniINCConfig

from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig


class OmniplatStoredConfig(OmniplatDiffusionConfig, OmniINCConfig):  # type: ignore[misc]
    """Nothing of AutoRound's own config is used: every method that vllm-omni calls comes from the first base."""

    def __init__(self, *args: object, **options: object) -> None:
        OmniplatDiffusionConfig.__init__(self, *args, **options)  # type: ignore[arg-type]
