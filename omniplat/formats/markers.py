"""Metadata that stands in no JSON file of its own: marker tensors, and one config for all components of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from omniplat.checkpoint.folder import Component
from omniplat.checkpoint.tensors import GGUF_PREFIX
from omniplat.errors import InvalidCheckpointError
from omniplat.formats.metadata import Fields

#: Keys of sources that only ComfyUI's files have.
MARKER_KEYS = frozenset({"comfy_quant", "scaled_fp8", "__metadata__._quantization_metadata"})

#: Key of the source that a GGUF file's own header is.
GGUF_KEY = "gguf header"

_MARKER = ".comfy_quant"


def header_sources(component: Component) -> list[Fields]:
    """The types of quantized tensors in GGUF files; nothing for safetensors. They come before any JSON file."""
    types = {name: info.dtype.lower() for name, info in component.tensors.items() if info.dtype.startswith(GGUF_PREFIX)}
    shard = next((shard for shard in component.shards if shard.endswith(".gguf")), "")
    if not shard:
        return []
    architecture = component.shard_metadata.get("general.architecture", "")
    return [Fields(shard, GGUF_KEY, {"architecture": architecture, "tensors": types})]


def marker_sources(component: Component) -> list[Fields]:
    """What marker tensors of a component say: `<layer>.comfy_quant` (JSON in bytes) and `scaled_fp8`.

    Raises InvalidCheckpointError naming the shard and the tensor where a marker is no JSON object.
    """
    found: list[Fields] = []
    layers = {
        name.removesuffix(_MARKER): _decoded(component, name) for name in component.tensors if name.endswith(_MARKER)
    }
    if layers:
        file = component.tensors[next(iter(layers)) + _MARKER].shard
        found.append(Fields(file, "comfy_quant", {"layers": layers}))
    marker = component.tensors.get("scaled_fp8")
    if marker is not None and not layers:
        found.append(Fields(marker.shard, "scaled_fp8", {"scaled_fp8": marker.dtype}))
    return found


def _decoded(component: Component, name: str) -> Mapping[str, Any]:
    info = component.tensors[name]
    try:
        value = msgspec.json.decode(component.read_small(info).rstrip(b"\0 "))
    except (ValueError, RecursionError) as exc:
        raise InvalidCheckpointError(f"is not valid JSON: {exc}", file=info.shard, key=name) from exc
    if not isinstance(value, dict):
        raise InvalidCheckpointError("must be a JSON object", file=info.shard, key=name)
    return value


def part_of_component(source: Fields, component: str) -> Fields:
    """The part of a config that holds one entry per component (`{"transformer": {...}, "default": null}`).

    A component without an entry has that of `default`; null is no quantization. `method` is another spelling of
    `quant_method`. Any other source comes back as it is.
    """
    values = source.values
    entries = [value for value in values.values() if value is not None]
    is_map = "default" in values or component in values
    if is_map and entries and all(isinstance(value, dict) and _method(value) for value in entries):
        key = component if component in values else "default"
        inner = source.child(key)
        source = inner if inner is not None else Fields(source.file, source.path(key), {})
    if source.has("method") and not source.has("quant_method"):
        return replace(source, values={**source.values, "quant_method": source.values["method"]})
    return source


def _method(value: Mapping[str, Any]) -> bool:
    return "method" in value or "quant_method" in value
