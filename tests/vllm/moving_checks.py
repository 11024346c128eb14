"""What engines do with the memory of layers once they are loaded: vllm-omni's offloaders and its sharding, applied to
a transformer of vLLM's real layers. Checks are as in `checks.py`; both ranks hold the whole model.

vllm-omni is imported in the checks: it finds omniplat's platform for CPUs then, and changes vLLM when it is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.distributed import destroy_model_parallel
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.utils import WeightsMapper

from omniplat.api import make_planned
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_loading import MEMBER
from tests.vllm.checks import Check, folder_of
from tests.vllm.engine import engine, load

STORED = "lc-qwen3moe-mxfp4"
CPU = torch.device("cpu")
MAPPER = WeightsMapper(
    orig_to_new_prefix={"model.layers.": "transformer_blocks."},
    orig_to_new_stacked={f"self_attn.{part}_proj": ("self_attn.qkv_proj", part) for part in "qkv"},
)


class Block(nn.Module):
    """Attention without attention, experts with a router of their own, and a norm that is in 16 bit."""

    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, prefix: str) -> None:
        super().__init__()
        hidden, heads, kv, dim = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        options: dict[str, Any] = {"quant_config": quant, "params_dtype": torch.bfloat16}
        linear = {"bias": False, **options}
        self.rows = heads * dim
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear(
            hidden, dim, heads, kv, prefix=f"{prefix}.self_attn.qkv_proj", **linear
        )
        self.self_attn.o_proj = RowParallelLinear(self.rows, hidden, prefix=f"{prefix}.self_attn.o_proj", **linear)
        self.mlp.experts = FusedMoEFactory(
            num_experts=int(config["num_local_experts"]), top_k=2, hidden_size=hidden, tp_size=1, dp_size=1, pcp_size=1,
            intermediate_size=int(config["moe_intermediate_size"]), prefix=f"{prefix}.mlp.experts", **options,
        )  # fmt: skip
        self.norm = nn.LayerNorm(hidden, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn.o_proj(self.self_attn.qkv_proj(self.norm(x))[0][:, : self.rows])[0]
        y: torch.Tensor = x + self.mlp.experts(hidden_states=x, router_logits=x[:, :4])
        return y


class Transformer(nn.Module):
    _layerwise_offload_blocks_attrs = ("transformer_blocks",)
    _hsdp_shard_conditions = (lambda name, module: isinstance(module, Block),)

    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, count: int) -> None:
        super().__init__()
        self.quant_config = quant
        # How vllm-omni's models say what their fused modules hold.
        self.stacked_params_mapping = [(".qkv_proj", f".{part}_proj", part) for part in "qkv"]
        self.transformer_blocks = nn.ModuleList(
            [Block(config, quant, f"transformer_blocks.{index}") for index in range(count)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            x = block(x)
        return x


@cache
def join(rank: int, world: int) -> None:
    """Leave vLLM's process groups for those of a worker of vllm-omni that shares requests, not layers, with others."""
    from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    destroy_model_parallel()
    init_distributed_environment(world, rank, local_rank=rank, backend="gloo")
    initialize_model_parallel(data_parallel_size=world, backend="gloo")


@contextmanager
def transformer(rank: int, world: int) -> Iterator[tuple[Transformer, torch.Tensor, torch.Tensor]]:
    """A loaded model, its input and its output."""
    join(rank, world)
    folder = folder_of(STORED)
    quant = OmniplatConfig(make_planned(folder, "cpu", engine="vllm"))
    quant.apply_vllm_mapper(MAPPER)
    with engine(1), torch.no_grad():
        model = Transformer(json.loads((folder / "config.json").read_text()), quant, 2)
        load(model, folder, MAPPER)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        y = model(x)
        assert torch.isfinite(y.float()).all()
        yield model, x, y


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    """What omniplat's layers below a module hold, but for what has no values."""
    members = (member for name, member in module.named_modules() if name.rpartition(".")[2] == MEMBER)
    return [buffer for member in members for buffer in member.buffers()]


def offload_config(strategy: str, **options: Any) -> Any:
    from vllm_omni.diffusion.offloader import OffloadConfig
    from vllm_omni.diffusion.offloader.config import OffloadStrategy

    return OffloadConfig(OffloadStrategy[strategy], pin_cpu_memory=False, **options)


def pipeline_of(model: Transformer) -> nn.Module:
    """What vllm-omni finds the transformer in."""
    pipeline = nn.Module()
    pipeline.transformer = model
    pipeline.text_encoder = nn.Linear(8, 8)
    return pipeline


def assert_streams(model: Transformer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Of two blocks, the second has no memory while none runs; results are those of the resident model."""
    second = model.transformer_blocks[1]
    for _ in range(3):
        assert max(tensor.numel() for tensor in weights_of(second)) == 0
        assert torch.equal(model(x), y)


def layer_wise(rank: int, world: int, scratch: Path) -> None:
    from vllm_omni.diffusion.offloader import LayerWiseOffloadBackend

    with transformer(rank, world) as (model, x, y):
        backend = LayerWiseOffloadBackend(offload_config("LAYER_WISE"), CPU)
        backend.enable(pipeline_of(model))
        assert_streams(model, x, y)
        backend.disable()
        assert min(tensor.numel() for tensor in weights_of(model)) > 0
        assert torch.equal(model(x), y)


def layer_wise_shared(rank: int, world: int, scratch: Path) -> None:
    """Each rank keeps its share of what a block holds, whatever its type, and gathers the rest when the block runs."""
    from vllm_omni.diffusion.offloader import DistributedLayerwiseOffloadBackend

    with transformer(rank, world) as (model, x, y):
        whole = sum(tensor.nbytes for tensor in weights_of(model))
        backend = DistributedLayerwiseOffloadBackend(offload_config("DISTRIBUTED_LAYER_WISE", dp_size=world), CPU)
        backend.enable(pipeline_of(model))
        (hooks,) = backend._all_hook_groups
        held = sum(shard.nbytes for hook in hooks for shard in hook.cpu_shards.values())
        assert whole / world <= held < 0.6 * whole
        assert_streams(model, x, y)


def sharded(rank: int, world: int, scratch: Path) -> None:
    """HSDP shares what is in 16 bit. Quantized weights stay whole on every rank, as vllm-omni's own packed ones do."""
    from vllm_omni.diffusion.distributed.hsdp import HSDPInferenceConfig, apply_hsdp_to_model

    with transformer(rank, world) as (model, x, y):
        before = [tensor.clone() for tensor in weights_of(model)]
        apply_hsdp_to_model(model, HSDPInferenceConfig(True, 1, world), CPU)
        for _ in range(2):
            assert torch.equal(model(x), y)
        norm = model.transformer_blocks[0].norm.weight
        assert isinstance(norm, torch.distributed.tensor.DTensor)
        assert norm.to_local().numel() == 256 // world
        after = weights_of(model)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))


def adapted(rank: int, world: int, scratch: Path) -> None:
    """A LoRA adapter of vllm-omni for one part of a fused projection and for one that is not fused, and without it."""
    from vllm.lora.request import LoRARequest
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    folder = scratch / f"adapter-{rank}"
    folder.mkdir()
    shapes = {"v_proj": (64, 256), "o_proj": (256, 256)}
    generator = torch.Generator().manual_seed(0)
    products, tensors = {}, {}
    for name, (rows, columns) in shapes.items():
        a, b = (torch.randn(*shape, generator=generator) * 0.1 for shape in ((8, columns), (rows, 8)))
        at = f"base_model.model.transformer.transformer_blocks.0.self_attn.{name}"
        tensors |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
        products[name] = 2.0 * b.to(torch.bfloat16).double() @ a.to(torch.bfloat16).double()  # lora_alpha / r
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(shapes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with transformer(rank, world) as (model, x, y):
        attention = model.transformer_blocks[0].self_attn
        before = {"v_proj": attention.qkv_proj(x)[0], "o_proj": attention.o_proj(x)[0]}
        manager = DiffusionLoRAManager(pipeline_of(model), CPU, torch.bfloat16)
        manager.set_active_adapter(LoRARequest("adapter", 1, str(folder)))
        after = {"v_proj": attention.qkv_proj(x)[0], "o_proj": attention.o_proj(x)[0]}
        for name, product in products.items():
            rows = len(product)
            added = (after[name] - before[name])[:, -rows:].double()
            wanted = x.double() @ product.T
            assert torch.linalg.norm(added - wanted) <= 0.02 * torch.linalg.norm(wanted), name
            assert torch.equal(after[name][:, :-rows], before[name][:, :-rows])
        assert not torch.equal(model(x), y)
        manager.set_active_adapter(None)
        assert torch.equal(model(x), y)


#: With two ranks only.
SHARED: dict[str, Check] = {
    "offload-layer-wise": layer_wise,
    "offload-layer-wise-shared": layer_wise_shared,
    "lora-of-diffusion-models": adapted,
    "hsdp": sharded,
}
