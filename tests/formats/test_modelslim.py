"""msModelSlim: every type string, both exporters' files, and the arithmetic that its tensors stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniplat.errors import InvalidCheckpointError
from omniplat.oracle import dequantize, linear
from tests.support.arrays import canonical, modules, relative, run, write_arrays
from tests.support.checkpoints import bf16
from tests.support.resolving import codes, only, resolve, schemes

DESCRIPTION = "quant_model_description.json"
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def described(kind: str, module: str = "m", **extra: Any) -> dict[str, Any]:
    return {DESCRIPTION: {"model_quant_type": kind, "version": "1.0.0", f"{module}.weight": kind, **extra}}


def int8(module: str, n: int, k: int, groups: int = 1) -> Shapes:
    scale = ("F32", (n, groups))
    return {
        f"{module}.weight": ("I8", (n, k)),
        f"{module}.weight_scale": scale,
        f"{module}.weight_offset": scale,
    }


def static(module: str, n: int, k: int, deq: str = "F32") -> Shapes:
    return {
        f"{module}.weight": ("I8", (n, k)),
        f"{module}.quant_bias": ("I32", (n,)),
        f"{module}.deq_scale": (deq, (n,)),
        f"{module}.input_scale": ("F32", (1,)),
        f"{module}.input_offset": ("F32", (1,)),
    }


def packed_n(module: str, n: int, k: int) -> Shapes:
    scale = ("F32", (n, 1))
    return {
        f"{module}.weight": ("I8", (n // 2, k)),
        f"{module}.weight_scale": scale,
        f"{module}.weight_offset": scale,
        f"{module}.scale_bias": scale,
    }


def fp4(module: str, n: int, k: int) -> Shapes:
    return {f"{module}.weight": ("U8", (n, k // 2)), f"{module}.weight_scale": ("U8", (n, k // 32))}


@pytest.mark.parametrize(
    ("kind", "tensors", "scheme"),
    [
        ("W8A8", static("m", 64, 128), "int8-channel/int8-tensor-static-asym"),
        ("W8A8", static("m", 64, 128, "I64"), "int8-channel/int8-tensor-static-asym"),
        ("W8A8_DYNAMIC", int8("m", 64, 128), "int8-channel/int8-token"),
        ("W8A8_DYNAMIC", int8("m", 64, 128, 4), "int8-g32/int8-token"),
        ("W8A8_MIX", {**static("m", 64, 128), **int8("m", 64, 128)}, "int8-channel/int8-token"),
        ("W8A16", int8("m", 64, 128), "int8-channel/a16"),
        ("W8A16", int8("m", 64, 128, 2), "int8-g64/a16"),
        ("W4A16", {**int8("m", 64, 128, 4), "m.weight": ("I8", (32, 128))}, "int4-g32/a16"),
        ("W4A16", {**int8("m", 64, 128), "m.weight": ("I8", (64, 64))}, "int4-channel/a16"),
        ("W4A8_DYNAMIC", packed_n("m", 64, 128), "int4-channel/int8-token"),
        ("W4A4_DYNAMIC", int8("m", 64, 128), "int4-channel/int4-token"),
        ("W4A4_DYNAMIC", int8("m", 64, 256, 2), "int4-g128/int4-token"),
        ("W8A8_MXFP8", {"m.weight": ("F8_E4M3", (64, 128)), "m.weight_scale": ("U8", (64, 4))}, "mxfp8/mxfp8"),
        ("W4A4_MXFP4", fp4("m", 64, 128), "mxfp4/mxfp4"),
        ("W4A8_MXFP", fp4("m", 64, 128), "mxfp4/mxfp8"),
        ("W4A16_MXFP4", fp4("m", 64, 128), "mxfp4/a16"),
        ("W4A4_MXFP4_DUALSCALE", {**fp4("m", 64, 1024), "m.weight_dual_scale": ("F32", (64, 2, 1))},
         "mxfp4-dual/mxfp4-dual"),
        ("WFP8AFP8_DYNAMIC", {**int8("m", 64, 128), "m.weight": ("F8_E4M3", (64, 128))}, "fp8-channel/fp8-token"),
        ("W8A8FP8_DYNAMIC", {**int8("m", 64, 128), "m.weight": ("F8_E4M3", (64, 128))}, "fp8-channel/fp8-token"),
        ("FLOAT", {"m.weight": bf16(64, 128)}, "bf16/a16"),
    ],
)  # fmt: skip
def test_every_type(tmp_path: Path, kind: str, tensors: Any, scheme: str) -> None:
    # group_size of a mixed checkpoint says nothing about this module
    found = resolve(tmp_path, None, tensors, files=described(kind, group_size=256))
    assert schemes(found) == {"m": scheme}
    assert codes(found) == []
    (module,) = found.modules
    assert module.declared is not None
    assert module.declared.id == scheme
    assert module.out_features == 64


def test_the_other_exporter_names_its_file_by_the_type(tmp_path: Path) -> None:
    files = {
        "quant_model_description_w8a8_dynamic.json": {"model_quant_type": "W8A8_DYNAMIC", "m.weight": "W8A8_DYNAMIC"}
    }
    found = resolve(tmp_path, None, int8("m", 64, 128), files=files)
    assert schemes(found) == {"m": "int8-channel/int8-token"}
    assert found.modules[0].decided_by.file == "quant_model_description_w8a8_dynamic.json"


def test_a_router_beside_a_gate_projection(tmp_path: Path) -> None:
    """`mlp.gate` FLOAT, `mlp.gate_proj` quantized: names are exact, prefixes mean nothing."""
    tensors = {**int8("a.mlp.gate_proj", 64, 128), "a.mlp.gate.weight": bf16(8, 128)}
    content = {
        "model_quant_type": "W8A8_DYNAMIC",
        "a.mlp.gate.weight": "FLOAT",
        "a.mlp.gate_proj.weight": "W8A8_DYNAMIC",
        "a.mlp.gate_proj.weight_scale": "W8A8_DYNAMIC",
    }
    found = resolve(tmp_path, None, tensors, files={DESCRIPTION: content})
    assert schemes(found) == {"a.mlp.gate": "bf16/a16", "a.mlp.gate_proj": "int8-channel/int8-token"}
    assert codes(found) == []


def test_names_of_another_model_match_nothing(tmp_path: Path) -> None:
    """The tensors decide, and no list entry hits."""
    found = resolve(tmp_path, None, int8("model.a", 64, 128), files=described("W8A8_DYNAMIC", "talker.model.a"))
    assert schemes(found) == {"model.a": "int8-channel/a16"}
    assert only(found, "rule-matches-nothing").severity == "error"


FLATQUANT: dict[str, Any] = {
    "m.left_trans": ("F32", (8, 8)), "m.right_trans": ("BF16", (16, 16)), "m.clip_ratio": ("F32", (1,))
}  # fmt: skip


@pytest.mark.parametrize("kind", ["W8A8_FLATQUANT", "W8A8_SVD_DYNAMIC", "W8A8_TIMESTEP", "W4A4_MXFP4_FLATQUANT"])
def test_transformed_types_plan_as_unsupported_with_the_reason(tmp_path: Path, kind: str) -> None:
    tensors: dict[str, Any] = static("m", 64, 128) if "DYNAMIC" not in kind else int8("m", 64, 128)
    if "MXFP4" in kind:
        tensors = {"m.weight": ("U8", (64, 64)), "m.weight_scale": ("U8", (64, 4))}
    if "FLATQUANT" in kind:
        tensors |= FLATQUANT
    found = resolve(tmp_path, None, tensors, files=described(kind))
    assert found.modules[0].status == "unsupported"
    assert only(found, "unsupported-option").severity == "error"
    if "FLATQUANT" in kind:
        assert "int4 per token only" in only(found, "unsupported-option").message


def test_flatquant_is_a_scheme_with_a_transform(tmp_path: Path) -> None:
    found = resolve(tmp_path, None, {**int8("m", 64, 128), **FLATQUANT}, files=described("W4A4_FLATQUANT_DYNAMIC"))
    module = found.modules[0]
    assert module.status == "ok"
    assert (module.scheme.id, module.scheme.transform) == ("int4-channel/int4-token", (8, 16))
    assert set(FLATQUANT) <= {info.name for info in module.tensors.values()}
    assert codes(found) == []


@pytest.mark.parametrize("name", FLATQUANT)
def test_half_a_transform_is_none(tmp_path: Path, name: str) -> None:
    tensors = {key: info for key, info in FLATQUANT.items() if key != name}
    found = resolve(tmp_path, None, {**int8("m", 64, 128), **tensors}, files=described("W4A4_FLATQUANT_DYNAMIC"))
    assert found.modules[0].status == "invalid"
    assert name.removeprefix("m.") in only(found, "missing-tensor").message


def test_matrices_beside_what_metadata_does_not_call_transformed(tmp_path: Path) -> None:
    tensors = {"m.weight": ("F8_E4M3", (64, 128)), "m.weight_scale": ("U8", (64, 4)), **FLATQUANT}
    found = resolve(tmp_path, None, tensors, files=described("W8A8_MXFP8"))
    assert found.modules[0].status == "unsupported"


def test_a_transform_that_metadata_names_has_to_be_there(tmp_path: Path) -> None:
    """Without its matrices the weight means something else."""
    found = resolve(tmp_path, None, int8("m", 64, 128), files=described("W4A4_FLATQUANT_DYNAMIC"))
    assert found.modules[0].status == "invalid"


@pytest.mark.parametrize(
    "changed", [{"m.left_trans": ("F32", (8, 16))}, {"m.left_trans": ("F32", (4, 4))}, {"m.clip_ratio": ("F32", (2,))}]
)
def test_matrices_have_to_fit(tmp_path: Path, changed: dict[str, Any]) -> None:
    tensors = {**int8("m", 64, 128), **FLATQUANT, **changed}
    found = resolve(tmp_path, None, tensors, files=described("W4A4_FLATQUANT_DYNAMIC"))
    assert found.modules[0].status == "invalid"
    assert "do not fit K = 128" in only(found, "tensors-contradict-config").message


def test_transformation_tensors_alone_are_enough(tmp_path: Path) -> None:
    tensors = {**int8("m", 64, 128), "m.kronecker_rotation_m": ("F32", (8, 8))}
    found = resolve(tmp_path, None, tensors, files=described("W8A8_DYNAMIC"))
    assert found.modules[0].status == "unsupported"
    assert "rotates" in only(found, "unsupported-option").message


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ({"model_quant_type": "W8A8", "m.weight": 8}, "metadata-unreadable", "m.weight"),
        ({"model_quant_type": "W8A8", "m.weight": "W3A3_DYNAMIC"}, "unsupported-option", "W3A3_DYNAMIC"),
        ({"model_quant_type": ["W8A8"], "m.weight": "FLOAT"}, "metadata-unreadable", "model_quant_type"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, content: Any, code: str, words: str) -> None:
    found = resolve(tmp_path, None, {"m.weight": bf16(8, 8)}, files={DESCRIPTION: content})
    finding = only(found, code)
    assert finding.where.file == DESCRIPTION
    assert words in finding.where.rule + finding.message


def test_a_missing_scale_is_missing(tmp_path: Path) -> None:
    tensors = static("m", 64, 128)
    del tensors["m.quant_bias"]
    found = resolve(tmp_path, None, tensors, files=described("W8A8"))
    assert schemes(found) == {"m": "int8-channel/int8-tensor-static-asym invalid"}
    assert "quant_bias" in only(found, "missing-tensor").message


def test_both_files_of_a_merged_checkpoint_agree(tmp_path: Path) -> None:
    """vllm-omni's merge tool leaves the description beside a config of its own: no conflict."""
    tensors: Shapes = {"m.weight": ("F8_E4M3", (64, 128)), "m.weight_scale": ("U8", (64, 4)), "f.weight": bf16(8, 8)}
    config = {"quant_method": "mxfp8", "is_checkpoint_mxfp8_serialized": True, "ignored_layers": ["f"]}
    files = {DESCRIPTION: {"m.weight": "W8A8_MXFP8", "f.weight": "FLOAT"}}
    assert codes(resolve(tmp_path, config, tensors, files=files)) == []
    other = {DESCRIPTION: {"m.weight": "W4A4_MXFP4", "f.weight": "FLOAT"}}
    assert codes(resolve(tmp_path / "2", config, tensors, files=other)) == ["metadata-conflict"]


# --- values ------------------------------------------------------------------------------------------------------


def weights(seed: int, n: int, k: int, low: int = -127, high: int = 128) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(low, high, (n, k)).astype(np.int8)


@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_static_int8_is_the_device_arithmetic(tmp_path: Path, as_bits: bool, with_bias: bool) -> None:
    """y = (round(x / s + z) . q + quant_bias) * deq_scale, row by row in plain Python floats."""
    n, k = 6, 32
    q = weights(1, n, k)
    weight_scale = np.linspace(0.001, 0.02, n, dtype=np.float32)
    input_scale, offset = np.float32(0.03), -11.0
    deq = (input_scale * weight_scale).astype(np.float32)
    true_bias = np.linspace(-2, 2, n).astype(np.float32) if with_bias else np.zeros(n, np.float32)
    quant_bias = np.rint(true_bias / deq - q.astype(np.float32).sum(1) * np.float32(offset)).astype(np.int32)
    arrays = {
        "m.weight": q,
        "m.quant_bias": quant_bias,
        "m.deq_scale": deq.view(np.int32).astype(np.int64) if as_bits else deq,
        "m.input_scale": np.array([input_scale]),
        "m.input_offset": np.array([offset], np.float32),
    }
    if with_bias:
        arrays["m.bias"] = true_bias
    write_arrays(tmp_path, arrays, files=described("W8A8"))

    x = np.random.default_rng(2).normal(0, 1, (5, k)).astype(np.float32)
    wanted = np.empty((5, n))
    for row in range(5):
        codes_x = [min(max(round(float(np.float32(v) / input_scale)) + int(offset), -128), 127) for v in x[row]]
        for out in range(n):
            total = sum(a * int(b) for a, b in zip(codes_x, q[out], strict=True))
            wanted[row, out] = (total + int(quant_bias[out])) * float(deq[out])
    weight = canonical(tmp_path, "m")
    np.testing.assert_allclose(linear(x, weight), wanted, rtol=1e-5, atol=1e-5)
    assert relative(run(tmp_path, "m", x), wanted) < 1e-5
    np.testing.assert_allclose(dequantize(weight), q * weight_scale[:, None], rtol=1e-6)


def test_a_bias_that_contradicts_quant_bias_is_refused(tmp_path: Path) -> None:
    arrays = {
        "m.weight": weights(1, 4, 32),
        "m.quant_bias": np.zeros(4, np.int32),
        "m.deq_scale": np.full(4, 1e-3, np.float32),
        "m.input_scale": np.array([0.1], np.float32),
        "m.input_offset": np.zeros(1, np.float32),
        "m.bias": np.full(4, 3.0, np.float32),
    }
    write_arrays(tmp_path, arrays, files=described("W8A8"))
    with pytest.raises(InvalidCheckpointError, match="bias and quant_bias"):
        canonical(tmp_path, "m")


@pytest.mark.parametrize("role", ["weight_scale", "input_offset", "weight_offset"])
def test_what_has_no_meaning_is_refused(tmp_path: Path, role: str) -> None:
    arrays = {
        "m.weight": weights(1, 4, 32),
        "m.quant_bias": np.zeros(4, np.int32),
        "m.deq_scale": np.full(4, 1e-3, np.float32),
        "m.input_scale": np.array([0.1], np.float32),
        "m.input_offset": np.zeros(1, np.float32),
        "m.weight_scale": np.full((4, 1), 1e-2, np.float32),
        "m.weight_offset": np.zeros((4, 1), np.float32),
    }
    write_arrays(tmp_path / "good", arrays, files=described("W8A8"))
    canonical(tmp_path / "good", "m")
    arrays[f"m.{role}"] = arrays[f"m.{role}"] + np.float32(0.5)
    write_arrays(tmp_path, arrays, files=described("W8A8"))
    with pytest.raises(InvalidCheckpointError):
        canonical(tmp_path, "m")


def test_int4_packed_along_rows(tmp_path: Path) -> None:
    """Row 2i in the low nibble of byte row i, packed here by a loop."""
    n, k = 8, 32
    q = weights(3, n, k, -8, 8)
    packed = np.zeros((n // 2, k), np.uint8)
    for row in range(n):
        for column in range(k):
            packed[row // 2, column] |= (int(q[row, column]) & 15) << (4 * (row % 2))
    scale = np.linspace(0.01, 0.1, n, dtype=np.float32)[:, None]
    arrays = {
        "m.weight": packed.view(np.int8),
        "m.weight_scale": scale,
        "m.weight_offset": np.zeros_like(scale),
        "m.scale_bias": 8 * (q * scale).sum(1, keepdims=True).astype(np.float32),
    }
    write_arrays(tmp_path, arrays, files=described("W4A8_DYNAMIC"))
    np.testing.assert_allclose(dequantize(canonical(tmp_path, "m")), q * scale.astype(np.float64))
    x = np.random.default_rng(0).normal(0, 1, (3, k)).astype(np.float32)
    assert relative(run(tmp_path, "m", x), linear(x, canonical(tmp_path, "m"))) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_two_stages_multiply(tmp_path: Path, packed: bool) -> None:
    n, k, groups = 4, 64, 2
    q = weights(4, n, k, -8, 8)
    first = np.linspace(0.5, 2, n, dtype=np.float32)[:, None]
    second = np.linspace(0.01, 0.02, n * groups, dtype=np.float32).reshape(n, groups)
    stored = ((q[0::2] & 15) | (q[1::2] << 4)).astype(np.uint8).view(np.int8) if packed else q
    arrays = {
        "m.weight": stored,
        "m.weight_scale": first,
        "m.weight_offset": np.zeros_like(first),
        "m.weight_scale_second": second,
        "m.weight_offset_second": np.zeros_like(second),
    }
    files = {DESCRIPTION: {"m.weight": "W4A8_DYNAMIC", **({"version": "1.0.0"} if packed else {})}}
    write_arrays(tmp_path, arrays, files=files)
    weight = canonical(tmp_path, "m")
    assert weight.scheme.id == "int4-g32/int8-token"
    wanted = q.astype(np.float64) * np.repeat((first * second).astype(np.float64), k // groups, axis=1)
    np.testing.assert_allclose(dequantize(weight), wanted, rtol=1e-6)


def test_int4_of_w4a16_without_groups_is_packed_along_columns(tmp_path: Path) -> None:
    q = weights(5, 4, 64, -8, 8)
    scale = np.full((4, 1), 0.25, np.float32)
    packed = ((q[:, 0::2] & 15) | (q[:, 1::2] << 4)).astype(np.uint8).view(np.int8)
    arrays = {"m.weight": packed, "m.weight_scale": scale, "m.weight_offset": np.zeros_like(scale)}
    write_arrays(tmp_path, arrays, files=described("W4A16"))
    np.testing.assert_array_equal(dequantize(canonical(tmp_path, "m")), q * 0.25)


def test_a_smoothed_layer_keeps_its_wrapper(tmp_path: Path) -> None:
    """`m.div.mul_scale` multiplies the input of `m.linear`."""
    q = weights(6, 4, 64)
    smooth = np.linspace(0.5, 2, 64, dtype=np.float32)
    arrays = {
        "m.linear.weight": q,
        "m.linear.weight_scale": np.full((4, 1), 0.01, np.float32),
        "m.linear.weight_offset": np.zeros((4, 1), np.float32),
        "m.div.mul_scale": smooth,
    }
    files = {DESCRIPTION: {"m.linear.weight": "W8A8_DYNAMIC", "m.div.mul_scale": "FLOAT"}}
    write_arrays(tmp_path, arrays, files=files)
    weight = canonical(tmp_path, "m.linear")
    assert weight.scheme.pre_scale
    x = np.random.default_rng(1).normal(0, 1, (3, 64)).astype(np.float32)
    exact = (x.astype(np.float64) * smooth) @ (q * float(np.float32(0.01))).T
    np.testing.assert_allclose(linear(x, weight, activation=False), exact, rtol=1e-6)
    assert relative(run(tmp_path, "m.linear", x), linear(x, weight)) < 1e-5
    assert 1e-4 < relative(linear(x, weight), exact) < 0.02


def test_parts_with_one_smoothing_vector_fuse_and_with_several_do_not(tmp_path: Path) -> None:
    from omniplat import plan

    def checkpoint(folder: Path, same: bool) -> Path:
        arrays: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            name = f"model.layers.0.self_attn.{part}"
            arrays[f"{name}.weight"] = weights(index, 8, 64)
            arrays[f"{name}.weight_scale"] = np.full((8, 1), 0.01, np.float32)
            arrays[f"{name}.mul_scale"] = np.full(64, 1.0 if same else 1.0 + index, np.float32)
            arrays[f"{name}.weight_offset"] = np.zeros((8, 1), np.float32)
            kinds[f"{name}.weight"] = "W8A8_DYNAMIC"
        return write_arrays(folder, arrays, config={"model_type": "llama"}, files={DESCRIPTION: kinds})

    fused = [layer.name for layer in plan(checkpoint(tmp_path / "same", True), "cpu").layers]
    apart = plan(checkpoint(tmp_path / "other", False), "cpu")
    assert fused == ["model.layers.0.self_attn.qkv_proj"]
    assert len(apart.layers) == 3
    assert "mixed-fused-shards" not in [finding.code for finding in apart.findings]


def test_stored_bytes_and_container(tmp_path: Path) -> None:
    write_arrays(
        tmp_path,
        {"m.weight": np.ones((4, 32), ml_dtypes.float8_e4m3fn), "m.weight_scale": np.full((4, 1), 127, np.uint8)},
        files=described("W8A8_MXFP8"),
    )
    module = modules(tmp_path)["m"]
    assert (module.storage.container, module.stored_bytes) == ("F8_E4M3", 4 * 32 + 4)
