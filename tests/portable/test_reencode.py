"""The torch form of re-encoding gives the oracle's codes and scales, and refuses what its rule does not allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.errors import InvalidCheckpointError
from omniplat.oracle.reencode import reencode as defined
from omniplat.portable.reencode import reencode
from omniplat.reencoding import REENCODINGS, Reencoding
from omniplat.runtime.tensors import to_array, to_torch
from omniplat.scheme import Scheme

each_rule = pytest.mark.parametrize(
    "rule",
    REENCODINGS.values(),
    ids=lambda rule: f"{rule.source}-{rule.target}" if isinstance(rule, Reencoding) else "",
)


def weight_of(source: str, span: int, seed: int, zero_group: bool = False) -> CanonicalWeight:
    """8 rows of 4 groups, the last of each row `span` binades below the first."""
    rng = np.random.default_rng(seed)
    quant = Scheme.parse(f"{source}/a16").weight
    values = rng.standard_normal((8, 128)).astype(np.float32)
    tensors = dict(oracle.quantize_weight(values, quant).tensors)
    scale = 120 - rng.integers(0, span + 1, (8, 4))
    scale[:, 0], scale[:, -1] = 120, 120 - span
    if zero_group:
        codes = tensors["codes"].view(np.uint8).reshape(8, 4, -1).copy()
        codes[:, 1] = 0
        tensors["codes"] = codes.reshape(8, -1).view(tensors["codes"].dtype)
        scale[:, 1] = 0
    return CanonicalWeight(Scheme(quant), 8, 128, tensors | {"scale": scale.astype(np.uint8)})


@each_rule
@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 1), seed=st.integers(0, 2**32), zero_group=st.booleans())
def test_bytes_are_the_oracles(rule: Reencoding, share: float, seed: int, zero_group: bool) -> None:
    weight = weight_of(rule.source, round(share * rule.max_span), seed, zero_group)
    wanted, found = defined(weight, rule.target), reencode(to_torch(weight), rule.target)
    assert found.scheme.id == wanted.scheme.id
    codes = to_array(found.tensors["codes"]).view(np.uint8)
    np.testing.assert_array_equal(codes, wanted.tensors["codes"].view(np.uint8))
    np.testing.assert_array_equal(to_array(found.tensors["scale"]), wanted.tensors["scale"])


@each_rule
def test_one_binade_more_is_refused(rule: Reencoding) -> None:
    weight = to_torch(weight_of(rule.source, rule.max_span + 1, 0))
    with pytest.raises(InvalidCheckpointError, match=f"span {rule.max_span + 1} binades"):
        reencode(weight, rule.target, "model.layer")


@each_rule
def test_a_scale_that_is_nan_is_refused(rule: Reencoding) -> None:
    weight = weight_of(rule.source, 0, 0)
    scale = weight.tensors["scale"].copy()
    scale[3, 2] = 255
    with pytest.raises(InvalidCheckpointError, match="NaN"):
        reencode(to_torch(replace(weight, tensors={**weight.tensors, "scale": scale})), rule.target)


def test_experts_are_rewritten_one_by_one() -> None:
    weights = [weight_of("mxfp4", 3, seed) for seed in (0, 1, 2)]
    stacked = replace(
        weights[0], tensors={role: np.stack([w.tensors[role] for w in weights]) for role in ("codes", "scale")}
    )
    found = reencode(to_torch(stacked, experts=3), "fp8-channel").tensors
    assert found["codes"].shape == (3, 8, 128)
    for index, weight in enumerate(weights):
        alone = reencode(to_torch(weight), "fp8-channel").tensors
        assert torch.equal(found["codes"][index], alone["codes"])
        assert torch.equal(found["scale"][index], alone["scale"])
