"""The model families that omniplat knows itself. Third parties add theirs through `omniplat.models`."""

from __future__ import annotations

from omniplat.models.family import ExpertNames, Family, Fused

_QKV = Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"))
_GATE_UP = Fused("gate_up_proj", ("gate_proj", "up_proj"))
_TO_QKV = Fused("to_qkv", ("to_q", "to_k", "to_v"))
_ADD_KV = Fused("add_kv_proj", ("add_q_proj", "add_k_proj", "add_v_proj"))

#: The names of Llama's descendants, and of routed experts that are stored one by one.
EXPERTS = (
    ExpertNames("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    ExpertNames("w1", "w3", "w2"),
)
_COLUMN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
_ROW = ("o_proj", "down_proj", "w2", "out_proj")
_DIT_COLUMN = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "net.0.proj", "to_qkv")
_DIT_ROW = ("to_out.0", "to_add_out", "net.2")

LLAMA_LIKE = Family(
    "llama",
    (
        *("llama", "mistral", "qwen2", "qwen3", "phi", "granite", "gemma", "gemma2", "gemma3_text", "glm4", "glm"),
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Glm4ForCausalLM"),
    ),
    fused=(_QKV, _GATE_UP),
    column=_COLUMN,
    row=_ROW,
)
QWEN_MOE = Family(
    "qwen-moe",
    (
        *("qwen2_moe", "qwen3_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "mixtral", "glm4_moe", "minimax_m2"),
        *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
    ),
    fused=(_QKV, _GATE_UP),
    experts=EXPERTS,
    column=_COLUMN,
    row=_ROW,
)
HUNYUAN_IMAGE_3 = Family(
    "hunyuan-image-3",
    ("hunyuan_image_3_moe", "HunyuanImage3ForCausalMM"),
    experts=(ExpertNames("gate_proj", "up_proj", "down_proj", "gate_and_up_proj"),),
    disk_orders={"gate_and_up_proj": "halves_swapped", "self_attn.qkv_proj": "qkv_per_kv_head"},
    column=("self_attn.qkv_proj", "gate_and_up_proj"),
    row=("self_attn.o_proj", "down_proj"),
)
FLUX = Family(
    "flux",
    ("FluxTransformer2DModel", "Flux2Transformer2DModel"),
    fused=(_TO_QKV, _ADD_KV),
    column=(*_DIT_COLUMN, "proj_mlp"),
    row=_DIT_ROW,
)
QWEN_IMAGE = Family(
    "qwen-image", ("QwenImageTransformer2DModel",), fused=(_TO_QKV, _ADD_KV), column=_DIT_COLUMN, row=_DIT_ROW
)
WAN = Family(
    "wan",
    ("WanTransformer3DModel",),
    # Cross-attention projects k and v from the text: vllm-omni fuses only the self-attention.
    fused=(Fused("attn1.to_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),),
    column=_DIT_COLUMN,
    row=_DIT_ROW,
)

FAMILIES: tuple[Family, ...] = (LLAMA_LIKE, QWEN_MOE, HUNYUAN_IMAGE_3, FLUX, QWEN_IMAGE, WAN)

#: Used where no family is known: nothing fuses, experts are grouped by the names that all engines share.
UNKNOWN = Family("", (), experts=EXPERTS)
