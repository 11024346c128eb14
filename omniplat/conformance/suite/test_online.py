"""Group online: kernels that quantize weights themselves write the declared rule's codes, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from omniplat import oracle
from omniplat.conformance.cases import Case, case_of
from omniplat.conformance.catalog import activation_ids, declared_activations, declared_weights, weight_ids
from omniplat.conformance.checks import check
from omniplat.conformance.inputs import random_input
from omniplat.conformance.subject import Subject
from omniplat.errors import InvalidSchemeError, OmniplatError
from omniplat.runtime.kernel import load_kernel
from omniplat.runtime.tensors import DTYPES, WeightTensors, to_array
from omniplat.scheme import Scheme, parse_activation_id, parse_weight_id


def _cases(subject: Subject, profile: str) -> Iterable[Case]:
    """Declared weights that the oracle quantizes, of capabilities whose kernel has `quantize`."""
    for capability in subject.spec.capabilities:
        if capability.op != "linear" or subject.obstacle(capability) is not None:
            continue
        try:
            kernel = load_kernel(capability.impl)
        except OmniplatError:
            continue
        if not callable(getattr(kernel, "quantize", None)):
            continue
        activation = declared_activations(capability, activation_ids(subject.spec))[0]
        for weight in declared_weights(capability, weight_ids(subject.spec)):
            scheme = Scheme(parse_weight_id(weight), parse_activation_id(activation))
            try:
                oracle.quantize_weight(np.ones((2, 1024), np.float32), scheme.weight)
            except InvalidSchemeError:
                continue
            yield case_of(capability, scheme, n=48, k=1024)


@check("online", _cases)
def test_quantize(subject: Subject, case: Case) -> None:
    """`quantize(weight, scheme)` returns WeightTensors of the scheme; zeros and large values are among the groups."""
    values = random_input(case.n, case.k, case.rng(), case.dtype)
    values[0], values[1, : case.k // 2] = 0.0, 0.0
    values[2] *= 2.0**8
    given = torch.from_numpy(values).to(DTYPES[case.dtype]).to(subject.torch_device)
    quantize = getattr(subject.kernel(case.capability), "quantize")  # noqa: B009
    found = quantize(given, case.scheme)
    assert isinstance(found, WeightTensors), f"quantize returns {type(found).__name__}, not WeightTensors"
    wanted = oracle.quantize_weight(values, case.scheme.weight)
    roles = sorted(wanted.tensors)
    assert sorted(found.tensors) == roles, f"roles {sorted(found.tensors)}, expected {roles}"
    for role, array in wanted.tensors.items():
        own = to_array(found.tensors[role].cpu())
        assert own.dtype == array.dtype, f"{role} is {own.dtype}, expected {array.dtype}"
        assert own.shape == array.shape, f"{role} is {own.shape}, expected {array.shape}"
        different = int((own.view(np.uint8) != np.ascontiguousarray(array).view(np.uint8)).sum())
        assert not different, f"{case.id}: {different} bytes of {role} differ from the declared rule's"
