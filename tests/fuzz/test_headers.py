"""Fuzzing headers: bytes that are none, entries that lie, names that command terminals, and very many tensors."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniplat.document import Plan
from omniplat.errors import InvalidCheckpointError
from tests.fuzz.inputs import DIMS, SHAPES, TENSORS, VALUES, dumps, mutated, profile, write_header
from tests.fuzz.judge import judge
from tests.support.checkpoints import bf16, mxfp8, write_checkpoint, write_shard

METHODS = ["fp8", "modelopt", "compressed-tensors", "auto-round", "bitsandbytes", "awq", "quark", "hqq", ""]
CONFIG = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
GOOD = {"__metadata__": {"format": "pt"}, "a.weight": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]},
        "a.weight_scale": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]}}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", CONFIG, {"a.weight": bf16(2, 2)})


@given(st.binary(max_size=200), st.none() | st.integers(0, 2**64 - 1), st.integers(0, 64))
@profile(120)
def test_bytes(folder: Path, blob: bytes, length: int | None, payload: int) -> None:
    write_header(folder / "model.safetensors", blob, payload, length)
    judge(folder)


@given(st.integers(0, 8).flatmap(lambda size: st.binary(min_size=size, max_size=size)))
@profile(40)
def test_files_too_short_for_a_length(folder: Path, blob: bytes) -> None:
    (folder / "model.safetensors").write_bytes(blob)
    assert isinstance(judge(folder), InvalidCheckpointError)


@given(mutated(GOOD, ("data_offsets", "dtype", "shape", "__metadata__")))
@profile(100)
def test_mutated_headers(folder: Path, header: Any) -> None:
    write_header(folder / "model.safetensors", dumps(header), 32)
    judge(folder)


@given(st.lists(st.tuples(st.sampled_from(["F8_E4M3", "F32", "U8", "X9", ""]), SHAPES, DIMS, DIMS), max_size=4))
@profile(120)
def test_offsets_that_overlap_leave_holes_or_are_huge(folder: Path, rows: list[tuple[str, Any, int, int]]) -> None:
    header = {f"{index}.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
              for index, (dtype, shape, start, end) in enumerate(rows)}  # fmt: skip
    write_header(folder / "model.safetensors", json.dumps(header), 64)
    judge(folder)


@given(st.text(min_size=1, max_size=12) | st.sampled_from(["\x1b]0;owned\x07", "a\x9b31m.weight", "\u202eabc.weight"]))
@profile(120)
def test_names(folder: Path, name: str) -> None:
    odd = f"model.layers.0.{name}"
    tensors = {f"{odd}.weight": ("F8_E4M3", (32, 32)), f"{odd}.weight_scale": ("F32", (32, 1)), name: ("U8", (4,)),
               f"{name}.weight": bf16(4, 4), f"{name}.experts.0.up_proj.weight": bf16(4, 4)}  # fmt: skip
    write_shard(folder / "model.safetensors", tensors, metadata={name: name})
    judge(folder)


@given(
    TENSORS,
    st.sampled_from(["fp8", "modelopt", "compressed-tensors", "auto-round", "bitsandbytes", "awq", "quark", ""]),
)
@profile(200)
def test_modules_of_any_leaves(folder: Path, tensors: Any, method: str) -> None:
    """Whatever stands beside whatever under one module's name, with and without metadata."""
    write_shard(folder / "model.safetensors", tensors)
    quantization = {"quant_method": method, "bits": 4, "group_size": 32, "quant_algo": "FP8", "load_in_4bit": True}
    config = {"quantization_config": quantization} if method else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **config}))
    judge(folder)


@given(st.sampled_from(["quantization_config", "_quantization_metadata"]), VALUES | st.text(max_size=20))
@profile(100)
def test_metadata_strings(folder: Path, key: str, value: Any) -> None:
    write_shard(folder / "model.safetensors", mxfp8("a", 32, 32), metadata={key: dumps(value)})
    judge(folder)


@given(st.binary(max_size=64))
@profile(100)
def test_quantizer_states(folder: Path, blob: bytes) -> None:
    """Small tensors that hold JSON, bytes or numbers: bitsandbytes' states, ComfyUI's markers, HQQ's."""
    size = (max(len(blob), 1),)
    tensors = {"a.weight": ("U8", (512, 1)), "a.weight.quant_state.bitsandbytes__nf4": ("U8", size),
               "a.weight.absmax": ("F32", (16,)), "a.weight.quant_map": ("F32", (16,)), "b.weight": ("F8_E4M3", (4, 4)),
               "b.comfy_quant": ("U8", size), "c.W_q": ("U8", (32, 32)), "c.meta": ("U8", size),
               "c.nbits": ("U8", size)}  # fmt: skip
    values = {name: blob for name, (_, shape) in tensors.items() if shape == size and blob}
    write_shard(folder / "model.safetensors", tensors, values)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    judge(folder)


def test_an_overlap_is_found_at_once_among_many(folder: Path) -> None:
    header = {f"{i}.weight": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for i in range(100_000)}
    write_header(folder / "model.safetensors", json.dumps(header), 8)
    assert isinstance(judge(folder), InvalidCheckpointError)


def test_a_shape_of_a_million_dimensions(folder: Path) -> None:
    for dimension in (1, 2**62):
        header = {"a.weight": {"dtype": "U8", "shape": [dimension] * 1_000_000, "data_offsets": [0, 1]}}
        write_header(folder / "model.safetensors", json.dumps(header), 1)
        start = time.monotonic()
        judge(folder)
        assert time.monotonic() - start < 10


def test_very_many_tensors_take_bounded_time_and_memory(tmp_path: Path) -> None:
    """A million with OMNIPLAT_FUZZ at 10 or more; the limit on a header's length allows few more."""
    count = 1_000_000 if int(os.environ.get("OMNIPLAT_FUZZ", "1")) >= 10 else 20_000
    header = {f"l.{i}.weight": {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]} for i in range(count)}
    write_header(tmp_path / "model.safetensors", json.dumps(header, separators=(",", ":")), count)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    limit = (300 << 20) + count * 4000
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "omniplat", "plan", str(tmp_path), "--device", "cpu"],
        capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 10 + count / 2500


def test_the_command_escapes_names(tmp_path: Path) -> None:
    name = "model.layers.0.\x1b[31mred\x07\u202e\x9b.down_proj"
    write_checkpoint(tmp_path, CONFIG, {**mxfp8(name, 32, 32), "lm_head.weight": bf16(4, 4)})
    for options in ([], ["--all"], ["--json"], ["--explain", name]):
        done = subprocess.run(
            [sys.executable, "-m", "omniplat", "plan", str(tmp_path), "--device", "cpu", *options],
            capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
        assert b"\x07" not in done.stdout + done.stderr
        assert b"red" in done.stdout


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m")
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "omniplat", "plan", odd, "--device", "cpu", *options]
        missing = subprocess.run(command, capture_output=True, check=False)
        assert missing.returncode == 2
        assert b"Traceback" not in missing.stderr
        write_checkpoint(Path(odd), CONFIG, mxfp8("a", 32, 32))
        found = subprocess.run(command, capture_output=True, check=False)
        assert found.returncode in (0, 1), found.stderr
        assert b"\x1b" not in missing.stdout + missing.stderr + found.stdout + found.stderr
        shutil.rmtree(odd)


def test_a_good_header_is_a_plan(folder: Path) -> None:
    write_header(folder / "model.safetensors", json.dumps(GOOD), 32)
    assert isinstance(judge(folder), Plan)
