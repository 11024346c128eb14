"""A small model of vLLM's real layers, loaded by vLLM's real loader from a checkpoint folder."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omniplat.integrations.vllm_config import OmniplatConfig


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(rank: int, world: int, port: int) -> None:
    """Join the process group; once per process."""
    torch.set_num_threads(1)
    init_distributed_environment(
        world_size=world,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="gloo",
    )
    with set_current_vllm_config(config_of(world)):
        initialize_model_parallel(world, 1)


def config_of(world: int, *, expert_parallel: bool = False) -> VllmConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=world,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="external_launcher" if world > 1 else None,
    )
    return VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=parallel)


@contextmanager
def engine(world: int, *, expert_parallel: bool = False) -> Iterator[VllmConfig]:
    """vLLM's configuration, current while its layers are built and run."""
    config = config_of(world, expert_parallel=expert_parallel)
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=8):
        yield config


class Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, prefix: str, *, fused: bool) -> None:
        super().__init__()
        hidden, heads, kv, dim = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        options = {"bias": False, "quant_config": quant, "params_dtype": torch.bfloat16}
        if fused:
            self.qkv_proj = QKVParallelLinear(hidden, dim, heads, kv, prefix=f"{prefix}.qkv_proj", **options)
            self.o_proj = RowParallelLinear(heads * dim, hidden, prefix=f"{prefix}.o_proj", **options)
        else:
            self.q_proj = ColumnParallelLinear(hidden, heads * dim, prefix=f"{prefix}.q_proj", **options)
            self.k_proj = ReplicatedLinear(hidden, kv * dim, prefix=f"{prefix}.k_proj", **options)


class Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, prefix: str, *, down: bool) -> None:
        super().__init__()
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        options = {"bias": False, "quant_config": quant, "params_dtype": torch.bfloat16}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **options
        )
        if down:
            self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **options)


class Experts(nn.Module):
    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, prefix: str) -> None:
        super().__init__()
        self.experts = FusedMoEFactory(
            num_experts=int(config["num_local_experts"]),
            top_k=2,
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["moe_intermediate_size"]),
            params_dtype=torch.bfloat16,
            quant_config=quant,
            prefix=f"{prefix}.experts",
        )


class Model(nn.Module):
    """Layer 0 with vLLM's fused modules, layer 1 with modules of one part, as far as `only` asks for them."""

    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig, only: frozenset[str]) -> None:
        super().__init__()
        self.quant_config = quant
        layers = []
        for index in (0, 1):
            layer = nn.Module()
            prefix = f"model.layers.{index}"
            if "attention" in only or index == 1:
                layer.self_attn = Attention(config, quant, f"{prefix}.self_attn", fused=index == 0)
            if "mlp" in only and index == 0:
                layer.mlp = Mlp(config, quant, f"{prefix}.mlp", down="down" in only)
            layers.append(layer)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)


class ExpertLayer(nn.Module):
    """A decoder layer's experts alone."""

    def __init__(self, config: Mapping[str, Any], quant: OmniplatConfig) -> None:
        super().__init__()
        self.quant_config = quant
        layer = nn.Module()
        layer.mlp = Experts(config, quant, "model.layers.0.mlp")
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])


MAPPER = WeightsMapper(
    orig_to_new_stacked={
        "layers.0.self_attn.q_proj": ("layers.0.self_attn.qkv_proj", "q"),
        "layers.0.self_attn.k_proj": ("layers.0.self_attn.qkv_proj", "k"),
        "layers.0.self_attn.v_proj": ("layers.0.self_attn.qkv_proj", "v"),
        "layers.0.mlp.gate_proj": ("layers.0.mlp.gate_up_proj", 0),
        "layers.0.mlp.up_proj": ("layers.0.mlp.gate_up_proj", 1),
    }
)


def build(config: Mapping[str, Any], quant: OmniplatConfig, only: frozenset[str]) -> Model:
    return Model(config, quant, only)


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def load(model: nn.Module, folder: Path, mapper: WeightsMapper = MAPPER) -> None:
    """As vLLM loads: its loader walks the model, then every quantization method processes its layer."""
    parameters = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    with_stacked = {name for name, _ in model.named_modules()}

    def wanted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(folder):
            mapped = mapper.apply_list([name])[0]
            inside = any(mapped.startswith(module + ".") for module in parameters)
            if inside or (".experts." in mapped and mapped.partition(".experts.")[0] + ".experts" in with_stacked):
                yield name, tensor

    AutoWeightsLoader(model).load_weights(wanted(), mapper=mapper)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
