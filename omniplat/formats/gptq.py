"""GPTQ checkpoints (AutoGPTQ, GPTQModel, AutoRound's `auto_gptq` export): one integer scheme and `dynamic` rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniplat.errors import UnsupportedOptionError
from omniplat.formats.declared import NOT_QUANTIZED, Declaration, Declared, Rule, scope_entries
from omniplat.formats.matching import AnyOf, Exact, Nothing, Pattern, Segments, compile_regex
from omniplat.formats.metadata import Fields
from omniplat.scheme import Scheme, TensorQuant

#: The list of modules, by their names inside a block, that are quantized.
_LIST = "modules_in_block_to_quantize"


@dataclass(frozen=True, slots=True)
class GptqFormat:
    name: str = "gptq"

    def claims(self, source: Fields) -> bool:
        method = source.values.get("quant_method")
        if method is None:
            return {"bits", "group_size", "desc_act"} <= source.values.keys()
        return method in ("gptq", "gptq_marlin", "auto_gptq")

    def read(self, source: Fields, parts_of: Mapping[str, tuple[str, ...]]) -> Declaration:
        """`modules_in_block_to_quantize` is a whitelist of names inside a block; `lm_head` adds the head to it."""
        _check_layout(source)
        checkpoint_format = source.string("checkpoint_format") or source.string("format") or "gptq"
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise UnsupportedOptionError(
                f"{checkpoint_format!r} is neither gptq nor gptq_v2",
                file=source.file,
                key=source.path("checkpoint_format"),
            )
        offset = 0 if checkpoint_format == "gptq_v2" else 1
        ordered = source.boolean("desc_act", False)
        default = Declared(_scheme(source, source), "gptq", offset, ordered, unsupported=_unsupported(source))
        rules = _dynamic_rules(source, default)
        if source.values.get("lm_head") is False:
            head = Exact("lm_head")
            rules.append(Rule("lm_head", "lm_head", "lm_head", head, head, head, NOT_QUANTIZED, len(rules), False))
        listed = _listed(source)
        covered = (*listed, "lm_head") if listed and source.boolean("lm_head", False) else listed
        return Declaration(
            self.name,
            source.file,
            default,
            tuple(rules),
            scope=AnyOf(tuple(map(Segments, covered))) if listed else None,
            scope_key=_LIST,
            scope_entries=scope_entries(_LIST, ((name, Segments(name)) for name in covered), default),
            speaks_of_all=False,
            default_key=f"bits={source.integer('bits', 4)}, group_size={source.integer('group_size', 128)}",
            notes=_notes(source),
        )


def _dynamic_rules(source: Fields, default: Declared) -> list[Rule]:
    """`dynamic`: expressions whose modules are skipped (`-:`) or quantized otherwise.

    The first that matches counts; GPTQModel puts those that skip before all others when it reads them, engines keep
    the order of the file. `false` and null skip as well.
    """
    table = source.child("dynamic")
    rules: list[Rule] = []
    nothing = Nothing()
    overrides = 0
    for index, (key, value) in enumerate(table.values.items() if table is not None else ()):
        assert table is not None
        skip = key.startswith("-:") or value is None or value is False
        override = Fields(table.file, table.path(key), {}) if skip else table.child(key)
        assert override is not None
        text = key.removeprefix("-:").removeprefix("+:")
        pattern = Pattern(compile_regex(text, file=source.file, key=override.key), "match")
        declared = NOT_QUANTIZED if skip else replace(default, scheme=_scheme(override, source))
        name = f"dynamic[{key!r}]"
        if skip and overrides:
            rules.append(Rule(name, "dynamic", text, pattern, pattern, nothing, declared, rank=-1))
            rules.append(Rule(name, "dynamic", text, nothing, nothing, pattern, declared, rank=index, must_hit=False))
        else:
            rules.append(Rule(name, "dynamic", text, pattern, pattern, pattern, declared, rank=index))
        overrides += not skip
    return rules


def _unsupported(source: Fields) -> str:
    """Why nothing runs weights with GPTQModel's `activation`: inputs are quantized in ways of its own kernels."""
    if not source.has("activation"):
        return ""
    return f"the quantization of inputs that {source.path('activation')} asks for is not computed here"


def _notes(source: Fields) -> tuple[str, ...]:
    if not source.has("adapter"):
        return ()
    return (f"{source.path('adapter')} names an adapter that is applied beside the weights: it is not loaded here",)


def _check_layout(source: Fields) -> None:
    """Raises UnsupportedOptionError for words that are laid out for one kernel."""
    if source.boolean("is_marlin_format", False):
        raise UnsupportedOptionError(
            "the words are laid out for one kernel", file=source.file, key=source.path("is_marlin_format")
        )
    if source.string("pack_dtype", "int32") != "int32":
        raise UnsupportedOptionError(
            f"words of {source.string('pack_dtype')} are not known", file=source.file, key=source.path("pack_dtype")
        )


def _listed(source: Fields) -> tuple[str, ...]:
    """`modules_in_block_to_quantize`: a list of names, or of lists of names that were quantized together."""
    value = source.values.get(_LIST)
    if value is None:
        return ()
    nested = value if isinstance(value, list) else [value]
    items = [inner for item in nested for inner in (item if isinstance(item, list) else [item])]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in items):
        raise source.wrong(_LIST, "a list of names or of lists of names")
    return tuple(str(item) for item in items)


def _scheme(override: Fields, base: Fields) -> Scheme:
    bits = override.integer("bits", base.integer("bits", 4))
    group = override.integer("group_size", base.integer("group_size", 128))
    symmetric = override.boolean("sym", base.boolean("sym", True))
    if not 2 <= bits <= 8:
        raise UnsupportedOptionError(f"{bits} bits are not known", file=override.file, key=override.path("bits"))
    element = f"{'int' if symmetric else 'uint'}{bits}"
    if group > 0:
        return Scheme(TensorQuant(element, "group", group, symmetric=symmetric))
    return Scheme(TensorQuant(element, "channel", symmetric=symmetric))


FORMAT = GptqFormat()
