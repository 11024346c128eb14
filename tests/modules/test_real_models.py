"""Models of transformers and diffusers, quantized online with every method, against the same models with the oracle's
layers in their places: which layers are quantized, what stays untouched, what comes out."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import omniplat
from omniplat.modules.layers import ModelExperts, ModelLinear
from omniplat.online import parse_method
from tests.modules.models import MODELS, make, run
from tests.modules.stand_in import online, online_experts, put_in_place
from tests.quality.variants import VARIANTS

ALL = {**VARIANTS, "fp8, static": {"method": "fp8", "activation_scheme": "static"}}

#: Relative L2 between f32 and f64 arithmetic with the same weights, over a whole model: some 20 products and norms in a
#: row, each of which adds a few roundings of 2^-24.
ARITHMETIC = 80 * 2.0**-24
#: Where inputs are quantized too, arithmetic may carry one to the other side of a rounding boundary. One such input
#: adds a whole step where the noise of N inputs is that of N / 12 squared steps: at N > 6000, one adds 4.5 % to the
#: noise. A tenth is four of them at once.
OF_THE_NOISE = 0.1


def prepared(variant: str, model: Any, module: nn.Module) -> dict[str, Any]:
    """The method's options, with scales of inputs that were looked at where they are static; experts have none."""
    options = dict(ALL[variant])
    if options["method"] == "bitsandbytes":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if options.get("activation_scheme") == "static":
        options["ignored_layers"] = ["*.experts"] if stacks(module) else []
        options["input_scales"] = {name: amax / 448 for name, amax in largest_inputs(model, module).items()}
    return options


def stacks(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold all experts of a layer."""
    return {path: layer for path, layer in module.named_modules() if path.endswith(".experts")}


def largest_inputs(model: Any, module: nn.Module) -> Mapping[str, float]:
    found: dict[str, float] = {}
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: found.update({name: float(args[0].abs().max())}))
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear)
    ]
    run(model, module)
    for hook in hooks:
        hook.remove()
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_dequantized_model(name: str, variant: str) -> None:
    model, module = make(name)
    options = prepared(variant, model, module)
    method = parse_method(options)
    linears = {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {path for path in linears if not re.fullmatch(model.sensitive, path)}
    reference = copy.deepcopy(module)
    put_in_place(reference, {path: online(linears[path], method, path) for path in chosen})
    if not method.ignored_layers:
        experts = stacks(module)
        put_in_place(reference, {path: online_experts(layer, method) for path, layer in experts.items()})
        chosen |= set(experts)
    before, expected = run(model, module), run(model, reference)
    plain = {path: tensor.clone() for path, tensor in module.state_dict().items()}

    plan = omniplat.quantize_model(module, options, "cpu")

    assert {path for path, layer in module.named_modules() if isinstance(layer, (ModelLinear, ModelExperts))} == chosen
    assert {layer.name for layer in plan.layers if layer.status == "ok"} == chosen
    assert len({layer.executes for layer in plan.layers if layer.name in chosen}) == 1
    kept = {path: tensor for path, tensor in module.state_dict().items() if path.rpartition(".")[0] not in chosen}
    assert len(kept) == sum(path.rpartition(".")[0] not in chosen for path in plain)
    assert all(torch.equal(tensor, plain[path]) for path, tensor in kept.items())
    found = run(model, module)
    noise = relative(found, before)
    assert noise > 0
    assert relative(found, expected) <= (ARITHMETIC if method.activation is None else OF_THE_NOISE * noise)
    omniplat.restore(module)
    assert torch.equal(run(model, module), before)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_quantized_stays_in_bf16(name: str) -> None:
    model, module = make(name)
    module.to(torch.bfloat16)
    plain = {path: tensor.clone() for path, tensor in module.state_dict().items()}
    linears = {path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    plan = omniplat.quantize_model(module, prepared("mxfp8", model, module), "cpu")
    unquantized = {layer.name: layer for layer in plan.layers if layer.status == "unquantized"}
    sensitive = {path for path in linears if re.fullmatch(model.sensitive, path)}
    assert {path for path in unquantized if path in linears} == sensitive
    assert all(unquantized[path].decided_by.rule for path in sensitive)
    after = module.state_dict()
    names = [path for path in plain if path in after]
    assert {path for path in names if "norm" in path.lower() and path.endswith("weight")}
    assert {f"{path}.weight" for path in sensitive} <= set(names)
    for path in names:
        assert after[path].dtype == torch.bfloat16
        assert torch.equal(after[path], plain[path])
    found = run(model, module, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3-moe"])
def test_leading_blocks_stay_where_a_method_leaves_them(name: str) -> None:
    _, module = make(name)
    plan = omniplat.quantize_model(module, {"method": "mxfp4_dualscale", "num_bf16_fallback_layers": 1}, "cpu")
    rules = {layer.name: layer.decided_by.rule for layer in plan.layers if layer.status == "unquantized"}
    leading = {path for path, rule in rules.items() if rule == "num_bf16_fallback_layers=1"}
    (block,) = {re.match(r".*?\.\d+", path)[0] for path in leading}  # type: ignore[index]
    assert block.endswith(".0")
    assert not any(layer.name.startswith(block + ".") for layer in plan.layers if layer.status == "ok")
