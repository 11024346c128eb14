"""The config of quantized checkpoints in vllm-omni.

vllm-omni asks modulation and norm layers for their methods only where the config is one of AutoRound's: those alone,
it takes for stored. omniplat knows what is stored in every dialect, so this config is one of them.
"""

from __future__ import annotations

from vllm_omni.quantization.inc_config import OmniINCConfig

from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig


class OmniplatStoredConfig(OmniplatDiffusionConfig, OmniINCConfig):  # type: ignore[misc]
    """Nothing of AutoRound's own config is used, nor are its fields there: every method and every property that
    vllm-omni reads comes from the first base, or from here."""

    def __init__(self, *args: object, **options: object) -> None:
        OmniplatDiffusionConfig.__init__(self, *args, **options)  # type: ignore[arg-type]

    @property
    def is_mxfp(self) -> bool:
        """Whether AutoRound's own methods would run MX formats: not those of layers that are omniplat's."""
        return bool(self._of_native("is_mxfp"))

    @property
    def is_mxfp8(self) -> bool:
        """As `is_mxfp`."""
        return bool(self._of_native("is_mxfp8"))
