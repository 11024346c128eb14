"""Which dialect a component's metadata is written in, and what other metadata files say about the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omniplat.checkpoint.folder import Component
from omniplat.checkpoint.modules import WEIGHT_LEAVES, group_modules
from omniplat.checkpoint.tensors import FLOAT_DTYPES
from omniplat.errors import IncompleteMetadataError, InvalidCheckpointError, UnsupportedOptionError
from omniplat.findings import Finding, finding
from omniplat.formats.base import Format
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared
from omniplat.formats.kv_cache import kv_cache_findings
from omniplat.formats.markers import header_sources, marker_sources, part_of_component
from omniplat.formats.matching import ModuleIndex
from omniplat.formats.metadata import Fields, metadata_sources

#: Keys of metadata of no known kind that a finding lists.
MAX_KEYS = 12
#: Keys that say whose the metadata is, and nothing of any module.
_NAMING = frozenset({"quant_method", "method", "quant_library", "producer", "provider", "version"})

_Claimed = list[tuple[Fields, Format]]


@dataclass(frozen=True, slots=True)
class Read:
    """Metadata of one component: `declaration` is None where there is none, or where it cannot be used.

    `parts_of` maps an engine's names to checkpoint names, as the declaration's reader was given it.
    """

    declaration: Declaration | None
    format: str
    findings: tuple[Finding, ...]
    parts_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_metadata(component: Component, formats: Sequence[Format], parts_of: Mapping[str, tuple[str, ...]]) -> Read:
    """Find, claim and read a component's metadata. Nothing here raises: what cannot be read is a finding."""
    try:
        found = [*header_sources(component), *metadata_sources(component), *marker_sources(component)]
        sources = [part for source in found if (part := part_of_component(source, component.name)).values]
    except InvalidCheckpointError as exc:
        return Read(None, "", (_unreadable(exc, component),))
    claimed: _Claimed = []
    unclaimed: list[Fields] = []
    quirks: list[Finding] = []
    for source in sources:
        for spelled in _spellings(source):
            owner = next((item for item in formats if item.claims(spelled)), None)
            if owner is not None:
                claimed.append((spelled, owner))
                quirks += [_respelled(source, spelled, component)] if spelled is not source else []
                break
        else:
            unclaimed.append(source)
    if not claimed:
        return Read(None, "", tuple(_unknown(source, component, formats) for source in unclaimed))
    claimed = _with_content(claimed)
    while True:
        (source, owner), *others = claimed
        try:
            declaration = owner.read(source, parts_of)
            break
        except IncompleteMetadataError as exc:
            claimed = [other for other in others if other[1] is owner]
            if not claimed:
                return Read(None, owner.name, (_unreadable(exc, component),))
            quirks.append(_incomplete(exc, claimed[0][0], component))
        except InvalidCheckpointError as exc:
            return Read(None, owner.name, (_unreadable(exc, component),))
    findings = [_unknown(other, component, formats) for other in unclaimed if "quant_method" in other.values]
    findings += quirks
    findings += kv_cache_findings(source, component)
    for other, other_owner in others:
        conflict = _conflict(declaration, other, other_owner, component, parts_of)
        if conflict is not None:
            findings.append(conflict)
    return Read(declaration, owner.name, tuple(findings), parts_of)


def _with_content(claimed: _Claimed) -> _Claimed:
    """`claimed` without sources that name a method and leave the rest to another file of the same dialect."""
    told = [owner for source, owner in claimed if not _only_names(source)]
    return [(source, owner) for source, owner in claimed if owner not in told or not _only_names(source)]


def _only_names(source: Fields) -> bool:
    return all(key in _NAMING or value is None for key, value in source.values.items())


def unusable(read: Read, exc: UnsupportedOptionError, component: Component) -> Read:
    """`read` without its declaration, which turned out to ask for what cannot be honoured."""
    return replace(read, declaration=None, findings=(*read.findings, _unreadable(exc, component)))


def _unreadable(exc: InvalidCheckpointError, component: Component) -> Finding:
    code = "unsupported-option" if isinstance(exc, UnsupportedOptionError) else "metadata-unreadable"
    return finding(code, exc.message, component=component.name, file=exc.file, rule=exc.key)


def _spellings(source: Fields) -> Iterator[Fields]:
    """`source`, then with its method in lower case and with the other of `-` and `_`."""
    yield source
    method = source.values.get("quant_method")
    if isinstance(method, str):
        lower = method.lower()
        for spelled in dict.fromkeys((lower, lower.replace("_", "-"), lower.replace("-", "_"))):
            if spelled != method:
                yield replace(source, values={**source.values, "quant_method": spelled})


def _respelled(source: Fields, spelled: Fields, component: Component) -> Finding:
    return finding(
        "known-quirk",
        f"quant_method {source.values['quant_method']!r:.80} is read as {spelled.values['quant_method']!r:.80}",
        component=component.name,
        file=source.file,
        rule=source.path("quant_method"),
    )


def _unknown(source: Fields, component: Component, formats: Sequence[Format]) -> Finding:
    method = source.values.get("quant_method")
    known = ", ".join(sorted(item.name for item in formats))
    if method in known.split(", "):
        named = f"method {method!r} is not read from here"
    elif method is not None:
        named = f"unknown method {method!r:.80}"
    else:
        keys = sorted(source.values)
        more = ", ..." if len(keys) > MAX_KEYS else ""
        named = f"unrecognised {source.key or 'metadata'} keys [{', '.join(keys[:MAX_KEYS])}{more}]"
    return finding(
        "unknown-format",
        f"{source.file}: {named}; known: {known}",
        component=component.name,
        file=source.file,
        rule=source.path("quant_method"),
    )


def _incomplete(exc: IncompleteMetadataError, used: Fields, component: Component) -> Finding:
    return finding(
        "metadata-conflict",
        f"{exc.file}: {exc.problem}; {used.file} was used",
        component=component.name,
        file=exc.file,
        rule=exc.key,
        fix=f"make {exc.file} agree with {used.file}, or remove it",
    )


def _conflict(
    used: Declaration, other: Fields, owner: Format, component: Component, parts_of: Mapping[str, tuple[str, ...]]
) -> Finding | None:
    """A finding when a second metadata file declares something else than the one that is used."""
    try:
        difference = _difference(used, owner.read(other, parts_of), component)
    except InvalidCheckpointError as exc:
        difference = f"cannot be used ({exc.problem})"
    if not difference:
        return None
    return finding(
        "metadata-conflict",
        f"{other.file} {difference}; {used.file} was used",
        component=component.name,
        file=other.file,
        fix=f"make {other.file} agree with {used.file}, or remove it",
    )


def _difference(used: Declaration, other: Declaration, component: Component) -> str:
    if used.format != other.format:
        # Converters leave their source's file beside their own: two dialects may say the same thing.
        if not _same_schemes(used, other, component):
            return f"is written for {other.format}, {used.file} for {used.format}"
        return ""
    if used.default.scheme.id != other.default.scheme.id:
        return f"declares {other.default.scheme.id}, {used.file} declares {used.default.scheme.id}"
    mine = {(rule.kind, rule.text): rule.declared.scheme.id for rule in used.rules}
    theirs = {(rule.kind, rule.text): rule.declared.scheme.id for rule in other.rules}
    if mine != theirs:
        names = sorted(text for _, text in set(mine.items()) ^ set(theirs.items()) for _, text in [_])
        return f"lists other modules ({', '.join(dict.fromkeys(names[:3]))}{', ...' if len(names) > 3 else ''})"
    return ""


def _same_schemes(used: Declaration, other: Declaration, component: Component) -> bool:
    """True where both declare the same for every module that is stored quantized, and there is one."""
    modules = group_modules(component.tensors.values())
    index = ModuleIndex(modules)
    mine, theirs = _declared_by(used, index), _declared_by(other, index)
    quantized = [
        name
        for name, module in modules.items()
        if any(leaf in WEIGHT_LEAVES and info.dtype not in FLOAT_DTYPES for leaf, info in module.leaves.items())
    ]
    return bool(quantized) and all(_same(mine(name), theirs(name)) for name in quantized)


def _declared_by(declaration: Declaration, index: ModuleIndex) -> Callable[[str], Declared]:
    """What a declaration says of a module, as its producer reads it."""
    assigned: dict[str, Declared] = {}
    for rule in sorted(declaration.rules, key=lambda item: item.rank):
        for name in rule.producer.hits(index):
            assigned.setdefault(name, rule.declared)
    scope = frozenset(declaration.scope.hits(index)) if declaration.scope is not None else None

    def declared(name: str) -> Declared:
        outside = scope is not None and name not in scope
        return assigned.get(name, NOT_QUANTIZED if outside else declaration.default)

    return declared


def _same(first: Declared, second: Declared) -> bool:
    mine, theirs = first.scheme, second.scheme
    if mine.activation_id != theirs.activation_id:
        return False
    if first.open_granularity or second.open_granularity:
        return mine.weight.element == theirs.weight.element
    return mine.weight_id == theirs.weight_id
