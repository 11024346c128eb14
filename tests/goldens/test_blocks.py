"""Whole blocks against the models' own code: a linear layer alone cannot tell that its rows are in the wrong order."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.goldens import blocks
from tests.goldens.blocks import BLOCKS, DATA

CASES = [(name, block) for name, (_, parts) in BLOCKS.items() for block in parts]


def distance(name: str, block: str, *, ordered: bool = True) -> float:
    """Relative L2 distance of a block's output from the golden."""
    golden = load_file(DATA / f"{name}.safetensors")
    with torch.no_grad():
        y = getattr(blocks, block)(blocks.load(name, ordered=ordered), golden["x"])
    return float((y - golden[block]).norm() / golden[block].norm())


@pytest.mark.parametrize(("name", "block"), CASES)
def test_a_block_is_the_models_own(name: str, block: str) -> None:
    assert distance(name, block) < 5e-6


@pytest.mark.parametrize(("name", "block"), CASES)
def test_a_wrong_row_order_is_seen(name: str, block: str) -> None:
    assert distance(name, block, ordered=False) > 0.1
