"""The load path on synthetic checkpoints: fusing, biases, row orders, refusals, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omniplat import oracle
from omniplat.canonical import Array, CanonicalWeight
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.packed import PackedLayer, Part
from omniplat.reading import TensorReader
from omniplat.reference.kernels import DequantLinear, ExpertLoop
from omniplat.roworder import AS_IS, RowOrder
from omniplat.runtime.assemble import Assembly
from omniplat.runtime.load import load_layer
from omniplat.scheme import Scheme
from tests.reference.build import Weights, assert_within_f32

PACKING = {"fp8_e4m3": ("plain", "F8_E4M3"), "int8": ("plain", "I8"), "bf16": ("plain", "BF16")}


class Memory:
    """A checkpoint in memory: the reader, and modules that are stored as they are in canonical form."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def read(self, info: TensorInfo) -> Array:
        array = self.arrays[info.name].view()
        array.setflags(write=False)
        return array

    def module(self, name: str, weight: CanonicalWeight, experts: int = 0) -> ResolvedModule:
        infos = {}
        for role, array in weight.tensors.items():
            self.arrays[f"{name}.{role}"] = array
            infos[role] = TensorInfo(f"{name}.{role}", "", array.shape, "model.safetensors", 0, array.nbytes)
        packing, container = PACKING.get(weight.scheme.weight.element, ("nibbles_k", "U8"))
        storage = Storage(packing, container)
        n, k = weight.out_features, weight.in_features
        return ResolvedModule(name, "", None, weight.scheme, storage, n, k, infos, DecidedBy("", ""), experts=experts)


def linear_layer(memory: Memory, parts: Mapping[str, CanonicalWeight], **orders: RowOrder) -> PackedLayer:
    first = next(iter(parts.values()))
    rows = tuple(weight.out_features for weight in parts.values())
    bias = any("bias" in weight.tensors for weight in parts.values())
    spec = LayerSpec("fused", "linear", sum(rows), first.in_features, first.scheme, bias=bias, parts=rows)
    modules = [Part(memory.module(name, weight), orders.get(name, AS_IS)) for name, weight in parts.items()]
    return PackedLayer(spec, tuple(modules), fused=len(parts) > 1)


def with_tensors(weight: CanonicalWeight, **tensors: Array) -> CanonicalWeight:
    return replace(weight, tensors={**weight.tensors, **tensors})


@pytest.mark.parametrize(
    "scheme_id",
    [
        "bf16/a16",
        "fp8-tensor/a16",
        "fp8-channel/fp8-token",
        "int8-channel/a16",
        "mxfp4/mxfp4",
        "mxfp8/mxfp8",
        "nvfp4/a16",
    ],
)
def test_fused_parts_compute_what_each_does(scheme_id: str) -> None:
    made = Weights()
    scheme = Scheme.parse(scheme_id)
    parts = {name: made.canonical(scheme, rows, 128) for name, rows in (("q", 64), ("k", 32), ("v", 48))}
    parts["k"] = with_tensors(parts["k"], bias=made.values(32))
    memory = Memory()
    layer = load_layer(linear_layer(memory, parts), DequantLinear(), memory)
    x = made.values(5, 128)
    y = layer(torch.from_numpy(x))
    assert layer.bias is not None
    for part, found in zip(parts.values(), y.split([64, 32, 48], dim=1), strict=True):
        assert_within_f32(found, x, part)


def test_a_block_scaled_part_may_end_inside_a_block() -> None:
    made = Weights()
    scheme = Scheme.parse("fp8-block128x128/fp8-g128")
    parts = {name: made.canonical(scheme, rows, 256) for name, rows in (("q", 256), ("k", 64), ("v", 64))}
    memory = Memory()
    layer = load_layer(linear_layer(memory, parts), DequantLinear(), memory)
    x = made.values(3, 256)
    for part, found in zip(parts.values(), layer(torch.from_numpy(x)).split([256, 64, 64], dim=1), strict=True):
        assert_within_f32(found, x, part)


def test_rows_are_put_in_canonical_order() -> None:
    made = Weights()
    weight = made.canonical(Scheme.parse("mxfp8/a16"), 32, 64)
    weight = with_tensors(weight, bias=made.values(32))
    memory = Memory()
    packed = linear_layer(memory, {"gate_up": weight}, gate_up=RowOrder("halves_swapped"))
    x = torch.from_numpy(made.values(3, 64))
    swapped = load_layer(packed, DequantLinear(), memory)(x)
    plain = load_layer(linear_layer(memory, {"gate_up": weight}), DequantLinear(), memory)(x)
    assert torch.equal(swapped, plain.roll(16, dims=1))


def test_the_layer_does_not_refer_to_the_file() -> None:
    made = Weights()
    memory = Memory()
    weight = made.canonical(Scheme.parse("fp8-channel/a16"), 16, 32)
    layer = load_layer(linear_layer(memory, {"a": weight}), DequantLinear(), memory)
    x = torch.from_numpy(made.values(2, 32))
    before = layer(x)
    for array in memory.arrays.values():
        array.setflags(write=True)
        array.view(np.uint8)[...] = 0
    assert torch.equal(layer(x), before)


# --- refusals ----------------------------------------------------------------------------------------------------


def load_pair(first: CanonicalWeight, second: CanonicalWeight) -> None:
    memory = Memory()
    load_layer(linear_layer(memory, {"gate": first, "up": second}), DequantLinear(), memory)


def test_parts_with_different_input_scales_are_not_merged() -> None:
    made = Weights()
    scheme = Scheme.parse("fp8-tensor/fp8-tensor-static")
    gate, up = made.canonical(scheme, 16, 32), made.canonical(scheme, 16, 32)
    load_pair(gate, up)
    with pytest.raises(InvalidCheckpointError, match="input_scale differs"):
        load_pair(gate, with_tensors(up, input_scale=np.array([0.03], np.float32)))


def test_parts_of_different_schemes_widths_or_dtypes_are_refused() -> None:
    made = Weights()
    part = made.canonical(Scheme.parse("fp8-channel/a16"), 16, 32)
    with pytest.raises(InvalidCheckpointError, match="int8-channel"):
        load_pair(part, made.canonical(Scheme.parse("int8-channel/a16"), 16, 32))
    with pytest.raises(InvalidCheckpointError, match="does not fit"):
        load_pair(part, made.canonical(Scheme.parse("fp8-channel/a16"), 16, 64))
    biased = with_tensors(part, bias=np.zeros(16, np.float32))
    with pytest.raises(InvalidCheckpointError, match="bias"):
        load_pair(biased, with_tensors(part, bias=np.zeros(16, np.float16)))


def test_missing_and_doubled_rows_are_refused() -> None:
    part = Weights().canonical(Scheme.parse("fp8-channel/a16"), 16, 32)
    assembly = Assembly("whole", part.scheme, 48, 32)
    assembly.put(part, 0, module="a")
    with pytest.raises(InvalidCheckpointError, match="row 16"):
        assembly.finish()
    with pytest.raises(InvalidCheckpointError, match="another part covers"):
        assembly.put(part, 8, module="b")
    with pytest.raises(InvalidCheckpointError, match="in having pre_scale"):
        assembly.put(with_tensors(part, pre_scale=np.ones(32, np.float32)), 16, module="c")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_scales_that_are_not_finite_or_zero_above_codes_are_refused(value: float) -> None:
    weight = Weights().canonical(Scheme.parse("fp8-channel/a16"), 16, 32)
    scale = np.array(weight.tensors["scale"])
    scale[3] = value
    memory = Memory()
    layer = linear_layer(memory, {"a": with_tensors(weight, scale=scale)})
    with pytest.raises(InvalidCheckpointError, match="not finite") as caught:
        load_layer(layer, DequantLinear(), memory)
    assert (caught.value.file, caught.value.key) == ("model.safetensors", "a")


def test_an_e8m0_nan_is_refused_and_its_zero_is_not() -> None:
    weight = Weights().canonical(Scheme.parse("mxfp4/a16"), 8, 64)
    scale = np.array(weight.tensors["scale"])
    scale[1, 1] = 0
    memory = Memory()
    load_layer(linear_layer(memory, {"a": with_tensors(weight, scale=scale)}), DequantLinear(), memory)
    scale[1, 1] = 255
    with pytest.raises(InvalidCheckpointError, match="finite"):
        load_layer(linear_layer(memory, {"a": with_tensors(weight, scale=scale)}), DequantLinear(), memory)


def test_kernels_take_only_their_own_kind() -> None:
    memory = Memory()
    packed = linear_layer(memory, {"a": Weights().canonical(Scheme.parse("mxfp4/a16"), 8, 64)})
    with pytest.raises(UsageError, match="kernel for experts"):
        load_layer(packed, ExpertLoop(), memory)
    with pytest.raises(UsageError, match="kernel for linear"):
        load_layer(replace(packed, spec=replace(packed.spec, op="moe")), DequantLinear(), memory)


# --- experts -----------------------------------------------------------------------------------------------------


def expert_layer(memory: Memory, scheme: Scheme, *, stacked: bool) -> tuple[PackedLayer, list[list[CanonicalWeight]]]:
    made = Weights(3)
    experts, hidden, inner = 3, 64, 32
    weights = [
        [
            made.canonical(scheme, inner, hidden),
            made.canonical(scheme, inner, hidden),
            made.canonical(scheme, hidden, inner),
        ]
        for _ in range(experts)
    ]
    spec = LayerSpec("experts", "moe", hidden, hidden, scheme, moe=MoeSpec(experts, inner))

    def part(name: str, weight: CanonicalWeight, count: int = 0) -> Part:
        return Part(memory.module(name, weight, count))

    if stacked:
        names = ("gate", "up", "down")
        whole = [
            replace(ws[0], tensors={role: np.stack([w.tensors[role] for w in ws]) for role in ws[0].tensors})
            for ws in zip(*weights, strict=True)
        ]
        parts = [part(name, weight, experts) for name, weight in zip(names, whole, strict=True)]
        return PackedLayer(spec, w13=((parts[0], parts[1]),), w2=((parts[2],),), stacked=True), weights
    w13 = tuple((part(f"{e}.gate", ws[0]), part(f"{e}.up", ws[1])) for e, ws in enumerate(weights))
    w2 = tuple((part(f"{e}.down", ws[2]),) for e, ws in enumerate(weights))
    return PackedLayer(spec, w13=w13, w2=w2), weights


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("scheme_id", ["mxfp4/a16", "nvfp4/a16", "fp8-tensor/fp8-tensor-static", "bf16/a16"])
def test_experts_are_stacked_in_order(scheme_id: str, stacked: bool) -> None:
    memory = Memory()
    packed, weights = expert_layer(memory, Scheme.parse(scheme_id), stacked=stacked)
    layer = load_layer(packed, ExpertLoop(), memory)
    x = Weights(9).values(1, 64)
    for expert, (gate, up, down) in enumerate(weights):
        hidden = oracle.linear(x, gate)
        expected = oracle.linear(hidden / (1 + np.exp(-hidden)) * oracle.linear(x, up), down)
        y = layer(torch.from_numpy(x), torch.tensor([[expert]]), torch.ones(1, 1)).numpy()
        np.testing.assert_allclose(y, expected, rtol=2e-2 if "static" in scheme_id else 1e-4, atol=1e-2)


def test_a_wrong_number_of_experts_is_refused() -> None:
    memory = Memory()
    packed, _ = expert_layer(memory, Scheme.parse("mxfp4/a16"), stacked=False)
    with pytest.raises(InvalidCheckpointError, match="2 experts found, 3 expected"):
        load_layer(replace(packed, w2=packed.w2[:2]), ExpertLoop(), memory)
    packed, _ = expert_layer(memory, Scheme.parse("mxfp4/a16"), stacked=True)
    assert packed.spec.moe is not None
    spec = replace(packed.spec, moe=replace(packed.spec.moe, experts=4))
    with pytest.raises(InvalidCheckpointError, match="holds 3 experts"):
        load_layer(replace(packed, spec=spec), ExpertLoop(), memory)


# --- memory ------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from omniplat.checkpoint.reader import ShardReader
from tests.runtime.test_load import load_from_file, anonymous_peak
path, layers = Path(sys.argv[1]), int(sys.argv[2])
reader = ShardReader(path.parent)             # stays open: its pages are subtracted
load_from_file(reader, path.name, 1)          # imports, thread pools
base = anonymous_peak(reset=True)
held = load_from_file(reader, path.name, layers)
peak = anonymous_peak()
print(peak - base, sum(layer.nbytes for layer in held))
"""
ROWS, COLUMNS = 2048, 2048


def anonymous_peak(*, reset: bool = False) -> int:
    """Bytes of private memory: what is held now after a reset, else the highest since then."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    kilobytes = {name: int(fields[name].split()[0]) for name in ("VmHWM", "RssFile", "RssAnon")}
    if reset:
        return 1024 * kilobytes["RssAnon"]
    # File pages are the map of the checkpoint: the kernel may drop them.
    return 1024 * (kilobytes["VmHWM"] - kilobytes["RssFile"])


def load_from_file(reader: TensorReader, shard: str, layers: int) -> list[torch.nn.Module]:
    scheme = Scheme.parse("mxfp8/a16")
    size, scales = ROWS * COLUMNS, ROWS * COLUMNS // 32
    held = []
    for index in range(layers):
        start = index * (size + scales)
        infos = {
            "codes": TensorInfo(f"{index}.weight", "F8_E4M3", (ROWS, COLUMNS), shard, start, start + size),
            "scale": TensorInfo(
                f"{index}.scale", "U8", (ROWS, COLUMNS // 32), shard, start + size, start + size + scales
            ),
        }
        module = ResolvedModule(
            f"{index}", "", None, scheme, Storage("plain", "F8_E4M3"), ROWS, COLUMNS, infos, DecidedBy("", "")
        )
        spec = LayerSpec(f"{index}", "linear", ROWS, COLUMNS, scheme, parts=(ROWS,))
        held.append(load_layer(PackedLayer(spec, (Part(module),)), DequantLinear(), reader))
    return held


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_loading_peaks_at_the_stored_size_plus_one_layer(tmp_path: Path) -> None:
    layers = 12
    one = ROWS * COLUMNS + ROWS * COLUMNS // 32
    path = tmp_path / "shard.bin"
    with path.open("wb") as file:
        for _ in range(layers):
            file.write(
                np.full(ROWS * COLUMNS, 0x38, np.uint8).tobytes()
                + np.full(one - ROWS * COLUMNS, 127, np.uint8).tobytes()
            )
    arguments = [sys.executable, "-c", PEAK, str(path), str(layers)]
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    peak, held = (int(word) for word in done.stdout.split())
    assert held == layers * one
    assert held - one <= peak <= held + one + (4 << 20), (peak / one, held / one)
