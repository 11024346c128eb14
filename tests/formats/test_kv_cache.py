"""What metadata declares of the KV cache: its kinds, and scales that are there for all, some or none of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniplat.formats.kv_cache import cache_scales
from omniplat.formats.resolve import Resolution
from tests.support.checkpoints import bf16, fp8_channel
from tests.support.resolving import codes, only, resolve, schemes

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def attention(*layers: str) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for layer in layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors |= fp8_channel(f"{layer}.{name}", 64, 64)
    return tensors


def scales(layer: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"{layer}.{name}": ("F32", ()) for name in names}


def read(folder: Path, scheme: Any, tensors: dict[str, Any]) -> Resolution:
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "kv_cache_scheme": scheme}
    return resolve(folder, config, tensors)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("kv_scale",),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.output_scale",),
        ("k_cache.scale", "v_cache.scale"),
    ],
)
def test_every_name_of_a_scale_is_found(tmp_path: Path, names: tuple[str, ...]) -> None:
    complete = attention(*LAYERS) | scales(LAYERS[0], names) | scales(LAYERS[1], names)
    assert codes(read(tmp_path / "all", STATIC, complete)) == []
    partial = attention(*LAYERS) | scales(LAYERS[0], names)
    problem = only(read(tmp_path / "some", STATIC, partial), "missing-tensor")
    assert problem.severity == "warning"
    assert problem.modules == (LAYERS[1],)
    assert "1 of 2 attention layers" in problem.message
    assert "scale 1.0" in problem.message


@pytest.mark.parametrize(
    "name", ["q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale", "q_cache.scale", "prob_output_scale"]
)
def test_scales_of_what_is_not_cached(tmp_path: Path, name: str) -> None:
    """They are the attention's, and a cache is none the better for them."""
    assert cache_scales([f"{LAYERS[0]}.{name}", f"{LAYERS[0]}.q_proj.weight_scale"]) == (f"{LAYERS[0]}.{name}",)
    complete = attention(*LAYERS) | scales(LAYERS[0], ("kv_scale",)) | scales(LAYERS[1], ("kv_scale",))
    assert codes(read(tmp_path / "all", STATIC, complete | scales(LAYERS[0], (name,)))) == []
    alone = attention(*LAYERS) | scales(LAYERS[0], (name,))
    assert "0 of 2 attention layers" in only(read(tmp_path / "none", STATIC, alone), "missing-tensor").message


@pytest.mark.parametrize("scheme", [STATIC, {"num_bits": 8, "type": "float"}, "FP8", "fp8_e4m3"])
def test_a_cache_without_any_scales(tmp_path: Path, scheme: Any) -> None:
    problem = only(read(tmp_path, scheme, attention(*LAYERS)), "missing-tensor")
    assert (problem.severity, problem.where.rule) == ("warning", "quantization_config.kv_cache_scheme")
    assert problem.modules == LAYERS
    assert "0 of 2" in problem.message


@pytest.mark.parametrize("scheme", [None, {}, "none", {**STATIC, "dynamic": True}])
def test_caches_that_need_no_scales(tmp_path: Path, scheme: Any) -> None:
    assert codes(read(tmp_path, scheme, attention(*LAYERS))) == []


def test_a_scale_of_k_alone_is_not_enough_but_for_a_latent_cache(tmp_path: Path) -> None:
    tensors = attention(*LAYERS) | scales(LAYERS[0], ("k_scale", "v_scale")) | scales(LAYERS[1], ("k_scale",))
    assert only(read(tmp_path / "plain", STATIC, tensors), "missing-tensor").modules == (LAYERS[1],)
    latent = fp8_channel(f"{LAYERS[0]}.kv_b_proj", 64, 64) | scales(LAYERS[0], ("k_scale",))
    assert codes(read(tmp_path / "latent", STATIC, latent)) == []


def test_encoders_have_no_cache(tmp_path: Path) -> None:
    encoder = attention("visual.blocks.0.attn", "audio_tower.layers.0.self_attn", "x.layers.0.self_attn")
    tensors = attention(*LAYERS) | encoder | scales(LAYERS[0], ("kv_scale",))
    assert "1 of 2 attention" in only(read(tmp_path / "some", STATIC, tensors), "missing-tensor").message
    assert (
        "0 of 3 attention"
        in only(read(tmp_path / "none", STATIC, attention(*LAYERS) | encoder), "missing-tensor").message
    )


@pytest.mark.parametrize(
    ("scheme", "code", "rule", "named"),
    [
        ({"num_bits": 4, "type": "float"}, "unsupported-option", "", "4-bit float"),
        ({**STATIC, "type": "int"}, "unsupported-option", "", "8-bit int"),
        ({**STATIC, "strategy": "group"}, "unsupported-option", ".strategy", "group"),
        ({**STATIC, "symmetric": False}, "unsupported-option", ".symmetric", "asymmetric"),
        ("INT3", "unsupported-option", "", "INT3"),
        ({"num_bits": "eight"}, "metadata-unreadable", ".num_bits", "eight"),
        ({**STATIC, "dynamic": "local"}, "metadata-unreadable", ".dynamic", "local"),
        (7, "metadata-unreadable", "", "7"),
        ([STATIC], "metadata-unreadable", "", "num_bits"),
    ],
)
def test_other_caches_are_refused_and_the_weights_are_read(
    tmp_path: Path, scheme: Any, code: str, rule: str, named: str
) -> None:
    found = read(tmp_path, scheme, attention(LAYERS[0]))
    problem = only(found, code)
    assert problem.severity == "error"
    assert (problem.where.file, problem.where.rule) == ("config.json", f"quantization_config.kv_cache_scheme{rule}")
    assert named in problem.message
    assert set(schemes(found).values()) == {"fp8-channel/fp8-token"}


def modelopt(folder: Path, values: dict[str, Any], tensors: dict[str, Any]) -> Resolution:
    content = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": values}
    return resolve(folder, None, tensors, files={"hf_quant_config.json": content})


def test_modelopt_may_quantize_the_cache_alone(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.k_proj.weight": bf16(64, 64)} | scales(
        LAYERS[0], ("k_proj.k_scale", "v_proj.v_scale")
    )
    values = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    found = modelopt(tmp_path / "fp8", values, tensors)
    assert schemes(found) == {"model.layers.0.self_attn.k_proj": "bf16/a16"}
    assert codes(found) == []
    assert codes(modelopt(tmp_path / "none", {"quant_algo": None}, tensors)) == ["unsupported-option"]


def test_modelopt_names_a_kind_that_is_not_known(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.k_proj.weight": bf16(64, 64)}
    found = modelopt(tmp_path, {"quant_algo": None, "kv_cache_quant_algo": "INT3"}, tensors)
    problem = only(found, "unsupported-option")
    assert (problem.where.file, problem.where.rule) == ("hf_quant_config.json", "quantization.kv_cache_quant_algo")
    assert "'INT3'" in problem.message


@pytest.mark.parametrize(("kind", "code"), [("fp8_e4m3", "missing-tensor"), ("int8", "unsupported-option")])
def test_quark_lists_the_layers_whose_outputs_are_cached(tmp_path: Path, kind: str, code: str) -> None:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": kind, "is_dynamic": False}}, "*q": {}},
    }
    assert codes(resolve(tmp_path, config, attention(LAYERS[0]))) == [code]


QUARK_WEIGHT = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("outputs", "code"),
    [({"dtype": "fp8_e4m3"}, "missing-tensor"), ({"dtype": "int8"}, "unsupported-option"), (None, ""),
     ({"dtype": "fp8_e4m3", "is_dynamic": True}, "")],
)  # fmt: skip
def test_quark_names_the_layers_of_the_cache_in_its_export(
    tmp_path: Path, outputs: dict[str, Any] | None, code: str, whole: bool
) -> None:
    """Patterns alone: how their outputs are quantized stands with the pattern, or with all layers."""
    plain, cached = {"weight": QUARK_WEIGHT}, {"weight": QUARK_WEIGHT, "output_tensors": outputs}
    config = {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
        "global_quant_config": cached if whole else plain,
        "layer_quant_config": {} if whole else {"*k_proj": cached, "*v_proj": cached},
    }
    assert codes(resolve(tmp_path / "none", config, attention(LAYERS[0]))) == [code] * bool(code)
    if code == "missing-tensor":
        scaled = attention(LAYERS[0]) | scales(LAYERS[0], ("k_proj.output_scale", "v_proj.output_scale"))
        assert codes(resolve(tmp_path / "all", config, scaled)) == []


def test_quarks_empty_group_declares_nothing(tmp_path: Path) -> None:
    config = {"quant_method": "quark", "export": {"kv_cache_group": []}, "global_quant_config": {
        "weight": QUARK_WEIGHT, "output_tensors": {"dtype": "int8"}}}  # fmt: skip
    assert codes(resolve(tmp_path, config, attention(LAYERS[0]))) == []


@pytest.mark.parametrize("key", ["kv_quant_type", "kv_cache_type"])
@pytest.mark.parametrize(
    ("kind", "code"),
    [("C8", "missing-tensor"), ("INT8", "missing-tensor"), ("FP8", "missing-tensor"), ("int8_dynamic", ""),
     ("FP8_DYNAMIC", ""), ("FLOAT", ""), ("", ""), ("C4", "unsupported-option"), (8, "metadata-unreadable")],
)  # fmt: skip
def test_modelslim_names_the_kind_of_cache(tmp_path: Path, key: str, kind: Any, code: str) -> None:
    tensors: dict[str, Any] = {f"{LAYERS[0]}.{name}.weight": bf16(64, 64) for name in ("q_proj", "k_proj", "v_proj")}
    entries = dict.fromkeys(tensors, "FLOAT")
    files = {"quant_model_description.json": {"model_quant_type": "W8A8", **entries, key: kind}}
    assert codes(resolve(tmp_path / "none", None, tensors, files=files)) == [code] * bool(code)
    if code == "missing-tensor":
        scaled = tensors | scales(LAYERS[0], ("k_proj.kv_cache_scale", "v_proj.kv_cache_scale"))
        assert codes(resolve(tmp_path / "all", None, scaled, files=files)) == []
