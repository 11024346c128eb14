"""What planning reads: headers and small metadata tensors, never a weight, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import omniplat
from omniplat.checkpoint.folder import MAX_METADATA_TENSOR_BYTES
from omniplat.checkpoint.source import LocalFolder
from tests.support.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FP8 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}

#: Opens nothing but what the audit hook prints: (event, file) of every open and memory map below the checkpoint.
WATCH = """
import json, sys
seen = []
def watch(event, args):
    if event in ("open", "mmap.__new__"):
        seen.append([event, str(args[0])])
sys.addaudithook(watch)
import omniplat
omniplat.plan(sys.argv[1], "cpu")
print(json.dumps(seen))
"""


def checkpoint(path: Path, scale: int) -> Path:
    """Two blocks of NVFP4 layers whose weights are `scale` times as large as the smallest."""
    tensors: dict[str, Any] = {}
    for layer in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.weight"] = ("U8", (64 * scale, 32 * scale))
            tensors[f"{name}.weight_scale"] = ("F8_E4M3", (64 * scale, 4 * scale))
            tensors[f"{name}.weight_scale_2"] = ("F32", ())
            tensors[f"{name}.input_scale"] = ("F32", ())
    return write_checkpoint(path, {"model_type": "llama", "quantization_config": FP8}, tensors, shards=2)


def reads_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every read from a shard while `path` is planned."""
    lengths: list[int] = []
    plain = LocalFolder.read_range

    def counting(source: LocalFolder, file: str, start: int, length: int) -> bytes:
        blob = plain(source, file, start, length)
        if file.endswith(".safetensors"):
            lengths.append(len(blob))
        return blob

    monkeypatch.setattr(LocalFolder, "read_range", counting)
    assert omniplat.plan(path, "cpu").ok
    monkeypatch.undo()
    return lengths


def test_no_byte_of_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = reads_of(checkpoint(tmp_path / "small", 1), monkeypatch)
    large = reads_of(checkpoint(tmp_path / "large", 16), monkeypatch)
    assert len(small) == len(large)
    headers = 2 * (4096 + 8)
    assert sum(large) < headers + len(large) * MAX_METADATA_TENSOR_BYTES
    # 16 times the sides is 256 times the weights; the headers grow by a digit here and there.
    assert sum(large) < 1.1 * sum(small)


def test_shards_are_opened_for_reading_ranges_only(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", 1)
    done = subprocess.run([sys.executable, "-c", WATCH, str(path)], capture_output=True, text=True, check=True)
    events = [event for event, file in json.loads(done.stdout.splitlines()[-1]) if str(path) in file]
    assert events
    assert "mmap.__new__" not in events


def test_the_document_is_what_its_schema_says(tmp_path: Path) -> None:
    schema = json.loads((Path(omniplat.__file__).parent / "schemas" / "plan-1.schema.json").read_text())
    example = ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
    for device in ("cpu", "npu:310p"):
        jsonschema.validate(omniplat.plan(example, device).to_dict(), schema)
    broken = omniplat.plan(example, "cpu").to_dict() | {"layers": [{"name": 3}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)
