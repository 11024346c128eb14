"""What vLLM would do with a checkpoint by itself, asked from vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_ASKING: ContextVar[bool] = ContextVar("omniplat_asks_the_engine", default=False)


@dataclass(frozen=True, slots=True)
class Native:
    """vLLM's own config for some metadata; where it has none, `problem` is its error."""

    method: str = ""
    config: QuantizationConfig | None = None
    problem: str = ""


def is_asking() -> bool:
    """True while vLLM is asked what it would do without omniplat."""
    return _ASKING.get()


def native_config(
    hf_quant_cfg: Mapping[str, Any],
    user_quant: str | None = None,
    hf_config: Any = None,
    checkpoint: str = "",
    revision: str | None = None,
) -> Native:
    """The config that vLLM makes of a checkpoint's metadata, with the method that it would choose."""
    asked = SimpleNamespace(
        quantization=user_quant,
        model_arch_config=SimpleNamespace(quantization_config=deepcopy(dict(hf_quant_cfg))),
        hf_config=hf_config,
        allow_deprecated_quantization=True,
    )
    token = _ASKING.set(True)
    method = ""
    try:
        # The order in which it asks its methods is inside this function only.
        ModelConfig._verify_quantization(cast(ModelConfig, asked))
        method = str(asked.quantization)
        config = get_quantization_config(method).from_config(deepcopy(dict(hf_quant_cfg)))
        if checkpoint:
            config.maybe_update_config(checkpoint, hf_config=hf_config, revision=revision)
    except Exception as error:  # whatever it is, it is how vLLM fails for this checkpoint
        return Native(method, None, f"{type(error).__name__}: {error}")
    finally:
        _ASKING.reset(token)
    return Native(method, config)
