"""msModelSlim's checkpoints (`quant_method: ascend`) beside vllm-ascend, which is not installed here.

`Theirs` stands for its config: it registers the same name, takes types of layers from the same description by the same
keys (through the packed modules that the engine gives it), and has methods for some types.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Module
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm_omni.quantization import build_quant_config

from omniplat.api import make_planned
from omniplat.integrations.vllm_claim import judge
from omniplat.integrations.vllm_omni import register_builders
from omniplat.integrations.vllm_omni_config import OmniplatDiffusionConfig
from omniplat.integrations.vllm_probe import gap
from omniplat.models.omni import HUNYUAN_IMAGE_3
from tests.support.arrays import write_arrays
from tests.vllm.engine import engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
DESCRIPTION = "quant_model_description.json"
K = 64
#: Modules of one block, as `model.layers.0.` names them, and their rows.
MODULES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), 64),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), 64),
}
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 1,
}


class TheirLinear(LinearMethodBase):
    def create_weights(self, layer: Module, *args: Any, **options: Any) -> None: ...

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


class TheirExperts(FusedMoEMethodBase):
    def create_weights(self, layer: Module, *args: Any, **options: Any) -> None: ...

    def get_fused_moe_quant_config(self, layer: Module) -> Any:
        return None

    def apply(self, layer: Module, *args: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError


class Theirs(QuantizationConfig):
    known: tuple[str, ...] = ("W8A8_DYNAMIC",)

    def __init__(self, quant_config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.description = quant_config or {}

    def get_name(self) -> str:
        return "ascend"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Theirs:
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        if not self.description:
            self.description = json.loads((Path(model_name) / DESCRIPTION).read_text())

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        name = prefix.rpartition(".")[2]
        parts = self.packed_modules_mapping.get(name, [name])
        (kind,) = {self.description[f"{prefix.removesuffix(name)}{part}.weight"] for part in parts}
        is_linear = isinstance(layer, LinearBase)
        assert is_linear or isinstance(layer, RoutedExperts)
        if kind == "FLOAT":
            return UnquantizedLinearMethod() if is_linear else UnquantizedFusedMoEMethod(layer.moe_config)
        if kind not in self.known:
            raise NotImplementedError(f"{kind} has no method")
        return TheirLinear() if is_linear else TheirExperts(layer.moe_config)


def description(kind: str) -> dict[str, str]:
    return {f"model.layers.0.{name}.weight": kind for name in MODULES}


@pytest.fixture
def installed() -> Iterator[Callable[..., None]]:
    """`installed(*types)` registers `Theirs` with methods for these types."""
    names, own = list(quantization.QUANTIZATION_METHODS), dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG)

    def install(*known: str) -> None:
        made = type("Installed", (Theirs,), {"known": known})
        quantization.register_quantization_config("ascend")(made)

    yield install
    quantization.QUANTIZATION_METHODS[:] = names
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.clear()
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.update(own)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Types of layers beside the weights, and in config.json as well."""
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {}
    for name, rows in MODULES.items():
        prefix = f"model.layers.0.{name}"
        arrays[f"{prefix}.weight"] = rng.integers(-127, 128, (rows, K)).astype(np.int8)
        arrays[f"{prefix}.weight_scale"] = rng.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
        arrays[f"{prefix}.weight_offset"] = np.zeros((rows, 1), np.float32)
    kinds = description("W8A8_DYNAMIC")
    config = {**CONFIG, "quantization_config": {"quant_method": "ascend", **kinds}}
    write_arrays(tmp_path, arrays, config=config, files={DESCRIPTION: {"version": "1.0.0", **kinds}})
    return tmp_path


def metadata(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize(
    ("known", "mode", "claimed", "why"),
    [
        (None, "gaps", True, "Unknown quantization method"),
        (("W8A8_DYNAMIC",), "gaps", False, ""),
        (("W4A8_DYNAMIC",), "gaps", True, "W8A8_DYNAMIC has no method"),
        (("W8A8_DYNAMIC",), "all", True, ""),
    ],
    ids=["not installed", "has an answer", "has none", "asked for"],
)
def test_language_models(
    folder: Path, installed: Callable[..., None], known: tuple[str, ...] | None, mode: str, claimed: bool, why: str
) -> None:
    if known is not None:
        installed(*known)
    verdict = judge(str(folder), metadata(folder), SimpleNamespace(**CONFIG), mode)
    assert verdict.claimed is claimed
    assert not verdict.problem
    assert why in verdict.native_problem
    assert bool(verdict.native_problem) is bool(why)


@pytest.mark.parametrize(
    ("known", "spec", "ours"),
    [
        (None, "keys", True),
        (None, "name", True),
        (("W8A8_DYNAMIC",), "name", False),
        (("W4A8_DYNAMIC",), "name", True),
        # vllm-omni hands the keys over as names of arguments, which vllm-ascend's config does not take.
        (("W8A8_DYNAMIC",), "keys", True),
    ],
)
def test_diffusion_models(
    folder: Path,
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    one_rank: None,
    known: tuple[str, ...] | None,
    spec: str,
    ours: bool,
) -> None:
    monkeypatch.delenv("OMNIPLAT_DISPATCH", raising=False)
    if known is not None:
        installed(*known)
    register_builders()
    config = build_quant_config("ascend" if spec == "name" else metadata(folder))
    assert isinstance(config, OmniplatDiffusionConfig)
    with engine(1):
        config.maybe_update_config(str(folder))
    assert config.get_name() == "ascend"
    assert config._own_linears is ours


def test_another_dialects_checkpoint_is_not_ascends(one_rank: None) -> None:
    config = OmniplatDiffusionConfig("ascend", {}, "gaps")
    with engine(1), pytest.raises(Exception, match="not msmodelslim"):
        config.maybe_update_config(str(EXAMPLE))


def hunyuan(description: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, kind: str) -> str:
    """What stops `Theirs` on HunyuanImage-3's layers, on an engine for that kind of device."""
    monkeypatch.setattr("omniplat.integrations.vllm_probe.engine_device", lambda: kind)
    planned = make_planned(EXAMPLE, "npu:a5", engine="vllm")
    native = type("Installed", (Theirs,), {"known": ("W4A4_MXFP4", "W8A8_MXFP8")})(dict(description))
    return gap(planned.layers, HUNYUAN_IMAGE_3, native)


def test_experts_of_hunyuan_are_asked_for_as_ascends_engine_does(
    monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    """By the two modules of the first expert; the table of another platform does not have that name."""
    planned = make_planned(EXAMPLE, "npu:a5", engine="vllm")
    kinds = {"mxfp4": "W4A4_MXFP4", "mxfp8": "W8A8_MXFP8", "bf16": "FLOAT"}
    given = {
        f"{module}.weight": kinds[item.layer.stored.partition("+")[0]]
        for item in planned.layers
        for module in item.layer.modules
    }
    assert hunyuan(given, monkeypatch, "npu") == ""
    assert "experts: KeyError" in hunyuan(given, monkeypatch, "cuda")
    mixed = {name: "FLOAT" if name.endswith("experts.0.down_proj.weight") else kind for name, kind in given.items()}
    assert "experts" in hunyuan(mixed, monkeypatch, "npu")
