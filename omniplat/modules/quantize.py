"""`quantize_model` and `restore`: the linear layers of a model in another scheme, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from omniplat import oracle
from omniplat.api import make_target, require_runnable, require_torch
from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.device import Device
from omniplat.document import Plan, PlanCheckpoint
from omniplat.errors import BackendNotInstalledError, BackendUnavailableError, UsageError
from omniplat.findings import Finding, finding
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec
from omniplat.models.advice import refusals
from omniplat.modules.layers import ModelLinear
from omniplat.modules.places import Place
from omniplat.modules.survey import Survey, Verdict, all_places
from omniplat.online import Method, parse_routing
from omniplat.packed import PackedLayer, Part
from omniplat.planner import PlannedLayer, plan_layers
from omniplat.registry import default_registry, is_installed
from omniplat.runtime.kernel import LinearKernel, Workspaces, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import DTYPES, device_of, to_array, to_torch
from omniplat.scheme import UNQUANTIZED, Scheme, TensorQuant

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITSANDBYTES_BLOCK = 64


def quantize_model(
    model: object,
    method: str | Mapping[str, Any] | None,
    device: str | Device | None = None,
    *,
    backend: str | None = None,
    allow: Iterable[str] = (),
    prefer: str | None = None,
    restorable: bool = True,
) -> Plan:
    """Quantize the linear layers of `model`, an `nn.Module` or a pipeline with `components`, where they stand.

    `method` is a name, an object with options, or an object that routes components (`omniplat.online`). The plan says
    for every linear layer what runs it, or why it stays. Quantized layers go to the planned device; the rest of the
    model stays where it is. With `restorable` the original layers are kept for `restore`, and so is their memory.

    Raises before anything of the model changes: UsageError for methods, options and patterns that mean nothing here,
    and against known advice; UnsupportedCombinationError; BackendNotInstalledError.
    """
    require_torch()
    registry = default_registry()
    survey = Survey(model, parse_routing(method), registry)
    verdicts = survey.verdicts()
    if any(v.method is not None and v.method.name == "bitsandbytes" for v in verdicts):
        _require_bitsandbytes()
    target = make_target(device, backend=backend, allow=allow, prefer=prefer, registry=registry)
    layers = [_layer_of(name, verdict) for name, verdict in zip(_names(survey, verdicts), verdicts, strict=True)]
    findings = _findings(verdicts, allowed="model-advice" in target.policy.allow)
    planned = plan_layers(PlanCheckpoint(f"<{type(model).__name__}>", ("online",), ("",)), layers, target, findings)
    require_runnable(planned.plan)
    where = device_of(target.device)
    workspaces = Workspaces()
    made = [
        (verdict.place, _quantized(item, verdict, where, workspaces))
        for item, verdict in zip(planned.layers, verdicts, strict=True)
        if verdict.method is not None
    ]
    for place, layer in made:
        assert isinstance(place.module, nn.Linear)
        layer.train(place.module.training)
        if restorable:
            layer.original = (place.module,)
        place.put(layer)
    return planned.plan


def restore(model: object) -> None:
    """Put back the layers that `quantize_model` replaced, on the device where the quantized ones are.

    Raises UsageError, and changes nothing, when there are none or they were not kept.
    """
    replaced = [place for place in all_places(model).values() if isinstance(place.module, ModelLinear)]
    if not replaced:
        raise UsageError("nothing to restore: the model has no layer that was quantized online")
    gone = [place.name for place in replaced if not _original(place)]
    if gone:
        raise UsageError(f"cannot be restored, the original layers were not kept: {', '.join(gone[:3])} ({len(gone)})")
    for place in replaced:
        device = next((buffer.device for buffer in place.module.buffers()), torch.device("cpu"))
        place.put(_original(place)[0].to(device))


def _original(place: Place) -> tuple[nn.Linear, ...]:
    assert isinstance(place.module, ModelLinear)
    return place.module.original


def _names(survey: Survey, verdicts: list[Verdict]) -> list[str]:
    by_place = {id(place): name for name, place in survey.places.items()}
    return [by_place[id(verdict.place)] for verdict in verdicts]


# --- planning -------------------------------------------------------------------------------------------------------


def _layer_of(name: str, verdict: Verdict) -> PackedLayer:
    """The layer as planning knows it: what it will store, and what decided that."""
    linear, method = verdict.place.module, verdict.method
    assert isinstance(linear, nn.Linear)
    scheme = Scheme(method.weight, method.activation) if method is not None else UNQUANTIZED
    n, k = linear.out_features, linear.in_features
    size = _stored_bytes(scheme.weight, n, k) if method is not None else n * k * linear.weight.element_size()
    module = ResolvedModule(
        name,
        "",
        scheme if method is not None else None,
        scheme,
        Storage("plain", ""),
        n,
        k,
        {"codes": TensorInfo(f"{name}.weight", "", (n, k), "", 0, size)},
        DecidedBy("", verdict.reason),
        "ok" if method is not None else "unquantized",
        stored_dtype="",
    )
    dtype = _DTYPE_NAMES.get(linear.weight.dtype, "bf16")
    spec = LayerSpec(name, "linear", n, k, scheme, dtype=dtype, bias=linear.bias is not None, parts=(n,))
    return PackedLayer(spec, (Part(module),))


def _stored_bytes(quant: TensorQuant, n: int, k: int) -> int:
    """Bytes of codes and scales in canonical form."""
    scale = 1 if quant.scale_format in ("e8m0", "e4m3") else 4
    scales = n
    if quant.granularity == "group":
        scales = n * (k // quant.group_size)
    elif quant.granularity == "block":
        scales = -(-n // quant.block[0]) * -(-k // quant.block[1])
    second = {"global": 4 * n, "dual": 4 * n * -(-k // 512)}.get(quant.second_scale, 0)
    return n * k * quant.bits // 8 + scales * scale + second


def _findings(verdicts: list[Verdict], *, allowed: bool) -> list[Finding]:
    """Advice: what stays unasked, and models that are known to fail with the method."""
    kept: dict[str, list[str]] = defaultdict(list)
    models: dict[int, tuple[Mapping[str, Any], dict[str, list[str]]]] = {}
    for verdict in verdicts:
        if verdict.is_advice:
            kept[verdict.reason].append(verdict.place.name)
        if verdict.method is not None:
            used = models.setdefault(id(verdict.model), (verdict.model, defaultdict(list)))[1]
            used[Scheme(verdict.method.weight, verdict.method.activation).activation_id].append(verdict.place.name)
    found = [
        finding("model-advice", f"stays in 16 bit: {reason}", severity="note", modules=names)
        for reason, names in kept.items()
    ]
    for config, activations in models.values():
        found += refusals(config, activations, allowed=allowed)
    return found


# --- quantizing -----------------------------------------------------------------------------------------------------


def _quantized(item: PlannedLayer, verdict: Verdict, device: torch.device, workspaces: Workspaces) -> ModelLinear:
    linear, method, spec = verdict.place.module, verdict.method, item.packed.spec
    assert isinstance(linear, nn.Linear)
    assert method is not None
    assert item.capability is not None
    if not item.capability.impl:
        raise BackendUnavailableError(str(item.layer.backend), f"kernel {item.capability.name} is only planned on")
    kernel = load_kernel(item.capability.impl)
    assert isinstance(kernel, LinearKernel)
    tensors = to_torch(_canonical(linear, method, spec.scheme, verdict.place.name), device=device)
    bias = linear.bias.detach().to(device=device, copy=True) if linear.bias is not None else None
    layer = QuantLinear(spec, kernel, kernel.prepare(tensors, spec), bias)
    return ModelLinear.of(layer, workspaces)


def _canonical(linear: nn.Linear, method: Method, scheme: Scheme, name: str) -> CanonicalWeight:
    """The layer's weight, rounded to nearest by the oracle's rules, or by bitsandbytes itself."""
    weight = linear.weight.detach().cpu().float()
    if not bool(torch.isfinite(weight).all()):
        raise UsageError(f"{name}: the weight is not finite")
    if method.name == "bitsandbytes":
        return _by_bitsandbytes(weight, scheme, method.compress_statistics)
    made = oracle.quantize_weight(to_array(weight), scheme.weight)
    tensors: dict[str, Array] = dict(made.tensors)
    if name in method.input_scales:
        tensors["input_scale"] = np.array([method.input_scales[name]], np.float32)
    return replace(made, scheme=scheme, tensors=tensors)


def _require_bitsandbytes() -> None:
    if not is_installed("bitsandbytes"):
        raise BackendNotInstalledError("bitsandbytes", "bitsandbytes", "pip install bitsandbytes", kind="method")


def _by_bitsandbytes(weight: torch.Tensor, scheme: Scheme, compress_statistics: bool) -> CanonicalWeight:
    from bitsandbytes import functional

    n, k = weight.shape
    kind = "nf4" if scheme.weight.element == "nf4" else "fp4"
    packed, state = functional.quantize_4bit(
        weight, blocksize=_BITSANDBYTES_BLOCK, compress_statistics=compress_statistics, quant_type=kind
    )
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    stored = to_array(packed).view(np.uint8).reshape(n, k // 2)
    codes = ((stored & 15) << 4) | (stored >> 4)  # the even index is the high nibble there, the low one here
    scale = to_array(absmax).astype(np.float32).reshape(n, k // _BITSANDBYTES_BLOCK)
    return CanonicalWeight(scheme, n, k, {"codes": codes, "scale": scale})
