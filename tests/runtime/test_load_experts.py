"""Loading layers of experts: stacks in both orientations, interleaved rows, a mixed layer, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from omniplat.canonical import Array
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.storage import Storage
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.models.builtin import FAMILIES
from omniplat.oracle import moe
from omniplat.packed import PackedLayer, Part
from omniplat.packing import family_of, pack
from omniplat.reading import TensorReader
from omniplat.reference.kernels import ExpertLoop
from omniplat.roworder import AS_IS, RowOrder
from omniplat.roworder_apply import to_disk_rows
from omniplat.runtime.layers import QuantExperts
from omniplat.runtime.load import load_layer
from omniplat.runtime.slicer import Rank
from omniplat.scheme import UNQUANTIZED, Scheme
from tests.reference.build import Weights
from tests.slicing.weights import Memory, concatenate, make, stack
from tests.support.resolving import resolve

E, HIDDEN, INNER = 3, 64, 32


def run(layer: PackedLayer, memory: TensorReader, x: Array, rank: Rank | None = None) -> Array:
    """Every expert over all rows, as [E, M, K]."""
    loaded = load_layer(layer, ExpertLoop(), memory, rank=rank or Rank())
    assert isinstance(loaded, QuantExperts)
    found = []
    for expert in range(E):
        ids = torch.full((len(x), 1), expert)
        found.append(loaded(torch.from_numpy(x), ids, torch.ones(len(x), 1)).numpy())
    return np.stack(found)


def expected(w13: Array, w2: Array, x: Array, spec: MoeSpec) -> Array:
    """The same from float values [E, 2I, K] and [E, K, I], gate first."""
    both = x.astype(np.float64) @ w13.astype(np.float64).swapaxes(1, 2)
    gate, up = np.split(both, 2, axis=2)
    return moe.activate(gate, up, spec) @ w2.astype(np.float64).swapaxes(1, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_float_stacks_lie_either_way(transposed: bool, interleaved: bool) -> None:
    made, memory = Weights(1), Memory()
    w13, w2 = made.values(E, 2 * INNER, HIDDEN), made.values(E, HIDDEN, INNER)
    on_disk = np.empty_like(w13)
    if interleaved:
        on_disk[:, 0::2], on_disk[:, 1::2] = w13[:, :INNER], w13[:, INNER:]
    else:
        on_disk = w13
    order = RowOrder("interleaved") if interleaved else AS_IS
    parts = []
    for name, values in (("gate_up_proj", on_disk), ("down_proj", w2)):
        array = np.ascontiguousarray(values.swapaxes(1, 2) if transposed else values).astype(ml_dtypes.bfloat16)
        memory.arrays[f"{name}.codes"] = array
        info = TensorInfo(f"{name}.codes", "BF16", array.shape, "model.safetensors", 0, array.nbytes)
        rows, columns = array.shape[1:]
        parts.append(
            ResolvedModule(
                name, "", None, UNQUANTIZED, Storage("plain", "BF16"), rows, columns, {"codes": info},
                DecidedBy("", ""), "unquantized", E,
            )
        )  # fmt: skip
    spec = LayerSpec("e", "moe", HIDDEN, HIDDEN, UNQUANTIZED, moe=MoeSpec(E, INNER))
    layer = PackedLayer(
        spec, w13=((Part(parts[0], order),),), w2=((Part(parts[1]),),), stacked=True, transposed=transposed
    )
    x = made.values(4, HIDDEN)
    assert spec.moe is not None
    wanted = expected(w13, w2, x, spec.moe)
    found = run(layer, memory, x)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
    halves = sum(run(layer, memory, x, Rank(rank, 2)) for rank in range(2))
    assert np.linalg.norm(halves - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("kind", "up", "transposed"),
    [
        ("qwen3_moe", (E, 2 * INNER, HIDDEN), False),
        ("gpt_oss", (E, HIDDEN, 2 * INNER), True),
        ("llama4", (E, HIDDEN, 2 * INNER), True),
    ],
)
def test_packing_says_which_way_float_stacks_lie(
    kind: str, up: tuple[int, ...], transposed: bool, tmp_path: Path
) -> None:
    down = (E, INNER, HIDDEN) if transposed else (E, HIDDEN, INNER)
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": up, "model.layers.0.mlp.experts.down_proj": down}
    config = {"model_type": kind}
    resolution = resolve(tmp_path, None, {name: ("BF16", shape) for name, shape in tensors.items()}, config=config)
    (layer,) = pack(resolution, family_of(config, FAMILIES)).layers
    assert (layer.stacked, layer.transposed) == (True, transposed)
    assert layer.spec.moe is not None
    assert (layer.spec.in_features, layer.spec.out_features, layer.spec.moe.intermediate) == (HIDDEN, HIDDEN, INNER)


@pytest.mark.parametrize("form", ["separate", "fused", "swapped", "interleaved"])
@pytest.mark.parametrize("scheme_id", ["mxfp4/a16", "nvfp4/a16", "int4-g32/a16", "fp8-tensor/a16", "int8-channel/a16"])
def test_every_form_on_disk_is_the_same_layer(scheme_id: str, form: str) -> None:
    scheme, memory, w13, w2 = Scheme.parse(scheme_id), Memory(), [], []
    gates, ups = ([make(scheme, INNER, HIDDEN, 2 * e + i, extras=False) for e in range(E)] for i in (0, 1))
    downs = [make(scheme, HIDDEN, INNER, 9 + e, extras=False) for e in range(E)]
    order = {"swapped": RowOrder("halves_swapped"), "interleaved": RowOrder("interleaved")}.get(form, AS_IS)
    for e in range(E):
        if form == "separate":
            parts = [Part(memory.module(f"{e}.{n}", w)) for n, w in (("gate", gates[e]), ("up", ups[e]))]
        else:
            both = to_disk_rows(concatenate(gates[e], ups[e]), order)
            parts = [Part(memory.module(f"{e}.gate_up", both), order)]
        w13.append(tuple(parts))
        w2.append((Part(memory.module(f"{e}.down", downs[e])),))
    spec = LayerSpec("e", "moe", HIDDEN, HIDDEN, scheme, moe=MoeSpec(E, INNER))
    x = Weights(2).values(3, HIDDEN)
    found = run(PackedLayer(spec, w13=tuple(w13), w2=tuple(w2)), memory, x)
    w13_all, w2_all = stack([concatenate(g, u) for g, u in zip(gates, ups, strict=True)]), stack(downs)
    for expert in range(E):
        ids, ones = np.full((3, 1), expert), np.ones((3, 1))
        wanted = moe.experts(x, ids, ones, w13_all, w2_all, MoeSpec(E, INNER))
        assert np.linalg.norm(found[expert] - wanted) <= 1e-5 * np.linalg.norm(wanted)


# --- memory ------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from omniplat.checkpoint.reader import ShardReader
from tests.runtime.test_load import anonymous_peak
from tests.runtime.test_load_experts import load_from_file
path, stacked = Path(sys.argv[1]), sys.argv[2] == "stacked"
reader = ShardReader(path.parent)             # stays open: its pages are subtracted
load_from_file(reader, path.name, 1, stacked) # imports, thread pools
base = anonymous_peak(reset=True)
held = load_from_file(reader, path.name, COUNT, stacked)
peak = anonymous_peak()
print(peak - base, held.nbytes)
"""
COUNT, WIDTH, DEPTH = 12, 1024, 512
_UP, _DOWN = 2 * DEPTH * WIDTH, WIDTH * DEPTH
ONE = (_UP + _DOWN) // 2 + (_UP + _DOWN) // 32


def load_from_file(reader: TensorReader, shard: str, count: int, stacked: bool) -> QuantExperts:
    """`count` experts of MXFP4 with interleaved gate and up rows, which have to be copied into order."""
    scheme, order = Scheme.parse("mxfp4/a16"), RowOrder("interleaved")
    offset = 0

    def module(name: str, rows: int, columns: int) -> ResolvedModule:
        nonlocal offset
        infos, lead = {}, (count,) if stacked else ()
        for role, width in (("codes", columns // 2), ("scale", columns // 32)):
            shape = (*lead, rows, width)
            size = int(np.prod(shape))
            infos[role] = TensorInfo(f"{name}.{role}", "U8", shape, shard, offset, offset + size)
            offset += size
        storage, experts = Storage("nibbles_k", "U8"), count if stacked else 0
        return ResolvedModule(name, "", None, scheme, storage, rows, columns, infos, DecidedBy("", ""), experts=experts)

    groups = range(1 if stacked else count)
    w13 = tuple((Part(module(f"{e}.gate_up", 2 * DEPTH, WIDTH), order),) for e in groups)
    w2 = tuple((Part(module(f"{e}.down", WIDTH, DEPTH)),) for e in groups)
    spec = LayerSpec("e", "moe", WIDTH, WIDTH, scheme, moe=MoeSpec(count, DEPTH))
    loaded = load_layer(PackedLayer(spec, w13=w13, w2=w2, stacked=stacked), ExpertLoop(), reader)
    assert isinstance(loaded, QuantExperts)
    return loaded


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("form", ["separate", "stacked"])
def test_loading_peaks_at_the_stored_size_plus_one_expert(form: str, tmp_path: Path) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(np.full(COUNT * ONE, 0x11, np.uint8).tobytes())
    done = subprocess.run(
        [sys.executable, "-c", PEAK.replace("COUNT", str(COUNT)), str(path), form],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    peak, held = (int(word) for word in done.stdout.split())
    assert held == COUNT * ONE
    assert held - ONE <= peak <= held + ONE + (1 << 20), (peak / ONE, held / ONE)


def test_the_scheme_of_w2_may_differ() -> None:
    memory, w13, w2 = Memory(), [], []
    up, down = Scheme.parse("mxfp4/a16"), Scheme.parse("fp8-channel/a16")
    for e in range(E):
        both = make(up, 2 * INNER, HIDDEN, e, extras=False)
        w13.append((Part(memory.module(f"{e}.gate_up", both)),))
        w2.append((Part(memory.module(f"{e}.down", make(down, HIDDEN, INNER, e, extras=False))),))
    spec = LayerSpec("e", "moe", HIDDEN, HIDDEN, up, moe=MoeSpec(E, INNER, w2_scheme=down))
    layer = PackedLayer(spec, w13=tuple(w13), w2=tuple(w2))
    assert np.isfinite(run(layer, memory, Weights(2).values(3, HIDDEN))).all()
    assert spec.moe is not None
    same = replace(layer, spec=replace(spec, moe=replace(spec.moe, w2_scheme=None)))
    with pytest.raises(ValueError, match="fp8-channel"):
        run(same, memory, Weights(2).values(3, HIDDEN))
