"""Module names as real checkpoints have them, one block of each family, and the layers they become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Rows and columns are small and differ, so that a mix-up shows.
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """`modules` name -> [rows, columns]; `layers` layer name -> the modules it must pack, in any order."""

    family: str
    config: dict[str, Any]
    modules: dict[str, Shape]
    layers: dict[str, tuple[str, ...]]
    moe: tuple[str, ...] = field(default=())


_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 256}
_TEXT_ATTENTION = {"q_proj": (256, 256), "k_proj": (64, 256), "v_proj": (64, 256), "o_proj": (256, 256)}
_MLP = {"gate_proj": (512, 256), "up_proj": (512, 256), "down_proj": (256, 512)}


def below(path: str, modules: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{path}.{name}": shape for name, shape in modules.items()}


def packs(path: str, fused: str, *parts: str) -> dict[str, tuple[str, ...]]:
    return {f"{path}.{fused}": tuple(f"{path}.{part}" for part in parts)}


def _experts(path: str, names: tuple[str, ...], count: int = 2) -> dict[str, Shape]:
    shapes = {"gate_proj": (96, 256), "up_proj": (96, 256), "w1": (96, 256), "w3": (96, 256), "down_proj": (256, 96),
              "w2": (256, 96), "gate_and_up_proj": (192, 256)}  # fmt: skip
    return {f"{path}.{i}.{name}": shapes[name] for i in range(count) for name in names}


def _all(path: str, names: tuple[str, ...], count: int = 2) -> tuple[str, ...]:
    return tuple(f"{path}.{i}.{name}" for i in range(count) for name in names)


_L = "model.layers.0"
_GUD = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w2", "w3")
_QKV = packs(f"{_L}.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj")
_GATE_UP = packs(f"{_L}.mlp", "gate_up_proj", "gate_proj", "up_proj")


def _dit(block: str, attention: str, *, added: bool = False) -> tuple[dict[str, Shape], dict[str, tuple[str, ...]]]:
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    layers = packs(f"{block}.{attention}", "to_qkv", "to_q", "to_k", "to_v")
    if added:
        names += ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        layers |= packs(f"{block}.{attention}", "add_kv_proj", "add_q_proj", "add_k_proj", "add_v_proj")
    return below(f"{block}.{attention}", dict.fromkeys(names, (256, 256))), layers


def _diffusion(
    family: str, kind: str, block: str, attention: str, *, added: bool = False, more: dict[str, Shape] | None = None
) -> Example:
    modules, layers = _dit(block, attention, added=added)
    config = {"_class_name": kind, "num_attention_heads": 8, "attention_head_dim": 32}
    return Example(family, config, modules | (more or {}), layers)


_FF = {"ff.net.0.proj": (1024, 256), "ff.net.2": (256, 1024)}

EXAMPLES: tuple[Example, ...] = (
    Example(
        "llama",
        {"model_type": "llama", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION) | below(f"{_L}.mlp", _MLP),
        _QKV | _GATE_UP,
    ),
    Example(
        "gemma",  # the value projection is absent where values are the keys
        {"model_type": "gemma4", **_HEADS},
        below(f"{_L}.self_attn", {name: shape for name, shape in _TEXT_ATTENTION.items() if name != "v_proj"})
        | below(f"{_L}.mlp", _MLP),
        packs(f"{_L}.self_attn", "qkv_proj", "q_proj", "k_proj") | _GATE_UP,
    ),
    Example(
        "phi3",
        {"model_type": "phi3", **_HEADS},
        below(f"{_L}.self_attn", {"qkv_proj": (384, 256), "o_proj": (256, 256)})
        | below(f"{_L}.mlp", {"gate_up_proj": (1024, 256), "down_proj": (256, 512)}),
        packs(f"{_L}.self_attn", "qkv_proj", "qkv_proj") | packs(f"{_L}.mlp", "gate_up_proj", "gate_up_proj"),
    ),
    Example(
        "glm4",
        {"model_type": "glm4", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION) | {f"{_L}.mlp.gate_up_proj": (1024, 256)},
        _QKV | packs(f"{_L}.mlp", "gate_up_proj", "gate_up_proj"),
    ),
    Example(
        "qwen-moe",
        {"model_type": "qwen3_moe", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION) | _experts(f"{_L}.mlp.experts", _GUD)
        | {f"{_L}.mlp.gate": (2, 256)} | below(f"{_L}.mlp.shared_expert", _MLP),
        _QKV | {f"{_L}.mlp.experts": _all(f"{_L}.mlp.experts", _GUD), f"{_L}.mlp.gate": (f"{_L}.mlp.gate",)}
        | packs(f"{_L}.mlp.shared_expert", "gate_up_proj", "gate_proj", "up_proj"),
        (f"{_L}.mlp.experts",),
    ),
    Example(
        "qwen-linear-attention",
        {"model_type": "qwen3_5_moe", **_HEADS},
        below(f"{_L}.linear_attn", {"in_proj_qkv": (384, 256), "in_proj_z": (256, 256), "in_proj_b": (8, 256),
                                    "in_proj_a": (8, 256), "out_proj": (256, 256)}),
        packs(f"{_L}.linear_attn", "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
        | packs(f"{_L}.linear_attn", "in_proj_ba", "in_proj_b", "in_proj_a"),
    ),
    Example(
        "mixtral",
        {"model_type": "minimax_m2", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION) | _experts(f"{_L}.block_sparse_moe.experts", _W),
        _QKV | {f"{_L}.block_sparse_moe.experts": _all(f"{_L}.block_sparse_moe.experts", _W)},
        (f"{_L}.block_sparse_moe.experts",),
    ),
    Example(
        "glm-moe",
        {"model_type": "glm4_moe", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION) | _experts(f"{_L}.mlp.experts", _GUD)
        | below(f"{_L}.mlp.shared_experts", _MLP),
        _QKV | {f"{_L}.mlp.experts": _all(f"{_L}.mlp.experts", _GUD)}
        | packs(f"{_L}.mlp.shared_experts", "gate_up_proj", "gate_proj", "up_proj"),
        (f"{_L}.mlp.experts",),
    ),
    Example(
        "deepseek",
        {"model_type": "deepseek_v3", **_HEADS},
        below(f"{_L}.self_attn", {"q_a_proj": (96, 256), "kv_a_proj_with_mqa": (48, 256), "q_b_proj": (384, 96),
                                  "kv_b_proj": (512, 32), "o_proj": (256, 256)})
        | _experts(f"{_L}.mlp.experts", _GUD),
        packs(f"{_L}.self_attn", "fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa")
        | {f"{_L}.self_attn.q_b_proj": (f"{_L}.self_attn.q_b_proj",)}
        | {f"{_L}.mlp.experts": _all(f"{_L}.mlp.experts", _GUD)},
        (f"{_L}.mlp.experts",),
    ),
    Example(
        "deepseek-v4",
        {"model_type": "deepseek_v4", **_HEADS},
        below("layers.0.attn", {"wq_a": (96, 256), "wkv": (48, 256), "wq_b": (384, 96), "wo_a": (64, 256),
                                "wo_b": (256, 64)})
        | _experts("layers.0.ffn.experts", _W)
        | below("layers.0.ffn.shared_experts", {"w1": (96, 256), "w3": (96, 256), "w2": (256, 96)}),
        packs("layers.0", "attn.fused_wqa_wkv", "attn.wq_a", "attn.wkv")
        | {"layers.0.ffn.experts": _all("layers.0.ffn.experts", _W)}
        | packs("layers.0.ffn.shared_experts", "gate_up_proj", "w1", "w3"),
        ("layers.0.ffn.experts",),
    ),
    Example(
        "kimi-linear",
        {"model_type": "kimi_linear", **_HEADS},
        _experts(f"{_L}.block_sparse_moe.experts", _W) | below(f"{_L}.mlp", _MLP),
        _GATE_UP | {f"{_L}.block_sparse_moe.experts": _all(f"{_L}.block_sparse_moe.experts", _W)},
        (f"{_L}.block_sparse_moe.experts",),
    ),
    Example(
        "gpt-oss",
        {"model_type": "gpt_oss", **_HEADS},
        below(f"{_L}.self_attn", _TEXT_ATTENTION)
        | {f"{_L}.mlp.experts.gate_up_proj": (2, 256, 192), f"{_L}.mlp.experts.down_proj": (2, 96, 256)},
        _QKV | packs(f"{_L}.mlp", "experts", "experts.gate_up_proj", "experts.down_proj"),
        (f"{_L}.mlp.experts",),
    ),
    Example(
        "llama4",
        {"model_type": "llama4", **_HEADS},
        below(f"{_L}.feed_forward.experts", {"gate_up_proj": (2, 256, 192), "down_proj": (2, 96, 256)}),
        packs(f"{_L}.feed_forward", "experts", "experts.gate_up_proj", "experts.down_proj"),
        (f"{_L}.feed_forward.experts",),
    ),
    Example(
        "per-head-qkv",
        {"model_type": "gpt_neox", "num_attention_heads": 8, "hidden_size": 256},
        {"gpt_neox.layers.0.attention.query_key_value": (768, 256), "gpt_neox.layers.0.mlp.dense_h_to_4h": (1024, 256)},
        packs("gpt_neox.layers.0.attention", "query_key_value", "query_key_value"),
    ),
    Example(
        "falcon",
        {"model_type": "falcon", "num_attention_heads": 8, "num_kv_heads": 2, "hidden_size": 256,
         "new_decoder_architecture": True},
        {"transformer.h.0.self_attention.query_key_value": (384, 256)},
        packs("transformer.h.0.self_attention", "query_key_value", "query_key_value"),
    ),
    Example(
        "internlm2",
        {"model_type": "internlm2", **_HEADS},
        {f"{_L}.attention.wqkv": (384, 256)} | below(f"{_L}.feed_forward", {"w1": (96, 256), "w3": (96, 256)}),
        packs(f"{_L}", "feed_forward.gate_up_proj", "feed_forward.w1", "feed_forward.w3"),
    ),
    _diffusion("qwen-image", "QwenImageTransformer2DModel", "transformer_blocks.0", "attn", added=True,
               more={"transformer_blocks.0.img_mlp.net.0.proj": (1024, 256)}),
    _diffusion("flux", "FluxTransformer2DModel", "transformer_blocks.0", "attn", added=True,
               more=below("transformer_blocks.0", _FF)),
    _diffusion("flux2", "Flux2Transformer2DModel", "transformer_blocks.0", "attn", added=True,
               more={"transformer_blocks.0.ff.linear_in": (1536, 256)}),
    _diffusion("z-image", "ZImageTransformer2DModel", "layers.0", "attention"),
    _diffusion("stable-diffusion-3", "SD3Transformer2DModel", "transformer_blocks.0", "attn", added=True),
    _diffusion("hunyuan-video", "HunyuanVideo15Transformer3DModel", "transformer_blocks.0", "attn", added=True),
    _diffusion("glm-image", "GlmImageTransformer2DModel", "transformer_blocks.0", "attn1"),
    _diffusion("omnigen2", "OmniGen2Transformer2DModel", "layers.0", "attn"),
    _diffusion("like-flux", "LongCatImageTransformer2DModel", "transformer_blocks.0", "attn", added=True),
    Example(
        "wan",  # the text's keys and values do not fuse with the queries
        {"_class_name": "WanTransformer3DModel", "num_attention_heads": 8, "attention_head_dim": 32},
        _dit("blocks.0", "attn1")[0] | _dit("blocks.0", "attn2")[0],
        _dit("blocks.0", "attn1")[1]
        | {f"blocks.0.attn2.{name}": (f"blocks.0.attn2.{name}",) for name in ("to_q", "to_k")},
    ),
    Example(
        "wan-original",
        {"_class_name": "WanModel"},
        below("blocks.0.self_attn", {"q": (256, 256), "k": (256, 256), "v": (256, 256)})
        | below("blocks.0.cross_attn", {"q": (256, 256), "k": (256, 256)}),
        packs("blocks.0", "self_attn.to_qkv", "self_attn.q", "self_attn.k", "self_attn.v")
        | {"blocks.0.cross_attn.q": ("blocks.0.cross_attn.q",)},
    ),
    Example(
        "ltx2",
        {"_class_name": "LTX2VideoTransformer3DModel", "num_attention_heads": 8, "attention_head_dim": 32},
        _dit("transformer_blocks.0", "attn1")[0] | _dit("transformer_blocks.0", "audio_attn1")[0]
        | _dit("transformer_blocks.0", "attn2")[0],
        _dit("transformer_blocks.0", "attn1")[1] | _dit("transformer_blocks.0", "audio_attn1")[1]
        | {"transformer_blocks.0.attn2.to_q": ("transformer_blocks.0.attn2.to_q",)},
    ),
    Example(
        "cosmos3",
        {"_class_name": "Cosmos3OmniTransformer"},
        below("layers.0.self_attn", {"to_q": (256, 256), "add_q_proj": (256, 256)})
        | below("layers.0.mlp_moe_gen", _MLP),
        {f"layers.0.mlp_moe_gen.{name}": (f"layers.0.mlp_moe_gen.{name}",) for name in _MLP},
    ),
    Example(
        "minimax-h3",
        {"_class_name": "MiniMaxH3Transformer3DModel", "num_attention_heads": 8, "attention_head_dim": 32},
        below("transformer_blocks.0.attn", dict.fromkeys(("to_q", "to_k", "to_v"), (256, 256)))
        | below("transformer_blocks.0", _FF),
        packs("transformer_blocks.0", "attn.qkv_proj", "attn.to_q", "attn.to_k", "attn.to_v"),
    ),
    Example(
        "minimax-h3-native",
        {"_class_name": "MiniMaxH3DiT", "num_attention_heads": 8, "attention_head_dim": 32},
        {"blocks.0.attn.qkv_proj": (768, 256)},
        packs("blocks.0", "attn.qkv_proj", "attn.qkv_proj"),
    ),
    Example(
        "flux-original",
        {"_class_name": "Flux", "num_attention_heads": 8, "head_dim": 32},
        {"double_blocks.0.img_attn.qkv": (768, 256)},
        packs("double_blocks.0", "img_attn.qkv", "img_attn.qkv"),
    ),
    Example(
        "t5-encoder",
        {"model_type": "umt5"},
        below("encoder.block.0.layer.0.SelfAttention", dict.fromkeys(("q", "k", "v", "o"), (256, 256))),
        packs("encoder.block.0.layer.0.SelfAttention", "qkv_proj", "q", "k", "v"),
    ),
    Example(
        "hunyuan-image-3",
        {"model_type": "hunyuan_image_3_moe", **_HEADS},
        {f"{_L}.self_attn.qkv_proj": (384, 256), f"{_L}.mlp.gate.wg": (2, 256)}
        | _experts(f"{_L}.mlp.experts", ("gate_and_up_proj", "down_proj"))
        | below(f"{_L}.mlp.shared_mlp", {"gate_and_up_proj": (1024, 256), "down_proj": (256, 512)}),
        packs(f"{_L}.mlp.shared_mlp", "gate_and_up_proj", "gate_and_up_proj")
        | {f"{_L}.mlp.experts": _all(f"{_L}.mlp.experts", ("gate_and_up_proj", "down_proj"))},
        (f"{_L}.mlp.experts",),
    ),
    Example(
        "qwen2.5-omni",
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": _HEADS}},
        below("thinker.model.layers.0.self_attn", _TEXT_ATTENTION)
        | below("thinker.visual.blocks.0.attn", dict.fromkeys(("q", "k", "v"), (256, 256))),
        packs("thinker.model.layers.0.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj")
        | packs("thinker.visual.blocks.0", "attn.qkv", "attn.q", "attn.k", "attn.v"),
    ),
    Example(
        "qwen3-omni",
        {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": _HEADS}},
        below("talker.model.layers.0.self_attn", _TEXT_ATTENTION)
        | _experts("thinker.model.layers.0.mlp.experts", _GUD) | _experts("talker.model.layers.0.mlp.experts", _GUD),
        packs("talker.model.layers.0.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj")
        | {f"{part}.model.layers.0.mlp.experts": _all(f"{part}.model.layers.0.mlp.experts", _GUD)
           for part in ("thinker", "talker")},
        ("thinker.model.layers.0.mlp.experts", "talker.model.layers.0.mlp.experts"),
    ),
    Example(
        "qwen3-tts",
        {"model_type": "qwen3_tts", "talker_config": _HEADS},
        below("talker.model.layers.0.self_attn", _TEXT_ATTENTION)
        | below("talker.code_predictor.model.layers.0.mlp", _MLP),
        packs("talker.model.layers.0.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj")
        | packs("talker.code_predictor.model.layers.0.mlp", "gate_up_proj", "gate_proj", "up_proj"),
    ),
    Example(
        "bagel",
        {"model_type": "bagel", "llm_config": _HEADS},
        below("language_model.model.layers.0.self_attn",
              _TEXT_ATTENTION | {f"{name}_moe_gen": shape for name, shape in _TEXT_ATTENTION.items()})
        | below("language_model.model.layers.0.mlp_moe_gen", _MLP),
        packs("language_model.model.layers.0.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj")
        | packs("language_model.model.layers.0.self_attn", "qkv_proj_moe_gen", "q_proj_moe_gen", "k_proj_moe_gen",
                "v_proj_moe_gen")
        | packs("language_model.model.layers.0.mlp_moe_gen", "gate_up_proj", "gate_proj", "up_proj"),
    ),
    Example(
        "audio-language",
        {"model_type": "qwen2_audio", "text_config": _HEADS},
        below("language_model.model.layers.0.self_attn", _TEXT_ATTENTION),
        packs("language_model.model.layers.0.self_attn", "qkv_proj", "q_proj", "k_proj", "v_proj"),
    ),
)  # fmt: skip
