"""The preflight: what the values of scales tell, on every kind of scale, and what follows for the plan."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.api import load, make_planned, plan
from omniplat.backend import BackendSpec
from omniplat.canonical import ROLES, Array
from omniplat.capability import Capability, ShapeRule
from omniplat.checkpoint.folder import open_checkpoint
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.device import Device
from omniplat.document import Plan, PlanCheckpoint
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.storage import STORED_ROLES
from omniplat.oracle import pack_nibbles
from omniplat.oracle.reencode import row_spans
from omniplat.planner import Planned, Target, make_plan, plan_layers
from omniplat.preflight import SCALE_ROLES, SINGLE_ROLES, KnownSpans, Scan, exponent_spans, scan_layer
from omniplat.reencoding import REENCODINGS
from omniplat.registry import FORMATS, MODELS, default_registry
from omniplat.scheme import parse_weight_id
from tests.support.checkpoints import Shapes, mxfp4, mxfp8, write_checkpoint

NAME = "model.layers.0.mlp.down_proj"
MX = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "group_size": 32,
      "data_type": "mx_fp"}  # fmt: skip
N, K = 32, 128
GROUPS = K // 32


def mx_checkpoint(folder: Path, bits: int, scale: Array, codes: Array | None = None) -> Path:
    """One MX layer of N x K whose codes are all `1.0` unless given."""
    leaf = "weight_packed" if bits == 4 else "weight"
    if codes is None:
        codes = np.full((N, K // 2), 0x22, np.uint8) if bits == 4 else np.full((N, K), 0x38, np.uint8)
    tensors = mxfp4(NAME, N, K) if bits == 4 else mxfp8(NAME, N, K)
    values = {f"{NAME}.{leaf}": codes.tobytes(), f"{NAME}.weight_scale": scale.astype(np.uint8).tobytes()}
    config = {"model_type": "llama", "quantization_config": {**MX, "bits": bits}}
    return write_checkpoint(folder, config, tensors, values=values)


def spanning(span: int) -> Array:
    """Scales of which one row spans so many binades, and the others none."""
    scale = np.full((N, GROUPS), 120)
    scale[N // 2, 1] = 120 - span
    return scale


def codes_of(document: Plan) -> dict[str, str]:
    return {item.code: item.severity for item in document.findings}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), groups=st.integers(1, 6))
def test_the_bytes_alone_bound_the_span(seed: int, rows: int, groups: int) -> None:
    random = np.random.default_rng(seed)
    scale = random.integers(1, 255, (rows, groups)).astype(np.uint8)
    codes = random.integers(0, 16, (rows, 32 * groups)).astype(np.uint8)
    empty = random.random((rows, groups)) < 0.3
    codes = np.where(np.repeat(empty, 32, axis=1), 0, np.maximum(codes & 7, 1)).astype(np.uint8)
    exact = row_spans(pack_nibbles(codes), scale, parse_weight_id("mxfp4"), 32 * groups)
    assert (exponent_spans(scale) >= exact).all()
    np.testing.assert_array_equal(exponent_spans(np.where(empty, 0, scale).astype(np.uint8)), exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("span", [0, 1, 3, 4, 9, 30])
def test_the_document_has_the_largest_span(tmp_path: Path, bits: int, span: int) -> None:
    document = plan(mx_checkpoint(tmp_path / "c", bits, spanning(span)), "cpu", scan_scales=True)
    assert document.layer(NAME).scale_spans == {f"mxfp{bits}": span}
    assert document.ok
    assert plan(tmp_path / "c", "cpu").layer(NAME).scale_spans == {}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("byte", [0, 1, 60, 200])
def test_groups_of_zeros_do_not_count_whatever_their_byte(tmp_path: Path, bits: int, byte: int) -> None:
    scale = spanning(2)
    scale[3, 2] = byte
    width = 16 if bits == 4 else 32
    codes = np.full((N, GROUPS * width), 0x22 if bits == 4 else 0x38, np.uint8)
    codes[3, 2 * width : 3 * width] = 0x80  # zeros of either sign
    document = plan(mx_checkpoint(tmp_path / "c", bits, scale, codes), "cpu", scan_scales=True)
    assert document.layer(NAME).scale_spans == {f"mxfp{bits}": 2}


def target_with_reencoding(target: str, *, fallback: bool) -> Target:
    """A backend whose best kernel re-encodes, and that may have another one."""
    moved = Capability("moved", "linear", ("mx*",), ("*",), priority=9, via=target, executes="a16", impl="any:Kernel")
    direct = Capability("direct", "linear", ("mx*",), ("*",), impl="any:Kernel")
    spec = BackendSpec("made-up", 1, ("cuda",), (moved, direct) if fallback else (moved,))
    return Target(spec, Device("cuda", "sm90"))


def plan_all(folder: Path, target: Target, scan: Scan) -> Planned:
    registry = default_registry()
    formats = [registry.load(FORMATS, name) for name in registry.names(FORMATS)]
    return make_plan(open_checkpoint(folder), target, formats, [], scan=scan)


def plan_with_reencoding(folder: Path, target: str, scan: Scan, *, fallback: bool = True) -> Plan:
    return plan_all(folder, target_with_reencoding(target, fallback=fallback), scan).plan


@pytest.mark.parametrize("beyond", [0, 1])
def test_ranks_know_the_spans_of_the_whole_layer(tmp_path: Path, beyond: int) -> None:
    """What a rank holds is planned again, for its own sizes, and its scales are not read again."""
    limit = REENCODINGS["mxfp4", "fp8-channel"].max_span
    folder = mx_checkpoint(tmp_path / "c", 4, spanning(limit + beyond))
    target = target_with_reencoding("fp8-channel", fallback=True)
    (found,) = plan_all(folder, target, "needed").layers
    source = PlanCheckpoint("c", (), ("",))
    again = plan_layers(source, [found.packed], target, scales=KnownSpans(found.layer.scale_spans))
    blind = plan_layers(source, [found.packed], target)
    assert again.layers[0].layer.kernel == found.layer.kernel == ("direct" if beyond else "moved")
    assert blind.layers[0].layer.kernel == "moved"


def test_another_kernel_leaves_the_scales_alone(tmp_path: Path) -> None:
    """Planning reads values only where they decide whether a layer runs at all."""
    folder = mx_checkpoint(tmp_path / "c", 4, spanning(30))
    seen = plan_with_reencoding(folder, "fp8-channel", "decisive")
    assert seen.layer(NAME).scale_spans == {}
    assert (seen.layer(NAME).kernel, seen.layer(NAME).alternative) == ("moved", "direct")


@pytest.mark.parametrize(("source", "target"), REENCODINGS)
@pytest.mark.parametrize(
    ("scan", "fallback"), [("all", True), ("all", False), ("needed", True), ("needed", False), ("decisive", False)]
)
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_span_beyond_the_limit_forbids_the_reencoding(
    tmp_path: Path, source: str, target: str, scan: Scan, fallback: bool, beyond: int
) -> None:
    limit = REENCODINGS[source, target].max_span
    folder = mx_checkpoint(tmp_path / "c", int(source[-1]), spanning(limit + beyond))
    assert plan_with_reencoding(folder, target, "none", fallback=fallback).layer(NAME).kernel == "moved"
    seen = plan_with_reencoding(folder, target, scan, fallback=fallback)
    layer = seen.layer(NAME)
    assert layer.scale_spans == {source: limit + beyond}
    severity = "warning" if fallback else "error"
    assert codes_of(seen).get("reencode-refused") == (severity if beyond else None)
    assert layer.kernel == ("moved" if not beyond else "direct" if fallback else None)
    assert seen.ok == (fallback or not beyond)
    if beyond:
        needed = {"rule": "span of scales", "needed": f"<= {limit} binades for {target}", "found": f"{limit + 1}"}
        assert needed in [trace.rejected for trace in layer.trace]


def test_legal_sizes_are_those_of_the_kernel_that_the_spans_leave(tmp_path: Path) -> None:
    """The re-encoding would take any shard; the other kernel takes the whole layer only."""
    limit = REENCODINGS["mxfp4", "fp8-channel"].max_span
    moved = Capability("moved", "linear", ("mx*",), ("*",), priority=9, via="fp8-channel", executes="a16", impl="any:K")
    shapes = (ShapeRule("in", minimum=K), ShapeRule("out", minimum=N))
    direct = Capability("direct", "linear", ("mx*",), ("*",), shapes=shapes, impl="any:K")
    target = Target(BackendSpec("made-up", 1, ("cuda",), (moved, direct)), Device("cuda", "sm90"))
    registry = default_registry()
    formats = [registry.load(FORMATS, name) for name in registry.names(FORMATS)]
    families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
    for span, kernel, sizes in ((limit, "moved", (1, 2)), (limit + 1, "direct", (1,))):
        opened = open_checkpoint(mx_checkpoint(tmp_path / str(span), 4, spanning(span)))
        layer = make_plan(opened, target, formats, families, scan="needed").plan.layer(NAME)
        assert layer.kernel == kernel
        assert layer.legal_tp[: len(sizes)] == sizes
        assert (len(layer.legal_tp) == 1) == (kernel == "direct")


def test_a_kernel_that_does_not_depend_on_values_asks_for_no_scan(tmp_path: Path) -> None:
    folder = mx_checkpoint(tmp_path / "c", 4, spanning(3))
    assert plan_with_reencoding(folder, "int8-g32", "needed").layer(NAME).scale_spans == {}


Made = tuple[Mapping[str, object], Shapes, dict[str, bytes]]


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
NVFP4 = {"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": 16}


def fp8_values(role: str, value: float) -> Made:
    tensors = {
        f"{NAME}.weight": ("F8_E4M3", (N, K)),
        f"{NAME}.weight_scale": ("F32", ()),
        f"{NAME}.input_scale": ("F32", ()),
    }
    values = {f"{NAME}.weight": b"\x38" * (N * K), f"{NAME}.weight_scale": struct.pack("<f", 1.0),
              f"{NAME}.input_scale": struct.pack("<f", 1.0)}  # fmt: skip
    return FP8, tensors, values | {f"{NAME}.{role}": struct.pack("<f", value)}


def nvfp4_values(role: str, value: float) -> Made:
    tensors = {
        f"{NAME}.weight": ("U8", (N, K // 2)),
        f"{NAME}.weight_scale": ("F8_E4M3", (N, K // 16)),
        f"{NAME}.weight_scale_2": ("F32", ()),
        f"{NAME}.input_scale": ("F32", ()),
    }
    scale = np.ones((N, K // 16), np.float32).astype(ml_dtypes.float8_e4m3fn)
    one = struct.pack("<f", 1.0)
    values = {f"{NAME}.weight": b"\x22" * (N * K // 2), f"{NAME}.weight_scale": scale.tobytes(),
              f"{NAME}.weight_scale_2": one, f"{NAME}.input_scale": one}  # fmt: skip
    if role == "weight_scale":
        scale[5, 3] = value
        return NVFP4, tensors, values | {f"{NAME}.{role}": scale.tobytes()}
    return NVFP4, tensors, values | {f"{NAME}.{role}": struct.pack("<f", value)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
@pytest.mark.parametrize(
    ("make", "role"),
    [(fp8_values, "weight_scale"), (fp8_values, "input_scale"), (nvfp4_values, "weight_scale"),
     (nvfp4_values, "weight_scale_2"), (nvfp4_values, "input_scale")],
)  # fmt: skip
def test_scales_that_are_not_finite_are_found_without_loading(
    tmp_path: Path, make: Callable[[str, float], Made], role: str, value: float
) -> None:
    """What the scan calls wrong is what loading refuses, and nothing else is."""
    quantization, tensors, values = make(role, value)
    folder = write_checkpoint(
        tmp_path / "c", {"model_type": "llama", "quantization_config": quantization}, tensors, values=values
    )
    seen = plan(folder, "cpu", scan_scales=True)
    assert plan(folder, "cpu").ok
    assert seen.ok == (value == 1.0)
    assert codes_of(seen).get("scale-not-finite") == (None if value == 1.0 else "error")
    if value == 1.0:
        load(folder, "cpu")
    else:
        assert [item.modules for item in seen.findings if item.code == "scale-not-finite"] == [(NAME,)]
        with pytest.raises(InvalidCheckpointError, match="scale not finite"):
            load(folder, "cpu")


def test_every_role_that_holds_scales_is_looked_at() -> None:
    named = {role for role in (*ROLES, *STORED_ROLES) if "scale" in role}
    # a sum of codes times scales, and not a scale
    assert named - {"scale_bias"} <= {*SCALE_ROLES, *SINGLE_ROLES}


def test_the_byte_255_is_no_scale(tmp_path: Path) -> None:
    scale = spanning(1)
    scale[7, 0] = 255
    seen = plan(mx_checkpoint(tmp_path / "c", 4, scale), "cpu", scan_scales=True)
    assert codes_of(seen)["scale-not-finite"] == "error"


def test_a_scale_of_zero_above_zeros_is_legal(tmp_path: Path) -> None:
    quantization, tensors, values = nvfp4_values("weight_scale", 0.0)
    codes = bytearray(values[f"{NAME}.weight"])
    codes[5 * K // 2 + 24 : 5 * K // 2 + 32] = bytes(8)
    folder = write_checkpoint(
        tmp_path / "c", {"model_type": "llama", "quantization_config": quantization}, tensors,
        values=values | {f"{NAME}.weight": bytes(codes)},
    )  # fmt: skip
    assert plan(folder, "cpu", scan_scales=True).ok


class CountingReader:
    """Says which tensors were read."""

    def __init__(self, scales: Mapping[str, Array]) -> None:
        self.scales = scales
        self.read_names: list[str] = []

    def read(self, info: TensorInfo) -> Array:
        self.read_names.append(info.name)
        return self.scales[info.name]


def test_codes_are_not_read_where_the_scales_tell(tmp_path: Path) -> None:
    planned = make_planned(mx_checkpoint(tmp_path / "c", 4, spanning(3)), Device("cpu", "avx2"))
    reader = CountingReader({f"{NAME}.weight_scale": spanning(3).astype(np.uint8)})
    assert scan_layer(planned.layers[0].packed, reader).spans == {"mxfp4": 3}
    assert set(reader.read_names) == {f"{NAME}.weight_scale"}


def test_an_id_of_the_hub_is_not_scanned() -> None:
    with pytest.raises(InvalidCheckpointError, match="download"):
        plan("org/model", "cpu", scan_scales=True)
