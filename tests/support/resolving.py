"""Resolving a small synthetic checkpoint, for tests of formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omniplat.checkpoint.folder import open_checkpoint
from omniplat.findings import Finding
from omniplat.formats.detect import read_metadata
from omniplat.formats.resolve import Resolution, resolve_component
from omniplat.packing import family_of
from omniplat.registry import FORMATS, MODELS, default_registry
from tests.support.checkpoints import Shapes, write_checkpoint


def resolve(
    folder: Path,
    quantization: Mapping[str, Any] | None,
    tensors: Shapes,
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    values: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Resolution:
    """The resolution of a checkpoint with these tensors and this `quantization_config`."""
    document = {"model_type": "llama", **(config or {})}
    if quantization is not None:
        document["quantization_config"] = quantization
    write_checkpoint(folder, document, tensors, files=files, values=values, metadata=metadata)
    (component,) = open_checkpoint(folder).components
    registry = default_registry()
    formats = [registry.load(FORMATS, name) for name in registry.names(FORMATS)]
    families = [family for name in registry.names(MODELS) for family in registry.load(MODELS, name)]
    parts_of = family_of(document, families).parts_of
    return resolve_component(component, read_metadata(component, formats, parts_of))


def schemes(resolution: Resolution) -> dict[str, str]:
    """module -> scheme id, with the status where it is not ok."""
    return {
        m.name: m.scheme.id if m.status in ("ok", "unquantized") else f"{m.scheme.id} {m.status}"
        for m in resolution.modules
    }


def codes(resolution: Resolution, *, severity: str = "") -> list[str]:
    """The codes of the findings, sorted."""
    return sorted(f.code for f in resolution.findings if severity in ("", f.severity))


def only(resolution: Resolution, code: str) -> Finding:
    """The one finding with this code."""
    (found,) = [f for f in resolution.findings if f.code == code]
    return found
