"""Plans for the device that vLLM runs on."""

from __future__ import annotations

from vllm.platforms import current_platform

from omniplat.api import make_planned
from omniplat.errors import UsageError
from omniplat.planner import Planned

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
    """The plan of a folder or of an id of the Hub, as vLLM's loader can deliver it. Raises as `omniplat.plan` does."""
    return make_planned(checkpoint, engine_device(), engine="vllm", revision=revision)
