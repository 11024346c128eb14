"""Diffusion transformers: the names in diffusers' checkpoints, and what vllm-omni makes of them."""

from __future__ import annotations

from omniplat.models.common import ADD_KV, TO_ADDED_QKV, TO_QKV
from omniplat.models.family import Family, Fused, Rename

_SELF = ("to_q", "to_k", "to_v", "to_qkv")
_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj", "add_kv_proj")
_HEADS = (*_SELF, *_ADDED)
_COLUMN = (*_HEADS, "net.0.proj")
_ROW = ("to_out.0", "to_add_out", "net.2")
#: Single-stream outputs have no list around them in the engine.
_TO_OUT = Rename("to_out", "to_out.0")
#: Feed-forward layers whose engine has attributes where the checkpoint has a list.
_NET = (Rename("net_0.proj", "net.0.proj"), Rename("net_0", "net.0"), Rename("net_2", "net.2"))

QWEN_IMAGE = Family(
    "qwen-image",  # also -2512, -Edit, -Edit-2509, -Layered
    ("QwenImageTransformer2DModel",),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    column=_COLUMN,
    row=_ROW,
    heads=_HEADS,
)
WAN = Family(
    "wan",  # 2.1 and 2.2: T2V and I2V (two transformers), TI2V, VACE
    ("WanTransformer3DModel", "WanVACETransformer3DModel"),
    # Cross-attention projects k and v from the text: only self-attention fuses.
    fused=(Fused("attn1.to_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),),
    renames=(_TO_OUT, *_NET),
    column=(*_COLUMN, "to_gate_compress"),
    row=_ROW,
    heads=_HEADS,
)
#: The names of the original release, which msModelSlim and single-file checkpoints keep.
WAN_ORIGINAL = Family(
    "wan-original",
    ("WanModel", "t2v", "i2v", "ti2v"),
    fused=(Fused("self_attn.to_qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),),
    column=("self_attn.q", "self_attn.k", "self_attn.v", "cross_attn.q", "cross_attn.k", "cross_attn.v", "ffn.0"),
    row=("self_attn.o", "cross_attn.o", "ffn.2"),
)
FLUX = Family(
    "flux",
    ("FluxTransformer2DModel", "FluxControlNetModel"),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    column=_COLUMN,  # proj_mlp and proj_out of the single-stream blocks are replicated
    row=_ROW,
    heads=_HEADS,
)
FLUX_2 = Family(
    "flux2",
    ("Flux2Transformer2DModel",),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    # [gate; up]. to_qkv_mlp_proj holds q, k, v, gate and up; engines gather its output, so its cut is free.
    disk_parts={"linear_in": "halves"},
    column=(*_HEADS, "linear_in", "to_qkv_mlp_proj", "attn.to_out"),
    row=("to_out.0", "to_add_out", "linear_out"),
    heads=_HEADS,
)
#: Black Forest Labs' single files: q, k and v are fused on disk.
FLUX_ORIGINAL = Family(
    "flux-original",
    ("flux", "flux2", "Flux", "Flux2"),
    disk_parts={"img_attn.qkv": "qkv", "txt_attn.qkv": "qkv"},
    column=("img_attn.qkv", "txt_attn.qkv", "img_mlp.0", "txt_mlp.0"),
    row=("img_attn.proj", "txt_attn.proj", "img_mlp.2", "txt_mlp.2"),
    heads=("img_attn.qkv", "txt_attn.qkv"),
)
Z_IMAGE = Family(
    "z-image",
    ("ZImageTransformer2DModel",),
    fused=(TO_QKV, Fused("w13", ("w1", "w3"))),
    renames=(_TO_OUT,),
    column=(*_SELF, "w1", "w3"),
    row=("to_out.0", "w2"),
    heads=_SELF,
)
STABLE_DIFFUSION_3 = Family(
    "stable-diffusion-3",
    ("SD3Transformer2DModel",),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    column=_COLUMN,
    row=_ROW,
    heads=_HEADS,
)
HUNYUAN_VIDEO = Family(
    "hunyuan-video",  # 1.5 and the first one
    ("HunyuanVideo15Transformer3DModel", "HunyuanVideoTransformer3DModel"),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    column=_COLUMN,
    row=_ROW,
    heads=_HEADS,
)
LTX_2 = Family(
    "ltx2",
    ("LTX2VideoTransformer3DModel",),
    # Video and audio attend to themselves (fused), to the text and to each other (not fused).
    fused=(
        Fused("audio_attn1.to_qkv", ("audio_attn1.to_q", "audio_attn1.to_k", "audio_attn1.to_v")),
        Fused("attn1.to_qkv", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
    ),
    renames=(_TO_OUT,),
    column=(*_COLUMN, "to_gate_logits"),
    row=_ROW,
)
GLM_IMAGE = Family(
    "glm-image",
    ("GlmImageTransformer2DModel",),
    fused=(TO_QKV,),
    renames=(_TO_OUT,),
    column=(*_SELF, "net.0.proj"),
    row=("to_out.0", "net.2"),
    heads=_SELF,
)
#: Two towers in one transformer: reading (`to_q`, `mlp`) and drawing (`add_q_proj`, `mlp_moe_gen`). Nothing fuses.
COSMOS_3 = Family(
    "cosmos3",
    ("Cosmos3OmniTransformer", "cosmos3_omni", "cosmos3_edge"),
    renames=(
        Rename("cross_attention.to_q", "self_attn.add_q_proj"),
        Rename("cross_attention.to_k", "self_attn.add_k_proj"),
        Rename("cross_attention.to_v", "self_attn.add_v_proj"),
        Rename("cross_attention.to_out", "self_attn.to_add_out"),
    ),
    column=(*_HEADS, "gate_proj", "up_proj"),
    row=("to_out", "to_add_out", "down_proj"),
)
#: diffusers' layout. Its gated feed-forward stores up before gate.
MINIMAX_H3 = Family(
    "minimax-h3",
    ("MiniMaxH3Transformer3DModel",),
    fused=(Fused("attn.qkv_proj", ("attn.to_q", "attn.to_k", "attn.to_v")),),
    renames=(
        Rename("attn.out_proj", "attn.to_out.0"),
        Rename("mlp.fc1", "ff.net.0.proj"),
        Rename("mlp.fc2", "ff.net.2"),
    ),
    disk_orders={"ff.net.0.proj": "halves_swapped"},
    disk_parts={"ff.net.0.proj": "halves"},
    column=(*_SELF, "net.0.proj"),
    row=("to_out.0", "net.2"),
    heads=_SELF,
)
#: The native layout: qkv interleaved per head, gate before up.
MINIMAX_H3_NATIVE = Family(
    "minimax-h3-native",
    ("MiniMaxH3DiT", "MiniMaxH3DiTModel", "minimax_h3"),
    disk_orders={"attn.qkv_proj": "qkv_per_kv_head"},
    disk_parts={"attn.qkv_proj": "qkv", "mlp.fc1": "halves"},
    column=("attn.qkv_proj", "mlp.fc1"),
    row=("attn.out_proj", "mlp.fc2"),
    heads=("attn.qkv_proj",),
)
OMNIGEN_2 = Family(
    "omnigen2",
    ("OmniGen2Transformer2DModel",),
    fused=(TO_QKV, Fused("feed_forward.gate_up_proj", ("feed_forward.linear_1", "feed_forward.linear_3"))),
    renames=(_TO_OUT,),
    column=(*_SELF, "linear_1", "linear_3"),
    row=("to_out.0", "linear_2"),
)
#: Other text encoders are language models: see text.py.
TEXT_ENCODER = Family(
    "t5-encoder",
    ("t5", "umt5", "T5EncoderModel", "UMT5EncoderModel"),
    fused=(Fused("qkv_proj", ("q", "k", "v")),),
    column=("q", "k", "v", "wi_0", "wi_1", "wi"),
    row=("o", "wo"),
)
#: Families that differ from a listed one in name only.
LIKE_FLUX = Family(
    "like-flux",
    ("LongCatImageTransformer2DModel", "OvisImageTransformer2DModel", "HeliosTransformer3DModel"),
    fused=(TO_QKV, ADD_KV),
    aliases=(TO_ADDED_QKV,),
    renames=(_TO_OUT,),
    column=_COLUMN,
    row=_ROW,
    heads=_HEADS,
)

FAMILIES: tuple[Family, ...] = (
    *(QWEN_IMAGE, WAN, WAN_ORIGINAL, FLUX, FLUX_2, FLUX_ORIGINAL, Z_IMAGE, STABLE_DIFFUSION_3, HUNYUAN_VIDEO),
    *(LTX_2, GLM_IMAGE, COSMOS_3, MINIMAX_H3, MINIMAX_H3_NATIVE, OMNIGEN_2, TEXT_ENCODER, LIKE_FLUX),
)
