"""HunyuanImage-3 in vllm-omni: its loader puts fused rows in order itself, and hands them over in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omniplat.api import load_layers, make_planned
from omniplat.integrations.vllm_config import OmniplatConfig
from omniplat.integrations.vllm_loading import MEMBER
from tests.vllm.engine import engine
from tests.vllm.hunyuan import MAPPER, build, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"


def test_every_layer_is_what_the_file_gives(one_rank: None, default_bf16: None) -> None:
    planned = make_planned(EXAMPLE, "cpu", engine="vllm")
    config = OmniplatConfig(planned)
    config.apply_vllm_mapper(MAPPER)
    with engine(1), torch.no_grad():
        model = build(EXAMPLE, config, 2)
        load(model, EXAMPLE)
    engines = {name: getattr(m, MEMBER) for name, m in model.named_modules() if hasattr(m, MEMBER)}
    alone = {name: module for name, _, module in load_layers(planned) if name.startswith("model.layers.")}
    renamed = {
        name.removeprefix("model.").replace("gate_and_up_proj", "gate_up_proj").replace("gate.wg", "gate"): module
        for name, module in alone.items()
    }
    assert len(renamed) == 10
    assert {name.replace(".routed_experts", "") for name in engines} == set(renamed)
    for name, module in engines.items():
        expected = renamed[name.replace(".routed_experts", "")]
        found, wanted = dict(module.named_buffers()), dict(expected.named_buffers())
        assert found.keys() == wanted.keys()
        for buffer in wanted:
            assert torch.equal(found[buffer].view(torch.uint8), wanted[buffer].view(torch.uint8)), f"{name} {buffer}"


@pytest.fixture
def default_bf16() -> object:
    torch.set_default_dtype(torch.bfloat16)
    yield None
    torch.set_default_dtype(torch.float32)
