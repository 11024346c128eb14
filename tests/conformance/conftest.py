"""The zoo, installed into a folder of its own, and every animal's report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.install import install

#: Backend -> the group that its fault has to fail in.
FAULTS = {
    "zoo-nibbles": "numerics",
    "zoo-scale-row": "numerics",
    "zoo-global-divided": "numerics",
    "zoo-e8m0-number": "numerics",
    "zoo-bf16-fallback": "numerics",
    "zoo-own-rule": "numerics",
    "zoo-ties-away": "numerics",
    "zoo-rounds-twice": "numerics",
    "zoo-bf16-input": "numerics",
    "zoo-per-tensor": "numerics",
    "zoo-routing-weights": "numerics",
    "zoo-no-bias": "declared",
    "zoo-bf16-bias": "declared",
    "zoo-silu-only": "declared",
    "zoo-no-limit": "declared",
    "zoo-one-scheme": "declared",
    "zoo-two-choices": "declared",
    "zoo-declares-more": "declared",
    "zoo-k-tail": "boundary",
    "zoo-needs-k64": "boundary",
    "zoo-mutates": "contract",
    "zoo-unrepeatable": "contract",
    "zoo-column-major": "contract",
    "zoo-expert-order": "packing",
    "zoo-up-first": "packing",
    "zoo-declares-less": "undeclared",
    "zoo-value-error": "undeclared",
    "zoo-online": "online",
    "zoo-heavy": "manifest",
}
CORRECT = ("zoo-correct", "toy")


def environment(folder: Path) -> dict[str, str]:
    """Only what is installed in `folder` and the interpreter's own packages; one thread."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("PYTEST_", "OMNIPLAT_", "COV_"))}
    return {**kept, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the zoo and the toy installed."""
    folder = tmp_path_factory.mktemp("site")
    install("zoo", folder)
    return install("toy", folder)


@dataclass(frozen=True)
class Runs:
    """Reports and exit codes of all runs, by backend."""

    reports: dict[str, dict[str, Any]]
    codes: dict[str, int]


@pytest.fixture(scope="session")
def runs(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The correct backends against the whole suite, each fault against its own group."""
    folder = tmp_path_factory.mktemp("reports")
    driver = Path(__file__).with_name("driver.py")
    wanted = [*CORRECT, *(f"{name}=test_{group}" for name, group in FAULTS.items())]
    argv = [sys.executable, str(driver), str(folder), *wanted]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder, env=environment(site))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return Runs(reports, json.loads(done.stdout.splitlines()[-1]))
