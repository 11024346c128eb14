"""The registry in this process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from omniplat.errors import BackendConflictError, UsageError
from omniplat.registry import BACKENDS, FORMATS, MODELS, Registry, default_registry, missing_requirement
from tests.plugins.install import install


@pytest.fixture
def path_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on this process's path, empty at first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_one_registry_in_a_process() -> None:
    assert default_registry() is default_registry()


def test_answers_are_kept_until_refresh(path_entry: Path) -> None:
    registry = Registry()
    before = registry.names(BACKENDS)
    install("duplicate", path_entry)
    assert registry.names(BACKENDS) == before
    registry.refresh()
    assert set(registry.names(BACKENDS)) - set(before) <= {"toy"}
    assert "toy" in registry.names(BACKENDS)


def test_conflict_after_refresh(path_entry: Path) -> None:
    registry = Registry()
    install("toy", path_entry)
    assert registry.load(BACKENDS, "toy").kinds == ("cpu",)
    install("duplicate", path_entry)
    registry.refresh()
    with pytest.raises(BackendConflictError, match=r"omniplat-toy.* and omniplat-toy.*; uninstall one of them"):
        registry.load(BACKENDS, "toy")


def test_threads_get_one_object() -> None:
    registry = Registry()
    found: list[object] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for name in ("cuda", "rocm", "xpu", "ascend"):
            found.append(registry.load(BACKENDS, name))
            registry.refresh()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32
    assert len({id(spec) for spec in found}) == 4


def test_formats_and_families_load() -> None:
    registry = Registry()
    for group in (FORMATS, MODELS):
        assert [(record.plugin.name, record.problem) for record in registry.examine(group) if record.problem] == []


def test_unknown_format() -> None:
    with pytest.raises(UsageError, match=r"omniplat\.formats: nothing named 'nonesuch' is installed"):
        Registry().load(FORMATS, "nonesuch")


@pytest.mark.parametrize(
    ("error", "requirements", "missing"),
    [
        (ModuleNotFoundError("x", name="acme_runtime"), ("omniplat", "acme-runtime"), "acme-runtime"),
        (ModuleNotFoundError("x", name="acme_runtime.ops"), ("acme-runtime",), "acme-runtime"),
        (ModuleNotFoundError("x", name="acme"), ("acme-python",), "acme-python"),
        (ModuleNotFoundError("x", name="acme"), ("other",), None),
        (ModuleNotFoundError("x", name="numpy.nonesuch"), ("numpy",), None),
        (ImportError("libacme.so: cannot open shared object file", name="acme_runtime"), ("acme-runtime",), None),
        (ModuleNotFoundError("x"), ("acme-runtime",), None),
        (RuntimeError("x"), ("acme-runtime",), None),
    ],
)
def test_missing_requirement(error: Exception, requirements: tuple[str, ...], missing: str | None) -> None:
    assert missing_requirement(error, requirements) == missing
