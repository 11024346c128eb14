"""bitsandbytes: both tables, double quantization, containers, LLM.int8, legacy keys and skip lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniplat.errors import InvalidCheckpointError
from tests.support.bitsandbytes import FourBit
from tests.support.checkpoints import bf16
from tests.support.resolving import codes, only, resolve, schemes
from tests.support.values import values_of

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k", "block"), [(24, 128, 64), (6, 256, 128), (40, 64, 64)])
def test_values_survive(tmp_path: Path, kind: str, nested: bool, n: int, k: int, block: int) -> None:
    made = FourBit(n, k, kind, block=block, nested=nested)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, {**NF4, "bnb_4bit_quant_type": kind}, shapes, values=data)
    assert schemes(found) == {"m": f"{'nf4' if kind == 'nf4' else 'fp4bnb'}-b{block}/a16"}
    assert codes(found) == []
    assert np.allclose(values_of(found, "m"), made.values, rtol=1e-6, atol=0)


def test_the_shape_comes_from_the_state_and_not_from_a_module_of_the_same_size(tmp_path: Path) -> None:
    tall, wide = FourBit(128, 64), FourBit(64, 128)
    a, da = tall.tensors("a")
    b, db = wide.tensors("b")
    found = resolve(tmp_path, NF4, {**a, **b}, values={**da, **db})
    assert [(m.out_features, m.in_features) for m in found.modules] == [(128, 64), (64, 128)]
    assert np.allclose(values_of(found, "b"), wide.values, rtol=1e-6)


def test_bytes_in_another_container(tmp_path: Path) -> None:
    """bnb_4bit_quant_storage: the same bytes in a bf16 tensor are no 16-bit weight."""
    made = FourBit(16, 128)
    made.arrays["weight"] = made.arrays["weight"].reshape(-1).view(ml_dtypes.bfloat16).reshape(-1, 1)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, {**NF4, "bnb_4bit_quant_storage": "bfloat16"}, shapes, values=data)
    assert schemes(found) == {"m": "nf4-b64/a16"}
    assert np.allclose(values_of(found, "m"), made.values, rtol=1e-6)


@pytest.mark.parametrize(("k", "block", "run"), [(96, 64, 32), (80, 64, 16), (72, 64, 8), (192, 128, 64), (48, 64, 16)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("n", [16, 3])
def test_blocks_may_run_on_into_the_next_row(
    tmp_path: Path, k: int, block: int, run: int, nested: bool, n: int
) -> None:
    """The runs that lie in one row and one block are groups; the last block may be cut short."""
    made = FourBit(n, k, block=block, nested=nested)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, NF4, shapes, values=data)
    assert schemes(found) == {"m": f"nf4-b{run}/a16"}
    assert codes(found) == []
    assert np.allclose(values_of(found, "m"), made.values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [100, 66, 33])
def test_rows_that_cut_blocks_into_short_runs_are_refused(tmp_path: Path, k: int) -> None:
    shapes, data = FourBit(16, k).tensors("m")
    found = resolve(tmp_path, NF4, shapes, values=data)
    assert only(found, "group-not-divisible").severity == "error"


@pytest.mark.parametrize("state", [b"{}", b"not json", b'{"shape": [16, 130]}', b'{"shape": ["a", 2]}', b"\0" * 40])
def test_a_state_that_does_not_describe_the_weight(tmp_path: Path, state: bytes) -> None:
    shapes, data = FourBit(16, 128).tensors("m")
    leaf = "m.weight.quant_state.bitsandbytes__nf4"
    shapes[leaf], data[leaf] = ("U8", (len(state),)), state
    found = resolve(tmp_path, NF4, shapes, values=data)
    assert "quant_state" in only(found, "tensors-contradict-config").message
    assert found.modules[0].status == "invalid"


@pytest.mark.parametrize("leaf", ["weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"])
def test_every_scale_is_needed(tmp_path: Path, leaf: str) -> None:
    shapes, data = FourBit(16, 128, nested=True).tensors("m")
    del shapes[f"m.{leaf}"], data[f"m.{leaf}"]
    assert leaf in only(resolve(tmp_path, NF4, shapes, values=data), "missing-tensor").message


def test_a_foreign_table_is_refused(tmp_path: Path) -> None:
    made = FourBit(16, 128)
    made.arrays["weight.quant_map"] = np.linspace(-1, 1, 16, dtype=np.float32)
    shapes, data = made.tensors("m")
    found = resolve(tmp_path, NF4, shapes, values=data)
    with pytest.raises(InvalidCheckpointError, match="table of codes"):
        values_of(found, "m")


@pytest.mark.parametrize(
    ("quantization", "declared"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4-b64/a16"),
        ({"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}, "nf4-b64/a16"),
        ({"quant_method": "bitsandbytes_4bit", "bnb_4bit_quant_type": "nf4"}, "nf4-b64/a16"),
    ],
)
def test_legacy_keys(tmp_path: Path, quantization: Any, declared: str) -> None:
    shapes, data = FourBit(16, 128).tensors("m")
    found = resolve(tmp_path, quantization, shapes, values=data)
    assert found.format == "bitsandbytes"
    assert [m.declared.id for m in found.modules if m.declared] == [declared]


def llm_int8(module: str, n: int, k: int) -> dict[str, Any]:
    return {
        f"{module}.weight": ("I8", (n, k)),
        f"{module}.SCB": ("F32", (n,)),
        f"{module}.weight_format": ("U8", ()),
    }


def test_llm_int8(tmp_path: Path) -> None:
    data = {
        "m.weight": np.array([[127, -64], [1, 0]], np.int8).tobytes(),
        "m.SCB": np.array([2.54, 12.7], np.float32).tobytes(),
    }
    found = resolve(tmp_path, {"load_in_8bit": True}, llm_int8("m", 2, 2), values=data)
    assert schemes(found) == {"m": "int8-bnb/int8-bnb"}
    assert codes(found) == []
    assert np.allclose(values_of(found, "m"), [[2.54, -1.28], [0.1, 0]], rtol=1e-6)


def test_an_order_of_a_gpu_kernel_is_understood_and_refused(tmp_path: Path) -> None:
    found = resolve(tmp_path, {"load_in_8bit": True}, llm_int8("m", 32, 32), values={"m.weight_format": b"\2"})
    assert found.modules[0].status == "unsupported"
    assert "weight_format 2" in only(found, "unsupported-option").message


@pytest.mark.parametrize("entry", ["model.layers.1.mlp", "layers.1.mlp", "model.layers.1.mlp.up_proj"])
def test_a_skipped_parent_does_not_reach_layer_ten(tmp_path: Path, entry: str) -> None:
    shapes, data = FourBit(16, 128).tensors("model.layers.10.mlp.up_proj")
    shapes["model.layers.1.mlp.up_proj.weight"] = bf16(16, 128)
    found = resolve(tmp_path, {**NF4, "llm_int8_skip_modules": [entry]}, shapes, values=data)
    assert schemes(found) == {
        "model.layers.1.mlp.up_proj": "bf16/a16",
        "model.layers.10.mlp.up_proj": "nf4-b64/a16",
    }
    assert codes(found, severity="error") == []
    assert "tensors-contradict-config" not in codes(found)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"load_in_4bit": False}, "load_in_4bit"),
        ({"load_in_8bit": True}, "load_in_8bit"),
        ({"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, change: Any, key: str) -> None:
    found = resolve(tmp_path, {**NF4, **change}, {"m.weight": bf16(8, 8)})
    assert only(found, "unsupported-option").where.rule == f"quantization_config.{key}"
