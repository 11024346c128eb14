"""Kernels of releases that differ in numerics: each is chosen where it runs, and held against its own rule."""

from __future__ import annotations

import numpy as np
import pytest

from omniplat.conformance.cases import case_of
from omniplat.conformance.expected import rounded
from omniplat.conformance.inputs import random_input
from omniplat.conformance.judge import expert_trial, linear_trial
from omniplat.conformance.subject import Subject, find_subject
from omniplat.conformance.tolerances import noise_ratio
from omniplat.emulation import emulate
from omniplat.match import Policy, match
from omniplat.scheme import Scheme

MXFP4 = Scheme.parse("mxfp4/mxfp4")
MXFP8 = Scheme.parse("mxfp8/mxfp8")
RELEASES = [
    ("0.1.13.post1", "gemm_a4w4_even"),
    ("0.1.14", "gemm_a4w4_even"),
    ("0.1.16", "gemm_a4w4"),
    ("0.1.18", "gemm_a4w4"),
    ("0.1.20.post1", "gemm_a4w4"),
    ("0.1.14", "fused_moe_mxfp4_even"),
    ("0.1.16", "fused_moe_mxfp4"),
    ("0.1.16", "reencoded_moe_mxfp8"),
    ("0.1.17", "fused_moe_mxfp8"),
    ("0.1.20.post1", "fused_moe_mxfp8"),
]


@pytest.mark.parametrize(("version", "kernel"), RELEASES)
def test_the_kernel_of_a_release(version: str, kernel: str) -> None:
    with emulate("rocm:gfx950", version=version) as emulation:
        subject = find_subject("rocm", emulated=emulation.device)
        capability = next(item for item in subject.spec.capabilities if item.name == kernel)
        scheme = MXFP8 if "mxfp8" in kernel else MXFP4
        case = case_of(capability, scheme, rows=100, n=96, k=256, inner=256)
        chosen = match(case.spec, subject.spec.capabilities, subject.device, Policy()).chosen
        assert chosen is not None
        assert chosen.capability.name == kernel
        if case.experts:
            trial = expert_trial(subject, case)
            assert trial.assert_right(trial.input(), trial.routing()) == pytest.approx(1.0, abs=0.02)
        else:
            assert _noise(subject, kernel) == pytest.approx(1.0, abs=0.01)
        assert not emulation.violations


def _noise(subject: Subject, kernel: str) -> float:
    """The error of the input's quantization in units of the oracle's, by the rule that the kernel declares."""
    capability = next(item for item in subject.spec.capabilities if item.name == kernel)
    trial = linear_trial(subject, case_of(capability, MXFP4, rows=25, n=96, k=256))
    trial.assert_within_bound(trial.input())
    x = random_input(25, 256, np.random.default_rng(4), "bf16")
    wanted = trial.expect(x)
    return noise_ratio(trial.run(x), rounded(wanted.y, "bf16"), wanted.unquantized)
