"""What a model will be once it is quantized, as planning knows layers: sizes, schemes, and who decided them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.findings import Finding, finding
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.models.advice import refusals
from omniplat.modules.experts import DOWN, GATE_UP, STACKS
from omniplat.modules.survey import Verdict
from omniplat.packed import PackedLayer, Part
from omniplat.runtime.tensors import DTYPES
from omniplat.scheme import UNQUANTIZED, Scheme, TensorQuant

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def planned_layer(verdict: Verdict) -> PackedLayer:
    """The layer with what it will store."""
    if isinstance(verdict.place.module, nn.Linear):
        return _linear(verdict, verdict.place.module)
    return _experts(verdict)


def advice_findings(verdicts: Sequence[Verdict], *, allowed: bool) -> list[Finding]:
    """What stays unasked, and models that are known to fail with the method; `allowed` makes those warnings."""
    kept: dict[str, list[str]] = defaultdict(list)
    models: dict[int, tuple[Mapping[str, Any], dict[str, list[str]]]] = {}
    for verdict in verdicts:
        if verdict.is_advice:
            kept[verdict.reason].append(verdict.place.name)
        if verdict.method is not None:
            used = models.setdefault(id(verdict.model), (verdict.model, defaultdict(list)))[1]
            used[_scheme(verdict).activation_id].append(verdict.place.name)
    found = [
        finding("model-advice", f"stays in 16 bit: {reason}", severity="note", modules=names)
        for reason, names in kept.items()
    ]
    for config, activations in models.values():
        found += refusals(config, activations, allowed=allowed)
    return found


def _scheme(verdict: Verdict) -> Scheme:
    method = verdict.method
    return Scheme(method.weight, method.activation) if method is not None else UNQUANTIZED


def _linear(verdict: Verdict, linear: nn.Linear) -> PackedLayer:
    n, k = linear.out_features, linear.in_features
    spec = LayerSpec(
        verdict.name,
        "linear",
        n,
        k,
        _scheme(verdict),
        dtype=_dtype_name(linear.weight),
        bias=linear.bias is not None,
        parts=(n,),
    )
    return PackedLayer(spec, (Part(_module(verdict, verdict.name, n, k, linear.weight)),))


def _experts(verdict: Verdict) -> PackedLayer:
    """One part for all experts in each of the two weights. Stacks that stay may be of any form: what is known of those
    is the shape of one of their tensors."""
    name, form, held = verdict.name, verdict.form, verdict.place.module._parameters
    stack = next(tensor for key in STACKS if (tensor := held.get(key)) is not None and tensor.dim() == 3)
    if form is None:
        experts, inner, hidden = stack.shape
        moe = MoeSpec(experts, inner)
    else:
        assert form.gate is not None
        inner, hidden, gate = form.intermediate, form.hidden, form.gate
        moe = MoeSpec(form.experts, inner, gate.activation, limit=gate.limit, alpha=gate.alpha)
    spec = LayerSpec(
        name,
        "moe",
        hidden,
        hidden,
        _scheme(verdict),
        dtype=_dtype_name(stack),
        bias=form is not None and form.bias,
        parts=(inner, inner),
        moe=moe,
    )
    first, second = (
        Part(_module(verdict, f"{name}.{leaf}", rows, columns, stack, moe.experts, _bytes_of(held, stacks)))
        for leaf, rows, columns, stacks in ((GATE_UP, 2 * inner, hidden, STACKS[:4]), (DOWN, hidden, inner, STACKS[4:]))
    )
    return PackedLayer(spec, w13=((first,),), w2=((second,),), stacked=True)


def _bytes_of(held: Mapping[str, torch.Tensor | None], names: Sequence[str]) -> int:
    return sum(tensor.nbytes for name in names if (tensor := held.get(name)) is not None and tensor.dim() == 3)


def _module(
    verdict: Verdict, name: str, rows: int, columns: int, weight: torch.Tensor, experts: int = 0, held: int = 0
) -> ResolvedModule:
    """`held` are the bytes of stacks in the model, which may be of any form where they stay."""
    scheme, is_kept = _scheme(verdict), verdict.method is None
    one = rows * columns * weight.element_size() if is_kept else _stored_bytes(scheme.weight, rows, columns)
    size = held if is_kept and experts else one * max(experts, 1)
    shape = (experts, rows, columns) if experts else (rows, columns)
    return ResolvedModule(
        name,
        "",
        None if is_kept else scheme,
        scheme,
        Storage("plain", ""),
        rows,
        columns,
        {"codes": TensorInfo(f"{name}.weight", "", shape, "", 0, size)},
        DecidedBy("", verdict.reason),
        "unquantized" if is_kept else "ok",
        experts,
    )


def _dtype_name(weight: torch.Tensor) -> str:
    return _DTYPE_NAMES.get(weight.dtype, "bf16")


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
