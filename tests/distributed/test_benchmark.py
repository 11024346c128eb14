"""The benchmark of two GPUs, with two processes on the CPU: it runs, and its shares are shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ranks_compute_what_one_does() -> None:
    """It asserts itself that two ranks are near to one, in BF16 and quantized."""
    schemes = ["fp8-channel/fp8-token", "mxfp4/a16"]
    argv = [sys.executable, str(ROOT / "benchmarks" / "cuda_two_gpus.py"), "--device", "cpu", "--json"]
    argv += ["--pair", "128x64", "--experts", "16x64x64", "--rows", "16", "--rounds", "1", "--schemes", *schemes]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)
    layers = ["pair 128x64", "experts tp", "experts ep"]
    assert [(r["layer"], r["scheme"]) for r in results] == [(layer, scheme) for scheme in schemes for layer in layers]
    for result in results:
        assert result["difference"] > 0
        assert set(result["microseconds"]) == {"bf16 one", "one", "bf16 two", "two"}
        assert min(result["microseconds"].values()) > 0
