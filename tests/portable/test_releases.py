"""Every kernel that is written in Triton compiles with the release that is installed: CI has one after the other, from
the oldest that is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omniplat.portable.quantize import OLDEST_TRITON, has_triton
from tests.support.compile_every import compiled
from tests.support.compile_for import ROOT

#: Hopper's, in Gluon, which have tests of their own.
ELSEWHERE = {"_ping_pong"}


@pytest.mark.skipif(not has_triton(), reason="triton is not installed, or too old")
def test_every_kernel_compiles() -> None:
    found = set(compiled())
    launched = {name for path in _sources() for name in re.findall(r"\bLaunch\(\s*(_?\w+)", path.read_text())}
    named = {
        "kernel": {"few_tokens", "many_tokens"},
        "_fragments": {"fragments"},
        "_by_descriptors": {"_by_descriptors", "_by_pointers"},
    }
    wanted = set().union(*(named.get(name, {name}) for name in launched)) - ELSEWHERE
    assert {"_rows", "_sort", "_decode", "_combine"} < wanted
    # fragments are taken with tested releases, and what they replace with others
    assert wanted - {"fragments", "few_tokens"} <= found
    assert found & {"fragments", "few_tokens"}


def test_backends_declare_the_oldest_release_that_compiles_every_kernel() -> None:
    """And nobody another one: a plan refuses what would not compile after loading."""
    oldest = f"triton>={'.'.join(map(str, OLDEST_TRITON))}"
    declared = {
        found
        for path in (ROOT / "backends").rglob("*.py")
        for found in re.findall(r'"(triton>=[^",]*)"', path.read_text())
    }
    assert declared == {oldest}
    assert f'"{oldest}"' in (ROOT / "pyproject.toml").read_text()


def _sources() -> list[Path]:
    return [path for folder in ("omniplat/portable", "backends/cuda") for path in (ROOT / folder).rglob("*.py")]
