"""Memory that does not suffice for a layer: whoever loads it learns which layer, and how large it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omniplat.canonical import CanonicalWeight
from omniplat.errors import LayerMemoryError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.reference.kernels import DequantLinear, ExpertLoop
from omniplat.runtime import assemble
from omniplat.runtime.load import load_layer
from omniplat.runtime.online import OnlineExperts, OnlineLinear
from omniplat.scheme import Scheme
from tests.reference.build import Weights
from tests.runtime.test_load import Memory, expert_layer, linear_layer

SCHEME = Scheme.parse("int8-channel/a16")
#: Codes of 8 bits and scales in f32: [96, 64] of a linear layer, 3 experts of [64, 64] and [64, 32].
LINEAR, EXPERTS = 96 * 64 + 96 * 4, 3 * (64 * 64 + 64 * 32 + (64 + 64) * 4)

Fails = Callable[..., Any]


def stored_linear(fails: Fails) -> None:
    class Kernel(DequantLinear):
        prepare = fails

    memory = Memory()
    load_layer(linear_layer(memory, {"a": Weights(1).canonical(SCHEME, 96, 64)}), Kernel(), memory)


def stored_experts(fails: Fails) -> None:
    class Kernel(ExpertLoop):
        prepare = fails

    memory = Memory()
    load_layer(expert_layer(memory, SCHEME, stacked=False)[0], Kernel(), memory)


def online_linear(fails: Fails) -> None:
    class Kernel(DequantLinear):
        prepare = fails

    layer = OnlineLinear(LayerSpec("fused", "linear", 96, 64, SCHEME, parts=(96,)), Kernel())
    layer.put(torch.ones(96, 64))
    layer.finish()


def online_experts(fails: Fails) -> None:
    class Kernel(ExpertLoop):
        prepare = fails

    layer = OnlineExperts(LayerSpec("experts", "moe", 64, 64, SCHEME, moe=MoeSpec(3, 32)), Kernel())
    for expert in range(3):
        layer.put_w13(torch.ones(64, 64), expert)
        layer.put_w2(torch.ones(64, 32), expert)
    layer.finish()


WAYS = [(stored_linear, "fused", LINEAR), (online_linear, "fused", LINEAR),
        (stored_experts, "experts", EXPERTS), (online_experts, "experts", EXPERTS)]  # fmt: skip
SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    MemoryError("Unable to allocate 8.00 GiB"),
]


@pytest.mark.parametrize(("load", "name", "nbytes"), WAYS)
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_the_layer_and_its_bytes_are_named(load: Any, name: str, nbytes: int, shortage: Exception) -> None:
    def fails(*given: object) -> None:
        raise shortage

    where = "cuda" if isinstance(shortage, torch.OutOfMemoryError) else "cpu"
    told = f"out of memory on {where} while loading {name}, {nbytes} bytes"
    with pytest.raises(LayerMemoryError, match=told) as caught:
        load(fails)
    assert caught.value.__cause__ is shortage
    assert isinstance(caught.value, MemoryError)
    assert caught.value.to_dict()["bytes"] == nbytes


@pytest.mark.parametrize(("load", "name", "nbytes"), WAYS)
def test_other_errors_stay_what_they_are(load: Any, name: str, nbytes: int) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    with pytest.raises(RuntimeError, match="no kernel image"):
        load(fails)


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_weight_that_there_is_no_room_to_round_is_named(shortage: Exception) -> None:
    def rounding(weight: torch.Tensor, scheme: Scheme) -> Iterator[tuple[int, CanonicalWeight]]:
        yield from ()
        raise shortage

    layer = OnlineLinear(LayerSpec("fused", "linear", 96, 64, SCHEME), DequantLinear(), rounding)
    where = "cuda" if isinstance(shortage, torch.OutOfMemoryError) else "cpu"
    with pytest.raises(LayerMemoryError, match=f"out of memory on {where} while loading fused, 24576 bytes") as caught:
        layer.put(torch.ones(96, 64))
    assert caught.value.__cause__ is shortage


def test_memory_of_the_host_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: tuple[int, ...], dtype: object) -> None:
        raise MemoryError

    memory = Memory()
    packed = linear_layer(memory, {"a": Weights(1).canonical(SCHEME, 96, 64)})
    monkeypatch.setattr(assemble, "np", SimpleNamespace(**{**vars(np), "empty": empty}))
    with pytest.raises(LayerMemoryError, match="out of memory on cpu while loading fused, 6144 bytes as stored"):
        load_layer(packed, DequantLinear(), memory)


def test_sizes_are_readable() -> None:
    error = LayerMemoryError("a.b", "cuda:0", 3 << 29, 5 << 20)
    assert str(error) == "out of memory on cuda:0 while loading a.b, 1536.0 MiB as stored; 5.0 MiB are free there"
