"""What metadata declares: values that a dialect's reader hands to the resolver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omniplat.formats.matching import Matcher
from omniplat.scheme import UNQUANTIZED, Scheme


@dataclass(frozen=True, slots=True)
class Declared:
    """A scheme as metadata declares it, and the conventions that headers alone cannot show.

    `packing`      name of the integer packing (`gptq`, `awq`, ...), "" where the tensors show it.
    `zero_offset`  added to a stored zero point (1 for GPTQ v1).
    `act_order`    columns are assigned to groups in an order of each module's own (GPTQ desc_act).
    `missing_ok`   canonical roles whose absence does not make the tensors incomplete.
    `derived`      canonical roles that are computed at run time where the file has none.
    `open_granularity`  the metadata does not say what shares a scale: the tensors do.
    `transformed`  inputs are transformed at run time by matrices that lie beside the weight.
    `unsupported`  why modules of this scheme can be read but not run, in words; "" where they can.
    """

    scheme: Scheme
    packing: str = ""
    zero_offset: int = 0
    act_order: bool = False
    missing_ok: frozenset[str] = frozenset()
    derived: frozenset[str] = frozenset()
    open_granularity: bool = False
    transformed: bool = False
    unsupported: str = ""

    @property
    def quantizes(self) -> bool:
        return not self.scheme.is_unquantized


NOT_QUANTIZED = Declared(UNQUANTIZED)

#: Readings of a rule, most trusted first. `producer`: as the tool that wrote it matches; `literal`: its text taken
#: as names bounded by dots; `consumer`: as the engine that loads it matches.
READINGS = ("producer", "literal", "consumer")


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a list in the metadata.

    `key`       its place and text, such as `ignore['re:.*gate$']`; what findings show.
    `kind`      the list it stands in ("ignore", "targets", "extra_config"): lists are checked for hits together.
    `literal`, `producer`, `consumer`   matchers of the three readings.
    `declared`  what it assigns to the modules that it matches.
    `rank`      lower ranks win (an exact name before a pattern before a class); within a rank, listed order.
    `must_hit`  False for entries that legitimately name nothing (class names, tool defaults).
    """

    key: str
    kind: str
    text: str
    literal: Matcher
    producer: Matcher
    consumer: Matcher
    declared: Declared
    rank: int = 0
    must_hit: bool = True

    def matcher(self, reading: str) -> Matcher:
        if reading == "literal":
            return self.literal
        return self.producer if reading == "producer" else self.consumer


def scope_entries(kind: str, entries: Iterable[tuple[str, Matcher]], declared: Declared) -> tuple[Rule, ...]:
    """Entries of the list `kind` of modules, or of what contains them, that have the default `declared`."""
    return tuple(Rule(f"{kind}[{text!r}]", kind, text, found, found, found, declared) for text, found in entries)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Modules that the metadata transforms in a way that nothing here can compute: `key` names the entry."""

    matcher: Matcher
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything that one component's metadata declares.

    `default`      what modules have that no rule names: a scheme, or `NOT_QUANTIZED` for a whitelist.
    `scope`        matches the modules that the default covers; None: all of them.
    `scope_entries`  the entries of the list that the scope is written as; they assign nothing of their own. Some may
                   name parts of the model that are not in this checkpoint, all of them may not.
    `speaks_of_all`  True when a 16-bit module inside the scope that no rule excludes contradicts the metadata;
                     False for dialects that leave out modules without listing them.
    `unlisted`     the modules that this producer leaves out without listing them (an output head), where it speaks
                   of all others.
    `refusals`     modules whose computation is more than their tensors, in ways that nothing here can run.
    `not_layers`   modules with a matrix that belong to such a computation and are no layers.
    `notes`        what the dialect leaves open and how it was read; each becomes a finding.
    """

    format: str
    file: str
    default: Declared
    rules: tuple[Rule, ...] = ()
    scope: Matcher | None = None
    scope_key: str = ""
    scope_entries: tuple[Rule, ...] = ()
    speaks_of_all: bool = True
    default_key: str = ""
    unlisted: Matcher | None = None
    refusals: tuple[Refusal, ...] = ()
    not_layers: Matcher | None = None
    notes: tuple[str, ...] = ()
