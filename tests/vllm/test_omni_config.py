"""The configs that vllm-omni gets from omniplat: what it reads of them, and what they refuse."""

from __future__ import annotations

import pytest
from vllm_omni.quantization.inc_config import OmniINCConfig

from omniplat.integrations.vllm_omni import _ALIASES, _ONLINE, _STORED, MethodBuilder

METHODS = (*_ONLINE, *_STORED, *_ALIASES)
#: Of one that is applied to weights in 16 bit, the same class as of any other.
STORED = {"is_checkpoint_mxfp8_serialized": True}


@pytest.mark.parametrize("method", METHODS)
def test_everything_that_a_config_has_can_be_read(method: str) -> None:
    """Configs of what is stored are AutoRound's by their type, without its fields."""
    config = MethodBuilder(method, None)(**(STORED if method == "mxfp8" else {}))
    assert isinstance(config, OmniINCConfig) == (method not in _ONLINE or method == "mxfp8")
    assert method in repr(config)
    assert str(config) == f"{config}" == repr(config)
    properties = {
        name for kind in type(config).__mro__ for name, value in vars(kind).items() if isinstance(value, property)
    }
    assert {"is_checkpoint_quantized", "data_type"} <= properties
    before_a_checkpoint = {"layers", "planned"}
    for name in properties - before_a_checkpoint:
        getattr(config, name)
    assert not getattr(config, "is_mxfp", False)
