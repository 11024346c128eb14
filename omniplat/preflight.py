"""The preflight: what only the values of scales tell, read before any weight is loaded.

Two things are looked for. A scale that is NaN or infinite, or 0 above codes that are not, makes a layer wrong whatever
runs it. And the *span* of MX scales, the number of binades between the largest and the smallest group exponent of a
row, decides whether a layer may be re-encoded (`omniplat/reencoding.py` states the limits).

Only scale tensors are read. Codes are read in two cases: of modules that have a scale of 0, and of those whose span
looks too large for some re-encoding, because groups of zeros do not count and producers give them any exponent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from omniplat.canonical import Array
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.resolved import ResolvedModule
from omniplat.formats.scale_values import not_finite
from omniplat.formats.unpack import canonical_scale
from omniplat.oracle.reencode import row_spans
from omniplat.packed import PackedLayer
from omniplat.reading import TensorReader, read_canonical
from omniplat.reencoding import REENCODINGS, span_limit

#: Roles that hold scales, of a dialect's own or canonical. They are multipliers or divisors: none may be NaN or Inf.
SCALE_ROLES = (
    *("scale", "scale2", "scale_second", "nested_scale", "requantization_scale", "deq_scale"),
    *("channel_scale", "pre_scale", "smooth_factor", "scale_and_zero"),
)
#: Those of which one value holds for a whole tensor: 0 would make all of it 0, which no producer means.
SINGLE_ROLES = ("global_scale", "tensor_scale", "input_scale", "input_global_scale")
#: The smallest span that forbids any re-encoding of a weight id.
_SMALLEST_LIMIT = {
    source: min(rule.max_span for (of, _), rule in REENCODINGS.items() if of == source) for source, _ in REENCODINGS
}


@dataclass(frozen=True, slots=True)
class ScaleScan:
    """What the scales of one layer hold.

    `spans`     weight id -> largest span of a row, in binades, for the MX weights among its modules. Whole rows: what a
                rank holds of a row spans no more.
    `problems`  module -> why its scales cannot be right.
    """

    spans: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


#: Of which layers the scales are read: of none; of those whose kernel depends on their values and that have no other
#: one; of all whose kernel depends on them; of all.
Scan = Literal["none", "decisive", "needed", "all"]


class Scales(Protocol):
    """What tells of the values of a layer's scales."""

    def scan(self, layer: PackedLayer, target: str, has_alternative: bool) -> ScaleScan:
        """What the layer's scales hold; nothing where they are not to be read. `target` is the weight id as which the
        layer would be re-encoded, or ""; `has_alternative` says that another kernel runs whatever the scales are."""
        ...


@dataclass(frozen=True, slots=True)
class KnownSpans:
    """Spans that a plan has found already, of the layer that a rank holds a part of."""

    spans: Mapping[str, int]

    def scan(self, layer: PackedLayer, target: str, has_alternative: bool) -> ScaleScan:
        return ScaleScan(self.spans)


class Preflight:
    """Reads the scales of layers that ask for it."""

    def __init__(self, reader: TensorReader, scan: Scan) -> None:
        self._reader = reader
        self._scan = scan

    def scan(self, layer: PackedLayer, target: str, has_alternative: bool) -> ScaleScan:
        limited = any(span_limit(module.scheme.weight_id, target) is not None for module in layer.modules)
        wanted = self._scan == "needed" or (self._scan == "decisive" and not has_alternative)
        if self._scan == "all" or (wanted and limited):
            return scan_layer(layer, self._reader)
        return ScaleScan()


def exponent_spans(scale: Array) -> NDArray[np.int64]:
    """Span of every row, int64 [...], of e8m0 bytes uint8 [..., G]; 0 for rows with fewer than two groups that count.

    An upper bound: only groups whose byte is 0 are taken for groups of zeros, which the bytes alone do not show.
    Byte 255 (NaN) is not counted.
    """
    counted = (scale != 0) & (scale != 255)
    largest = np.where(counted, scale, 0).max(axis=-1, initial=0).astype(np.int64)
    smallest = np.where(counted, scale, 255).min(axis=-1, initial=255).astype(np.int64)
    spans: NDArray[np.int64] = np.where(largest > 0, largest - smallest, 0)
    return spans


def scan_layer(layer: PackedLayer, reader: TensorReader) -> ScaleScan:
    """Look at the scales of every module of a layer; `reader` best gives views of mapped files.

    Modules that are unquantized or invalid are passed over: the one have no scales, the other have findings already.
    """
    spans: dict[str, int] = {}
    problems: dict[str, str] = {}
    for module in layer.modules:
        if module.scheme.is_unquantized or module.status == "invalid":
            continue
        try:
            _check_values(module, reader)
            span = _span(module, reader)
        except InvalidCheckpointError as exc:
            problems[module.name] = exc.problem
            continue
        if span is not None:
            weight = module.scheme.weight_id
            spans[weight] = max(span, spans.get(weight, 0))
    return ScaleScan(spans, problems)


def _check_values(module: ResolvedModule, reader: TensorReader) -> None:
    """Raises InvalidCheckpointError with the same words as loading does."""
    for role, info in module.tensors.items():
        if role not in SCALE_ROLES and role not in SINGLE_ROLES:
            continue
        stored = reader.read(info)
        is_e8m0 = role == "scale" and module.scheme.weight.scale_format == "e8m0"
        if stored.dtype.kind in "iu" and not is_e8m0:
            continue  # codes of scales, and bit patterns
        problem = not_finite(role, stored)
        if not problem and role in SINGLE_ROLES and (stored == 0).any():
            problem = f"scale not finite: {role} is 0"
        if problem:
            raise InvalidCheckpointError(problem, file=info.shard, key=info.name)
        if role == "scale" and not is_e8m0 and (stored == 0).any():
            # legal above codes that are all zero: loading's own check looks at them
            for expert in _experts(module):
                read_canonical(module, reader, expert=expert)


def _span(module: ResolvedModule, reader: TensorReader) -> int | None:
    """The module's span; None where its scales are no e8m0 bytes of groups."""
    quant = module.scheme.weight
    if not quant.is_microscaled or "scale" not in module.tensors:
        return None
    limit = _SMALLEST_LIMIT.get(module.scheme.weight_id)
    stored = reader.read(module.tensors["scale"])
    spans = [0]
    for expert in _experts(module):
        scale = canonical_scale(
            stored if expert is None else stored[expert],
            module.storage,
            module.scheme,
            module.out_features,
            module.in_features,
            module.name,
        )
        span = int(exponent_spans(scale).max(initial=0))
        if limit is not None and span > limit:
            codes = read_canonical(module, reader, expert=expert).tensors["codes"]
            span = int(row_spans(codes, scale, quant, module.in_features).max(initial=0))
        spans.append(span)
    return max(spans)


def _experts(module: ResolvedModule) -> Sequence[int | None]:
    """The experts of a stack; None for a module that is none."""
    return range(module.experts) if module.experts else (None,)
