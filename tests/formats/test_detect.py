"""Which dialect metadata is taken for, and what is said where it is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import bf16, fp8_channel
from tests.support.resolving import codes, only, resolve, schemes

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}


def test_keys_of_no_known_dialect_are_listed(tmp_path: Path) -> None:
    problem = only(resolve(tmp_path / "two", {"foo": 1, "bar": 2}, {"m.weight": bf16(64, 64)}), "unknown-format")
    assert "unrecognised quantization_config keys [bar, foo];" in problem.message
    many = {f"key{i:02}": i for i in range(30)}
    problem = only(resolve(tmp_path / "many", many, {"m.weight": bf16(64, 64)}), "unknown-format")
    assert "key11, ...]" in problem.message


@pytest.mark.parametrize(
    ("config", "entry"),
    [
        ({**COMPRESSED, "ignore": ["lm_head", "re:.*(mlp"]}, "re:.*(mlp"),
        ({**COMPRESSED, "config_groups": {"group_0": {**GROUP, "targets": ["re:.*[a"]}}}, "re:.*[a"),
        ({"quant_method": "quark", "global_quant_config": {}, "exclude": ["re:a("]}, "re:a("),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:*a": {}}}, "*a"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:*a"]}, "re:*a"),
    ],
)
def test_an_entry_that_is_no_regular_expression_is_shown(tmp_path: Path, config: Any, entry: str) -> None:
    problem = only(resolve(tmp_path, config, {"m.weight": bf16(64, 64)}), "metadata-unreadable")
    assert f"{entry!r} is not a regular expression: " in problem.message


def test_flags_at_the_start_of_an_entry_keep_their_place(tmp_path: Path) -> None:
    tensors = {"MLP.gate.weight": bf16(64, 64), **fp8_channel("m", 64, 64)}
    found = resolve(tmp_path, {**COMPRESSED, "ignore": ["re:(?i).*mlp\\.gate"]}, tensors)
    assert codes(found) == []
    assert schemes(found) == {"m": "fp8-channel/a16", "MLP.gate": "bf16/a16"}


BLOCKS = {"m.weight": ("F8_E4M3", (128, 256)), "m.weight_scale_inv": ("F32", (1, 2))}
FINE = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("method", "read_as", "config", "tensors", "scheme"),
    [
        ("FP8", "fp8", FINE, BLOCKS, "fp8-block128x128/fp8-g128"),
        ("compressed_tensors", "compressed-tensors", COMPRESSED, fp8_channel("m", 64, 64), "fp8-channel/a16"),
        ("Compressed-Tensors", "compressed-tensors", COMPRESSED, fp8_channel("m", 64, 64), "fp8-channel/a16"),
    ],
)
def test_other_spellings_of_a_method_are_read_and_noted(
    tmp_path: Path, method: str, read_as: str, config: Any, tensors: Any, scheme: str
) -> None:
    found = resolve(tmp_path, {**config, "quant_method": method}, tensors)
    assert schemes(found) == {"m": scheme}
    note = only(found, "known-quirk")
    assert (note.severity, note.where.rule) == ("note", "quantization_config.quant_method")
    assert note.message == f"quant_method {method!r} is read as {read_as!r}"
    assert codes(found) == ["known-quirk"]


@pytest.mark.parametrize("method", ["fp9", "compressed tensors", 7, ["fp8"]])
def test_a_method_of_another_name_stays_unknown(tmp_path: Path, method: Any) -> None:
    found = resolve(tmp_path, {**COMPRESSED, "quant_method": method}, fp8_channel("m", 64, 64))
    assert repr(method) in only(found, "unknown-format").message


def test_metadata_that_cannot_be_used_is_not_called_none(tmp_path: Path) -> None:
    tensors = fp8_channel("m", 64, 64)
    assert only(resolve(tmp_path / "no", None, tensors), "inferred-from-headers").message.startswith("no metadata;")
    for name, config in (("unknown", {"quant_method": "fp9"}), ("unread", {**COMPRESSED, "format": "dense-ish"})):
        found = resolve(tmp_path / name, config, tensors)
        assert only(found, "inferred-from-headers").message.startswith("no usable metadata;")
