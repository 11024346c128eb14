"""Holding one checkpoint against its producer's own values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import torch

from omniplat.api import load_layers, make_planned
from omniplat.canonical import CanonicalWeight
from omniplat.checkpoint.reader import ShardReader
from omniplat.formats.resolved import ResolvedModule
from omniplat.formats.unpack import canonicalise
from omniplat.models.names import is_embedding
from omniplat.oracle import decode_codes, dequantize, linear
from omniplat.packed import PackedLayer, Part
from omniplat.planner import Planned
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.load import load_layer
from omniplat.scheme import UNQUANTIZED, Scheme
from tests.goldens.entries import Entry

#: Relative bound on a weight: the producer computes it in f32.
WEIGHT_BOUND = 2.0**-22
#: Relative L2 bound on an output that was accumulated in f32.
OUTPUT_BOUND = 2e-6


@dataclass(frozen=True, slots=True)
class Result:
    """Worst relative errors of one checkpoint. `activations` counts outputs with quantized activations."""

    name: str
    layers: int
    modules: int
    schemes: tuple[str, ...]
    weight: float
    oracle: float
    kernel: float
    activations: int


def rounds_to_bf16(name: str) -> bool:
    """True where the producer's own dequantization rounds to bf16: compressed-tensors' NVFP4, and its old release;
    bitsandbytes' 4 bits, HQQ and torchao."""
    if name.startswith("hf"):
        return any(part in name for part in ("-bnb-nf4", "-bnb-fp4", "-hqq", "-torchao"))
    return (name.startswith("lc") and "nvfp4" in name) or name.startswith("lc010")


def computes_in_bf16(name: str) -> bool:
    """True where the producer rounds between the steps as well: HQQ subtracts and multiplies in bf16."""
    return "-hqq" in name


def plan_of(entry: Entry) -> Planned:
    return make_planned(entry.checkpoint, "cpu")


def wrong_schemes(planned: Planned, weights: dict[str, str]) -> list[str]:
    """Modules whose stored scheme is not the one that the producer reports; embeddings are no layers."""
    stored = {m.name: m.scheme.weight_id for r in planned.resolutions for m in r.modules}
    wrong = []
    for module, expected in weights.items():
        if module not in stored:
            if not (expected == "bf16" and is_embedding(module)):
                wrong.append(f"{module}: in no layer, expected {expected}")
        elif stored[module] != expected:
            wrong.append(f"{module}: {stored[module]}, expected {expected}")
    return wrong


def check(entry: Entry) -> Result:
    """Load every layer of an entry, compare every golden; raises AssertionError naming the module."""
    planned = plan_of(entry)
    loaded = list(load_layers(planned))
    golden = entry.goldens()
    modules = {m.name: (r, m) for r in planned.resolutions for m in r.modules}
    coarse = rounds_to_bf16(entry.name)
    bound = 0.0 if coarse else WEIGHT_BOUND
    worst = {"weight": 0.0, "oracle": 0.0, "kernel": 0.0}
    activations = 0
    compared = 0
    for key in golden:
        name, _, kind = key.rpartition(".")
        if kind != "weight":
            continue
        resolution, module = modules[name]
        reader = ShardReader(resolution.component.root)
        canonical = _canonical(module, reader)
        expected = golden[key].astype(np.float64)
        found = dequantize(canonical)
        if computes_in_bf16(entry.name):
            found = as_hqq_computes(canonical)
        if coarse:
            found = found.astype(ml_dtypes.bfloat16).astype(np.float64)
        if entry.name.startswith("hf-gptoss"):
            # transformers' own unpacking gives [E, K, N]
            expected = expected.swapaxes(-1, -2)
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error <= bound, f"{name}: weight differs by {error:.2e}"
        worst["weight"] = max(worst["weight"], float(error))
        compared += 1
        if f"{name}.x" not in golden:
            continue
        x = golden[f"{name}.x"]
        quantized = f"{name}.y_actquant" in golden
        activations += quantized
        wanted = golden[f"{name}.y_actquant" if quantized else f"{name}.y"].astype(np.float64)
        executed = _as_executed(module.scheme)
        known = quantized or executed.activation is None
        bias = canonical.tensors.get("bias")
        canonical = replace(canonical, scheme=executed)
        made = as_the_golden_was_made(canonical, golden[key] if coarse else None)
        plain = linear(x, made, activation=False, bias=bias)
        worst["oracle"] = max(worst["oracle"], _compare(f"{name}.y", plain, golden[f"{name}.y"]))
        if known:
            is_simulated = entry.name.startswith("qk") and executed.activation is not None
            if is_simulated and not executed.activation.dynamic:
                got = linear(as_quark_simulates(x, made), made, activation=False, bias=bias)
            else:
                got = linear(x, made, activation=True, bias=bias)
            worst["oracle"] = max(worst["oracle"], _compare(f"{name} with its activations", got, wanted))
        run = _run_alone(planned, module, reader, x)
        reference = linear(x, canonical, activation=True, bias=bias)
        worst["kernel"] = max(worst["kernel"], _compare(f"{name} kernel", run, reference))
    schemes = tuple(sorted({m.scheme.id for _, m in modules.values() if m.status == "ok"}))
    return Result(
        entry.name, len(loaded), compared, schemes, worst["weight"], worst["oracle"], worst["kernel"], activations
    )


def _as_executed(scheme: Scheme) -> Scheme:
    """LLM.int8 is planned with activations as they are: nothing defines its quantization without its outliers."""
    is_llm_int8 = scheme.activation is not None and scheme.activation.element == "int8_bnb"
    return scheme.with_activation(None) if is_llm_int8 else scheme


def as_hqq_computes(weight: CanonicalWeight) -> np.ndarray:
    """(code - zero) * scale with both results in bf16."""
    quant, bf16 = weight.scheme.weight, ml_dtypes.bfloat16
    codes = decode_codes(weight.tensors["codes"], quant.element, weight.in_features)
    groups = codes.reshape(weight.out_features, -1, quant.group_size or weight.in_features)
    zero, scale = (weight.tensors[role].astype(np.float64)[..., None] for role in ("zero_point", "scale"))
    shifted = (groups - zero).astype(bf16).astype(np.float64)
    product: np.ndarray = (shifted * scale).astype(bf16).astype(np.float64).reshape(codes.shape)
    return product


def as_quark_simulates(x: np.ndarray, weight: CanonicalWeight) -> np.ndarray:
    """A static input as Quark's simulation rounds it: in bf16, but for the quotient of integers."""
    activation, bf16 = weight.scheme.activation, ml_dtypes.bfloat16
    assert activation is not None
    scale = weight.tensors["input_scale"].astype(np.float32)
    quotient = x / scale
    if activation.is_integer:
        codes = np.clip(np.rint(quotient), -128, 127)
    else:
        codes = np.clip(quotient.astype(bf16).astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    product: np.ndarray = (codes.astype(np.float32) * scale).astype(bf16).astype(np.float64)
    return product


def as_the_golden_was_made(weight: CanonicalWeight, rounded: np.ndarray | None) -> CanonicalWeight:
    """The layer as the producer's script computed the golden outputs.

    Per-token activations have one scale for all rows: the goldens' inputs are 2-D, and the producers reduce over
    every axis but the last two (a batch of sequences, [B, T, K], is quantized per token). Smoothing is left out of
    `.y`. Where the producer rounded its weight, `rounded` is that weight.
    """
    scheme, tensors = weight.scheme, dict(weight.tensors)
    activation = scheme.activation
    if activation is not None and activation.granularity == "token":
        activation = replace(activation, granularity="tensor")
    tensors.pop("pre_scale", None)
    scheme = replace(scheme, activation=activation, pre_scale=False)
    if rounded is not None:
        inputs = {role: tensors[role] for role in tensors if role.startswith("input_")}
        scheme, tensors = replace(scheme, weight=UNQUANTIZED.weight), {"codes": rounded, **inputs}
    return replace(weight, scheme=scheme, tensors=tensors)


def _canonical(module: ResolvedModule, reader: ShardReader) -> CanonicalWeight:
    arrays = {role: reader.read(info) for role, info in module.tensors.items()}
    return canonicalise(
        arrays, module.storage, module.scheme, module.out_features, module.in_features, module=module.name
    )


def _compare(what: str, got: np.ndarray, wanted: np.ndarray) -> float:
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    assert error <= OUTPUT_BOUND, f"{what}: relative L2 error {error:.2e}, allowed {OUTPUT_BOUND:.0e}"
    return error


def _run_alone(planned: Planned, module: ResolvedModule, reader: ShardReader, x: np.ndarray) -> np.ndarray:
    """The module as a linear layer of its own, loaded and run by the kernel that its layer was planned on."""
    owner = next(item for item in planned.layers if module in item.packed.modules)
    spec = replace(
        owner.packed.spec, name=module.name, op="linear", out_features=module.out_features, dtype="f32",
        in_features=module.in_features, scheme=module.scheme, parts=(module.out_features,), moe=None,
        bias="bias" in module.tensors,
    )  # fmt: skip
    impl = owner.capability.impl if owner.capability is not None and owner.layer.op == "linear" else _LINEAR
    layer = load_layer(PackedLayer(spec, (Part(module),)), load_kernel(impl), reader)
    return layer(torch.from_numpy(x.copy())).double().numpy()


_LINEAR = "omniplat.reference.kernels:DequantLinear"
