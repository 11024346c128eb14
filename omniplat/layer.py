"""LayerSpec: one runtime layer as a kernel sees it, free of any dialect."""

from __future__ import annotations

from dataclasses import dataclass

from omniplat.scheme import Scheme


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """What a mixture-of-experts layer adds: `experts` E, intermediate size I, activation between w13 and w2.

    `w2_scheme` differs from the layer's scheme (that of w13) only where a checkpoint mixes them.
    """

    experts: int
    intermediate: int
    activation: str = "silu"
    w2_scheme: Scheme | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One runtime layer.

    `name`      from the checkpoint's names, such as `model.layers.0.self_attn.qkv_proj`.
    `op`        "linear" | "moe".
    `out_features`, `in_features`   N and K of the whole (fused) layer; for moe both are the hidden size.
    `scheme`    stored weight scheme with the declared activation.
    `dtype`     compute and output dtype of unquantized tensors: "bf16", "f16" or "f32".
    `parts`     out features of each fused part, in order; a single entry when nothing is fused.
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
