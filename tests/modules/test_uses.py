"""What people do with a quantized model, whatever its scheme: run it on any input, trace it, move it, save it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import omniplat
from omniplat.errors import UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.runtime.layers import LayerDescription, rebuild
from tests.modules import tiny

METHODS: dict[str, Any] = {
    "fp8": {"method": "fp8"},
    "fp8-channel": {"method": "fp8", "granularity": "channel"},
    "fp8-block": {"method": "fp8", "weight_block_size": [32, 32]},
    "int8": {"method": "int8"},
    "mxfp8": {"method": "mxfp8"},
    "mxfp4": {"method": "mxfp4"},
    "nvfp4": {"method": "nvfp4"},
    "int4": {"method": "int4", "group_size": 32},
}
UP, STACK = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts"

every_method = pytest.mark.parametrize("method", METHODS)
every_model = pytest.mark.parametrize(
    ("method", "build"),
    [*((method, tiny.decoder) for method in METHODS), *((method, tiny.stacked) for method in ("fp8", "int8", "mxfp4"))],
)
traced_models = pytest.mark.parametrize(
    ("method", "build"),
    [("int8", tiny.decoder), ("mxfp8", tiny.stacked)],
)


@cache
def shared(method: str, build: Callable[[], nn.Module] = tiny.decoder) -> nn.Module:
    """A model that no test changes."""
    torch.manual_seed(0)
    model = build()
    omniplat.quantize_model(model, METHODS[method], "cpu")
    return model


def quantized(method: str, build: Callable[[], nn.Module] = tiny.decoder) -> nn.Module:
    return copy.deepcopy(shared(method, build))


# --- inputs ---------------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3), (2, 0), (2, 3, 4)], ids=str)
def test_a_layer_takes_any_leading_shape_and_dtype(method: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer = shared(method).get_submodule(UP)
    x = torch.randn(*shape, 64).to(dtype)
    y = layer(x)
    assert (y.shape, y.dtype) == ((*shape, 96), dtype)
    assert torch.equal(y.reshape(-1, 96), layer(x.reshape(-1, 64)))
    assert y.isfinite().all()


@every_method
def test_strides_do_not_matter(method: str) -> None:
    layer = shared(method).get_submodule(UP)
    x = torch.randn(64, 3, 4).permute(2, 1, 0)
    wide = torch.randn(4, 3, 200)[..., 7:135:2]
    for view in (x, wide, torch.randn(64).expand(4, 3, 64), torch.randn(3, 4, 64).transpose(0, 1)):
        assert torch.equal(layer(view), layer(view.contiguous()))


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3)], ids=str)
def test_experts_take_any_leading_shape_and_dtype(method: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    experts = shared(method, tiny.stacked).get_submodule(STACK)
    assert isinstance(experts, ModelExperts)
    x = torch.randn(*shape, 64)
    ids, weights = tiny.route(x.reshape(-1, 64), 3)
    y = experts(x.to(dtype), ids.reshape(*shape, 2), weights.reshape(*shape, 2).to(dtype))
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert y.isfinite().all()
    strided = torch.randn(64, 5).T
    ids, weights = tiny.route(strided, 3)
    assert torch.equal(experts(strided, ids, weights), experts(strided.contiguous(), ids, weights))


@every_model
def test_gradients_are_refused_when_they_are_asked_for(method: str, build: Callable[[], nn.Module]) -> None:
    model = quantized(method, build)
    x = tiny.rows().requires_grad_()
    y = model(x)
    assert y.requires_grad
    with pytest.raises(UsageError, match="is quantized and has no gradient"):
        y.sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_a_gradient_to_the_router_alone_is_refused() -> None:
    experts = quantized("mxfp8", tiny.stacked).get_submodule(STACK)
    x = tiny.rows()
    ids, weights = tiny.route(x, 3)
    y = experts(x, ids, weights.requires_grad_())
    with pytest.raises(UsageError, match="has no gradient"):
        y.sum().backward()


# --- tracing --------------------------------------------------------------------------------------------------------


@traced_models
def test_a_model_compiles_in_one_graph(method: str, build: Callable[[], nn.Module]) -> None:
    model = shared(method, build)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (3, 7):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(compiled(tiny.rows(count)), model(tiny.rows(count)), rtol=1e-5, atol=1e-5)


@traced_models
def test_a_model_is_exported(method: str, build: Callable[[], nn.Module]) -> None:
    model = shared(method, build)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    exported = torch.export.export(model, (tiny.rows(),), dynamic_shapes=shapes)
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert any(target.startswith("omniplat.") for target in targets)
    for count in (2, 9):
        torch.testing.assert_close(exported.module()(tiny.rows(count)), model(tiny.rows(count)), rtol=1e-5, atol=1e-5)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    again = torch.export.load(file)
    torch.testing.assert_close(again.module()(tiny.rows()), model(tiny.rows()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("method", "compiled"), [*((method, False) for method in METHODS), ("mxfp8", True)])
def test_autocast_gives_its_dtype_as_it_does_to_linear_layers(method: str, compiled: bool) -> None:
    model = shared(method)
    layer = model.get_submodule(UP)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x = tiny.rows()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(x)
        assert y.dtype == nn.Linear(64, 96)(x).dtype == torch.bfloat16
        assert torch.equal(y, layer(x.bfloat16()))
        assert model(x).isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert layer(x).dtype == torch.float32


# --- moving, saving -------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "cpu", "dtype", "eval"])
def test_moves_and_casts_leave_codes_and_scales_alone(method: str, build: Callable[[], nn.Module], move: str) -> None:
    model = quantized(method, build)
    layers = [module for module in model.modules() if isinstance(module, (ModelLinear, ModelExperts))]
    before = [(buffer.dtype, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    moved = model.to(torch.bfloat16) if move == "dtype" else getattr(model, move)()
    assert moved is model
    after = [buffer for layer in layers for buffer in layer.buffers()]
    for (dtype, expected), found in zip(before, after, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    dtype = next(model.parameters()).dtype
    if dtype != torch.float64:
        assert model(tiny.rows().to(dtype)).dtype == dtype


@every_model
@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_state_dicts_are_saved_and_loaded(
    method: str, build: Callable[[], nn.Module], how: str, tmp_path: Path
) -> None:
    one = quantized(method, build)
    two = build()
    omniplat.quantize_model(two, METHODS[method], "cpu")
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.add_(1)
    if how == "torch":
        torch.save(one.state_dict(), tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
    else:
        save_file(one.state_dict(), tmp_path / "state")
        state = load_file(tmp_path / "state")
    two.load_state_dict(state)
    assert torch.equal(two(tiny.rows()), one(tiny.rows()))
    other = build()
    omniplat.quantize_model(other, METHODS["int8" if method != "int8" else "mxfp4"], "cpu")
    with pytest.raises((RuntimeError, UsageError)):
        other.load_state_dict(state)


@every_model
def test_models_are_copied_and_pickled(method: str, build: Callable[[], nn.Module]) -> None:
    model = quantized(method, build)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tiny.rows()), model(tiny.rows()))
        omniplat.restore(other)
        assert not any(isinstance(module, (ModelLinear, ModelExperts)) for module in other.modules())


@every_model
def test_a_layer_is_rebuilt_from_its_description_and_state(method: str, build: Callable[[], nn.Module]) -> None:
    model = quantized(method, build)
    for layer in (item for item in model.modules() if isinstance(item, (ModelLinear, ModelExperts))):
        config = pickle.loads(pickle.dumps(layer.config))
        assert config == layer.config
        assert hash(config) == hash(layer.config)
        description = LayerDescription.from_json(layer.describe().to_json())
        assert pickle.loads(pickle.dumps(description)) == description
        again = rebuild(description, layer.state_dict())
        x = torch.randn(4, layer.spec.in_features)
        arguments = (x, *tiny.route(x, 3)) if isinstance(layer, ModelExperts) else (x,)
        assert torch.equal(again(*arguments), layer(*arguments))
