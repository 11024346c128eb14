"""The snippets of docs/pytorch.md, in the order of the page, and its table of methods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from omniplat.conformance.checkpoint import write_checkpoint
from omniplat.online import METHODS
from omniplat.scheme import Scheme
from tests.modules import tiny

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("checkpoint"), Scheme.parse("mxfp8/a16"), tiny.SIZES)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
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


def test_the_table_names_every_method_and_option() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() == METHODS.keys()
    for name, info in METHODS.items():
        assert f"`{info.weight}/{info.activation}`" in rows[name]
        assert all(option in rows[name] for option in info.options)
