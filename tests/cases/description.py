"""Checkpoints described in one JSON document each, and what a plan must say about them.

A description has `files`, `tensors` ({component folder: {name: [dtype, shape]}}, `{X}` in a name repeated over
`ranges`), `shards`, `omit` (listed in the index, in no shard), `values` (small tensors), `metadata`, `args` of the
command, and `expect`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.support.checkpoints import write_shard

#: Environment variable that names a folder of descriptions.
VARIABLE = "OMNIPLAT_CASES"

Case = Mapping[str, Any]


def descriptions() -> list[Path]:
    """The descriptions of the folder that `OMNIPLAT_CASES` names; none where it is not set."""
    root = os.environ.get(VARIABLE)
    return sorted(Path(root).glob("*.json")) if root else []


def _repeated(entries: Mapping[str, Any], ranges: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        keys = list(dict.fromkeys(re.findall(r"\{(\w+)\}", name)))
        for numbers in itertools.product(*(range(ranges[key]) for key in keys)):
            yield name.format(**dict(zip(keys, numbers, strict=True))), value


def _bytes(value: str | Sequence[int], size: int) -> bytes:
    if isinstance(value, str):
        return value.encode().ljust(size)
    return b"".join(number.to_bytes(8, "little", signed=True) for number in value)


def build(case: Case, folder: Path) -> None:
    """Write the checkpoint that `case` describes."""
    for name, content in case.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    ranges = case.get("ranges", {})
    omitted = {name for name, _ in _repeated(dict.fromkeys(case.get("omit", ()), None), ranges)}
    for prefix, entries in case.get("tensors", {}).items():
        _build_component(case, folder / prefix, dict(_repeated(entries, ranges)), prefix, omitted)


def _build_component(case: Case, folder: Path, tensors: Mapping[str, Any], prefix: str, omitted: set[str]) -> None:
    ranges = case.get("ranges", {})
    values = dict(_repeated(case.get("values", {}).get(prefix, {}), ranges))
    stem = "diffusion_pytorch_model" if prefix else "model"
    count = case.get("shards") or 1
    shards = [f"{stem}.safetensors"] if count == 1 else [
        f"{stem}-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)
    ]  # fmt: skip
    names = list(tensors)
    size = -(-len(names) // count) if names else 1
    weight_map = {name: shards[position // size] for position, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        held = {n: (tensors[n][0], tuple(tensors[n][1])) for n in names if weight_map[n] == shard and n not in omitted}
        filled = {n: _bytes(v, held[n][1][0] if held[n][1] else 1) for n, v in values.items() if n in held}
        write_shard(folder / shard, held, filled, case.get("metadata", {}).get(prefix))
    index = folder / f"{stem}.safetensors.index.json"
    if (count > 1 or omitted) and not index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def problems(expect: Mapping[str, Any], code: int, plan: Mapping[str, Any] | None, output: str) -> list[str]:
    """What does not hold of `expect` after a run that exited with `code` and printed `output`; `plan` its document."""
    found = ["traceback"] if "Traceback (most recent call last)" in output else []
    if "either" in expect:
        tries = [problems(choice, code, plan, output) for choice in expect["either"]]
        return found + ([] if [] in tries else [f"no alternative holds: {tries}"])
    allowed = expect.get("exit_any", [expect["exit"]] if "exit" in expect else [code])
    if code not in allowed:
        found.append(f"exit code {code}, expected {allowed}")
    found += [f"{text!r} is not mentioned" for text in expect.get("mentions", ()) if text.lower() not in output.lower()]
    found += [f"{text!r} is mentioned" for text in expect.get("must_not_mention", ()) if text in output]
    if plan is None:
        return found if code == 2 else [*found, "no plan"]
    for name, fields in expect.get("modules", {}).items():
        found += _module_problems(plan, name, fields)
    codes = [item["code"] for item in plan["findings"]]
    found += [f"{wanted} is missing" for wanted in expect.get("findings", ()) if not _reported(plan, wanted)]
    choices = expect.get("findings_any", ())
    if choices and not set(choices) & set(codes):
        found.append(f"none of {choices} is reported")
    found += [f"{name} is reported" for name in expect.get("absent", ()) if name in codes]
    legal = set(plan["summary"]["legal_tp"])
    sizes = expect.get("legal_tp", {})
    if not set(sizes.get("includes", ())) <= legal or set(sizes.get("excludes", ())) & legal:
        found.append(f"legal_tp is {sorted(legal)}, expected {sizes}")
    return found


def _module_problems(plan: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> list[str]:
    component, _, module = name.rpartition("/")
    layers = [
        layer
        for layer in plan["layers"]
        if layer["component"] == component and any(fnmatchcase(packed, module) for packed in layer["modules"])
    ]
    found = [] if layers else [f"{name} is in no layer"]
    for layer in layers:
        for key in ("stored", "declared", "status", "executes", "shape"):
            if key in fields and layer[key] != fields[key]:
                found.append(f"{name}: {key} is {layer[key]!r}, expected {fields[key]!r}")
        if layer["status"] not in fields.get("status_any", [layer["status"]]):
            found.append(f"{name}: status is {layer['status']}, expected one of {fields['status_any']}")
        if fields.get("trace_not_empty") and not layer["trace"]:
            found.append(f"{name}: the trace is empty")
    return found


def _reported(plan: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    _, _, module = wanted.get("module", "").rpartition("/")
    return any(
        item["code"] == wanted["code"]
        and wanted.get("severity", item["severity"]) == item["severity"]
        and (not module or any(fnmatchcase(name, module) for name in item["modules"]))
        for item in plan["findings"]
    )
