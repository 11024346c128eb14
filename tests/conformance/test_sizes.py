"""Sizes that the suite tries are sizes that layers of a scheme can have: on every backend with rules for sizes."""

from __future__ import annotations

import pytest

from omniplat.conformance.subject import find_subject
from omniplat.conformance.suite import test_boundary as boundary
from omniplat.conformance.weights import columns_unit


@pytest.mark.parametrize("backend", ["ascend", "cuda", "rocm", "xpu"])
def test_sizes_inside_are_whole_groups(backend: str) -> None:
    cases = list(boundary._inside(find_subject(backend), "full"))
    assert cases
    for case in cases:
        unit = columns_unit(case.scheme)
        widths = (case.k, case.inner) if case.experts else (case.k,)
        assert [width % unit for width in widths] == [0] * len(widths), case.id
