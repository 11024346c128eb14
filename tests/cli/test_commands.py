"""The commands as a user runs them: exit codes, JSON, messages, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor, mxfp4, write_checkpoint, write_shard

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8"
MX = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 32,
      "data_type": "mx_fp"}  # fmt: skip


def omniplat(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OMNIPLAT_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "omniplat", *map(str, args)],
        capture_output=True, text=True, check=False, cwd=cwd, env=environ,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensors = {**mxfp4("model.layers.0.mlp.down_proj", 64, 64), "lm_head.weight": bf16(32, 64)}
    extra = {"lm_head": {"bits": 16}}
    return write_checkpoint(
        tmp_path / "small", {"model_type": "llama", "quantization_config": {**MX, "extra_config": extra}}, tensors
    )


def test_plan_for_people() -> None:
    done = omniplat("plan", EXAMPLE / "checkpoint")
    assert done.returncode == 0
    for text in ("model.layers.{0..1}.mlp.experts", "mxfp4/mxfp4", "cpu/", "rule-readings-differ", "device-default",
                 "extra_config['.mlp.experts.'].bits=4"):  # fmt: skip
        assert text in done.stdout


@pytest.mark.parametrize("method", ["auto-round", "mxfp4", "mxfp8"])
def test_a_method_confirms_what_is_stored(method: str) -> None:
    assert omniplat("plan", EXAMPLE / "checkpoint", "--method", method).returncode == 0


@pytest.mark.parametrize("method", ["gguf", "fp8", "mxfp", ""])
def test_a_method_that_is_not_stored_is_an_error_that_names_both(method: str) -> None:
    done = omniplat("plan", EXAMPLE / "checkpoint", "--method", method)
    assert done.returncode == 2
    assert f"not {method}" in done.stderr
    assert "auto-round" in done.stderr


def test_plan_as_json() -> None:
    plan = document(omniplat("plan", EXAMPLE / "checkpoint", "--device", "cpu", "--json"))
    assert plan["schema"] == "omniplat.plan/1"
    assert plan["summary"]["by_scheme"] == {"bf16/a16": 23, "mxfp4/mxfp4": 2, "mxfp8/mxfp8": 8}
    assert [f["code"] for f in plan["findings"] if f["severity"] == "error"] == []


def test_plan_of_every_layer_and_of_one() -> None:
    every = omniplat("plan", EXAMPLE / "checkpoint", "--all").stdout
    assert "model.layers.0.mlp.experts" in every
    assert "time_embed.mlp.0" in every
    one = omniplat("plan", EXAMPLE / "checkpoint", "--explain", "model.layers.1.mlp.experts.3.down_proj").stdout
    assert "executes  mxfp4/mxfp4" in one
    assert "rule-readings-differ" in one


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("o_proj", "similar: model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj"),
        ("model.layers.{0..1}.self_attn.qkv_proj", "similar: model.layers.0.self_attn.qkv_proj"),
        ("experts.3.down_proj", "similar: model.layers.0.mlp.experts.3.down_proj"),
        ("model.layers.0.self_attn.oproj", "similar: model.layers.0.self_attn.o_proj"),
        ("[a", "in this plan"),
    ],
)
def test_a_layer_that_is_not_there_has_similar_ones(name: str, similar: str) -> None:
    done = omniplat("plan", EXAMPLE / "checkpoint", "--explain", name)
    assert done.returncode == 2
    assert similar in done.stderr
    assert omniplat("plan", EXAMPLE / "checkpoint", "--explain", name, "--json").returncode == 2


@pytest.mark.parametrize("device", ["cuda:sm100", "npu:a5"])
def test_what_is_planned_for_a_device_elsewhere_does_not_run_here(device: str) -> None:
    done = omniplat("run", EXAMPLE / "checkpoint", "--device", device)
    assert done.returncode == 2
    assert f"{device} is not here" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_run_reports_fidelity_and_time() -> None:
    done = omniplat("run", EXAMPLE / "checkpoint", "--reference", EXAMPLE / "original", "--json")
    assert done.returncode == 0
    report = document(done)
    assert report["schema"] == "omniplat.run/1"
    errors = {item["scheme"]: item for item in report["by_scheme"]}
    assert errors["mxfp4/mxfp4"]["compared"] == 2
    assert 0.11 < errors["mxfp4/mxfp4"]["weight_error"] < 0.13
    assert 0.025 < errors["mxfp8/mxfp8"]["weight_error"] < 0.029
    assert all(item["seconds"] > 0 for item in report["layers"])


def test_run_covers_mixtures_of_experts_whole() -> None:
    arguments = ("run", EXAMPLE / "checkpoint", "--reference", EXAMPLE / "original")
    mixtures = json.loads(omniplat(*arguments, "--json").stdout)["moe"]
    assert [item["name"] for item in mixtures] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    first = mixtures[0]
    assert (first["router"], first["top_k"], first["finite"]) == ("model.layers.0.mlp.gate.wg", 2, True)
    assert [name.rpartition(".")[2] for name in first["shared"]] == ["gate_and_up_proj", "down_proj"]
    assert 0.1 < first["output_error"] < 0.4
    assert "model.layers.{0..1}.mlp: 2 whole, each row to 2 experts" in omniplat(*arguments).stdout


def test_run_against_something_else_is_refused(small: Path) -> None:
    done = omniplat("run", small, "--reference", EXAMPLE / "original")
    assert done.returncode == 2
    assert "none of the modules" in done.stderr


def test_convert_writes_a_checkpoint_of_the_same_names(tmp_path: Path) -> None:
    done = omniplat("convert", EXAMPLE / "checkpoint", tmp_path / "out", "--to", "bf16", "--json")
    assert done.returncode == 0
    assert document(done)["modules"] == 24
    plan = document(omniplat("plan", tmp_path / "out", "--json"))
    assert plan["summary"]["unquantized"] == plan["summary"]["layers"] == 33
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    again = omniplat("convert", EXAMPLE / "checkpoint", tmp_path / "out", "--to", "bf16")
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_a_plan_that_says_no_exits_with_1(tmp_path: Path) -> None:
    tensors = mxfp4("m", 64, 64)
    del tensors["m.weight_scale"]
    write_checkpoint(tmp_path, {"quantization_config": MX}, tensors)
    assert omniplat("plan", tmp_path, "--json").returncode == 1
    assert omniplat("run", tmp_path).returncode == 1
    done = omniplat("convert", tmp_path, tmp_path.parent / "converted", "--to", "f32")
    assert done.returncode == 1
    assert "m.weight_scale" in done.stderr
    assert not (tmp_path.parent / "converted").exists()


@pytest.mark.parametrize("command", ["plan", "run", "convert"])
@pytest.mark.parametrize(
    ("spoil", "mentions"),
    [
        ("missing", "no such file or folder"),
        ("no-config", "config.json"),
        ("broken-json", "config.json"),
        ("truncated", "model.safetensors"),
        ("lying", "model.safetensors: model.layers.0.mlp.down_proj.weight_packed"),
        ("absent-shard", "model-00002-of-00002.safetensors"),
        ("pickled", "pickled weights are not read: pytorch_model.bin"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_unreadable_input_ends_in_one_error(
    tmp_path: Path, small: Path, command: str, spoil: str, mentions: str, as_json: bool
) -> None:
    shard = small / "model.safetensors"
    if spoil == "missing":
        small = tmp_path / "nowhere"
    elif spoil == "no-config":
        (small / "config.json").unlink()
    elif spoil == "broken-json":
        (small / "config.json").write_text("{")
    elif spoil == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif spoil == "pickled":
        shard.rename(small / "pytorch_model.bin")
    elif spoil == "lying":
        shard.write_bytes(shard.read_bytes().replace(b'"shape": [64, 32]', b'"shape": [64, 31]'))
    else:
        names = {"a.weight": "model-00002-of-00002.safetensors"}
        (small / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    target = tmp_path / "target"
    args = [command, small, *([target, "--to", "f32"] if command == "convert" else [])]
    done = omniplat(*args, *(["--json"] if as_json else []))
    assert done.returncode == 2
    assert mentions in (done.stdout if as_json else done.stderr)
    assert not target.exists()
    if as_json:
        error = document(done)
        assert error["schema"] == "omniplat.error/1"
        assert error["error"] == "InvalidCheckpointError"
    else:
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["plan", "run", "convert"])
def test_an_unknown_method_is_a_no(tmp_path: Path, command: str) -> None:
    write_checkpoint(tmp_path / "c", {"quantization_config": {"quant_method": "alien"}}, fp8_channel("m", 64, 64))
    target = tmp_path / "target"
    done = omniplat(command, tmp_path / "c", *([target, "--to", "f32"] if command == "convert" else []))
    assert done.returncode == 1
    assert "alien" in done.stdout + done.stderr
    assert not target.exists()


@pytest.mark.parametrize(
    ("args", "mentions"),
    [
        (("--device", "cuda:sm7x"), "sm7x"),
        (("--device", "gpu"), "gpu"),
        (("--backend", "nobody"), "nobody"),
        (("--allow", "everything"), "everything"),
        (("--prefer", "luck"), "luck"),
        (("--component", "transformer_9"), "transformer_9"),
        (("--tp", "0"), "tp"),
        (("--nonsense",), "nonsense"),
    ],
)
def test_wrong_usage_exits_with_2(small: Path, args: tuple[str, ...], mentions: str) -> None:
    done = omniplat("plan", small, *args)
    assert done.returncode == 2
    assert mentions in done.stderr


def test_a_scale_that_is_not_finite_is_found_while_loading(tmp_path: Path) -> None:
    tensors = fp8_tensor("model.layers.0.mlp.down_proj", 64, 64)
    nan = {"model.layers.0.mlp.down_proj.weight_scale": b"\x00\x00\xc0\x7f"}
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    write_checkpoint(tmp_path, {"quantization_config": config}, tensors, values=nan)
    done = omniplat("run", tmp_path)
    assert done.returncode == 1
    assert "finite" in done.stderr
    assert "model.layers.0.mlp.down_proj" in done.stderr


def test_a_single_file_plans(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.safetensors", mxfp4("m", 64, 64))
    plan = document(omniplat("plan", tmp_path / "x.safetensors", "--device", "cpu", "--json"))
    assert [f["code"] for f in plan["findings"]] == ["inferred-from-headers", "unknown-family"]


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("convert", EXAMPLE / "checkpoint", "FILE/c", "--to", "bf16"), "FILE/c cannot be written"),
        (("convert", EXAMPLE / "checkpoint", "FILE", "--to", "bf16"), "FILE exists"),
        (("new-backend", "acme", "--directory", "FILE/c"), "FILE/c cannot be written"),
        (("new-backend", "acme", "--directory", "FILE"), "FILE exists"),
        (("conformance", "cpu", "--report", "FILE/r.json"), "FILE/r.json cannot be written"),
        (("conformance", "cpu", "--report", "."), "exists and is no file"),
        (("conformance", "nobody"), "'nobody' is installed; available: ascend"),
        (("plan", EXAMPLE / "checkpoint", "--backend", "nobody"), "'nobody' is installed; available: ascend"),
        (("matrix", "--method", "nobody"), "'nobody'; known: bf16, mxfp8"),
    ],
)
def test_what_cannot_be_written_or_is_not_there_is_one_line(
    tmp_path: Path, arguments: tuple[str | Path, ...], mentions: str
) -> None:
    """And nothing was done before it."""
    (tmp_path / "FILE").write_text("held")
    done = omniplat(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert mentions in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "\\n" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]
    assert (tmp_path / "FILE").read_text() == "held"


def test_version_and_help() -> None:
    assert omniplat("--version").stdout.strip()
    assert "convert" in omniplat("--help").stdout


def test_compare_answers_no_where_a_bound_is_missed(tmp_path: Path) -> None:
    near = omniplat("compare", EXAMPLE / "checkpoint", EXAMPLE / "checkpoint", "--max-weight-error", "0", "--json")
    assert (near.returncode, document(near)["out_of_bounds"]) == (0, [])
    weights = {item["name"]: item for item in document(near)["weights"]}
    assert weights["model.layers.0.mlp.experts.0.down_proj.weight"]["a"] == "mxfp4"
    far = omniplat("compare", EXAMPLE / "original", EXAMPLE / "checkpoint", "--max-weight-error", "0.1")
    assert far.returncode == 1
    assert "model.layers.{0..1}.mlp.experts.{0..3}.down_proj.weight" in far.stdout
    assert "out of bounds model.layers.0.mlp.experts.0.down_proj.weight" in far.stdout
    assert "not compared lm_head.weight: only in B" in far.stdout
    wrong = omniplat("compare", EXAMPLE / "checkpoint", tmp_path / "nothing", "--json")
    assert (wrong.returncode, document(wrong)["schema"]) == (2, "omniplat.error/1")
