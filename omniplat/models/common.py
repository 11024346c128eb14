"""Names that many families share: what fuses, how experts are called, what engines split."""

from __future__ import annotations

from omniplat.models.family import ExpertNames, Fused, Router, StackedNames

QKV = Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP = Fused("gate_up_proj", ("gate_proj", "up_proj"))
TO_QKV = Fused("to_qkv", ("to_q", "to_k", "to_v"))
ADD_KV = Fused("add_kv_proj", ("add_q_proj", "add_k_proj", "add_v_proj"))
#: Another spelling of the same, in engines beside vllm-omni.
TO_ADDED_QKV = Fused("to_added_qkv", ADD_KV.parts)

#: Routed experts stored one by one, below `experts.<i>`.
SEPARATE = ExpertNames("gate_proj", "up_proj", "down_proj", "gate_up_proj")
W123 = ExpertNames("w1", "w3", "w2", "w13")
EXPERTS = (SEPARATE, W123)

#: Routed experts stored as stacks: transformers' own, and names of an engine's runtime tensors.
STACKED = (
    StackedNames("gate_up_proj", "down_proj", "gate_proj", "up_proj"),
    StackedNames("w13", "w2", "w1", "w3"),
    StackedNames("w13_weight", "w2_weight"),
)

#: Query, key and value projections of transformers' language models.
TEXT_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
TEXT_COLUMN = (*TEXT_HEADS, "gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
TEXT_ROW = ("o_proj", "down_proj", "w2", "out_proj")

#: What is stored already fused, by leaf.
DISK_PARTS = {"qkv_proj": "qkv", "qkv": "qkv", "to_qkv": "qkv", "gate_up_proj": "halves", "gate_and_up_proj": "halves"}

#: Multi-token-prediction layers: the projection of embedding and hidden state is never quantized.
DRAFT_FLOATS = ("eh_proj",)

#: Weights of the chosen experts add up to 1 only where the configuration says so (Qwen's).
SOFTMAX = Router(renormalize=False)
#: They always do: softmax over the chosen logits is the same.
SOFTMAX_OF_CHOSEN = Router(renormalize_key="")
#: DeepSeek-V3 and those that follow it.
SIGMOID_IN_GROUPS = Router(scoring="sigmoid", group_score="top2")
#: gpt-oss' activation, with the values that its model code has.
SWIGLU_OAI = ("swiglu-oai", 7.0, 1.702)
