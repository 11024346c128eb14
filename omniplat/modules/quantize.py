"""`quantize_model` and `restore`: the linear layers and experts of a model in another scheme, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from omniplat.api import make_target, require_runnable, require_torch, runtime_device
from omniplat.canonical import CanonicalWeight
from omniplat.device import Device
from omniplat.document import Plan, PlanCheckpoint
from omniplat.errors import BackendNotInstalledError, UsageError
from omniplat.modules.arrivals import Arrivals, Arriving, ArrivingExperts, ArrivingLinear
from omniplat.modules.calibrate import calibrated_scales
from omniplat.modules.experts import experts_form, holds_stacks
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.modules.offload import Offload
from omniplat.modules.online_plan import advice_findings, planned_layer
from omniplat.modules.places import Place, require_none
from omniplat.modules.slots import Slots
from omniplat.modules.sources import Source, arriving_tensors
from omniplat.modules.survey import Survey, Verdict, all_places, components_of
from omniplat.online import parse_routing
from omniplat.planner import PlannedLayer, plan_layers
from omniplat.portable.ahead import TOKENS, compile_kernels
from omniplat.portable.round_weight import rounding_on
from omniplat.registry import default_registry, is_installed
from omniplat.runtime.kernel import LinearKernel, Workspaces, load_kernel
from omniplat.runtime.memory import release_freed
from omniplat.runtime.online import OnlineExperts, OnlineLinear, Rounding
from omniplat.runtime.tensors import to_array
from omniplat.scheme import Scheme

_BITSANDBYTES_BLOCK = 64


def quantize_model(
    model: object,
    method: str | Mapping[str, Any] | None,
    device: str | Device | None = None,
    *,
    weights: Source | None = None,
    key_mapping: Mapping[str, str] | None = None,
    calibration: Iterable[object] | None = None,
    offload: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    restorable: bool = True,
    compile_for: Iterable[int] | None = None,
) -> Plan:
    """Quantize the linear layers and stacked experts of `model`, an `nn.Module` or a pipeline with `components`.

    `method` is a name, an object with options, or an object that routes components (`omniplat.online`). The plan says
    for every layer what runs it, or why it stays. A model with quantized layers moves to the planned device as a whole;
    a pipeline's components without any stay where they are.

    `weights` fills a model that may be on `meta`: a folder in safetensors, a state dict, or pairs of name and tensor,
    in any order. Each layer is quantized as soon as its tensors are there, and they are let go of: memory peaks at the
    final size plus the largest layer. `key_mapping` renames what arrives, as in `load_into`. Without `weights` layers
    are quantized where they stand, and with `restorable` the original ones are kept for `restore`, with their memory.

    `offload` is where a finished layer goes: "cpu", or a folder of files that are mapped; the model then moves nowhere.
    `calibration` are inputs, each a tensor, a tuple of arguments or a mapping of keywords, with which the model is
    called for static scales of activations: the largest magnitude that a layer's input has, over 448. `compile_for` is
    as in `omniplat.load`, for layers that stay on the device; a kernel that cannot be compiled raises BackendLoadError
    at the very end.

    Raises before anything of the model changes: UsageError for methods, options and patterns that mean nothing here,
    for weights that do not fit, and against known advice; UnsupportedCombinationError; BackendNotInstalledError;
    InvalidCheckpointError for weights that are not finite or not in 16 or 32 bit.
    """
    require_torch()
    registry = default_registry()
    routing = parse_routing(method, calibrated=calibration is not None)
    survey = Survey(model, routing, registry, arriving=weights is not None, calibrated=calibration is not None)
    verdicts = survey.verdicts()
    if any(v.method is not None and v.method.name == "bitsandbytes" for v in verdicts):
        _require_bitsandbytes()
    target = make_target(device, backend=backend, allow=allow, prefer=prefer, registry=registry, runs=True)
    findings = advice_findings(verdicts, allowed="model-advice" in target.policy.allow)
    layers = [planned_layer(verdict) for verdict in verdicts]
    planned = plan_layers(PlanCheckpoint(f"<{type(model).__name__}>", ("online",), ("",)), layers, target, findings)
    require_runnable(planned.plan)
    quantized = [
        (item, verdict) for item, verdict in zip(planned.layers, verdicts, strict=True) if verdict.method is not None
    ]
    scales = _input_scales(model, [verdict for _, verdict in quantized], calibration, arriving=weights is not None)
    where = runtime_device(planned)
    making = _Making(quantized, scales, where, Offload(offload) if offload is not None else None)
    if weights is None:
        making.from_model(keep=restorable)
    else:
        making.from_weights(model, survey, weights, key_mapping)
    if offload is None:
        _follow(model, where)
        modules = (place.module for place in all_places(model).values())
        made = [module for module in modules if isinstance(module, (ModelLinear, ModelExperts))]
        compile_kernels(made, TOKENS if compile_for is None else compile_for)
    return planned.plan


def restore(model: object) -> None:
    """Put back the layers that `quantize_model` replaced: the same modules with the same values in the same dtype, in
    the mode and on the device that the quantized ones have. What else has moved to the device stays there.

    Raises UsageError, and changes nothing, when there are none, they were not kept, or accelerate has hooks on them.
    """
    replaced = [
        (place, place.module)
        for place in all_places(model).values()
        if isinstance(place.module, (ModelLinear, ModelExperts))
    ]
    if not replaced:
        raise UsageError("nothing to restore: the model has no layer that was quantized online")
    gone = [place.name for place, layer in replaced if not layer.original]
    if gone:
        raise UsageError(f"cannot be restored, the original layers were not kept: {', '.join(gone[:3])} ({len(gone)})")
    hooked = [place.name for place, layer in replaced if hasattr(layer, "_hf_hook")]
    if hooked:
        raise UsageError(f"{hooked[0]} has a hook of accelerate: call remove_hook_from_submodules before restoring")
    for place, layer in replaced:
        device = next((buffer.device for buffer in layer.buffers()), torch.device("cpu"))
        place.put(layer.original[0].to(device).train(layer.training))


def _follow(model: object, device: torch.device) -> None:
    """Move to `device` what has quantized layers there. A model with something on meta stays: part of it is offloaded,
    and its hooks know where it runs."""
    for root in components_of(model).values():
        is_quantized = any(isinstance(module, (ModelLinear, ModelExperts)) for module in root.modules())
        if is_quantized and not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
            root.to(device)


class _Making:
    """One call of `quantize_model` after planning: layers are made, then put into the model all at once."""

    def __init__(
        self,
        quantized: Sequence[tuple[PlannedLayer, Verdict]],
        scales: Mapping[str, float],
        device: torch.device,
        offload: Offload | None,
    ) -> None:
        self._quantized = quantized
        self._scales = scales
        self._device = device
        self._offload = offload
        self._workspaces = Workspaces()
        self._made: dict[str, ModelLinear | ModelExperts] = {}

    def from_model(self, *, keep: bool) -> None:
        for item, verdict in self._quantized:
            layer = self._arriving(item, verdict)
            for leaf, tensor in verdict.place.module._parameters.items():
                if tensor is not None:
                    layer.take(leaf, tensor)
            self._finish(verdict.name, layer)
            release_freed()
        for _, verdict in self._quantized:
            self._put(verdict, keep=keep)

    def from_weights(
        self, model: object, survey: Survey, weights: Source, key_mapping: Mapping[str, str] | None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError("weights are for one model: quantize the components of a pipeline one by one")
        layers = {verdict.name: self._arriving(item, verdict) for item, verdict in self._quantized}
        slots = Slots(model, [verdict.place for _, verdict in self._quantized])
        stacks = {
            name: experts_form(place.module)
            for name, place in survey.places.items()
            if name not in layers and holds_stacks(place.module)
        }
        arrivals = Arrivals(layers, slots, stacks, self._device, self._finish)
        for name, tensor in arriving_tensors(weights, model, survey.places, key_mapping):
            is_finished = arrivals.take(name, tensor)
            del tensor  # not to be held while memory is given back and the next one is made
            if is_finished:
                release_freed()
        slots.tie(arrivals.values)
        require_none("model and weights do not fit", arrivals.problems())
        for _, verdict in self._quantized:
            self._put(verdict, keep=False)
        slots.fill(arrivals.values, self._device)

    def _arriving(self, item: PlannedLayer, verdict: Verdict) -> Arriving:
        assert verdict.method is not None
        kernel, spec = load_kernel(item.impl), item.packed.spec
        rounding = rounding_on(self._device)
        if verdict.method.name == "bitsandbytes":
            rounding = _by_bitsandbytes(verdict.method.compress_statistics)
        if isinstance(kernel, LinearKernel):
            return ArrivingLinear(OnlineLinear(spec, kernel, rounding, input_scale=self._scales.get(verdict.name)))
        assert verdict.form is not None
        return ArrivingExperts(OnlineExperts(spec, kernel, rounding), verdict.form)

    def _finish(self, name: str, layer: Arriving) -> None:
        made = layer.finish(self._device, self._workspaces)
        if self._offload is not None:
            self._offload.move(name, made)
        self._made[name] = made

    def _put(self, verdict: Verdict, *, keep: bool) -> None:
        made, place = self._made[verdict.name], verdict.place
        if keep:
            made.original = (place.module,)
        place.put(made.train(place.module.training))


def _input_scales(
    model: object, verdicts: Sequence[Verdict], calibration: Iterable[object] | None, *, arriving: bool
) -> dict[str, float]:
    """Static scales of inputs by layer: those that the method gives, and for the others what calibration finds."""
    static = [verdict for verdict in verdicts if verdict.method is not None and verdict.method.is_static]
    given = {
        verdict.name: verdict.method.input_scales[verdict.local]
        for verdict in static
        if verdict.method is not None and verdict.local in verdict.method.input_scales
    }
    if calibration is None:
        return given
    if not static:
        raise UsageError("calibration is for static activations, and no method here has those")
    if arriving:
        raise UsageError("calibration runs the model, and its weights are only arriving: give input_scales instead")
    places: dict[str, Place] = {verdict.name: verdict.place for verdict in static if verdict.name not in given}
    return given | calibrated_scales(model, places, calibration)


def _require_bitsandbytes() -> None:
    if not is_installed("bitsandbytes"):
        raise BackendNotInstalledError("bitsandbytes", "bitsandbytes", "pip install bitsandbytes", kind="method")


def _by_bitsandbytes(compress_statistics: bool) -> Rounding:
    """bitsandbytes' own rounding; with `compress_statistics` it quantizes the scales too."""
    from bitsandbytes import functional

    def rounding(weight: torch.Tensor, scheme: Scheme) -> Iterator[tuple[int, CanonicalWeight]]:
        n, k = weight.shape
        kind = "nf4" if scheme.weight.element == "nf4" else "fp4"
        packed, state = functional.quantize_4bit(
            weight.cpu().float(),
            blocksize=_BITSANDBYTES_BLOCK,
            compress_statistics=compress_statistics,
            quant_type=kind,
        )
        absmax = state.absmax
        if state.nested:
            absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
        stored = to_array(packed).view(np.uint8).reshape(n, k // 2)
        codes = ((stored & 15) << 4) | (stored >> 4)  # the even index is the high nibble there, the low one here
        scale = to_array(absmax).astype(np.float32).reshape(n, k // _BITSANDBYTES_BLOCK)
        yield 0, CanonicalWeight(scheme, n, k, {"codes": codes, "scale": scale})

    return rounding
