"""Opening checkpoints: components, indexes, and input that must end in one error naming file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omniplat import plan
from omniplat.checkpoint.folder import MAX_METADATA_TENSOR_BYTES, open_checkpoint
from omniplat.errors import InvalidCheckpointError
from tests.support.checkpoints import bf16, write_checkpoint, write_shard

TENSORS = {"a.weight": bf16(4, 4), "b.weight": bf16(4, 4)}


def refused(path: Path) -> InvalidCheckpointError:
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=2)
    (component,) = open_checkpoint(tmp_path).components
    assert component.name == ""
    assert set(component.tensors) == set(TENSORS)
    assert len(component.shards) == 2


def test_files_that_no_index_names_are_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=2)
    write_shard(tmp_path / "adapter.safetensors", {"lora.weight": bf16(1, 1)})
    (component,) = open_checkpoint(tmp_path).components
    assert "lora.weight" not in component.tensors


def test_an_index_entry_whose_shard_lacks_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["c.weight"] = content["weight_map"]["a.weight"]
    index.write_text(json.dumps(content))
    (component,) = open_checkpoint(tmp_path).components
    assert [entry[1] for entry in component.index_absent] == ["c.weight"]


def test_a_pipeline_has_one_component_per_folder_and_knows_the_null_ones(tmp_path: Path) -> None:
    for name in ("transformer", "transformer_2"):
        write_checkpoint(tmp_path / name, {"name": name}, TENSORS)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": "P",
                "transformer": ["diffusers", "T"],
                "transformer_2": ["diffusers", "T"],
                "image_encoder": [None, None],
                "scheduler": ["diffusers", "S"],
            }
        )
    )
    opened = open_checkpoint(tmp_path)
    assert [c.name for c in opened.components] == ["transformer", "transformer_2"]
    assert [c.config["name"] for c in opened.components] == ["transformer", "transformer_2"]
    assert opened.absent_components == ("image_encoder",)
    assert opened.missing_components == ()
    assert opened.components[0].path_of("config.json") == "transformer/config.json"


@pytest.mark.parametrize("name", ["quantization_config.json", "quant_model_description_w8a8.json", "model_index.json"])
def test_metadata_of_no_component_is_said_to_be_unread(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "transformer", {}, TENSORS)
    (tmp_path / name).write_text("{}")
    index = {"transformer": ["diffusers", "T"]}
    index |= {"quantization_config": {"quant_method": "fp8"}} if name == "model_index.json" else {}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).unread_files == (name,)
    (found,) = [item for item in plan(tmp_path, device="cpu").findings if item.code == "known-quirk"]
    assert (found.severity, found.where.file) == ("warning", name)


def test_a_listed_component_without_a_folder_is_said(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "transformer", {}, TENSORS)
    listed = {"transformer": ["diffusers", "T"], "transformer_2": ["diffusers", "T"], "vae": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(listed))
    assert open_checkpoint(tmp_path).missing_components == ("transformer_2",)
    found = [item for item in plan(tmp_path, device="cpu").findings if item.code == "index-names-absent-tensor"]
    assert [(item.severity, item.component) for item in found] == [("warning", "transformer_2")]


def test_one_file(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.safetensors", TENSORS)
    (component,) = open_checkpoint(tmp_path / "x.safetensors").components
    assert set(component.tensors) == set(TENSORS)


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(tmp_path / "nowhere").problem


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no safetensors" in refused(tmp_path).problem


def test_no_config(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", TENSORS)
    assert refused(tmp_path).file == "config.json"


@pytest.mark.parametrize("text", ["{", "", "[1]", '"x"', '{"a": 1e999999', "\x00"])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, {}, TENSORS)
    (tmp_path / "config.json").write_text(text)
    assert refused(tmp_path).file == "config.json"


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/hostname", "a/../../x", ""])
def test_an_index_may_not_leave_the_checkpoint(tmp_path: Path, shard: str) -> None:
    write_checkpoint(tmp_path / "c", {}, TENSORS)
    write_shard(tmp_path / "x.safetensors", {"stolen.weight": bf16(1, 1)})
    (tmp_path / "c" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    error = refused(tmp_path / "c")
    assert error.file == "model.safetensors.index.json"
    assert error.key == "weight_map.a.weight"


def test_an_index_that_names_an_absent_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    error = refused(tmp_path)
    assert error.file == "model.safetensors.index.json"
    assert "model-00002-of-00002" in error.problem


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 3}}])
def test_an_index_of_the_wrong_shape(tmp_path: Path, content: object) -> None:
    write_checkpoint(tmp_path, {}, TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    assert refused(tmp_path).key == "weight_map"


def test_a_tensor_in_two_shards_without_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, TENSORS)
    write_shard(tmp_path / "zz.safetensors", {"a.weight": bf16(4, 4)})
    error = refused(tmp_path)
    assert error.key == "a.weight"
    assert "model.safetensors" in error.problem


def test_only_metadata_tensors_may_be_read_while_planning(tmp_path: Path) -> None:
    large = MAX_METADATA_TENSOR_BYTES + 1
    write_checkpoint(tmp_path, {}, {"s": ("U8", (4,)), "l": ("U8", (large,))}, values={"s": b"abcd"})
    (component,) = open_checkpoint(tmp_path).components
    assert component.read_small(component.tensors["s"]) == b"abcd"
    with pytest.raises(ValueError, match="no metadata tensor"):
        component.read_small(component.tensors["l"])
