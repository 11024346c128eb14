"""torchao checkpoints: one configuration object, or one for each module name, and modules that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule
from omniplat.formats.matching import Exact, Matcher, Pattern, compile_regex
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import OUTPUT_HEADS, named, segment_rules
from omniplat.formats.torchao_config import declared_by, declared_by_name

#: Configurations that hold one configuration for each module, and the keys under which they hold them.
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_MAPS = ("fqn_to_config", "module_fqn_to_config")
_DEFAULT = "_default"


@dataclass(frozen=True, slots=True)
class TorchAoFormat:
    name: str = "torchao"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return "quant_type" in source.values
        return bool(method == "torchao")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        rules = segment_rules(source, ("modules_to_not_convert",), parts_of)
        kind = source.values.get("quant_type")
        if isinstance(kind, str):
            arguments = source.child("quant_type_kwargs") or Fields(source.file, source.path("quant_type_kwargs"), {})
            declared = declared_by_name(kind, arguments, source)
            return self._declaration(source, declared, rules, f"quant_type={kind}")
        config = source.child("quant_type")
        config = config.child("default") if config is not None and "default" in config.values else config
        table = _table(source, config)
        if table is not None:
            default, own = _by_name(table, parts_of)
            return self._declaration(source, default, (*rules, *own), table.key)
        if config is None:
            raise source.wrong("quant_type", "a name or an object")
        return self._declaration(source, declared_by(config), rules, config.string("_type"))

    def _declaration(self, source: Fields, default: Declared, rules: tuple[Rule, ...], key: str) -> Declaration:
        # The head and the embedding are left out without being listed unless this is set.
        whole = source.boolean("include_input_output_embeddings", False)
        unlisted = None if whole else OUTPUT_HEADS
        return Declaration(self.name, source.file, default, rules, default_key=key, unlisted=unlisted)


def _table(source: Fields, config: Fields | None) -> Fields | None:
    """The configurations by module name, wherever they stand; None where there is one for all."""
    holders = [source]
    if config is not None and config.string("_type") in _BY_NAME:
        holders.insert(0, config.child("_data") or config)
    for holder in holders:
        for name in _MAPS:
            if holder.has(name):
                return holder.child(name)
    return None


def _by_name(table: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> tuple[Declared, tuple[Rule, ...]]:
    """The default, and a rule for each other key; null stands for a module that is left out."""
    default = NOT_QUANTIZED
    rules = []
    for name, value in table.values.items():
        config = table.child(name)
        declared = declared_by(config) if value is not None and config is not None else NOT_QUANTIZED
        if name == _DEFAULT:
            default = declared
            continue
        rules.append(_name_rule(name, declared, table, parts_of))
    return default, tuple(rules)


def _name_rule(name: str, declared: Declared, table: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Rule:
    key = f"{table.key.rpartition('.')[2]}[{name!r}]"
    if name.startswith("re:"):
        expression = compile_regex(name.removeprefix("re:"), file=table.file, key=table.path(name), entry=name)
        whole: Matcher = Pattern(expression, "fullmatch")
        return Rule(key, "fqn_to_config", name, whole, whole, whole, declared, rank=1)
    text = name.removesuffix(".weight")
    return Rule(key, "fqn_to_config", name, named(text, parts_of), Exact(text), Exact(text), declared)


FORMAT = TorchAoFormat()
