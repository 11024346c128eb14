"""What vLLM's loaders do to tensors that they cannot deliver: the rules of `omniplat.engines` on the real ones."""

from __future__ import annotations

import inspect
import pickle
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models import qwen2_moe, qwen3_moe, qwen3_next
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.model_executor.utils import set_weight_attrs

from omniplat.api import make_planned
from omniplat.engines import _ATTENTION_SCALE
from omniplat.errors import InvalidCheckpointError
from omniplat.integrations.vllm import OmniplatLinearMethod
from omniplat.integrations.vllm_config import OmniplatConfig
from tests.vllm.checks import BUNDLED, folder_of
from tests.vllm.engine import engine, tensors_of
from tests.vllm.four_bit_checks import HIDDEN as COLUMNS
from tests.vllm.four_bit_checks import write
from tests.vllm.hunyuan import MAPPER, build

EXAMPLE = Path(__file__).parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"
INNER, HIDDEN, EXPERTS = 8, 16, 4


# --- names -------------------------------------------------------------------------------------------------------


def test_a_name_with_a_dot_reaches_no_parameter(one_rank: None) -> None:
    with engine(1):
        layer = ReplicatedLinear(8, 8, bias=False, prefix="a")
    with pytest.raises(KeyError, match=r"parameter name can.*contain"):
        layer.register_parameter("weight.absmax", nn.Parameter(torch.zeros(1)))
    model = nn.Module()
    model.a = layer
    with pytest.raises(ValueError, match="nested weight"):
        AutoWeightsLoader(model).load_weights([("a.weight.absmax", torch.zeros(1))])


def test_group_orders_are_dropped_unless_the_config_says_otherwise() -> None:
    names = ["model.layers.0.mlp.down_proj.g_idx", "model.layers.0.mlp.down_proj.weight_g_idx"]
    assert QuantizationConfig.get_checkpoint_weight_mapper().apply_list(names) == names[1:]
    planned = make_planned(folder_of("ar016-qwen3-w4a16"), "cpu")
    assert OmniplatConfig(planned).get_checkpoint_weight_mapper().apply_list(names) == names


@pytest.mark.parametrize(
    "name",
    [
        *("self_attn.k_proj.k_scale", "self_attn.kv_scale", "self_attn.v_zero_point", "self_attn.q.scale"),
        *("self_attn.k_cache.scale", "self_attn.q_proj.weight_scale", "self_attn.k_proj.scale", "mlp.up_proj.scales"),
        *("self_attn.o_proj.input_scale", "self_attn.q_proj.zero_point", "self_attn.qkv_proj.qzeros"),
    ],
)
def test_names_that_are_taken_for_scales_of_the_attention(name: str) -> None:
    full = f"model.layers.0.{name}"
    moved = QuantizationConfig.get_cache_scale_mapper().apply_list([full]) != [full]
    assert moved == bool(_ATTENTION_SCALE.search(full))


def test_no_tensor_of_the_checkpoints_here_is_renamed() -> None:
    mapper = QuantizationConfig.get_cache_scale_mapper() | AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
    for folder in [EXAMPLE, *(path for path in BUNDLED.glob("*/checkpoint"))]:
        names = [name for name, _ in tensors_of(folder)]
        assert mapper.apply_list(names) == names


def test_the_config_travels_to_other_processes(one_rank: None) -> None:
    config = OmniplatConfig(make_planned(EXAMPLE, "cpu"))
    config.apply_vllm_mapper(MAPPER)
    copy = pickle.loads(pickle.dumps(config))
    with engine(1):
        layer = ReplicatedLinear(256, 256, bias=False, quant_config=copy, prefix="layers.0.self_attn.o_proj")
    assert set(dict(layer.named_parameters())) == {"weight", "weight_scale"}


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_quantized_vocabulary_layers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / "c", "qwen3", {name: (320, COLUMNS), "model.layers.0.mlp.up_proj": (256, COLUMNS)}, "nf4")
    planned = make_planned(tmp_path / "c", "cpu")
    assert [item.layer.status for item in planned.layers] == ["ok", "ok"]
    with pytest.raises(InvalidCheckpointError, match=f"{name}: vllm cannot load it: its vocabulary layers"):
        OmniplatConfig(planned)


def test_routers_run_quantized(one_rank: None, tmp_path: Path) -> None:
    """vLLM builds them as it builds other linear layers that every rank has whole."""
    at = "model.layers.0.mlp.gate"
    made = write(tmp_path / "c", "qwen3_moe", {at: (8, COLUMNS)}, "nf4")[at]
    config = OmniplatConfig(make_planned(tmp_path / "c", "cpu", engine="vllm"))
    x = torch.randn(5, COLUMNS)
    with engine(1), torch.no_grad():
        gate = ReplicatedLinear(COLUMNS, 8, bias=False, quant_config=config, prefix=at)
        mapper = config.get_checkpoint_weight_mapper()
        for name, tensor in mapper.apply(tensors_of(tmp_path / "c")):
            param = gate.get_parameter(name.removeprefix(f"{at}."))
            param.weight_loader(param, tensor)
        gate.quant_method.process_weights_after_loading(gate)
        wanted = x.double().numpy() @ made.values.T
        found = gate(x)[0].double().numpy()
    assert isinstance(gate.quant_method, OmniplatLinearMethod)
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("module", [qwen2_moe, qwen3_moe, qwen3_next])
def test_gates_of_shared_experts_are_built_plain(module: ModuleType) -> None:
    source = inspect.getsource(module)
    built = re.findall(r"shared_expert_gate = ReplicatedLinear\((.*?)\n +\)", source, re.DOTALL)
    assert built
    assert all("quant_config=None" in arguments for arguments in built)


def test_vocabulary_layers_are_no_linear_layers() -> None:
    assert not issubclass(ParallelLMHead, LinearBase)
    planned = make_planned(folder_of("ar016-qwen3-w4a16"), "cpu")
    head = ParallelLMHead.__new__(ParallelLMHead)
    assert OmniplatConfig(planned).get_quant_method(head, "lm_head") is None


def test_what_the_checkpoint_does_not_hold_is_refused(one_rank: None) -> None:
    config = OmniplatConfig(make_planned(folder_of("ar016-qwen3-w4a16"), "cpu"))
    with engine(1):
        with pytest.raises(InvalidCheckpointError, match="no weight of this name"):
            ReplicatedLinear(8, 8, quant_config=config, prefix="model.layers.7.mlp.gate")
        with pytest.raises(InvalidCheckpointError, match="rows"):
            ReplicatedLinear(256, 8, bias=False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")
        plain = ReplicatedLinear(256, 320, bias=False, quant_config=config, prefix="lm_head")
        assert isinstance(plain.quant_method, UnquantizedLinearMethod)
        layer = ReplicatedLinear(256, 256, bias=False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")
    with pytest.raises(InvalidCheckpointError, match="did not deliver"):
        layer.quant_method.process_weights_after_loading(layer)


# --- experts -----------------------------------------------------------------------------------------------------


class Recording(FusedMoEMethodBase):
    """Parameters of the given names that write down what they are given."""

    def __init__(self, moe: Any, names: tuple[str, ...]) -> None:
        super().__init__(moe)
        self.names = names
        self.calls: list[tuple[str, str, int, torch.Tensor]] = []

    def create_weights(self, layer: RoutedExperts, *_: Any, **__: Any) -> None:
        for name in self.names:
            param = nn.Parameter(torch.empty(0), requires_grad=False)
            layer.register_parameter(name, param)
            set_weight_attrs(param, {"weight_loader": partial(self.record, name)})

    def record(
        self,
        name: str,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        self.calls.append((name, shard_id, expert_id, loaded_weight))
        return True

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None


class RecordingConfig(OmniplatConfig):
    def __init__(self, *names: str) -> None:
        QuantizationConfig.__init__(self)
        self.names = names

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Recording | UnquantizedLinearMethod:
        return (
            Recording(layer.moe_config, self.names) if isinstance(layer, RoutedExperts) else UnquantizedLinearMethod()
        )


@pytest.fixture
def delivered(one_rank: None, request: pytest.FixtureRequest) -> Any:
    """Load one tensor below `experts` and tell what came of it."""

    def load(name: str, tensor: torch.Tensor, *names: str) -> list[tuple[str, str, int, torch.Tensor]]:
        with engine(1):
            experts = FusedMoEFactory(
                num_experts=EXPERTS, top_k=2, hidden_size=HIDDEN, intermediate_size=INNER,
                quant_config=RecordingConfig(*names), prefix=f"{request.node.name}.{name}.mlp.experts",
            )  # fmt: skip
        list(experts.load_weights([(name, tensor)]))
        calls: list[tuple[str, str, int, torch.Tensor]] = experts.routed_experts.quant_method.calls
        return calls

    return load


def test_stacks_of_three_dimensions_come_in_pieces(delivered: Any) -> None:
    stack = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
    calls = delivered("gate_up_proj_scale", stack, "w13_weight_scale")
    assert {name for name, *_ in calls} == {"w13_weight_scale"}
    for expert in range(EXPERTS):
        halves = {shard: tensor for _, shard, number, tensor in calls if number == expert}
        assert torch.equal(torch.cat([halves["w1"], halves["w3"]]), stack[expert])
    down = delivered("down_proj", stack, "w2_weight")
    assert [(shard, number) for _, shard, number, _ in down] == [("w2", e) for e in range(EXPERTS)]


@pytest.mark.parametrize("shape", [(EXPERTS, 2 * INNER, 2, 8), (EXPERTS, 2 * INNER)])
def test_other_stacks_come_as_the_first_experts(delivered: Any, shape: tuple[int, ...]) -> None:
    calls = delivered("gate_up_proj_blocks", torch.randn(shape), "w13_weight_blocks")
    assert {(shard, number, tensor.shape) for _, shard, number, tensor in calls} == {
        ("w1", 0, torch.Size(shape)),
        ("w3", 1, torch.Size(shape)),
    }


def test_stacks_of_other_names_are_dropped(delivered: Any) -> None:
    assert delivered("gate_proj", torch.randn(EXPERTS, INNER, HIDDEN), "w13_weight") == []


def test_fused_experts_come_in_halves_and_one_value_cannot(delivered: Any) -> None:
    weight = torch.randn(2 * INNER, HIDDEN)
    calls = delivered("1.gate_up_proj.weight", weight, "w13_weight")
    assert [(shard, number) for _, shard, number, _ in calls] == [("w1", 1), ("w3", 1)]
    assert torch.equal(torch.cat([tensor for *_, tensor in calls]), weight)
    with pytest.raises(IndexError):
        delivered("2.gate_up_proj.weight_scale", torch.ones(1), "w13_weight_scale")


# --- vllm-omni's HunyuanImage-3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("self_attn.qkv_proj.weight_scale", (384,), IndexError),
        ("self_attn.qkv_proj.weight_scale", (24, 8), RuntimeError),
        ("mlp.shared_mlp.gate_and_up_proj.weight_scale", (3, 8), AssertionError),
        ("mlp.experts.0.gate_and_up_proj.weight_scale", (3, 8), AssertionError),
    ],
)
def test_rows_that_cannot_be_put_in_order(
    one_rank: None, name: str, shape: tuple[int, ...], error: type[Exception]
) -> None:
    config = OmniplatConfig(make_planned(EXAMPLE, "cpu"))
    config.apply_vllm_mapper(MAPPER)
    with engine(1):
        model = build(EXAMPLE, config, 1)
    with pytest.raises(error):
        model.load_weights([(f"layers.0.{name}", torch.zeros(shape))])
