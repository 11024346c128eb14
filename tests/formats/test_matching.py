"""Matching: every short cut finds what a plain scan finds, and its cost does not grow with rules x modules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniplat.errors import OmniplatError, UnsupportedOptionError
from omniplat.formats.matching import (
    Contains,
    EndsWith,
    ModuleIndex,
    Pattern,
    Prefix,
    Segments,
    bounded_regex,
    compile_regex,
    glob,
)
from omniplat.formats.patterns import MAX_STEPS, Shape
from omniplat.formats.resolve import Resolution
from tests.support.checkpoints import bf16, fp8_tensor
from tests.support.resolving import codes, resolve

NAMES = st.lists(
    st.lists(st.sampled_from(["a", "ab", "b", "layers", "1", "10", "gate", "gate_proj", "", "x\n", "\U0010ffff"]),
             min_size=1, max_size=4).map(".".join),
    min_size=1, max_size=30,
)  # fmt: skip
TEXTS = st.text("ab.1x_\n\U0010ffff", max_size=6) | st.sampled_from(["layers.1", "gate", ".gate", "gate.", "a..b"])
PIECES = st.sampled_from(
    ["a", "b", "ab", ".", r"\.", "1", "layers", r"\d+", ".*", "x?", "(a|ab)", "(?:b)?", "[ab]", "^", "$", r"\Z",
     "(?=a)", "(?!a)", "(?i:A)", "(?s:.)", r"\b", "gate", "|",
     "(?>a)" if hasattr(re, "NOFLAG") else "a", "a{2}", "(?#c)"]
)  # fmt: skip


@given(NAMES, st.lists(PIECES, max_size=6).map("".join), st.sampled_from(["match", "search", "fullmatch"]))
@settings(max_examples=400, deadline=None)
def test_a_pattern_hits_what_a_scan_finds(names: list[str], text: str, how: str) -> None:
    try:
        expression = re.compile(text)
    except re.error:
        return
    index = ModuleIndex(set(names) - {""})
    wanted = [name for name in index.names if getattr(expression, how)(name)]
    assert sorted(Pattern(expression, how).hits(index)) == wanted


@given(NAMES, st.text("ab*?[]!.1x", max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_glob_hits_what_fnmatch_does(names: list[str], text: str) -> None:
    index = ModuleIndex(set(names) - {""})
    assert sorted(glob(text).hits(index)) == [name for name in index.names if fnmatchcase(name, text)]


@given(NAMES, TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_matchers_hit_what_strings_do(names: list[str], text: str) -> None:
    index = ModuleIndex({name for name in names if name and "\U0010ffff" not in name})
    tests: list[tuple[Any, Callable[[str], bool]]] = [
        (Prefix(text), lambda name: name.startswith(text)),
        (EndsWith(text), lambda name: name.endswith(text)),
    ]
    if "." not in text:  # a dotted text that begins names is looked for there only
        tests.append((Contains(text), lambda name: text in name))
    for matcher, test in tests:
        assert sorted(matcher.hits(index)) == [name for name in index.names if test(name)]


def test_segments_are_bounded_by_dots() -> None:
    index = ModuleIndex(["m.gate.a", "m.gate", "m.gate_proj", "m.a.gate.b", "gate", "xgate"])
    assert Segments("gate").hits(index) == ["gate", "m.a.gate.b", "m.gate", "m.gate.a"]


# -- cost ------------------------------------------------------------------------------------------

FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CT_GROUP = {"targets": ["Linear"], "weights": FP8_STATIC, "input_activations": FP8_STATIC}
CT = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": CT_GROUP}}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 8, "group_size": 32, "data_type": "mx_fp",
              "packing_format": "auto_round:llm_compressor"}  # fmt: skip
ENTRIES = 1550
HEADS = [f"model.layers.{layer}.attn.heads.{head}.q_proj" for layer in range(31) for head in range(49)]
ABSENT = [f"model.layers.{index}.nowhere.x_proj" for index in range(ENTRIES - len(HEADS))]


def tensors(experts: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"{name}.weight": bf16(32, 32) for name in HEADS}
    for expert in range(experts):
        found |= fp8_tensor(f"model.layers.{expert % 31}.mlp.experts.{expert}.up_proj", 32, 32)
    return found


def listed(form: str) -> list[str]:
    return [form.format(name=name, escaped=re.escape(name)) for name in HEADS + ABSENT]


DIALECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8 ignored_layers": lambda: {"quant_method": "fp8", "activation_scheme": "static",
                                   "ignored_layers": listed("{name}")},
    "fp8 modules_to_not_convert": lambda: {"quant_method": "fp8", "activation_scheme": "static",
                                           "modules_to_not_convert": listed("{name}")},
    "compressed-tensors": lambda: {**CT, "ignore": listed("{name}")},
    "compressed-tensors re:": lambda: {**CT, "ignore": listed("re:{escaped}")},
    "compressed-tensors re: unescaped": lambda: {**CT, "ignore": listed("re:{name}$")},
    "compressed-tensors re: anywhere": lambda: {**CT, "ignore": listed("re:.*{escaped}.*")},
    "modelopt": lambda: {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": listed("{name}")},
    "modelopt name*": lambda: {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": listed("{name}*")},
    "modelopt *name": lambda: {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": listed("*{name}")},
    "modelopt *name*": lambda: {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": listed("*{name}*")},
    "quark": lambda: {**QUARK, "exclude": listed("{name}")},
    "quark re:": lambda: {**QUARK, "exclude": listed("re:{name}")},
    "awq": lambda: {**AWQ, "modules_to_not_convert": listed("{name}")},
    "bitsandbytes": lambda: {"quant_method": "bitsandbytes", "load_in_4bit": True,
                             "llm_int8_skip_modules": listed("{name}")},
    "hqq": lambda: {**HQQ, "skip_modules": listed("{name}")},
    "auto-round": lambda: {**AUTO_ROUND, "extra_config": {key: {"bits": 16} for key in listed("{name}")}},
    "gptq": lambda: {"quant_method": "gptq", "bits": 4, "group_size": 32,
                     "dynamic": {key: {} for key in listed("-:{name}")}},
}  # fmt: skip


def resolved(folder: Path, dialect: str, experts: int) -> Resolution:
    found = resolve(folder, DIALECTS[dialect](), tensors(experts))
    assert "metadata-unreadable" not in codes(found)
    assert sum(module.status == "unquantized" for module in found.modules) == len(HEADS)
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_list_of_1550_entries_costs_its_hits_not_rules_times_modules(tmp_path: Path, dialect: str) -> None:
    index = resolved(tmp_path / "c", dialect, 1000).index
    # Every entry under three readings, each evaluated against what it names and little else.
    assert index.pattern_evaluations <= 4 * (ENTRIES + len(index.names))


@pytest.mark.parametrize("dialect", ["compressed-tensors re:", "modelopt *name*", "awq"])
def test_modules_that_no_entry_names_cost_nothing(tmp_path: Path, dialect: str) -> None:
    few = resolved(tmp_path / "few", dialect, 10).index
    many = resolved(tmp_path / "many", dialect, 2000).index
    assert many.pattern_evaluations == few.pattern_evaluations


# -- expressions that never end --------------------------------------------------------------------

ENDLESS = ["(a+)+$", "(a*)*b", "(a|a)*$", "(a|aa)+$", "(?:.*)*x", "(.*a){30}", r"(\w+\.?)+$", r"(x+x+)+y",
           "(?=(a+)+$)", ".*" * 12 + "x$", r"(?:a?){300}a{300}b", r"(.*)*\1", "(?:a{0,50}){0,50}b", "((a+)?)+$",
           "(?:a|b|ab)*c"]  # fmt: skip
QUICK = [r"re:.*\.mlp\.(gate|up)_proj$", r".*\.layers\.\d+\.mlp\.experts\.\d+\..*proj.*", "(?:.*\\.)?lm_head",
         r"^(?!.*(?:lm_head|vision)).*$", r"model\.layers\.([0-9]|1[0-9]|2[0-3])\..*", "(?i:.*HEAD)", ".*a.*b.*c.*",
         "[a-z]+[0-9]+", r"(?:model\.)?(?:layers\.)?\d{1,3}.*", ".*", "", "(?:a|b|c){0,3}x"]  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS)
@pytest.mark.parametrize("how", ["match", "search", "fullmatch"])
def test_endless_expressions_are_refused_at_once(text: str, how: str) -> None:
    names = ["a" * 4000 + "!", "model.layers.0.mlp"]
    start = time.monotonic()
    with pytest.raises(UnsupportedOptionError, match="repeats what repeats itself"):
        Pattern(compile_regex(text, file="config.json", key="ignore"), how).hits(ModuleIndex(names))
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("text", QUICK)
def test_what_configs_hold_is_not_refused(text: str) -> None:
    index = ModuleIndex(
        f"model.language_model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(61) for j in range(9)
    )
    expression = compile_regex(text, file="", key="")
    for pattern in (Pattern(expression), Pattern(expression, "search"), bounded_regex(text, file="", key="")):
        pattern.hits(index)


@given(st.lists(st.sampled_from(["a", "(", ")", "*", "+", "?", "|", ".", "{2,}", "{0,9}", "(?:", "(?=", "[ab]", "$"]),
                max_size=14).map("".join))  # fmt: skip
@settings(max_examples=500, deadline=None)
def test_every_expression_ends_or_is_refused(text: str) -> None:
    index = ModuleIndex(["a" * 60 + "b", "a" * 61, "ab" * 30])
    start = time.monotonic()
    with suppress(OmniplatError):
        Pattern(compile_regex(text, file="", key=""), "search").hits(index)
    assert time.monotonic() - start < 20


def test_a_bound_counts_no_less_than_there_is() -> None:
    """Ways of placing k stars in a row of n characters: n over k, which the bound must reach."""
    shape = Shape(re.compile(".*.*.*x"), "match")
    assert 50**3 / 6 <= shape.steps(50, 1) < 50**4
    assert shape.steps(10_000, 1) > MAX_STEPS
    assert Shape(re.compile(r"\d+\d+\d+\d+x"), "match").steps(200, 3) < 1000


def test_the_plan_says_which_rule_is_refused(tmp_path: Path) -> None:
    found = resolve(tmp_path, {**CT, "ignore": ["lm_head", "re:(a+)+$"]}, fp8_tensor("a" * 60, 32, 32))
    (refused,) = [item for item in found.findings if item.code == "unsupported-option"]
    assert refused.severity == "error"
    assert "(a+)+$" in refused.where.rule
    assert refused.where.file == "config.json"


def test_names_may_hold_the_last_character_there_is() -> None:
    last = chr(0x10FFFF)
    index = ModuleIndex([f"a.{last}", f"a.{last}{last}b", "a", "a.b", "ab", last, f"{last}.c"])
    assert index.with_prefix("a.") == sorted([f"a.{last}", f"a.{last}{last}b", "a.b"])
    assert index.with_prefix(f"a.{last}") == [f"a.{last}", f"a.{last}{last}b"]
    assert index.with_prefix(last) == [last, f"{last}.c"]
    assert index.with_prefix("") == index.names
    assert index.paths_ending_with(last) == [last, f"a.{last}"]
    assert index.with_lead(("a", last)) == [f"a.{last}", f"a.{last}{last}b"]
