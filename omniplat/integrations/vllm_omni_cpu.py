"""vllm-omni on a machine without an accelerator: a platform for its diffusion workers, to try models and for tests.

It is active with OMNIPLAT_VLLM_OMNI_CPU=1 only (`vllm_plugin.cpu_platform`). vllm-omni itself has no platform for CPUs.
"""

from __future__ import annotations

import os

import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

#: By name: importing it asks for the platform, which this module is imported for.
_ATTENTION = "omniplat.integrations.vllm_omni_attention.CpuAttentionBackend"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """What the diffusion engine asks of a platform, for host memory and one device."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm.v1.worker.cpu_worker.CPUWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return cls.get_omni_ar_worker_cls()

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Raises ValueError for backends of accelerators."""
        if selected_backend is not None and selected_backend.upper() not in ("TORCH_SDPA", "SDPA"):
            raise ValueError(f"attention backend {selected_backend} does not run on CPUs; TORCH_SDPA does")
        return _ATTENTION

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        """Nothing is gained by it, but what it does can be seen."""
        return True

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs beside the caller."""

    @classmethod
    def record_device_event(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        """Host memory is not cached."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return cls.get_free_memory(device), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return 0

    @classmethod
    def max_memory_reserved(cls) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls) -> int:
        return 0

    @classmethod
    def reset_peak_memory_stats(cls) -> None:
        """Host memory keeps none."""

    @classmethod
    def init_diffusion_worker_vllm_config(cls, vllm_config: VllmConfig) -> None:
        """Nothing: vLLM's own settings for CPUs are those of language models."""
