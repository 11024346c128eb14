"""What engines do with the memory of omniplat's layers: sleep mode, offloading, and loading for a model that is to be
offloaded. vllm-omni's offloaders and HSDP are in `moving_checks.py`, which two ranks run."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.v1.worker.gpu_worker import Worker
from vllm_omni.quantization import build_quant_config

from omniplat.api import make_planned
from omniplat.errors import UsageError
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_loading import MEMBER, attach
from tests.vllm.checks import folder_of, inputs
from tests.vllm.engine import ExpertLayer, Model, engine, load
from tests.vllm.test_limits import EXAMPLE

STORED = "lc-qwen3-mixed-fp8-w4-mxfp4"
EXPERTS = "lc-qwen3moe-mxfp4"
EVERYTHING = frozenset({"attention", "mlp", "down"})


def built(name: str) -> nn.Module:
    folder = folder_of(name)
    config, quant = json.loads((folder / "config.json").read_text()), OmniplatConfig(make_planned(folder, "cpu"))
    return ExpertLayer(config, quant) if name == EXPERTS else Model(config, quant, EVERYTHING)


def loaded(name: str) -> nn.Module:
    model = built(name)
    load(model, folder_of(name))
    return model


def members(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == MEMBER]


def tensors_behind(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that is reached from a module's attributes, by whatever way."""
    seen: set[int] = set()
    waiting: list[object] = [module.__dict__]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, MethodType)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            waiting.extend(gc.get_referents(item))


# --- sleep mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [STORED, EXPERTS])
def test_all_that_a_layer_holds_is_in_its_buffers(name: str, one_rank: None) -> None:
    """Level 1 of sleep mode keeps all memory that was taken while loading; level 2 keeps buffers, and nothing else."""
    with engine(1):
        model = loaded(name)
    found = members(model)
    assert found
    for member in found:
        known = {tensor.untyped_storage().data_ptr() for tensor in member.buffers()}
        reached = list(tensors_behind(member))
        assert len(reached) >= len(list(member.buffers())) > 0
        assert {tensor.untyped_storage().data_ptr() for tensor in reached} <= known
        assert not list(member.parameters())


def test_level_two_wakes_up_with_the_same_layers(one_rank: None) -> None:
    """Sleep mode needs an allocator that no CPU has. Its steps are taken without it here: buffers are saved by
    name, memory loses its contents, and they are written back."""
    source = inspect.getsource(Worker.sleep) + inspect.getsource(Worker.wake_up)
    assert "name: buffer.cpu().clone() for name, buffer in model.named_buffers()" in source
    assert "buffer.data.copy_(self._sleep_saved_buffers[name].data)" in source
    with engine(1), torch.no_grad():
        model = loaded(STORED)
        layers = [module for module in model.modules() if hasattr(module, MEMBER)]
        xs = [next(inputs(layer.input_size)) for layer in layers]
        before = [layer(x)[0] for layer, x in zip(layers, xs, strict=True)]
        saved = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
        for tensor in (*model.buffers(), *model.parameters()):
            tensor.data.untyped_storage().fill_(0x5A)
        asleep = [layer(x)[0] for layer, x in zip(layers, xs, strict=True)]
        assert not any(torch.equal(a, b) for a, b in zip(before, asleep, strict=True))
        for name, buffer in model.named_buffers():
            buffer.data.copy_(saved[name].data)
        after = [layer(x)[0] for layer, x in zip(layers, xs, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- offloading by vLLM ------------------------------------------------------------------------------------------


def offloading(config: VllmConfig, **options: object) -> None:
    for option, value in options.items():
        part = config.offload_config.uva if option.startswith("cpu_offload") else config.offload_config.prefetch
        setattr(part, option, value)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb"),
        ({"cpu_offload_gb": 1.0, "cpu_offload_params": {"self_attn"}}, "cpu_offload_gb"),
        ({"cpu_offload_gb": 1.0, "cpu_offload_params": {"o_proj.qweight"}}, "cpu_offload_gb"),
        ({"offload_group_size": 2}, "offload_group_size"),
        ({"offload_group_size": 2, "offload_params": {"norm", "mlp", "o_proj"}}, "offload_group_size"),
        ({}, ""),
        ({"cpu_offload_gb": 1.0, "cpu_offload_params": {"embed_tokens", "o_proj.qweights"}}, ""),
        ({"offload_group_size": 2, "offload_params": {"norm"}}, ""),
    ],
)
def test_offloading_by_vllm_is_refused_where_it_would_leave_a_layer_out(
    options: dict[str, object], option: str, one_rank: None
) -> None:
    config = OmniplatConfig(make_planned(folder_of("ar016-qwen3-w4a16"), "cpu"))
    name = "model.layers.0.self_attn.o_proj"
    with engine(1) as current:
        offloading(current, **options)
        if not option:
            ReplicatedLinear(256, 256, bias=False, quant_config=config, prefix=name)
            return
        with pytest.raises(UsageError, match=f"{name}: {option} takes parameters"):
            ReplicatedLinear(256, 256, bias=False, quant_config=config, prefix=name)


# --- loading by vllm-omni for a model that is to be offloaded ----------------------------------------------------


class Recording(nn.Module):
    """Says where it was moved to: there is no other device here."""

    places: tuple[object, ...] = ()

    def to(self, *places: object) -> Recording:  # type: ignore[override]
        self.places = places
        return self


@pytest.mark.parametrize("name", [STORED, EXPERTS])
def test_layers_go_to_the_host_as_they_are_made(name: str, one_rank: None) -> None:
    """vllm-omni's loader asks quantization methods for it; without, the whole model would be on the device first."""
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    with engine(1):
        model = built(name)
        layers = [module for module in model.modules() if hasattr(module, "quant_method")]
        assert DiffusersPipelineLoader._request_offload_after_quant(model) == len(layers)
        assert all(layer.quant_method._loading.to_host for layer in layers)
        # Nor are they on the list of methods that ranks cannot share while they offload, which are to be on `meta`.
        assert DiffusersPipelineLoader._unsupported_dlo_allgather_online_quant_methods(model) == ()
        load(model, folder_of(name))
    assert len(members(model)) == len(layers)
    for to_host in (False, True):
        layer = nn.Module()
        attach(layer, Recording(), to_host)
        assert getattr(layer, MEMBER).places == (("cpu",) if to_host else ())


def test_vllm_omni_takes_no_checkpoint_for_ready() -> None:
    """It would load it into host memory where it is to be offloaded, and have ranks copy one rank's parameters."""
    metadata = json.loads((EXAMPLE / "config.json").read_text())["quantization_config"]
    assert metadata["data_type"] == "mx_fp"
    config = build_quant_config(metadata)
    for planned in (False, True):
        if planned:
            config.maybe_update_config(str(EXAMPLE))
        assert not config.is_checkpoint_quantized
        assert config.data_type is None
