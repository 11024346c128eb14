"""The config by which vllm-omni asks omniplat about the layers of a diffusion model.

vllm-omni makes a config from a method's name before it knows a checkpoint. What the checkpoint holds is read when the
first question comes: quantized components are loaded as they are stored, and the method has to be theirs; the method
is applied to those in 16 bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from omniplat.api import require_method, require_runnable
from omniplat.errors import UsageError
from omniplat.integrations.dispatch import ALL, LOGGER, METHOD
from omniplat.integrations.online_layers import OnlineChoice, as_quantized, choose_online
from omniplat.integrations.vllm import method_for
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_names import EngineLayers
from omniplat.integrations.vllm_omni_gap import quantized_components, surface_of
from omniplat.integrations.vllm_plan import plan_for_engine
from omniplat.integrations.vllm_probe import gap
from omniplat.online import METHODS, ignored_by, parse_method
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.kernel import Workspaces

logger = init_logger(LOGGER)

#: What engines call a dialect that has another name here.
_DIALECTS = {"ascend": "msmodelslim"}

#: Options, and keys of the dialects' metadata, that list what is not quantized.
_EXCLUDING = (
    *("ignored_layers", "modules_to_not_convert", "ignore", "exclude", "exclude_modules", "skip_modules"),
    "llm_int8_skip_modules",
)


def options_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata but for the name of its method: what vllm-omni hands to a builder."""
    return {key: value for key, value in metadata.items() if key not in ("quant_method", "method")}


class OmniplatDiffusionConfig(OmniplatConfig):
    """One method for a pipeline, or for the components that vllm-omni routes to it."""

    def __init__(
        self,
        method: str,
        options: Mapping[str, Any],
        mode: str,
        native: QuantizationConfig | None = None,
        native_problem: str = "",
    ) -> None:
        """`native` is vllm-omni's own config for the same method and options, or `native_problem` its error."""
        super().__init__(native=native, native_problem=native_problem)
        self._method = method
        self._options = dict(options)
        self._mode = mode
        self._components: dict[str, EngineLayers] = {}
        self._online: dict[str, OnlineChoice] = {}
        self._others: tuple[str, ...] = ()
        #: Components of which a linear layer or experts were found by their name.
        self._named: set[str] = set()
        self._own_linears = self._own_experts = True

    def get_name(self) -> str:
        """What the checkpoint's metadata calls its method, which pipelines compare; else what was asked for."""
        for layers in self._components.values():
            metadata = layers.component.config.get("quantization_config")
            if isinstance(metadata, Mapping) and "quant_method" in metadata:
                return str(metadata["quant_method"])
        return self._method

    def __repr__(self) -> str:
        """Models log it. Of metadata that has an entry for every tensor, none."""
        own = [
            what for what, is_own in (("linear layers", self._own_linears), ("experts", self._own_experts)) if is_own
        ]
        native = "none" if self._native is None else type(self._native).__name__
        return f"{type(self).__name__}(method={self._method!r}, mode={self._mode!r}, own={own}, native={native})"

    @property
    def is_checkpoint_quantized(self) -> bool:
        """vllm-omni's loader asks whether weights are of use as they are stored: then a model that is to be offloaded
        is loaded into host memory, and ranks copy one rank's parameters. Neither is possible: a layer is made on the
        device, by every rank from the tensors that come."""
        return bool(self._of_native("is_checkpoint_quantized"))

    @property
    def data_type(self) -> str | None:
        """As `is_checkpoint_quantized`, of AutoRound's configs."""
        return self._of_native("data_type")

    @property
    def takes_linears(self) -> bool:
        """True where linear layers are omniplat's; before a checkpoint is known, nothing says that they are not."""
        return self._own_linears

    @property
    def takes_layers(self) -> bool:
        """True where linear layers or experts are omniplat's."""
        return self._own_linears or self._own_experts

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Plan the checkpoint. Raises what stands in the way of running it, UsageError where the method is not what is
        stored."""
        if self._components:
            return
        self._workspaces = Workspaces()
        planned = plan_for_engine(model_name, revision)
        chosen = self._chosen(planned)
        quantized = quantized_components(planned)
        if not set(quantized).isdisjoint(chosen):
            require_runnable(planned.plan)
            if self._method not in (METHOD, "inc", "auto_round", "modelopt"):
                require_method(planned.plan, _DIALECTS.get(self._method, self._method))
        elif self._method not in METHODS:
            raise UsageError(
                f"{model_name} is not quantized and {self._method} quantizes nothing; known: {', '.join(METHODS)}"
            )
        self._components = {name: EngineLayers(planned, name, "vllm") for name in chosen}
        self._others = tuple(item.component.name for item in planned.resolutions if item.component.name not in chosen)
        self._rename()
        for name, layers in self._components.items():
            # Beside quantized parts, what is not stays as it is where the name stands for what is stored.
            if name not in quantized and self._method in METHODS:
                method = parse_method({"method": self._method, **self._options})
                self._online[name] = choose_online(method, layers)
        if self._mode != ALL:
            self._update_native(model_name)
            self._leave_to_native()

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """As `OmniplatConfig`. A linear layer that has no name in the checkpoint stays as it is where a method is
        applied to others. Raises UsageError for experts that would stay so though nothing says that they are to."""
        if not self._components:
            self._find_checkpoint()
        is_linear, is_experts = isinstance(layer, LinearBase), isinstance(layer, RoutedExperts)
        is_own = (is_linear and self._own_linears) or (is_experts and self._own_experts)
        if not is_own:
            method = self._native_method(layer, prefix)
            if is_experts and method is None and self._own_linears:
                self._require_known_experts(prefix)
            return method
        component, name = self._locate(prefix)
        layers, online = self._components[component], self._online.get(component)
        if is_experts and layers.experts(name) is None:
            self._require_known_experts(prefix)
            return None
        if online is not None and not layers.signature(name):
            logger.warning_once("%s has no name in the checkpoint: it is not quantized", prefix)
            return UnnamedLinearMethod(self, component, prefix)
        self._named.add(component)
        assert self._workspaces is not None
        return method_for(layer, name, layers, self._workspaces, self._native, online)

    def require_named_layers(self, component: str, prefix: str) -> None:
        """Raises UsageError where no layer that was built has its name in the component, as `prefix` has none: the
        method would quantize nothing."""
        if component not in self._named:
            stored = next((item.layer.name for item in self._components[component].planned_layers), "no layer")
            raise UsageError(
                f"{self._method} quantizes nothing of {component or 'the model'}: none of its layers has the name of "
                f"one in the checkpoint, where {stored} is and {prefix} is not"
            )

    def __getattr__(self, name: str) -> Any:
        """What only vllm-omni's own config has, such as options for some steps of a pipeline, which models read."""
        native = self.__dict__.get("_native")
        if native is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(native, name)

    def _of_native(self, name: str) -> Any | None:
        """What vllm-omni's own config says of layers, which holds where they are its own."""
        return None if self.takes_layers else getattr(self._native, name, None)

    def _native_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if self._native is None:
            return None
        self._native.packed_modules_mapping = self.packed_modules_mapping
        return self._native.get_quant_method(layer, prefix)

    def _all_layers(self) -> Iterable[EngineLayers]:
        return self._components.values()

    def limit_to(self, component: str) -> None:
        """Be the method of one component only."""
        self._component = component

    # -- components ---------------------------------------------------------------------------------------------

    def _find_checkpoint(self) -> None:
        """Some pipelines make configs anew while they build their models: vllm-omni says then which model that is."""
        from vllm_omni.diffusion.config import get_current_diffusion_config_or_none

        current = get_current_diffusion_config_or_none()
        if current is None or not current.model:
            raise UsageError("no checkpoint was planned: vllm-omni did not call maybe_update_config")
        self.maybe_update_config(str(current.model))

    def _chosen(self, planned: Planned) -> tuple[str, ...]:
        """The components that the method is for: its own one, those with this metadata, or all transformers."""
        metadata = {
            item.component.name: item.component.config.get("quantization_config") for item in planned.resolutions
        }
        if self._component in metadata:
            return (self._component,)
        same = tuple(
            name
            for name, found in metadata.items()
            if isinstance(found, Mapping) and self._options and options_of(found) == self._options
        )
        transformers = tuple(name for name in metadata if name == "" or name.startswith(("transformer", "unet")))
        return same or transformers or tuple(metadata)

    def _locate(self, prefix: str) -> tuple[str, str]:
        """The component that an engine's module belongs to, and its name there.

        Pipelines with several transformers give their modules the same names: that is enough where the same is
        stored in all of them. Raises UsageError where it is not.
        """
        for component in self._components:
            if component and prefix.startswith(component + "."):
                return component, prefix.removeprefix(component + ".")
        found = {name: layers.signature(prefix) for name, layers in self._components.items()}
        known = {name: signature for name, signature in found.items() if signature}
        if len(set(known.values())) > 1:
            raise UsageError(
                f"{prefix} is stored differently in {', '.join(known)}: vllm-omni does not say which is meant"
            )
        return next(iter(known or found)), prefix

    def _require_known_experts(self, prefix: str) -> None:
        """Raises UsageError for experts that the plan does not have, and that nothing says are to stay."""
        if prefix.startswith(tuple(f"{name}." for name in self._others if name)):
            return
        component, name = self._locate(prefix)
        layers = self._components[component]
        if layers.experts(name) is not None or self._is_excluded(name, layers, self._online.get(component)):
            return
        raise UsageError(
            f"{prefix}: no experts of this name are recognised in the checkpoint: they would stay unquantized beside "
            f"the linear layers of {self._method}. To have that, name them in ignored_layers"
        )

    def _is_excluded(self, name: str, layers: EngineLayers, online: OnlineChoice | None) -> bool:
        """Whether experts without a name in the plan are to stay: an entry of the metadata or the options names them,
        or all experts that the plan has stay."""
        metadata = layers.component.config.get("quantization_config")
        lists = [
            fields.get(key)
            for fields in (self._options, metadata if isinstance(metadata, Mapping) else {})
            for key in _EXCLUDING
        ]
        entries = [entry for found in lists if isinstance(found, (list, tuple)) for entry in found]
        prefix = f"{layers.component.name}." if layers.component.name else ""
        if any(ignored_by(str(entry).removeprefix(prefix), [name], layers.family.parts_of) for entry in entries):
            return True
        experts = [item for item in layers.planned_layers if item.layer.op == "moe"]
        stay = (item.layer.status == "unquantized" and not (online and online.takes(item)) for item in experts)
        return bool(experts) and all(stay)

    # -- the engine's own path ----------------------------------------------------------------------------------

    def _update_native(self, model_name: str) -> None:
        """The engine's own config reads the checkpoint too: vllm-ascend's finds its metadata beside the weights."""
        if self._native is None:
            return
        try:
            self._native.maybe_update_config(model_name)
        except Exception as error:  # whatever it is, it is how the engine fails for this checkpoint
            self._native, self._native_problem = None, f"{type(error).__name__}: {error}"

    def _leave_to_native(self) -> None:
        """Keep what vllm-omni does not run by itself, linear layers and experts apart."""
        linear, experts = self._gap("linear"), self._gap("moe")
        self._own_linears, self._own_experts = bool(linear), bool(experts)
        for problem, what in ((linear, "linear layers"), (experts, "experts")):
            if problem:
                logger.info_once("omniplat runs the %s, which vllm-omni does not: %s", what, problem)
        if not linear and not experts:
            logger.info_once("omniplat leaves the model to vllm-omni's own %s", self._method)

    def _gap(self, op: str) -> str:
        for name, layers in self._components.items():
            asked = [item for item in layers.planned_layers if item.layer.op == op]
            choice = self._online.get(name)
            if choice is not None:
                asked = [_quantized(item, choice) for item in asked if choice.takes(item)]
            if not any(not item.packed.spec.scheme.is_unquantized for item in asked):
                continue
            if self._native is None:
                return self.native_problem
            if problem := gap(asked, layers.family, self._native, surface_of(layers.component)):
                return problem
        return ""


def _quantized(item: PlannedLayer, choice: OnlineChoice) -> PlannedLayer:
    return PlannedLayer(item.layer, as_quantized(item.packed, choice.scheme), item.capability)


class UnnamedLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer that a method leaves as it is because the checkpoint has none of its name. Once all layers are
    built, it raises UsageError where that holds for all of them."""

    def __init__(self, config: OmniplatDiffusionConfig, component: str, prefix: str) -> None:
        super().__init__()
        self._config, self._component, self._prefix = config, component, prefix

    def process_weights_after_loading(self, layer: Module) -> None:
        self._config.require_named_layers(self._component, self._prefix)
        super().process_weights_after_loading(layer)
