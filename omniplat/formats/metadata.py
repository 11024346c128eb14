"""Quantization metadata of one component: where it can stand, and typed access that names file and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omniplat.checkpoint.folder import Component
from omniplat.errors import InvalidCheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of the metadata. Getters raise InvalidCheckpointError naming file and key on a wrong type.

    `context` is the whole config that a `quantization_config` stands in: some dialects keep fields of theirs there.
    """

    file: str
    key: str
    values: Mapping[str, Any]
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outer(self) -> Fields:
        """The config around this object."""
        return Fields(self.file, "", self.context)

    def path(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name

    def wrong(self, name: str, needed: str) -> InvalidCheckpointError:
        found = self.values.get(name)
        return InvalidCheckpointError(f"must be {needed}, found {found!r:.80}", file=self.file, key=self.path(name))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def string(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "an integer")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; null and a missing key are the empty list, a bare string is a list of one."""
        value = self.values.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def child(self, name: str) -> Fields | None:
        """The object under `name`; None where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.file, self.path(name), value)

    def children(self, name: str) -> Iterator[tuple[str, Fields]]:
        """The objects inside the object `name`, by key."""
        parent = self.child(name)
        if parent is None:
            return
        for key in parent.values:
            inner = parent.child(key)
            if inner is not None:
                yield key, inner

    def listed(self, name: str) -> tuple[Fields, ...]:
        """The objects of the list `name`; a missing or null list is empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "a list of objects")
        return tuple(Fields(self.file, f"{self.path(name)}[{i}]", item) for i, item in enumerate(value))

    def objects(self) -> Iterator[tuple[str, Fields]]:
        """The values of this object that are objects, by key."""
        for key, value in self.values.items():
            if isinstance(value, dict):
                yield key, Fields(self.file, self.path(key), value)


def metadata_sources(component: Component) -> list[Fields]:
    """Every place of a component that holds quantization metadata, in the order of precedence.

    config.json's `quantization_config`, its `text_config`'s, `compression_config`, the files that tools write
    beside it, then JSON strings in the shards' `__metadata__`. Raises InvalidCheckpointError on a wrong type.
    """
    config = Fields(component.config_file, "", component.config)
    found: list[Fields] = []
    for holder in (config, config.child("text_config")):
        if holder is not None and (inner := holder.child("quantization_config")) is not None:
            found.append(Fields(inner.file, inner.key, inner.values, component.config))
    if (inner := config.child("compression_config")) is not None:
        found.append(inner)
    for name, content in component.files.items():
        if not isinstance(content, dict):
            raise InvalidCheckpointError("must be a JSON object", file=component.path_of(name))
        found.append(Fields(component.path_of(name), "", content))
    for key in ("quantization_config", "_quantization_metadata"):
        if key in component.shard_metadata:
            file = component.shards[0] if component.shards else ""
            try:
                value = msgspec.json.decode(component.shard_metadata[key].encode())
            except (msgspec.DecodeError, RecursionError) as exc:
                raise InvalidCheckpointError(f"is not valid JSON: {exc}", file=file, key=f"__metadata__.{key}") from exc
            if isinstance(value, dict):
                found.append(Fields(file, f"__metadata__.{key}", value))
    return [source for source in found if source.values]
