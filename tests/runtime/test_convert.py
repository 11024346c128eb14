"""The dequantized checkpoint: numbers, names, files, and nothing left after an error."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from omniplat import oracle
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.tools import convert as module
from omniplat.tools.convert import convert, round_to
from tests.runtime.checkpoints import Built, ResolvedComponent, build, build_pipeline


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "source")


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def expected_weight(built: Built, name: str) -> np.ndarray:
    weight = built.weights[name]
    values = oracle.dequantize(weight)
    return values * weight.tensors["pre_scale"] if "pre_scale" in weight.tensors else values


def test_weights_are_dequantized_and_the_rest_is_copied(built: Built, tmp_path: Path) -> None:
    result = convert(built.checkpoint, built.parts, tmp_path / "out", "f32")
    before, after = read(tmp_path / "source"), read(tmp_path / "out")
    quantized = {"a.q", "a.block", "b.mx", "b.smooth"}
    assert set(after) == {f"{name}.weight" for name in quantized} | {"a.q.bias", "lm_head.weight", "norm.weight"}
    for name in quantized:
        found = after[f"{name}.weight"]
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), expected_weight(built, name).astype(np.float32))
    for name in ("a.q.bias", "lm_head.weight", "norm.weight"):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    assert (result.modules, result.shards) == (4, 2)


def test_bf16_is_rounded_once(built: Built, tmp_path: Path) -> None:
    convert(built.checkpoint, built.parts, tmp_path / "out", "bf16")
    after = read(tmp_path / "out")
    for name in ("a.q", "b.smooth"):
        found = after[f"{name}.weight"]
        assert found.dtype == torch.bfloat16
        values = expected_weight(built, name)
        error = np.abs(found.double().numpy() - values)
        assert (error <= np.abs(values) * 2.0**-8).all()


def test_rounding_to_bf16_is_exact_at_ties_that_float32_would_hide() -> None:
    just = 2.0**-40
    values = np.array([1 + 2**-8 + just, 1 + 2**-8, 1 + 2**-8 - just, 1 + 3 * 2**-8 - just, 1 + 3 * 2**-8, 0.0, -1e-45])
    values = np.concatenate([values, -values, np.random.default_rng(0).standard_normal(500)])
    found = round_to(values, "bf16").astype(np.float64)
    for value, rounded in zip(values, found, strict=True):
        step = Fraction(2) ** (int(np.floor(np.log2(abs(value)))) - 7) if abs(value) > 1e-38 else Fraction(2) ** -133
        quotient = Fraction(float(value)) / step
        assert Fraction(float(rounded)) == round(quotient) * step  # Python's round goes to even


def test_shards_index_and_configs(built: Built, tmp_path: Path) -> None:
    convert(built.checkpoint, built.parts, tmp_path / "out", "bf16")
    out = tmp_path / "out"
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == {
        *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"),
        *("config.json", "tokenizer.json", "extra/vocab.txt"),
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {}
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        with safe_open(out / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), shard)
    assert index["weight_map"] == held
    size = sum(tensor.numel() * tensor.element_size() for tensor in read(out).values())
    assert index["metadata"] == {"x": 1, "total_size": size}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "t", "text_config": {}}


def test_a_component_is_converted_and_the_others_are_copied(tmp_path: Path) -> None:
    built = build_pipeline(tmp_path / "source")
    convert(built.checkpoint, built.parts, tmp_path / "out", "f32")
    out = tmp_path / "out"
    assert json.loads((out / "transformer" / "config.json").read_text()) == {"model_type": "t", "text_config": {}}
    assert not (out / "transformer" / "quantization_config.json").exists()
    assert "kept" in (out / "vae" / "config.json").read_text()
    assert (out / "model_index.json").read_text() == (tmp_path / "source" / "model_index.json").read_text()
    np.testing.assert_array_equal(
        read(out / "transformer")["b.mx.weight"].numpy(), expected_weight(built, "b.mx").astype(np.float32)
    )


def test_tensors_start_aligned(built: Built, tmp_path: Path) -> None:
    from omniplat.checkpoint.header import read_header
    from omniplat.checkpoint.tensors import DTYPE_BITS

    convert(built.checkpoint, built.parts, tmp_path / "out", "f32")
    for info in read_header(tmp_path / "out", "model-1.safetensors").tensors:
        assert info.start % (DTYPE_BITS[info.dtype] // 8) == 0


def test_rows_are_streamed_in_pieces(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1 << 10)
    reported: list[tuple[int, int]] = []
    result = convert(
        built.checkpoint, built.parts, tmp_path / "out", "f32", progress=lambda *done: reported.append(done)
    )
    assert len(reported) > 20
    assert reported[-1] == (result.bytes_written, result.bytes_written)
    for name in ("a.q", "a.block", "b.mx", "b.smooth"):
        found = read(tmp_path / "out")[f"{name}.weight"].numpy()
        np.testing.assert_array_equal(found, expected_weight(built, name).astype(np.float32))


# --- refusals ----------------------------------------------------------------------------------------------------


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "source")


def test_a_destination_that_is_not_empty_is_refused(built: Built, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        convert(built.checkpoint, built.parts, out, "f32")
    assert leftovers(tmp_path) == ["out"]
    (out / "mine").unlink()
    convert(built.checkpoint, built.parts, out, "f32")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        convert(built.checkpoint, built.parts, tmp_path / "file", "f32")


@pytest.mark.parametrize("inside", ["", "below", "extra/deep"])
def test_a_destination_inside_the_checkpoint_is_refused(built: Built, tmp_path: Path, inside: str) -> None:
    with pytest.raises(UsageError, match="inside the checkpoint"):
        convert(built.checkpoint, built.parts, tmp_path / "source" / inside, "f32")


def test_unknown_dtypes_are_refused(built: Built, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="f64"):
        convert(built.checkpoint, built.parts, tmp_path / "out", "f64")


@pytest.mark.parametrize("error", [InvalidCheckpointError("broken"), OSError(28, "No space left"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    calls = 0

    def fail(values: np.ndarray, dtype: str) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return round_to(values, dtype)

    monkeypatch.setattr(module, "round_to", fail)
    with pytest.raises((UsageError, InvalidCheckpointError, KeyboardInterrupt)):
        convert(built.checkpoint, built.parts, tmp_path / "out", "f32")
    assert calls == 3
    assert leftovers(tmp_path) == []


def test_invalid_modules_are_refused_before_anything_is_written(built: Built, tmp_path: Path) -> None:
    part = built.parts[0]
    broken = replace(part.modules[2], status="invalid", problems=("no scale",))
    parts = [ResolvedComponent(part.component, (*part.modules[:2], broken, *part.modules[3:]))]
    with pytest.raises(InvalidCheckpointError, match="no scale"):
        convert(built.checkpoint, parts, tmp_path / "out", "f32")
    assert leftovers(tmp_path) == []
