"""What a checkpoint's tensors are called in a model: transformers renames many of them, and converts some, as it loads.

The rules are transformers' own (`transformers.conversion_mapping`), of the model's class and of the models inside it.
Renaming is applied; a conversion of values (a permutation of rows, a split, a concatenation) was made for weights in
floating point and is only named here, so that whoever would need it can refuse with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from omniplat.errors import UsageError

_WEIGHT = ".weight"


class Renaming(Protocol):
    """One rule for names, as transformers' `WeightRenaming` and `WeightConverter` are."""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The new name, and the pattern that fitted; the same name and None where none does."""


class _KeyMapping:
    """One entry of a caller's `key_mapping`."""

    def __init__(self, pattern: str, replacement: str) -> None:
        try:
            self._pattern = re.compile(pattern)
            self._pattern.sub(replacement, "")
        except (re.error, IndexError) as exc:
            raise UsageError(f"key_mapping: {pattern!r} -> {replacement!r} is no substitution: {exc}") from exc
        self._replacement = replacement

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        renamed, count = self._pattern.subn(self._replacement, source_key, count=1)
        return renamed, self._pattern.pattern if count else None


class Renames:
    """Names that are changed one rule after the other. `always`: somebody asked for it."""

    def __init__(self, renamings: Sequence[Renaming] = (), converters: Sequence[Any] = (), *, always: bool = False):
        """`converters` are transformers', with `operations`."""
        self._renamings = tuple(renamings)
        self._converters = tuple(converters)
        self.always = always

    def tensor(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def module(self, name: str) -> str:
        """The same for what has a `weight` of that name before it."""
        return self.tensor(name + _WEIGHT).removesuffix(_WEIGHT)

    def conversion(self, module: str) -> str:
        """What transformers does to the weight of a renamed module: `Concatenate of attn.*.weight`; "" for nothing."""
        for converter in self._converters:
            _, pattern = converter.rename_source_key(module + _WEIGHT)
            if pattern is not None:
                return f"{', '.join(type(item).__name__ for item in converter.operations)} of {pattern}"
        return ""


def renames_of(model: nn.Module, stored: Sequence[str] | None, key_mapping: Mapping[str, str] | None = None) -> Renames:
    """A caller's `key_mapping` (expression -> replacement, as `re.sub` takes them), or transformers' rules for `model`.

    `stored` are the checkpoint's tensors, None where nobody knows them ahead. Raises UsageError for an entry that is no
    expression or fits no tensor.
    """
    if key_mapping is None:
        return _of_transformers(model)
    mappings = [_KeyMapping(pattern, replacement) for pattern, replacement in key_mapping.items()]
    if stored is None:
        return Renames(mappings, always=True)
    names = list(stored)
    for pattern, mapping in zip(key_mapping, mappings, strict=True):
        renamed = [mapping.rename_source_key(name) for name in names]
        if not any(fitted for _, fitted in renamed):
            raise UsageError(f"key_mapping: {pattern!r} fits no tensor of the checkpoint")
        names = [name for name, _ in renamed]
    return Renames(mappings, always=True)


def _of_transformers(model: nn.Module) -> Renames:
    root = next((item for item in model.modules() if _is_transformers(item)), None)
    if root is None:
        return Renames()
    try:
        rules: list[Any] = import_module("transformers.conversion_mapping").get_model_conversion_mapping(root)
    except ModuleNotFoundError:  # before transformers 5, a class had a mapping of its own
        older: Mapping[str, str] = getattr(root, "_checkpoint_conversion_mapping", {})
        return Renames([_KeyMapping(pattern, replacement) for pattern, replacement in older.items()])
    converters = [rule for rule in rules if hasattr(rule, "operations")]
    return Renames([rule for rule in rules if not hasattr(rule, "operations")], converters)


def _is_transformers(module: nn.Module) -> bool:
    """True for a model of transformers, or one that is made like them."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(module).__mro__
    )
