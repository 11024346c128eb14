"""Shapes of linear layers that a model's configuration implies, for weights whose file does not have them.

Sizes are alternatives: a configuration may hold the inner size of dense layers, of routed and of shared experts.
Whoever asks knows how many numbers a weight has, and takes the one shape that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniplat.models.family import attention_of, configs_of

#: Leaf name of a module -> (rows, columns), each a size of `_sizes`.
_SHAPES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("q_proj", "to_q", "wq"), ("heads", "hidden")),
    **dict.fromkeys(("k_proj", "v_proj", "to_k", "to_v", "wk", "wv"), ("kv_heads", "hidden")),
    **dict.fromkeys(("o_proj", "out_proj", "wo"), ("hidden", "heads")),
    **dict.fromkeys(("qkv_proj", "Wqkv"), ("qkv", "hidden")),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "w1", "w3"), ("inner", "hidden")),
    **dict.fromkeys(("down_proj", "fc2", "w2"), ("hidden", "inner")),
    "gate_up_proj": ("two_inner", "hidden"),
    "lm_head": ("vocabulary", "hidden"),
}
_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "inner": (
        *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner"),
        *("ffn_hidden_size",),
    ),
    "vocabulary": ("vocab_size",),
}


def shapes_of(config: Mapping[str, Any], name: str) -> tuple[tuple[int, int], ...]:
    """(rows, columns) that the module called `name` may have; empty where nothing tells."""
    sizes = _SHAPES.get(name.rpartition(".")[2])
    if sizes is None:
        return ()
    found: list[tuple[int, int]] = []
    for source in configs_of(config, name):
        known = _sizes(source)
        found += [(n, k) for n in known.get(sizes[0], ()) for k in known.get(sizes[1], ())]
    return tuple(dict.fromkeys(found))


def _sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The sizes that one configuration tells, by name."""
    known = {size: _counts(config, keys) for size, keys in _KEYS.items()}
    known["two_inner"] = tuple(2 * count for count in known["inner"])
    attention = attention_of(config)
    if attention.known:
        heads, kv_heads = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        known |= {"heads": (heads,), "kv_heads": (kv_heads,), "qkv": (heads + 2 * kv_heads,)}
    return known


def _counts(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[int, ...]:
    values = (config.get(key) for key in keys)
    return tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0)
