"""Methods by component: names bounded by dots, and None for what stays in 16 bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch.nn import Module
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.models.utils import WeightsMapper
from vllm_omni.quantization import build_quant_config
from vllm_omni.quantization.component_config import ComponentQuantizationConfig

from omniplat.checkpoint.folder import Component
from omniplat.errors import UsageError
from omniplat.integrations.dispatch import LOGGER
from omniplat.integrations.vllm_names import EngineLayers
from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig
from omniplat.integrations.vllm_plan import plan_for_engine
from omniplat.online import DEFAULT

logger = init_logger(LOGGER)

#: What diffusers calls the components of its pipelines that have weights: not every pipeline has all of them.
_COMPONENTS = frozenset(
    {
        *("transformer", "transformer_2", "unet", "controlnet", "vae", "text_encoder", "text_encoder_2"),
        *("text_encoder_3", "image_encoder"),
    }
)


class OmniplatComponentConfig(ComponentQuantizationConfig):  # type: ignore[misc]
    """vllm-omni's own takes `transformer` for a prefix of `transformer_2` and of `transformer_blocks`, and fails for
    linear layers of a component without a method."""

    def __init__(
        self, component_configs: dict[str, QuantizationConfig | None], default_config: QuantizationConfig | None
    ) -> None:
        super().__init__(component_configs, default_config)
        self._stored: dict[str, EngineLayers] = {}

    def resolve(self, prefix: str) -> QuantizationConfig | None:
        """The config of the longest component that `prefix` lies at or below; else that of the part of the checkpoint
        that has a module of this name, as pipelines leave the component's own name out; else the default.

        Raises UsageError where several parts have it and their methods differ.
        """
        parts = prefix.split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in self._components:
                return self._components[name]
        holders = [name for name, layers in self._stored.items() if layers.signature(prefix)]
        configs = [self._components.get(name, self._default) for name in holders] or [self._default]
        if any(config is not configs[0] for config in configs):
            raise UsageError(f"{prefix} is in {', '.join(holders)}: vllm-omni does not tell which, and methods differ")
        return configs[0]

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        config = self.resolve(prefix)
        if config is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return config.get_quant_method(layer, prefix)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """The components' own: vLLM's drops what some dialects need."""
        configs = [config for config in (*self._components.values(), self._default) if config is not None]
        mappers = (config.get_checkpoint_weight_mapper() for config in configs)
        return reduce(or_, mappers, WeightsMapper())

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Plan the checkpoint. Raises UsageError for a component that it does not have."""
        planned = plan_for_engine(model_name, revision)
        self._require_components([item.component for item in planned.resolutions])
        names = [item.component.name for item in planned.resolutions]
        self._stored = {name: EngineLayers(planned, name, "vllm") for name in names}
        for name, config in self._components.items():
            if config is not None and name in names:
                config.maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        if self._default is not None:
            self._default.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    def _require_components(self, stored: Sequence[Component]) -> None:
        """Raises UsageError for a name that is in no path of the checkpoint's tensors, of which engines leave out the
        start. One that pipelines of this kind may have is only said to be absent: the same methods serve all of them.
        """
        paths = [f".{component.name}.{tensor}" for component in stored for tensor in component.tensors]
        for name in self._components:
            if any(f".{name}." in path for path in paths):
                continue
            known = ", ".join(component.name for component in stored if component.name) or "no components"
            if name not in _COMPONENTS:
                raise UsageError(f"components: {name!r} is not in this pipeline, which has {known}")
            logger.warning_once("components: %s is not in this pipeline, which has %s", name, known)


def component_config(spec: Mapping[str, Any]) -> OmniplatComponentConfig:
    """A config from methods, by name or with options, or None, by component; `default` is for all others."""
    configs = {name: build_quant_config(value) for name, value in spec.items()}
    for name, config in configs.items():
        if name != DEFAULT and isinstance(config, OmniplatDiffusionConfig):
            config.limit_to(name)
    default = configs.pop(DEFAULT, None)
    return OmniplatComponentConfig(configs, default)
