"""ComfyUI's single files: JSON in the safetensors metadata, marker tensors, the old spelling, tiled block scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniplat import plan
from omniplat.document import Plan
from omniplat.oracle import dequantize, linear
from tests.support.arrays import canonical, modules, relative, run, write_arrays
from tests.support.checkpoints import Shapes, bf16, write_shard

Array = np.ndarray[Any, Any]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def document(layers: Any, **extra: Any) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers, **extra})}


def planned(folder: Path, tensors: Shapes, metadata: dict[str, str] | None = None, values: Any = None) -> Plan:
    folder.mkdir(exist_ok=True, parents=True)
    write_shard(folder / "model.safetensors", tensors, values, metadata)
    return plan(folder / "model.safetensors", "cpu")


def summary(found: Plan) -> dict[str, tuple[str, str | None, str]]:
    return {layer.name: (layer.stored, layer.declared, layer.status) for layer in found.layers}


def findings(found: Plan) -> list[str]:
    return sorted(item.code for item in found.findings if item.severity != "note")


NVFP4: Shapes = {
    "m.weight": ("U8", (96, 128)),
    "m.weight_scale": ("F8_E4M3", (128, 16)),
    "m.weight_scale_2": ("F32", ()),
}


@pytest.mark.parametrize(
    ("kind", "tensors", "declared"),
    [
        ("float8_e4m3fn", {"m.weight": ("F8_E4M3", (8, 64)), "m.weight_scale": ("F32", ())}, "fp8-tensor/a16"),
        ("float8_e4m3fn", {"m.weight": ("F8_E4M3", (8, 64)), "m.weight_scale": ("F32", ()),
                           "m.input_scale": ("F32", ())}, "fp8-tensor/fp8-tensor-static"),
        ("float8_e5m2", {"m.weight": ("F8_E5M2", (8, 64)), "m.weight_scale": ("F32", (1,))}, "fp8e5m2-tensor/a16"),
        ("float8_e4m3fn_rowwise", {"m.weight": ("F8_E4M3", (8, 64)), "m.weight_scale": ("F32", (8,))},
         "fp8-channel/a16"),
        ("float8_e4m3fn_blockwise", {"m.weight": ("F8_E4M3", (128, 128)), "m.weight_scale": ("F32", (2, 2))},
         "fp8-block64x64/a16"),
        ("nvfp4", NVFP4, "nvfp4/a16"),
        ("nvfp4", {**NVFP4, "m.input_scale": ("F32", ())}, "nvfp4/nvfp4"),
        ("mxfp8", {"m.weight": ("F8_E4M3", (32, 96)), "m.weight_scale": ("U8", (128, 4))}, "mxfp8/mxfp8"),
        ("int8_tensorwise", {"m.weight": ("I8", (8, 64)), "m.weight_scale": ("F32", ())}, "int8-tensor/int8-token"),
        ("int8_tensorwise", {"m.weight": ("I8", (8, 64)), "m.weight_scale": ("F32", (8, 1))},
         "int8-channel/int8-token"),
        ("int8_blockwise", {"m.weight": ("I8", (128, 192)), "m.weight_scale": ("F32", (2, 3))},
         "int8-block64x64/int8-token"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("marker", [False, True])
def test_every_format_in_both_places(tmp_path: Path, kind: str, tensors: Shapes, declared: str, marker: bool) -> None:
    layer = {"format": kind, "group_size": 64}
    named = {**tensors, "f.weight": bf16(8, 8)}
    if marker:
        blob = json.dumps(layer).encode()
        found = planned(tmp_path, {**named, "m.comfy_quant": ("U8", (len(blob),))}, None, {"m.comfy_quant": blob})
    else:
        found = planned(tmp_path, named, document({"m": layer}))
    assert summary(found)["m"] == (declared.partition("/")[0], declared, "ok")
    assert summary(found)["f"][2] == "unquantized"
    assert findings(found) == []
    assert found.checkpoint.formats == ("comfyui",)


def test_a_layer_that_is_to_run_in_full_precision(tmp_path: Path) -> None:
    layers = {"m": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}}
    tensors: Shapes = {
        "m.weight": ("F8_E4M3", (8, 64)),
        "m.weight_scale": ("F32", ()),
        "m.input_scale": ("F32", ()),
    }
    assert summary(planned(tmp_path, tensors, document(layers)))["m"] == ("fp8-tensor", "fp8-tensor/a16", "ok")


def test_names_are_exact(tmp_path: Path) -> None:
    """`blocks.1` is not `blocks.10`."""
    fp8: Shapes = {
        f"blocks.{i}.a.{leaf}": shape
        for i in (1, 10)
        for leaf, shape in {"weight": ("F8_E4M3", (8, 64)), "weight_scale": ("F32", ())}.items()
    }
    found = planned(tmp_path, fp8, document({"blocks.1.a": {"format": "float8_e4m3fn"}}))
    assert findings(found) == ["tensors-contradict-config"]
    (finding,) = [item for item in found.findings if item.code == "tensors-contradict-config"]
    assert finding.modules == ("blocks.10.a",)


def test_the_old_spelling(tmp_path: Path) -> None:
    tensors: Shapes = {
        "a.weight": ("F8_E4M3", (8, 64)),
        "a.scale_weight": ("F32", ()),
        "a.scale_input": ("F32", ()),
        "b.weight": ("F8_E4M3", (8, 64)),
        "b.scale_weight": ("F32", ()),
        "f.weight": bf16(8, 64),
        "scaled_fp8": ("F8_E4M3", (0,)),
    }
    found = planned(tmp_path, tensors)
    assert {name: declared for name, (_, declared, _) in summary(found).items()} == {
        "a": "fp8-tensor/fp8-tensor-static",
        "b": "fp8-tensor/a16",
        "f": "bf16/a16",
    }
    assert findings(found) == []


@pytest.mark.parametrize("kind", ["convrot_w4a4", "svdquant_w4a4", "awq_w4a16"])
def test_formats_with_an_undocumented_part_are_unsupported(tmp_path: Path, kind: str) -> None:
    tensors: Shapes = {"m.weight": ("I8", (8, 32)), "m.weight_scale": ("F32", (8, 1))}
    found = planned(tmp_path, tensors, document({"m": {"format": kind}}))
    assert summary(found)["m"][2] == "unsupported"
    assert findings(found) == ["unsupported-option"]
    assert found.layers[0].trace
    assert kind in json.dumps(found.to_dict())


def test_a_rotated_int8_layer_is_unsupported(tmp_path: Path) -> None:
    tensors: Shapes = {"m.weight": ("I8", (8, 256)), "m.weight_scale": ("F32", (8, 1))}
    layers = {"m": {"format": "int8_tensorwise", "convrot": True}}
    assert summary(planned(tmp_path, tensors, document(layers)))["m"][2] == "unsupported"


@pytest.mark.parametrize(
    ("layers", "code", "key"),
    [
        ({"m": {"format": "fp3"}}, "unsupported-option", "layers.m.format"),
        ({"m": {"format": 3}}, "metadata-unreadable", "layers.m.format"),
        ({"m": "nvfp4"}, "metadata-unreadable", "layers.m"),
        ([1], "metadata-unreadable", "layers"),
        ({"m": {"format": "int8_blockwise", "group_size": 0}}, "metadata-unreadable", "group_size"),
        ({"absent": {"format": "nvfp4"}}, "rule-matches-nothing", "absent"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, layers: Any, code: str, key: str) -> None:
    found = planned(tmp_path, NVFP4, document(layers))
    (finding,) = [item for item in found.findings if item.where.file == "model.safetensors" and item.code == code]
    assert finding.severity == "error"
    assert key in finding.where.rule


@pytest.mark.parametrize("blob", [b"{", b"[1]", b"\xff\xff", b""])
def test_a_broken_marker_names_the_tensor(tmp_path: Path, blob: bytes) -> None:
    tensors = {**NVFP4, "m.comfy_quant": ("U8", (len(blob),))}
    found = planned(tmp_path, tensors, None, {"m.comfy_quant": blob})
    (finding,) = [item for item in found.findings if item.code == "metadata-unreadable"]
    assert finding.where.rule == "m.comfy_quant"


# --- tiles -------------------------------------------------------------------------------------------------------


def tiled(scale: Array) -> Array:
    """Block scales one by one into tiles of 128 x 4, zeros where nothing lies."""
    rows, columns = scale.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    out = np.zeros(tall * wide * 512, scale.dtype)
    for r in range(rows):
        for c in range(columns):
            out[(r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    return out.reshape(tall * 128, wide * 4)


def fp4_layer(n: int, k: int, *, high_first: bool) -> tuple[dict[str, Array], Array]:
    random = np.random.default_rng(n)
    codes = random.integers(0, 16, (n, k)).astype(np.uint8)
    scale = random.uniform(0.5, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    first, second = (codes[:, 1::2], codes[:, 0::2]) if high_first else (codes[:, 0::2], codes[:, 1::2])
    arrays = {
        "m.weight": first | (second << 4),
        "m.weight_scale": tiled(scale),
        "m.weight_scale_2": np.array([0.001], np.float32),
    }
    table = np.array([*E2M1, *(-v for v in E2M1)])
    return arrays, table[codes] * np.repeat(scale.astype(np.float64), 16, axis=1) * float(np.float32(0.001))


@pytest.mark.parametrize(("n", "k"), [(96, 96), (128, 64), (144, 192)])
def test_nvfp4_has_the_even_column_high_and_scales_in_tiles(tmp_path: Path, n: int, k: int) -> None:
    arrays, wanted = fp4_layer(n, k, high_first=True)
    write_arrays(tmp_path, arrays, metadata=document({"m": {"format": "nvfp4"}}))
    np.testing.assert_allclose(dequantize(canonical(tmp_path / "model.safetensors", "m")), wanted, rtol=1e-6)


def test_a_smoothed_nvfp4_layer_runs(tmp_path: Path) -> None:
    arrays, wanted = fp4_layer(96, 96, high_first=True)
    smooth = np.random.default_rng(0).uniform(0.5, 2, 96).astype(np.float32)
    arrays |= {"m.input_scale": np.array([0.01], np.float32), "m.pre_quant_scale": smooth}
    write_arrays(tmp_path, arrays, metadata=document({"m": {"format": "nvfp4"}}))
    weight = canonical(tmp_path, "m")
    assert weight.scheme.id == "nvfp4/nvfp4"
    x = np.random.default_rng(1).normal(0, 1, (4, 96)).astype(np.float32)
    plain = (x.astype(np.float64) * smooth) @ wanted.T
    np.testing.assert_allclose(linear(x, weight, activation=False), plain, rtol=1e-5, atol=1e-6)
    assert 0.01 < relative(linear(x, weight), plain) < 0.3
    assert relative(run(tmp_path, "m", x), linear(x, weight)) < 1e-5


def test_mxfp8_scales_lie_in_tiles(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    values = random.normal(0, 40, (64, 160)).astype(ml_dtypes.float8_e4m3fn)
    scale = random.integers(110, 130, (64, 5)).astype(np.uint8)
    arrays = {"m.weight": values, "m.weight_scale": tiled(scale)}
    write_arrays(tmp_path, arrays, metadata=document({"m": {"format": "mxfp8"}}))
    wanted = values.astype(np.float64) * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)
    np.testing.assert_array_equal(dequantize(canonical(tmp_path, "m")), wanted)


def test_tiles_of_modelopt_keep_the_even_column_low(tmp_path: Path) -> None:
    arrays, wanted = fp4_layer(96, 96, high_first=False)
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "producer": {"name": "modelopt"}}
    write_arrays(tmp_path, arrays, metadata={"quantization_config": json.dumps(config)})
    np.testing.assert_allclose(dequantize(canonical(tmp_path, "m")), wanted, rtol=1e-6)


def test_tiles_without_metadata_are_recognised_and_refused(tmp_path: Path) -> None:
    """NVFP4 beyond doubt, but either order of the nibbles would give a weight."""
    arrays, _ = fp4_layer(96, 96, high_first=True)
    write_arrays(tmp_path, arrays)
    module = modules(tmp_path)["m"]
    assert (module.scheme.weight_id, module.status) == ("nvfp4", "unsupported")
    assert (module.out_features, module.in_features) == (96, 96)
    found = plan(tmp_path, "cpu")
    assert "nibble" in " ".join(item.message for item in found.findings if item.code == "unsupported-option")


def test_tiles_of_the_wrong_size_are_invalid(tmp_path: Path) -> None:
    arrays, _ = fp4_layer(96, 96, high_first=True)
    bad = {**arrays, "m.weight_scale": arrays["m.weight_scale"][:64]}
    write_arrays(tmp_path, bad, metadata=document({"m": {"format": "nvfp4"}}))
    assert modules(tmp_path)["m"].status == "invalid"


def test_plain_rows_without_metadata_stay_readable(tmp_path: Path) -> None:
    """A shape that is no tile's is plain rows; K is twice the packed columns."""
    tensors: Shapes = {
        "img_in.weight": ("U8", (96, 32)),
        "img_in.weight_scale": ("F8_E4M3", (96, 4)),
        "img_in.weight_scale_2": ("F32", ()),
    }
    found = planned(tmp_path, tensors, {"quantization_config": json.dumps({"quant_method": "modelopt",
                                                                           "quant_algo": "W4A16_NVFP4"})})  # fmt: skip
    assert summary(found)["img_in"] == ("nvfp4", "nvfp4/a16", "ok")
    assert found.layers[0].shape == {"out": 96, "in": 64}
