"""Static scales of activations: from inputs that the caller gives, or given themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import omniplat
from omniplat import oracle
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelLinear
from omniplat.scheme import Scheme
from tests.modules import tiny

STATIC = {"method": "fp8", "activation_scheme": "static"}
GATE, DOWN = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"


def largest_inputs(model: nn.Module, inputs: Iterable[torch.Tensor]) -> dict[str, float]:
    """As calibration has to find them, by recomputing what each layer sees."""
    found: dict[str, float] = {}
    block = model.model.layers[0]
    for x in inputs:
        attention = block.self_attn
        mixed = attention.q_proj(x) + torch.cat([attention.k_proj(x), attention.v_proj(x)], dim=-1)
        seen = {"self_attn.q_proj": x, "self_attn.k_proj": x, "self_attn.v_proj": x, "self_attn.o_proj": mixed}
        y = x + attention.o_proj(mixed)
        seen |= {"mlp.gate_proj": y, "mlp.up_proj": y}
        seen["mlp.down_proj"] = torch.nn.functional.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y)
        for name, value in seen.items():
            full = f"model.layers.0.{name}"
            found[full] = max(found.get(full, 0.0), float(value.abs().max()))
    return found


def scale_of(model: nn.Module, name: str) -> float:
    layer = model.get_submodule(name)
    assert isinstance(layer, ModelLinear)
    return float(layer.get_buffer("input_scale"))


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("form", ["argument", "tuple", "keywords"])
def test_scales_are_the_largest_magnitude_over_448(granularity: str, form: str) -> None:
    model = tiny.decoder()
    inputs = [tiny.rows(seed=seed) * (seed + 1) for seed in range(3)]
    with torch.no_grad():
        expected = largest_inputs(model, inputs)
    weight = model.get_submodule(DOWN).weight.detach().numpy().copy()
    items: list[Any] = {"argument": inputs, "tuple": [(x,) for x in inputs], "keywords": [{"x": x} for x in inputs]}[
        form
    ]
    plan = omniplat.quantize_model(model, {**STATIC, "granularity": granularity}, "cpu", calibration=iter(items))
    assert {layer.executes for layer in plan.layers} == {f"fp8-{granularity}/fp8-tensor-static"}
    for name, largest in expected.items():
        assert scale_of(model, name) == pytest.approx(largest / 448, rel=1e-6)
    layer, x = model.get_submodule(DOWN), torch.randn(4, 96) * 0.2
    made = oracle.quantize_weight(weight, Scheme.parse(f"fp8-{granularity}/a16").weight)
    seen = oracle.quantize_activation(x.numpy(), layer.spec.scheme.activation, input_scale=scale_of(model, DOWN))
    np.testing.assert_allclose(layer(x).numpy(), seen @ oracle.dequantize(made).T, rtol=1e-3, atol=1e-3)
    assert not any(module._forward_pre_hooks for module in model.modules())
    omniplat.restore(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_given_scales_come_first_and_calibration_finds_the_others() -> None:
    model = tiny.decoder()
    omniplat.quantize_model(model, {**STATIC, "input_scales": {GATE: 0.5}}, "cpu", calibration=[tiny.rows()])
    assert scale_of(model, GATE) == 0.5
    assert scale_of(model, DOWN) != 0.5


def test_scales_are_named_without_adapters() -> None:
    model = tiny.decoder()
    model.model.layers[0].mlp.down_proj = tiny.Adapter(model.model.layers[0].mlp.down_proj)
    omniplat.quantize_model(model, {**STATIC, "input_scales": {DOWN: 0.5}}, "cpu", calibration=[tiny.rows()])
    assert scale_of(model, f"{DOWN}.base_layer") == 0.5


def test_a_pipeline_is_calibrated_by_calling_it() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.components = {"transformer": tiny.decoder(), "vae": tiny.decoder()}

        def __call__(self, x: torch.Tensor, steps: int) -> torch.Tensor:
            for _ in range(steps):
                x = self.components["transformer"](x)
            return x

    pipeline = Pipeline()
    calibration = [{"x": tiny.rows(), "steps": 2}]
    plan = omniplat.quantize_model(pipeline, {"transformer": STATIC}, "cpu", calibration=calibration)
    assert plan.layer(f"transformer.{DOWN}").executes == "fp8-tensor/fp8-tensor-static"
    assert scale_of(pipeline.components["transformer"], DOWN) > 0
    assert isinstance(pipeline.components["vae"].get_submodule(DOWN), nn.Linear)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


@pytest.mark.parametrize(
    ("model", "method", "calibration", "reason"),
    [
        (tiny.decoder, "mxfp8", [tiny.rows()], "calibration is for static activations"),
        (tiny.decoder, STATIC, None, "needs input_scales, .*, or calibration inputs"),
        (tiny.decoder, STATIC, [], "saw nothing but zeros, or was never called"),
        (tiny.decoder, STATIC, [torch.zeros(2, 64)], "saw nothing but zeros"),
        (tiny.decoder, STATIC, [tiny.rows() * float("nan")], "is not finite"),
        (tiny.decoder, STATIC, [tiny.rows(), tiny.rows() * float("inf")], "is not finite"),
        (tiny.decoder, STATIC, [tiny.rows() * float("nan"), tiny.rows()], "is not finite"),
        (tiny.decoder, STATIC, [tiny.rows(), tiny.rows() * float("nan")], "is not finite"),
        (Unused, STATIC, [tiny.rows()], "unused saw nothing but zeros, or was never called"),
        (tiny.stacked, STATIC, [tiny.rows()], r"holds experts, .*no static activations"),
        (tiny.decoder, {**STATIC, "weight_block_size": [128, 128]}, [tiny.rows()], "weight_block_size goes with"),
    ],
)
def test_what_gives_no_scale_is_refused_and_changes_nothing(
    model: type[nn.Module], method: Any, calibration: Any, reason: str
) -> None:
    made = model()
    with pytest.raises(UsageError, match=reason):
        omniplat.quantize_model(made, method, "cpu", calibration=calibration)
    assert not any(isinstance(module, ModelLinear) or module._forward_pre_hooks for module in made.modules())


def test_weights_that_are_only_arriving_calibrate_nothing() -> None:
    with torch.device("meta"):
        model = tiny.decoder()
    with pytest.raises(UsageError, match="its weights are only arriving"):
        omniplat.quantize_model(model, STATIC, "cpu", weights=tiny.decoder().state_dict(), calibration=[tiny.rows()])
    scales = {name: 0.1 for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    omniplat.quantize_model(model, {**STATIC, "input_scales": scales}, "cpu", weights=tiny.decoder().state_dict())
    assert scale_of(model, DOWN) == pytest.approx(0.1)


def test_a_scale_for_no_layer_is_an_error() -> None:
    scales = {name: 0.1 for name, module in tiny.decoder().named_modules() if isinstance(module, nn.Linear)}
    with pytest.raises(UsageError, match=r"input_scales: 'model.layers.0.mlp' is no layer"):
        omniplat.quantize_model(
            tiny.decoder(), {**STATIC, "input_scales": {**scales, "model.layers.0.mlp": 0.1}}, "cpu"
        )
    with pytest.raises(UsageError, match=r"input_scales: .*down_proj.* is not a positive number"):
        omniplat.quantize_model(tiny.decoder(), {**STATIC, "input_scales": {**scales, DOWN: 0.0}}, "cpu")
