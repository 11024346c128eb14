"""Functions of auto-round-lib: calls that are wrong in one way each, and sums of one row in f16."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from omniplat.emulation import Emulation, emulate

M, N, K, GROUP = 4, 32, 128, 64
F16, BF16, I8 = torch.float16, torch.bfloat16, torch.int8
TYPES = ("fp16", "int4", "fp16", False)


@pytest.fixture
def bmg() -> Emulation:
    with emulate("xpu:bmg") as emulation:
        yield emulation


def codes() -> torch.Tensor:
    return torch.randint(-8, 8, (K, N), dtype=I8, generator=torch.Generator().manual_seed(1))


def scales() -> torch.Tensor:
    return torch.full((K // GROUP, N), 0.5, dtype=F16)


NONE = torch.empty(0, dtype=I8)


def repack(*arguments: Any) -> torch.Tensor:
    """With the arguments of a right call for those that are missing."""
    right = (codes(), scales(), NONE, GROUP, *TYPES)
    return import_module("auto_round_kernel").repack_quantized_weight(*arguments, *right[len(arguments) :])


def product(**changed: Any) -> torch.Tensor:
    arguments = {
        "A": torch.ones(M, K, dtype=F16), "B": repack(), "bias": torch.ones(N, dtype=F16), "n": N, "k": K,
        "groupsize": GROUP, "compute_type": "fp16", "weight_type": "int4", "scale_type": "fp16", "asym": False,
    }  # fmt: skip
    return import_module("auto_round_kernel").woqgemm_linear(**{**arguments, **changed})


@pytest.mark.parametrize("rows", [1, M])
def test_the_right_call_is_right(bmg: Emulation, rows: int) -> None:
    x = torch.ones(rows, K, dtype=F16)
    assert torch.equal(product(A=x), (codes().float().sum(0) * 0.5 + 1).to(F16).expand(rows, N))
    assert not bmg.violations


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((codes().view(-1),), "QB must be a 2-D tensor"),
        ((codes(), scales().view(-1)), "scaleB must be a 2-D tensor"),
        ((codes(), scales(), None), "zp must be a torch.Tensor"),
        ((codes(), scales(), NONE, 0), "positive"),
        ((codes(), scales(), NONE, GROUP, "fp16", "int4", "fp16", True), "asymmetric"),
        ((codes(), scales(), NONE, GROUP, "fp16", "int3", "fp16", False), "int3"),
        ((codes(), scales(), NONE, GROUP, "fp16", "int4", "fp8_e8m0", False), "fp8_e8m0"),
        ((codes()[:, :24].contiguous(), scales()[:, :24].contiguous()), "work-groups"),
        ((codes(), scales(), NONE, NONE, *TYPES, GROUP), "eight positional"),
    ],
)
def test_packing_refuses(bmg: Emulation, arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=problem):
        repack(*arguments)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"k": 2 * K}, "k must match"),
        ({"B": torch.zeros(8, dtype=I8)}, "Corrupt packed weight"),
        ({"B": torch.zeros(N, K, dtype=I8)}, "1-D"),
        ({"asym": True}, "asymmetric"),
        ({"weight_type": "int8"}, "Corrupt packed weight"),
        ({"group_size": GROUP}, "group_size"),
    ],
)
def test_products_refuse(bmg: Emulation, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=problem):
        product(**changed)


def test_what_would_be_wrong_without_a_word_is_recorded(bmg: Emulation) -> None:
    def rules() -> list[str]:
        found = [violation.rule for violation in bmg.violations]
        bmg.violations.clear()
        return found

    for wrong in (
        (codes(), scales().float()),
        (codes(), scales().to(BF16)),
        (codes(), scales().t().contiguous()),
        (codes().to(torch.int32),),
    ):
        assert not torch.equal(repack(*wrong), repack()), "memory is read as something else"
        assert rules() == ["memory-read-as-another"]
    product(compute_type="int8")
    product(compute_type="auto")
    assert rules() == ["input-quantized"] * 2
    product(A=torch.ones(M, K, dtype=BF16))
    assert rules() == ["input-in-f16"]


def test_one_row_is_summed_up_in_half_precision(bmg: Emulation) -> None:
    """A large product swallows small ones in f16, and does not in the f32 that more rows are summed up in."""
    blob = repack(torch.ones(K, N, dtype=I8), torch.ones_like(scales()))
    x = torch.full((1, K), 0.5, dtype=F16)
    x[0, 0] = 4096.0
    alone, beside = (product(A=rows, B=blob, bias=None) for rows in (x, x.repeat(2, 1)))
    assert float(beside[0, 0]) == 4096 + 63.5 + 0.5
    assert float(alone[0, 0]) != float(beside[0, 0])
    assert abs(float(alone[0, 0]) - 4160) <= 64
