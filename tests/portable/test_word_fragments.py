"""Products from fragments, on NVIDIA's devices: which weights they take, that they compile, and what they compute.

Gluon has no interpreter. What the kernel computes is seen on a device alone; elsewhere it is compiled for one.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat.portable.quantize import has_triton
from omniplat.portable.word_weights import WordForm, decode_form
from omniplat.portable.words import parts_of
from omniplat.runtime.tensors import to_tensor
from tests.portable.test_weight_only import DTYPES, SCHEMES, check, layer_of, weight_of
from tests.support.compile_for import compiled
from tests.support.triton import needs_cuda

needs_tested_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")


def taken(form: WordForm, dtype: str = "bf16", zero: str = "", columns: int = 0) -> bool:
    from omniplat.portable.weight_only_triton import takes_fragments

    return takes_fragments(form, columns or form.in_features, DTYPES[dtype], zero, torch.device("cuda"))


@needs_tested_triton
@pytest.mark.parametrize(
    "weight_id", ["mxfp4", "nvfp4", "uint4-g64", "nf4-b64", "fp8-block128x128", "uint8-g64", "mxfp4-dual"]
)
def test_they_compile(weight_id: str) -> None:
    lines = [line.split() for line in compiled("sm90", weight_id, tokens=(5, 30))]
    assert len(lines) == 4
    # beside f16, scales that are held as bf16 and codes of tables are not taken
    without = weight_id in ("mxfp4", "nvfp4", "nf4-b64")
    assert {name for _, dtype, _, name, _ in lines if "bfloat16" in dtype} == {"fragments"}
    assert {name for _, dtype, _, name, _ in lines if "bfloat16" not in dtype} == {
        "few_tokens" if without else "fragments"
    }
    assert all(int(size) > 0 for *_, size in lines)


@needs_cuda
def test_what_they_take() -> None:
    form = decode_form(layer_of(weight_of("mxfp4", 272, 1152)).config.form)
    assert taken(form)
    # eight columns are one load, and tiles of rows are taken whole
    assert taken(form, columns=1088)
    assert not taken(form, columns=1092)
    assert not taken(replace(form, out_features=264))
    assert not taken(form, "f16")
    assert not taken(form, zero="fraction")
    assert not taken(replace(form, depth=16))


@needs_tested_triton
@pytest.mark.parametrize("columns", [8, 16, 24, 32, 40, 64, 96, 128, 256])
def test_groups_are_whole_parts(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A group that is all columns of a narrow layer may be less: products of a part have one scale."""
    from omniplat.portable import weight_only_triton, word_decode_triton

    for module in (weight_only_triton, word_decode_triton):
        monkeypatch.setattr(module, "computes_in_pairs", lambda device: True)
    monkeypatch.setattr(weight_only_triton, "is_tested", lambda: True)
    # past the cache, which this machine's device is in
    asked = weight_only_triton.takes_fragments.__wrapped__
    for weight_id in ("int4-g32", "uint4-g64", "uint4-channel", "uint8-channel", "fp8-g128"):
        form = decode_form(layer_of(weight_of(weight_id, 32, 256)).config.form)
        group = columns if weight_id.endswith("channel") else form.group
        form = replace(form, group=group, in_features=columns)
        zero = "integer" if weight_id.startswith("u") else ""
        for dtype in DTYPES.values():
            whole = group in (32, 64) or group % (32 * parts_of(form.bits)) == 0
            assert asked(form, columns, dtype, zero, torch.device("cuda")) == whole, weight_id


@needs_cuda
@pytest.mark.parametrize("rows", [1, 12, 30, 60])
@pytest.mark.parametrize("weight_id", SCHEMES)
def test_against_the_oracle(weight_id: str, rows: int) -> None:
    """1152 columns are no whole number of units for each warp."""
    weight = weight_of(weight_id, 272, 1152)
    x = torch.randn(rows, 1152, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["mxfp4", "nvfp4", "uint4-g32", "mxfp8", "fp8-channel", "nf4-b32", "uint8-g32"])
@pytest.mark.parametrize("columns", [2880, 992, 96])
def test_columns_that_fill_no_unit(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 48, columns)
    x = torch.randn(5, columns, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["uint4-channel", "uint8-channel", "int4-channel", "fp8-channel"])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_layers_narrower_than_a_unit(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 48, columns)
    x = torch.randn(5, columns, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize(
    "weight_id", ["int4-g128", "uint4-g32", "uint8-g64", "fp8-channel", "nvfp4", "mxfp4", "mxfp4-dual"]
)
@pytest.mark.parametrize("columns", [1024, 1152])
def test_f16(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 272, columns)
    x = torch.randn(12, columns, device="cuda").half()
    check(weight, layer_of(weight, "cuda")(x), x, "f16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g64", "fp8-channel"])
def test_rows_that_are_not_aligned(weight_id: str) -> None:
    weight = weight_of(weight_id, 272, 1152)
    x = torch.randn(5, 1200, device="cuda").bfloat16()[:, 3:1155]
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
def test_bias_is_added_before_the_one_rounding() -> None:
    bias = np.linspace(90, 110, 272).astype(ml_dtypes.bfloat16)
    weight = weight_of("mxfp4", 272, 1152, bias=bias)
    layer = layer_of(weight, "cuda")
    x = torch.randn(5, 1152, device="cuda").bfloat16()
    check(weight, layer.run(x, to_tensor(bias).cuda()), x, "bf16")


@needs_cuda
def test_two_streams_run_one_layer() -> None:
    layer = layer_of(weight_of("mxfp4", 272, 1152), "cuda")
    xs = [torch.randn(9, 1152, device="cuda").bfloat16() for _ in range(2)]
    wanted = [layer(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(20):
        found = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(layer(x))
        torch.cuda.synchronize()
        for y, expected in zip(found, wanted, strict=True):
            assert np.array_equal(y.float().cpu().numpy(), expected.float().cpu().numpy())
