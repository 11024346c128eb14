"""What vLLM's registry of methods holds under ModelOpt's names beside vllm-omni.

vllm-omni gives metadata of ModelOpt's FP8, NVFP4 and mixed checkpoints to the class that vLLM registers for it, before
it asks for builders (`vllm_omni/quantization/factory.py`, `build_quant_config`). So that class is replaced through
vLLM's public registry: by one of its own that asks omniplat where the model is one of vllm-omni's
(`vllm_omni_modelopt`).

An entry is a name only: vLLM's module for ModelOpt is imported when a checkpoint needs it, not when plugins register.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_MODULE = "omniplat.integrations.vllm_omni_modelopt"


class _Entry(QuantizationConfig):  # type: ignore[misc]
    """Stands for the class `target` of `_MODULE`: making one makes that, and questions to the class are passed on."""

    target: ClassVar[str]

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return cls.meant()(*arguments, **options)

    @classmethod
    def meant(cls) -> type[QuantizationConfig]:
        found: type[QuantizationConfig] = getattr(import_module(_MODULE), cls.target)
        return found

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        return cls.meant().from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        claimed: str | None = cls.meant().override_quantization_method(hf_quant_cfg, user_quant, hf_config)
        return claimed

    @classmethod
    def get_min_capability(cls) -> int:
        return int(cls.meant().get_min_capability())

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return list(cls.meant().get_config_filenames())


class ModelOptFp8Entry(_Entry):
    target: ClassVar[str] = "OmniplatModelOptFp8Config"


class ModelOptNvFp4Entry(_Entry):
    target: ClassVar[str] = "OmniplatModelOptNvFp4Config"


class ModelOptMixedEntry(_Entry):
    target: ClassVar[str] = "OmniplatModelOptMixedConfig"


#: vLLM's names of methods -> their entries.
ENTRIES: dict[str, type[_Entry]] = {
    "modelopt": ModelOptFp8Entry,
    "modelopt_fp4": ModelOptNvFp4Entry,
    "modelopt_mixed": ModelOptMixedEntry,
}


def register_entries() -> None:
    """Any number of times."""
    for name, entry in ENTRIES.items():
        register_quantization_config(name)(entry)
