"""Layers over vLLM's kernels: against the oracle, on vLLM's operators where they are and on their emulation elsewhere.

On a CUDA device the operators are those of an installed vLLM, or of the module that OMNIPLAT_VLLM_OPS names, whose
import registers them; skipped tests say what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from omniplat_cuda.capabilities import vllm as declared
from omniplat_cuda.kernels import vllm_ops
from omniplat_cuda.spec import SPEC

from omniplat import oracle
from omniplat.canonical import CanonicalWeight
from omniplat.capability import Capability
from omniplat.conformance import expected
from omniplat.conformance.tolerances import excess
from omniplat.conformance.weights import random_weight
from omniplat.device import Device, parse_device
from omniplat.emulation import Emulation, VendorError, emulate
from omniplat.emulation.cuda.schemas import SCHEMAS
from omniplat.errors import BackendLoadError, InvalidCheckpointError, UnsupportedCombinationError, UsageError
from omniplat.layer import LayerSpec
from omniplat.match import Policy, match
from omniplat.runtime.kernel import LinearKernel, Workspaces, load_kernel
from omniplat.runtime.layers import QuantLinear
from omniplat.runtime.tensors import DTYPES, to_torch
from omniplat.scheme import Scheme

BY_NAME = {capability.name: capability for capability in declared.CAPABILITIES}
CASES = [
    (capability.name, f"{weight}/{activation}")
    for capability in declared.CAPABILITIES
    for weight in capability.weights
    for activation in ([capability.executes] if capability.executes else capability.activations)
]
each_scheme = pytest.mark.parametrize(("kernel", "scheme"), CASES)
#: With the dtype: the driver takes minutes to compile Marlin for f16 (`-k "not in-f16"`).
each_dtype = pytest.mark.parametrize(
    ("kernel", "scheme", "dtype"),
    [
        pytest.param(*case, dtype, id=f"{case[0]}-{case[1]}-in-{dtype}")
        for case in CASES
        for dtype in BY_NAME[case[0]].dtypes
    ],
)
N, K = 128, 256


def missing_on_cuda() -> str:
    """Why vLLM's operators do not run here; "" where they do."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        if module := os.environ.get("OMNIPLAT_VLLM_OPS"):
            import_module(module)
        vllm_ops.operator("marlin_gemm")
    except (ImportError, OSError, BackendLoadError) as error:
        return str(error)
    return ""


MISSING = missing_on_cuda()
needs_vllm = pytest.mark.skipif(bool(MISSING), reason=MISSING or "vLLM's operators are here")


def emulated() -> AbstractContextManager[Emulation]:
    if not MISSING:
        pytest.skip("vLLM's own operators are registered: they are not emulated beside them")
    return emulate("cuda:sm90")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=needs_vllm)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where layers run. No call may be one that vLLM would accept and compute something else with."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with emulated() as emulation:
        yield torch.device("cpu")
        assert emulation.violations == []


def layer_of(
    kernel: str, weight: CanonicalWeight, device: torch.device, dtype: str = "bf16", name: str = "layer"
) -> QuantLinear:
    built = load_kernel(BY_NAME[kernel].impl)
    assert isinstance(built, LinearKernel)
    assert built.name == kernel
    spec = LayerSpec(name, "linear", weight.out_features, weight.in_features, weight.scheme, dtype=dtype)
    layer = QuantLinear(spec, built, built.prepare(to_torch(weight, device=device), spec))
    layer.share_workspace(Workspaces())
    return layer


def weight_of(scheme: Scheme, n: int = N, k: int = K) -> CanonicalWeight:
    return random_weight(scheme, n, k, np.random.default_rng(0))


def check(layer: QuantLinear, weight: CanonicalWeight, x: torch.Tensor, capability: Capability, dtype: str) -> None:
    """Within what the declared accumulator, the re-encoding and the output's rounding allow of the oracle's layer."""
    y = layer(x)
    assert y.dtype == DTYPES[dtype]
    assert y.is_contiguous()
    assert y.shape == (*x.shape[:-1], weight.out_features)
    values = x.cpu().to(torch.float32).numpy().reshape(-1, weight.in_features)
    wanted = expected.linear(values, weight, capability, dtype)
    found = y.cpu().to(torch.float64).numpy().reshape(wanted.y.shape)
    assert not (problem := excess(found, wanted.y, wanted.allowed)), str(problem)


@each_dtype
def test_a_layer_computes_what_the_oracle_does(kernel: str, scheme: str, dtype: str, device: torch.device) -> None:
    """Any number of rows, any strides, every rule for scales of inputs that is declared."""
    capability, parsed = BY_NAME[kernel], Scheme.parse(scheme)
    weight = weight_of(parsed)
    rules = capability.scale_rules if parsed.activation and capability.executes in ("", parsed.activation_id) else ()
    torch.manual_seed(0)
    for rule in ("", *rules):
        activation = parsed.activation
        if rule and activation is not None:
            activation = replace(activation, scale_rule=rule)
        ruled = replace(weight, scheme=parsed.with_activation(activation))
        layer = layer_of(kernel, ruled, device, dtype)
        for rows in (1, 17, 257) if device.type == "cuda" else (1, 17):
            x = torch.randn(rows, K, device=device).to(DTYPES[dtype])
            check(layer, ruled, x, capability, dtype)
        check(layer, ruled, torch.randn(2, 3, 2 * K, device=device).to(DTYPES[dtype])[..., ::2], capability, dtype)
    assert layer(torch.empty(0, K, device=device, dtype=DTYPES[dtype])).shape == (0, N)


@each_dtype
def test_a_bias_is_added(kernel: str, scheme: str, dtype: str, device: torch.device) -> None:
    bare = weight_of(Scheme.parse(scheme))
    # in the output's dtype, as every checkpoint's is
    bias = torch.linspace(-3, 3, N).to(DTYPES[dtype])
    weight = replace(bare, tensors={**bare.tensors, "bias": bias.float().numpy()})
    torch.manual_seed(1)
    x = torch.randn(9, K, device=device).to(DTYPES[dtype])
    layer = layer_of(kernel, bare, device, dtype)
    tensors = dict(layer.named_buffers())
    y = layer.kernel.apply(layer.config, tensors, x, bias.to(device), DTYPES[dtype], layer.workspace)
    wanted = expected.linear(x.cpu().float().numpy(), weight, BY_NAME[kernel], dtype)
    assert not (problem := excess(y.double().cpu().numpy(), wanted.y, wanted.allowed)), str(problem)


@each_scheme
def test_smoothing_is_applied(kernel: str, scheme: str, device: torch.device) -> None:
    bare = weight_of(replace(Scheme.parse(scheme), pre_scale=True))
    # powers of two: what is rounded after smoothing is what the oracle rounds
    smooth = np.exp2(np.arange(K) % 3 - 1).astype(np.float32)
    weight = replace(bare, tensors={**bare.tensors, "pre_scale": smooth})
    torch.manual_seed(2)
    x = torch.randn(9, K, device=device).bfloat16()
    check(layer_of(kernel, weight, device), weight, x, BY_NAME[kernel], "bf16")


@each_scheme
def test_rows_of_any_magnitude(kernel: str, scheme: str, device: torch.device) -> None:
    """Each row is as exact as the others, over 24 binades."""
    weight = weight_of(Scheme.parse(scheme))
    torch.manual_seed(3)
    x = torch.randn(25, K, device=device) * torch.exp2(torch.arange(-12, 13, device=device)).unsqueeze(1)
    if "-tensor" in scheme.partition("/")[2]:
        x = x[12:13]  # one scale for all rows
    check(layer_of(kernel, weight, device), weight, x.bfloat16(), BY_NAME[kernel], "bf16")


@pytest.mark.parametrize("kernel", BY_NAME)
def test_a_layer_traces(kernel: str, device: torch.device) -> None:
    scheme = next(scheme for name, scheme in CASES if name == kernel)
    layer = layer_of(kernel, weight_of(Scheme.parse(scheme)), device)
    x = torch.randn(17, K, device=device).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (17, 3):
        torch.testing.assert_close(compiled(x[:rows]), layer(x[:rows]), rtol=0, atol=0)


@needs_vllm
@each_scheme
def test_a_graph_replays(kernel: str, scheme: str) -> None:
    layer = layer_of(kernel, weight_of(Scheme.parse(scheme)), torch.device("cuda"))
    x = torch.randn(17, K, device="cuda").bfloat16()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(17, K, device="cuda"))
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)
    assert layer.workspace is None or not bool(layer.workspace.any()), "locks are left as they were found"


# -- what the kernels refuse ------------------------------------------------------------------------------------


def edited(scheme: str, role: str, value: float) -> CanonicalWeight:
    """A weight with another first number in one role: of formats of one byte, the byte."""
    weight = weight_of(Scheme.parse(scheme))
    array = np.array(weight.tensors[role])
    flat = array.view(np.uint8).reshape(-1) if array.dtype.itemsize == 1 else array.reshape(-1)
    flat[0] = value
    return replace(weight, tensors={**weight.tensors, role: array})


@pytest.mark.parametrize(
    ("kernel", "scheme", "role", "value"),
    [
        ("vllm_cutlass_fp8", "fp8-channel/fp8-token", "codes", 0xFF),
        ("vllm_cutlass_mxfp8", "mxfp8/mxfp8", "scale", 0xFF),
        ("vllm_marlin_fp8", "fp8-channel/a16", "codes", 0x7F),
        ("vllm_marlin_mx", "mxfp8/a16", "codes", 0xFF),
        ("vllm_marlin_mx", "mxfp4/a16", "scale", 0xFF),
        ("vllm_marlin_nvfp4", "nvfp4/a16", "scale", 0x7F),
        ("vllm_marlin_nvfp4", "nvfp4/a16", "global_scale", np.nan),
    ],
)
def test_nan_is_refused(kernel: str, scheme: str, role: str, value: float) -> None:
    with emulated(), pytest.raises(InvalidCheckpointError, match="NaN"):
        layer_of(kernel, edited(scheme, role, value), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kernel", "weight", "dtype", "reason"),
    [
        ("vllm_marlin_int", edited("int4-g128/a16", "scale", 1e6), "f16", "range of f16"),
        ("vllm_marlin_int", edited("int4-g128/a16", "scale", 1e-12), "f16", "range of f16"),
        ("vllm_marlin_fp8", edited("fp8-channel/a16", "scale", 300.0), "bf16", "below 256"),
        ("vllm_marlin_uint4", edited("uint4-g128/a16", "zero_point", 16), "bf16", "from 0 to 15"),
        # 2^-9, which f16 has no room to raise
        ("vllm_marlin_nvfp4", edited("nvfp4/a16", "scale", 0x01), "f16", "would become 0"),
        ("vllm_marlin_nvfp4", edited("nvfp4/a16", "scale", 0xB8), "bf16", "not negative"),
        ("vllm_marlin_int", weight_of(Scheme.parse("int4-g128/a16"), 96, 256), "bf16", "multiple of 64"),
        ("vllm_marlin_int", weight_of(Scheme.parse("int4-g64/a16"), 128, 192), "bf16", "multiple of 128"),
        ("vllm_marlin_fp8", weight_of(Scheme.parse("fp8-block128x128/a16")), "bf16", "needs weight"),
        ("vllm_cutlass_int8", weight_of(Scheme.parse("int8-channel/int8-token"), 40, 256), "bf16", "multiples of 16"),
        ("vllm_cutlass_fp8", weight_of(Scheme.parse("fp8-channel/a16")), "bf16", "needs fp8"),
    ],
)
def test_what_they_cannot_hold_is_refused(kernel: str, weight: CanonicalWeight, dtype: str, reason: str) -> None:
    with emulated(), pytest.raises(UnsupportedCombinationError, match=reason):
        layer_of(kernel, weight, torch.device("cpu"), dtype)


def test_outputs_in_32_bits_are_refused() -> None:
    with emulated():
        for kernel, scheme in (("vllm_cutlass_fp8", "fp8-channel/fp8-token"), ("vllm_marlin_mx", "mxfp4/a16")):
            layer = layer_of(kernel, weight_of(Scheme.parse(scheme)), torch.device("cpu"))
            with pytest.raises(UsageError, match="computes in"):
                layer.kernel.apply(
                    layer.config, dict(layer.named_buffers()), torch.ones(1, K), None, torch.float32, None
                )


def test_parts_with_global_scales_of_their_own_are_one_layer(device: torch.device) -> None:
    scheme = Scheme.parse("nvfp4/a16")
    weight = weight_of(scheme)
    scale = np.where(np.arange(N) < 64, 0.75, 0.03).astype(np.float32).reshape(N, 1)
    weight = replace(weight, tensors={**weight.tensors, "global_scale": scale})
    layer = layer_of("vllm_marlin_nvfp4", weight, device)
    assert "row_scale" in dict(layer.named_buffers())
    x = torch.randn(5, K, device=device).bfloat16()
    # the product is rounded before the rows' own scales
    wanted = oracle.linear(x.cpu().float().numpy(), weight)
    found = layer(x).double().cpu().numpy()
    assert np.abs(found - wanted).max() <= 2.0**-6 * np.abs(wanted).max()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 2.0**-8


def test_vllms_quantizers_are_called_where_their_rule_is_declared() -> None:
    """Elsewhere omniplat's are: codes are the declared ones either way."""
    calls: list[str] = []
    with emulated():
        genuine = vllm_ops.operator

        def counted(name: str) -> torch._ops.OpOverload:
            calls.append(name)
            return genuine(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_ops, "operator", counted)
            for kernel, scheme in CASES:
                parsed = Scheme.parse(scheme)
                if parsed.activation is None or parsed.activation.scale_format == "e8m0":
                    continue
                for rule in BY_NAME[kernel].scale_rules:
                    ruled = parsed.with_activation(replace(parsed.activation, scale_rule=rule))
                    layer_of(kernel, weight_of(ruled), torch.device("cpu"))(torch.ones(2, K).bfloat16())
    assert {name for name in calls if name.endswith("quant")} == {
        "dynamic_per_token_scaled_fp8_quant", "static_scaled_fp8_quant", "dynamic_scaled_int8_quant",
        "static_scaled_int8_quant",
    }  # fmt: skip


# -- the adapter: which operators are taken ---------------------------------------------------------------------


def test_the_adapter_knows_the_genuine_arguments() -> None:
    """The emulation's schemas are compared with the genuine library's by tests/emulation/genuine.py."""
    known = {
        schema.name: tuple(argument.name for argument in torch._C.parse_schema(f"_C::{schema.text}").arguments)
        for schema in SCHEMAS
    }
    assert known == dict(vllm_ops.ARGUMENTS)


def test_without_vllm_the_reason_is_given() -> None:
    if not MISSING:
        pytest.skip("vLLM's operators are here")
    with pytest.raises(BackendLoadError, match=r"_C::marlin_gemm is of vllm>=0\.30,<0\.31; no vLLM is installed"):
        vllm_ops.operator("marlin_gemm")


@pytest.mark.parametrize(("version", "refused"), [("", False), ("0.30.0", False), ("0.30.1.dev3", False),
                                                  ("0.29.2", True), ("0.31.0", True)])  # fmt: skip
def test_other_versions_are_refused_whatever_they_register(version: str, refused: bool) -> None:
    problem = vllm_ops.version_problem(version)
    assert bool(problem) == refused
    assert (
        not refused
        or problem == f"vLLM's operators are called as those of vllm>=0.30,<0.31, and {version} is installed"
    )


def test_operators_of_another_version_are_refused() -> None:
    """Marlin took an order of columns until 0.29."""
    if not MISSING:
        pytest.skip("vLLM's operators are here")
    library = torch.library.Library("_C", "FRAGMENT")
    try:
        library.define(
            "gptq_marlin_repack(Tensor b_q_weight, Tensor perm, int size_k, int size_n, int num_bits) -> Tensor"
        )
        with pytest.raises(BackendLoadError, match=r"takes b_q_weight, size_k.*; the one here takes b_q_weight, perm"):
            vllm_ops.operator("gptq_marlin_repack")
    finally:
        library._destroy()


def test_wrong_calls_are_refused_by_the_emulation() -> None:
    """What the tests above rest on: an order of scales or of arguments that is wrong does not pass unseen."""
    with emulated():
        layer = layer_of("vllm_marlin_int", weight_of(Scheme.parse("int4-g128/a16")), torch.device("cpu"))
        x, tensors = torch.randn(3, K).bfloat16(), dict(layer.named_buffers())
        with pytest.raises(VendorError, match="b_scales are"):
            layer.kernel.apply(layer.config, tensors, x.half(), None, torch.float16, None)
        turned = {**tensors, "scale": tensors["scale"].flip(1).contiguous()}
        assert not torch.equal(layer.kernel.apply(layer.config, turned, x, None, torch.bfloat16, None), layer(x))


# -- plans ------------------------------------------------------------------------------------------------------


def test_a_described_device_is_not_taken_to_have_vllm() -> None:
    spec = LayerSpec("layer", "linear", 4096, 4096, Scheme.parse("int8-channel/int8-token"))
    bare = parse_device("cuda:sm90")
    with_vllm = replace(bare, versions={"vllm": "0.30.0"})
    names = {}
    for device in (bare, with_vllm, replace(bare, versions={"vllm": "0.31.0"})):
        found = match(spec, SPEC.capabilities, device, Policy())
        assert found.chosen is not None
        names[device.versions.get("vllm", "")] = found.chosen.capability.name
    assert names == {"": "int_mm", "0.30.0": "vllm_cutlass_int8", "0.31.0": "int_mm"}
    answers = {
        item.capability.name: str(item.decision) for item in match(spec, SPEC.capabilities, bare, Policy()).candidates
    }
    assert answers["vllm_cutlass_int8"] == "needs distribution vllm>=0.30,<0.31, found not described"


@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        # torch's product with scales per row is as fast
        ("fp8-channel/fp8-token", "scaled_mm_row"),
        # measured ahead of omniplat's own product
        ("int8-channel/int8-token", "vllm_cutlass_int8"),
        ("mxfp8/mxfp8", "scaled_mm_mxfp8"),
        ("int4-g128/a16", "portable_linear"),
    ],
)
def test_priorities_follow_measurements(scheme: str, kernel: str) -> None:
    spec = LayerSpec("layer", "linear", 4096, 4096, Scheme.parse(scheme))
    device = Device("cuda", "sm90", versions={"vllm": "0.30.0"})
    built = [capability for capability in SPEC.capabilities if capability.impl]
    chosen = match(spec, built, device, Policy()).chosen
    assert chosen is not None
    assert chosen.capability.name == kernel
