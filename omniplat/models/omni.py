"""Models that read and write several modalities: their language models, with the names of each part."""

from __future__ import annotations

from dataclasses import replace

from omniplat.models.common import (
    DISK_PARTS,
    EXPERTS,
    GATE_UP,
    QKV,
    SEPARATE,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    STACKED,
    TEXT_COLUMN,
    TEXT_HEADS,
    TEXT_ROW,
)
from omniplat.models.family import ExpertNames, Family, Fused, Rename, Router

#: Fused on disk, gate_and_up_proj with up first and qkv_proj interleaved per KV head.
HUNYUAN_IMAGE_3 = Family(
    "hunyuan-image-3",
    ("hunyuan_image_3_moe", "HunyuanImage3ForCausalMM", "HunyuanImage3ForConditionalGeneration"),
    renames=(Rename("gate_up_proj", "gate_and_up_proj"), Rename("mlp.gate", "mlp.gate.wg")),
    experts=(ExpertNames("gate_proj", "up_proj", "down_proj", "gate_and_up_proj"),),
    routers=(SOFTMAX_OF_CHOSEN,),
    disk_orders={"gate_and_up_proj": "halves_swapped", "self_attn.qkv_proj": "qkv_per_kv_head"},
    disk_parts=DISK_PARTS,
    column=("self_attn.qkv_proj", "gate_and_up_proj"),
    row=("self_attn.o_proj", "down_proj"),
    heads=("qkv_proj",),
    # Ascend's engine asks for the experts by the two modules of the first one.
    platforms={"npu": (Fused("experts", ("experts.0.gate_and_up_proj", "experts.0.down_proj")),)},
)
QWEN_OMNI = Family(
    "qwen2.5-omni",
    (
        *("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_omni_talker", "qwen2_5_omni_text"),
        *("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"),
    ),
    fused=(QKV, GATE_UP, Fused("attn.qkv", ("attn.q", "attn.k", "attn.v"))),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
#: The thinker's experts, the talker's experts with one shared expert, a dense code predictor.
QWEN3_OMNI = Family(
    "qwen3-omni",
    (
        *("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_talker", "qwen3_omni_moe_text"),
        *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    ),
    fused=(QKV, GATE_UP, Fused("attn.qkv", ("attn.q", "attn.k", "attn.v"))),
    experts=EXPERTS,
    stacked=STACKED,
    routers=(
        replace(SOFTMAX, identifiers=("qwen3_omni_moe_talker", "qwen3_omni_moe_talker_text")),
        Router(),
    ),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
QWEN3_TTS = Family(
    "qwen3-tts",
    ("qwen3_tts", "qwen3_tts_talker", "Qwen3TTSForConditionalGeneration", "Qwen3TTSTalkerForConditionalGeneration"),
    fused=(QKV, GATE_UP),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)
_GEN_QKV = ("q_proj_moe_gen", "k_proj_moe_gen", "v_proj_moe_gen")
#: A second set of weights for the tokens of images.
BAGEL = Family(
    "bagel",
    ("bagel", "BagelForConditionalGeneration", "BagelForUnifiedMultimodal"),
    fused=(QKV, Fused("qkv_proj_moe_gen", _GEN_QKV), GATE_UP),
    aliases=(Fused("qkv_proj.gen_exp", _GEN_QKV),),
    renames=(Rename("o_proj.gen_exp", "o_proj_moe_gen"),),
    disk_parts=DISK_PARTS,
    column=(*TEXT_COLUMN, *_GEN_QKV, "fc1"),
    row=(*TEXT_ROW, "o_proj_moe_gen", "fc2"),
    heads=(*TEXT_HEADS, *_GEN_QKV),
)
#: Language models inside audio checkpoints, stored one by one.
AUDIO_LANGUAGE = Family(
    "audio-language",
    ("qwen2_audio", "voxtral", "Qwen2AudioForConditionalGeneration", "VoxtralForConditionalGeneration"),
    fused=(QKV, GATE_UP),
    experts=(SEPARATE,),
    disk_parts=DISK_PARTS,
    column=TEXT_COLUMN,
    row=TEXT_ROW,
    heads=TEXT_HEADS,
)

FAMILIES: tuple[Family, ...] = (HUNYUAN_IMAGE_3, QWEN_OMNI, QWEN3_OMNI, QWEN3_TTS, BAGEL, AUDIO_LANGUAGE)
