"""Entries of the metadata's lists that name no module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from omniplat.checkpoint.folder import Component
from omniplat.findings import Finding, finding
from omniplat.formats.declared import Rule
from omniplat.formats.matching import ModuleIndex

#: Entries of one list that are reported one by one; the rest are counted.
MAX_IDLE_RULES = 5


def idle_findings(
    component: Component, file: str, rules: Iterable[Rule], idle: Collection[str], index: ModuleIndex
) -> list[Finding]:
    """Findings for the rules whose keys are in `idle`; errors where a whole list matches nothing."""
    by_list: dict[str, list[Rule]] = defaultdict(list)
    for rule in rules:
        if rule.must_hit:
            by_list[rule.kind].append(rule)
    found: list[Finding] = []

    def report(message: str, severity: str, rule: str, fix: str = "") -> None:
        found.append(
            finding(
                "rule-matches-nothing",
                message,
                severity=severity,
                component=component.name,
                file=file,
                rule=rule,
                fix=fix,
            )
        )

    for kind, listed in by_list.items():
        unmatched = [rule for rule in listed if rule.key in idle]
        reported = [rule for rule in unmatched if not _is_tied_head(rule, component)]
        severity = "error" if reported and len(unmatched) == len(listed) else "warning"
        for rule in reported[:MAX_IDLE_RULES]:
            message = f"{rule.key} matches no module of this checkpoint under any reading"
            report(message, severity, rule.key, _nearest(rule, index))
        if len(reported) > MAX_IDLE_RULES:
            others = len(reported) - MAX_IDLE_RULES
            message = f"{others} more of {len(listed)} entries match no module, such as {reported[-1].key}"
            report(message, severity, kind)
    return found


def _is_tied_head(rule: Rule, component: Component) -> bool:
    """lm_head needs no tensor of its own when the embedding is tied."""
    if rule.text.rpartition(".")[2].removesuffix("$") != "lm_head":
        return False
    text = component.config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return component.config.get("tie_word_embeddings", nested) is not False


def _nearest(rule: Rule, index: ModuleIndex) -> str:
    """A module that shares the longest dotted suffix with a literal entry, as a suggestion."""
    parts = rule.text.split(".")
    for start in range(1, len(parts)):
        near = index.paths_ending_with("." + ".".join(parts[start:]))
        if near:
            return f"did it mean {min(near)}?"
    return "remove it, or write it in the checkpoint's own names"
