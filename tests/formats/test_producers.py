"""Weights that optimum-quanto, hqq and torchao wrote themselves: shapes, schemes, values, layers that run.

`tests/goldens/make_flat.py` writes the files; `expected/` holds what the producers' own dequantization gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from omniplat.api import load, plan
from omniplat.capability import matches
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.reader import ShardReader
from omniplat.cli.app import app
from omniplat.errors import UnsupportedCombinationError
from omniplat.formats.resolve import Resolution
from omniplat.registry import BACKENDS, default_registry
from tests.support.resolving import only, resolve, schemes
from tests.support.values import values_of

PRODUCERS = Path(__file__).resolve().parents[1] / "data" / "producers"
NUMPY = {"F32": np.float32, "I64": np.int64}
LLAMA = {"model_type": "llama", "hidden_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8,
         "intermediate_size": 192}  # fmt: skip
LAYER = "model.layers.0"


class Produced:
    """One file: its tensors by name, the metadata, and the expected values."""

    def __init__(self, name: str) -> None:
        blob = (PRODUCERS / f"{name}.safetensors").read_bytes()
        length = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + length])
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.data: dict[str, bytes] = {}
        self._expected: dict[str, np.ndarray] = {}
        for key, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            if key.startswith("expected/"):
                self._expected[key] = np.frombuffer(blob[start:end], NUMPY[entry["dtype"]])
            else:
                self.shapes[key] = entry["dtype"], tuple(entry["shape"])
                self.data[key] = blob[start:end]

    def modules(self) -> list[str]:
        return sorted({key.split("/")[1] for key in self._expected})

    def expected(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Places in the flattened weight, and the producer's values there."""
        return self._expected[f"expected/{name}/at"], self._expected[f"expected/{name}/values"]

    def resolve(
        self, folder: Path, quantization: Mapping[str, Any], config: Mapping[str, Any] | None = None
    ) -> Resolution:
        return resolve(folder, quantization, self.shapes, values=self.data, metadata=self.metadata, config=config)

    def errors(self, found: Resolution, name: str) -> np.ndarray:
        """Differences at the sampled places, relative to the largest weight."""
        at, values = self.expected(name)
        return np.abs(values_of(found, name).reshape(-1)[at] - values) / np.abs(values).max()


# --- quanto -------------------------------------------------------------------------------------------------------

QUANTO = {
    "self_attn.q_proj": ((24, 160), "g32"),
    "self_attn.k_proj": ((8, 160), "g32"),
    "self_attn.o_proj": ((160, 24), "channel"),
    "mlp.up_proj": ((192, 160), "g32"),
    "mlp.down_proj": ((160, 192), "g96"),
    "extra.whole": ((10, 200), "channel"),
    "extra.bias": ((33, 640), "g128"),
}


@pytest.mark.parametrize("bits", [4, 2])
def test_quanto_below_eight_bits(tmp_path: Path, bits: int) -> None:
    """Shapes come from the configuration, a bias, or a group size that quanto gives whole rows only."""
    made = Produced(f"quanto-qint{bits}")
    found = made.resolve(tmp_path, {"quant_method": "quanto", "weights": f"int{bits}"}, LLAMA)
    assert schemes(found) == {f"{LAYER}.{name}": f"uint{bits}-{group}/a16" for name, (_, group) in QUANTO.items()}
    for module in found.modules:
        assert (module.out_features, module.in_features) == QUANTO[module.name.removeprefix(f"{LAYER}.")][0]
        assert made.errors(found, module.name).max() < 2.0**-22
    assert not [item for item in found.findings if item.severity == "error"]


@pytest.mark.parametrize("bits", [4, 2])
def test_quanto_runs(tmp_path: Path, bits: int) -> None:
    made = Produced(f"quanto-qint{bits}")
    made.resolve(tmp_path, {"quant_method": "quanto", "weights": f"int{bits}"}, LLAMA)
    assert plan(tmp_path, "cpu").ok
    # qkv_proj needs three parts; the others are layers of their own
    assert {f"{LAYER}.mlp.down_proj", f"{LAYER}.extra.bias"} <= load(tmp_path, "cpu").keys()


@pytest.mark.parametrize(
    "config",
    [{}, {"hidden_size": 160}, {**LLAMA, "hidden_size": 320}, {**LLAMA, "head_dim": 12}, {"hidden_size": "160"},
     {"hidden_size": -160, "intermediate_size": 192}],
)  # fmt: skip
def test_quanto_without_a_shape_that_fits_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """The shape is taken from a configuration only where it accounts for every number of the weight."""
    made = Produced("quanto-qint4")
    found = made.resolve(tmp_path, {"quant_method": "quanto", "weights": "int4"}, {"model_type": "x", **config})
    refused = {module.name for module in found.modules if module.status == "unsupported"}
    assert f"{LAYER}.self_attn.q_proj" in refused
    assert all("does not store the shape" in item.message for item in found.findings)
    settled = {f"{LAYER}.extra.whole", f"{LAYER}.extra.bias", f"{LAYER}.self_attn.o_proj"}
    assert refused.isdisjoint(settled), "these need no configuration"


# --- hqq ----------------------------------------------------------------------------------------------------------


def hqq(bits: int, axis: int) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": 32, "axis": axis}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}}


@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_of_either_axis(tmp_path: Path, axis: int) -> None:
    made = Produced(f"hqq-axis{axis}")
    found = made.resolve(tmp_path, hqq(4, axis))
    for name in made.modules():
        assert made.errors(found, name).max() < 2.0**-22, name
    bits = {name: max(int(name[1]), 2) for name in made.modules()}
    along_k = {name: "g32" if name.endswith("g32") else "channel" for name in made.modules()}
    wanted = {name: f"uint{bits[name]}-{along_k[name] if axis else 'block1x1'}/a16" for name in made.modules()}
    assert schemes(found) == wanted


def test_no_kernel_takes_a_scale_for_each_weight() -> None:
    """They would take several times the room of the weight in bf16."""
    registry = default_registry()
    for name in registry.names(BACKENDS):
        for capability in registry.load(BACKENDS, name).capabilities:
            for bits in range(2, 9):
                assert not matches(capability.weights, f"uint{bits}-block1x1"), capability.name


@pytest.mark.parametrize("block", ["2x1", "1x2", "1x128", "16x1", "128x128", "10x10"])
def test_other_blocks_of_integers_run(block: str) -> None:
    capabilities = default_registry().load(BACKENDS, "cpu").capabilities
    assert any(matches(item.weights, f"uint4-block{block}") for item in capabilities) == (block != "1x1")


def test_hqq_axis_0_is_planned_and_not_run(tmp_path: Path) -> None:
    made = Produced("hqq-axis0")
    made.resolve(tmp_path, hqq(4, 0))
    planned = plan(tmp_path, "cpu")
    assert {layer.status for layer in planned.layers} == {"unsupported"}
    assert all(layer.trace for layer in planned.layers)
    refused = [item for item in planned.findings if item.code == "unsupported-combination"]
    assert refused
    assert all("share a scale" in item.message for item in refused)
    (fix,) = {item.fix for item in refused}
    assert "omniplat convert" in fix
    for device in ("cpu", "cuda:sm90"):
        with pytest.raises(UnsupportedCombinationError, match="block1x1") as raised:
            load(tmp_path, device)
        assert raised.value.to_dict()["suggestions"] == [fix], "the cpu does not run it either"


@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_of_either_axis_is_converted(tmp_path: Path, axis: int) -> None:
    made = Produced(f"hqq-axis{axis}")
    made.resolve(tmp_path / "a", hqq(4, axis))
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "f32"])
    assert result.exit_code == 0, result.output
    (component,) = open_checkpoint(tmp_path / "b").components
    assert {name for name in component.tensors if name.endswith(".weight")} == {
        f"{name}.weight" for name in made.modules()
    }
    assert component.tensors.keys() <= {f"{name}.{leaf}" for name in made.modules() for leaf in ("weight", "bias")}
    reader = ShardReader(component.root)
    for name in made.modules():
        at, values = made.expected(name)
        weight = np.asarray(reader.read(component.tensors[f"{name}.weight"])).reshape(-1)
        assert np.abs(weight[at] - values).max() / np.abs(values).max() < 2.0**-22
    assert {layer.status for layer in plan(tmp_path / "b", "cpu").layers} == {"unquantized"}


# --- torchao ------------------------------------------------------------------------------------------------------

TILES = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {
    "group_size": 128, "int4_packing_format": "tile_packed_to_4d"}}}}  # fmt: skip


def test_torchao_tiles(tmp_path: Path) -> None:
    """The product of the GPU's own kernel with a unit matrix, which rounds to bf16 between its steps."""
    made = Produced("torchao-tiles")
    found = made.resolve(tmp_path, TILES)
    assert schemes(found) == {"whole": "uint4-g128/a16", "padded": "uint4-g128/a16"}
    assert {m.name: (m.out_features, m.in_features) for m in found.modules} == {"whole": (8, 1024), "padded": (20, 768)}
    for name in made.modules():
        assert made.errors(found, name).max() < 2.0**-8
    assert load(tmp_path, "cpu").keys() == {"whole", "padded"}


NO_SHAPES = ("{", "[]", '{"_data": 1}', *(f'{{"_data": {{"shape": {shape}}}}}' for shape in (
    "[64, 768]", '["20", 768]', "[20, 2048]", "[20]", "[20, -768]")))  # fmt: skip


@pytest.mark.parametrize("text", [None, *NO_SHAPES])
def test_torchao_tiles_without_their_shape_are_refused(tmp_path: Path, text: str | None) -> None:
    made = Produced("torchao-tiles")
    made.metadata = {key: value for key, value in made.metadata.items() if key != "padded.weight"}
    if text is not None:
        made.metadata["padded.weight"] = text
    found = made.resolve(tmp_path, TILES)
    assert {m.name: m.status for m in found.modules} == {"padded": "unsupported", "whole": "ok"}
    assert "padded" in only(found, "unsupported-option").message
