"""Calls that are wrong in one way each: refused as AITER refuses them, or recorded where it would not notice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from omniplat_rocm.spec import SPEC
from packaging.requirements import Requirement
from safetensors.torch import load, save

from omniplat.emulation import Emulation, emulate
from omniplat.emulation.rocm import VENDOR
from omniplat.emulation.schemas import of_version

FP8, FNUZ, FP4 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
BF16, F16, F32, U8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32
M, N, K, E, INNER = 4, 64, 256, 2, 256
Arguments = dict[str, Any]


@pytest.fixture
def gfx950() -> Emulation:
    with emulate("rocm:gfx950") as emulation:
        yield emulation


@pytest.fixture
def gfx942() -> Emulation:
    with emulate("rocm:gfx942") as emulation:
        yield emulation


def function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def some_bytes(*shape: int, high: int = 100) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=U8, generator=torch.Generator().manual_seed(sum(shape)))


def scales(rows: int, groups: int) -> torch.Tensor:
    """Shuffled and padded."""
    return function("aiter.utility.fp4_utils.e8m0_shuffle")(some_bytes(rows, groups, high=4) + 120)


def tiles(*shape: int, dtype: torch.dtype = U8) -> torch.Tensor:
    return function("aiter.ops.shuffle.shuffle_weight")(some_bytes(*shape).view(dtype))


# -- right calls ----------------------------------------------------------------------------------------------------


def gemm_a4w4() -> Arguments:
    return {
        "A": some_bytes(M, K // 2).view(FP4), "B": tiles(N, K // 2).view(FP4), "A_scale": scales(M, K // 32),
        "B_scale": scales(N, K // 32), "dtype": BF16,
    }  # fmt: skip


def gemm_afp4wfp4() -> Arguments:
    return {
        "x": some_bytes(M, K // 2), "w": some_bytes(N, K // 2), "x_scales": some_bytes(M, K // 32),
        "w_scales": some_bytes(N, K // 32), "dtype": F16,
    }  # fmt: skip


def gemm_a8wfp4() -> Arguments:
    return {
        "x": some_bytes(M, K).view(FP8), "w": some_bytes(N, K // 2), "y": torch.empty(M, N, dtype=BF16),
        "x_scales": torch.ones(M, 1), "w_scales": some_bytes(N, K // 32), "dtype": BF16,
    }  # fmt: skip


def gemm_a8w8() -> Arguments:
    return {
        "XQ": some_bytes(M, K).view(FP8), "WQ": some_bytes(N, K).view(FP8), "x_scale": torch.ones(M, 1),
        "w_scale": torch.ones(1, N), "bias": torch.ones(N, dtype=BF16),
    }  # fmt: skip


def gemm_a8w8_bpreshuffle() -> Arguments:
    return {
        "XQ": some_bytes(M, K).view(FP8), "WQ": tiles(N, K, dtype=FP8), "x_scale": torch.ones(M, 1),
        "w_scale": torch.ones(1, N),
    }  # fmt: skip


def gemm_a8w8_blockscale() -> Arguments:
    return {
        "XQ": some_bytes(M, K).view(FP8), "WQ": some_bytes(2 * N, K).view(FP8), "x_scale": torch.ones(M, K // 128),
        "w_scale": torch.ones(1, K // 128),
    }  # fmt: skip


def fused_moe() -> Arguments:
    """MXFP4."""
    aiter = import_module("aiter")
    w1, w2 = (tiles(E, rows, columns // 2).view(FP4) for rows, columns in ((2 * INNER, K), (K, INNER)))
    w1.is_shuffled = w2.is_shuffled = True
    return {
        "hidden_states": torch.ones(M, K, dtype=BF16), "w1": w1, "w2": w2, "topk_weight": torch.ones(M, 1),
        "topk_ids": torch.zeros(M, 1, dtype=I32), "quant_type": aiter.QuantType.per_1x32,
        "w1_scale": scales(E * 2 * INNER, K // 32), "w2_scale": scales(E * K, INNER // 32),
    }  # fmt: skip


def fused_moe_mxfp8() -> Arguments:
    """Gate and up in turns."""
    aiter = import_module("aiter")
    shuffle = import_module("aiter.ops.shuffle")
    return {
        "hidden_states": torch.ones(M, K, dtype=BF16), "topk_weight": torch.ones(M, 1),
        "w1": shuffle.shuffle_weight_a16w4(some_bytes(E, 2 * INNER, K).view(FP8), 16, True),
        "w2": shuffle.shuffle_weight_a16w4(some_bytes(E, K, INNER).view(FP8), 16, False),
        "topk_ids": torch.zeros(M, 1, dtype=I32), "quant_type": aiter.QuantType.per_1x32,
        "w1_scale": shuffle.shuffle_scale_a16w4(some_bytes(E * 2 * INNER, K // 32, high=4) + 120, E, True),
        "w2_scale": scales(E * K, INNER // 32), "gate_mode": "interleave",
    }  # fmt: skip


def shuffle_weight_a16w4() -> Arguments:
    return {"src": some_bytes(E, N, K), "NLane": 16, "gate_up": True}


def shuffle_scale_a16w4() -> Arguments:
    return {"src": some_bytes(E * N, K // 32), "experts_cnt": E, "gate_up": True}


def per_1x32_f4_quant_hip() -> Arguments:
    return {"x": torch.ones(M, K, dtype=BF16), "shuffle": True}


def per_1x32_mx_quant_hip() -> Arguments:
    return per_1x32_f4_quant_hip()


def get_hip_quant() -> Arguments:
    return {"qType": import_module("aiter").QuantType.per_1x32}


def dynamic_mxfp4_quant() -> Arguments:
    return {"x": torch.ones(M, K, dtype=BF16)}


def e8m0_shuffle() -> Arguments:
    return {"scale": some_bytes(N, K // 32)}


def shuffle_weight() -> Arguments:
    return {"x": some_bytes(N, K)}


PATHS = {
    "gemm_afp4wfp4": "aiter.ops.triton.gemm_afp4wfp4", "gemm_a8wfp4": "aiter.ops.triton.gemm_a8wfp4",
    "fused_moe": "aiter.fused_moe", "fused_moe_mxfp8": "aiter.fused_moe", "shuffle_weight": "aiter.ops.shuffle",
    "dynamic_mxfp4_quant": "aiter.ops.triton.quant", "e8m0_shuffle": "aiter.utility.fp4_utils",
    "shuffle_weight_a16w4": "aiter.ops.shuffle", "shuffle_scale_a16w4": "aiter.ops.shuffle",
}  # fmt: skip
FUNCTIONS = (
    gemm_a4w4, gemm_afp4wfp4, gemm_a8wfp4, gemm_a8w8, gemm_a8w8_bpreshuffle, gemm_a8w8_blockscale, fused_moe,
    fused_moe_mxfp8, get_hip_quant, per_1x32_f4_quant_hip, per_1x32_mx_quant_hip, dynamic_mxfp4_quant, e8m0_shuffle,
    shuffle_weight, shuffle_weight_a16w4, shuffle_scale_a16w4,
)  # fmt: skip


def function_of(make: Callable[[], Arguments]) -> Callable[..., Any]:
    """What a right call calls."""
    name = make.__name__
    return function(f"{PATHS.get(name, 'aiter')}.{name.removesuffix('_mxfp8')}")


def call(make: Callable[[], Arguments], **changed: Any) -> Any:
    return function_of(make)(**{**make(), **changed})


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_the_right_call_is_right(gfx950: Emulation, make: Callable[[], Arguments]) -> None:
    out = call(make)
    assert not gfx950.violations
    if isinstance(out, torch.Tensor) and out.is_floating_point() and out.element_size() == 2:
        assert bool(out.isfinite().all())


#: function, what is wrong, the changed arguments (made once AITER is there), part of the refusal
REFUSED: tuple[tuple[Callable[[], Arguments], str, Callable[[], Arguments], str], ...] = (
    (gemm_a4w4, "f16 output", lambda: {"dtype": F16}, "write bf16"),
    (gemm_a4w4, "fp8 weight", lambda: {"B": some_bytes(N, K // 2).view(FP8)}, "fp4x2"),
    (gemm_a4w4, "weight of another K", lambda: {"B": tiles(N, K).view(FP4)}, "A is"),
    (gemm_a4w4, "f32 scales", lambda: {"A_scale": torch.ones(M, K // 32)}, "e8m0"),
    (gemm_afp4wfp4, "fp4 as a carrier", lambda: {"x": some_bytes(M, K // 2).view(FP4)}, "uint8"),
    (gemm_afp4wfp4, "f32 output", lambda: {"dtype": F32}, "fp16 or bf16"),
    (gemm_afp4wfp4, "e8m0 as a carrier", lambda: {"w_scales": some_bytes(N, K // 32).view(torch.float8_e8m0fnu)}, "ui"),
    (gemm_a8wfp4, "scales not transposed", lambda: {"w_scales": some_bytes(K // 32, N)}, "Scale shapes"),
    (gemm_a8wfp4, "scale per tensor", lambda: {"x_scales": torch.ones(1, 1)}, "Scale shapes"),
    (gemm_a8wfp4, "output in f32", lambda: {"y": torch.empty(M, N)}, "y is written"),
    (gemm_a8w8, "FNUZ on gfx950", lambda: {"XQ": some_bytes(M, K).view(FNUZ)}, "int8/fp8"),
    (gemm_a8w8, "fp8 by int8", lambda: {"WQ": some_bytes(N, K).view(torch.int8)}, "int8/fp8"),
    (gemm_a8w8, "bias in f32", lambda: {"bias": torch.ones(N)}, "same dtype"),
    (gemm_a8w8, "scales of two dtypes", lambda: {"x_scale": torch.ones(M, 1, dtype=BF16)}, "same dtype"),
    (gemm_a8w8, "f32 output", lambda: {"dtype": F32, "bias": None}, "Unsupported"),
    (gemm_a8w8, "K of 24", lambda: {"XQ": some_bytes(M, 24).view(FP8), "WQ": some_bytes(N, 24).view(FP8)}, "not supp"),
    (gemm_a8w8, "N of 4", lambda: {"WQ": some_bytes(4, K).view(FP8), "w_scale": torch.ones(1, 4), "bias": None}, "not"),
    (gemm_a8w8_bpreshuffle, "bias", lambda: {"bias": torch.ones(N, dtype=BF16)}, "does not support bias"),
    (gemm_a8w8_bpreshuffle, "int8", lambda: {"WQ": tiles(N, K, dtype=torch.int8)}, "only support fp8"),
    (gemm_a8w8_bpreshuffle, "K of 128", lambda: {
        "XQ": some_bytes(M, 128).view(FP8), "WQ": tiles(N, 128, dtype=FP8)
    }, "Unsupported K"),
    (gemm_a8w8_blockscale, "shuffled", lambda: {"isBpreshuffled": True}, "preshuffle"),
    (gemm_a8w8_blockscale, "bias", lambda: {"bias": torch.ones(N)}, "bias"),
    (fused_moe, "int8 weights per 1x32", lambda: {
        "w1": tiles(E, 2 * INNER, K, dtype=torch.int8), "w2": tiles(E, K, INNER, dtype=torch.int8)
    },
     "weights of"),
    (fused_moe, "gate and up in turns", lambda: {"gate_mode": "interleave"}, "gate_mode"),
    (fused_moe, "experts that are shared", lambda: {"beta": 1.0}, "beta is not emulated"),
    (fused_moe_mxfp8, "FNUZ", lambda: {"w1": tiles(E, 2 * INNER, K, dtype=FNUZ)}, "weights of"),
    (fused_moe_mxfp8, "padded scales", lambda: {"w1_scale": scales(E * 2 * INNER + 1, K // 32)}, "w1_scale is"),
    (fused_moe_mxfp8, "scales of w2 without padding", lambda: {"w2_scale": some_bytes(E * K, 4)}, "w2_scale is"),
    (fused_moe_mxfp8, "f32 scales", lambda: {"w1_scale": torch.ones(E * 2 * INNER, K // 32)}, "e8m0"),
    (fused_moe_mxfp8, "K of 128", lambda: {
        "hidden_states": torch.ones(M, 128, dtype=BF16), "w1": tiles(E, 2 * INNER, 128, dtype=FP8),
        "w2": tiles(E, 128, INNER, dtype=FP8),
    }, "multiple of 256"),
    (fused_moe_mxfp8, "INNER of 64", lambda: {
        "w1": tiles(E, 128, K, dtype=FP8), "w2": tiles(E, K, 64, dtype=FP8),
    }, "multiple of 128"),
    (fused_moe, "f32 input", lambda: {"hidden_states": torch.ones(M, K)}, "out dtype"),
    (fused_moe, "ids in int64", lambda: {"topk_ids": torch.zeros(M, 1, dtype=torch.int64)}, "int32"),
    (fused_moe, "weights in bf16", lambda: {"topk_weight": torch.ones(M, 1, dtype=BF16)}, "f32"),
    (fused_moe, "scales not shuffled", lambda: {"w1_scale": some_bytes(E * 2 * INNER, 4)}, "w1_scale is"),
    (fused_moe, "no scales", lambda: {"w2_scale": None}, "missing"),
    (fused_moe, "INNER of 128", lambda: {
        "w1": tiles(E, 256, K // 2).view(FP4), "w2": tiles(E, K, 64).view(FP4), "w1_scale": scales(E * 256, K // 32),
    }, "multiple of 256"),
    (fused_moe, "mask of another count", lambda: {"expert_mask": torch.ones(3, dtype=I32)}, "expert_mask"),
    (fused_moe, "bias in bf16", lambda: {"bias1": torch.ones(E, 2 * INNER, dtype=BF16)}, "fp32"),
    *(
        (make, what, changed, problem)
        for make in (per_1x32_f4_quant_hip, per_1x32_mx_quant_hip)
        for what, changed, problem in (
            ("three dimensions", lambda: {"x": torch.ones(1, M, K, dtype=BF16)}, "two dimensions"),
            ("f32", lambda: {"x": torch.ones(M, K)}, "not implemented"),
            ("K of 48", lambda: {"x": torch.ones(M, 48, dtype=BF16)}, "divisible by 32"),
            ("a scale", lambda: {"scale": torch.ones(1)}, "static"),
            ("fp8", lambda: {"quant_dtype": FP8}, "unsupported quant_dtype"),
        )
    ),
    (get_hip_quant, "per token", lambda: {"qType": import_module("aiter").QuantType.per_Token}, "not emulated"),
    (dynamic_mxfp4_quant, "three dimensions", lambda: {"x": torch.ones(1, M, K, dtype=BF16)}, "unpack"),
    (dynamic_mxfp4_quant, "K of 62", lambda: {"x": torch.ones(M, 62, dtype=BF16)}, "% 2 == 0"),
    (e8m0_shuffle, "one dimension", lambda: {"scale": some_bytes(8)}, "2D"),
    (e8m0_shuffle, "f32 scales", lambda: {"scale": torch.ones(8, 8)}, "e8m0"),
    (shuffle_weight_a16w4, "8 rows of gate", lambda: {"src": some_bytes(E, 48, K)}, "invalid"),
    (shuffle_weight_a16w4, "32 bytes in a row", lambda: {"src": some_bytes(E, N, 32)}, "invalid"),
    (shuffle_weight_a16w4, "one expert", lambda: {"src": some_bytes(N, K)}, "unpack"),
    (shuffle_scale_a16w4, "by expert", lambda: {"src": some_bytes(E, N, K // 32)}, "2D"),
    (shuffle_scale_a16w4, "groups that are no tile", lambda: {"src": some_bytes(E * N, 4)}, "invalid"),
    (shuffle_weight, "N of 24", lambda: {"x": some_bytes(24, K)}, "24 % 16"),
    (shuffle_weight, "16 bytes in a row", lambda: {"x": some_bytes(N, 16)}, "16 % 32"),
    (shuffle_weight, "a view", lambda: {"x": some_bytes(K, N).t()}, "view size"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "changed", "problem"),
    [(make, changed, problem) for make, _, changed, problem in REFUSED],
    ids=[f"{make.__name__}: {what}" for make, what, _, _ in REFUSED],
)
def test_refused(
    gfx950: Emulation, make: Callable[[], Arguments], changed: Callable[[], Arguments], problem: str
) -> None:
    with pytest.raises((RuntimeError, TypeError), match=problem):
        call(make, **changed())


@pytest.mark.parametrize(
    "make",
    [
        gemm_a4w4, gemm_afp4wfp4, gemm_a8wfp4, fused_moe, fused_moe_mxfp8, per_1x32_f4_quant_hip, per_1x32_mx_quant_hip,
        dynamic_mxfp4_quant,
    ],
)  # fmt: skip
def test_gfx942_has_no_fp4(gfx942: Emulation, make: Callable[[], Arguments]) -> None:
    with pytest.raises(RuntimeError):
        call(make)


@pytest.mark.parametrize("make", [gemm_a8w8, gemm_a8w8_bpreshuffle, gemm_a8w8_blockscale])
def test_gfx942_has_its_own_fp8(gfx942: Emulation, make: Callable[[], Arguments]) -> None:
    arguments = make()
    with pytest.raises(RuntimeError):
        call(make)
    call(make, XQ=arguments["XQ"].view(FNUZ), WQ=arguments["WQ"].view(FNUZ))
    assert not gfx942.violations


#: function, rule, the changed arguments
RECORDED: tuple[tuple[Callable[[], Arguments], str, Callable[[], Arguments]], ...] = (
    (gemm_a4w4, "bias-dropped", lambda: {"bias": torch.ones(N)}),
    (gemm_a4w4, "bias-dropped", lambda: {"beta": 1.0}),
    (gemm_a4w4, "scales-not-shuffled", lambda: {"A_scale": some_bytes(M, K // 32)}),
    (gemm_a4w4, "scales-not-shuffled", lambda: {"B_scale": some_bytes(N, K // 32)}),
    (gemm_a4w4, "columns-not-256", lambda: {
        "A": some_bytes(M, 64).view(FP4), "B": tiles(N, 64).view(FP4), "A_scale": scales(M, 4),
        "B_scale": scales(N, 4),
    }),
    (gemm_a4w4, "rows-not-32", lambda: {"B": tiles(48, K // 2).view(FP4), "B_scale": scales(48, K // 32)}),
    (dynamic_mxfp4_quant, "mode-ignored", lambda: {"scaling_mode": "ceil"}),
    (gemm_afp4wfp4, "scale-shape", lambda: {"w_scales": some_bytes(K // 32, N)}),
    (gemm_a8w8, "scale-shape", lambda: {"x_scale": torch.ones(1, 1)}),
    (gemm_a8w8, "scale-shape", lambda: {"w_scale": torch.ones(2, 2 * N)[:, ::2]}),
    (gemm_a8w8_bpreshuffle, "scale-shape", lambda: {"w_scale": torch.ones(1, 1)}),
    (gemm_a8w8_blockscale, "scale-shape", lambda: {"x_scale": torch.ones(K // 128, M).t()}),
    (gemm_a8w8_blockscale, "scale-shape", lambda: {"w_scale": torch.ones(K // 128, 1)}),
    (fused_moe, "not-marked-shuffled", lambda: {"w1": tiles(E, 2 * INNER, K // 2).view(FP4)}),
    (fused_moe_mxfp8, "gate-mode", lambda: {"gate_mode": "separated"}),
    (fused_moe_mxfp8, "not-marked-shuffled", lambda: {"w1": some_bytes(E, 2 * INNER, K).view(FP8)}),
    (fused_moe_mxfp8, "bias-dropped", lambda: {"bias1": torch.ones(E, 2 * INNER)}),
    (fused_moe, "bias-dropped", lambda: {"bias2": torch.ones(E, K)}),
    (fused_moe, "id-out-of-range", lambda: {"topk_ids": torch.full((M, 1), -1, dtype=I32)}),
)  # fmt: skip


@pytest.mark.parametrize(("make", "rule", "changed"), RECORDED, ids=[f"{m.__name__}: {r}" for m, r, _ in RECORDED])
def test_recorded(
    gfx950: Emulation, make: Callable[[], Arguments], rule: str, changed: Callable[[], Arguments]
) -> None:
    call(make, **changed())
    assert rule in [violation.rule for violation in gfx950.violations]


#: product -> its weight's name, and a weight of the same values that is in no tiles
UNSHUFFLED: tuple[tuple[Callable[[], Arguments], str, Callable[[], torch.Tensor]], ...] = (
    (gemm_a4w4, "B", lambda: some_bytes(N, K // 2).view(FP4)),
    (gemm_a8w8_bpreshuffle, "WQ", lambda: some_bytes(N, K).view(FP8)),
)


@pytest.mark.parametrize(("make", "name", "plain"), UNSHUFFLED, ids=[make.__name__ for make, _, _ in UNSHUFFLED])
def test_an_unshuffled_weight_computes_something_else(
    gfx950: Emulation, make: Callable[[], Arguments], name: str, plain: Callable[[], torch.Tensor]
) -> None:
    """AITER does not notice. Its emulation records it."""
    right = call(make)
    assert not gfx950.violations
    assert not torch.equal(call(make, **{name: plain()}), right)
    assert [violation.rule for violation in gfx950.violations] == ["weight-not-shuffled"]


@pytest.mark.parametrize(("make", "name", "plain"), UNSHUFFLED, ids=[make.__name__ for make, _, _ in UNSHUFFLED])
def test_tiles_of_another_size_are_no_tiles(
    gfx950: Emulation, make: Callable[[], Arguments], name: str, plain: Callable[[], torch.Tensor]
) -> None:
    weight = function("aiter.ops.shuffle.shuffle_weight")(plain().view(U8), (32, 16))
    call(make, **{name: weight.view(plain().dtype)})
    assert [violation.rule for violation in gfx950.violations] == ["weight-not-shuffled"]


#: What happens to a weight between its preparation and a product. Each loses the attribute that AITER sets.
JOURNEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "moved": lambda weight: weight.to("cpu", copy=True),
    "viewed": lambda weight: weight.view(U8).view(-1).view(weight.shape).view(weight.dtype),
    "parameter": lambda weight: torch.nn.Parameter(weight.view(U8), requires_grad=False).data.view(weight.dtype),
    "saved and read": lambda weight: _saved_and_read(weight.view(U8)).view(weight.dtype),
}


def _saved_and_read(weight: torch.Tensor) -> torch.Tensor:
    return load(save({"weight": weight.clone()}))["weight"]


@pytest.mark.parametrize("journey", JOURNEYS.values(), ids=JOURNEYS)
@pytest.mark.parametrize(("make", "name", "plain"), UNSHUFFLED, ids=[make.__name__ for make, _, _ in UNSHUFFLED])
def test_tiles_are_known_after_a_copy(
    gfx950: Emulation, make: Callable[[], Arguments], name: str, plain: Callable[[], torch.Tensor],
    journey: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    weight = journey(make()[name])
    assert not hasattr(weight, "is_shuffled")
    call(make, **{name: weight})
    assert not gfx950.violations


def test_gate_and_up_that_do_not_lie_in_turns_compute_something_else(gfx950: Emulation) -> None:
    """The same, of weights and of scales."""
    right = call(fused_moe_mxfp8)
    assert not torch.equal(call(fused_moe_mxfp8, w1=tiles(E, 2 * INNER, K, dtype=FP8)), right)
    plain = some_bytes(E * 2 * INNER, K // 32, high=4) + 120
    unlike = function("aiter.ops.shuffle.shuffle_scale_a16w4")(plain, E, False)
    assert not torch.equal(call(fused_moe_mxfp8, w1_scale=unlike), right)
    assert not gfx950.violations


#: version -> an argument that it does not take yet
NEW_ARGUMENTS = (
    ("0.1.13.post1", fused_moe, "swiglu_limit", True),
    ("0.1.14", fused_moe, "swiglu_limit", False),
    ("0.1.18", fused_moe, "beta", True),
    ("0.1.19", fused_moe, "beta", False),
    ("0.1.19", fused_moe, "shared_w1", True),
    ("0.1.20.post1", fused_moe, "shared_w1", False),
    ("0.1.13.post1", gemm_a4w4, "apreshuffle", True),
    ("0.1.16", gemm_a4w4, "global_A_scale", True),
    ("0.1.17", gemm_a4w4, "apreshuffle", False),
    ("0.1.13.post1", shuffle_weight, "gate_up", True),
    ("0.1.14", shuffle_weight, "gate_up", False),
    ("0.1.16", shuffle_weight, "pad_k_to", True),
    ("0.1.17", shuffle_weight, "pad_k_to", False),
)


@pytest.mark.parametrize(("version", "make", "argument", "is_unknown"), NEW_ARGUMENTS)
def test_signatures_are_those_of_the_release(
    version: str, make: Callable[[], Arguments], argument: str, is_unknown: bool
) -> None:
    with emulate("rocm:gfx950", version=version):
        assert (argument not in inspect.signature(function_of(make)).parameters) == is_unknown
        if is_unknown:
            with pytest.raises(TypeError, match=argument):
                call(make, **{argument: None})


def test_mxfp8_experts_came_with_a_release() -> None:
    with emulate("rocm:gfx950", version="0.1.16"), pytest.raises(RuntimeError, match="weights of"):
        call(fused_moe_mxfp8)


@pytest.mark.parametrize("version", VENDOR.known)
def test_every_release_has_one_signature_of_each_function(version: str) -> None:
    names = [schema.qualified for schema in of_version(VENDOR.functions, version)]
    assert sorted(names) == sorted(set(names))
    assert {schema.qualified for schema in VENDOR.functions} - set(names) <= {"aiter::per_1x32_mx_quant_hip"}


def test_the_backend_takes_every_release_that_is_emulated() -> None:
    (range_,) = (Requirement(text).specifier for text in SPEC.distributions if Requirement(text).name == VENDOR.library)
    assert [version for version in VENDOR.known if not range_.contains(version)] == []


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_unknown_arguments_are_refused(gfx950: Emulation, make: Callable[[], Arguments]) -> None:
    with pytest.raises(TypeError, match="weight_shuffled"):
        call(make, weight_shuffled=True)


def test_every_function_has_wrong_calls() -> None:
    tables = {make.__name__.removesuffix("_mxfp8") for make, *_ in REFUSED}
    assert tables == {schema.name for schema in VENDOR.functions}
