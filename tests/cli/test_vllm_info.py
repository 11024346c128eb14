"""`omniplat info --vllm` where no engine is installed, and what its table of hooks says of an environment."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniplat.cli.app import app
from omniplat.errors import BackendNotInstalledError, UsageError
from omniplat.integrations.vllm_info import HOOKS, collect_vllm_info
from tests.goldens.entries import DATA
from tests.packaging.pyproject import read

CHECKPOINT = str(DATA / "lc-qwen3-nvfp4" / "checkpoint")
runner = CliRunner()


def test_hooks_are_those_of_the_distribution() -> None:
    project = read()["project"]
    declared = {
        (group, name)
        for group, entries in project["entry-points"].items()
        if group.startswith("vllm")
        for name in entries
    }
    assert declared == set(HOOKS)


def install_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the entry points of the distribution were those of this environment."""

    class Entry:
        value = "omniplat.integrations.vllm_plugin:register"

        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(
        "omniplat.integrations.vllm_info.entry_points",
        lambda group: [Entry(name) for of, name in HOOKS if of == group],
    )


@pytest.mark.parametrize(
    ("environ", "states"),
    [
        ({}, {"omniplat": "active", "omniplat_cpu": "waits for OMNIPLAT_VLLM_OMNI_CPU=1"}),
        ({"OMNIPLAT_VLLM_OMNI_CPU": "1"}, {"omniplat": "active", "omniplat_cpu": "active"}),
        ({"OMNIPLAT_DISPATCH": "off"}, {"omniplat": "registers nothing: OMNIPLAT_DISPATCH=off"}),
        ({"VLLM_PLUGINS": "omniplat_cpu"}, {"omniplat": "not called: VLLM_PLUGINS=omniplat_cpu"}),
    ],
)
def test_states_of_hooks(environ: dict[str, str], states: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    install_hooks(monkeypatch)
    for hook in collect_vllm_info(environ=environ).hooks:
        assert hook.state == states.get(hook.name, hook.state)


@pytest.mark.skipif(find_spec("vllm_omni") is not None, reason="the real vllm-omni is installed")
@pytest.mark.parametrize("takes", [True, False])
def test_a_vllm_omni_without_builders_is_told(takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its source: nothing of it is imported, so that this package would fail to."""
    folder = tmp_path / "vllm_omni" / "quantization"
    folder.mkdir(parents=True)
    (tmp_path / "vllm_omni" / "__init__.py").write_text("raise ImportError")
    name = "register_quantization_override" if takes else "build_quantization_config"
    (folder / "factory.py").write_text(f"def {name}(): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    install_hooks(monkeypatch)
    states = {(hook.group, hook.name): hook.state for hook in collect_vllm_info(environ={}).hooks}
    told = states["vllm_omni.platform_plugins", "omniplat"]
    assert told == (
        "active" if takes else "active for ModelOpt's checkpoints alone: this vllm-omni takes no builders of methods"
    )
    assert states["vllm.general_plugins", "omniplat"] == "active"


def test_unknown_modes_are_errors() -> None:
    with pytest.raises(UsageError, match="none of gaps, all, off"):
        collect_vllm_info(environ={"OMNIPLAT_DISPATCH": "some"})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_an_engine() -> None:
    result = runner.invoke(app, ["info", "--vllm", "--json"])
    document = json.loads(result.stdout)
    assert document["schema"] == "omniplat.vllm-info/1"
    assert {engine["version"] for engine in document["engines"]} == {""}
    assert document["checkpoint"] is None
    assert "vllm: not installed" in runner.invoke(app, ["info", "--vllm"]).stdout
    with pytest.raises(BackendNotInstalledError, match="omniplat\\[vllm\\]"):
        collect_vllm_info(CHECKPOINT)
