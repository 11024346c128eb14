"""Tensors that an engine hands over one by one, whole or in pieces, become a module as it is in the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omniplat.canonical import Array
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.integrations.vllm_collect import ModuleTensors, leaf_of
from omniplat.packed import Part
from omniplat.roworder import AS_IS, RowOrder
from omniplat.roworder_apply import row_permutation
from omniplat.scheme import Scheme

SCHEME = Scheme.parse("int4-g32/a16")
ROLES = {"codes": ".weight_packed", "scale": ".weight_scale", "bias": ".bias"}


def part_of(tensors: dict[str, Array], order: RowOrder = AS_IS, *, stacked: bool = False) -> Part:
    infos = {
        role: TensorInfo("m" + (f"_{role}" if stacked else ROLES[role]), "I32", array.shape, "s", 0, 0)
        for role, array in tensors.items()
    }
    module = ResolvedModule("m", "", None, SCHEME, Storage("int32_k", "I32"), 24, 64, infos, DecidedBy("", ""))
    return Part(module, order)


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def test_whole_tensors_in_any_order() -> None:
    arrays = {"codes": numbers(24, 8), "scale": numbers(24, 2)}
    held = ModuleTensors(part_of({**arrays, "bias": numbers(24)}))
    assert set(held.leaves) == {"weight_packed", "weight_scale"}
    assert held.missing == ("m.weight_packed", "m.weight_scale")
    assert not held.take("weight_scale", torch.from_numpy(arrays["scale"]))
    assert held.missing == ("m.weight_packed",)
    assert not held.take("left_over", torch.zeros(3))
    assert held.take("weight_packed", torch.from_numpy(arrays["codes"]))
    found = held.arrays()
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[role], arrays[role]) for role in arrays)
    assert "bias" in ModuleTensors(part_of({"bias": numbers(24)}), bias=True).leaves


@pytest.mark.parametrize("shape", [(24, 8), (2, 24), (24,), (6, 2, 4)])
def test_halves_of_the_first_dimension_are_joined_whatever_it_counts(shape: tuple[int, ...]) -> None:
    codes = numbers(*shape)
    held = ModuleTensors(part_of({"codes": codes}), pieces=2)
    second, first = torch.from_numpy(codes).chunk(2)[::-1]
    assert not held.take("weight_packed", second, 1)
    assert held.take("weight_packed", first, 0)
    assert np.array_equal(held.arrays()["codes"], codes)


@pytest.mark.parametrize(
    ("order", "pieces"),
    [(RowOrder("halves_swapped"), (12, 12)), (RowOrder("qkv_per_kv_head", 2, 2, 3), (12, 6, 6))],
)
def test_pieces_in_canonical_order_go_back_to_the_order_of_the_file(order: RowOrder, pieces: tuple[int, ...]) -> None:
    codes = numbers(24, 8)
    canonical = torch.from_numpy(codes[row_permutation(order, 24)])
    held = ModuleTensors(part_of({"codes": codes}, order), pieces=len(pieces), reordered=True)
    for number, piece in enumerate(canonical.split(pieces)):
        held.take("weight_packed", piece, number)
    assert np.array_equal(held.arrays()["codes"], codes)
    raw = ModuleTensors(part_of({"codes": codes}, order), pieces=len(pieces), reordered=True)
    assert raw.take("weight_packed", torch.from_numpy(codes))
    assert np.array_equal(raw.arrays()["codes"], codes)


def test_one_value_comes_with_every_piece() -> None:
    held = ModuleTensors(part_of({"codes": numbers(24, 8), "scale": numbers(1)}), pieces=3)
    for number in range(3):
        assert not held.take("weight_scale", torch.tensor([7], dtype=torch.int32), number)
    assert held.missing == ("m.weight_packed",)


def test_experts_of_a_stack() -> None:
    codes = numbers(4, 24, 8)
    held = ModuleTensors(part_of({"codes": codes}, stacked=True), pieces=2, stacked=True)
    assert held.leaves == ("weight_codes",)
    first, second = torch.from_numpy(codes[2]).chunk(2)
    held.take("weight_codes", first, 0)
    assert held.take("weight_codes", second, 1)
    assert np.array_equal(held.arrays()["codes"], codes[2])
    assert leaf_of(TensorInfo("a.gate_up_proj", "U8", (), "s", 0, 0), "a.gate_up_proj", stacked=True) == "weight"


def test_types_that_numpy_does_not_know_are_bytes() -> None:
    scale = torch.arange(48, dtype=torch.uint8).reshape(24, 2)
    held = ModuleTensors(part_of({"scale": scale.numpy()}))
    assert held.take("weight_scale", scale.view(torch.float8_e8m0fnu))
    assert np.array_equal(held.arrays()["scale"], scale.numpy())


def test_what_contradicts_the_header_is_refused() -> None:
    codes = torch.from_numpy(numbers(24, 8))
    held = ModuleTensors(part_of({"codes": codes.numpy(), "scale": numbers(24, 2)}), pieces=2)
    with pytest.raises(InvalidCheckpointError, match=r"delivered as \[12, 8\], not \[24, 8\]"):
        held.take("weight_packed", codes[:12])
    held.take("weight_packed", codes[:12], 0)
    with pytest.raises(InvalidCheckpointError, match="piece 0 was delivered twice"):
        held.take("weight_packed", codes[:12], 0)
    with pytest.raises(InvalidCheckpointError, match="which are not"):
        held.take("weight_packed", codes[:11], 1)
    held = ModuleTensors(part_of({"codes": codes.numpy(), "scale": numbers(24, 2)}))
    held.take("weight_packed", codes)
    with pytest.raises(InvalidCheckpointError, match="delivered twice"):
        held.take("weight_packed", codes)
