"""`omniplat plan org/model --revision R` as a user runs it, against a Hub that HF_ENDPOINT names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniplat.api import load
from omniplat.errors import InvalidCheckpointError
from tests.hub.conftest import Serve
from tests.hub.server import COMMIT, Behaviour
from tests.support.checkpoints import bf16, fp8_tensor, write_checkpoint

CONFIG = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
TENSORS = {"lm_head.weight": bf16(32, 64), **fp8_tensor("model.layers.0.mlp.down_proj", 64, 64)}

#: The same command in a Python that has no huggingface_hub.
WITHOUT = "import sys; sys.modules['huggingface_hub'] = None; from omniplat.cli.app import main; main()"


def omniplat(
    cwd: Path, *args: str, endpoint: str = "", without: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OMNIPLAT_", "HF_"))},
        "HF_HOME": str(cwd / "hf"), "HF_ENDPOINT": endpoint or "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1",
        **environ,
    }  # fmt: skip
    start = ["-c", WITHOUT] if without else ["-m", "omniplat"]
    done = subprocess.run(
        [sys.executable, *start, *args], capture_output=True, text=True, check=False, cwd=cwd, env=variables
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def test_plan_of_an_id(tmp_path: Path, serve: Serve) -> None:
    hub = serve(write_checkpoint(tmp_path / "files", CONFIG, TENSORS))
    args = ("plan", "org/model", "--revision", "refs/pr/1", "--device", "cpu", "--json")
    done = omniplat(tmp_path, *args, endpoint=hub.url)
    assert done.returncode == 0, done.stdout
    plan = json.loads(done.stdout)
    assert plan["checkpoint"] == {"path": "org/model", "formats": ["modelopt"], "components": [""], "revision": COMMIT}
    assert plan["summary"]["ok"] == 1
    assert (tmp_path / "hf" / "assets" / "omniplat" / "org--model" / COMMIT).is_dir()


def test_plan_of_a_gated_id(tmp_path: Path, serve: Serve) -> None:
    hub = serve(write_checkpoint(tmp_path / "files", CONFIG, TENSORS), Behaviour(gated=True))
    done = omniplat(tmp_path, "plan", "org/model", "--device", "cpu", endpoint=hub.url)
    assert done.returncode == 2
    assert "gated" in done.stderr


def test_without_the_extra(tmp_path: Path) -> None:
    done = omniplat(tmp_path, "plan", "org/model", "--device", "cpu", "--json", without=True)
    assert done.returncode == 2
    error = json.loads(done.stdout)
    assert error["error"] == "BackendNotInstalledError"
    assert error["install"] == 'pip install "omniplat[hub]"'
    assert "no folder of that name is here" in error["message"]


@pytest.mark.parametrize("name", ["org/model", "./org/model", "nowhere", "a/b/c"])
def test_a_missing_folder_asks_nobody_offline(tmp_path: Path, serve: Serve, name: str) -> None:
    hub = serve(write_checkpoint(tmp_path / "files", CONFIG, TENSORS))
    done = omniplat(tmp_path, "plan", name, "--device", "cpu", endpoint=hub.url, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "no such" in done.stderr
    assert ("HF_HUB_OFFLINE is set" in done.stderr) == (name == "org/model")
    assert hub.asked == []


@pytest.mark.parametrize("command", [("run", "org/model"), ("convert", "org/model", "out", "--to", "bf16")])
def test_weights_are_not_downloaded(tmp_path: Path, serve: Serve, command: tuple[str, ...]) -> None:
    hub = serve(write_checkpoint(tmp_path / "files", CONFIG, TENSORS))
    done = omniplat(tmp_path, *command, endpoint=hub.url)
    assert done.returncode == 2
    assert "hf download org/model --local-dir" in done.stderr
    assert "snapshot_download" in done.stderr
    with pytest.raises(InvalidCheckpointError, match="hf download org/model"):
        load("org/model", "cpu")
    assert hub.asked == []


def test_a_revision_of_a_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "files", CONFIG, TENSORS)
    done = omniplat(tmp_path, "plan", "files", "--revision", "main")
    assert done.returncode == 2
    assert "only repositories of the Hub have revisions" in done.stderr


def test_a_folder_needs_no_hub(tmp_path: Path, serve: Serve) -> None:
    hub = serve(write_checkpoint(tmp_path / "org" / "model", CONFIG, TENSORS))
    done = omniplat(tmp_path, "plan", "org/model", "--device", "cpu", endpoint=hub.url, without=True)
    assert done.returncode == 0, done.stderr
    assert hub.asked == []
