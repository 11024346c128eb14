"""Attention of vllm-omni's diffusion models on CPUs, by torch."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttentionImpl(SDPAImpl):  # type: ignore[misc]
    """vllm-omni's attention by torch; its own `forward` knows accelerators only."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: object = None
    ) -> torch.Tensor:
        """[batch, tokens, heads, size] each."""
        y: torch.Tensor = self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")
        return y


class CpuAttentionBackend(SDPABackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[CpuAttentionImpl]:
        return CpuAttentionImpl
