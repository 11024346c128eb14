"""Language models: decoders of the Llama kind and their mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from omniplat.models.common import (
    DISK_PARTS,
    DRAFT_FLOATS,
    EXPERTS,
    GATE_UP,
    QKV,
    SEPARATE,
    SIGMOID_IN_GROUPS,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    STACKED,
    SWIGLU_OAI,
    TEXT_COLUMN,
    TEXT_HEADS,
    TEXT_ROW,
    W123,
)
from omniplat.models.family import ExpertNames, Family, Fused, Rename, Router, StackedNames

LLAMA_LIKE = Family(
    "llama",
    (
        *("llama", "mistral", "mistral3", "ministral", "ministral3", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3"),
        *("qwen3_vl", "granite", "phi", "internlm3", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "exaone4"),
        *("glm", "cohere", "cohere2", "starcoder2", "stablelm"),
        *("LlamaForCausalLM", "MistralForCausalLM", "Mistral3ForConditionalGeneration", "Qwen2ForCausalLM"),
        *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM"),
        *("Qwen3VLForConditionalGeneration", "GraniteForCausalLM"),
    ),
    fused=(QKV, GATE_UP),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
#: Some layers have no v_proj (values are the keys) or only a q_proj (keys and values of an earlier layer).
GEMMA = Family(
    "gemma",
    (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        *("gemma4_unified", "gemma4_unified_text"),
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    ),
    fused=(QKV, GATE_UP),
    experts=(SEPARATE,),
    stacked=STACKED,
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
)
#: qkv_proj and gate_up_proj are fused on disk: [q; k; v] and [gate; up].
PHI_3 = Family(
    "phi3",
    ("phi3", "phi4_multimodal", "Phi3ForCausalLM", "Phi4MMForCausalLM"),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
#: q, k and v are apart on disk; gate_up_proj is fused on disk: [gate; up].
GLM_4 = Family(
    "glm4",
    ("glm4", "glm4v", "glm46v", "glm_image", "glm_image_text", "glm_ocr", "Glm4ForCausalLM",
     "Glm4vForConditionalGeneration", "GlmImageForConditionalGeneration"),
    fused=(QKV, GATE_UP),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)  # fmt: skip
QWEN_MOE = Family(
    "qwen-moe",
    (
        *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "olmoe", "dots1", "ernie4_5_moe"),
        *("hunyuan_v1_moe", "granitemoe", "minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
        *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
        *("MiniMaxM3ForCausalLM", "MiniMaxM3VLForConditionalGeneration"),
    ),
    fused=(QKV, GATE_UP),
    experts=EXPERTS,
    stacked=STACKED,
    routers=(
        replace(SIGMOID_IN_GROUPS, identifiers=("dots1",), renormalize=False),
        replace(
            SOFTMAX_OF_CHOSEN,
            identifiers=("ernie4_5_moe",),
            correction_biases=("moe_statics.e_score_correction_bias",),
        ),
        replace(SOFTMAX_OF_CHOSEN, identifiers=("hunyuan_v1_moe", "granitemoe")),
        Router(
            ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
            "sigmoid",
            renormalize_key="",
            activation=SWIGLU_OAI[0],
            limit=SWIGLU_OAI[1],
            alpha=SWIGLU_OAI[2],
        ),
        SOFTMAX,
    ),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
#: Linear attention: the input projections are one (Qwen3-Next, on disk) or four (Qwen3.5) modules.
QWEN_LINEAR_ATTENTION = Family(
    "qwen-linear-attention",
    (
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    ),
    fused=(
        QKV,
        GATE_UP,
        Fused("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
        Fused("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ),
    experts=EXPERTS,
    stacked=STACKED,
    routers=(Router(),),
    disk_parts=DISK_PARTS,
    column=(*TEXT_COLUMN, "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a"),
    row=TEXT_ROW,
    # q_proj holds an output gate besides the queries: twice the rows that its heads need.
    heads=("k_proj", "v_proj"),
)
MIXTRAL = Family(
    "mixtral",
    ("mixtral", "minimax", "minimax_m2", "phimoe", "MixtralForCausalLM", "MiniMaxM2ForCausalLM", "PhiMoEForCausalLM"),
    fused=(QKV,),
    renames=(Rename("mlp.experts", "block_sparse_moe.experts"), Rename("mlp.gate", "block_sparse_moe.gate")),
    experts=(W123, SEPARATE),
    stacked=STACKED,
    routers=(
        Router(("minimax_m2", "MiniMaxM2ForCausalLM"), "sigmoid", renormalize_key=""),
        Router(("phimoe", "PhiMoEForCausalLM"), ""),
        SOFTMAX_OF_CHOSEN,
    ),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
GLM_MOE = Family(
    "glm-moe",
    (
        *("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text"),
        *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vMoeForConditionalGeneration"),
    ),
    fused=(QKV, GATE_UP, Fused("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))),
    experts=(SEPARATE,),
    stacked=STACKED,
    routers=(SIGMOID_IN_GROUPS,),
    disk_parts=DISK_PARTS,
    column=(*TEXT_COLUMN, "q_b_proj", "kv_b_proj"),
    row=TEXT_ROW,
    heads=TEXT_HEADS,
    floats=DRAFT_FLOATS,
)
#: Latent attention: the down-projections of queries and of keys and values read the same input, and are replicated.
DEEPSEEK = Family(
    "deepseek",
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_vl_v2", "kimi_k2", "kimi_k25", "kimi_vl"),
        *("glm_moe_dsa", "longcat_flash"),
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK2ForCausalLM"),
        *("KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration", "GlmMoeDsaForCausalLM"),
    ),
    fused=(GATE_UP, Fused("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))),
    experts=(SEPARATE,),
    stacked=STACKED,
    routers=(
        Router(("deepseek_v2", "deepseek_vl_v2", "DeepseekV2ForCausalLM"), renormalize=False, group_score="max"),
        Router(("longcat_flash",), ""),
        SIGMOID_IN_GROUPS,
    ),
    disk_parts=DISK_PARTS,
    column=("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj"),
    row=("o_proj", "down_proj"),
    floats=(*DRAFT_FLOATS, "indexer.weights_proj"),
)
#: The checkpoint's own names: no `model.`, `layers.N.attn.wq_a`, `layers.N.ffn.experts.M.w1`.
DEEPSEEK_V4 = Family(
    "deepseek-v4",
    ("deepseek_v4", "DeepseekV4ForCausalLM"),
    fused=(
        Fused("gate_up_proj", ("w1", "w3")),
        Fused("attn.fused_wqa_wkv", ("attn.wq_a", "attn.wkv")),
        Fused("compressor.fused_wkv_wgate", ("compressor.wkv", "compressor.wgate")),
    ),
    renames=(
        Rename("shared_experts.down_proj", "shared_experts.w2"),
        Rename("ffn.norm_gate.gate", "ffn.gate"),
        Rename("lm_head", "head"),
    ),
    experts=(W123,),
    stacked=STACKED,
    # Scores that nobody else uses, and layers whose tokens name their experts: an engine has to route.
    routers=(Router(scoring="", scoring_key=""),),
    column=("wq_b", "wo_a", "w1", "w3"),
    row=("wo_b", "w2"),
    floats=("indexer.weights_proj",),
)
KIMI_LINEAR = Family(
    "kimi-linear",
    ("kimi_linear", "KimiLinearForCausalLM"),
    fused=(GATE_UP,),
    renames=(Rename("mlp.experts", "block_sparse_moe.experts"), Rename("mlp.gate", "block_sparse_moe.gate")),
    experts=(W123, SEPARATE),
    stacked=STACKED,
    routers=(replace(SIGMOID_IN_GROUPS, scoring_key="moe_router_activation_func", renormalize_key="moe_renormalize"),),
    column=(*TEXT_COLUMN, "kv_b_proj", "f_b_proj", "g_b_proj", "b_proj"),
    row=TEXT_ROW,
)
#: Stacks with interleaved gate and up rows. The MXFP4 blocks are [E, 2I, ...], the bf16 stacks [E, H, 2I].
GPT_OSS = Family(
    "gpt-oss",
    ("gpt_oss", "GptOssForCausalLM"),
    fused=(QKV,),
    stacked=(StackedNames("gate_up_proj", "down_proj", layout="kn", order="interleaved"),),
    routers=(replace(SOFTMAX_OF_CHOSEN, activation=SWIGLU_OAI[0], limit=SWIGLU_OAI[1], alpha=SWIGLU_OAI[2]),),
    disk_orders={"experts.gate_up_proj": "interleaved"},
    disk_parts=DISK_PARTS,
    column=("q_proj", "k_proj", "v_proj", "qkv_proj"),
    row=("o_proj",),
    heads=TEXT_HEADS,
)
#: Stacks of bf16 lie as [E, H, 2I]. The router weighs the experts' input, which no kernel here does.
LLAMA_4 = Family(
    "llama4",
    ("llama4", "llama4_text", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    fused=(QKV, GATE_UP),
    experts=(SEPARATE,),
    stacked=(StackedNames("gate_up_proj", "down_proj", "gate_proj", "up_proj", layout="kn"),),
    routers=(Router(scoring="", scoring_key=""),),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
#: `query_key_value` holds [query, key, value] of one head, then of the next.
PER_HEAD = Family(
    "per-head-qkv",
    ("bloom", "gpt_neox", "BloomForCausalLM", "GPTNeoXForCausalLM"),
    disk_orders={"query_key_value": "qkv_per_kv_head"},
    disk_parts={"query_key_value": "qkv"},
    column=("query_key_value", "dense_h_to_4h"),
    row=("dense", "dense_4h_to_h"),
    heads=("query_key_value",),
)
#: Per KV head its queries, then its key and its value. Multi-query Falcon has one KV head.
FALCON = Family(
    "falcon",
    ("falcon", "RefinedWeb", "RefinedWebModel", "FalconForCausalLM"),
    disk_orders={"query_key_value": "qkv_per_kv_head"},
    disk_parts={"query_key_value": "qkv"},
    column=("query_key_value", "dense_h_to_4h"),
    row=("dense", "dense_4h_to_h"),
    heads=("query_key_value",),
)
INTERNLM_2 = Family(
    "internlm2",
    ("internlm2", "internlm2_ve", "InternLM2ForCausalLM"),
    fused=(Fused("feed_forward.gate_up_proj", ("feed_forward.w1", "feed_forward.w3")),),
    renames=(Rename("self_attn.qkv_proj", "attention.wqkv"), Rename("self_attn.o_proj", "attention.wo")),
    experts=(ExpertNames("w1", "w3", "w2"),),
    disk_orders={"attention.wqkv": "qkv_per_kv_head"},
    disk_parts={"attention.wqkv": "qkv"},
    column=("wqkv", "w1", "w3"),
    row=("wo", "w2"),
    heads=("wqkv",),
)

FAMILIES: tuple[Family, ...] = (
    *(LLAMA_LIKE, GEMMA, PHI_3, GLM_4, QWEN_MOE, QWEN_LINEAR_ATTENTION, MIXTRAL, GLM_MOE),
    *(DEEPSEEK, DEEPSEEK_V4, KIMI_LINEAR, GPT_OSS, LLAMA_4, PER_HEAD, FALCON, INTERNLM_2),
)
