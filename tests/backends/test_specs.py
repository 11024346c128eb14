"""The vendors' capability tables: data, consistent, and true to what their kernels can take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from itertools import product

import pytest
from packaging.requirements import Requirement

from omniplat.backend import BackendSpec
from omniplat.capability import ACTIVATION_ORDER, ARCHIVED, Capability, matches
from omniplat.device import ARCHITECTURES, Device, parse_device
from omniplat.errors import InvalidSchemeError
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.match import Match, Policy, match
from omniplat.scheme import Scheme, parse_activation_id

PACKAGES = {"cuda": "omniplat_cuda", "rocm": "omniplat_rocm", "xpu": "omniplat_xpu", "npu": "omniplat_ascend"}
SPECS: dict[str, BackendSpec] = {kind: import_module(f"{name}.spec").SPEC for kind, name in PACKAGES.items()}
CAPABILITIES = [(kind, capability) for kind, spec in SPECS.items() for capability in spec.capabilities]
#: A weight for every pattern of `not_supported`.
EXAMPLES = ("mxfp4-dual", "svdq-int4", "gguf-q4_k", "int8-bnb", "nvfp4", "nf4-b64", "fp4bnb-b64", "mxfp6e2m3",
            "int8-channel")  # fmt: skip
#: Something that does not change: a file at a commit or at a release's tag, a commit, an issue.
SOURCE = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/"
    r"(blob/([0-9a-f]{40}|v\d+(\.\d+)+)/[^\s/][^\s]*\.\w+|commit/[0-9a-f]{8,40}|issues/\d+)"
)
DIMS = {"in", "out", "intermediate", "experts"}
ACTIVATIONS = {name for chain in ACTIVATION_ORDER for braces in chain for name in braces}

every = pytest.mark.parametrize("kind", SPECS)
each = pytest.mark.parametrize(("kind", "capability"), CAPABILITIES, ids=lambda value: getattr(value, "name", value))


def layer(
    scheme: str, op: str = "linear", *, n: int = 4096, k: int = 4096, dtype: str = "bf16", bias: bool = False,
    intermediate: int = 1536,
) -> LayerSpec:  # fmt: skip
    moe = MoeSpec(8, intermediate) if op == "moe" else None
    return LayerSpec("layer", op, n, k, Scheme.parse(scheme), dtype=dtype, bias=bias, moe=moe)


def matched(device: str, spec: LayerSpec, **policy: str) -> Match:
    found = parse_device(device)
    return match(spec, SPECS[found.kind].capabilities, found, Policy(**policy))  # type: ignore[arg-type]


def runs(device: str, spec: LayerSpec, **policy: str) -> tuple[str, str]:
    """(kernel, executes) of the chosen kernel; empty where none accepts."""
    chosen = matched(device, spec, **policy).chosen
    return (chosen.capability.name, chosen.decision.executes) if chosen is not None else ("", "")  # type: ignore[union-attr]


# -- the tables -----------------------------------------------------------------------------------------


@every
def test_a_spec_is_light(kind: str) -> None:
    heavy = ("torch", "torch_npu", "triton", "vllm", "numpy", "humming", "bitsandbytes", "flashinfer", "aiter")
    code = f"import {PACKAGES[kind]}.spec, json, sys; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@every
def test_names_are_unique_and_every_arch_of_the_table_exists(kind: str) -> None:
    names = [capability.name for capability in SPECS[kind].capabilities]
    assert sorted(names) == sorted(set(names))
    assert SPECS[kind].kinds == (kind,)
    used = {arch for capability in SPECS[kind].capabilities for arch in capability.archs}
    assert used <= set(ARCHITECTURES[kind])


@each
def test_requirements_are_those_of_the_backend(kind: str, capability: Capability) -> None:
    spec = SPECS[kind]
    brought, optional = ({Requirement(text).name for text in texts} for texts in (spec.distributions, spec.optional))
    assert not brought & optional
    needed = {Requirement(text).name for text in capability.requires}
    assert needed <= brought | optional
    assert capability.assumed == (needed <= brought), "a described device has what the extra brings, and no more"
    assert capability.requires, "a kernel without a distribution cannot be missing one"


@each
def test_a_capability_is_well_formed(kind: str, capability: Capability) -> None:
    assert capability.op in ("linear", "moe")
    assert capability.evidence == "declared"
    module, colon, name = capability.impl.partition(":")
    assert capability.impl == "" or (
        module.startswith((PACKAGES[kind], "omniplat.portable")) and colon and name.isidentifier()
    )
    assert set(capability.dtypes) <= {"bf16", "f16", "f32"}
    assert {rule.dim for rule in capability.shapes} <= DIMS
    assert all(rule.needed for rule in capability.shapes), "a shape rule that accepts everything"
    if capability.op == "linear":
        assert not {"intermediate", "experts"} & {rule.dim for rule in capability.shapes}
    if capability.executes:
        assert capability.executes in ACTIVATIONS
        assert capability.executes in capability.activations
    for text in (*capability.activations, *([capability.executes] if capability.executes else [])):
        if "*" not in text:
            parse_activation_id(text)


@pytest.mark.parametrize(("kind", "capability"), [item for item in CAPABILITIES if item[1].maturity == ARCHIVED])
def test_what_is_archived_comes_last_everywhere(kind: str, capability: Capability) -> None:
    """It is declared for completeness, and takes no layer from a kernel."""
    assert capability.priority < min(item.priority for item in SPECS[kind].capabilities if item.impl)
    (activation,) = capability.activations
    for arch, weight, dtype in product(capability.archs or ARCHITECTURES[kind], capability.weights, capability.dtypes):
        kernel, _ = runs(f"{kind}:{arch}", layer(f"{weight}/{activation}", capability.op, dtype=dtype))
        assert kernel not in ("", capability.name)


@each
def test_every_pattern_of_weights_means_a_scheme(kind: str, capability: Capability) -> None:
    known = [
        *("bf16", "mxfp8", "mxfp4", "nvfp4", "mxfp4-dual", "nf4-b64", "fp4bnb-b64", "int8-bnb", "fp8-block128x128"),
        *(f"{stem}{bits}-{tail}" for stem in ("int", "uint") for bits in range(2, 9)
          for tail in ("channel", "tensor", *(f"g{size}" for size in (16, 32, 64, 96, 128, 160, 192, 256, 512, 1024)))),
        *(f"{stem}-b{size}" for stem in ("nf4", "fp4bnb") for size in (16, 32, 128, 256, 512, 1024, 2048, 4096)),
        *(f"fp8-{tail}" for tail in ("tensor", "channel", "g32", "g64", "g128")),
        *(f"fp8-block{size}" for size in ("64x64", "32x32", "64x128", "32x128", "16x128")),
        *("svdq-nvfp4", "svdq-int4-g64"),
    ]  # fmt: skip
    for name in known:
        Scheme.parse(f"{name}/a16")
    for pattern in capability.weights:
        assert any(matches((pattern,), name) for name in known), f"{pattern} matches no scheme"


#: Kernels that re-encode codes while they multiply them.
ON_THE_WAY = ("fp8_decoded_mxfp4", "fp8_decoded_mxfp4_a8")


@each
def test_a_reencoding_says_what_it_becomes_and_what_it_costs(kind: str, capability: Capability) -> None:
    if not capability.via:
        assert capability.resident == 1.0
        return
    target = Scheme.parse(f"{capability.via}/a16").weight
    (stored,) = capability.weights
    bits = Scheme.parse(f"{stored}/a16").weight.bits
    assert capability.resident == (1.0 if capability.name in ON_THE_WAY else target.bits / bits)


@every
def test_what_is_not_supported_is_matched_by_no_kernel(kind: str) -> None:
    for entry in SPECS[kind].not_supported:
        assert entry.status in ("never", "upstream", "todo")
        assert entry.reason
        weight, _, activation = entry.pattern.partition("/")
        for capability in SPECS[kind].capabilities:
            exact = not activation or (not capability.executes and matches(capability.activations, "int8-token"))
            names = [name for name in EXAMPLES if matches((weight,), name)]
            assert names, entry.pattern
            assert not (exact and any(matches(capability.weights, name) for name in names)), entry.pattern


@every
def test_quirks_are_about_kernels_and_say_where_they_are_seen(kind: str) -> None:
    names = [capability.name for capability in SPECS[kind].capabilities]
    for quirk in SPECS[kind].quirks:
        assert all(any(matches((pattern,), name) for name in names) for pattern in quirk.kernels), quirk.kernels
        assert quirk.text
        assert SOURCE.fullmatch(quirk.source), quirk.source


def test_no_device_is_without_a_reason() -> None:
    """Every scheme on every architecture either runs, or each kernel of its op says why not."""
    schemes = ("fp8-channel/fp8-token", "mxfp4/mxfp4", "nvfp4/nvfp4", "int4-g128/a16", "mxfp4-dual/mxfp4-dual")
    for kind, spec in SPECS.items():
        for arch, scheme, op in product(ARCHITECTURES[kind], schemes, ("linear", "moe")):
            found = match(layer(scheme, op), spec.capabilities, Device(kind, arch), Policy())
            assert found.chosen is not None or all(str(item.decision) for item in found.candidates)
            assert len(found.candidates) == len(spec.capabilities)


# -- what runs where ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "scheme", "op", "executes"),
    [
        # declared weight-only stays weight-only, FP4 units or not
        ("cuda:sm100", "mxfp4/a16", "linear", "mxfp4/a16"),
        ("cuda:sm90", "mxfp4/a16", "moe", "mxfp4/a16"),
        ("cuda:sm100", "mxfp8/a16", "linear", "mxfp8/a16"),
        ("rocm:gfx950", "mxfp4/a16", "linear", "mxfp4/a16"),
        # no FP4 units: a more precise activation
        ("cuda:sm90", "mxfp4/mxfp4", "moe", "mxfp4/a16"),
        ("cuda:sm90", "nvfp4/nvfp4", "linear", "nvfp4/a16"),
        ("rocm:gfx942", "mxfp4/mxfp4", "linear", "mxfp4/a16"),
        ("rocm:gfx942", "mxfp4/mxfp4", "moe", "mxfp4/a16"),
        # FP4 units
        # by a kernel that exists, before one that is only declared
        ("cuda:sm100", "nvfp4/nvfp4", "linear", "nvfp4/a16"),
        ("rocm:gfx950", "mxfp4/mxfp4", "linear", "mxfp4/mxfp4"),
        ("npu:a5", "mxfp4/mxfp4", "moe", "mxfp4/mxfp4"),
        # re-encoded in place on FP8 units
        ("cuda:sm90", "mxfp8/mxfp8", "linear", "mxfp8/fp8-token"),
        ("rocm:gfx942", "mxfp8/mxfp8", "linear", "mxfp8/fp8-token"),
        # no FP8 units
        ("cuda:sm80", "fp8-channel/fp8-token", "linear", "fp8-channel/a16"),
        ("npu:a2", "fp8-channel/fp8-token", "linear", ""),
        ("npu:a2", "mxfp8/mxfp8", "linear", ""),
        ("npu:a5", "mxfp8/mxfp8", "linear", "mxfp8/mxfp8"),
        # int8 runs as declared
        ("cuda:sm80", "int8-channel/int8-token", "linear", "int8-channel/int8-token"),
        ("npu:a2", "int8-channel/int8-token", "moe", "int8-channel/int8-token"),
        ("npu:a3", "int8-channel/int8-tensor-static-asym", "linear", "int8-channel/int8-tensor-static-asym"),
        ("rocm:gfx942", "int8-channel/int8-token", "linear", "int8-channel/int8-token"),
        # unless no kernel of the vendor takes it
        ("xpu:bmg", "int8-channel/int8-token", "linear", "int8-channel/a16"),
        ("rocm:gfx90a", "int8-channel/int8-token", "linear", "int8-channel/a16"),
        # the vendor's own mode for it, which as int8 would take twice the memory; a5 has it in another form
        ("npu:a2", "int4-channel/int8-token", "moe", "int4-channel/int8-token"),
        ("npu:a2", "int4-g128/int8-token", "moe", "int4-g128/a16"),
        ("npu:a5", "int4-channel/int8-token", "moe", "int4-channel/a16"),
        # experts on Intel GPUs are weight-only
        ("xpu:bmg", "mxfp8/mxfp8", "moe", "mxfp8/a16"),
        ("xpu:bmg", "mxfp8/mxfp8", "linear", "mxfp8/mxfp8"),
        # two levels of scales exist on one device; elsewhere their products are held
        ("npu:a5", "mxfp4-dual/mxfp4-dual", "linear", "mxfp4-dual/mxfp4-dual"),
        ("cuda:sm90", "mxfp4-dual/mxfp4-dual", "linear", "mxfp4-dual/a16"),
        ("cuda:sm90", "mxfp4-dual/a16", "linear", "mxfp4-dual/a16"),
        ("rocm:gfx950", "mxfp4-dual/mxfp4-dual", "linear", "mxfp4-dual/a16"),
        ("xpu:bmg", "mxfp4-dual/mxfp4-dual", "moe", "mxfp4-dual/a16"),
        ("cuda:sm100", "mxfp4-dual/mxfp4-dual", "linear", ""),
        # a residual that is decoded in registers, and its low-rank pair
        ("cuda:sm90", "svdq-nvfp4/svdq-nvfp4", "linear", "svdq-nvfp4/a16"),
        ("rocm:gfx942", "svdq-int4-g64/svdq-int4", "linear", "svdq-int4-g64/a16"),
        ("xpu:bmg", "svdq-nvfp4/a16", "linear", "svdq-nvfp4/a16"),
        ("cuda:sm100", "svdq-nvfp4/svdq-nvfp4", "linear", ""),
        ("cuda:sm90", "svdq-nvfp4/svdq-nvfp4", "moe", ""),
        ("npu:a5", "nvfp4/nvfp4", "linear", ""),
        ("npu:310p", "int8-channel/int8-token", "linear", ""),
        ("cuda:sm90", "nf4-b64/a16", "linear", "nf4-b64/a16"),
    ],
)
def test_what_executes(device: str, scheme: str, op: str, executes: str) -> None:
    assert runs(device, layer(scheme, op))[1] == executes


@pytest.mark.parametrize(
    ("device", "scheme", "op"),
    [
        ("cuda:sm90", "mxfp4/mxfp4", "linear"),
        ("rocm:gfx942", "mxfp4/mxfp4", "linear"),
        ("npu:a5", "int4-channel/int8-token", "moe"),
        ("npu:a3", "int4-channel/int8-token", "linear"),
    ],
)
def test_twice_the_memory_is_for_speed_only(device: str, scheme: str, op: str) -> None:
    sparing, fast = (matched(device, layer(scheme, op), prefer=prefer).chosen for prefer in ("memory", "speed"))
    assert sparing is not None
    assert fast is not None
    assert (sparing.capability.resident, fast.capability.resident) == (1.0, 2.0)
    assert fast.decision.executes == scheme  # type: ignore[union-attr]


def test_where_nothing_smaller_runs_twice_the_memory_is_used() -> None:
    chosen = matched("npu:a2", layer("mxfp4/mxfp4")).chosen
    assert chosen is not None
    assert (chosen.capability.via, chosen.capability.resident) == ("int8-g32", 2.0)


@pytest.mark.parametrize(
    ("device", "spec", "kernel"),
    [
        # a bias that the op drops is added outside; experts' ops that drop it are not used
        ("rocm:gfx950", layer("mxfp4/mxfp4", bias=True), "gemm_a4w4"),
        ("rocm:gfx950", layer("mxfp4/mxfp4", "moe", bias=True), "portable_moe"),
        # K % 256
        ("rocm:gfx950", layer("mxfp4/mxfp4", k=1664), "gemm_afp4wfp4"),
        # I per rank % 256
        ("rocm:gfx950", layer("mxfp4/mxfp4", "moe", intermediate=384), "portable_moe"),
        # an inner axis of 65536
        ("npu:a2", layer("int8-channel/int8-token", n=65536), ""),
        ("npu:a2", layer("int8-channel/int8-token", n=65535), "quant_matmul_int8"),
        ("npu:a5", layer("mxfp8/mxfp8", k=4128), ""),
        # the op's output is f16
        ("xpu:bmg", layer("int4-g128/int8-token", dtype="f16"), "int4_gemm_w4a8"),
        ("xpu:bmg", layer("int4-g128/int8-token"), "int4_gemm_w4a16"),
        # Turing has no bf16
        ("cuda:sm75", layer("int4-g128/a16"), ""),
        ("cuda:sm75", layer("int4-g128/a16", dtype="f16"), "humming_linear_turing"),
        # rows that no tile of 16 divides; what has a kernel comes before what is only declared
        ("cuda:sm90", layer("fp8-channel/fp8-token", n=1000), "humming_linear_fp8"),
        ("cuda:sm90", layer("fp8-channel/fp8-token", n=999), "portable_linear"),
    ],
)
def test_limits_of_the_ops(device: str, spec: LayerSpec, kernel: str) -> None:
    assert runs(device, spec)[0] == kernel


def test_unknown_schemes_in_tables_would_be_noticed() -> None:
    with pytest.raises(InvalidSchemeError):
        parse_activation_id("fp8-tokens")
