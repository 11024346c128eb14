"""Entry points by which vLLM and vllm-omni find omniplat. They register, and import nothing that the engine has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omniplat.integrations.dispatch import CPU_VARIABLE, LOGGER, METHOD, OFF, dispatch_mode


def register() -> None:
    """`vllm.general_plugins`: called in every process of the engine, any number of times.

    Raises UsageError for an unknown value of OMNIPLAT_DISPATCH.
    """
    if dispatch_mode() == OFF:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from omniplat.integrations.vllm_config import OmniplatConfig

    register_quantization_config(METHOD)(OmniplatConfig)


def register_for_omni() -> None:
    """`vllm_omni.platform_plugins`, which vllm-omni calls as it is imported: before it makes anything of a method's
    name. It asks for a platform, and this is none.

    Problems are logged as errors: vllm-omni itself reports none of a plugin.
    """
    with _logging("omniplat is not registered in vllm-omni"):
        if dispatch_mode() == OFF:
            return
        from omniplat.integrations.vllm_omni import register_builders
        from omniplat.integrations.vllm_omni_entries import register_entries

        register_entries()
        register_builders()


def cpu_platform() -> str | None:
    """`vllm_omni.platform_plugins`: the platform for CPUs, where it is asked for and nothing better is there.

    Problems are logged as errors, as in `register_for_omni`.
    """
    import os

    if os.environ.get(CPU_VARIABLE) != "1":
        return None
    with _logging("omniplat's platform for CPUs is not active in vllm-omni"):
        import torch
        from vllm.platforms import current_platform

        if torch.accelerator.is_available() or not current_platform.is_cpu():
            return None
    return "omniplat.integrations.vllm_omni_cpu.CpuOmniPlatform"


@contextmanager
def _logging(what: str) -> Iterator[None]:
    """Log an error with its traceback before it goes to an engine that reports none."""
    try:
        yield
    except Exception:
        import logging

        logging.getLogger(LOGGER).exception(what)
        raise
