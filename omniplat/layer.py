"""LayerSpec: one runtime layer as a kernel sees it, free of any dialect."""

from __future__ import annotations

from dataclasses import dataclass

from omniplat.scheme import Scheme

#: What lies between w13 and w2. The gated ones take act(gate) * up; "swiglu-oai" is gpt-oss' own.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu-oai")


@dataclass(frozen=True, slots=True)
class Routing:
    """How the logits of a row choose experts and weigh them.

    `scoring`       "softmax" or "sigmoid"; "" where nobody knows and the engine has to bring its own routing.
    `groups`        experts form this many runs of equal length, of which only the best `topk_groups` may be chosen
                    from; 1 for no groups.
    `group_score`   what a group is worth: "max" its best expert, "top2" the sum of its two best.
    `correction_bias`   the checkpoint has a vector that is added to the scores for choosing, not for weighing.
    `renormalize`   the chosen scores are divided by their sum; `scale` multiplies them afterwards.
    """

    scoring: str = ""
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    renormalize: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """What a mixture-of-experts layer adds: `experts` E, intermediate size I, activation between w13 and w2.

    `w2_scheme`     differs from the layer's scheme (that of w13) only where a checkpoint mixes them.
    `activation`    one of `ACTIVATIONS`, or the checkpoint's own word for one that is not known.
    `limit`, `alpha`    of the activation. With a limit (0: none) gate is clamped from above and up from both sides;
                    "swiglu-oai" is gate * sigmoid(alpha * gate) * (up + 1).
    `top_k`         experts that a row chooses; 0 where the checkpoint does not tell.
    """

    experts: int
    intermediate: int
    activation: str = "silu"
    w2_scheme: Scheme | None = None
    limit: float = 0.0
    alpha: float = 1.0
    top_k: int = 0
    routing: Routing = Routing()


#: What a stored weight may have that its scheme does not say, and that not every kernel takes: columns in an order of
#: their own, and zero points that are no whole numbers. `pre_scale` is the scheme's.
EXTRAS = ("group_index", "fractional zero points", "pre_scale")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One runtime layer.

    `name`      from the checkpoint's names, such as `model.layers.0.self_attn.qkv_proj`.
    `op`        "linear" | "moe".
    `out_features`, `in_features`   N and K of the whole (fused) layer; for moe both are the hidden size.
    `scheme`    stored weight scheme with the declared activation.
    `dtype`     compute and output dtype of unquantized tensors: "bf16", "f16" or "f32".
    `parts`     out features of each fused part, in order; a single entry when nothing is fused.
    `extras`    of `EXTRAS`, but for what the scheme says.
    """

    name: str
    op: str
    out_features: int
    in_features: int
    scheme: Scheme
    dtype: str = "bf16"
    bias: bool = False
    parts: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    component: str = ""
    extras: tuple[str, ...] = ()
