"""What a layer promises whatever its scheme: shapes, dtypes, tracing, state dicts, nothing written to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing

from omniplat.errors import UsageError
from omniplat.layer import LayerSpec
from omniplat.reference.kernels import DequantLinear, Int8Linear
from omniplat.runtime.kernel import Workspaces, decode_config, encode_config, load_kernel
from omniplat.runtime.layers import CompositeLinear, LayerDescription, QuantLinear, rebuild
from omniplat.runtime.tensors import to_array, to_tensor
from omniplat.scheme import Scheme
from tests.reference.build import Weights, layer_of
from tests.reference.test_moe import Case

SCHEMES = ("bf16/a16", "fp8-channel/fp8-token", "int4-g32/a16", "mxfp8/mxfp8", "nvfp4/nvfp4")


def make(scheme_id: str, rows: int = 48, columns: int = 64, *, bias: bool = True, seed: int = 0) -> QuantLinear:
    made = Weights(seed)
    weight = made.canonical(Scheme.parse(scheme_id), rows, columns)
    if bias:
        weight = replace(weight, tensors={**weight.tensors, "bias": made.values(rows)})
    kernel = Int8Linear() if scheme_id == "int8-channel/int8-token" else DequantLinear()
    return layer_of(weight, kernel)


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scheme_id", [*SCHEMES, "int8-channel/int8-token"])
@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (3, 64), (2, 5, 64), (2, 0, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_leading_shape_and_dtype(scheme_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = make(scheme_id)
    x = inputs(*shape, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], 48)
    assert y.is_contiguous()
    rows = layer(x.reshape(-1, 64))
    assert torch.equal(y.reshape(-1, 48), rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_an_input_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=f"in bf16, f16 or f32, found .* in {str(dtype).removeprefix('torch.')}"):
        make("mxfp8/mxfp8")(torch.zeros(2, 64).to(dtype))


@pytest.mark.parametrize("scheme_id", [*SCHEMES, "int8-channel/int8-token"])
@pytest.mark.parametrize("shape", [(3, 63), (3, 32), (2, 128), (64, 1), (4, 0)])
def test_an_input_of_another_width_is_refused(scheme_id: str, shape: tuple[int, ...]) -> None:
    """Also where its numbers would fill rows of the right width: some kernels go by how many there are."""
    with pytest.raises(UsageError, match=r"takes \[..., 64\]"):
        make(scheme_id)(torch.zeros(shape))


def test_experts_refuse_an_input_of_another_width_or_dtype() -> None:
    case = Case("mxfp4/a16", 3)
    x, ids, weights = (torch.from_numpy(a) for a in (case.x, case.ids, case.weights))
    for wrong in (x[:, :-1], torch.cat([x, x], 1), x.double()):
        with pytest.raises(UsageError, match="takes"):
            case.layer(wrong, ids, weights)


@pytest.mark.parametrize("scheme_id", SCHEMES)
def test_strides_do_not_matter_and_nothing_is_written(scheme_id: str) -> None:
    layer = make(scheme_id)
    dense = inputs(6, 64)
    padded = torch.zeros(12, 160)
    padded[::2, 10:138:2] = dense
    view = padded[::2, 10:138:2]
    before, state = padded.clone(), {k: v.clone() for k, v in layer.state_dict().items()}
    assert torch.equal(layer(view), layer(dense))
    assert torch.equal(padded, before)
    assert all(torch.equal(v.view(torch.uint8), state[k].view(torch.uint8)) for k, v in layer.state_dict().items())
    assert torch.equal(layer(dense), layer(dense))


@pytest.mark.parametrize("scheme_id", ["mxfp8/a16", "int8-channel/int8-token", "mxfp4/mxfp4"])
def test_what_a_row_gives_does_not_depend_on_the_others(scheme_id: str) -> None:
    layer = make(scheme_id, 64, 256)
    x = inputs(40, 256)
    whole = layer(x)
    for row in (0, 17, 39):
        torch.testing.assert_close(layer(x[row : row + 1])[0], whole[row], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
@pytest.mark.parametrize("scheme_id", SCHEMES)
def test_casting_a_model_leaves_quantized_layers_alone(scheme_id: str, cast: str) -> None:
    layer = make(scheme_id)
    x = inputs(3, 64)
    before = layer(x)
    dtypes = {name: buffer.dtype for name, buffer in layer.named_buffers()}
    model = getattr(torch.nn.Sequential(layer, torch.nn.Linear(48, 2)), cast)()
    assert model[1].weight.dtype != torch.float32
    assert {name: buffer.dtype for name, buffer in layer.named_buffers()} == dtypes
    assert torch.equal(layer(x), before)
    assert layer.to("meta").codes.is_meta


def test_an_output_dtype_can_be_chosen() -> None:
    layer = make("mxfp8/a16")
    layer.out_dtype = torch.float32
    y = layer(inputs(3, 64, dtype=torch.bfloat16))
    assert y.dtype == torch.float32


# --- tracing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme_id", [*SCHEMES, "int8-channel/int8-token"])
def test_opcheck_of_the_linear_operator(scheme_id: str) -> None:
    layer = make(scheme_id)
    config = layer.config
    tensors = [getattr(layer, name) for name in config.names]
    for x in (inputs(3, 64), inputs(2, 3, 64, dtype=torch.bfloat16)):
        arguments = (x, tensors, layer.bias, list(config.names), config.scheme, 48, config.splits, x.dtype)
        torch.library.opcheck(torch.ops.omniplat.reference_linear.default, arguments)


def test_opcheck_of_the_expert_operator() -> None:
    case = Case("mxfp4/a16", 3)
    config = case.layer.config
    tensors = [getattr(case.layer, name) for name in config.names]
    routing = torch.from_numpy(case.ids), torch.from_numpy(case.weights)
    how = (config.w13_scheme, config.w2_scheme, list(config.splits), "swiglu-oai", ["7.0", "1.702"])
    arguments = (torch.from_numpy(case.x), tensors, *routing, None, list(config.names), *how, torch.float32)
    torch.library.opcheck(torch.ops.omniplat.reference_moe.default, arguments)


class Block(torch.nn.Module):
    """Two layers and something between, as a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make("mxfp4/mxfp4", 64, 64)
        self.second = make("int8-channel/int8-token", 32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.first(x))) * 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph_for_any_number_of_rows(backend: str) -> None:
    block = Block()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for rows in (2, 3, 17, 64):
        x = inputs(rows, 64, seed=rows)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


def test_experts_compile_as_one_graph() -> None:
    case = Case("mxfp4/a16", 4)
    torch._dynamo.reset()
    compiled = torch.compile(case.layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x, ids, weights = (torch.from_numpy(a) for a in (case.x, case.ids, case.weights))
    for rows in (4, 3, 2):
        arguments = x[:rows], ids[:rows], weights[:rows]
        assert torch.equal(compiled(*arguments), case.layer(*arguments))


# --- state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme_id", [*SCHEMES, "int8-channel/int8-token"])
def test_a_layer_is_rebuilt_from_its_description_and_state(scheme_id: str, tmp_path: object) -> None:
    from safetensors.torch import load, save

    layer = make(scheme_id)
    state = load(save(layer.state_dict()))
    again = rebuild(LayerDescription.from_json(layer.describe().to_json()), state)
    x = inputs(5, 64)
    assert torch.equal(again(x), layer(x))
    assert again.spec == layer.spec
    assert all(not buffer.is_meta for buffer in again.buffers())


def test_experts_are_rebuilt() -> None:
    case = Case("nvfp4/nvfp4", 4)
    again = rebuild(LayerDescription.from_json(case.layer.describe().to_json()), case.layer.state_dict())
    x, ids, weights = (torch.from_numpy(a) for a in (case.x, case.ids, case.weights))
    assert torch.equal(again(x, ids, weights), case.layer(x, ids, weights))


def test_a_state_of_another_scheme_with_the_same_shapes_is_refused() -> None:
    other = make("mxint8/a16")
    layer = make("mxfp8/a16")
    state = {k: v.view(torch.uint8) if k == "codes" else v for k, v in other.state_dict().items()}
    assert {k: v.shape for k, v in state.items() if k != "_extra_state"} == {
        k: v.shape for k, v in layer.state_dict().items() if k != "_extra_state"
    }
    with pytest.raises(UsageError, match="the state is that of"):
        layer.load_state_dict(state)
    with pytest.raises(UsageError):
        rebuild(layer.describe(), state)


def test_an_incomplete_state_is_refused() -> None:
    layer = make("mxfp8/a16")
    state = layer.state_dict()
    del state["scale"]
    with pytest.raises(UsageError, match="scale"):
        rebuild(layer.describe(), state)


def test_configs_survive_json_and_are_hashable() -> None:
    layer = make("int8-channel/int8-token")
    again = decode_config(layer.kernel, encode_config(layer.config))
    assert again == layer.config
    assert hash(again) == hash(layer.config)
    with pytest.raises(UsageError, match="is not a config"):
        decode_config(layer.kernel, '{"names": 3}')
    with pytest.raises(UsageError):
        LayerDescription.from_json("{}")


def test_repr_names_scheme_and_kernel() -> None:
    text = repr(make("mxfp8/mxfp8"))
    assert "mxfp8/mxfp8" in text
    assert "dequant_linear" in text
    assert "bias=True" in text


def test_a_composite_concatenates_its_parts() -> None:
    parts = {"q": make("int4-g32/a16", 32), "v": make("int8-channel/a16", 16)}
    composite = CompositeLinear(parts)
    x = inputs(3, 64)
    assert torch.equal(composite(x), torch.cat([parts["q"](x), parts["v"](x)], -1))


# --- smaller pieces ----------------------------------------------------------------------------------------------


def test_tensors_keep_bytes_and_share_memory() -> None:
    import ml_dtypes
    import numpy as np

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.int16, np.float16):
        size = np.dtype(dtype).itemsize
        array = np.arange(0, 120 * size, dtype=np.uint8).view(dtype).reshape(4, 30)
        tensor = to_tensor(array)
        assert tensor.shape == (4, 30)
        assert to_array(tensor).tobytes() == array.tobytes()
        assert to_array(tensor).dtype == array.dtype
        assert np.shares_memory(to_array(tensor), array)


def test_read_only_memory_is_copied() -> None:
    import numpy as np

    array = np.arange(6, dtype=np.float32)
    array.setflags(write=False)
    tensor = to_tensor(array)
    tensor[0] = 9
    assert array[0] == 0


def test_workspaces_belong_to_device_and_stream() -> None:
    spaces = Workspaces()
    cpu = torch.device("cpu")
    first = spaces.get(cpu, 0, 64)
    assert first is not None
    assert spaces.get(cpu, 0, 32) is first
    assert spaces.get(cpu, 1, 32) is not first
    assert spaces.get(cpu, 0, 0) is None
    larger = spaces.get(cpu, 0, 128)
    assert larger is not None
    assert larger.numel() >= 128
    assert not larger.any()


def test_kernels_are_found_by_name() -> None:
    from omniplat.errors import BackendLoadError

    assert isinstance(load_kernel("omniplat.reference.kernels:DequantLinear"), DequantLinear)
    for impl in ("omniplat.reference.nowhere:X", "omniplat.reference.kernels:Nothing", "omniplat.scheme:Scheme"):
        with pytest.raises(BackendLoadError, match=impl):
            load_kernel(impl)


def test_a_kernel_may_not_take_the_name_bias() -> None:
    from omniplat.runtime.kernel import Prepared

    spec = LayerSpec("l", "linear", 2, 2, Scheme.parse("bf16/a16"))
    with pytest.raises(UsageError, match="bias"):
        QuantLinear(spec, DequantLinear(), Prepared({"bias": torch.zeros(2)}, None))
