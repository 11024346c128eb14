"""auto-round-lib's own CPU kernels as an oracle: independent packing, decoding and products of integer weights.

Needs the genuine library, which the stage `libraries` installs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

from omniplat.conformance.tolerances import gamma
from omniplat.conformance.weights import random_weight
from omniplat.device import Device
from omniplat.emulation.core import Emulation
from omniplat.emulation.xpu import auto_round
from omniplat.oracle import decode_codes, dequantize, linear
from omniplat.scheme import Scheme

ROWS, N, K = 5, 48, 256
SCHEMES = (
    *(f"int{bits}-g{size}" for bits in range(2, 9) for size in (32, 64, 128)),
    *(f"uint{bits}-g{size}" for bits in range(2, 9) for size in (32, 128)),
    *(f"int{bits}-channel" for bits in (4, 8)),
)  # fmt: skip


@pytest.fixture(scope="module")
def ark() -> Iterator[ModuleType]:
    """The genuine library, out of sight afterwards: nothing is emulated beside it."""
    yield pytest.importorskip("auto_round_kernel", reason="auto-round-lib is not installed")
    for name in [name for name in sys.modules if name.partition(".")[0] == "auto_round_kernel"]:
        del sys.modules[name]


class Genuine:
    """A random weight of a scheme in the library's hands, in f32 throughout."""

    def __init__(self, ark: ModuleType, name: str) -> None:
        rng = np.random.default_rng(7)
        self.weight = random_weight(Scheme.parse(f"{name}/a16"), N, K, rng)
        tensors, quant = self.weight.tensors, self.weight.scheme.weight
        middle = 0 if quant.symmetric else 1 << (quant.bits - 1)
        codes = decode_codes(tensors["codes"], quant.element, K) - middle
        self.scale = torch.from_numpy(np.ascontiguousarray(tensors["scale"].astype(np.float32).T))
        points = tensors.get("zero_point")
        zero = np.empty(0) if points is None else np.ascontiguousarray(points.astype(np.float64).T - middle)
        self.codes = torch.from_numpy(np.ascontiguousarray(codes.T)).to(torch.int8)
        self.form: tuple[Any, ...] = (
            K // self.scale.shape[0], "fp32", f"int{quant.bits}", "fp32", points is not None,
        )  # fmt: skip
        self.ark = ark
        self.blob = ark.repack_quantized_weight(
            self.codes, self.scale, torch.from_numpy(zero).to(torch.int8), *self.form
        )

    def unpacked(self) -> torch.Tensor:
        """f32 [N, K]."""
        found: torch.Tensor = self.ark.unpack_weight(self.blob, torch.float32, N, K, *self.form)
        return found

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.ark.woqgemm_linear(x, self.blob, bias, N, K, *self.form)
        return found


@pytest.mark.parametrize("name", SCHEMES)
def test_the_oracle_means_what_the_library_does(ark: ModuleType, name: str) -> None:
    genuine = Genuine(ark, name)
    wanted = dequantize(genuine.weight)
    assert np.array_equal(genuine.unpacked().numpy(), wanted.astype(np.float32))
    generator = torch.Generator().manual_seed(3)
    x, bias = torch.randn(ROWS, K, generator=generator), torch.randn(N, generator=generator)
    y = linear(x.numpy(), genuine.weight, bias=bias.numpy())
    size = np.abs(x.numpy()) @ np.abs(wanted).T + np.abs(bias.numpy())
    error = np.abs(genuine.product(x, bias).numpy().astype(np.float64) - y)
    assert (error <= gamma(K + 8, 2.0**-24) * size + 2.0**-24 * np.abs(wanted).max()).all()


@pytest.mark.parametrize("name", ["int4-g32", "int4-g128", "int4-channel", "int8-g64"])
def test_the_emulation_packs_what_the_library_packs(ark: ModuleType, name: str) -> None:
    """On the CPU with types of f32; blobs are laid out otherwise there, so that what they hold is compared."""
    genuine = Genuine(ark, name)
    emulation = Emulation(Device("xpu", "bmg"), Version("0.1.16.2"))
    none = torch.empty(0, dtype=torch.int8)
    blob = auto_round.repack_quantized_weight(emulation, (genuine.codes, genuine.scale, none, *genuine.form))
    rows = torch.cat((torch.eye(K), torch.zeros(1, K)))
    form = (N, K, *genuine.form)
    found = auto_round.woqgemm_linear(emulation, rows, blob, None, *form)[:K].t()
    assert torch.equal(found, genuine.unpacked().to(torch.float16).to(torch.float32))
    assert not emulation.violations


def test_the_library_reads_scales_of_another_type_without_a_word(ark: ModuleType) -> None:
    """What the emulation records as a violation: it is what the genuine library does."""
    genuine = Genuine(ark, "int4-g64")
    none = torch.empty(0, dtype=torch.int8)
    blob = ark.repack_quantized_weight(genuine.codes, genuine.scale.to(torch.float64), none, *genuine.form)
    found = ark.unpack_weight(blob, torch.float32, N, K, *genuine.form)
    assert not torch.equal(found, genuine.unpacked())
