"""A small quantized checkpoint on disk, with its modules as a format would resolve them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.folder import Checkpoint, Component, open_checkpoint
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import UNQUANTIZED, Scheme
from tests.reference.build import Weights

PACKING = {"fp8_e4m3": ("plain", "F8_E4M3"), "int8": ("plain", "I8"), "bf16": ("plain", "BF16")}
SUFFIX = {"codes": "weight", "scale": "weight_scale", "bias": "bias"}


@dataclass(frozen=True)
class ResolvedComponent:
    component: Component
    modules: tuple[ResolvedModule, ...]


@dataclass(frozen=True)
class Built:
    """A checkpoint on disk, its modules, and by module name the canonical weight that was stored."""

    checkpoint: Checkpoint
    parts: tuple[ResolvedComponent, ...]
    weights: dict[str, CanonicalWeight]


def module_of(component: Component, name: str, weight: CanonicalWeight) -> ResolvedModule:
    infos = {role: component.tensors[f"{name}.{SUFFIX.get(role, role)}"] for role in weight.tensors}
    packing, container = PACKING.get(weight.scheme.weight.element, ("nibbles_k", "U8"))
    n, k = weight.out_features, weight.in_features
    return ResolvedModule(
        name, component.name, None, weight.scheme, Storage(packing, container), n, k, infos, DecidedBy("", "")
    )


def write_component(folder: Path, seed: int = 0) -> dict[str, CanonicalWeight]:
    """Two shards with an index; one weight's scale lies in the other shard."""
    made = Weights(seed)
    weights = {
        "a.q": made.canonical(Scheme.parse("fp8-channel/fp8-token"), 48, 64),
        "a.block": made.canonical(Scheme.parse("fp8-block128x128/a16"), 300, 256),
        "b.mx": made.canonical(Scheme.parse("mxfp4/mxfp4"), 40, 64),
        "b.smooth": made.canonical(Scheme.parse("int8-channel/a16"), 24, 32),
        "lm_head": CanonicalWeight(UNQUANTIZED, 8, 64, {"codes": made.values(8, 64)}),
    }
    weights["a.q"] = replace(weights["a.q"], tensors={**weights["a.q"].tensors, "bias": made.values(48)})
    smooth = np.exp(made.random.standard_normal(32)).astype(np.float32)
    weights["b.smooth"] = replace(
        weights["b.smooth"],
        scheme=replace(weights["b.smooth"].scheme, pre_scale=True),
        tensors={**weights["b.smooth"].tensors, "pre_scale": smooth},
    )
    shards: dict[str, dict[str, Array]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for name, weight in weights.items():
        first = name.startswith("a.")
        for role, array in weight.tensors.items():
            here = first != (name == "a.q" and role == "scale")
            shard = "model-1.safetensors" if here else "model-2.safetensors"
            shards[shard][f"{name}.{SUFFIX.get(role, role)}"] = array
    shards["model-1.safetensors"]["norm.weight"] = made.values(64).astype(np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for shard, arrays in shards.items():
        tensors = {name: to_tensor(np.array(array)) for name, array in arrays.items()}
        save_file(tensors, folder / shard, metadata={"format": "pt", "quantization_config": "{}"})
        index |= dict.fromkeys(arrays, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"x": 1}, "weight_map": index}))
    config = {"model_type": "t", "quantization_config": {"quant_method": "t"}, "text_config": {"compression_config": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantization_config.json").write_text("{}")
    return weights


def build(root: Path) -> Built:
    """A plain checkpoint with other files beside it."""
    weights = write_component(root)
    (root / "tokenizer.json").write_text("{}")
    (root / "recipe.yaml").write_text("x: 1")
    (root / "extra").mkdir()
    (root / "extra" / "vocab.txt").write_text("a b")
    (root / ".cache").mkdir()
    (root / ".cache" / "lock").write_text("")
    return _resolved(root, {"": weights})


def build_pipeline(root: Path) -> Built:
    """A pipeline with one quantized component and one that has no tensors."""
    weights = write_component(root / "transformer")
    (root / "model_index.json").write_text(
        json.dumps({"_class_name": "P", "transformer": ["d", "T"], "vae": ["d", "V"]})
    )
    (root / "vae").mkdir()
    (root / "vae" / "config.json").write_text('{"quantization_config": "kept: not a converted component"}')
    return _resolved(root, {"transformer": weights})


def _resolved(root: Path, weights: dict[str, dict[str, CanonicalWeight]]) -> Built:
    checkpoint = open_checkpoint(root)
    parts = tuple(
        ResolvedComponent(c, tuple(module_of(c, name, weight) for name, weight in weights[c.name].items()))
        for c in checkpoint.components
    )
    return Built(checkpoint, parts, {name: weight for held in weights.values() for name, weight in held.items()})
