"""What the portable kernels that compute in 16 bits are declared as, for backends to list with their architectures, and
the releases that all portable kernels need. Imports neither torch nor triton."""

from __future__ import annotations

from dataclasses import replace

from packaging.requirements import Requirement
from packaging.version import Version

from omniplat.capability import Capability
from omniplat.portable.decoded import (
    DECODED_EXPERTS,
    DECODED_RESIDENT,
    DECODED_WEIGHTS,
    LOW_RANK_RESIDENT,
    LOW_RANK_WEIGHTS,
)

TORCH = "torch>=2.6"
#: From the release on with which every kernel compiles (`tests/portable/test_releases.py`).
TRITON = "triton>=3.4"

#: Weights are decoded in registers.
PORTABLE_LINEAR = Capability(
    "portable_linear",
    "linear",
    DECODED_WEIGHTS,
    ("a16",),
    executes="a16",
    dtypes=("bf16", "f16"),
    requires=(TORCH, TRITON),
    priority=5,
    resident_by_weight=DECODED_RESIDENT,
    refuses=("group_index",),
    impl="omniplat.portable.weight_only:PortableLinear",
)
PORTABLE_LOW_RANK = replace(
    PORTABLE_LINEAR,
    name="portable_low_rank",
    weights=LOW_RANK_WEIGHTS,
    resident_by_weight=LOW_RANK_RESIDENT,
    impl="omniplat.portable.low_rank:PortableLowRank",
)
PORTABLE_MOE = replace(
    PORTABLE_LINEAR,
    name="portable_moe",
    op="moe",
    weights=DECODED_EXPERTS,
    refuses=("group_index", "pre_scale"),
    impl="omniplat.portable.weight_only_experts:PortableExperts",
)


def meets(version: str, requirement: str) -> bool:
    """True for the releases that a requirement asks for, builds of one's own among them."""
    return Requirement(requirement).specifier.contains(Version(version).base_version)
