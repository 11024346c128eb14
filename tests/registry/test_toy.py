"""The toy backend as its author would ship it: installed by pip, chosen, and its kernel run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.plugins.install import HERE

CHOOSE = """
import os
from omniplat.choose import choose_backend
from omniplat.registry import default_registry
chosen = choose_backend(None, None, default_registry(), os.environ)
print(chosen.spec.name, chosen.device.kind, chosen.reason, sep="|")
"""
RUN = """
import numpy as np, torch
from omniplat.canonical import CanonicalWeight
from omniplat.layer import LayerSpec
from omniplat.registry import BACKENDS, default_registry
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.tensors import to_torch
from omniplat.scheme import Scheme

scheme = Scheme.parse("int8-channel/a16")
codes = np.arange(-12, 12, dtype=np.int8).reshape(4, 6)
scale = np.array([[0.5], [0.25], [2.0], [1.0]], dtype=np.float32)
weight = CanonicalWeight(scheme, 4, 6, {"codes": codes, "scale": scale})
spec = LayerSpec("layer", "linear", 4, 6, scheme, dtype="f32")
capability = default_registry().load(BACKENDS, "toy").capabilities[0]
kernel = load_kernel(capability.impl)
prepared = kernel.prepare(to_torch(weight), spec)
x, bias = torch.randn(2, 3, 6), torch.ones(4)
y = kernel.apply(prepared.config, prepared.tensors, x, bias, torch.float32, None)
torch.testing.assert_close(y, torch.nn.functional.linear(x, torch.from_numpy(codes * scale), bias))
torch.library.opcheck(torch.ops.omniplat_toy.int8_rows.default, (x, *prepared.tensors.values(), bias, torch.float32))
print("fine")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(target), str(HERE / "toy")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def run(code: str, installed: Path, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(installed), "OMNIPLAT_BACKEND": "toy"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_chosen_by_the_environment(installed: Path) -> None:
    assert run(CHOOSE, installed) == "toy|cpu|backend toy was named by OMNIPLAT_BACKEND"


def test_kernel_runs(installed: Path) -> None:
    assert run(RUN, installed) == "fine"


PLAN = """
import json, sys
import omniplat
plan = omniplat.plan(sys.argv[1], "cpu")
torch_free = "torch" not in sys.modules
layers = omniplat.load(sys.argv[1], "cpu")
import torch
from safetensors.torch import load_file
stored = load_file(sys.argv[1] + "/model.safetensors")
name = "model.layers.0.mlp.down_proj"
x = torch.randn(5, 64)
weight = stored[name + ".weight"].float() * stored[name + ".weight_scale"].float()
y = layers[name](x)
torch.testing.assert_close(y.float(), torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)
found = {layer.name: layer for layer in plan.layers}[name]
errors = [finding.code for finding in plan.findings if finding.severity == "error"]
print(json.dumps([torch_free, errors, found.status, found.backend, found.kernel, found.executes]))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One layer in int8 with a scale per row, as compressed-tensors writes it."""
    codes = np.random.default_rng(0).integers(-127, 128, (32, 64), dtype=np.int8)
    name = "model.layers.0.mlp.down_proj"
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": np.full((32, 1), 1 / 512, dtype=np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    config = {"model_type": "llama", "hidden_size": 32, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_plans_loads_and_runs_a_checkpoint(installed: Path, checkpoint: Path) -> None:
    answer = json.loads(run(PLAN, installed, str(checkpoint)))
    assert answer == [True, [], "ok", "toy", "int8_rows", "int8-channel/a16"]
