"""The form that layers over humming have on a device, run on the CPU over a stand-in for humming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from omniplat_cuda.kernels import humming, humming_experts

from omniplat.conformance import expected
from omniplat.conformance.build import make_routing
from omniplat.conformance.tolerances import excess
from omniplat.runtime.tensors import DTYPES
from tests.backends.cuda import test_humming as linear
from tests.backends.cuda import test_humming_experts as experts
from tests.backends.cuda.building import check, layer_of
from tests.support.humming_stand_in import Kernels, stand_in
from tests.support.triton import INTERPRETED, needs_triton

if TYPE_CHECKING:
    from omniplat.portable.launch import Launch

pytestmark = [*needs_triton, pytest.mark.skipif(not INTERPRETED, reason="runs on the CPU: TRITON_INTERPRET is not 1")]


class Collector:
    """Takes launches, and knows whose they were."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def collect(self, launch: Launch, arguments: object) -> None:
        self.names.append(launch.name)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Layers on the CPU are prepared and run as those on a device."""
    held = stand_in(monkeypatch)
    yield next(held)
    next(held, None)


@pytest.fixture
def on_device(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from omniplat_cuda.kernels import humming_runtime

    for module in (humming, humming_experts):
        monkeypatch.setattr(module, "laid_out", humming_runtime.laid_out)
    monkeypatch.setattr(torch.ops.omniplat, "cuda_humming_linear", humming._on_device)
    monkeypatch.setattr(torch.ops.omniplat, "cuda_humming_experts", humming_experts._on_device)
    return kernels


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@linear.each_layer
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_linear_layers_compute_what_the_oracle_does(kernel: str, scheme: str, dtype: str, on_device: Kernels) -> None:
    n, k = (128, 256) if "block" in scheme else (48, 256)
    weight = linear.weight_of(scheme, n, k)
    layer = layer_of(kernel, weight, "cpu", dtype)
    torch.manual_seed(0)
    for rows in (5, 7, 9):
        check(layer, weight, torch.randn(rows, k).to(DTYPES[dtype]))
    assert layer(torch.empty(0, k, dtype=torch.bfloat16)).shape == (0, n)
    assert on_device.launched == 3
    # 5 and 7 rows share one
    assert len(on_device.compiled) == 2


def test_rows_that_lie_anywhere_are_read(on_device: Kernels) -> None:
    weight = linear.weight_of("mxfp4/a16", 48, 256)
    layer = layer_of("humming_linear", weight, "cpu")
    flat = torch.randn(3 * 256 + 1).bfloat16()
    check(layer, weight, flat[1:].view(3, 256))
    check(layer, weight, torch.randn(2, 3, 512).bfloat16()[..., ::2])


def test_a_kernel_that_cannot_be_compiled_is_named_at_every_use(
    on_device: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> torch.Tensor:
        raise RuntimeError("NVRTC failed with exit code 1")

    monkeypatch.setattr(on_device, "prepare_kernels", failing)
    layer = layer_of("humming_linear", linear.weight_of("mxfp4/a16", 48, 256), "cpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="NVRTC failed"):
            layer(torch.randn(3, 256).bfloat16())


class TestExperts:
    @experts.each_scheme
    def test_they_compute_what_the_oracle_does(self, scheme: str, on_device: Kernels) -> None:
        w13, w2 = experts.weights_of(scheme)
        layer = experts.layer_of(w13, w2, "cpu")
        for rows in (1, 9):
            routing = make_routing(rows, experts.EXPERTS, experts.TOP, np.random.default_rng(rows))
            x = experts.rounded_input(rows)
            wanted = expected.experts(x, w13, w2, routing, experts.capability_of(scheme), "bf16")
            found = experts.run(layer, x, routing, "cpu")
            assert not (problem := excess(found, wanted.y, wanted.allowed)), f"{rows} rows: {problem}"

    def test_those_of_other_ranks_and_of_nobody_contribute_nothing(self, on_device: Kernels) -> None:
        experts.test_experts_of_other_ranks_and_of_nobody_contribute_nothing("cpu")

    @pytest.mark.parametrize("activation", ["gelu", "swiglu-oai"])
    def test_biases_and_other_activations(self, activation: str, on_device: Kernels) -> None:
        experts.test_biases_and_other_activations(activation, "cpu")

    def test_their_sums_are_whole_where_torch_is_to_be_deterministic(
        self, on_device: Kernels, deterministic: None
    ) -> None:
        """By kernels of their own, which are there beside the others."""
        layer = experts.layer_of(*experts.weights_of("mxfp4/a16"), "cpu")
        routing, x = make_routing(9, experts.EXPERTS, experts.TOP, np.random.default_rng(0)), experts.rounded_input(9)
        experts.run(layer, x, routing, "cpu")
        torch.use_deterministic_algorithms(False)
        experts.run(layer, x, routing, "cpu")
        found = [compute["use_batch_invariant"] for _, compute, _ in on_device.compiled]
        assert found == [True, True, False, False]

    def test_nothing_is_launched_while_launches_are_collected(self, on_device: Kernels) -> None:
        from omniplat.portable.launch import collected

        layer = experts.layer_of(*experts.weights_of("mxfp4/a16"), "cpu")
        ids = torch.randint(0, experts.EXPERTS, (9, experts.TOP))
        collector = Collector()
        with collected(collector):
            layer(torch.zeros(9, experts.HIDDEN).bfloat16(), ids, torch.ones(9, experts.TOP))
        assert on_device.launched == 0
        assert collector.names[0] == "_align"
        experts.layer_of(*experts.weights_of("mxfp4/a16"), "cpu")(
            torch.zeros(9, experts.HIDDEN).bfloat16(), ids, torch.ones(9, experts.TOP)
        )
        # compiled while they were collected
        assert (on_device.launched, len(on_device.compiled)) == (2, 2)


@pytest.mark.parametrize("scheme", ["mxfp4/a16", "mxfp8/a16", "nvfp4/a16"])
def test_buffers_are_numbers_that_torch_computes_with(scheme: str, on_device: Kernels) -> None:
    """Bytes, where humming takes numbers of 8 bits, of which operators are asked what they write to."""
    for layer in (
        layer_of("humming_linear", linear.weight_of(scheme, 48, 256), "cpu"),
        experts.layer_of(*experts.weights_of(scheme), "cpu"),
    ):
        found = {name: buffer.dtype for name, buffer in layer.named_buffers()}
        assert torch.uint8 in found.values(), found
        assert not [name for name, dtype in found.items() if dtype.is_floating_point and dtype.itemsize == 1], found
