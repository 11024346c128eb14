"""Weight-only layers against the oracle, within the bound that float32 sums and 16-bit outputs allow."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.canonical import CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import random_weight
from omniplat.errors import InvalidCheckpointError, UnsupportedCombinationError
from omniplat.layer import LayerSpec
from omniplat.portable.decoded import DECODED_RESIDENT
from omniplat.portable.weight_only import PortableLinear
from omniplat.portable.word_weights import decode_form, dequantized
from omniplat.portable.words import from_words, to_words
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import to_tensor, to_torch
from omniplat.scheme import Scheme
from tests.support.triton import TRITON_DEVICE, needs_cuda, needs_triton

CAPABILITY = Capability("portable_linear", "linear", ("*",), ("a16",), executes="a16")
SCHEMES = (
    *("mxfp4", "mxfp8", "nvfp4", "nf4-b64", "fp4bnb-b64", "nf4-b128"),
    *("fp8-tensor", "fp8-channel", "fp8-g128", "fp8-block128x128", "fp8-block64x64", "fp8-block64x128"),
    *(f"{sign}int{bits}-{tail}" for sign in ("", "u") for bits in (4, 8) for tail in ("channel", "g32", "g64", "g128")),
    *("int4-g96", "uint4-g16", "int8-tensor", "mxfp4-dual"),
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
each_scheme = pytest.mark.parametrize("weight_id", SCHEMES)


def weight_of(weight_id: str, n: int = 80, k: int = 0, **extra: np.ndarray) -> CanonicalWeight:
    """K is 384 unless given: whole groups of every scheme here, and no whole blocks of words for some."""
    scheme = Scheme.parse(f"{weight_id}/a16")
    weight = random_weight(scheme, n, k or 384, np.random.default_rng(len(weight_id)))
    return replace(weight, tensors={**weight.tensors, **extra})


def layer_of(weight: CanonicalWeight, device: str = "cpu") -> QuantLinear:
    spec = LayerSpec("layer", "linear", weight.out_features, weight.in_features, weight.scheme)
    kernel = PortableLinear()
    return QuantLinear(spec, kernel, kernel.prepare(to_torch(weight, device=torch.device(device)), spec))


def check(weight: CanonicalWeight, y: torch.Tensor, x: torch.Tensor, dtype: str) -> None:
    values = x.cpu().to(torch.float32).numpy().reshape(-1, weight.in_features)
    wanted = expected.linear(values, weight, CAPABILITY, dtype)
    found = y.cpu().to(torch.float64).numpy().reshape(wanted.y.shape)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)


def in_triton(layer: QuantLinear, x: torch.Tensor, slices: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The layer by Triton's form, also where the operator would take the plain one."""
    from omniplat.portable.weight_only_triton import Tile, weight_only_product

    tensors = dict(layer.named_buffers())
    form = decode_form(layer.config.form)
    # the interpreter cuts numbers off where devices round them to bf16
    y = torch.empty(len(x), form.out_features, dtype=torch.float32, device=x.device)
    optional = (tensors.get(role) for role in ("zero", "row_scale"))
    weight_only_product(x, tensors["words"], tensors.get("table"), tensors["scale"], *optional, bias, y, form,
                        Tile(32, 16, slices, 4, 2))  # fmt: skip
    return y


@each_scheme
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_the_plain_form(weight_id: str, dtype: str) -> None:
    weight = weight_of(weight_id)
    layer = layer_of(weight)
    torch.manual_seed(0)
    for shape in ((3, 384), (2, 5, 384), (384,)):
        x = torch.randn(shape).to(DTYPES.get(dtype, torch.float32))
        y = layer(x)
        assert y.shape == (*shape[:-1], 80)
        assert y.dtype == x.dtype
        check(weight, y, x, dtype)
    assert layer(torch.empty(0, 384)).shape == (0, 80)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@each_scheme
@pytest.mark.parametrize(("dtype", "slices"), [("bf16", 0), ("f16", 2)])
def test_the_triton_form(weight_id: str, dtype: str, slices: int, device: str) -> None:
    """80 rows and 5 tokens fill no tile."""
    weight = weight_of(weight_id)
    x = torch.randn(5, 384, device=device).to(DTYPES[dtype])
    check(weight, in_triton(layer_of(weight, device), x, slices), x, dtype)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@pytest.mark.parametrize("weight_id", [*SCHEMES, "uint4-g64 with fractions"])
@pytest.mark.parametrize(("n", "k"), [(80, 384), (33, 1152)])
def test_the_weight_decoded_once(weight_id: str, n: int, k: int, device: str) -> None:
    """In float32 every operation is the plain form's, in its order; codes of tables are rounded to bf16 before."""
    from omniplat.portable.decode_triton import decoded

    name, *fractions = weight_id.split(" with ")
    zero = np.random.default_rng(0).uniform(0, 15, (n, k // 64)).astype(np.float32)
    layer = layer_of(weight_of(name, n, k, **({"zero_point": zero} if fractions else {})), device)
    tensors, form = dict(layer.named_buffers()), decode_form(layer.config.form)
    optional = (tensors.get(role) for role in ("zero", "row_scale"))
    held = tensors["words"], tensors["scale"], *optional, form
    found = decoded(held[0], tensors.get("table"), *held[1:], torch.float32)
    # the interpreter cuts numbers off where devices round them to bf16
    rounded = 2**-7 if form.element in ("nf4", "fp4_bnb") else 0.0
    torch.testing.assert_close(found, dequantized(*held), rtol=rounded, atol=0.0)


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
@pytest.mark.parametrize(("weight_id", "k"), [("mxfp4", 160), ("nvfp4", 80), ("int4-g32", 96), ("mxfp8", 32),
                                             ("uint4-channel", 16), ("uint8-channel", 8)])  # fmt: skip
@pytest.mark.parametrize("slices", [0, 2])
def test_columns_that_fill_no_block(weight_id: str, k: int, slices: int, device: str) -> None:
    weight = weight_of(weight_id, 33, k)
    x = torch.randn(17, k, device=device).bfloat16()
    check(weight, in_triton(layer_of(weight, device), x, slices), x, "bf16")


@pytest.mark.parametrize(
    ("form", "device"), [("plain", "cpu"), pytest.param("triton", TRITON_DEVICE, marks=needs_triton)]
)
def test_zero_points_that_are_fractions(form: str, device: str) -> None:
    zero = np.random.default_rng(0).uniform(0, 15, (80, 6)).astype(np.float32)
    weight = weight_of("uint4-g64", zero_point=zero)
    layer = layer_of(weight, device)
    x = torch.randn(5, 384, device=device).bfloat16()
    check(weight, layer(x) if form == "plain" else in_triton(layer, x, 2), x, "bf16")


@pytest.mark.parametrize("device", [pytest.param(TRITON_DEVICE, marks=needs_triton)])
def test_bias_is_added_before_the_one_rounding(device: str) -> None:
    bias = np.linspace(90, 110, 80).astype(ml_dtypes.bfloat16)
    weight = weight_of("mxfp4", bias=bias)
    x = torch.randn(5, 384, device=device).bfloat16()
    check(weight, in_triton(layer_of(weight, device), x, 2, bias=to_tensor(bias).to(device)), x, "bf16")


@needs_cuda
@each_scheme
@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 5), ("f16", 200), ("bf16", 65)])
def test_the_operator_on_cuda(weight_id: str, dtype: str, rows: int) -> None:
    weight = weight_of(weight_id, 272, 1152)
    x = torch.randn(rows, 1152, device="cuda").to(DTYPES[dtype])
    check(weight, layer_of(weight, "cuda")(x), x, dtype)
    wide = torch.randn(rows, 2304, device="cuda").to(DTYPES[dtype])[:, ::2]
    check(weight, layer_of(weight, "cuda")(wide), wide, dtype)


@needs_cuda
def test_a_graph_replays() -> None:
    layer = layer_of(weight_of("mxfp4"), "cuda")
    x = torch.randn(17, 384, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(17, 384, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g128", "fp8-channel"])
def test_the_operator_is_well_registered(weight_id: str) -> None:
    layer = layer_of(weight_of(weight_id))
    held = dict(layer.named_buffers())
    optional = (held.get(role) for role in ("zero", "row_scale", "table", "pre_scale"))
    arguments = (torch.randn(3, 384), held["words"], held["scale"], *optional, None, layer.config.form, torch.float32)
    torch.library.opcheck(torch.ops.omniplat.weight_only_linear, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 1):
        x = torch.randn(rows, 384).bfloat16()
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)


def test_smoothing_is_applied() -> None:
    weight = weight_of("int4-g128", pre_scale=np.exp2(np.arange(384) % 5 - 2).astype(np.float32))
    x = torch.randn(5, 384).bfloat16()
    check(weight, layer_of(weight)(x), x, "bf16")


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from([("fp4_e2m1", 4), ("fp8_e4m3", 8), ("nf4", 4), ("int8", 8)]),
    depth=st.sampled_from([16, 32, 64]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)
def test_words_hold_every_code(form: tuple[str, int], depth: int, rows: int, columns: int, seed: int) -> None:
    element, bits = form
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, (rows, columns)).astype(np.uint8))
    words = to_words(codes, element, bits, depth)
    assert words.shape[1] == -(-columns // (16 // bits * depth)) * depth
    assert torch.equal(from_words(words, element, bits, depth, columns), codes)


@pytest.mark.parametrize("weight_id", ["mxfp4", "fp8-channel", "int4-g128", "int8-g64", "nvfp4", "mxfp8", "mxfp4-dual"])
def test_what_is_kept(weight_id: str) -> None:
    """Codes and scales take what they take in the file, or what is declared; one number for each row aside."""
    weight = weight_of(weight_id, n=96, k=1536)
    stored = sum(weight.tensors[role].nbytes for role in ("codes", "scale", "scale2") if role in weight.tensors)
    kept = (dict(DECODED_RESIDENT).get(weight_id, 1.0) - 1) * stored
    assert layer_of(weight).nbytes == pytest.approx(weight.nbytes + kept, abs=4 * 96)


def test_nan_codes_are_refused() -> None:
    weight = weight_of("fp8-channel")
    codes = weight.tensors["codes"].copy()
    codes.view(np.uint8)[3, 5] = 0xFF
    with pytest.raises(InvalidCheckpointError, match="holds NaN"):
        layer_of(replace(weight, tensors={**weight.tensors, "codes": codes}))


def dual_of(level0: float, byte: int, code: int) -> CanonicalWeight:
    """Rows whose second group has these scales, and this code everywhere."""
    weight = weight_of("mxfp4-dual", n=16, k=1024)
    codes, scale, scale2 = (weight.tensors[role].copy() for role in ("codes", "scale", "scale2"))
    codes[:, 16:32], scale[:, 1], scale2[:, 0] = code | code << 4, byte, level0
    scale[:, 2:16], codes[:, 32:256] = 127, 0
    scale[:, 0], codes[:, :16] = 127, 0
    return weight_of("mxfp4-dual", 16, 1024, codes=codes, scale=scale, scale2=scale2)


#: Two levels of scales, and whether their product is a normal float32.
LEVELS = [
    *((1.5, 254, True), (1.99, 1, True), (2.0**-126, 127, True), (2.0**-149, 254, True), (0.0, 254, True)),
    *((1.0, 0, False), (2.0**-126, 126, False), (2.0, 254, False), (3e38, 254, False), (2.0**-149, 149, False)),
]


@pytest.mark.parametrize(("level0", "byte", "normal"), LEVELS)
def test_two_levels_of_scales_are_held_exactly_or_refused(level0: float, byte: int, normal: bool) -> None:
    weight = dual_of(level0, byte, code=2)
    if not normal:
        with pytest.raises(InvalidCheckpointError, match="leaves float32's normal range"):
            layer_of(weight)
        return
    held = layer_of(weight).get_buffer("scale")[:, 1].double().numpy()
    assert np.array_equal(held, np.full(16, float(np.float32(level0)) * 2.0 ** (byte - 127)))


@pytest.mark.parametrize("code", [0, 8])
@pytest.mark.parametrize(("level0", "byte", "normal"), LEVELS)
def test_scales_of_zeros_may_be_anything_finite(level0: float, byte: int, normal: bool, code: int) -> None:
    weight = dual_of(level0, byte, code)
    x = torch.randn(3, 1024).bfloat16()
    check(weight, layer_of(weight)(x), x, "bf16")


@pytest.mark.parametrize(("level0", "byte"), [(np.nan, 127), (np.inf, 127), (1.0, 255)])
@pytest.mark.parametrize("code", [0, 2])
def test_scales_that_are_not_finite_are_refused(level0: float, byte: int, code: int) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"layer.*a scale is (NaN|not finite)"):
        layer_of(dual_of(level0, byte, code))


@pytest.mark.parametrize(
    "weight_id",
    [
        *("int3-g128", "mxfp6e2m3", "fp8e5m2-channel", "svdq-int4-g64", "gguf-q4_0", "int4-g8"),
        *("mxint8", "mxint4", "int8-block128x128", "int4-tensor", "fp8-block64x32"),
    ],
)
def test_what_is_not_decoded_is_refused(weight_id: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match="needs"):
        layer_of(weight_of(weight_id, k=1024))


def test_reordered_columns_are_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="no roles but"):
        layer_of(weight_of("int4-g128", group_index=np.arange(384, dtype=np.int32) % 3))
