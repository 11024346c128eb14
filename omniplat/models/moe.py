"""What a configuration says about the routed experts of a layer: how many a row chooses, how, and their activation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniplat.layer import MoeSpec, Routing
from omniplat.models.family import Family, Router, configs_of, identifiers_of
from omniplat.scheme import Scheme

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "moe_num_experts_per_tok"),
    *("experts_per_token", "top_k_experts", "moe_k"),
)
_GROUPS = ("n_group", "num_expert_group")
_TOPK_GROUPS = ("topk_group",)
_LIMIT = ("swiglu_limit",)
_ALPHA = ("swiglu_alpha",)
_ACTIVATION = ("hidden_act", "hidden_activation")
_ALIASES = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swigluoai": "swiglu-oai"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.([0-9]{1,18})\.")


def router_of(family: Family, config: Mapping[str, Any], name: str) -> Router | None:
    """The family's router for the layer of experts called `name`; None where the family tells of none."""
    known = {text for source in configs_of(config, name)[:-1] for text in identifiers_of(source)}
    # What the innermost configuration calls itself comes before what the whole checkpoint is called.
    for identifiers in (known, known | set(identifiers_of(config))):
        for router in family.routers:
            if not identifiers.isdisjoint(router.identifiers):
                return router
    return next((router for router in family.routers if not router.identifiers), None)


def moe_spec(
    config: Mapping[str, Any],
    name: str,
    router: Router | None,
    experts: int,
    intermediate: int,
    w2_scheme: Scheme | None = None,
    *,
    correction_bias: bool = False,
) -> MoeSpec:
    """The spec of the layer of experts called `name`; sizes and schemes come from headers, the rest from config.json.

    `correction_bias` says whether the checkpoint has the vector that corrects the scores. What neither router nor
    configuration tells keeps its default.
    """
    sources = configs_of(config, name)
    match = _LAYER.search(name)
    index = int(match[1]) if match else 0
    router = router or Router(scoring="", scoring_key="", scale_key="")
    activation = router.activation or str(_find(sources, _ACTIVATION, str) or "silu")
    activation = _ALIASES.get(activation, activation)
    takes_parameters = activation == "swiglu-oai" or _find(sources, _LIMIT, float) is not None
    return MoeSpec(
        experts,
        intermediate,
        activation,
        w2_scheme,
        limit=_number(sources, _LIMIT, router.limit) if takes_parameters else 0.0,
        alpha=_number(sources, _ALPHA, router.alpha) if takes_parameters else 1.0,
        top_k=int(_find(sources, _TOP_K, int, index) or 0),
        routing=_routing(sources, router, correction_bias=correction_bias),
    )


def expert_count(config: Mapping[str, Any], name: str) -> int:
    """How many routed experts the configuration gives the layer called `name`; 0 where it does not tell."""
    match = _LAYER.search(name)
    return int(_find(configs_of(config, name), _EXPERTS, int, int(match[1]) if match else 0) or 0)


def _routing(sources: Sequence[Mapping[str, Any]], router: Router, *, correction_bias: bool) -> Routing:
    scoring = router.scoring
    if router.scoring_key:
        scoring = str(_find(sources, (router.scoring_key,), str) or scoring)
    scoring = scoring if scoring in ("softmax", "sigmoid") else ""
    groups = topk_groups = 1
    if router.group_score and _find(sources, ("topk_method",), str) != "greedy":
        groups = int(_find(sources, _GROUPS, int) or 1)
        topk_groups = int(_find(sources, _TOPK_GROUPS, int) or groups)
    renormalize = _find(sources, (router.renormalize_key,), bool) if router.renormalize_key else None
    return Routing(
        scoring,
        groups,
        topk_groups,
        router.group_score or "max",
        correction_bias,
        router.renormalize if renormalize is None else bool(renormalize),
        _number(sources, (router.scale_key,), 1.0) if router.scale_key else 1.0,
    )


def _number(sources: Sequence[Mapping[str, Any]], keys: Sequence[str], default: float) -> float:
    found = _find(sources, keys, float)
    return default if found is None else float(found)


def _find(sources: Sequence[Mapping[str, Any]], keys: Sequence[str], kind: type, index: int = 0) -> Any:
    """The first of `keys` with a value of `kind`; of a list, which has one entry per layer, that of layer `index`."""
    for source in sources:
        for key in keys:
            value = source.get(key)
            if isinstance(value, list) and index < len(value):
                value = value[index]
            if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
                return value  # a larger integer is no number of a model, and may be none that a float can be
            if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
                return value
    return None
