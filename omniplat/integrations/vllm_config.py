"""OmniplatConfig: the quantization config by which vLLM asks omniplat about a checkpoint and about every layer of it.

It is imported when the engine starts, whether or not a model is quantized: all but vLLM's base class, which the
engine has loaded by then, is imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from omniplat.integrations.dispatch import LOGGER, METHOD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.model_executor.models.utils import WeightsMapper

    from omniplat.integrations.vllm_names import EngineLayers
    from omniplat.planner import Planned
    from omniplat.runtime.kernel import Workspaces


class OmniplatConfig(QuantizationConfig):  # type: ignore[misc]
    """Dispatches the layers of a checkpoint, or of one component of a pipeline.

    Without a plan it makes its own when the engine names the checkpoint (`maybe_update_config`). `native` is the
    engine's own config for the same metadata; what is not omniplat's, the attention and its cache, is left to it. Where
    it has none, `native_problem` is its error.
    """

    def __init__(
        self,
        planned: Planned | None = None,
        component: str = "",
        *,
        native: QuantizationConfig | None = None,
        native_problem: str = "",
    ) -> None:
        """Raises what stands in the way of loading the plan, and InvalidCheckpointError for what vLLM cannot load."""
        QuantizationConfig.__init__(self)  # of several bases, the one that has no arguments
        self._component = component
        self._native = native
        self._native_problem = native_problem
        self._mappers: list[WeightsMapper] = []
        self._layers: EngineLayers | None = None
        self._workspaces: Workspaces | None = None
        if planned is not None:
            self._use(planned)

    # -- what the engine asks before there is a layer ---------------------------------------------------------

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """None: the plan has asked the device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """`omniplat` where it takes this checkpoint from the engine, None where the engine keeps it."""
        from omniplat.integrations.vllm_claim import claims

        return METHOD if claims(hf_quant_cfg, user_quant, hf_config) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OmniplatConfig:
        """A config that waits for `maybe_update_config`: metadata alone does not tell what is stored."""
        from vllm.logger import init_logger

        from omniplat.integrations.vllm_native import native_config

        native = native_config(config)
        if native.problem:
            init_logger(LOGGER).info_once(
                "vLLM has no config of its own for this checkpoint, whose attention gets vLLM's common method: %s",
                native.problem,
            )
        return cls(native=native.config, native_problem=native.problem)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Plan the checkpoint. Raises what stands in the way of running it, UsageError where nothing is quantized."""
        if self._layers is None:
            from omniplat.errors import UsageError
            from omniplat.integrations.vllm_plan import plan_for_engine

            planned = plan_for_engine(model_name, revision)
            if all(item.layer.status == "unquantized" for item in planned.layers):
                raise UsageError(f"nothing of {model_name} is quantized: there is nothing for omniplat to run")
            self._use(planned)
        if self._native is not None:
            self._native.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    @property
    def kv_cache_scheme(self) -> Any:
        """vLLM's attention asks: what the metadata says of the cache, where it is one of compressed-tensors'."""
        return getattr(self._native, "kv_cache_scheme", None)

    @property
    def native(self) -> QuantizationConfig | None:
        """The engine's own config for the same metadata; None where it has none, which `native_problem` explains."""
        return self._native

    @property
    def native_problem(self) -> str:
        """Why the engine has no config of its own; "" where it has one."""
        return "" if self._native is not None else self._native_problem or "it has no such method"

    # -- names --------------------------------------------------------------------------------------------------

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Nothing is dropped: vLLM's own drops the order of groups (`g_idx`), which act-order needs. Tensors with a dot
        in their name get that of the parameter that stands for them."""
        from vllm.model_executor.models.utils import WeightsMapper

        from omniplat.integrations.vllm_names import parameter_name

        leaves = (leaf for layers in self._all_layers() for leaf in layers.dotted_leaves)
        return WeightsMapper(orig_to_new_suffix={f".{leaf}": f".{parameter_name(leaf)}" for leaf in leaves})

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """The engine's own names for scales of the cache, in the dialect of the checkpoint."""
        return (self._native or QuantizationConfig).get_cache_scale_mapper()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._mappers.append(hf_to_vllm_mapper.get_rename_mapper())
        if self._native is not None:
            self._native.apply_vllm_mapper(hf_to_vllm_mapper)
        self._rename()

    # -- layers -------------------------------------------------------------------------------------------------

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """Raises InvalidCheckpointError for a layer of which the checkpoint has nothing, UsageError for a kind of
        layer that is quantized in the checkpoint and that vLLM cannot hand over."""
        from omniplat.integrations.vllm import method_for

        layers = self.layers
        assert self._workspaces is not None
        return method_for(layer, prefix, layers, self._workspaces, self._native)

    @property
    def layers(self) -> EngineLayers:
        """The layers of the plan by the engine's names. Raises UsageError before there is a plan."""
        if self._layers is None:
            from omniplat.errors import UsageError

            raise UsageError("no checkpoint was planned: the engine did not call maybe_update_config")
        return self._layers

    @property
    def planned(self) -> Planned:
        return self.layers.planned

    def _use(self, planned: Planned) -> None:
        from omniplat.api import require_runnable
        from omniplat.integrations.vllm_names import EngineLayers
        from omniplat.runtime.kernel import Workspaces

        require_runnable(planned.plan)
        self._layers = EngineLayers(planned, self._component, "vllm")
        self._workspaces = Workspaces()
        self._rename()

    def _all_layers(self) -> Iterable[EngineLayers]:
        return () if self._layers is None else (self._layers,)

    def _rename(self) -> None:
        for layers in self._all_layers():
            layers.rename(self._engine_name)

    def _engine_name(self, name: str) -> str | None:
        """The engine's name for a checkpoint's tensor; None for one that it does not load."""
        names = [name]
        for mapper in self._mappers:
            names = mapper.apply_list(names)
        return next(iter(names), None)
