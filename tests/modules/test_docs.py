"""The snippets of docs/pytorch.md, in the order of the page, and its table of methods. Those that say that they need
libraries are skipped, and say so, where one is not installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import omniplat
from omniplat.conformance.dialect import write_checkpoint
from omniplat.modules.layers import ModelLinear
from omniplat.online import METHODS
from omniplat.scheme import Scheme
from tests.goldens.entries import bundled
from tests.modules import models, tiny
from tests.quality import images

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
#: The libraries that a snippet says it needs, "" for none, and its code.
SNIPPETS: list[tuple[str, str]] = re.findall(
    r"^```python(?: needs=(\S+))?\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("checkpoint"), Scheme.parse("mxfp8/a16"), tiny.SIZES)
    snippets = [code for needs, code in SNIPPETS if not needs]
    assert len(snippets) == 5
    names: dict[str, Any] = {"model": tiny.decoder(), "build": tiny.decoder}
    tiny.write_unquantized(Path("unquantized"), tiny.decoder())
    exec(snippets[0], names)
    names["model"] = tiny.decoder()  # the second is about a model that is not quantized
    for snippet in snippets[1:]:
        exec(snippet, names)
    printed = capsys.readouterr().out
    assert "{'mxfp8/a16': 7}" in printed
    assert "ignored_layers['*.down_proj']" in printed


def test_snippets_with_libraries_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = [(needs, code) for needs, code in SNIPPETS if needs]
    assert len(snippets) == 5
    for library in {name for needs, _ in snippets for name in needs.split(",")}:
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    entries = {entry.name: entry.checkpoint for entry in bundled()}
    shutil.copytree(entries["lc-qwen3-w8a8-int8"], "qwen3")
    pipe, decoder = images.pipeline(), models.make("qwen3")[1]
    names: dict[str, Any] = {
        "omniplat": omniplat, "torch": torch, "pipe": pipe, "inputs": images.call(torch.bfloat16, steps=2),
        "decoder": decoder,
    }  # fmt: skip
    for _, code in snippets:
        if '"pipeline"' in code:
            shutil.copytree(entries["mo-qwenimage-nvfp4"], "pipeline")
            pipe.transformer = models.make("qwen-image")[1]
        exec(code, names)
    printed = capsys.readouterr().out
    assert "torch.Size([1, 7])" in printed
    assert "transformer.proj_out stays: final layer" in printed
    assert names["image"].size == (images.SIDE, images.SIDE)
    quantized = {name for name, module in names["pipe"].transformer.named_modules() if isinstance(module, ModelLinear)}
    assert "transformer_blocks.0.attn.to_q" in quantized
    assert names["logits"].shape == (1, 3, models.LANGUAGE["vocab_size"])


def test_the_table_names_every_method_and_option() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() == METHODS.keys()
    for name, info in METHODS.items():
        assert f"`{info.weight}/{info.activation}`" in rows[name]
        assert all(option in rows[name] for option in info.options)
