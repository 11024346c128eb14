"""Every test has a Hub of its own on loopback, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hub.server import Behaviour, FakeHub, serving

Serve = Callable[..., FakeHub]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """serve(folder, behaviour) starts a Hub that has `folder` as org/model and is what huggingface_hub asks."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with ExitStack() as stack:

        def start(folder: Path, behaviour: Behaviour | None = None) -> FakeHub:
            hub = stack.enter_context(serving(folder, behaviour))
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            return hub

        yield start
