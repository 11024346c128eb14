"""vLLM's configs for ModelOpt's checkpoints, which ask omniplat about the diffusion models of vllm-omni.

For language models they are vLLM's own in every respect. vllm-omni names the checkpoint as it makes a diffusion model
(`maybe_update_config` without a model's configuration): then omniplat plans it, and what it takes goes to its own
config. What omniplat refuses is left to vllm-omni only where that runs it by itself.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)

from omniplat.errors import InvalidCheckpointError, OmniplatError, UnsupportedOptionError
from omniplat.integrations.dispatch import ALL, LOGGER, dispatch_mode
from omniplat.integrations.vllm_native import is_asking
from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig, options_of
from omniplat.integrations.vllm_omni_gap import native_gap, quantized_components
from omniplat.integrations.vllm_plan import plan_for_engine

logger = init_logger(LOGGER)

#: By these vllm-omni's loader tells that it has to change the weights of a stock layer on their way.
_SERIALIZED = ("is_checkpoint_fp8_serialized", "is_checkpoint_nvfp4_serialized")


class AskingConfig(QuantizationConfig):  # type: ignore[misc]
    """The part before vLLM's own class. `stock` is that class."""

    stock: type[QuantizationConfig]
    _metadata: dict[str, Any] | None = None
    _own: OmniplatDiffusionConfig | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AskingConfig:
        made: AskingConfig = super().from_config(config)
        made._metadata = dict(config)
        return made

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Raises omniplat's error for a diffusion checkpoint that is broken, and for one that omniplat refuses where it
        was to run all of them or vllm-omni does not run it either."""
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        if hf_config is not None or self._metadata is None or self._own is not None or is_asking():
            return
        mode = dispatch_mode()
        own = OmniplatDiffusionConfig("modelopt", options_of(self._metadata), mode, self.stock_config())
        try:
            own.maybe_update_config(model_name, revision=revision)
        except OmniplatError as error:
            if mode == ALL or _is_broken(error):
                raise
            if problem := self._native_problem(model_name, revision):
                logger.info_once("vllm-omni does not run %s by itself: %s", model_name, problem)
                raise
            logger.warning_once("omniplat leaves %s to vllm-omni: %s", model_name, error.message)
            return
        if own.takes_layers:
            self._own = own
            if own.takes_linears:
                for flag in _SERIALIZED:
                    if hasattr(self, flag):
                        setattr(self, flag, False)

    def stock_config(self) -> QuantizationConfig:
        """vLLM's own config for the same metadata."""
        return self.stock.from_config(dict(self._metadata or {}))

    def _native_problem(self, checkpoint: str, revision: str | None) -> str:
        """Why vllm-omni does not run the checkpoint either; "" where it does, and where nobody can tell because
        omniplat does not know what is stored."""
        try:
            planned = plan_for_engine(checkpoint, revision)
        except OmniplatError:
            return ""
        return native_gap(planned, quantized_components(planned), self.stock_config())

    def get_name(self) -> str:
        name: str = super().get_name() if self._own is None or not self._own.takes_linears else self._own.get_name()
        return name

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if self._own is None:
            return super().get_quant_method(layer, prefix)
        self._own.packed_modules_mapping = self.packed_modules_mapping
        return self._own.get_quant_method(layer, prefix)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self._own is not None:
            self._own.apply_vllm_mapper(hf_to_vllm_mapper)

    @property
    def is_checkpoint_quantized(self) -> bool:
        """vllm-omni's loader asks, to load quantized checkpoints where they are offloaded to."""
        return self._own is not None and self._own.is_checkpoint_quantized


def _is_broken(error: OmniplatError) -> bool:
    """True for what no engine can run rightly, such as a missing tensor; False for what only omniplat does not."""
    return isinstance(error, InvalidCheckpointError) and not isinstance(error, UnsupportedOptionError)


class OmniplatModelOptFp8Config(AskingConfig, ModelOptFp8Config):  # type: ignore[misc]
    stock = ModelOptFp8Config


class OmniplatModelOptNvFp4Config(AskingConfig, ModelOptNvFp4Config):  # type: ignore[misc]
    stock = ModelOptNvFp4Config


class OmniplatModelOptMixedConfig(AskingConfig, ModelOptMixedPrecisionConfig):  # type: ignore[misc]
    stock = ModelOptMixedPrecisionConfig
