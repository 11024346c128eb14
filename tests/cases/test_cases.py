"""Every description of the folder that OMNIPLAT_CASES names, through the command line's own code path."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniplat.cli.app import app
from omniplat.errors import OmniplatError
from tests.cases.description import VARIABLE, build, descriptions, problems

pytestmark = pytest.mark.corpus


def test_the_folder_holds_descriptions() -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set: no described checkpoint is tried")
    assert descriptions()


@pytest.mark.parametrize("path", descriptions(), ids=lambda path: path.stem)
def test_the_plan_says_what_it_must(path: Path, tmp_path: Path) -> None:
    case = json.loads(path.read_text())
    build(case, tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *case.get("args", ()), "--json"])
    if isinstance(result.exception, OmniplatError):
        code, plan, output = 2, None, result.exception.message
    else:
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        code, output = result.exit_code, result.output
        plan = json.loads(result.stdout) if result.stdout.startswith("{") else None
    assert problems(case["expect"], code, plan, output) == []
