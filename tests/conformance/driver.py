"""Runs the suite against several backends in one process: torch is imported once. Prints one JSON object.

Arguments: a folder for reports, then `backend[=modules]`, the modules being those of the suite to run (all: none).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


def main(folder: Path, wanted: list[str]) -> None:
    codes = {}
    (folder / "pytest.ini").write_text("[pytest]\n")
    for text in wanted:
        name, _, modules = text.partition("=")
        report = folder / f"{name}.json"
        targets = [f"omniplat.conformance.suite.{module}" for module in modules.split(",") if module]
        argv = ["--pyargs", *(targets or ["omniplat.conformance.suite"]), "-c", str(folder / "pytest.ini"), "-q"]
        argv += ["-p", "omniplat.conformance.plugin", "-p", "no:cacheprovider", "--noconftest", "--tb=no"]
        argv += ["--omniplat-backend", name, "--omniplat-profile", "quick", "--omniplat-report", str(report)]
        codes[name] = int(pytest.main(argv))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
