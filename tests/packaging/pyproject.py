"""pyproject.toml as data. `python tests/packaging/pyproject.py extras` prints the names of the extras."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def read() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def extras() -> tuple[str, ...]:
    return tuple(read()["project"]["optional-dependencies"])


if __name__ == "__main__" and sys.argv[1:] == ["extras"]:
    print(" ".join(extras()))
