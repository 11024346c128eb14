"""Products of quantized tokens with weights in 8 bits, in Triton: against float64, and exact where sums are."""

from __future__ import annotations

import pytest
import torch

from omniplat.portable.routing import sort_by_expert
from tests.support.routing import tiles_of
from tests.support.triton import TRITON_DEVICE, needs_triton

device = TRITON_DEVICE
pytestmark = needs_triton
#: Sums of 128 products in the 14 bits that FP8 units keep, then f32; under the interpreter all are f32.
UNIT = 128 * 2.0**-14 if device == "cuda" else 2.0**-17


def fp8_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.float8_e4m3fn)


def by_blocks(codes: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """float64 [N, K]: codes times the scales of blocks of `rows` by 128."""
    n, k = codes.shape
    return codes.double() * scale.double().repeat_interleave(rows, 0)[:n].repeat_interleave(128, 1)[:, :k]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 72, 384), (17, 200, 200), (130, 320, 256)])
@pytest.mark.parametrize("rows", [128, 64, 16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_fp8_in_blocks(m: int, n: int, k: int, rows: int, with_bias: bool) -> None:
    from omniplat.portable.scaled_product_triton import scaled_product, tile_of

    torch.manual_seed(m)
    for _ in range(2):  # on a device only the first call goes through Triton's binder
        x, codes = fp8_of(m, k), fp8_of(n, k)
        x_scale = torch.rand(-(-k // 128), m, device=device)
        scale = torch.rand(-(-n // rows), -(-k // 128), device=device)
        bias = torch.randn(n, device=device).bfloat16() if with_bias else None
        y = torch.empty(m, n, device=device)
        scaled_product(x, codes, x_scale, scale, bias, y, rows, tile_of(m))
        tokens, weight = by_blocks(x, x_scale.t(), 1), by_blocks(codes, scale, rows)
        wanted = tokens @ weight.t() + (0 if bias is None else bias.double())
        allowed = UNIT * (tokens.abs() @ weight.abs().t() + 1)
        assert bool(((y - wanted).abs() <= allowed).all())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 96), (17, 40, 256), (130, 200, 200)])
def test_int8_by_rows_is_exact(m: int, n: int, k: int) -> None:
    from omniplat.portable.scaled_product_triton import scaled_product, tile_of

    x, codes = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    x_scale, scale = torch.rand(m, device=device), torch.rand(n, device=device)
    y = torch.empty(m, n, device=device)
    scaled_product(x, codes, x_scale, scale, None, y, 0, tile_of(m))
    sums = (x.double() @ codes.double().t()).float()
    torch.testing.assert_close(y, sums * scale * x_scale[:, None], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("rows", [128, 64])
def test_by_expert(rows: int) -> None:
    """Rows of several experts, of nobody, and an expert without rows; the second tile of an expert, too."""
    from omniplat.portable.scaled_product_triton import scaled_product, tile_of

    experts, n, k = 5, 144, 256
    ids = torch.tensor([[0, 3], [3, -1], [1, 4], [3, 0]] * 9, device=device)
    order = sort_by_expert(ids, None, experts)
    x, codes = fp8_of(len(ids), k), fp8_of(experts, n, k)
    x_scale = torch.rand(2, len(ids), device=device)
    scale, bias = torch.rand(experts, -(-n // rows), 2, device=device), torch.randn(experts, n, device=device)
    y = torch.full((len(order.rows), n), torch.nan, device=device)
    scaled_product(x, codes, x_scale, scale, bias, y, rows, tile_of(16), tiles_of(order, 16))
    tokens = by_blocks(x, x_scale.t(), 1)
    held = int(order.ends[-1])
    assert bool(y[held:].isnan().all()), "rows of nobody were written"
    for token in range(len(ids)):
        for slot in range(2):
            if (expert := int(ids[token, slot])) >= 0:
                weight = by_blocks(codes[expert], scale[expert], rows)
                error = (y[order.place[token, slot]] - (weight @ tokens[token] + bias[expert].double())).abs()
                assert bool((error <= UNIT * (weight.abs() @ tokens[token].abs() + 1)).all())
