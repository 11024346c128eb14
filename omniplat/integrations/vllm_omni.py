"""Quantization methods of vllm-omni: builders of configs, by the names that users and checkpoints give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from omniplat.host import installed_version
from omniplat.integrations.dispatch import LOGGER, METHOD, dispatch_mode

if TYPE_CHECKING:
    from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig

Builder = Callable[..., QuantizationConfig]

#: Methods that are applied to weights in 16 bit, or confirm what is stored.
_ONLINE = ("int8", "fp8", "mxfp8", "mxfp4", "mxfp4_dualscale", "nvfp4", "int4", "bitsandbytes")
#: Dialects of quantized checkpoints, by what their metadata calls them, and omniplat's own name for any of them.
_STORED = (
    *(METHOD, "compressed_tensors", "modelopt", "gptq", "awq", "quark", "hqq", "quanto", "torchao", "svdquant"),
    *("ascend", "msmodelslim"),
)
#: Names of one method for vllm-omni.
_ALIASES = ("inc", "auto_round")


_NO_BUILDERS = (
    "vllm-omni %s takes no builders of quantization methods (register_quantization_override). Not active in it: "
    "omniplat's methods for diffusion models, and its dispatch of quantized diffusion checkpoints but ModelOpt's. "
    "Active: language models, and ModelOpt's checkpoints. vllm-omni 0.30 takes builders"
)
#: What vllm-omni's own builders, and the classes behind them, raise for options that they do not like.
_STOCK_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError)


def register_builders() -> None:
    """Put a builder in place for every method; those that vllm-omni has are asked by ours. Once per process.

    Where vllm-omni takes no builders any more, as after 0.30, that is logged as an error with what does not work: what
    its users get then is its own behaviour, and nothing is raised.
    """
    from vllm.utils.import_utils import has_humming

    # vllm-omni puts an empty module called `humming` in place unless the real one is imported, which omniplat's kernels
    # for CUDA need. This imports it where it is installed, and vLLM looks for it only once.
    has_humming()
    from vllm_omni.quantization import factory

    if not hasattr(factory, "register_quantization_override"):
        logging.getLogger(LOGGER).error(_NO_BUILDERS, installed_version("vllm-omni") or "here")
        return
    own: dict[str, Builder] = factory._OVERRIDES  # nothing else tells what is behind a name
    if isinstance(own.get(METHOD), MethodBuilder):
        return
    for name in (*_ONLINE, *_STORED):
        factory.register_quantization_override(name, MethodBuilder(name, own.get(name)))
    for_both = MethodBuilder(_ALIASES[0], own.get(_ALIASES[0]))
    for name in _ALIASES:
        factory.register_quantization_override(name, for_both)


class MethodBuilder:
    """Builds the config of one method. `stock` is vllm-omni's builder for it; None where vLLM's registry has it."""

    def __init__(self, method: str, stock: Builder | None) -> None:
        self.method = method
        self.stock = stock

    def __call__(self, **options: Any) -> QuantizationConfig:
        """Raises UsageError for options that nobody knows."""
        from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig

        if self.method == METHOD and "components" in options:
            return _by_component(options)
        kind: type[OmniplatDiffusionConfig] = OmniplatDiffusionConfig
        if self.method not in _ONLINE or _is_stored(options):
            from omniplat.integrations.vllm_omni_inc import OmniplatStoredConfig

            kind = OmniplatStoredConfig
        native, problem = None, ""
        try:
            native = self._native(options)
        except _STOCK_ERRORS as error:
            problem = f"{type(error).__name__}: {error}"
        return kind(self.method, options, dispatch_mode(), native, problem)

    def _native(self, options: Mapping[str, Any]) -> QuantizationConfig | None:
        """vllm-omni's own config; None where it has no such method."""
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

        if self.stock is not None:
            return self.stock(**options)
        if self.method == METHOD or self.method not in QUANTIZATION_METHODS:
            return None
        return get_quantization_config(self.method)(**options)


def _is_stored(options: Mapping[str, Any]) -> bool:
    """Metadata says of itself that weights are stored quantized; bitsandbytes' own says with how many bits."""
    said = ("is_checkpoint_", "load_in_", "_load_in_")
    return any(key.startswith(said) and value for key, value in options.items())


def _by_component(options: Mapping[str, Any]) -> QuantizationConfig:
    """`{"method": "omniplat", "components": {"transformer": "mxfp8", "transformer_2": None}}`."""
    from omniplat.integrations.vllm_omni_components import component_config

    return component_config(options["components"])
