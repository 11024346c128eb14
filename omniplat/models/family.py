"""Model families: which checkpoint names fuse, which are experts and routers, how fused rows lie on disk.

Everything here is data about names. Names are dotted suffixes of checkpoint modules unless said otherwise.
"""

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
class Rename:
    """A module that an engine calls `engine` and the checkpoint `checkpoint`; nothing is fused."""

    engine: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Leaf names below `experts.<i>`: either separate gate and up, or one fused tensor; and down."""

    gate: str
    up: str
    down: str
    fused: str = ""


@dataclass(frozen=True, slots=True)
class StackedNames:
    """Leaf names below an experts module whose tensors hold all experts: either one fused tensor or gate and up.

    `layout`  "nk": [experts, rows, columns] as a linear layer's weight; "kn": [experts, columns, rows].
    `order`   how the rows of the fused tensor lie (`RowOrder.kind`).
    """

    fused: str
    down: str
    gate: str = ""
    up: str = ""
    layout: str = "nk"
    order: str = "as_is"


@dataclass(frozen=True, slots=True)
class Router:
    """How a family's layers choose experts: what its model code fixes, and which keys of config.json say the rest.

    `identifiers`   those of the family's identifiers that it is for; empty for all that no other one names.
    `scoring`       as `Routing.scoring`; `scoring_key` overrides it where the configuration has that key.
    `renormalize`, `renormalize_key`   likewise.
    `group_score`   as `Routing.group_score` where experts form groups; "" where the family has none.
    `scale_key`     of the factor of all weights; "" for none.
    `gates`, `correction_biases`, `shared`, `shared_gates`   names of the router, of the vector that corrects its
                    scores (a tensor), of the shared expert and of its gate, beside the routed experts.
    `activation`    overrides the configuration's; with it `limit` and `alpha`, unless their keys are there.
    """

    identifiers: tuple[str, ...] = ()
    scoring: str = "softmax"
    scoring_key: str = "scoring_func"
    renormalize: bool = True
    renormalize_key: str = "norm_topk_prob"
    group_score: str = ""
    scale_key: str = "routed_scaling_factor"
    gates: tuple[str, ...] = ("gate", "router", "gate.wg")
    correction_biases: tuple[str, ...] = ("gate.e_score_correction_bias", "e_score_correction_bias")
    shared: tuple[str, ...] = ("shared_expert", "shared_experts", "shared_mlp")
    shared_gates: tuple[str, ...] = ("shared_expert_gate",)
    activation: str = ""
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of a checkpoint with a configuration of its own: modules that have `segment` in their path.

    `config` is the dotted path of that configuration in config.json; "" where it holds no head counts.
    """

    segment: str
    config: str


#: Parts of multimodal checkpoints, the innermost first: a module belongs to the first scope that it lies in.
SCOPES = (
    Scope("code_predictor", "talker_config.code_predictor_config"),
    Scope("code2wav", ""),
    Scope("token2wav", ""),
    Scope("speaker_encoder", ""),
    *(Scope(name, "vision_config") for name in ("visual", "vision_tower", "vision_model", "vit_model", "vit")),
    *(Scope(name, "audio_config") for name in ("audio_tower", "audio_model")),
    Scope("talker", "talker_config"),
    Scope("thinker", "thinker_config"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family, as data.

    `identifiers`   values of config.json's `model_type` or `architectures`, or diffusers' `_class_name`.
    `aliases`       further names that engines have for fused modules; nothing is named after them.
    `renames`       engine's names of single modules, where they differ from the checkpoint's.
    `experts`, `stacked`   how routed experts are named when stored one by one, and when stored as 3-D stacks.
    `routers`       how they are chosen; the first that fits the configuration's identifiers.
    `disk_orders`   suffix of a tensor that is fused on disk -> kind of its row order (`RowOrder.kind`).
    `disk_parts`    suffix of a tensor that is fused on disk -> what it holds: "qkv" or "halves".
    `column`, `row` modules that engines split along N (column-parallel) and along K (row-parallel); everything
                    else is replicated.
    `heads`         modules whose rows are attention heads: queries, keys and values.
    `floats`        modules that stay in 16 bit by construction: engines build them without a quantization method,
                    producers do not list them.
    `platforms`     device kind -> fused names that only the engine of that platform uses.
    """

    name: str
    identifiers: tuple[str, ...]
    fused: tuple[Fused, ...] = ()
    aliases: tuple[Fused, ...] = ()
    renames: tuple[Rename, ...] = ()
    experts: tuple[ExpertNames, ...] = ()
    stacked: tuple[StackedNames, ...] = ()
    routers: tuple[Router, ...] = ()
    disk_orders: Mapping[str, str] = field(default_factory=dict)
    disk_parts: Mapping[str, str] = field(default_factory=dict)
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    platforms: Mapping[str, tuple[Fused, ...]] = field(default_factory=dict)

    @property
    def parts_of(self) -> dict[str, tuple[str, ...]]:
        """Engine's name -> checkpoint names, both as dotted suffixes: fused modules and renamed ones."""
        return self.parts_on("")

    def parts_on(self, kind: str) -> dict[str, tuple[str, ...]]:
        """`parts_of` with the names that the engine of this device kind uses besides."""
        fused = (*self.fused, *self.aliases, *self.platforms.get(kind, ()))
        return {item.name: item.parts for item in fused} | {item.engine: (item.checkpoint,) for item in self.renames}

    def style_of(self, name: str) -> str:
        """ "column", "row" or "replicated": how engines split this checkpoint module."""
        for style, suffixes in (("column", self.column), ("row", self.row)):
            if has_suffix(name, suffixes):
                return style
        return "replicated"


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """True if the module is one of `suffixes`, or ends with one on a dot boundary."""
    return any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)


@dataclass(frozen=True, slots=True)
class Attention:
    """Head counts of one component, 0 where the config does not tell."""

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def known(self) -> bool:
        return self.heads > 0 and self.kv_heads > 0 and self.head_dim > 0


UNKNOWN_HEADS = Attention()


def attention_of(config: Mapping[str, Any]) -> Attention:
    """Head counts from a transformers or diffusers config or its `text_config`; unknown values stay 0."""
    for source in (config, *_language_configs(config)):
        heads = _count(source, "num_attention_heads", "num_heads", "n_heads", "n_head")
        if not heads:
            continue
        kv_heads = _count(source, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
        if source.get("multi_query") is True and source.get("new_decoder_architecture") is not True:
            kv_heads = 1  # Falcon
        head_dim = _count(source, "head_dim", "attention_head_dim")
        hidden = _count(source, "hidden_size", "embed_dim", "dim", "n_embed")
        return Attention(heads, kv_heads, head_dim or (hidden // heads if hidden % heads == 0 else 0))
    return UNKNOWN_HEADS


def scope_of(name: str) -> Scope | None:
    """The scope that a module lies in; None for the component's main part."""
    segments = name.split(".")
    return next((scope for scope in SCOPES if scope.segment in segments), None)


def scoped_attention(config: Mapping[str, Any], scope: Scope) -> Attention:
    """Head counts of one scope; all 0 where its configuration is not there."""
    found = _scoped(config, scope)
    return attention_of(found) if found is not None else UNKNOWN_HEADS


def configs_of(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    """The configurations that speak of a module, the innermost first."""
    scope = scope_of(name)
    inner = _scoped(config, scope) if scope is not None else None
    scoped = (*_language_configs(inner), inner) if inner is not None else ()
    return (*scoped, *_language_configs(config), config)


def _scoped(config: Mapping[str, Any], scope: Scope) -> Mapping[str, Any] | None:
    found: Any = config
    for key in scope.config.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The first of `keys` that holds a positive integer; 0 where none does."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _language_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configurations of the language models inside a multimodal config."""
    found = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    return [item for item in found if isinstance(item, Mapping)]


def identifiers_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a component's config calls its model, most specific first."""
    found = [config.get("model_type"), config.get("_class_name")]
    found += [inner.get("model_type") for inner in _language_configs(config)]
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        found += architectures
    return tuple(name for name in found if isinstance(name, str))
