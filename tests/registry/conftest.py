"""A Python of its own for each question, with chosen plugins on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.install import install

ROOT = Path(__file__).parents[2]

Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """`ask(code, *plugins, **environ)`: run `code` where these plugins are installed; what it prints as JSON."""

    def run(code: str, *plugins: str, **environ: str) -> Any:
        target = tmp_path / "plugins"
        for name in plugins:
            install(name, target)
        variables = {name: text for name, text in os.environ.items() if not name.startswith("OMNIPLAT_")}
        variables.update(environ, PYTHONPATH=str(target), HOME=str(tmp_path / "home"))
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
