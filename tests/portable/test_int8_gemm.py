"""int8 products in Triton: exact sums, and scales applied as torch's form does, to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton import TRITON_DEVICE, needs_triton

device = TRITON_DEVICE
pytestmark = needs_triton


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 96), (5, 40, 128), (17, 200, 200), (130, 72, 64)])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("descriptors", [True, False])
def test_the_product(m: int, n: int, k: int, per_token: bool, with_bias: bool, descriptors: bool) -> None:
    from omniplat.portable.int8_gemm_triton import Tile, int8_product

    if descriptors and k % 16:
        k += 8

    torch.manual_seed(m)
    # on a device only the first call goes through Triton's binder
    for _ in range(2):
        x, codes = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
        x_scale = torch.rand(m if per_token else 1, 1, device=device) / 100
        scale = torch.rand(1, n, device=device) / 100
        bias = torch.randn(n, device=device) if with_bias else None
        y = int8_product(x, codes, x_scale, scale, bias, torch.float32, Tile(16, 32, 64, 4, 2, descriptors))
        wanted = (x.double() @ codes.double().t()).float() * scale * x_scale
        wanted = wanted if bias is None else wanted + bias
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)


def test_largest_sums() -> None:
    from omniplat.portable.int8_gemm_triton import int8_product, tile_of

    x = torch.full((3, 4096), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, 1, device=device)
    y = int8_product(x, x, one, torch.ones(1, 3, device=device), None, torch.float32, tile_of(3, 4096, x.device))
    assert bool((y == 128.0 * 128 * 4096).all())
