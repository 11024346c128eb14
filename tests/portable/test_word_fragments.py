"""Products from fragments, on NVIDIA's devices: which weights they take, that they compile, and what they compute.

Gluon has no interpreter: `tests.support.gluon` runs the kernel's own source, wherever Triton has Gluon. On a device the
operator runs what was compiled of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.conformance.weights import random_weight, stack
from omniplat.oracle.moe import expert_of
from omniplat.portable.quantize import has_triton
from omniplat.portable.routing import sort_by_expert
from omniplat.portable.word_weights import WordForm, form_of, word_tensors
from omniplat.portable.words import parts_of
from omniplat.runtime.tensors import to_tensor, to_torch
from omniplat.scheme import Scheme
from tests.portable.test_weight_only import DTYPES, SCHEMES, check, layer_of, weight_of
from tests.support.compile_for import compiled
from tests.support.gluon import Interpreted
from tests.support.routing import tiles_of
from tests.support.triton import needs_cuda

if TYPE_CHECKING:
    from omniplat.portable.weight_only_triton import ExpertTiles, FragmentTile

needs_tested_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
interpreted = pytest.mark.usefixtures("fragments_on_the_cpu")
CPU = torch.device("cpu")
#: Rows of a weight: no multiple of 32, of 48 nor of a block.
OUT = 80
#: Columns that are whole units for every warp, and those that are not.
WHOLE, UNEVEN = 2048, 1152
#: Schemes that are never taken: of groups that units of columns do not divide, or of less than a part.
NEVER = ("int4-g96", "uint4-g16")
TAKEN = tuple(weight_id for weight_id in SCHEMES if weight_id not in NEVER)
#: Kinds of scales: packed ones of parts and of their halves, none but those of rows; codes of tables.
TILED = ("mxfp4", "nvfp4", "fp8-channel", "nf4-b64")
#: And of groups, within a unit or of a whole one, with zero points, and of blocks.
KINDS = (*TILED, "mxfp8", "uint4-g32", "uint4-g128", "fp8-block64x64")


@pytest.fixture
def fragments_on_the_cpu() -> Iterator[None]:
    """Fragments are taken for tensors of the CPU, too, and the kernel's source is run."""
    pytest.importorskip("triton.experimental.gluon", reason="no Triton that has Gluon is installed")
    from omniplat.portable import weight_only_triton, word_decode_triton
    from omniplat.portable.word_fragments_gluon import fragments

    with ExitStack() as patches:

        def put(module: object, name: str, found: object) -> None:
            patches.enter_context(patch.object(module, name, found))

        for module in (weight_only_triton, word_decode_triton):
            put(module, "computes_in_pairs", lambda device: True)
        put(weight_only_triton, "is_tested", lambda: True)
        put(weight_only_triton, "_fragments", lambda: Interpreted(fragments))
        # nothing that these tests find is to be remembered for others
        for name in ("takes_fragments", "tile_of", "_launch_of"):
            put(weight_only_triton, name, getattr(weight_only_triton, name).__wrapped__)
        yield


@dataclass(frozen=True)
class Held:
    """The buffers of a weight, or of experts', and their form."""

    form: WordForm
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, weight: CanonicalWeight, experts: int = 0) -> Held:
        held = to_torch(weight, experts=experts)
        form = form_of(held)
        return cls(form, word_tensors(held, form, "layer") | {r: t for r, t in held.tensors.items() if r == "bias"})

    def zero(self) -> str:
        from omniplat.portable.word_decode_triton import kind_of_zero

        return kind_of_zero(self.tensors.get("zero"))

    def is_taken(self, dtype: str) -> bool:
        from omniplat.portable.weight_only_triton import takes_fragments

        return takes_fragments(self.form, self.form.in_features, DTYPES[dtype], self.zero(), CPU)

    def tile(self, tokens: int, dtype: str, out_features: int = OUT) -> FragmentTile:
        """What is chosen for so many tokens, and for so many rows of the weight."""
        from omniplat.portable.weight_only_triton import FragmentTile, tile_of

        tile = tile_of(tokens, replace(self.form, out_features=out_features), DTYPES[dtype], self.zero(), CPU)
        assert isinstance(tile, FragmentTile)
        return tile

    def product(self, x: torch.Tensor, tile: FragmentTile, tiles: ExpertTiles | None = None) -> torch.Tensor:
        """NaN where nothing is written."""
        from omniplat.portable.weight_only_triton import weight_only_product

        rows = len(x) if tiles is None else len(tiles.rows)
        y = torch.full((rows, self.form.out_features), torch.nan, dtype=x.dtype)
        buffers = (self.tensors.get(role) for role in ("table", "scale", "zero", "row_scale", "bias"))
        weight_only_product(x, self.tensors["words"], *buffers, y, self.form, tile, tiles)
        return y


def tokens_of(rows: int, columns: int, dtype: str = "bf16") -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(DTYPES[dtype])


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


@interpreted
def test_what_they_take() -> None:
    from omniplat.portable.weight_only_triton import takes_fragments

    def taken(form: WordForm, dtype: str = "bf16", zero: str = "", columns: int = 1152) -> bool:
        return takes_fragments(form, columns, DTYPES[dtype], zero, CPU)

    form = Held.of(weight_of("mxfp4", OUT, 1152)).form
    assert taken(form)
    # eight columns are one load, and tiles of rows are taken whole
    assert taken(form, columns=1088)
    assert not taken(form, columns=1092)
    assert not taken(replace(form, out_features=72))
    assert not taken(form, "f16")
    assert not taken(form, zero="fraction")
    assert not taken(replace(form, depth=16))


@interpreted
@pytest.mark.parametrize("columns", [8, 16, 24, 32, 40, 64, 96, 128, 256])
def test_groups_are_whole_parts(columns: int) -> None:
    """A group that is all columns of a narrow layer may be less: products of a part have one scale."""
    from omniplat.portable.weight_only_triton import takes_fragments

    for weight_id in ("int4-g32", "uint4-g64", "uint4-channel", "uint8-channel", "fp8-g128"):
        form = Held.of(weight_of(weight_id, 32, 256)).form
        group = columns if weight_id.endswith("channel") else form.group
        form = replace(form, group=group, in_features=columns)
        zero = "integer" if weight_id.startswith("u") else ""
        for dtype in DTYPES.values():
            whole = group in (32, 64) or group % (32 * parts_of(form.bits)) == 0
            assert takes_fragments(form, columns, dtype, zero, CPU) == whole, weight_id


@interpreted
@pytest.mark.parametrize(
    ("dtype", "left_out"),
    [
        ("bf16", NEVER),
        # scales that are held as bf16, and tables of it, make no f16
        ("f16", (*NEVER, "mxfp4", "mxfp8", "nvfp4", "nf4-b64", "nf4-b128", "fp4bnb-b64")),
    ],
)
def test_which_schemes_they_take(dtype: str, left_out: tuple[str, ...]) -> None:
    taken = {weight_id for weight_id in SCHEMES if Held.of(weight_of(weight_id, OUT, UNEVEN)).is_taken(dtype)}
    assert taken == set(SCHEMES) - set(left_out)


@interpreted
@pytest.mark.parametrize(
    ("weight_id", "rows", "columns"),
    [
        *((weight_id, rows, columns) for weight_id in TAKEN for rows, columns in ((5, WHOLE), (12, UNEVEN))),
        *(
            (weight_id, rows, columns)
            for weight_id in KINDS
            for rows, columns in ((1, UNEVEN), (20, WHOLE), (40, UNEVEN))
        ),
    ],
)
def test_against_the_oracle(weight_id: str, rows: int, columns: int) -> None:
    """In bf16 and in f16, where they are taken. Weights of NVFP4 and of channels have scales of rows, others none."""
    weight = weight_of(weight_id, OUT, columns)
    held = Held.of(weight)
    dtypes = [dtype for dtype in DTYPES if held.is_taken(dtype)]
    assert dtypes
    for dtype in dtypes:
        x = tokens_of(rows, columns, dtype)
        check(weight, held.product(x, held.tile(rows, dtype)), x, dtype)


@interpreted
@pytest.mark.parametrize("out_features", [OUT, 8192])
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("weight_id", [*TILED, "mxfp8", "int4-g32", "uint4-g64", "uint8-g32"])
def test_every_tile_of_a_product(weight_id: str, tokens: int, out_features: int) -> None:
    """Those of wide weights, too; the last tile of tokens is not full, and that of rows rarely is."""
    weight = weight_of(weight_id, OUT, UNEVEN)
    held = Held.of(weight)
    x = tokens_of(tokens + 5, UNEVEN)
    check(weight, held.product(x, held.tile(tokens, "bf16", out_features)), x, "bf16")


@interpreted
@pytest.mark.parametrize("tokens_ahead", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(16, 1024), (48, 1152), (48, 1536), (48, 384), (32, 128)])
def test_tiles_of_the_sweep(rows: int, columns: int, ahead: int, tokens_ahead: bool) -> None:
    """Four warps have two or three units each, one has none or all but one have none."""
    from omniplat.portable.weight_only_triton import FragmentTile

    weight = weight_of("uint4-g64", OUT, columns)
    x = tokens_of(12, columns)
    check(weight, Held.of(weight).product(x, FragmentTile(rows, 16, 4, ahead, tokens_ahead)), x, "bf16")


@interpreted
def test_every_kind_of_weight_has_its_tiles() -> None:
    """Which are those of the table, all of them: a tile has no more tokens than it is chosen for."""
    from omniplat.portable.weight_only_triton import FRAGMENT_TILES

    taken = [Held.of(weight_of(weight_id, OUT, UNEVEN)) for weight_id in TAKEN]
    chosen = {held.tile(tokens, "bf16", out) for held in taken for tokens in (8, 16, 32, 64) for out in (OUT, 8192)
              if held.is_taken("bf16")}  # fmt: skip
    assert chosen == {tile for tiles in FRAGMENT_TILES.values() for tile in tiles}
    for tiles in FRAGMENT_TILES.values():
        assert all(tile.tokens <= most for tile, most in zip(tiles, (8, 16, 32, 64), strict=True))


@interpreted
@pytest.mark.parametrize("weight_id", ["mxfp4", "nvfp4", "uint4-g32", "mxfp8", "fp8-channel", "nf4-b32", "uint8-g32"])
@pytest.mark.parametrize("columns", [992, 96])
def test_columns_that_fill_no_unit(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, OUT, columns)
    held = Held.of(weight)
    for rows in (5, 20):
        x = tokens_of(rows, columns)
        check(weight, held.product(x, held.tile(rows, "bf16")), x, "bf16")


@interpreted
@pytest.mark.parametrize("weight_id", ["uint4-channel", "uint8-channel", "int4-channel", "fp8-channel"])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_layers_narrower_than_a_unit(weight_id: str, columns: int) -> None:
    """Those that are taken: zero points of a group that is no whole part are not."""
    weight = weight_of(weight_id, OUT, columns)
    held = Held.of(weight)
    assert held.is_taken("bf16") or (columns < 32 and held.zero())
    if held.is_taken("bf16"):
        x = tokens_of(5, columns)
        check(weight, held.product(x, held.tile(5, "bf16")), x, "bf16")


@interpreted
@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g64", "nvfp4"])
def test_bias_is_added_before_the_one_rounding(weight_id: str) -> None:
    weight = weight_of(weight_id, OUT, UNEVEN, bias=np.linspace(90, 110, OUT).astype(ml_dtypes.bfloat16))
    held = Held.of(weight)
    for rows in (5, 20):
        x = tokens_of(rows, UNEVEN)
        for tile in (held.tile(rows, "bf16"), held.tile(rows, "bf16", 8192)):
            check(weight, held.product(x, tile), x, "bf16")


@interpreted
@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g64", "fp8-channel"])
def test_rows_with_gaps(weight_id: str, first: int) -> None:
    """What lies between rows is not read; rows that are not aligned are copied."""
    weight = weight_of(weight_id, OUT, UNEVEN)
    held = Held.of(weight)
    x = tokens_of(5, UNEVEN + 48)[:, first : first + UNEVEN]
    check(weight, held.product(x, held.tile(5, "bf16")), x, "bf16")


@interpreted
@pytest.mark.parametrize(
    ("weight_id", "tokens", "columns"),
    [*product(KINDS, (16, 32), (256,)), *product(("mxfp4", "nvfp4", "nf4-b64", "uint4-g32"), (8,), (192,))],
)
def test_by_expert(weight_id: str, tokens: int, columns: int) -> None:
    """Rows of every expert, of nobody, and of an expert without rows, whose tiles are empty."""
    from omniplat.portable.weight_only_triton import FragmentTile, tile_of_experts

    experts, rng = 4, np.random.default_rng(0)
    biases = rng.standard_normal((experts, OUT)).astype(np.float32)
    weights = [random_weight(Scheme.parse(f"{weight_id}/a16"), OUT, columns, rng) for _ in range(experts)]
    weight = stack([replace(w, tensors={**w.tensors, "bias": b}) for w, b in zip(weights, biases, strict=True)])
    held = Held.of(weight, experts)
    tile = tile_of_experts(tokens, held.form, torch.bfloat16, held.zero(), CPU)
    assert isinstance(tile, FragmentTile)
    ids = torch.tensor([[0, 3], [3, -1], [0, 0], [3, 1]] * 5)
    order = sort_by_expert(ids, None, experts)
    tiles = tiles_of(order, tokens)
    assert (tiles.first == tiles.end).any()
    x = tokens_of(len(ids), columns)
    y = held.product(x, tile, tiles)
    ends = [0, *order.ends.tolist()]
    for expert, (first, end) in enumerate(pairwise(ends)):
        check(expert_of(weight, expert), y[first:end], x[order.rows[first:end]], "bf16")
    assert y[ends[-1] :].isnan().all()


@interpreted
def test_what_a_device_would_not_show_is_an_error() -> None:
    """The memory behind a tensor belongs to others; a load of 16 bytes from between them stops the device."""
    from omniplat.portable import weight_only_triton

    held = Held.of(weight_of("mxfp4", OUT, UNEVEN))
    x, tile = tokens_of(5, UNEVEN), held.tile(5, "bf16")
    for role in ("words", "scale"):
        short = Held(held.form, held.tensors | {role: held.tensors[role][:-1].clone()})
        with pytest.raises(IndexError, match="outside"):
            short.product(x, tile)
    narrow = Held(held.form, held.tensors | {"words": held.tensors["words"][:, :-32]})
    with pytest.raises(IndexError, match="between rows"):
        narrow.product(x, tile)
    with patch.object(weight_only_triton, "_aligned", lambda rows: rows), pytest.raises(ValueError, match="16 bytes"):
        held.product(tokens_of(5, UNEVEN + 8)[:, 4:-4], tile)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 12, 30, 60])
@pytest.mark.parametrize("weight_id", SCHEMES)
def test_the_operator_on_cuda(weight_id: str, rows: int) -> None:
    """1152 columns are no whole number of units for each warp."""
    weight = weight_of(weight_id, 272, 1152)
    x = torch.randn(rows, 1152, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["mxfp4", "nvfp4", "uint4-g32", "mxfp8", "fp8-channel", "nf4-b32", "uint8-g32"])
@pytest.mark.parametrize("columns", [2880, 992, 96])
def test_columns_that_fill_no_unit_on_cuda(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 48, columns)
    x = torch.randn(5, columns, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["uint4-channel", "uint8-channel", "int4-channel", "fp8-channel"])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
def test_layers_narrower_than_a_unit_on_cuda(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 48, columns)
    x = torch.randn(5, columns, device="cuda").bfloat16()
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
@pytest.mark.parametrize(
    "weight_id", ["int4-g128", "uint4-g32", "uint8-g64", "fp8-channel", "nvfp4", "mxfp4", "mxfp4-dual"]
)
@pytest.mark.parametrize("columns", [1024, 1152])
def test_f16_on_cuda(weight_id: str, columns: int) -> None:
    weight = weight_of(weight_id, 272, columns)
    x = torch.randn(12, columns, device="cuda").half()
    check(weight, layer_of(weight, "cuda")(x), x, "f16")


@needs_cuda
@pytest.mark.parametrize("weight_id", ["mxfp4", "uint4-g64", "fp8-channel"])
def test_rows_that_are_not_aligned_on_cuda(weight_id: str) -> None:
    weight = weight_of(weight_id, 272, 1152)
    x = torch.randn(5, 1200, device="cuda").bfloat16()[:, 3:1155]
    check(weight, layer_of(weight, "cuda")(x), x, "bf16")


@needs_cuda
def test_bias_is_added_before_the_one_rounding_on_cuda() -> None:
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
