"""vLLM's own offloading of weights, which cannot reach layers that omniplat runs."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.config import OffloadConfig, get_current_vllm_config

from omniplat.errors import UsageError


def require_resident(name: str, parameters: Iterable[str]) -> None:
    """Raises UsageError where vLLM is asked to offload one of the `parameters` of its module called `name`.

    It takes the parameters that a module has when it is built. Those of omniplat's layers stand for tensors that are
    yet to come, and what is made of these would stay on the device without a word. Other modules can be offloaded:
    the options that select parameters by name select them.
    """
    option, selected = _asked(get_current_vllm_config().offload_config)
    names = [f".{name}.{leaf}." for leaf in parameters]
    if option and (not selected or any(f".{item}." in full for item in selected for full in names)):
        raise UsageError(
            f"{name}: {option} takes parameters that a layer has before weights are loaded, and layers that omniplat "
            "runs have none: leave it out, or select other layers by name"
        )


def _asked(config: OffloadConfig) -> tuple[str, frozenset[str]]:
    """The option that asks for offloading, "" where none does, and the names of parameters that it is limited to."""
    backend, uva, prefetch = config.offload_backend, config.uva, config.prefetch
    if backend != "uva" and prefetch.offload_group_size > 0:
        return "offload_group_size", frozenset(prefetch.offload_params)
    if backend != "prefetch" and uva.cpu_offload_gb > 0:
        return "cpu_offload_gb", frozenset(uva.cpu_offload_params)
    return "", frozenset()
