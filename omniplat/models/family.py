"""Model families: which checkpoint names fuse, which are experts and routers, how fused rows lie on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Fused:
    """An engine's fused module: `name` is formed from `parts`, siblings in the checkpoint, in row order."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Leaf names below `experts.<i>`: either separate gate and up, or one fused tensor; and down."""

    gate: str
    up: str
    down: str
    fused: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One model family, as data.

    `identifiers`   values of config.json's `model_type`, or diffusers' `_class_name`.
    `disk_orders`   leaf name of a tensor that is fused on disk -> kind of its row order (`RowOrder.kind`).
    `column`, `row` dotted suffixes of modules that engines split along N (column-parallel) and along K
                    (row-parallel); everything else is replicated.
    """

    name: str
    identifiers: tuple[str, ...]
    fused: tuple[Fused, ...] = ()
    experts: tuple[ExpertNames, ...] = ()
    disk_orders: Mapping[str, str] = field(default_factory=dict)
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()

    @property
    def parts_of(self) -> dict[str, tuple[str, ...]]:
        """Engine's fused leaf name -> checkpoint leaf names."""
        return {fused.name: fused.parts for fused in self.fused}


@dataclass(frozen=True, slots=True)
class Attention:
    """Head counts of one component, 0 where the config does not tell."""

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def known(self) -> bool:
        return self.heads > 0 and self.kv_heads > 0 and self.head_dim > 0


def attention_of(config: Mapping[str, Any]) -> Attention:
    """Head counts from a transformers config or its `text_config`; unknown values stay 0."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}):
        heads = _count(source, "num_attention_heads")
        if not heads:
            continue
        kv_heads = _count(source, "num_key_value_heads") or heads
        head_dim = _count(source, "head_dim") or _count(source, "attention_head_dim")
        hidden = _count(source, "hidden_size")
        return Attention(heads, kv_heads, head_dim or (hidden // heads if hidden % heads == 0 else 0))
    return Attention()


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def identifiers_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a component's config calls its model, most specific first."""
    found = [config.get("model_type"), config.get("_class_name")]
    text = config.get("text_config")
    if isinstance(text, Mapping):
        found.append(text.get("model_type"))
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        found += architectures
    return tuple(name for name in found if isinstance(name, str))
