"""Schemes: how the values of a weight and of an activation are quantized, and their stable ids.

A `Scheme` says what the numbers mean. It does not say how a checkpoint packs them (that is a format's
business) nor which kernel computes with them. The id names the main fields; `Scheme.parse(s.id)` gives a
scheme with the same id and with the defaults for the fields that the id leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from omniplat.errors import InvalidSchemeError

#: element name -> bits of one stored code.
ELEMENT_BITS: dict[str, int] = {
    "bf16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "fp6_e2m3": 6,
    "fp6_e3m2": 6,
    "fp4_e2m1": 4,
    "nf4": 4,
    "fp4_bnb": 4,
    **{f"int{b}": b for b in range(2, 9)},
    **{f"uint{b}": b for b in range(2, 9)},
}

GRANULARITIES = ("tensor", "channel", "token", "group", "block", "opaque")


@dataclass(frozen=True, slots=True)
class TensorQuant:
    """How one tensor is quantized.

    `element`       name of the code's number format, a key of `ELEMENT_BITS`, or `svdq_*`, `gguf_*`, `int8_bnb`.
    `granularity`   what shares one scale: the tensor, a row (`channel` of a weight, `token` of an activation),
                    a run of `group_size` values along K (`group`), a tile of `block` rows x columns.
    `scale_format`  number format of the scale as stored: f32, bf16, f16, e8m0, e4m3.
    `second_scale`  "" | "global" (NVFP4: one f32 above the group scales) | "dual" (one f32 per 512 along K).
    `symmetric`     False where a zero point is subtracted.
    `dynamic`       True where the scale is computed from the values at run time (activations).
    `scale_rule`, `rounding`   for values that are quantized at run time: how the scale is derived
                    (absmax, floor, ceil, even, rceil) and how codes are rounded; "" for stored weights.
    """

    element: str
    granularity: str
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    scale_format: str = "f32"
    second_scale: str = ""
    symmetric: bool = True
    dynamic: bool = False
    scale_rule: str = ""
    rounding: str = ""

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise InvalidSchemeError(self.element, f"granularity {self.granularity!r} is none of {GRANULARITIES}")
        if self.granularity == "group" and self.group_size <= 0:
            raise InvalidSchemeError(self.element, "granularity group needs a positive group_size")
        if self.granularity == "block" and min(self.block) <= 0:
            raise InvalidSchemeError(self.element, "granularity block needs two positive block sizes")

    @property
    def bits(self) -> int:
        """Bits of one code; raises InvalidSchemeError for opaque elements (gguf, svdquant)."""
        try:
            return ELEMENT_BITS[self.element]
        except KeyError:
            raise InvalidSchemeError(self.element, "has no fixed code width") from None

    @property
    def is_integer(self) -> bool:
        return self.element.startswith(("int", "uint"))

    @property
    def is_microscaled(self) -> bool:
        """True for the OCP MX formats: groups of 32 with a power-of-two scale."""
        return self.scale_format == "e8m0" and self.granularity == "group" and self.group_size == 32


def with_cut_blocks(quant: TensorQuant, starts: Iterable[int]) -> TensorQuant:
    """A weight in blocks that is put together of parts which start at these rows: where a part starts inside a block
    (K projections of 64 rows, blocks of 128) the whole has blocks of fewer rows, the greatest height that divides all
    starts. Other weights are as they were."""
    if quant.granularity != "block":
        return quant
    height, width = quant.block
    return replace(quant, block=(gcd(height, *starts), width))


@dataclass(frozen=True, slots=True)
class Scheme:
    """Weight and activation quantization of one layer. `activation is None` means 16- or 32-bit float input.

    `pre_scale` is True where the activation is multiplied by a per-column vector before everything else
    (AWQ's and SmoothQuant's smoothing); the vector is the canonical tensor `pre_scale`.
    `transform` is (A, B) with A * B = K where an input row, seen as a matrix [A, B], is multiplied from both sides
    before it is quantized, and its scale by a clipping ratio (FlatQuant); (0, 0) where it is not. The matrices and the
    ratio are the canonical tensors `left_transform`, `right_transform` and `clip_ratio`.
    """

    weight: TensorQuant
    activation: TensorQuant | None = None
    pre_scale: bool = False
    transform: tuple[int, int] = (0, 0)

    @property
    def id(self) -> str:
        return f"{self.weight_id}/{self.activation_id}"

    @property
    def weight_id(self) -> str:
        return weight_id(self.weight)

    @property
    def activation_id(self) -> str:
        return activation_id(self.activation)

    @property
    def is_transformed(self) -> bool:
        return self.transform != (0, 0)

    @property
    def is_unquantized(self) -> bool:
        return self.weight.element == "bf16" and self.activation is None

    def with_activation(self, activation: TensorQuant | None) -> Scheme:
        return replace(self, activation=activation)

    @staticmethod
    def parse(text: str) -> Scheme:
        """Parse `<weight>/<activation>`; raises InvalidSchemeError."""
        weight, slash, activation = text.partition("/")
        if not slash:
            raise InvalidSchemeError(text, "expected <weight>/<activation>, such as mxfp8/mxfp8")
        return Scheme(parse_weight_id(weight), parse_activation_id(activation))


#: Ids that name one fixed combination of fields. The same table prints and parses.
_NAMED: dict[str, TensorQuant] = {
    "mxfp8": TensorQuant("fp8_e4m3", "group", 32, scale_format="e8m0"),
    "mxfp8e5m2": TensorQuant("fp8_e5m2", "group", 32, scale_format="e8m0"),
    "mxfp6e2m3": TensorQuant("fp6_e2m3", "group", 32, scale_format="e8m0"),
    "mxfp6e3m2": TensorQuant("fp6_e3m2", "group", 32, scale_format="e8m0"),
    "mxfp4": TensorQuant("fp4_e2m1", "group", 32, scale_format="e8m0"),
    "mxint8": TensorQuant("int8", "group", 32, scale_format="e8m0"),
    "mxint4": TensorQuant("int4", "group", 32, scale_format="e8m0"),
    "mxfp4-dual": TensorQuant("fp4_e2m1", "group", 32, scale_format="e8m0", second_scale="dual"),
    "nvfp4": TensorQuant("fp4_e2m1", "group", 16, scale_format="e4m3", second_scale="global"),
    "nvfp4-g32": TensorQuant("fp4_e2m1", "group", 32, scale_format="e4m3", second_scale="global"),
    "svdq-int4": TensorQuant("svdq_int4", "opaque"),
    "svdq-int4-g64": TensorQuant("svdq_int4", "group", 64),
    "svdq-nvfp4": TensorQuant("svdq_nvfp4", "opaque"),
    "int8-bnb": TensorQuant("int8_bnb", "channel"),
    "bf16": TensorQuant("bf16", "tensor"),
}
_NAMED_KEY = {
    (t.element, t.granularity, t.group_size, t.scale_format == "e8m0", t.second_scale): name
    for name, t in _NAMED.items()
}

_STEM_OF_ELEMENT = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8e5m2", "nf4": "nf4", "fp4_bnb": "fp4bnb"}
_ELEMENT_OF_STEM = {stem: element for element, stem in _STEM_OF_ELEMENT.items()}
_PLAIN = re.compile(
    r"(?P<stem>fp8e5m2|fp8|u?int[2-8]|nf4|fp4bnb)-"
    r"(?:(?P<gran>tensor|channel|token)|g(?P<group>\d+)|b(?P<flat>\d+)|block(?P<bn>\d+)x(?P<bk>\d+))"
    r"(?P<static>-static)?(?P<asym>-asym)?"
)


def _quant_id(quant: TensorQuant) -> str:
    named = _NAMED_KEY.get(
        (quant.element, quant.granularity, quant.group_size, quant.scale_format == "e8m0", quant.second_scale)
    )
    if named is not None:
        return named
    if quant.element.startswith("gguf_"):
        return "gguf-" + quant.element.removeprefix("gguf_")
    stem = _STEM_OF_ELEMENT.get(quant.element, quant.element)
    if quant.granularity == "group":
        tail = f"{'b' if quant.element in ('nf4', 'fp4_bnb') else 'g'}{quant.group_size}"
    elif quant.granularity == "block":
        tail = f"block{quant.block[0]}x{quant.block[1]}"
    else:
        tail = quant.granularity
    return f"{stem}-{tail}"


@lru_cache(maxsize=4096)
def weight_id(quant: TensorQuant) -> str:
    """The stable id of a weight's quantization, such as `int4-g128`."""
    return _quant_id(quant)


@lru_cache(maxsize=4096)
def activation_id(quant: TensorQuant | None) -> str:
    """The stable id of an activation's quantization; `a16` for none."""
    if quant is None:
        return "a16"
    text = _quant_id(quant)
    if text in _NAMED:
        return text
    if not quant.dynamic:
        text += "-static"
    if not quant.symmetric:
        text += "-asym"
    return text


def _parse_quant(text: str) -> tuple[TensorQuant, re.Match[str] | None]:
    if text in _NAMED:
        return _NAMED[text], None
    if text.startswith("gguf-") and re.fullmatch(r"gguf-[a-z0-9_]+", text):
        return TensorQuant("gguf_" + text.removeprefix("gguf-"), "opaque"), None
    match = _PLAIN.fullmatch(text)
    if match is None:
        raise InvalidSchemeError(text, "is not a known id")
    element = _ELEMENT_OF_STEM.get(match["stem"], match["stem"])
    symmetric = not element.startswith("uint")
    if match["bn"]:
        quant = TensorQuant(element, "block", block=(int(match["bn"]), int(match["bk"])), symmetric=symmetric)
    elif match["group"] or match["flat"]:
        if bool(match["flat"]) != (element in ("nf4", "fp4_bnb")):
            raise InvalidSchemeError(text, "is not a known id")
        quant = TensorQuant(element, "group", int(match["group"] or match["flat"]), symmetric=symmetric)
    else:
        quant = TensorQuant(element, match["gran"], symmetric=symmetric)
    return quant, match


@lru_cache(maxsize=4096)
def parse_weight_id(text: str) -> TensorQuant:
    """The inverse of `weight_id`; raises InvalidSchemeError."""
    quant, match = _parse_quant(text)
    if match is not None and (match["static"] or match["asym"] or match["gran"] == "token"):
        raise InvalidSchemeError(text, "is an activation id, not a weight id")
    return quant


@lru_cache(maxsize=4096)
def parse_activation_id(text: str) -> TensorQuant | None:
    """The inverse of `activation_id`; raises InvalidSchemeError."""
    if text == "a16":
        return None
    quant, match = _parse_quant(text)
    if text == "bf16" or quant.element.startswith("gguf_") or (match is not None and match["gran"] == "channel"):
        raise InvalidSchemeError(text, "is a weight id, not an activation id")
    if match is None:
        return replace(quant, dynamic=True)
    return replace(quant, dynamic=not match["static"], symmetric=quant.symmetric and not match["asym"])


def low_rank_base(quant: TensorQuant) -> TensorQuant | None:
    """How SVDQuant quantizes what its low-rank pair leaves (a weight) or the input (an activation); None for others."""
    if quant.element == "svdq_nvfp4":
        return replace(_NAMED["nvfp4"], dynamic=quant.dynamic, scale_rule=quant.scale_rule, rounding=quant.rounding)
    if quant.element == "svdq_int4":
        return TensorQuant(
            "int4", "group", 64, dynamic=quant.dynamic, scale_rule=quant.scale_rule, rounding=quant.rounding
        )
    return None


#: What a layer without quantization has.
UNQUANTIZED = Scheme(_NAMED["bf16"])
