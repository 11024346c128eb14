"""Quantized checkpoints written as llm-compressor writes them: the whole way from a published dialect is walked.

The canonical weights that went in are returned: what comes out of loading is judged by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.conformance.model import Sizes, Written, model_config, modules_of, write_files
from omniplat.conformance.weights import random_weight
from omniplat.oracle import unpack_nibbles
from omniplat.scheme import UNQUANTIZED, Scheme, parse_activation_id, parse_weight_id

#: Weight id -> (format, arguments) of the weights that the writer can store.
_WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-block128x128": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "int4-g32": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4-g64": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}),
    "int4-g128": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}
_INPUTS: dict[str, dict[str, Any] | None] = {
    "a16": None,
    "int8-token": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "fp8-token": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "fp8-g128": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    "int8-tensor-static": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
    "fp8-tensor-static": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "mxfp4": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
        "dynamic": True,
    },
    "mxfp8": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
        "dynamic": True,
    },
}  # fmt: skip

WRITABLE: tuple[tuple[str, str], ...] = (
    ("int8-channel", "a16"),
    ("int8-channel", "int8-token"),
    ("int8-tensor", "int8-tensor-static"),
    ("fp8-channel", "a16"),
    ("fp8-channel", "fp8-token"),
    ("fp8-tensor", "fp8-tensor-static"),
    ("fp8-block128x128", "fp8-g128"),
    ("int4-g32", "a16"),
    ("int4-g64", "a16"),
    ("int4-g128", "a16"),
    ("int4-g128", "int8-token"),
    ("nvfp4", "a16"),
    ("mxfp4", "a16"),
    ("mxfp4", "mxfp4"),
    ("mxfp8", "a16"),
    ("mxfp8", "mxfp8"),
)
"""Schemes that the writer can store."""

#: What the dialect's readers know of its run-time quantizers: the rules for scales that are not the format's default.
_SCALE_RULES = {"int8-token": "half-range", "mxfp4": "even", "mxfp8": "even-m1"}


def declared_scheme(weight: str, activation: str) -> Scheme:
    """The scheme that such a file declares, with its rules for activations."""
    scheme = Scheme(parse_weight_id(weight), parse_activation_id(activation))
    if scheme.activation is None:
        return scheme
    rule = _SCALE_RULES.get(activation, "")
    return scheme.with_activation(replace(scheme.activation, scale_rule=rule, rounding="nearest-even"))


def write_checkpoint(
    folder: Path,
    scheme: Scheme,
    sizes: Sizes,
    *,
    exceptions: Mapping[str, Scheme] | None = None,
    seed: int = 0,
) -> Written:
    """Write the model with every module in `scheme` but those in `exceptions` (whole names)."""
    rng = np.random.default_rng(seed)
    weights: dict[str, CanonicalWeight] = {}
    tensors: dict[str, Array] = {"model.norm.weight": np.ones(sizes.hidden, ml_dtypes.bfloat16)}
    for name, (rows, columns) in modules_of(sizes).items():
        used = (exceptions or {}).get(name, scheme)
        weight = storable(random_weight(used, rows, columns, rng))
        weights[name] = weight
        tensors |= {f"{name}.{key}": array for key, array in stored_tensors(weight).items()}
    write_files(folder, model_config(sizes) | {"quantization_config": _config(scheme, exceptions or {})}, tensors)
    return Written(folder, weights, sizes)


def storable(weight: CanonicalWeight) -> CanonicalWeight:
    """The weight with scales in the dtype that a file keeps them in, and the same in canonical form."""
    quant = weight.scheme.weight
    tensors = dict(weight.tensors)
    if quant.element == "bf16" or quant.scale_format != "f32":
        return weight
    scale = tensors["scale"].astype(ml_dtypes.bfloat16)
    tensors["scale"] = scale.astype(np.float32) if quant.granularity in ("tensor", "channel") else scale
    return replace(weight, tensors=tensors)


def stored_tensors(weight: CanonicalWeight) -> dict[str, Array]:
    """The tensors of one module, by their name's ending, as compressed-tensors names and packs them."""
    quant, tensors = weight.scheme.weight, weight.tensors
    if quant.element == "bf16":
        return {"weight": tensors["codes"]}
    found: dict[str, Array] = {"weight_scale": tensors["scale"]}
    if quant.granularity == "tensor":
        found["weight_scale"] = tensors["scale"][:1, 0]
    elif quant.granularity == "channel":
        found["weight_scale"] = tensors["scale"].astype(ml_dtypes.bfloat16)
    if quant.element == "int4":
        found["weight_packed"] = _int32_words(unpack_nibbles(tensors["codes"]))
        found["weight_shape"] = np.array([weight.out_features, weight.in_features], np.int64)
    elif quant.element == "fp4_e2m1":
        found["weight_packed"] = tensors["codes"]
    else:
        found["weight"] = tensors["codes"]
    if "global_scale" in tensors:
        found["weight_global_scale"] = (1.0 / tensors["global_scale"][:1, 0]).astype(np.float32)
    if "input_scale" in tensors:
        found["input_scale"] = tensors["input_scale"]
    return found


def _int32_words(codes: Array) -> Array:
    """Two's complement nibbles [N, K] to words of eight, offset by 8, the first in the lowest bits."""
    shifted = (codes.astype(np.uint32) ^ 8).reshape(codes.shape[0], -1, 8)
    words = (shifted << (np.arange(8, dtype=np.uint32) * 4)).sum(axis=2, dtype=np.uint32)
    return np.asarray(words.view(np.int32))


def _config(scheme: Scheme, exceptions: Mapping[str, Scheme]) -> dict[str, Any]:
    groups: dict[str, Any] = {"group_0": _group(scheme, ["Linear"])}
    for index, other in enumerate(dict.fromkeys(exceptions.values()), 1):
        if other != UNQUANTIZED:
            groups[f"group_{index}"] = _group(other, [n for n, used in exceptions.items() if used == other])
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else groups["group_0"]["format"],
        "config_groups": groups,
        "ignore": [name for name, used in exceptions.items() if used == UNQUANTIZED],
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    form, weights = _WEIGHTS[scheme.weight_id]
    common = {"symmetric": True}
    inputs = _INPUTS[scheme.activation_id]
    return {
        "format": form,
        "targets": targets,
        "weights": {**weights, **common, "dynamic": False},
        "input_activations": {**inputs, **common} if inputs is not None else None,
    }
