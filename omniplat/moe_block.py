"""What stands beside the routed experts of a layer: router, shared expert, and the gate of that one, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.resolved import ResolvedModule
from omniplat.layer import MoeSpec
from omniplat.models.family import ExpertNames, Router


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """A mixture-of-experts layer around its routed experts, as checkpoint modules; "" for what there is none of.

    `name`      of the whole layer, such as `model.layers.0.mlp`.
    `correction_bias`   the tensor that corrects the router's scores.
    `shared_up`, `shared_down`  the shared expert: gate and up, or the module that holds both; and down.
    """

    name: str
    router: str = ""
    correction_bias: TensorInfo | None = None
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""

    @property
    def shared(self) -> tuple[str, ...]:
        """All modules of the shared expert, its gate included."""
        return tuple(filter(None, (*self.shared_up, self.shared_down, self.shared_gate)))


def block_of(
    container: str,
    modules: Mapping[str, ResolvedModule],
    tensors: Mapping[str, TensorInfo],
    router: Router,
    expert_names: Iterable[ExpertNames],
) -> MoeBlock:
    """What surrounds the experts in `container` (such as `model.layers.0.mlp.experts`)."""
    name = container.rpartition(".")[0]
    prefix = f"{name}." if name else ""

    def first(names: Iterable[str]) -> str:
        return next((prefix + leaf for leaf in names if prefix + leaf in modules), "")

    bias = next((tensors[prefix + leaf] for leaf in router.correction_biases if prefix + leaf in tensors), None)
    up, down = _shared_expert([prefix + leaf for leaf in router.shared], modules, expert_names)
    return MoeBlock(name, first(router.gates), bias, up, down, first(router.shared_gates) if down else "")


def _shared_expert(
    parents: Iterable[str], modules: Mapping[str, ResolvedModule], expert_names: Iterable[ExpertNames]
) -> tuple[tuple[str, ...], str]:
    names = tuple(expert_names)
    for parent in parents:
        for leaves in names:
            down = f"{parent}.{leaves.down}"
            for up in ((f"{parent}.{leaves.fused}",), (f"{parent}.{leaves.gate}", f"{parent}.{leaves.up}")):
                if down in modules and all(name in modules for name in up):
                    return up, down
    return (), ""


def moe_details(moe: MoeSpec | None, block: MoeBlock | None) -> dict[str, Any]:
    """What the plan's `details` say of a layer of experts; nothing for another layer. Names are relative."""
    if moe is None:
        return {}
    found: dict[str, Any] = {
        "top_k": moe.top_k,
        "activation": moe.activation,
        "limit": moe.limit,
        "alpha": moe.alpha,
        "routing": asdict(moe.routing),
    }
    if block is not None:
        prefix = f"{block.name}." if block.name else ""
        found["router"] = block.router.removeprefix(prefix)
        found["shared"] = [name.removeprefix(prefix) for name in block.shared]
    return {"moe": found}
