"""What vllm-omni's own configs do not run of a diffusion checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from omniplat.checkpoint.folder import Component
from omniplat.integrations.vllm_names import installed_family
from omniplat.integrations.vllm_probe import ModelSurface, gap
from omniplat.planner import Planned


def quantized_components(planned: Planned) -> tuple[str, ...]:
    """Names of the components that hold quantized layers, in the order of the checkpoint."""
    found = {item.layer.component for item in planned.layers if item.layer.status != "unquantized"}
    return tuple(item.component.name for item in planned.resolutions if item.component.name in found)


def surface_of(component: Component) -> ModelSurface:
    """What methods may ask of a component's configuration."""
    return ModelSurface(SimpleNamespace(**{"model_type": "", **component.config}))


def native_gap(planned: Planned, components: Iterable[str], native: QuantizationConfig) -> str:
    """Why vllm-omni's own config does not run these components as they are stored; "" where it does."""
    by_name = {item.component.name: item.component for item in planned.resolutions}
    for name in components:
        component = by_name[name]
        asked = [item for item in planned.layers if item.layer.component == name]
        if problem := gap(asked, installed_family(component), native, surface_of(component)):
            return problem
    return ""
