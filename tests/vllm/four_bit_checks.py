"""What holds for bitsandbytes' four bits inside vLLM: their blocks follow each other through the whole matrix, and the
names of their tensors have dots. Checks are as in `checks.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

from omniplat.api import make_planned
from omniplat.errors import UsageError
from omniplat.integrations.vllm_config import OmniplatConfig
from tests.support.bitsandbytes import FourBit
from tests.support.checkpoints import write_checkpoint
from tests.vllm.checks import ALL, Check, inputs, run_dense
from tests.vllm.engine import engine, load

HIDDEN, HEADS, KV, DIM, INNER = 96, 4, 2, 32, 256
SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV * DIM, HIDDEN),
    "self_attn.v_proj": (KV * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def write(folder: Path, model_type: str, shapes: dict[str, tuple[int, int]], kind: str) -> dict[str, FourBit]:
    """A checkpoint with scales that are quantized themselves; the weights by module."""
    config: dict[str, Any] = {
        "model_type": model_type, "hidden_size": HIDDEN, "head_dim": DIM, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "intermediate_size": INNER, "num_hidden_layers": 2, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": True,
        },
    }  # fmt: skip
    made = {name: FourBit(*shape, kind, nested=True, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    tensors: dict[str, Any] = {}
    values: dict[str, bytes] = {}
    for name, weight in made.items():
        headers, data = weight.tensors(name)
        tensors |= headers
        values |= data
    write_checkpoint(folder, config, tensors, values=values)
    return made


def of_two_layers() -> dict[str, tuple[int, int]]:
    return {f"model.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in SHAPES.items()}


def runs(rank: int, world: int, scratch: Path) -> None:
    """Rows of 96 in blocks of 64: every other block runs on into the next row, also from one head to the next."""
    folder = scratch / f"runs-{world}-{rank}"
    write(folder, "qwen3", of_two_layers(), "fp4")
    layers = make_planned(folder, "cpu", engine="vllm").layers
    assert {item.packed.spec.scheme.weight_id for item in layers} == {"fp4bnb-b32", "fp4bnb-b64"}
    run_dense(folder, ALL, rank, world)


def fused_on_disk(rank: int, world: int, scratch: Path) -> None:
    """One flat weight for q, k and v, and one for gate and up: every rank has its rows of each."""
    folder = scratch / f"fused-on-disk-{world}-{rank}"
    rows = {"self_attn.qkv_proj": ((HEADS + 2 * KV) * DIM, HIDDEN), "mlp.gate_up_proj": (2 * INNER, HIDDEN)}
    made = write(folder, "phi3", {f"model.layers.0.{name}": shape for name, shape in rows.items()}, "nf4")
    config = OmniplatConfig(make_planned(folder, "cpu", engine="vllm"))
    options: dict[str, Any] = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
    with engine(world), torch.no_grad():
        model, layer = nn.Module(), nn.Module()
        at = "model.layers.0"
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.qkv_proj = QKVParallelLinear(
            HIDDEN, DIM, HEADS, KV, prefix=f"{at}.self_attn.qkv_proj", **options
        )
        layer.mlp.gate_up_proj = MergedColumnParallelLinear(
            HIDDEN, [INNER, INNER], prefix=f"{at}.mlp.gate_up_proj", **options
        )
        model.quant_config, model.model = config, nn.Module()
        model.model.layers = nn.ModuleList([layer])
        load(model, folder)
        for module, sizes in (
            (layer.self_attn.qkv_proj, [HEADS * DIM, KV * DIM, KV * DIM]),
            (layer.mlp.gate_up_proj, [INNER, INNER]),
        ):
            parts = np.split(made[module.prefix].values, np.cumsum(sizes)[:-1])
            held = np.concatenate([np.split(part, world)[rank] for part in parts])
            for x in inputs(HIDDEN):
                wanted = x.double().numpy() @ held.T
                found = module(x)[0].double().numpy()
                assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted), module.prefix


def cut_runs(rank: int, world: int, scratch: Path) -> None:
    """Columns of a row-parallel layer whose groups two ranks cannot share: refused before a weight is read."""
    folder = scratch / f"cut-{world}-{rank}"
    write(folder, "qwen3", of_two_layers() | {"model.layers.0.mlp.down_proj": (HIDDEN, 96)}, "nf4")
    config = OmniplatConfig(make_planned(folder, "cpu", engine="vllm"))
    with engine(world), pytest.raises(UsageError, match=r"down_proj .* cuts a weight group of 32"):
        RowParallelLinear(96, HIDDEN, bias=False, quant_config=config, prefix="model.layers.0.mlp.down_proj")


CHECKS: dict[str, Check] = {"bitsandbytes-runs": runs, "bitsandbytes-fused-on-disk": fused_on_disk}
SHARED: dict[str, Check] = {"bitsandbytes-cut": cut_runs}
