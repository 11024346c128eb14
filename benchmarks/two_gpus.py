"""Layers whole and as two ranks share them, quantized and in BF16: what cuda_two_gpus.py measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from cuda_linear import ROTATED
from cuda_moe import TOP, bf16_layer, quantized

from omniplat.capability import Accepted
from omniplat.conformance.subject import Subject
from omniplat.layer import LayerSpec, MoeSpec
from omniplat.legality import rank_spec
from omniplat.match import Policy, decide, match
from omniplat.packed import Split
from omniplat.runtime.kernel import Kernel, LinearKernel, MoeKernel, Workspaces, load_kernel
from omniplat.runtime.layers import QuantExperts, QuantLinear
from omniplat.runtime.moe import expert_map_of
from omniplat.runtime.slicer import Rank, column_range, expert_range
from omniplat.runtime.tensors import WeightTensors
from omniplat.scheme import Scheme

RANKS = 2
#: What is measured of a layer: a layer that one GPU has whole, or this rank's part of one.
RUNS = ("bf16 one", "one", "bf16 two", "two")
#: Inputs to this rank's output.
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """`calls` has for each of RUNS one call per copy of the weights, on what `inputs` gives for a number of rows, which
    is the same on every rank. `compiled`: layers whose kernels are to be compiled."""

    name: str
    scheme: str
    kernels: str
    calls: Mapping[str, Sequence[Call]]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    compiled: Sequence[QuantLinear | QuantExperts]


@dataclass(frozen=True)
class Place:
    """What this rank runs on, and which kernels it prefers."""

    subject: Subject
    rank: int
    prefer: str

    @property
    def device(self) -> torch.device:
        return self.subject.torch_device

    def kernel(self, whole: LayerSpec, own: LayerSpec) -> Kernel:
        """Of what a plan chooses for the whole layer, which has to take a rank's part as well."""
        policy = Policy(prefer=self.prefer)
        built = [capability for capability in self.subject.spec.capabilities if capability.impl]
        chosen = match(whole, built, self.subject.device, policy).chosen
        if chosen is None:
            raise SystemExit(f"no kernel runs {whole.scheme.id} here")
        decision = decide(chosen.capability, own, self.subject.device, policy)
        if not isinstance(decision, Accepted):
            raise SystemExit(f"{chosen.capability.name} does not run a rank's part: {decision}")
        return load_kernel(chosen.capability.impl)


def pair(scheme: Scheme, n: int, k: int, place: Place) -> Layer:
    """A column-parallel layer of `n` x `k`, GELU, and a row-parallel one of `k` x `n`."""
    held = column_range(n, Rank(place.rank, RANKS))
    sides = []
    for name, shape, split in (("up", (n, k), Split("column")), ("down", (k, n), Split("row"))):
        whole = LayerSpec(name, "linear", *shape, scheme, parts=shape[:1])
        own = rank_spec(whole, split, RANKS, 1)
        weight, half = _random_weight(scheme, shape, place.device)
        is_row = split.style == "row"
        cut = _columns(weight, held) if is_row else _rows(weight, held)
        cut_half = _columns_of(half, held, n) if is_row else _rows_of(half, held)
        kernel = place.kernel(whole, own)
        assert isinstance(kernel, LinearKernel)
        sides.append((kernel, {"one": (whole, weight, half), "two": (own, cut, cut_half)}))
    copies = 2
    if place.device.type == "cuda":
        copies = max(2, -(-ROTATED // sum(forms["two"][1].nbytes for _, forms in sides)))
    calls: dict[str, list[Call]] = {name: [] for name in RUNS}
    compiled: list[QuantLinear] = []
    workspaces = Workspaces()
    for name in ("one", "two"):
        for _ in range(copies):
            layers = []
            for kernel, forms in sides:
                spec, weight, _ = forms[name]
                own_copy = replace(weight, tensors={role: t.clone() for role, t in weight.tensors.items()})
                layers.append(QuantLinear(spec, kernel, kernel.prepare(own_copy, spec)))
                layers[-1].share_workspace(workspaces)
            compiled += layers
            calls[name].append(partial(_mlp, *layers))
            halves = [partial(F.linear, weight=forms[name][2].clone()) for _, forms in sides]
            calls[f"bf16 {name}"].append(partial(_mlp, *halves))

    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        return (_random((rows, k), place.device),)

    kernels = ", ".join(dict.fromkeys(kernel.name for kernel, _ in sides))
    return Layer(f"pair {n}x{k}", scheme.id, kernels, calls, inputs, compiled)


def _mlp(up: Call, down: Call, x: torch.Tensor) -> torch.Tensor:
    return down(F.gelu(up(x), approximate="tanh"))


def experts(scheme: Scheme, style: str, sizes: tuple[int, int, int], place: Place) -> Layer:
    """`sizes`: experts, hidden and intermediate size. `style` "tp": half of every expert; "ep": half of the experts.

    One copy of the weights: a call reads more than any cache holds.
    """
    count, hidden, inner = sizes
    whole = LayerSpec("experts", "moe", hidden, hidden, scheme, moe=MoeSpec(count, inner, top_k=TOP))
    rank = Rank(place.rank, RANKS) if style == "tp" else Rank(ep_rank=place.rank, ep_size=RANKS)
    own = rank_spec(whole, Split(), rank.tp_size, rank.ep_size)
    shapes = ((count, 2 * inner, hidden), (count, hidden, inner))
    (w13, half13), (w2, half2) = (_random_weight(scheme, shape, place.device) for shape in shapes)
    mapping = None
    if style == "tp":
        held = column_range(inner, rank)
        cuts = _rows(w13, held, 2), _columns(w2, held)
        cut_halves = _rows_of(half13, held, 2), _columns_of(half2, held, inner)
    else:
        mapping = expert_map_of(count, rank, place.device)
        held = expert_range(count, rank)
        cuts = _experts(w13, held), _experts(w2, held)
        cut_halves = half13[held.start : held.stop], half2[held.start : held.stop]
    kernel = place.kernel(whole, own)
    assert isinstance(kernel, MoeKernel)
    layers = [QuantExperts(spec, kernel, kernel.prepare(*cut, spec)) for spec, cut in ((whole, (w13, w2)), (own, cuts))]
    for layer in layers:
        layer.share_workspace(Workspaces())
    calls: dict[str, Sequence[Call]] = {
        "bf16 one": [partial(bf16_layer, w13=half13, w2=half2)],
        "one": [layers[0]],
        "bf16 two": [partial(bf16_layer, w13=cut_halves[0], w2=cut_halves[1], expert_map=mapping)],
        "two": [partial(layers[1], expert_map=mapping)],
    }

    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        ids = _random((rows, count), place.device).float().topk(TOP, 1).indices.to(torch.int32)
        return _random((rows, hidden), place.device), ids, _random((rows, TOP), place.device).float().sigmoid()

    return Layer(f"experts {style}", scheme.id, kernel.name, calls, inputs, layers)


def _random(shape: tuple[int, ...], device: torch.device, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()


def _random_weight(scheme: Scheme, shape: tuple[int, ...], device: torch.device) -> tuple[WeightTensors, torch.Tensor]:
    """Quantized, and what that stands for in BF16; `shape` is [N, K], or [E, N, K] of experts."""
    values = _random(shape, device, 0.02)
    if len(shape) == 3:
        return quantized(values, scheme)
    weight, dense = quantized(values[None], scheme)
    return replace(weight, tensors={role: tensor[0] for role, tensor in weight.tensors.items()}, experts=0), dense[0]


def _rows(weight: WeightTensors, rows: range, parts: int = 1) -> WeightTensors:
    """Rows of each of the `parts` of a weight, which are as long as each other."""
    tensors = {role: _rows_of(tensor, rows, parts) for role, tensor in weight.tensors.items()}
    return replace(weight, out_features=parts * len(rows), tensors=tensors)


def _rows_of(tensor: torch.Tensor, rows: range, parts: int = 1) -> torch.Tensor:
    pieces = [part[..., rows.start : rows.stop, :] for part in tensor.chunk(parts, dim=-2)]
    return torch.cat(pieces, dim=-2)


def _columns(weight: WeightTensors, columns: range) -> WeightTensors:
    tensors = {role: _columns_of(tensor, columns, weight.in_features) for role, tensor in weight.tensors.items()}
    return replace(weight, in_features=len(columns), tensors=tensors)


def _columns_of(tensor: torch.Tensor, columns: range, whole: int) -> torch.Tensor:
    """Of a tensor whose last dimension holds `whole` columns evenly, or one value for all of them."""
    if tensor.shape[-1] == 1:
        return tensor
    start, stop = (column * tensor.shape[-1] // whole for column in (columns.start, columns.stop))
    return tensor[..., start:stop].contiguous()


def _experts(weight: WeightTensors, held: range) -> WeightTensors:
    tensors = {role: tensor[held.start : held.stop] for role, tensor in weight.tensors.items()}
    return replace(weight, tensors=tensors, experts=len(held))
