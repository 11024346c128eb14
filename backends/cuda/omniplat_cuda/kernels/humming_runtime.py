"""What stands between a layer and humming: its layout on the device, its kernels for a number of rows, its locks.
Imports humming.

humming compiles a kernel for every tile that its heuristics choose for a layer, at first use, and keeps it on disk by
content (HUMMING_CACHE_DIR). Left to itself it compiles them for every number of rows: 28 to 33 kernels. Here rows are
rounded up to `BUCKETS` first, so that at most as many are compiled, and those only that occur.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from humming.config import LayerConfig
from humming.kernel.humming import HummingKernel
from humming.ops import launch_kernel
from humming.schema import HummingInputSchema, HummingWeightSchema
from humming.transform import prepare_fp16_e8m0_scale, prepare_layer_config, transform_humming_tensors
from humming.tune import get_heuristics_config
from humming.utils.cpu import get_parallel_build_workers

from omniplat.errors import UsageError
from omniplat.portable.launch import is_collecting
from omniplat_cuda.kernels.humming_fixups import fixed
from omniplat_cuda.kernels.humming_forms import COLUMNS, ROWS, HummingForm, as_bytes, as_numbers

#: Numbers of rows that kernels are compiled for. Tiles grow with them up to 176 rows.
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
#: The same for pairs of a row and an expert.
EXPERT_BUCKETS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: int32 numbers that a launch finds at 0 and leaves so; humming's own layers have as many.
_LOCKS = 2048
#: Streams whose locks are made at once.
_STREAMS = 64


def laid_out(
    tensors: Mapping[str, torch.Tensor], form: HummingForm, activation: str
) -> tuple[str, dict[str, torch.Tensor]]:
    """humming's description of a layer, as JSON, and its tensors on the device of `tensors`, laid out for it.

    `tensors` are those of `input_tensors`. `activation` is humming's name of 8-bit inputs with a scale per row, "" for
    inputs of the layer's dtype.
    """
    device = tensors["weight"].device
    taken = {**tensors, "weight_scale": as_numbers(tensors["weight_scale"], form)}
    with torch.cuda.device(device):
        config = prepare_layer_config(
            form.out_features,
            form.in_features,
            HummingWeightSchema(
                b_dtype=form.codes,
                bs_dtype=form.scale_dtype,
                weight_scale_group_size=form.group,
                weight_scale_group_size_n=form.rows if form.scale == "block" else 0,
                weight_scale_type=form.scale,
                weight_scale_2_type=form.second or None,
                has_zero_point=bool(form.zero),
                is_fp_zero_point=form.zero == "float",
            ),
            HummingInputSchema(a_dtype=activation) if activation else None,
            num_experts=form.experts,
            pad_n_to_multiple=ROWS,
            pad_k_to_multiple=COLUMNS,
            has_bias=form.bias,
            torch_dtype=form.dtype,
            device=device,
            tensors=dict(taken),
        )
        config, adjusted = prepare_fp16_e8m0_scale(config, dict(taken))
        outputs = transform_humming_tensors(config, adjusted, already_padded=True)
    return config.to_str(), {**outputs, "weight_scale": as_bytes(outputs["weight_scale"])}


def bucket_of(rows: int, gemm_type: str) -> int:
    """The least number of rows with kernels of its own that is not below `rows`; the largest where none is."""
    buckets = BUCKETS if gemm_type == "dense" else EXPERT_BUCKETS
    return buckets[min(bisect_left(buckets, rows), len(buckets) - 1)]


class Key(NamedTuple):
    """A kernel: of the layer that `laid_out` described, "dense" or "indexed", for rows as `bucket_of` rounds them, on
    the CUDA device of that index.

    Sums of slices of K are rounded to the layer's dtype and added up in any order. Without slices (`whole_sums`)
    outputs are the same at every call, and a row's for every number of rows; experts of few rows each take longer.
    """

    layer: str
    gemm_type: str
    bucket: int
    device: int
    whole_sums: bool


@lru_cache(maxsize=65536)
def tile_rows(key: Key) -> int:
    """Rows of one tile of the kernel."""
    return int(_schedule(key)["block_shape"][0])


def _schedule(key: Key) -> dict[str, Any]:
    config = LayerConfig(**json.loads(key.layer))
    chosen = get_heuristics_config(config, shape_m=key.bucket, device=key.device, **_compute(key))
    return fixed(chosen, key.gemm_type, config.a_dtype.num_bits)


def _compute(key: Key) -> dict[str, Any]:
    return {"gemm_type": key.gemm_type, "use_batch_invariant": key.whole_sums}


def _compiled(key: Key) -> torch.Tensor:
    compute, schedule = json.dumps(_compute(key)), json.dumps(_schedule(key))
    configs: torch.Tensor = HummingKernel.prepare_kernels(key.layer, compute, schedule, key.device)
    return configs


class _Kernels:
    """Kernels, compiled beside each other and each once. Every use of one that cannot be raises humming's error."""

    def __init__(self) -> None:
        self._futures: dict[Key, Future[torch.Tensor]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()

    def ask(self, key: Key) -> Future[torch.Tensor]:
        """What humming launches, int64 [4], once it is compiled."""
        found = self._futures.get(key)
        if found is not None:
            return found
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max(1, get_parallel_build_workers()), "humming")
            if key not in self._futures:
                self._futures[key] = self._pool.submit(_compiled, key)
            return self._futures[key]


_KERNELS = _Kernels()


def compile_ahead(keys: Iterable[Key]) -> None:
    """Compile kernels beside each other, and wait for them; what failed is raised where it is used."""
    wait([_KERNELS.ask(key) for key in keys])


class _Locks:
    """Locks of streams: launches on one stream follow each other, those on two may not share any.

    Graphs that were captured on one stream share its locks, and are not to be replayed beside each other.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}
        self._taken: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lock = Lock()

    def get(self, device: torch.device) -> torch.Tensor:
        """int32 zeros for the current stream. Raises UsageError where a graph is captured before anything has run."""
        stream = torch.cuda.current_stream(device).cuda_stream
        found = self._taken.get((device, stream))
        return found if found is not None else self._take(device, stream)

    def _take(self, device: torch.device, stream: int) -> torch.Tensor:
        with self._lock:
            free = self._free.setdefault(device, [])
            if not free:
                if torch.cuda.is_current_stream_capturing():
                    raise UsageError("humming: run a layer once before a CUDA graph of it is captured")
                free.extend(torch.zeros((_STREAMS, _LOCKS), dtype=torch.int32, device=device).unbind())
                torch.cuda.current_stream(device).synchronize()
            return self._taken.setdefault((device, stream), free.pop())


_LOCKS_OF = _Locks()


def launch(
    key: Key,
    form: HummingForm,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    slots: int = 1,
) -> torch.Tensor:
    """`x` [M, K] by the weight: [M * slots, N] in the layer's dtype; with `routing`, only the rows that it names.

    `input_scale` f32 [M, 1] of 8-bit x. `routing`: ids of pairs by tile, experts of tiles, padded number of pairs.
    Where launches are collected (`omniplat.portable.launch`), the kernel is asked for and the result holds anything.
    """
    kernel = _KERNELS.ask(key)
    if is_collecting():
        return x.new_empty((len(x) * slots, form.out_features), dtype=form.dtype)
    ids, experts, padded = routing if routing is not None else (None, None, None)
    y: torch.Tensor = launch_kernel(
        configs=kernel.result(),
        inputs=x,
        weight=weight,
        weight_scale=as_numbers(weight_scale, form),
        weight_scale_2=weight_scale_2,
        zero_point=zero_point,
        bias=bias,
        input_scale=input_scale,
        sorted_ids=ids,
        expert_ids=experts,
        num_tokens_padded=padded,
        locks=_LOCKS_OF.get(x.device),
        top_k=slots,
    )
    return y
