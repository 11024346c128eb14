"""Plans for the device that vLLM runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

from vllm.platforms import current_platform

from omniplat.api import make_planned, make_target, require_runnable
from omniplat.document import PlanCheckpoint
from omniplat.errors import BackendUnavailableError, UsageError
from omniplat.packed import PackedLayer
from omniplat.planner import Planned, PlannedLayer, Target, plan_layers
from omniplat.preflight import KnownSpans, Scan

#: Types of torch devices by the kinds of devices here, where they are called differently.
_KINDS = {"cpu": "cpu", "cuda": "cuda", "xpu": "xpu", "npu": "npu"}


def engine_device() -> str:
    """The kind of device that this vLLM is built for. Raises UsageError for one that omniplat does not know."""
    if current_platform.is_rocm():
        return "rocm"
    kind = _KINDS.get(current_platform.device_type)
    if kind is None:
        raise UsageError(f"vLLM runs on {current_platform.device_type!r}; known: {', '.join((*_KINDS, 'rocm'))}")
    return kind


def plan_for_engine(checkpoint: str, revision: str | None = None) -> Planned:
    """The plan of a folder or of an id of the Hub, as vLLM's loader can deliver it. What the scales in a folder
    forbid is refused. Raises as `omniplat.plan` does."""
    scan: Scan = "needed" if os.path.lexists(checkpoint) else "none"
    return make_planned(checkpoint, engine_device(), engine="vllm", revision=revision, scan=scan)


def plan_for_rank(layer: PackedLayer, spans: Mapping[str, int] | None = None) -> PlannedLayer:
    """The kernel for a layer of the sizes that this rank holds; `spans` are those of the whole layer's scales, where a
    plan has found them. Raises UnsupportedCombinationError where none is, and
    BackendUnavailableError for one that is only planned on."""
    source = PlanCheckpoint(layer.spec.name, (), (layer.spec.component,))
    planned = plan_layers(source, [layer], _target(), scales=KnownSpans(spans or {}))
    require_runnable(planned.plan)
    (found,) = planned.layers
    if found.capability is None or not found.capability.impl:
        raise BackendUnavailableError(
            str(found.layer.backend), f"{layer.spec.name} has a kernel that is only planned on"
        )
    return found


@cache
def _target() -> Target:
    """The device of this process, which does not change."""
    return make_target(engine_device())
