"""Checkpoints compared weight by weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omniplat.checkpoint.folder import open_checkpoint
from omniplat.cli.compare import compare_command
from omniplat.cli.convert import convert_command
from omniplat.errors import UsageError
from omniplat.tools.compare import Comparison
from omniplat.tools.compare_weights import WeightDistance, compare_weights
from tests.goldens.entries import Entry, bundled

RNG = np.random.default_rng(0)
#: Rounding a value to a dtype moves it by at most half a step, and so the whole weight's relative L2.
HALF_STEPS = {"f32": 2.0**-24, "bf16": 2.0**-8}


def compare(a: Path, b: Path, largest: float | None = None, component: str | None = None) -> int:
    return compare_command(
        a, b, component=component, max_weight_error=largest, min_psnr=None, min_ssim=None, json_output=True
    )


def distances(a: Path, b: Path, component: str | None = None) -> Comparison[WeightDistance]:
    return compare_weights(open_checkpoint(a), open_checkpoint(b), component)


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain() -> dict[str, np.ndarray]:
    return {
        "model.layers.0.mlp.up_proj.weight": RNG.standard_normal((48, 32)).astype(np.float32),
        "model.layers.0.mlp.up_proj.bias": RNG.standard_normal(48).astype(np.float32),
        "model.norm.weight": RNG.standard_normal(32).astype(np.float32),
        "patch.weight": RNG.standard_normal((8, 3, 2, 2)).astype(np.float32),
    }


@pytest.mark.parametrize("entry", bundled(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("dtype", list(HALF_STEPS))
def test_a_checkpoint_and_its_conversion_differ_by_one_rounding(entry: Entry, dtype: str, tmp_path: Path) -> None:
    """Real checkpoints of every bundled dialect: nothing is left out, and nothing is further away than rounding."""
    assert convert_command(str(entry.checkpoint), tmp_path / "converted", dtype, json_output=True) == 0
    found = distances(entry.checkpoint, tmp_path / "converted")
    assert not found.unmatched
    quantized = [item for item in found.items if item.scheme_a != "as it is"]
    assert len(quantized) >= sum(weight != "bf16" for weight in entry.weights.values()) > 0
    assert all(item.scheme_b == "as it is" for item in found.items)
    assert max(item.error for item in found.items) <= HALF_STEPS[dtype]
    assert all(item.error == 0 for item in found.items if item.scheme_a == "as it is")


def test_the_error_is_relative_to_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = plain()
    a = write(tmp_path / "a", tensors)
    b = write(tmp_path / "b", {name: np.float32(1.25) * value for name, value in tensors.items()})
    assert compare(a, b) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in found["weights"]} == set(tensors)
    assert [row["relative_l2"] for row in found["weights"]] == pytest.approx([0.25] * 4, rel=1e-6)
    assert compare(a, b, 0.2501) == 0
    assert compare(a, b, 0.2499) == 1
    capsys.readouterr()
    assert compare(b, a) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["relative_l2"] for row in found["weights"]] == pytest.approx([0.2] * 4, rel=1e-6)


def test_values_that_are_not_finite_are_never_within_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = plain()
    a = write(tmp_path / "a", tensors)
    tensors["model.norm.weight"][3] = np.nan
    assert compare(a, write(tmp_path / "b", tensors)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["out_of_bounds"] == ["model.norm.weight: not finite"]


def test_what_one_side_lacks_or_has_in_another_size_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = plain()
    a = write(tmp_path / "a", tensors | {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)})
    del tensors["model.layers.0.mlp.up_proj.bias"]
    tensors["model.norm.weight"] = np.ones(16, np.float32)
    tensors["extra.weight"] = np.ones((4, 4), np.float32)
    assert compare(a, write(tmp_path / "b", tensors)) == 1
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["reason"] for row in found["unmatched"]} == {
        "model.layers.0.mlp.up_proj.bias": "only in A",
        "model.norm.weight": "[32] in A, [16] in B",
        "extra.weight": "only in B",
    }


def test_components_meet_by_name_and_one_alone_meets_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = plain(), plain()
    pipeline = tmp_path / "pipeline"
    write(pipeline / "transformer", one)
    write(pipeline / "transformer_2", two)
    (pipeline / "model_index.json").write_text(
        json.dumps({"transformer": ["diffusers", "X"], "transformer_2": ["diffusers", "X"]})
    )
    assert compare(pipeline, pipeline, 0.0) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)["weights"]}
    assert names == {f"{part}/{name}" for part in ("transformer", "transformer_2") for name in one}
    alone = write(tmp_path / "alone", two)
    for a, b in ((alone, pipeline), (alone, alone)):
        with pytest.raises(UsageError, match="no component"):
            distances(a, b, "transformer_3")
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "model_index.json").write_text(json.dumps({"transformer_2": ["diffusers", "X"]}))
    assert compare(pipeline, alone, 0.0) == 0


def test_a_bf16_copy_of_one_tensor_is_seen(tmp_path: Path) -> None:
    """Tensors are compared by value, whatever their dtypes."""
    a = write(tmp_path / "a", plain())
    stored = load_file(a / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = stored[name].astype(ml_dtypes.bfloat16)
    errors = {item.name: item.error for item in distances(a, write(tmp_path / "b", stored)).items}
    assert 0 < errors.pop(name) <= 2.0**-8
    assert set(errors.values()) == {0.0}
