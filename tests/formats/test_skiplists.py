"""Matching names from their end, and the cost of long lists: literal entries never scan the names."""

from __future__ import annotations

import pytest

from omniplat.formats.matching import Contains, EndsWith, ModuleIndex, Segments, Suffix
from omniplat.formats.metadata import Fields
from omniplat.formats.skiplists import skip_rules, substring_rules

NAMES = ("a.b_proj", "a.q_b_proj", "a.mlp.gate", "a.mlp.gate_proj", "layers.1.x", "layers.10.x", "w.layers.1.x.y")


@pytest.mark.parametrize(
    ("matcher", "hits"),
    [
        (Segments("b_proj"), {"a.b_proj"}),
        (Segments("mlp"), {"a.mlp.gate", "a.mlp.gate_proj"}),
        (Segments("layers.1"), {"layers.1.x", "w.layers.1.x.y"}),
        (Segments(".layers.1."), {"layers.1.x", "w.layers.1.x.y"}),
        (Segments("ayers.1"), set()),
        (Segments(""), set()),
        (Suffix("mlp.gate"), {"a.mlp.gate"}),
        (Suffix("gate"), {"a.mlp.gate"}),
        (Suffix("mlp"), set()),
        (EndsWith("b_proj"), {"a.b_proj", "a.q_b_proj"}),
        (EndsWith("mlp"), set()),
        (Contains("gate"), {"a.mlp.gate", "a.mlp.gate_proj"}),
        (Contains("layers.1"), {"layers.1.x", "layers.10.x"}),
    ],
)
def test_matchers(matcher: Segments, hits: set[str]) -> None:
    assert set(matcher.hits(ModuleIndex(NAMES))) == hits


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "elsewhere."])
def test_a_long_list_of_names_is_not_compared_with_every_name(prefix: str) -> None:
    """Rooted, below a wrapper, and written for another wrapper: hits or not, no entry scans the names."""
    modules = [f"model.language_model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(50)]
    listed = [f"{prefix}layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(0, 50, 2)]
    source = Fields("config.json", "", {"skip": listed})
    index = ModuleIndex(modules)
    for rule in skip_rules(source, ("skip",), {}):
        for reading in ("producer", "literal", "consumer"):
            rule.matcher(reading).hits(index)
    assert index.pattern_evaluations == 0


def test_readings_of_one_entry() -> None:
    index = ModuleIndex(NAMES)
    (rule,) = skip_rules(Fields("f", "", {"skip": ["b_proj"]}), ("skip",), {})
    assert set(rule.producer.hits(index)) == {"a.b_proj", "a.q_b_proj"}
    assert set(rule.literal.hits(index)) == {"a.b_proj"}
    assert rule.consumer.hits(index) == []
    (rule,) = substring_rules(Fields("f", "", {"skip": ["gate"]}), ("skip",), {})
    assert set(rule.consumer.hits(index)) == {"a.mlp.gate", "a.mlp.gate_proj"}
    assert set(rule.literal.hits(index)) == {"a.mlp.gate"}
