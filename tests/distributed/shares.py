"""Layers that two ranks share: their checkpoints, plans and inputs, the same in every process that makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omniplat.canonical import Array, CanonicalWeight
from omniplat.conformance.build import make_routing
from omniplat.conformance.canonical_file import plan_canonical, write_canonical, write_weights
from omniplat.conformance.expected import Routing, executed_activation
from omniplat.conformance.files import loaded_input
from omniplat.conformance.inputs import random_input, representable_input
from omniplat.conformance.model import Sizes, Written, dense_modules, modules_of
from omniplat.conformance.subject import Subject
from omniplat.conformance.weights import exact_weight, has_exact, zeroed_columns
from omniplat.planner import Planned, PlannedLayer
from omniplat.scheme import UNQUANTIZED, Scheme

RANKS = 2
#: More than 16: some products treat fewer in a way of their own.
ROWS = 20
TOP = 2
DENSE = Sizes(hidden=256, inner=512, heads=4, kv_heads=2, head_dim=64)
EXPERTS = replace(DENSE, experts=4)
SCHEMES = (
    "fp8-channel/fp8-token",
    "int8-channel/int8-token",
    "mxfp8/mxfp8",
    "mxfp4/mxfp4",
    "mxfp4/a16",
    "int4-g128/a16",
    "nf4-b64/a16",
)
EXPERT_SCHEMES = ("fp8-channel/fp8-token", "mxfp4/a16")
#: The gated MLP's two layers.
UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Case:
    """One checkpoint. `data`: "random" weights; "exact" ones, whose sums are numbers of bf16 in any order."""

    scheme: str
    data: str = "random"
    experts: bool = False

    @property
    def name(self) -> str:
        return f"{self.scheme.replace('/', '-')}-{self.data}" + ("-experts" if self.experts else "")


EXACT = tuple(Case(scheme, "exact") for scheme in SCHEMES if has_exact(Scheme.parse(scheme)))
RANDOM = tuple(Case(scheme) for scheme in SCHEMES)
MIXTURES = tuple(Case(scheme, experts=True) for scheme in EXPERT_SCHEMES)
CASES = (*EXACT, *RANDOM, *MIXTURES)


def write(case: Case, root: Path) -> Written:
    """The case's checkpoint."""
    scheme, folder = Scheme.parse(case.scheme), root / case.name
    if case.experts:
        return write_canonical(folder, scheme, EXPERTS, exceptions=dict.fromkeys(dense_modules(EXPERTS), UNQUANTIZED))
    if case.data == "random":
        return write_canonical(folder, scheme, DENSE)
    rng = np.random.default_rng(1)
    weights = {name: _exact(exact_weight(scheme, *shape, rng)) for name, shape in modules_of(DENSE).items()}
    return write_weights(folder, weights, DENSE)


def _exact(weight: CanonicalWeight) -> CanonicalWeight:
    """Nothing reads the columns that `exact_input` uses to set scales."""
    if weight.scheme.activation is None:
        return weight
    return zeroed_columns(weight, np.arange(weight.in_features) % (weight.in_features // RANKS) != 0)


def plan(written: Written, subject: Subject) -> Planned:
    """A plan for two ranks, with the kernels that any plan chooses on the subject's device."""
    planned = plan_canonical(written, subject, None, tp=RANKS)
    problems = [finding.message for finding in planned.plan.findings if finding.severity == "error"]
    assert not problems, problems
    return planned


def is_quantizing(item: PlannedLayer) -> bool:
    assert item.capability is not None
    return executed_activation(item.capability, item.packed.spec.scheme) is not None


def exact_input(item: PlannedLayer) -> Array:
    """Integers up to 4 [ROWS, K], and in the first column of each rank the value that makes a token's scale 1."""
    assert item.capability is not None
    columns, rng = item.packed.spec.in_features, np.random.default_rng(3)
    x = representable_input(None, ROWS, columns, rng)
    executed = executed_activation(item.capability, item.packed.spec.scheme)
    if executed is not None and executed.granularity == "token":
        x[:, :: columns // RANKS] = np.abs(representable_input(executed, 1, columns, rng)).max()
    return x


def inputs(case: Case, item: PlannedLayer) -> dict[str, Array]:
    """Inputs [rows, K] of a linear layer by what they are: exact, or representable and Gaussian ones."""
    if case.data == "exact":
        return {"exact": exact_input(item)}
    return {"representable": loaded_input(item, "bf16", RANKS), "gaussian": gaussian(item)}


def gaussian(item: PlannedLayer) -> Array:
    return random_input(ROWS, item.packed.spec.in_features, np.random.default_rng(4), "bf16")


def routing() -> Routing:
    return make_routing(ROWS, EXPERTS.experts, TOP, np.random.default_rng(5))


def named(planned: Planned) -> dict[str, PlannedLayer]:
    """The layers that ranks divide, by the last part of their names."""
    return {item.layer.name.rpartition(".")[2]: item for item in planned.layers if item.capability is not None}
