"""Measuring mixture-of-experts layers whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omniplat.canonical import Array
from omniplat.oracle import dequantize
from omniplat.reading import read_canonical
from omniplat.reference.kernels import ExpertLoop
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.load import load_layer
from omniplat.tools.fidelity import LayerFidelity
from omniplat.tools.fidelity_moe import MoeFidelity, measure_moe
from tests.support.moe import NAME, TOP, planned, write


def run(
    folder: Path, scale: float = 1.0, spoilt: str = "", without: str = ""
) -> tuple[LayerFidelity, MoeFidelity | None]:
    """The layer against what its weights stand for; `spoilt` is a module whose original is `scale` times as large."""
    plan, item, reader = planned(folder)

    class Given:
        def weight(self, module: str) -> Array | None:
            found = next(m for source in plan.resolutions for m in source.modules if m.name == module)
            if module == without:
                return None
            values = dequantize(read_canonical(found, reader)).astype(np.float32)
            return values * np.float32(scale) if module == spoilt else values

    experts = load_layer(item.packed, ExpertLoop(), reader)
    assert isinstance(experts, QuantExperts)
    return measure_moe(plan, item, experts, reader, Given(), rows=16, seed=1)


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_an_exact_original_has_no_distance(family: str, tmp_path: Path) -> None:
    alone, whole = run(write(tmp_path, family))
    assert whole is not None
    assert whole.output is not None
    assert alone.output is not None
    assert max(whole.output.relative, alone.output.relative) < 2e-6
    assert (whole.name, whole.top_k, whole.rows, whole.finite) == (NAME, TOP, 16, True)
    assert whole.seconds > 0


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("qwen2", "gate"),
        ("qwen2", "experts.3.gate_proj"),
        ("qwen2", "shared_expert.up_proj"),
        ("qwen2", "shared_expert_gate"),
        ("gpt_oss", "router"),
        ("gpt_oss", "experts.down_proj"),
        ("deepseek", "shared_experts.down_proj"),
    ],
)
def test_every_part_counts(family: str, module: str, tmp_path: Path) -> None:
    _, whole = run(write(tmp_path, family), 1.5, f"{NAME}.{module}")
    assert whole is not None
    assert whole.output is not None
    assert whole.output.relative > 0.01


def test_what_is_not_quantized_may_be_missing_from_the_original(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen2")
    _, whole = run(folder, without=f"{NAME}.gate")
    assert whole is not None
    assert whole.output is not None
    assert whole.output.relative < 2e-6
    alone, whole = run(folder, without=f"{NAME}.experts.1.up_proj")
    assert whole is not None
    assert (alone.output, whole.output) == (None, None)


def test_without_a_router_experts_are_chosen_at_random(tmp_path: Path) -> None:
    alone, whole = run(write(tmp_path, "qwen2", drop=f"{NAME}.gate."))
    assert whole is None
    assert alone.output is not None
    assert alone.output.relative < 2e-6
