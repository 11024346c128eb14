"""What holds for one checkpoint inside vLLM, on one rank: the same numbers as omniplat's own layers, bit for bit.

Each check is a function of (rank, world, scratch folder). They run in one process with world 1, and in the two
processes of `worker.py` with world 2.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear

from omniplat.api import make_planned
from omniplat.checkpoint.reader import ShardReader
from omniplat.errors import UsageError
from omniplat.integrations.vllm import OmniplatLinearMethod, OmniplatMoEMethod
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_loading import MEMBER
from omniplat.packed import PackedLayer, Split, select_part
from omniplat.planner import Planned, PlannedLayer
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.layers import CompositeLinear, QuantExperts, QuantLinear
from omniplat.runtime.load import load_layer
from omniplat.runtime.plain import PlainLinear
from omniplat.runtime.slicer import Rank
from omniplat.runtime.tensors import to_tensor
from tests.vllm.engine import ExpertLayer, Experts, Model, build, engine, load, tensors_of

BUNDLED = Path(__file__).parents[1] / "data" / "checkpoints"
Check = Callable[[int, int, Path], None]


def folder_of(name: str) -> Path:
    return BUNDLED / name / "checkpoint"


# --- omniplat's own layers ---------------------------------------------------------------------------------------


def standalone(planned: Planned, module: LinearBase, rank: int, world: int) -> list[QuantLinear]:
    """The parts of one of vLLM's modules, loaded from the file for this rank without vLLM."""
    found = []
    for name in checkpoint_names(module):
        item = next(item for item in planned.layers if any(part.module.name == name for part in item.packed.parts))
        index = [part.module.name for part in item.packed.parts].index(name)
        packed = select_part(item.packed, index)
        is_kv = name.endswith(("k_proj", "v_proj"))
        split = Split("replicated")
        if isinstance(module, QKVParallelLinear):
            split = Split("column", module.total_num_heads, module.total_num_kv_heads, (is_kv,))
        elif isinstance(module, ColumnParallelLinear):
            split = Split("column")
        elif isinstance(module, RowParallelLinear):
            split = Split("row")
        found.append(load_alone(planned, item, replace(packed, split=split), rank, world))
    return found


def load_alone(planned: Planned, item: PlannedLayer, packed: PackedLayer, rank: int, world: int) -> QuantLinear:
    reader = ShardReader(planned.resolutions[0].component.root)
    kernel = load_kernel(item.capability.impl) if item.capability is not None else PlainLinear()
    loaded = load_layer(packed, kernel, reader, rank=Rank(rank, world))
    assert isinstance(loaded, QuantLinear)
    return loaded


def checkpoint_names(module: LinearBase) -> list[str]:
    head, _, leaf = module.prefix.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(leaf, (leaf,))
    return [f"{head}.{part}" for part in parts]


# --- comparing ---------------------------------------------------------------------------------------------------


def linears(model: Model) -> Iterator[LinearBase]:
    yield from (module for module in model.modules() if isinstance(module, LinearBase))


def inputs(columns: int, seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for rows in (3, 1, 9):
        yield torch.randn(rows, columns, generator=generator).to(torch.bfloat16)


def assert_same(model: Model, planned: Planned, rank: int, world: int) -> int:
    """Every linear layer of the model: eagerly and compiled without a graph break, with any number of rows."""
    count = 0
    for module in linears(model):
        assert isinstance(module.quant_method, OmniplatLinearMethod), module.prefix
        assert [name for name, _ in module.named_parameters()] == [], "placeholders are left"
        alone = standalone(planned, module, rank, world)
        columns = alone[0].spec.in_features
        compiled = compile_dynamic(module)
        for x in inputs(columns, rank):
            y, _ = module(x)
            expected = torch.cat([part(x) for part in alone], dim=-1)
            if isinstance(module, RowParallelLinear) and world > 1:
                expected = tensor_model_parallel_all_reduce(expected)
            assert y.dtype == torch.bfloat16
            assert torch.isfinite(y.float()).all()
            assert y.float().abs().max() > 0
            assert torch.equal(y, expected), module.prefix
            assert torch.equal(compiled(x), y), f"{module.prefix} compiled"
        count += 1
    return count


def compile_dynamic(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer under `torch.compile(fullgraph=True)` with a dynamic number of rows: one graph, never another."""
    torch._dynamo.reset()
    traced = 0

    def count(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        nonlocal traced
        traced += 1
        built: Callable[..., object] = lookup_backend("aot_eager")(graph, example)
        return built

    compiled = torch.compile(lambda x: module(x)[0], fullgraph=True, dynamic=True, backend=count)

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:  # dynamo makes a graph of its own for one row, whatever is asked
            torch._dynamo.mark_dynamic(x, 0)
        y: torch.Tensor = compiled(x)
        assert traced <= 2, "traced again for another number of rows"
        return y

    return call


# --- checks ------------------------------------------------------------------------------------------------------


def dense(name: str, only: frozenset[str], rank: int, world: int, scratch: Path) -> None:
    """A whole checkpoint: fused modules in layer 0, one-part modules in layer 1."""
    run_dense(folder_of(name), only, rank, world)


def dense_g128(name: str, rank: int, world: int, scratch: Path) -> None:
    """As `dense` for groups of 128 along the 384 columns of down_proj, which two ranks cannot share."""
    dense(name, ALL if world == 1 else ALL - {"down"}, rank, world, scratch)


def run_dense(folder: Path, only: frozenset[str], rank: int, world: int) -> None:
    planned = make_planned(folder, "cpu", engine="vllm")
    with engine(world), torch.no_grad():
        model = build(json.loads((folder / "config.json").read_text()), OmniplatConfig(planned), only)
        load(model, folder)
        expected = 2 + 2 * ("attention" in only) + ("mlp" in only) + ("down" in only)
        assert assert_same(model, planned, rank, world) == expected


def partial_blocks(rank: int, world: int, scratch: Path) -> None:
    """fp8 blocks of 128 x 128 with 320 columns: the last block of K, and of N where K is split, is partial."""
    hidden, heads, dim, inner = 320, 8, 64, 512
    shapes = {
        **{f"self_attn.{part}_proj": (heads * dim, hidden) for part in "qkv"},
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = np.random.default_rng(0)
    tensors = {}
    for layer in (0, 1):
        for name, (rows, columns) in shapes.items():
            full = f"model.layers.{layer}.{name}"
            codes = random.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            scale = np.exp(random.standard_normal((-(-rows // 128), -(-columns // 128)))).astype(np.float32)
            tensors[f"{full}.weight"], tensors[f"{full}.weight_scale_inv"] = to_tensor(codes), to_tensor(scale)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "head_dim": dim,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": inner,
        "num_hidden_layers": 2, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]
        },
    }  # fmt: skip
    folder = scratch / f"partial-{world}-{rank}"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    run_dense(folder, ALL, rank, world)


def composite(rank: int, world: int, scratch: Path) -> None:
    """One module of vLLM whose parts differ: q and k int4, v int8 with a bias for all; gate int4, up unquantized."""
    hidden, heads, kv, dim, inner = 256, 8, 4, 32, 256
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    int8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {
        "a": {"targets": ["re:.*(q|k|gate|o|down)_proj$"], "weights": int4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*v_proj$"], "weights": int8, "format": "int-quantized"},
    }
    random = np.random.default_rng(1)
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}

    def put_int4(name: str, rows: int, columns: int) -> None:
        words = random.integers(-(2**31), 2**31, (rows, columns // 8)).astype(np.int32)
        tensors[f"{name}.weight_packed"] = torch.from_numpy(words)
        tensors[f"{name}.weight_scale"] = torch.rand(rows, columns // 32, dtype=torch.float32).to(torch.bfloat16) + 0.1
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])

    for layer in (0, 1):
        at = f"model.layers.{layer}.self_attn"
        put_int4(f"{at}.q_proj", heads * dim, hidden)
        put_int4(f"{at}.k_proj", kv * dim, hidden)
        put_int4(f"{at}.o_proj", hidden, heads * dim)
        codes = random.integers(-128, 128, (kv * dim, hidden)).astype(np.int8)
        tensors[f"{at}.v_proj.weight"] = torch.from_numpy(codes)
        tensors[f"{at}.v_proj.weight_scale"] = torch.rand(kv * dim, 1) + 0.1
        put_int4(f"model.layers.{layer}.mlp.gate_proj", inner, hidden)
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(inner, hidden).to(torch.bfloat16)
        put_int4(f"model.layers.{layer}.mlp.down_proj", hidden, inner)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "head_dim": dim,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "num_hidden_layers": 2,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups,
            "ignore": ["re:.*up_proj$"], "quantization_status": "compressed",
        },
    }  # fmt: skip
    folder = scratch / f"composite-{world}-{rank}"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    planned = make_planned(folder, "cpu", engine="vllm")
    with engine(world), torch.no_grad():
        model = build(config, OmniplatConfig(planned), ALL)
        load(model, folder)
        assert assert_same(model, planned, rank, world) == 6
        qkv = model.model.layers[0].self_attn.qkv_proj
        member = getattr(qkv, MEMBER)
        assert isinstance(member, CompositeLinear)
        kinds = {name: part.spec.scheme.weight_id for name, part in member.parts.items()}
        assert kinds == {"q_proj": "int4-g32", "k_proj": "int4-g32", "v_proj": "int8-channel"}
        x = next(inputs(hidden))
        bias = torch.randn(sum(qkv.output_partition_sizes)).to(torch.bfloat16)
        parts = [
            part.run(x, b)
            for part, b in zip(member.parts.values(), bias.split(qkv.output_partition_sizes), strict=True)
        ]
        assert torch.equal(qkv.quant_method.apply(qkv, x, bias), torch.cat(parts, dim=-1))
        assert not torch.equal(parts[0], next(iter(member.parts.values())).run(x, None))


def cut_blocks(rank: int, world: int, scratch: Path) -> None:
    """A shard that would cut a block is refused when the layer is built, before a weight is read."""
    folder = folder_of("lc-qwen3-fp8-block")
    planned = make_planned(folder, "cpu")
    with engine(world), pytest.raises(UsageError, match="cuts a block of 128 rows") as caught:
        build(json.loads((folder / "config.json").read_text()), OmniplatConfig(planned), frozenset({"attention"}))
    assert "qkv_proj" in str(caught.value)
    assert any(item.code == "tp-not-divisible" for item in make_planned(folder, "cpu", tp=world).plan.findings)


def fused_experts(rank: int, world: int, scratch: Path) -> None:
    """Experts whose gate and up are one tensor: vLLM hands them over in halves."""
    source = folder_of("lc-qwen3moe-mxfp4")
    folder = scratch / f"fused-{world}-{rank}"
    folder.mkdir()
    tensors = dict(tensors_of(source))
    for name in [name for name in tensors if ".gate_proj." in name]:
        pair = tensors.pop(name), tensors.pop(name.replace(".gate_proj.", ".up_proj."))
        tensors[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(pair)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)
    run_experts(folder, False, rank, world)


def experts(expert_parallel: bool, rank: int, world: int, scratch: Path) -> None:
    run_experts(folder_of("lc-qwen3moe-mxfp4"), expert_parallel, rank, world)


def run_experts(folder: Path, expert_parallel: bool, rank: int, world: int) -> None:
    planned = make_planned(folder, "cpu", engine="vllm")
    config = json.loads((folder / "config.json").read_text())
    run_planned_experts(planned, folder, config, expert_parallel, rank, world)


def run_planned_experts(
    planned: Planned, folder: Path, model_config: Mapping[str, Any], expert_parallel: bool, rank: int, world: int
) -> None:
    """vLLM's layer of experts with vLLM's routing, split along I or by expert."""
    with engine(world, expert_parallel=expert_parallel) as config, torch.no_grad():
        model = ExpertLayer(model_config, OmniplatConfig(planned))
        load(model, folder)
        layer = model.model.layers[0].mlp
        assert isinstance(layer, Experts)
        routed: RoutedExperts = layer.experts.routed_experts
        assert isinstance(routed.quant_method, OmniplatMoEMethod)
        assert not dict(routed.named_parameters())
        item = next(item for item in planned.layers if item.packed.spec.moe is not None)
        assert item.capability is not None
        held = Rank(ep_rank=rank, ep_size=world) if expert_parallel else Rank(rank, world)
        reader = ShardReader(planned.resolutions[0].component.root)
        alone = load_layer(item.packed, load_kernel(item.capability.impl), reader, rank=held)
        assert isinstance(alone, QuantExperts)
        member = getattr(routed, MEMBER)
        assert member.nbytes == alone.nbytes
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, logits: layer.experts(hidden_states=x, router_logits=logits),
            fullgraph=True, dynamic=True, backend="aot_eager",
        )  # fmt: skip
        for x in inputs(int(model_config["hidden_size"])):
            logits = torch.randn(x.shape[0], 4, generator=torch.Generator().manual_seed(x.shape[0])).to(torch.bfloat16)
            y = layer.experts(hidden_states=x, router_logits=logits)
            weights, ids = layer.experts.router.select_experts(hidden_states=x, router_logits=logits)
            expected = alone(x, ids, weights, routed.expert_map)
            if world > 1:
                expected = tensor_model_parallel_all_reduce(expected)
            assert y.float().abs().max() > 0
            assert torch.equal(y, expected)
            assert torch.equal(compiled(x, logits), y)
        assert config.parallel_config.enable_expert_parallel == expert_parallel


ALL = frozenset({"attention", "mlp", "down"})
CHECKS: dict[str, Check] = {
    "compressed-tensors-int4-fp8-mxfp4": partial(dense, "lc-qwen3-mixed-fp8-w4-mxfp4", ALL),
    "compressed-tensors-nvfp4": partial(dense, "lc-qwen3-nvfp4", ALL),
    "modelopt-int4-along-n": partial(dense_g128, "mo-qwen3-int4-awq"),
    "modelopt-fp8-nvfp4": partial(dense, "mo-qwen3-mixed-fp8-nvfp4", ALL),
    "auto-round-gptq": partial(dense_g128, "ar016-qwen3-w4a16"),
    "auto-round-zero-points": partial(dense_g128, "ar016-qwen3-w4a16-asym"),
    "act-order": partial(dense_g128, "lc010-qwen3-w4a16-gptq-actorder-group"),
    "int8": partial(dense, "lc-qwen3-w8a8-int8", ALL),
    "bitsandbytes": partial(dense, "hf-qwen3-bnb-nf4", ALL),
    "mxfp4": partial(dense, "lc-qwen3moe-mxfp4", frozenset({"attention"})),
    "fp8-block-partial": partial_blocks,
    "composite": composite,
    "experts": partial(experts, False),
    "experts-fused": fused_experts,
}
#: Only with one rank, and only with two.
ALONE: dict[str, Check] = {"fp8-block": partial(dense, "lc-qwen3-fp8-block", ALL)}
SHARED: dict[str, Check] = {"fp8-block-cut": cut_blocks, "experts-by-rank": partial(experts, True)}
