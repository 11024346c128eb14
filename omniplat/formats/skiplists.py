"""Lists of modules that are not converted, as transformers, its readers and AutoAWQ take them.

An entry is a name, part of a name or a regular expression, depending on who reads it:

    producer   transformers: re.match(entry, name), which is open at the end, or name.endswith(entry), which is open at
               the front
    literal    dotted segments in a row anywhere in the name; a pattern up to the end of a segment
    consumer   vLLM: the exact name, or the parts of an engine's fused name
"""

from __future__ import annotations

from collections.abc import Mapping

from omniplat.formats.base import expand_fused, literal_matcher
from omniplat.formats.declared import NOT_QUANTIZED, Rule
from omniplat.formats.matching import (
    AnyOf,
    Contains,
    EndsWith,
    Exact,
    Matcher,
    Pattern,
    Prefix,
    Segments,
    Suffix,
    bounded_regex,
    compile_regex,
    glob,
)
from omniplat.formats.metadata import Fields

_METACHARACTERS = frozenset("*+?^$()[]{}|\\")

PartsOf = Mapping[str, tuple[str, ...]]


def skip_rules(source: Fields, names: tuple[str, ...], parts_of: PartsOf) -> tuple[Rule, ...]:
    """Rules of the lists `names` of `source`, read as transformers reads them.

    Raises InvalidCheckpointError for a value that is no list of strings and for an entry that is neither a name,
    nor a regular expression, nor a glob.
    """
    return tuple(
        _transformers_rule(name, entry, position, source, parts_of)
        for name in names
        for position, entry in enumerate(source.strings(name))
    )


#: Output heads: of language models, DeepSeek's own name for it, and the one of multi-token prediction.
OUTPUT_HEADS: Matcher = AnyOf((Suffix("lm_head"), Suffix("shared_head.head"), Exact("head")))


def unlisted_head(rules: tuple[Rule, ...]) -> Matcher | None:
    """The output head, which transformers leaves out when it is given no list of modules to leave out."""
    return None if rules else OUTPUT_HEADS


def substring_rules(source: Fields, names: tuple[str, ...], parts_of: PartsOf) -> tuple[Rule, ...]:
    """The same for dialects whose writer and readers look for the entry anywhere in the name (AutoAWQ, HQQ)."""
    return tuple(_substring_rule(name, entry, parts_of) for name in names for entry in source.strings(name))


def segment_rules(source: Fields, names: tuple[str, ...], parts_of: PartsOf) -> tuple[Rule, ...]:
    """As `skip_rules` for dialects whose readers bound entries by dots wherever they stand (torchao, bitsandbytes)."""
    return tuple(
        Rule(rule.key, rule.kind, rule.text, rule.literal, rule.producer, rule.literal, rule.declared, rule.rank)
        for rule in skip_rules(source, names, parts_of)
    )


def named(entry: str, parts_of: PartsOf) -> Matcher:
    """The literal reading of a name: itself and what is below it, under any prefix, or the parts of a fused name."""
    text = entry.strip(".").removesuffix(".weight")
    return AnyOf((literal_matcher(text, parts_of), *(Segments(name) for name in expand_fused(text, parts_of))))


def is_pattern(entry: str) -> bool:
    """True where the text holds a metacharacter beyond the dot of a path."""
    return any(char in _METACHARACTERS for char in entry)


def _transformers_rule(name: str, entry: str, position: int, source: Fields, parts_of: PartsOf) -> Rule:
    key = f"{name}[{entry!r}]"
    where = source.path(f"{name}[{position}]")
    if entry.startswith("re:"):
        text = entry.removeprefix("re:")
        matched: Matcher = Pattern(compile_regex(text, file=source.file, key=where, entry=entry))
        bounded: Matcher = bounded_regex(text, file=source.file, key=where)
        return Rule(key, name, text, bounded, matched, matched, NOT_QUANTIZED, -1)
    if not is_pattern(entry):
        text = entry.removesuffix(".weight")
        producer = AnyOf((Prefix(text), EndsWith(text)))
        exact = AnyOf(tuple(Exact(part) for part in expand_fused(text, parts_of)))
        return Rule(key, name, entry, named(entry, parts_of), producer, exact, NOT_QUANTIZED, -1)
    if entry.startswith(("*", "?")):
        whole = AnyOf((glob(entry), glob(f"{entry}.*")))
        return Rule(key, name, entry, whole, whole, glob(entry), NOT_QUANTIZED, -1)
    matched = Pattern(compile_regex(entry, file=source.file, key=where))
    bounded = bounded_regex(entry, file=source.file, key=where)
    return Rule(key, name, entry, bounded, matched, Exact(entry), NOT_QUANTIZED, -1)


def _substring_rule(name: str, entry: str, parts_of: PartsOf) -> Rule:
    contains = Contains(entry)
    return Rule(f"{name}[{entry!r}]", name, entry, named(entry, parts_of), contains, contains, NOT_QUANTIZED, -1)
