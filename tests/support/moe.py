"""Checkpoints of one mixture-of-experts layer, as three families store theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.torch import save_file

from omniplat import oracle
from omniplat.api import make_planned
from omniplat.canonical import Array
from omniplat.checkpoint.reader import ShardReader
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.tensors import to_tensor
from omniplat.scheme import Scheme

E, HIDDEN, INNER, SHARED, TOP = 8, 128, 128, 256, 3
NAME = "model.layers.0.mlp"
Tensors = dict[str, Array]

_COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP, "hidden_act": "silu", "torch_dtype": "float32"}


class Source:
    """Random tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def values(self, *shape: int) -> Array:
        return (self.random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def floats(self, *shape: int) -> Array:
        return self.values(*shape).astype(ml_dtypes.bfloat16)

    def mxfp4(self, module: str, *shape: int) -> Tensors:
        made = oracle.quantize_weight(self.values(*shape), Scheme.parse("mxfp4/a16").weight).tensors
        return {f"{module}.weight_packed": made["codes"], f"{module}.weight_scale": made["scale"]}

    def fp8(self, module: str, *shape: int) -> Tensors:
        made = oracle.quantize_weight(self.values(*shape), Scheme.parse("fp8-block32x32/a16").weight).tensors
        return {f"{module}.weight": made["codes"], f"{module}.weight_scale_inv": made["scale"].astype(np.float32)}

    def mlp(self, module: str, inner: int, quantize: Callable[..., Tensors]) -> Tensors:
        return {
            **quantize(f"{module}.gate_proj", inner, HIDDEN),
            **quantize(f"{module}.up_proj", inner, HIDDEN),
            **quantize(f"{module}.down_proj", HIDDEN, inner),
        }


def qwen2(source: Source) -> tuple[dict[str, Any], Tensors]:
    """MXFP4 experts one by one; a shared expert that stays in bf16, and its gate."""
    config = {"model_type": "qwen2_moe", "num_experts": E, "norm_topk_prob": False, "quantization_config": _MXFP4}
    tensors = {f"{NAME}.gate.weight": source.floats(E, HIDDEN)}
    for expert in range(E):
        tensors |= source.mlp(f"{NAME}.experts.{expert}", INNER, source.mxfp4)
    tensors |= source.mlp(f"{NAME}.shared_expert", SHARED, lambda name, *n: {f"{name}.weight": source.floats(*n)})
    return config, {**tensors, f"{NAME}.shared_expert_gate.weight": source.floats(1, HIDDEN)}


_MXFP4 = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 4,
    "group_size": 32,
    "data_type": "mx_fp",
}


def gpt_oss(source: Source) -> tuple[dict[str, Any], Tensors]:
    """Stacks with interleaved gate and up, biases everywhere."""
    config = {"model_type": "gpt_oss", "num_local_experts": E, "quantization_config": {"quant_method": "mxfp4"}}
    tensors = {f"{NAME}.router.weight": source.floats(E, HIDDEN), f"{NAME}.router.bias": source.floats(E)}
    for leaf, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        made = oracle.quantize_weight(source.values(E * rows, columns), Scheme.parse("mxfp4/a16").weight).tensors
        tensors |= {
            f"{NAME}.experts.{leaf}_blocks": made["codes"].reshape(E, rows, columns // 32, 16),
            f"{NAME}.experts.{leaf}_scales": made["scale"].reshape(E, rows, columns // 32),
            f"{NAME}.experts.{leaf}_bias": source.floats(E, rows),
        }
    return config, tensors


def deepseek(source: Source) -> tuple[dict[str, Any], Tensors]:
    """FP8 blocks, experts in groups chosen with a correction, a shared expert of the same scheme."""
    config = {
        "model_type": "deepseek_v3",
        "n_routed_experts": E,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    }
    tensors = {
        f"{NAME}.gate.weight": source.floats(E, HIDDEN),
        f"{NAME}.gate.e_score_correction_bias": source.values(E),
    }
    for expert in range(E):
        tensors |= source.mlp(f"{NAME}.experts.{expert}", INNER, source.fp8)
    return config, tensors | source.mlp(f"{NAME}.shared_experts", SHARED, source.fp8)


FAMILIES: Mapping[str, Callable[[Source], tuple[dict[str, Any], Tensors]]] = {
    "qwen2": qwen2,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
}


def write(folder: Path, family: str, seed: int = 0, drop: str = "") -> Path:
    """The checkpoint of a family, without the tensors whose names start with `drop`."""
    config, tensors = FAMILIES[family](Source(seed))
    kept = {name: to_tensor(array) for name, array in tensors.items() if not drop or not name.startswith(drop)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_COMMON | config))
    return folder


def planned(folder: Path) -> tuple[Planned, PlannedLayer, ShardReader]:
    """The plan of a checkpoint, its layer of experts, and what reads it."""
    plan = make_planned(folder, "cpu")
    (item,) = [item for item in plan.layers if item.layer.op == "moe"]
    return plan, item, ShardReader(folder)
