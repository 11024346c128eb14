"""Converting these dialects: the dequantized weight under the same names, nothing of the quantization left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniplat import plan
from omniplat.api import make_planned
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.reader import ShardReader
from omniplat.errors import InvalidCheckpointError
from omniplat.tools.convert import convert
from tests.formats.test_comfy import document, fp4_layer
from tests.formats.test_svdquant import OMNI, Layer
from tests.support.arrays import relative, write_arrays

Array = np.ndarray[Any, Any]


def converted(source: Path, destination: Path) -> dict[str, Array]:
    """All tensors of the converted checkpoint, f32."""
    checkpoint = open_checkpoint(source)
    convert(checkpoint, make_planned(checkpoint, "cpu").resolutions, destination, "f32")
    has_config = (destination / "config.json").exists()
    (component,) = open_checkpoint(destination if has_config else next(destination.iterdir())).components
    reader = ShardReader(destination)
    return {name: np.array(reader.read(info)) for name, info in component.tensors.items()}


def test_svdquant_folds_smoothing_and_adds_the_pair(tmp_path: Path) -> None:
    layer = Layer(128, 128, "nvfp4")
    write_arrays(tmp_path / "a", layer.in_rows(), config={"quantization_config": OMNI})
    tensors = converted(tmp_path / "a", tmp_path / "b")
    assert set(tensors) == {"m.weight", "m.bias"}
    smooth = layer.smooth.astype(np.float64)
    wanted = layer.residual() / smooth + layer.up.astype(np.float64) @ layer.down.astype(np.float64).T
    assert relative(tensors["m.weight"], wanted) < 1e-6


def test_comfyui_markers_go(tmp_path: Path) -> None:
    arrays, wanted = fp4_layer(96, 96, high_first=True)
    blob = np.frombuffer(json.dumps({"format": "nvfp4"}).encode(), np.uint8)
    write_arrays(tmp_path / "a", {**arrays, "m.comfy_quant": blob})
    tensors = converted(tmp_path / "a", tmp_path / "b")
    assert set(tensors) == {"m.weight"}
    assert relative(tensors["m.weight"], wanted) < 1e-6
    assert {layer.status for layer in plan(tmp_path / "b", "cpu").layers} == {"unquantized"}


def test_modelslim_descriptions_go(tmp_path: Path) -> None:
    q = np.random.default_rng(0).integers(-127, 128, (8, 32)).astype(np.int8)
    scale = np.full((8, 1), 0.5, np.float32)
    arrays = {"m.weight": q, "m.weight_scale": scale, "m.weight_offset": np.zeros_like(scale)}
    files = {"quant_model_description_w8a8_dynamic.json": {"m.weight": "W8A8_DYNAMIC"}}
    write_arrays(tmp_path / "a", arrays, files=files)
    tensors = converted(tmp_path / "a", tmp_path / "b")
    assert set(tensors) == {"m.weight"}
    np.testing.assert_array_equal(tensors["m.weight"], q * np.float32(0.5))
    assert [path.name for path in sorted((tmp_path / "b").iterdir())] == ["config.json", "model.safetensors"]


def test_dual_level(tmp_path: Path) -> None:
    arrays = {
        "m.weight": np.full((4, 512), 1.5, ml_dtypes.float8_e4m3fn),
        "m.weight_scale": np.full((4, 16), 128, np.uint8),
        "m.weight_dual_scale": np.full((4, 1, 1), 0.25, np.float32),
        "m.mul_scale": np.full(512, 3.0, np.float32),
    }
    config = {"quant_method": "mxfp4_dualscale", "is_checkpoint_serialized": True}
    write_arrays(tmp_path / "a", arrays, config={"quantization_config": config})
    tensors = converted(tmp_path / "a", tmp_path / "b")
    assert set(tensors) == {"m.weight"}
    np.testing.assert_array_equal(tensors["m.weight"], np.full((4, 512), 1.5 * 2 * 0.25 * 3, np.float32))


def test_gguf_becomes_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import write

    (tmp_path / "a").mkdir()
    decoded = write(tmp_path / "a" / "m.gguf", {"blk.0.attn_q": "Q6_K"}, bias=True)
    tensors = converted(tmp_path / "a", tmp_path / "b")
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"], decoded["blk.0.attn_q"])
    assert set(tensors) == {"blk.0.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_norm.weight"}
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["m.safetensors"]


def test_an_unsupported_module_is_refused_with_its_reason(tmp_path: Path) -> None:
    arrays = {"m.weight": np.zeros((8, 32), np.int8), "m.weight_scale": np.ones((8, 1), np.float32)}
    write_arrays(tmp_path / "a", arrays, metadata=document({"m": {"format": "convrot_w4a4"}}))
    with pytest.raises(InvalidCheckpointError, match="rotated"):
        converted(tmp_path / "a", tmp_path / "b")
