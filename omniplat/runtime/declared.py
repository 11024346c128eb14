"""A kernel's own guard: it refuses weights that its capability does not declare.

Planning never sends it one. Engines, tools and tests call kernels directly, and a kernel that computes something with
a weight it does not know is worse than one that refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable

from omniplat.capability import Capability, compare_activation, matches, unfit, unfollowed
from omniplat.errors import UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.runtime.tensors import WeightTensors

#: What a static activation brings, and a kernel that executes another one has no use for.
_INPUT_ROLES = ("input_scale", "input_zero_point", "input_global_scale")


def require_declared(
    backend: str, capability: Capability, weight: WeightTensors, spec: LayerSpec, roles: Iterable[str]
) -> None:
    """Raise UnsupportedCombinationError unless `capability` declares the weight's scheme, and takes its rules and, of
    a linear layer, its sizes: those of this rank's part, which is what the kernel has.

    `roles` are the canonical tensors that the kernel reads beside `bias`: a weight with others (`zero_point`,
    `group_index`, `pre_scale`) means something else without them. Static input scales need not be among them where
    the capability executes one activation whatever is declared.
    """
    scheme = weight.scheme
    reasons = []
    if not matches(capability.weights, scheme.weight_id):
        reasons.append(f"{capability.name}  needs weight {', '.join(capability.weights)}, found {scheme.weight_id}")
    declared = scheme.activation_id
    if capability.executes:
        runs = compare_activation(declared, capability.executes) != "changed"
    else:
        runs = matches(capability.activations, declared)
    if not runs:
        needed = capability.executes or ", ".join(capability.activations)
        reasons.append(f"{capability.name}  needs activation {needed}, found {declared}")
    if spec.op == "linear":
        sizes = {"in": weight.in_features, "out": weight.out_features}
        if (unfitting := unfit(capability, sizes)) is not None:
            reasons.append(f"{capability.name}  {unfitting}")
    other = unfollowed(capability, scheme.activation)
    if other is not None and not capability.substitutes:
        reasons.append(f"{capability.name}  {other}")
    unused = _INPUT_ROLES if capability.executes else ()
    if unread := sorted(set(weight.tensors) - {*roles, *unused, "bias"}):
        reasons.append(f"{capability.name}  needs a weight without {', '.join(unread)}")
    if reasons:
        raise UnsupportedCombinationError(backend, spec.op, scheme.id, [spec.name], reasons)
