"""What the README promises: its commands, extras, files and Python lines are what the package has."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import omniplat
from tests.packaging import pyproject

README = (pyproject.ROOT / "README.md").read_text()
EXAMPLE = pyproject.ROOT / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"


def omniplat_help(*args: str) -> str:
    environ = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "omniplat", *args, "--help"], capture_output=True, text=True, check=True, env=environ
    )
    return done.stdout


@pytest.mark.parametrize("line", re.findall(r"^    omniplat (.*?)(?:   |$)", README, re.MULTILINE))
def test_every_command_and_option_exists(line: str) -> None:
    command = line.split()[0]
    help_text = omniplat_help(command)
    for option in re.findall(r"--[a-z-]+", line):
        assert option in help_text
    assert "--json" in help_text


def test_every_extra_is_described_and_no_other() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", README.partition("| extra |")[2].partition("\n\n")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([a-z]+)`", row)} == set(pyproject.extras())


@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_make_targets_exist(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (pyproject.ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)]+\.md)\)|`((?:backends|docs)/[^`]+)`", README))
def test_every_page_that_is_named_exists(path: tuple[str, str]) -> None:
    assert (pyproject.ROOT / (path[0] or path[1])).exists()


def test_the_python_lines_run() -> None:
    import torch

    code = README.partition("    import omniplat\n")[2].partition("`omniplat.load` raises")[0]
    lines = [line.removeprefix("    ") for line in code.splitlines()]
    source = "\n".join(lines).replace("path/to/checkpoint", str(EXAMPLE))
    names = {"omniplat": omniplat, "x": torch.zeros(2, 256)}
    exec(compile(source, "README.md", "exec"), names)
    assert names["y"].shape == (2, 256)
    assert {finding.code for finding in names["plan"].findings} >= {"rule-readings-differ"}
