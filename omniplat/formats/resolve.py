"""Resolving one component: rules in the checkpoint's own names, headers as the arbiter, findings for the rest.

For every module each reading of the rules gives a declaration. The first reading whose declaration agrees with
what the headers show is taken. Where readings differ, or none agrees, a finding says so; nothing is guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omniplat.checkpoint.folder import MAX_METADATA_TENSOR_BYTES, Component
from omniplat.checkpoint.modules import WEIGHT_LEAVES, Module, group_modules
from omniplat.errors import UnsupportedOptionError
from omniplat.findings import Finding, finding
from omniplat.formats.agreement import agrees, differs_in_granularity, hint_from_headers, settled, stored_id
from omniplat.formats.aliases import Aliases
from omniplat.formats.declared import NOT_QUANTIZED, READINGS, Declaration, Declared, Refusal, Rule
from omniplat.formats.detect import Read, unusable
from omniplat.formats.idle import idle_findings
from omniplat.formats.matching import ModuleIndex
from omniplat.formats.notes import Notes
from omniplat.formats.recognise import CODE_SCALES, QUANT_LEAVES, SHAPE_LEAF, Stored, recognise, small_values
from omniplat.formats.resolved import DecidedBy, ResolvedModule
from omniplat.formats.rule_hits import RuleHits
from omniplat.formats.stated import STATED_SHAPES, stated_shapes
from omniplat.models.family import has_suffix
from omniplat.models.names import is_embedding, is_norm, keeps_float
from omniplat.scheme import UNQUANTIZED, Scheme, TensorQuant


@dataclass(frozen=True, slots=True)
class Resolution:
    """Every module of a component that has a matrix, and what was found on the way."""

    component: Component
    format: str
    modules: tuple[ResolvedModule, ...]
    findings: tuple[Finding, ...]
    index: ModuleIndex


@dataclass(slots=True)
class _Choice:
    """The declaration taken for one module, under which reading, and how the headers look in its light."""

    declared: Declared
    rule: Rule | None
    reading: str
    stored: Stored
    agrees: bool


def resolve_component(component: Component, read: Read, floats: tuple[str, ...] = ()) -> Resolution:
    """Resolve every module of `component`; `read` is its metadata.

    `floats` are the dotted suffixes of modules that this model's family keeps in 16 bit without listing them.
    """
    modules = group_modules(component.tensors.values())
    index = ModuleIndex(modules)
    try:
        resolver = _Resolver(component, read, modules, index, floats)
    except UnsupportedOptionError as exc:
        read = unusable(read, exc, component)
        resolver = _Resolver(component, read, modules, index, floats)
    resolved = [item for module in modules.values() if (item := resolver.resolve(module)) is not None]
    findings = (*read.findings, *_absent_tensors(component), *resolver.findings())
    return Resolution(component, read.format, tuple(sorted(resolved, key=lambda m: m.name)), findings, index)


def _absent_tensors(component: Component) -> list[Finding]:
    by_index: dict[str, list[str]] = defaultdict(list)
    for index, tensor, _ in component.index_absent:
        by_index[index].append(tensor)
    return [
        finding(
            "index-names-absent-tensor",
            f"{index} lists {len(names)} tensor(s) that their shards do not contain, such as {min(names)}",
            component=component.name,
            file=index,
            modules={name.rpartition(".")[0] or name for name in names},
        )
        for index, names in by_index.items()
    ]


class _Resolver:
    """State of one component's resolution: rule hits by reading, recognised signatures, collected notes."""

    def __init__(
        self,
        component: Component,
        read: Read,
        modules: Mapping[str, Module],
        index: ModuleIndex,
        floats: tuple[str, ...],
    ) -> None:
        self._component = component
        self._modules = modules
        self._floats = floats
        self._declaration = read.declaration
        # Without a declaration these say why what there is cannot be used.
        self._has_metadata = bool(read.findings)
        self._index = index
        self._rule_hits = RuleHits(index, Aliases(index, read.parts_of), self._stored_as)
        self._notes = Notes()
        self._looks: dict[object, int] = {}
        self._kinds: dict[str, int] = {}
        self._recognised: dict[tuple[int, Declared | None], Stored | None] = {}
        # Rules hold their Declared for as long as the resolver lives, so an id names one.
        self._agreeing: dict[tuple[int, tuple[int, ...]], tuple[Stored | None, ...]] = {}
        self._hits: dict[str, dict[str, frozenset[str]]] = {}
        self._confirmed: dict[str, bool] = {}
        self._quantizing: dict[str, list[Rule]] | None = None
        self._assigned: dict[str, dict[str, Rule]] = {reading: {} for reading in READINGS}
        self._scope: frozenset[str] | None = None
        self._unlisted: frozenset[str] = frozenset()
        self._rules: dict[str, Rule] = {}
        self._refused: dict[str, Refusal] = {}
        self._no_layers: frozenset[str] = frozenset()
        if read.declaration is not None:
            self._assign(read.declaration)

    def _assign(self, declaration: Declaration) -> None:
        for rule in sorted(declaration.rules, key=lambda item: item.rank):
            self._rules.setdefault(rule.key, rule)
            hits = self._rule_hits.of(rule, declaration.file)
            self._hits.setdefault(rule.key, hits)
            for reading, names in hits.items():
                assigned = self._assigned[reading]
                for name in names:
                    assigned.setdefault(name, rule)
        for refusal in declaration.refusals:
            for name in refusal.matcher.hits(self._index):
                self._refused.setdefault(name, refusal)
        if declaration.not_layers is not None:
            self._no_layers = frozenset(declaration.not_layers.hits(self._index))
        self._scope = self._rule_hits.of_scope(declaration)
        for written, respelled in self._rule_hits.respelled.items():
            fix = "write the entries in the checkpoint's own names"
            for name in respelled:
                self._notes.add(name, "rule-readings-differ", file=declaration.file, rule=written, fix=fix)
        if declaration.unlisted is not None:
            self._unlisted = frozenset(declaration.unlisted.hits(self._index))

    def _stored_as(self, name: str, declared: Declared) -> bool:
        return self._agreed(self._modules[name], declared) is not None

    def resolve(self, module: Module) -> ResolvedModule | None:
        """The resolved module; None where it has no matrix (norms, convolutions, tables)."""
        first = self._recognise(module, None)
        if first is None:
            self._note_orphans(module)
            return None
        by_nature = is_embedding(module.name) or is_norm(module.name) or module.name in self._no_layers
        if not first.quantized and by_nature and not first.unexplained:
            return None
        declaration = self._declaration
        if declaration is None:
            return self._from_headers(module, first)
        choice = self._choose(module, declaration)
        problems = self._note_state(module, choice)
        return self._build(module, choice, problems)

    # -- choosing a reading -------------------------------------------------------------------------

    def _kind(self, module: Module) -> int:
        """A number that modules share which no header and no small metadata tensor tells apart."""
        kind = self._kinds.get(module.name)
        if kind is None:
            look = (module.signature, self._small_values(module))
            kind = self._kinds[module.name] = self._looks.setdefault(look, len(self._looks))
        return kind

    def _recognise(self, module: Module, hint: Declared | None) -> Stored | None:
        key = (self._kind(module), hint)
        if key not in self._recognised:
            self._recognised[key] = recognise(module.leaves, hint, dict(self._small_values(module)))
        return self._recognised[key]

    def _small_values(self, module: Module) -> tuple[tuple[str, bytes], ...]:
        """What recognition needs beyond headers: the bytes of small tensors, and shapes that are stated elsewhere."""
        small = small_values(module.leaves, self._component.read_small)
        shapes = stated_shapes(self._component, module)
        return (*small, (STATED_SHAPES, shapes)) if shapes else small

    def _recognise_with_shape(self, module: Module, hint: Declared | None) -> Stored | None:
        """Once more with the true shape that the module states, where headers alone led to a contradiction."""
        shape = module.leaves.get(SHAPE_LEAF)
        if shape is None or shape.nbytes > MAX_METADATA_TENSOR_BYTES:
            return self._recognise(module, hint)
        small = dict(self._small_values(module))
        return recognise(module.leaves, hint, small | {SHAPE_LEAF: self._component.read_small(shape)})

    def _declared_for(self, name: str, reading: str, declaration: Declaration) -> tuple[Declared, Rule | None]:
        rule = self._assigned[reading].get(name)
        if rule is not None:
            return rule.declared, rule
        if self._scope is not None and name not in self._scope:
            return NOT_QUANTIZED, None
        return declaration.default, None

    def _choose(self, module: Module, declaration: Declaration) -> _Choice:
        options = [self._declared_for(module.name, reading, declaration) for reading in READINGS]
        key = (self._kind(module), tuple(id(declared) for declared, _ in options))
        if key not in self._agreeing:
            self._agreeing[key] = tuple(self._agreed(module, declared) for declared, _ in options)
        agreed = self._agreeing[key]
        position = next((i for i, stored in enumerate(agreed) if stored is not None), None)
        if position is None:
            return self._contradicted(module, options)
        declared, rule = options[position]
        stored = agreed[position]
        assert stored is not None
        choice = _Choice(settled(declared, stored), rule, READINGS[position], stored, True)
        for (_, other), agreement in zip(options, agreed, strict=True):
            if agreement is None:
                self._note_reading(module.name, other, choice)
        if None not in agreed and all(other is rule for _, other in options):
            choice.reading = ""
        return choice

    def _agreed(self, module: Module, declared: Declared) -> Stored | None:
        """The module as its headers show it in the light of `declared`; None where they show something else."""
        stored = self._recognise(module, declared)
        return stored if stored is not None and agrees(declared, stored) else None

    def _contradicted(self, module: Module, options: Sequence[tuple[Declared, Rule | None]]) -> _Choice:
        """No reading agrees with the headers. Another rule that names the module may; else the producer's is kept,
        and the tensors are looked at with the best hint."""
        for rule in self._rules_that_quantize(module.name):
            agreed = self._agreed(module, rule.declared)
            if agreed is not None:
                choice = _Choice(settled(rule.declared, agreed), rule, READINGS[-1], agreed, True)
                self._note_reading(module.name, options[0][1], choice)
                return choice
        declared, rule_of_producer = options[0]
        default = self._declaration.default if self._declaration is not None else NOT_QUANTIZED
        if rule_of_producer is not None and default.quantizes and self._is_confirmed(rule_of_producer):
            # The rule is meant for others: this module is what it would be without it.
            agreed = self._agreed(module, default)
            if agreed is not None and agreed.complete:
                self._note_overreach(module.name, rule_of_producer)
                return _Choice(settled(default, agreed), None, READINGS[0], agreed, True)
        hints = [option for option, _ in options if option.quantizes]
        stored = self._as_hinted(module, next(iter(hints), default if default.quantizes else None))
        return _Choice(declared, rule_of_producer, READINGS[0], stored, agrees(declared, stored))

    def _as_hinted(self, module: Module, hint: Declared | None) -> Stored:
        """The module in the light of a declaration. Where that is about another weight, so is its activation, and the
        scales of that are not missing."""
        stored = self._recognise_with_shape(module, hint)
        assert stored is not None  # a module that has a matrix has one under every hint
        if hint is None or stored.complete or agrees(hint, stored):
            return stored
        bare = self._recognise_with_shape(module, replace(hint, scheme=hint.scheme.with_activation(None)))
        return bare if bare is not None and bare.complete else stored

    def _is_confirmed(self, rule: Rule) -> bool:
        """True where some module that the rule names is what the rule says."""
        if rule.key not in self._confirmed:
            named = (self._modules[name] for name in sorted(self._hits[rule.key][READINGS[0]]))
            self._confirmed[rule.key] = any(self._agreed(module, rule.declared) is not None for module in named)
        return self._confirmed[rule.key]

    def _rules_that_quantize(self, name: str) -> Sequence[Rule]:
        """The rules that name a module under some reading and quantize it. Turned round once, when a module first asks:
        a list of exclusions is not gone through again for every module that contradicts something."""
        if self._quantizing is None:
            self._quantizing = defaultdict(list)
            for rule in self._rules.values():
                if rule.declared.quantizes:
                    for named in frozenset().union(*self._hits[rule.key].values()):
                        self._quantizing[named].append(rule)
        return self._quantizing.get(name, ())

    def _note_overreach(self, name: str, rule: Rule) -> None:
        fix = "end the entry where the module's name ends"
        self._notes.add(name, "rule-overreach", file=self._file, rule=rule.key, fix=fix)

    def _note_reading(self, name: str, rule: Rule | None, choice: _Choice) -> None:
        """One reading disagrees with the headers where another agrees: too wide, or not understood."""
        if rule is not None and rule is not choice.rule and name not in self._hits[rule.key]["literal"]:
            self._note_overreach(name, rule)
            return
        blamed = choice.rule or rule
        if blamed is not None:
            fix = _unambiguous(blamed)
            self._notes.add(name, "rule-readings-differ", file=self._file, rule=blamed.key, fix=fix)

    # -- what is wrong with one module --------------------------------------------------------------

    def _note_state(self, module: Module, choice: _Choice) -> tuple[str, ...]:
        stored, name = choice.stored, module.name
        problems: list[str] = []
        if stored.quantized and stored.missing:
            leaves = ", ".join(stored.missing)
            self._notes.add(name, "missing-tensor", detail=leaves)
            problems.append(f"missing {leaves}")
        if stored.group_problem:
            self._notes.add(name, "group-not-divisible", detail=stored.group_problem)
            problems.append(stored.group_problem)
        if stored.problem:
            self._note_contradiction("error", stored.problem, name, choice)
            problems.append(stored.problem)
        elif not choice.agrees and not stored.missing:
            self._contradiction(name, choice)
        if stored.unexplained:
            self._notes.add(name, "unexpected-tensor", detail=", ".join(stored.unexplained))
        if not problems and (reason := self._unsupported(name, choice)):
            refusal = self._refused.get(name)
            place = self._place(name, choice)
            rule = refusal.key if refusal is not None else place.rule
            self._notes.add(name, "unsupported-option", file=place.file, rule=rule, detail=reason)
            problems.append(reason)
        return tuple(problems)

    def _contradiction(self, name: str, choice: _Choice) -> None:
        declared, stored = choice.declared, choice.stored
        if not stored.quantized:
            if self._is_left_out(name, choice):
                return
            message = f"declared {declared.scheme.id}, stored in 16 or 32 bit: unquantized"
        elif not declared.quantizes:
            message = f"declared unquantized, stored {stored_id(stored)}: quantized"
        else:
            message = f"declared {declared.scheme.weight_id}, stored {stored_id(stored)}: the tensors decide"
        self._note_contradiction("warning", message, name, choice)

    def _note_contradiction(self, severity: str, message: str, name: str, choice: _Choice) -> None:
        place = self._place(name, choice)
        self._notes.add(
            name, "tensors-contradict-config", severity=severity, file=place.file, rule=place.rule, detail=message
        )

    def _place(self, name: str, choice: _Choice) -> DecidedBy:
        declaration = self._declaration
        if declaration is None:
            return DecidedBy("", "headers")
        if choice.rule is not None:
            return DecidedBy(declaration.file, choice.rule.key, choice.reading)
        if self._scope is not None and name not in self._scope:
            return DecidedBy(declaration.file, f"outside {declaration.scope_key}", choice.reading)
        return DecidedBy(declaration.file, declaration.default_key or "default", choice.reading)

    def _note_orphans(self, module: Module) -> None:
        orphans = tuple(leaf for leaf in module.leaves if leaf in QUANT_LEAVES)
        if not CODE_SCALES.isdisjoint(orphans) and WEIGHT_LEAVES.isdisjoint(module.leaves):
            self._notes.add(module.name, "missing-tensor", detail="weight")
        elif orphans:
            self._notes.add(module.name, "unexpected-tensor", detail=", ".join(orphans))

    # -- results ------------------------------------------------------------------------------------

    def _from_headers(self, module: Module, stored: Stored) -> ResolvedModule:
        hint = hint_from_headers(module, stored)
        if SHAPE_LEAF in module.leaves:
            # nothing else says how wide the codes are
            stored = self._recognise_with_shape(module, None) or stored
            hint = hint_from_headers(module, stored)
        # a hint that only repeats what was seen is no metadata: it must not settle what headers leave open
        if hint is not None and not stored.unsupported:
            stored = self._recognise(module, hint) or stored
        choice = _Choice(hint or NOT_QUANTIZED, None, "", stored, True)
        problems = self._note_state(module, choice)
        if stored.quantized and stored.weight is not None:
            metadata = "no usable metadata" if self._has_metadata else "no metadata"
            detail = f"{metadata}; the tensors show {stored_id(stored)}"
            self._notes.add(module.name, "inferred-from-headers", detail=detail)
        return self._build(module, choice, problems)

    def _build(self, module: Module, choice: _Choice, problems: tuple[str, ...]) -> ResolvedModule:
        stored = choice.stored
        if not stored.quantized:
            status, scheme = "unquantized", UNQUANTIZED
        else:
            status = "ok" if stored.complete else "invalid"
            weight = stored.weight or choice.declared.scheme.weight
            scheme = Scheme(weight, self._activation(choice), stored.pre_scale, stored.transform)
        if status != "invalid" and self._unsupported(module.name, choice):
            status = "unsupported"
        codes = module.leaves[stored.leaves["codes"]] if "codes" in stored.leaves else None
        return ResolvedModule(
            module.name,
            self._component.name,
            self._declared_scheme(module.name, choice),
            scheme,
            stored.storage,
            stored.out_features,
            stored.in_features,
            {role: module.leaves[leaf] for role, leaf in stored.leaves.items()},
            self._place(module.name, choice),
            status,
            stored.experts,
            codes.dtype if codes is not None else "",
            problems,
            recognised=stored.weight is not None,
        )

    def _declared_scheme(self, name: str, choice: _Choice) -> Scheme | None:
        if self._declaration is None:
            return None
        return UNQUANTIZED if self._is_left_out(name, choice) else choice.declared.scheme

    def _is_left_out(self, name: str, choice: _Choice) -> bool:
        """A 16-bit module that the dialect, or the module's nature, excludes without listing it."""
        if choice.stored.quantized or choice.rule is not None or self._declaration is None:
            return False
        by_nature = keeps_float(name) or has_suffix(name, self._floats)
        return by_nature or name in self._unlisted or not self._declaration.speaks_of_all

    def _unsupported(self, name: str, choice: _Choice) -> str:
        """Why a module that is otherwise in order cannot be run; "" where it can."""
        if name in self._refused:
            return self._refused[name].reason
        if not choice.stored.quantized:
            return ""
        return choice.stored.unsupported or choice.declared.unsupported

    def _activation(self, choice: _Choice) -> TensorQuant | None:
        """Declared activation; for a weight that contradicts its rule, the default's if that weight is the same.

        The activation of a rule whose weight is another says nothing about this weight: it stays unquantized. A weight
        whose scales only cover more or less than declared is no other weight.
        """
        if choice.declared.quantizes and (choice.agrees or not choice.stored.complete):
            return choice.declared.scheme.activation
        if choice.declared.quantizes and differs_in_granularity(choice.declared, choice.stored):
            return choice.declared.scheme.activation
        default = self._declaration.default if self._declaration is not None else NOT_QUANTIZED
        same = default.quantizes and choice.stored.weight is not None and agrees(default, choice.stored)
        return default.scheme.activation if same else None

    def findings(self) -> list[Finding]:
        idle = {key for key, hits in self._hits.items() if not any(hits.values())}
        found = self._notes.findings(self._component.name)
        for text in self._declaration.notes if self._declaration is not None else ():
            found.append(
                finding("known-quirk", text, severity="warning", component=self._component.name, file=self._file)
            )
        rules = list(self._rules.values())
        if self._declaration is not None and self._scope is not None and not self._scope:
            rules += self._declaration.scope_entries
            idle |= {entry.key for entry in self._declaration.scope_entries}
        return found + idle_findings(self._component, self._file, rules, idle, self._index)

    @property
    def _file(self) -> str:
        return self._declaration.file if self._declaration is not None else ""


def _unambiguous(rule: Rule) -> str:
    if rule.kind != "extra_config":
        return "write the modules' full names"
    path = rule.text.strip(".").replace(".", r"\.")
    return rf"use the key '.*{path}'" if not rule.text.startswith(".*") else "write the modules' full names"
