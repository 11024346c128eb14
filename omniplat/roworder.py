"""Row orders: how the rows of a fused tensor lie on disk. Data of the packing tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowOrder:
    """`kind` is one of

    as_is            rows already lie in canonical order
    halves_swapped   two equal halves, second one first (HunyuanImage-3 stores up before gate)
    qkv_per_kv_head  [kv_heads, q_per_kv + 2, head_dim]: each KV head's queries, then its key and its value
    interleaved      row 0 of gate, row 0 of up, row 1 of gate, ... (gpt-oss)

    Canonical order is [q; k; v] and [gate; up].
    """

    kind: str = "as_is"
    kv_heads: int = 0
    q_per_kv: int = 0
    head_dim: int = 0


AS_IS = RowOrder()
