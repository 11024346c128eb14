"""Known sensitivities of models: in the plan of a stored checkpoint too, and none without reason and source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import omniplat
from omniplat.conformance.dialect import write_checkpoint
from omniplat.errors import UsageError
from omniplat.models.advice import REFUSED, SENSITIVE, why_sensitive
from omniplat.scheme import Scheme
from tests.modules import tiny


def stored(folder: Path, scheme: str, **config: object) -> Path:
    write_checkpoint(folder, Scheme.parse(scheme), tiny.SIZES)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


TI2V = {"_class_name": "WanTransformer3DModel", "in_channels": 48, "num_layers": 30}


def test_a_stored_checkpoint_is_advised_against(tmp_path: Path) -> None:
    folder = stored(tmp_path, "mxfp4/mxfp4", **TI2V)
    plan = omniplat.plan(folder, "cpu")
    (found,) = [item for item in plan.findings if item.code == "model-advice"]
    assert found.severity == "error"
    assert found.modules_total == 7
    with pytest.raises(UsageError, match=r"Wan2.2-TI2V-5B.*--allow model-advice"):
        omniplat.load(folder, "cpu")
    with pytest.raises(UsageError, match=r"Wan2.2-TI2V-5B"):
        omniplat.load_into(tiny.decoder(), folder, "cpu")
    allowed = omniplat.plan(folder, "cpu", allow=["model-advice"])
    assert [item.severity for item in allowed.findings if item.code == "model-advice"] == ["warning"]
    assert omniplat.load(folder, "cpu", allow=["model-advice"])


@pytest.mark.parametrize(
    ("scheme", "config"),
    [("mxfp8/mxfp8", TI2V), ("mxfp4/a16", TI2V), ("mxfp4/mxfp4", TI2V | {"num_layers": 40}), ("mxfp4/mxfp4", {})],
)
def test_others_are_not(scheme: str, config: dict[str, object], tmp_path: Path) -> None:
    plan = omniplat.plan(stored(tmp_path, scheme, **config), "cpu")
    assert not [item for item in plan.findings if item.code == "model-advice"]


@pytest.mark.parametrize(
    ("model", "name", "stays"),
    [
        ("QwenImageTransformer2DModel", "transformer_blocks.3.img_mod.1", True),
        ("QwenImageTransformer2DModel", "transformer_blocks.3.img_mlp.net.2", False),
        ("FluxTransformer2DModel", "single_transformer_blocks.1.norm.linear", True),
        ("FluxTransformer2DModel", "single_transformer_blocks.1.proj_out", False),
        ("FluxTransformer2DModel", "proj_out", True),
        ("FluxTransformer2DModel", "time_text_embed.timestep_embedder.linear_1", True),
        ("WanTransformer3DModel", "condition_embedder.time_proj", True),
        ("WanTransformer3DModel", "blocks.0.ffn.net.2", False),
        ("Qwen3ForCausalLM", "lm_head", True),
        ("Qwen3ForCausalLM", "model.layers.0.mlp.gate", True),
        ("Qwen3ForCausalLM", "model.layers.0.mlp.gate_proj", False),
        ("Qwen3ForCausalLM", "proj_out", False),
    ],
)
def test_sensitive_layers_by_name(model: str, name: str, stays: bool) -> None:
    assert bool(why_sensitive(name, {"_class_name": model})) == stays


def test_every_entry_has_a_reason_and_a_source() -> None:
    assert all(entry.reason and entry.source for entry in (*SENSITIVE, *REFUSED))
