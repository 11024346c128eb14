"""Small models with the names that transformers and diffusers use: one decoder layer, experts in two forms."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from omniplat.conformance.model import Sizes

SIZES = Sizes(hidden=64, inner=96, heads=2, kv_heads=1, head_dim=32)
EXPERT_SIZES = Sizes(hidden=64, inner=96, heads=2, kv_heads=1, head_dim=32, experts=3)


class Attention(nn.Module):
    """No attention, but the four projections in their places."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, q, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        return self.o_proj(self.q_proj(x) + mixed)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def route(x: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts for each row, in a way that needs no weights."""
    weights, ids = x[:, :experts].softmax(dim=-1).topk(2, dim=-1)
    return ids, weights


class ListedExperts(nn.Module):
    """Experts as a list of MLPs, as they lie in the checkpoint."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(sizes.hidden, sizes.inner) for _ in range(sizes.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = route(x, len(self.experts))
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y += expert(x) * (weights * (ids == index)).sum(dim=-1, keepdim=True)
        return y


class Stack(nn.Module):
    """All experts in two tensors, called as transformers calls them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.inner, sizes.hidden))
        self.down_proj = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.inner))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.gate_up_proj.shape[0]):
            gate, up = F.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, dim=-1)
            share = (top_k_weights * (top_k_index == expert)).sum(dim=-1, keepdim=True)
            y += F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * share
        return y


class StackedExperts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.experts = Stack(sizes)
        self.count = sizes.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *route(x, self.count))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Body(nn.Module):
    def __init__(self, sizes: Sizes, mlp: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(sizes, mlp)])
        self.norm = nn.RMSNorm(sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Adapter(nn.Module):
    """A low-rank adapter with the attribute names of PEFT's."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def decoder() -> Decoder:
    return Decoder(Body(SIZES, Mlp(SIZES.hidden, SIZES.inner)))


def stacked() -> Decoder:
    """With experts in stacks, and values in them."""
    model = Decoder(Body(EXPERT_SIZES, StackedExperts(EXPERT_SIZES)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def write_unquantized(folder: Path, model: nn.Module) -> None:
    """The model's weights as a checkpoint."""
    folder.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def rows(count: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIZES.hidden, generator=torch.Generator().manual_seed(seed))
