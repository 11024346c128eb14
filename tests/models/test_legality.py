"""Splits that are called legal cut nothing, and those that are refused cut something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import omniplat
from omniplat.legality import TP_SIZES, cut_columns, cut_heads, cut_qkv, cut_rows, rank_rows
from omniplat.scheme import Scheme
from tests.support.checkpoints import mxfp8, write_checkpoint

SCHEMES = (
    *("bf16/a16", "fp8-channel/fp8-token", "fp8-tensor/fp8-tensor-static", "fp8-block128x128/fp8-g128"),
    *("fp8-block64x32/a16", "int8-channel/int8-token", "int4-g128/a16", "int4-g32/a16", "uint4-g64/a16"),
    *("int3-g96/a16", "int4-channel/int8-token", "mxfp8/mxfp8", "mxfp4/mxfp4", "mxfp4/mxfp8", "nvfp4/nvfp4"),
    *("mxfp4-dual/mxfp4-dual", "nf4-b64/a16", "fp4bnb-b64/a16", "svdq-int4-g64/svdq-int4", "gguf-q4_k/a16"),
    *("gguf-q8_0/a16", "int8-channel/fp8-g128"),
)
schemes = st.sampled_from(SCHEMES).map(Scheme.parse)
sizes = st.builds(lambda count, unit: count * unit, st.integers(1, 48), st.sampled_from((1, 2, 8, 16, 32, 64, 96, 128)))
tps = st.sampled_from(TP_SIZES)

#: Values along K that must stay together, stated again and independently of the code under test.
WHOLE = {
    "fp8-block128x128": 128, "fp8-block64x32": 32, "int4-g128": 128, "int4-g32": 32, "uint4-g64": 64, "int3-g96": 96,
    "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "mxfp4-dual": 512, "nf4-b64": 64, "fp4bnb-b64": 64, "svdq-int4-g64": 64,
    "gguf-q4_k": 256, "gguf-q8_0": 32, "int4-channel": 2, "fp8-g128": 128,
}  # fmt: skip


def boundaries(size: int, tp: int) -> list[int]:
    return [size * rank // tp for rank in range(1, tp)]


@given(schemes, sizes, tps)
def test_a_legal_split_along_k_cuts_nothing(scheme: Scheme, columns: int, tp: int) -> None:
    units = [WHOLE.get(scheme.weight_id, 1), WHOLE.get(scheme.activation_id, 1)]
    cuts = columns % tp != 0 or any(edge % unit for unit in units for edge in boundaries(columns, tp))
    assert cut_columns(scheme, columns, tp).legal == (not cuts)


@given(schemes, st.lists(sizes, min_size=1, max_size=3), sizes, tps)
def test_a_legal_split_along_n_cuts_nothing(scheme: Scheme, parts: list[int], columns: int, tp: int) -> None:
    block = scheme.weight.block[0] or 1
    flat = 64 if scheme.weight.element in ("nf4", "fp4_bnb") else 1
    cuts = any(
        rows % tp or any(edge % block or (edge * columns) % flat for edge in boundaries(rows, tp)) for rows in parts
    )
    assert cut_rows(scheme, parts, tp, columns=columns).legal == (not cuts)


@given(schemes, st.integers(1, 8), st.integers(1, 8), st.sampled_from((16, 32, 64, 128)), tps)
def test_heads_stay_whole_and_kv_heads_are_shared(scheme: Scheme, kv: int, per_kv: int, dim: int, tp: int) -> None:
    heads = kv * per_kv
    parts = (heads * dim, kv * dim, kv * dim)
    cut = cut_qkv(scheme, parts, (False, True, True), kv, heads, tp)
    if not cut.legal:
        block = scheme.weight.block[0] or 1
        q, k = heads * dim // tp, kv * dim // min(tp, kv)
        assert not cut_heads(kv, heads, tp).legal or q % block or k % block
        return
    q, k = (rank_rows(rows, kv, tp, is_kv=is_kv) for rows, is_kv in zip(parts[:2], (False, True), strict=True))
    assert q * tp == parts[0]
    assert q % dim == 0
    assert k % dim == 0
    # a rank's queries use the keys that it holds: as many query heads to each as the model has
    assert (q // dim) % (k // dim) == 0
    assert k * tp >= parts[1]
    if scheme.weight.granularity == "block":
        assert tp == 1 or (q % scheme.weight.block[0] == 0 and k % scheme.weight.block[0] == 0)


def test_replicated_kv_heads_cut_a_block_of_two_heads() -> None:
    block = Scheme.parse("fp8-block128x128/fp8-g128")
    assert cut_qkv(block, (1024, 128, 128), (False, True, True), 2, 16, 1).legal
    assert "128" in cut_qkv(block, (1024, 128, 128), (False, True, True), 2, 16, 2).problem
    assert cut_qkv(block, (2048, 256, 256), (False, True, True), 2, 16, 4).legal


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_is_always_legal(scheme: str) -> None:
    found = Scheme.parse(scheme)
    assert cut_columns(found, 7, 1).legal
    assert cut_rows(found, (7,), 1, columns=7).legal


# -- whole checkpoints ----------------------------------------------------------------------------------


def fp8_block(name: str, n: int, k: int) -> dict[str, Any]:
    return {f"{name}.weight": ("F8_E4M3", (n, k)), f"{name}.weight_scale_inv": ("F32", (-(-n // 128), -(-k // 128)))}


def plan(folder: Path, config: dict[str, Any], tensors: dict[str, Any], device: str, **more: Any) -> dict[str, Any]:
    write_checkpoint(folder, config, tensors)
    document: dict[str, Any] = json.loads(json.dumps(omniplat.plan(folder, device, **more).to_dict()))
    return document


BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
L = "model.layers.0"


@pytest.mark.parametrize(("intermediate", "legal"), [(1536, [1, 2, 3, 4, 6]), (2048, [1, 2, 4, 8, 16]), (320, [1])])
def test_experts_are_split_along_their_intermediate_size(tmp_path: Path, intermediate: int, legal: list[int]) -> None:
    tensors: dict[str, Any] = {}
    for expert in range(2):
        for name in ("gate_proj", "up_proj"):
            tensors |= fp8_block(f"{L}.mlp.experts.{expert}.{name}", intermediate, 256)
        tensors |= fp8_block(f"{L}.mlp.experts.{expert}.down_proj", 256, intermediate)
    config = {"model_type": "qwen3_moe", "quantization_config": BLOCK}
    found = plan(tmp_path, config, tensors, "cuda:sm90")
    assert found["summary"]["legal_tp"] == legal
    assert found["summary"]["legal_ep"] == [1, 2]


MXFP8 = {"quant_method": "mxfp8", "is_checkpoint_mxfp8_serialized": True}


def test_a_kernel_that_is_stricter_than_the_format_limits_tp(tmp_path: Path) -> None:
    """Groups of 32 allow tp = 4 for K = 384; the only kernel of one device wants a multiple of 64 per rank."""
    config = {"model_type": "llama", "quantization_config": MXFP8}
    tensors = mxfp8(f"{L}.mlp.down_proj", 1024, 384)
    npu = plan(tmp_path, config, tensors, "npu:a5")
    assert npu["summary"]["legal_tp"] == [1, 2, 3, 6]
    (layer,) = npu["layers"]
    assert layer["status"] == "ok"
    cpu = plan(tmp_path, config, tensors, "cpu")
    assert cpu["summary"]["legal_tp"] == [1, 2, 3, 4, 6]
    refused = plan(tmp_path, config, tensors, "npu:a5", tp=4)
    assert refused["layers"][0]["status"] == "unsupported"
    assert {"rule": "in", "needed": "a multiple of 64 and at most 65535", "found": "96"} in [
        item["rejected"] for item in refused["layers"][0]["trace"] if item.get("rejected")
    ]


def test_a_layer_that_no_kernel_runs_is_judged_by_its_format(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": MXFP8}
    found = plan(tmp_path, config, mxfp8(f"{L}.mlp.down_proj", 1024, 384), "npu:310p")
    assert found["layers"][0]["status"] == "unsupported"
    assert found["summary"]["legal_tp"] == [1, 2, 3, 4, 6]


def test_replicated_kv_heads_are_whole_for_the_kernel(tmp_path: Path) -> None:
    """With 2 KV heads and tp = 4 a rank holds 2 query heads, one key and one value head."""
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
              "hidden_size": 1024, "quantization_config": BLOCK}  # fmt: skip
    attention = {"q_proj": 1024, "k_proj": 256, "v_proj": 256}
    tensors: dict[str, Any] = {}
    for name, rows in attention.items():
        tensors |= fp8_block(f"{L}.self_attn.{name}", rows, 1024)
    found = plan(tmp_path, config, tensors, "cuda:sm90", tp=4)
    assert found["summary"]["legal_tp"] == [1, 2, 4, 8]
    assert found["layers"][0]["status"] == "ok"
