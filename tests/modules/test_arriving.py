"""Models whose weights arrive one by one while they are quantized: the same as if they had been there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import omniplat
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.modules.layers import ModelExperts, ModelLinear
from tests.modules import tiny

METHODS = ["fp8", "mxfp4", "nvfp4", {"method": "int4", "group_size": 32}]
STACK = "model.layers.0.mlp.experts"


def empty(*, experts: bool = False) -> tiny.Decoder:
    with torch.device("meta"):
        return tiny.stacked() if experts else tiny.decoder()


def backwards(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from reversed(tensors.items())


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks of experts as most checkpoints have them."""
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(STACK)}
    for expert in range(tiny.EXPERT_SIZES.experts):
        gate, up = tensors[f"{STACK}.gate_up_proj"][expert].chunk(2)
        found |= {f"{STACK}.{expert}.up_proj.weight": up.clone(), f"{STACK}.{expert}.gate_proj.weight": gate.clone()}
        found[f"{STACK}.{expert}.down_proj.weight"] = tensors[f"{STACK}.down_proj"][expert].clone()
    return found


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    assert [*one.state_dict()] == [*other.state_dict()]
    for found, expected in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    ("experts", "how"),
    [*itertools.product((False, True), ("state dict", "pairs", "folder")), (True, "one by one")],
)
def test_what_arrives_is_quantized_as_what_stands(method: object, experts: bool, how: str, tmp_path: Path) -> None:
    model = tiny.stacked() if experts else tiny.decoder()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source: object = tensors
    if how == "pairs":
        source = backwards(tensors)
    elif how == "folder":
        tiny.write_unquantized(tmp_path, model)
        source = tmp_path
    elif how == "one by one":
        source = one_by_one(tensors)
    arrived = empty(experts=experts)
    expected = omniplat.quantize_model(model, method, "cpu")
    plan = omniplat.quantize_model(arrived, method, "cpu", weights=source)
    assert plan.summary == expected.summary
    assert_equal(arrived, model)
    assert torch.equal(arrived(tiny.rows()), model(tiny.rows()))
    with pytest.raises(UsageError, match="were not kept"):
        omniplat.restore(arrived)


@pytest.mark.parametrize("split", [False, True])
def test_experts_that_stay_arrive_too(split: bool) -> None:
    method = {"method": "mxfp8", "ignored_layers": ["*.experts"]}
    model, arrived = tiny.stacked(), empty(experts=True)
    tensors = dict(model.state_dict())
    omniplat.quantize_model(model, method, "cpu")
    omniplat.quantize_model(arrived, method, "cpu", weights=one_by_one(tensors) if split else tensors)
    assert isinstance(arrived.get_submodule(STACK), tiny.Stack)
    assert_equal(arrived, model)


@pytest.mark.parametrize("split", [False, True])
def test_codes_are_no_weights_of_experts_that_stay(split: bool) -> None:
    tensors = dict(tiny.stacked().state_dict())
    arriving = dict(one_by_one(tensors)) if split else tensors
    name = next(key for key in arriving if "down_proj" in key and key.startswith(STACK))
    method = {"method": "mxfp8", "ignored_layers": ["*.experts"]}
    with pytest.raises(InvalidCheckpointError, match=r"is torch\.int8; the model's is torch\.float32"):
        omniplat.quantize_model(
            empty(experts=True), method, "cpu", weights=arriving | {name: arriving[name].to(torch.int8)}
        )


def test_names_of_what_arrives_may_differ() -> None:
    model, arrived = tiny.decoder(), empty()
    tensors = {f"outer.{name}": tensor for name, tensor in model.state_dict().items()}
    omniplat.quantize_model(model, "int8", "cpu")
    omniplat.quantize_model(arrived, "int8", "cpu", weights=tensors)
    assert_equal(arrived, model)
    arrived = empty()
    omniplat.quantize_model(arrived, "int8", "cpu", weights=backwards(tensors), key_mapping={r"^outer\.": ""})
    assert_equal(arrived, model)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda t: without(t, UP), UsageError, "mlp.up_proj: nothing brought model.layers.0.mlp.up_proj"),
        (lambda t: without(t, "model.norm.weight"), UsageError, "model.norm.weight: the checkpoint has no such tensor"),
        (lambda t: t | {"more.weight": torch.zeros(2)}, UsageError, "more.weight: the model has no such parameter"),
        (lambda t: [*t.items(), (UP, t[UP])], InvalidCheckpointError, "twice"),
        (lambda t: [*t.items(), ("model.norm.weight", t["model.norm.weight"])], InvalidCheckpointError, "twice"),
        (
            lambda t: t | {f"{UP}_scale": torch.ones(1)},
            InvalidCheckpointError,
            "weight_scale: is there twice, or the model has no such",
        ),
        (lambda t: {f"{UP}_scale": torch.ones(1)} | t, UsageError, "weight_scale: the model has no such parameter"),
        (lambda t: t | {UP: t[UP][:50]}, InvalidCheckpointError, r"is \[50, 64\] where \[96, 64\]"),
        (lambda t: t | {UP: t[UP] / 0}, InvalidCheckpointError, "mlp.up_proj: is not finite"),
        (lambda t: t | {UP: t[UP].to(torch.float8_e4m3fn)}, InvalidCheckpointError, "16 or 32 bit"),
        (lambda t: t | {"model.norm.weight": torch.ones(60)}, UsageError, r"is \[64\]; the checkpoint has \[60\]"),
    ],
)
def test_what_does_not_fit_changes_nothing(change: object, error: type[Exception], reason: str) -> None:
    tensors = dict(tiny.decoder().state_dict())
    arrived = empty()
    before = {name: id(item) for name, item in (*arrived.named_modules(), *arrived.named_parameters())}
    assert callable(change)
    with pytest.raises(error, match=reason):
        omniplat.quantize_model(arrived, "mxfp8", "cpu", weights=change(tensors))
    assert {name: id(item) for name, item in (*arrived.named_modules(), *arrived.named_parameters())} == before


def test_a_pipeline_is_filled_component_by_component() -> None:
    class Pipeline:
        components = {"transformer": empty()}  # noqa: RUF012

    with pytest.raises(UsageError, match="one by one"):
        omniplat.quantize_model(Pipeline(), "mxfp8", "cpu", weights={})


@pytest.mark.parametrize("experts", [False, True])
def test_finished_layers_can_be_offloaded(experts: bool, tmp_path: Path) -> None:
    model = tiny.stacked() if experts else tiny.decoder()
    tensors = dict(model.state_dict())
    omniplat.quantize_model(model, "mxfp8", "cpu")
    for where in ("cpu", tmp_path / "layers"):
        arrived = empty(experts=experts)
        omniplat.quantize_model(arrived, "mxfp8", "cpu", weights=tensors, offload=where)
        assert_equal(arrived, model)
        assert torch.equal(arrived(tiny.rows()), model(tiny.rows()))
    layers = {name for name, item in arrived.named_modules() if isinstance(item, (ModelLinear, ModelExperts))}
    assert {path.name.removesuffix(".safetensors") for path in (tmp_path / "layers").iterdir()} == layers
    with pytest.raises(UsageError, match="is not empty"):
        omniplat.quantize_model(empty(experts=experts), "mxfp8", "cpu", weights=tensors, offload=tmp_path / "layers")
