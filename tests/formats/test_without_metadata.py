"""Tensors without metadata: what headers alone show, and what they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel, fp8_tensor, gptq, mxfp4, mxfp8
from tests.support.resolving import codes, only, resolve, schemes


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (mxfp4("m", 64, 64), "mxfp4/a16"),
        (mxfp8("m", 64, 64), "mxfp8/a16"),
        (fp8_channel("m", 64, 64), "fp8-channel/a16"),
        (fp8_tensor("m", 64, 64), "fp8-tensor/fp8-tensor-static"),
        ({"m.weight": ("F8_E4M3", (64, 64)), "m.weight_scale_inv": ("U8", (64, 2))}, "mxfp8/a16"),
        ({"m.weight": ("F8_E4M3", (256, 300)), "m.weight_scale_inv": ("F32", (2, 3))}, "fp8-block128x128/a16"),
    ],
)
def test_a_fingerprint_is_a_note(tmp_path: Path, tensors: Any, scheme: str) -> None:
    found = resolve(tmp_path, None, {**tensors, "n.weight": bf16(8, 8)})
    assert schemes(found) == {"m": scheme, "n": "bf16/a16"}
    assert codes(found) == ["inferred-from-headers"]
    assert {m.declared for m in found.modules} == {None}


def test_integer_words_alone_are_not_guessed(tmp_path: Path) -> None:
    found = resolve(tmp_path, None, gptq("m", 128, 128, 4, 128))
    assert schemes(found)["m"].endswith("invalid")
    assert only(found, "tensors-contradict-config").severity == "error"


def test_a_float_checkpoint_has_nothing_to_report(tmp_path: Path) -> None:
    assert codes(resolve(tmp_path, None, {"m.weight": bf16(8, 8)})) == []


def test_a_quantized_tensor_without_scale(tmp_path: Path) -> None:
    found = resolve(tmp_path, None, {"m.weight": ("F8_E4M3", (64, 64))})
    assert "missing-tensor" in codes(found)


def test_an_unknown_method_lists_the_known_ones(tmp_path: Path) -> None:
    found = resolve(tmp_path, {"quant_method": "from-the-future"}, fp8_channel("m", 64, 64))
    problem = only(found, "unknown-format")
    assert problem.severity == "error"
    assert "from-the-future" in problem.message
    assert "compressed-tensors" in problem.message
