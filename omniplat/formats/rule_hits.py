"""Which modules a rule names: in the checkpoint's own names, else in those that the modules have elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.aliases import Aliases
from omniplat.formats.declared import READINGS, Declaration, Declared, Rule
from omniplat.formats.matching import Matcher, ModuleIndex

#: Modules by reading.
Hits = dict[str, frozenset[str]]


class RuleHits:
    """Asks rules for their modules.

    A rule that names nothing in the checkpoint's names is asked once more in engines' names, then in other spellings
    (`aliases.py`). There it names only what `agrees` says is stored as the rule declares: another name is a guess at
    what was meant, and the tensors confirm it or there is none. `respelled` collects, by the rule's list, modules of
    rules in other spellings, and of rules in an engine's names that leave out modules of which others are quantized.
    """

    def __init__(self, index: ModuleIndex, aliases: Aliases, agrees: Callable[[str, Declared], bool]) -> None:
        self._index = index
        self._aliases = aliases
        self._agrees = agrees
        self.respelled: dict[str, set[str]] = defaultdict(set)

    def of(self, rule: Rule, file: str) -> Hits:
        """The modules that a rule names under each reading; a matcher that several readings share is asked once.

        Raises UnsupportedOptionError, naming `file` and rule, for an expression that could take unboundedly long.
        """
        matchers = {id(matcher): matcher for matcher in map(rule.matcher, READINGS)}
        try:
            found = {key: frozenset(matcher.hits(self._index)) for key, matcher in matchers.items()}
            if rule.must_hit and not any(found.values()):
                found = self._elsewhere(rule, matchers)
        except UnsupportedOptionError as exc:
            raise UnsupportedOptionError(exc.problem, file=file, key=rule.key) from exc
        return {reading: found[id(rule.matcher(reading))] for reading in READINGS}

    def _elsewhere(self, rule: Rule, matchers: dict[int, Matcher]) -> dict[int, frozenset[str]]:
        def confirmed(hits: dict[int, list[str]]) -> dict[int, frozenset[str]]:
            return {
                key: frozenset(name for name in names if self._agrees(name, rule.declared))
                for key, names in hits.items()
            }

        engine = {key: list(self._aliases.engine.hits(matcher)) for key, matcher in matchers.items()}
        found = confirmed(engine)
        if any(found.values()):
            named = {name for names in engine.values() for name in names}
            if not rule.declared.quantizes and named != set().union(*found.values()):
                self.respelled[rule.kind] |= named
            return found
        found = confirmed({key: list(self._aliases.spelled.hits(matcher)) for key, matcher in matchers.items()})
        if any(found.values()):
            self.respelled[rule.kind].update(*found.values())
        return found

    def of_scope(self, declaration: Declaration) -> frozenset[str] | None:
        """The modules that the default covers, likewise; None for all. The tensors decide on each of them later."""
        if declaration.scope is None:
            return None
        if not declaration.scope_entries:
            return frozenset(declaration.scope.hits(self._index))
        found: set[str] = set()
        for entry in declaration.scope_entries:
            own = entry.producer.hits(self._index)
            other = [] if own else self._aliases.spelled.hits(entry.producer)
            if other:
                self.respelled[declaration.scope_key].update(other)
            found.update(own, other)
        return frozenset(found)
