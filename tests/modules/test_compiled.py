"""Whatever puts layers into a model compiles their kernels, for the numbers of tokens that the caller names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import omniplat
from omniplat.conformance.dialect import write_checkpoint
from omniplat.modules import load as load_module
from omniplat.modules import quantize as quantize_module
from omniplat.portable import ahead
from omniplat.scheme import Scheme
from tests.modules import tiny

LINEAR = 7


def by_load(folder: Path, **named: Any) -> None:
    omniplat.load(folder, "cpu", **named)


def by_load_into(folder: Path, **named: Any) -> None:
    omniplat.load_into(tiny.decoder(), folder, "cpu", **named)


def by_quantize_model(folder: Path, **named: Any) -> None:
    omniplat.quantize_model(tiny.decoder(), "mxfp8", "cpu", **named)


@pytest.mark.parametrize("way", [by_load, by_load_into, by_quantize_model])
@pytest.mark.parametrize("tokens", [None, (1, 16), ()])
def test_kernels_are_compiled(
    way: Callable[..., None], tokens: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def compile_kernels(layers: Iterable[object], tokens: Iterable[int]) -> int:
        asked.append((len(list(layers)), tuple(tokens)))
        return 0

    for module in (ahead, load_module, quantize_module):
        monkeypatch.setattr(module, "compile_kernels", compile_kernels)
    write_checkpoint(tmp_path, Scheme.parse("mxfp8/a16"), tiny.SIZES)
    way(tmp_path, **({} if tokens is None else {"compile_for": tokens}))
    ((count, found),) = asked
    assert found == (ahead.TOKENS if tokens is None else tokens)
    # omniplat.load fuses q, k, v and gate, up
    assert count == (4 if way is by_load else LINEAR)
