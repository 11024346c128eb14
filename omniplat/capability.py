"""Capabilities: what one kernel declares it can run, and the answer when a layer is held against them.

Pure data. A backend's `spec.py` is a list of these; importing it imports no torch and no vendor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from omniplat.layer import ACTIVATIONS
from omniplat.scheme import TensorQuant, activation_id


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel runs the layer. `executes` is the scheme id it computes with, of w13 and w2 joined by "+" where they
    differ; `via` the re-encoding, if any.

    `instead` says which of the checkpoint's rules for activations is replaced by the kernel's own; "" for none.
    """

    executes: str
    via: str = ""
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel refuses the layer: `rule` is what was checked, `needed` what it asks for, `found` what is there."""

    rule: str
    needed: str
    found: str

    def __str__(self) -> str:
        return f"needs {self.rule} {self.needed}, found {self.found}"


Decision = Accepted | Rejected


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """A limit on one dimension. `dim` is "in", "out", "intermediate" or "experts"; of a transform "left" or "right"."""

    dim: str
    multiple_of: int = 1
    minimum: int = 0
    maximum: int = 0

    @property
    def needed(self) -> str:
        words = []
        if self.multiple_of > 1:
            words.append(f"a multiple of {self.multiple_of}")
        if self.minimum:
            words.append(f"at least {self.minimum}")
        if self.maximum:
            words.append(f"at most {self.maximum}")
        return " and ".join(words)

    def accepts(self, size: int) -> bool:
        return size % self.multiple_of == 0 and size >= self.minimum and (not self.maximum or size <= self.maximum)


def multiples(number: int, *dims: str) -> tuple[ShapeRule, ...]:
    """Each of `dims` must be a multiple of `number`."""
    return tuple(ShapeRule(dim, multiple_of=number) for dim in dims)


#: The maturity of what a vendor has given up, and what is declared for completeness only.
ARCHIVED = "archived"


@dataclass(frozen=True, slots=True)
class Capability:
    """One kernel's declaration.

    `weights`      patterns (fnmatch) of weight ids: "mxfp4", "int4-g*".
    `activations`  patterns of the *declared* activation ids that it executes exactly, as declared.
    `executes`     "" when it executes what is declared; else the one activation id that it always executes.
    `scale_rules`  rules by which it derives scales of activations (`TensorQuant.scale_rule`), its own first; empty:
                   whichever the checkpoint declares.
    `roundings`    the same of `TensorQuant.rounding`.
    `scale_format` what it rounds those scales to ("f16"); "" where it keeps them as declared.
    `substitutes`  what a checkpoint that declares another rule gets: False, a refusal; True, the kernel's own rule, and
                   a note in the plan.
    `input_element`   the number format that the device holds inputs in, where it is not the declared one but another
                   of the same bits: "fp8_e4m3fnuz".
    `archs`        architectures of the device kind, as names; empty means every one.
    `dtypes`       input dtypes.
    `requires`     distributions, as requirement strings ("humming-kernels>=0.1.20").
    `assumed`      True where a described device is taken to have those: the backend's extra brings them.
    `accumulator`  "f32", "f64", "int32", "fp22-by-128" (of FP8 units, promoted to f32 every 128 products), ...: the
                   tolerance of the conformance suite derives from it.
    `maturity`     "stable", "experimental" or `ARCHIVED`.
    `evidence`     "declared" | "emulated" | "verified on <device>".
    `impl`         "module:Class" of the kernel; empty while only planning is possible.
    `rounds_before_bias`   True where products are rounded to the output's dtype before a bias is added.
    `resident`     bytes kept per stored byte of weight (1.0: nothing is expanded).
    `resident_by_weight`   the same of weight ids for which it is another number, too near to choose by.
    `transforms`   limits of the matrices [left, left] and [right, right] by which it transforms inputs
                   (`Scheme.transform`); empty where it transforms none.
    `moe_activations`   what an op for experts can compute between its two products.
    `refuses`      what of `omniplat.layer.EXTRAS` the kernel does not take.
    `variants`     names of implementations of the same numerics that the kernel picks from by M.
    """

    name: str
    op: str
    weights: tuple[str, ...]
    activations: tuple[str, ...]
    executes: str = ""
    scale_rules: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    scale_format: str = ""
    substitutes: bool = False
    input_element: str = ""
    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "f16", "f32")
    shapes: tuple[ShapeRule, ...] = ()
    requires: tuple[str, ...] = ()
    assumed: bool = True
    accumulator: str = "f32"
    priority: int = 0
    maturity: str = "stable"
    evidence: str = "declared"
    impl: str = ""
    via: str = ""
    resident: float = 1.0
    resident_by_weight: tuple[tuple[str, float], ...] = ()
    bias: bool = True
    rounds_before_bias: bool = False
    transforms: tuple[ShapeRule, ...] = ()
    moe_activations: tuple[str, ...] = ACTIVATIONS
    refuses: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    def kept(self, weight_id: str) -> float:
        """Bytes kept per stored byte of a weight."""
        return dict(self.resident_by_weight).get(weight_id, self.resident)


def matches(patterns: tuple[str, ...], text: str) -> bool:
    """True if any fnmatch pattern matches the whole text."""
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def unfollowed(capability: Capability, declared: TensorQuant | None) -> Rejected | None:
    """What of a declared activation's rules for scales and rounding the capability does not follow.

    None where it follows all of them: also where nothing is declared, and where it executes another activation anyway.
    """
    if declared is None or capability.executes not in ("", activation_id(declared)):
        return None
    formats = (capability.scale_format,) if capability.scale_format else ()
    for rule, own, found in (
        ("scale rule", capability.scale_rules, declared.scale_rule),
        ("rounding", capability.roundings, declared.rounding),
        ("scale format", formats, declared.scale_format),
    ):
        if own and found and found not in own:
            return Rejected(rule, ", ".join(own), found)
    return None


#: Activations from most to least precise. Members of one inner tuple differ in granularity only.
ACTIVATION_ORDER: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("a16",), ("fp8-token", "fp8-g128", "mxfp8"), ("mxfp4", "nvfp4", "mxfp4-dual")),
    (("a16",), ("int8-token",), ("int4-token",)),
)


def unfit(capability: Capability, sizes: Mapping[str, int]) -> Rejected | None:
    """The first rule for one of these dimensions that its size breaks."""
    for rule in capability.shapes:
        if rule.dim in sizes and not rule.accepts(sizes[rule.dim]):
            return Rejected(rule.dim, rule.needed, str(sizes[rule.dim]))
    return None


def compare_activation(declared: str, executed: str) -> str:
    """How `executed` stands to `declared`: "same", "regrouped", "upgraded", "weight-only" or "changed".

    `a16` is above every activation. Anything that no chain of `ACTIVATION_ORDER` relates is "changed".
    """
    if declared == executed:
        return "same"
    if executed == "a16":
        return "weight-only"
    for chain in ACTIVATION_ORDER:
        rank: Mapping[str, int] = {name: i for i, braces in enumerate(chain) for name in braces}
        if declared in rank and executed in rank:
            if rank[declared] == rank[executed]:
                return "regrouped"
            if rank[executed] < rank[declared]:
                return "upgraded"
    return "changed"
