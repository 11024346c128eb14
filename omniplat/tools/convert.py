"""Writing the dequantized checkpoint: the same names, shards and index, weights in bf16 or f32.

Others check numerics with the result, so it is exact: weights are dequantized by the oracle in float64 and rounded
once. `pre_scale` (AWQ's and SmoothQuant's smoothing, y = (x * s) W^T) is folded into the columns of the weight.
Every tensor that is no part of a quantized weight is copied byte for byte, biases too. Rows stay in the order in
which the checkpoint has them. Activation quantization is not part of the result.

Whatever the size of a shard, no more than one module's stored tensors and a few megabytes are held.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from uuid import uuid4

import ml_dtypes
import numpy as np

from omniplat.canonical import ROW_ROLES, Array, CanonicalWeight
from omniplat.checkpoint.folder import METADATA_FILES, Checkpoint, Component, read_json
from omniplat.checkpoint.header import read_header
from omniplat.checkpoint.modules import split_name
from omniplat.checkpoint.reader import ShardReader
from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError, UsageError
from omniplat.formats.resolved import ResolvedModule
from omniplat.oracle import dequantize
from omniplat.oracle.linear import untransformed
from omniplat.reading import TensorReader, read_canonical
from omniplat.roworder import AS_IS

#: Output dtype -> safetensors dtype and bytes per element.
DTYPES: dict[str, tuple[str, int]] = {"bf16": ("BF16", 2), "f32": ("F32", 4)}

#: Files that describe the quantization, left out of the result.
DROPPED_FILES = frozenset({*METADATA_FILES, "recipe.yaml"})
#: Keys of config.json that describe the quantization, at any depth.
DROPPED_KEYS = frozenset({"quantization_config", "compression_config"})

_INDEX = ".safetensors.index.json"
_CHUNK = 8 << 20
_BYTES_OF = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4}


class ResolvedPart(Protocol):
    """One component and its resolved modules; `omniplat.formats.resolve.Resolution` is one."""

    @property
    def component(self) -> Component: ...

    @property
    def modules(self) -> Sequence[ResolvedModule]: ...


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `bytes_read` and `bytes_written` count tensor data of the converted shards."""

    destination: Path
    dtype: str
    modules: int
    shards: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor of the result: a copy of `source`, or the dequantized weight of `module`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: TensorInfo | None = None
    module: ResolvedModule | None = None


def convert(
    checkpoint: Checkpoint,
    parts: Sequence[ResolvedPart],
    destination: Path,
    dtype: str,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write `checkpoint` dequantized to `dtype` ("bf16" or "f32") as the new folder `destination`.

    `parts` are the components to dequantize; the rest is copied. `progress` is called with bytes written so far
    and bytes in all. A stacked module keeps its layout, [E, N, K] in canonical orientation.

    Raises UsageError for an unknown dtype, a destination that exists and is not empty or lies in the checkpoint,
    and when writing fails; InvalidCheckpointError for a module that cannot be dequantized. After an error nothing
    is left behind.
    """
    if dtype not in DTYPES:
        raise UsageError(f"cannot convert to {dtype!r}; known: {', '.join(DTYPES)}")
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    destination = _checked_destination(destination, root)
    plan = {shard: _outputs(root, shard, part, dtype) for part in parts for shard in part.component.shards}
    work = _Progress(sum(o.nbytes for outputs in plan.values() for o in outputs), progress)

    temporary = destination.parent / f".{destination.name}.{uuid4().hex[:8]}.partial"
    try:
        temporary.mkdir(parents=True)
        for part in parts:
            reader = ShardReader(root)
            for shard in part.component.shards:
                _write_shard(root, shard, temporary / target_name(shard), plan[shard], reader, dtype, work)
            _write_indexes(root, part.component, plan, temporary)
            _write_config(root, part.component, temporary)
        if checkpoint.path.is_dir():
            _copy_others(root, parts, set(plan), temporary)
        if destination.exists():
            destination.rmdir()
        temporary.rename(destination)
    except OSError as exc:
        raise UsageError(
            f"{destination} cannot be written: {exc.filename or destination}: {exc.strerror or exc}"
        ) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    modules = sum(output.module is not None for outputs in plan.values() for output in outputs)
    read = sum(info.nbytes for part in parts for info in part.component.tensors.values())
    return Converted(destination, dtype, modules, len(plan), read, work.total)


class _Progress:
    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self.total = total
        self._done = 0
        self._report = report

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None:
            self._report(self._done, self.total)


def _checked_destination(destination: Path, root: Path) -> Path:
    destination = Path(os.path.abspath(destination))
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} exists and is not a folder")
    source = root.resolve()
    if source == destination.resolve() or source in destination.resolve().parents:
        raise UsageError(f"{destination} lies inside the checkpoint that would be read")
    if destination.is_dir() and any(destination.iterdir()):
        raise UsageError(f"{destination} exists and is not empty")
    return destination


# --- what goes into a shard --------------------------------------------------------------------------------------


def weight_name(module: ResolvedModule) -> str:
    """The name of a module's weight in an unquantized checkpoint. Stacked experts are bare parameters."""
    codes = module.tensors["codes"].name
    return module.name if module.experts and codes != f"{module.name}.weight" else f"{module.name}.weight"


def target_name(shard: str) -> str:
    """The file that takes the place of `shard`: always safetensors."""
    return f"{shard.removesuffix('.gguf')}.safetensors" if shard.endswith(".gguf") else shard


def _outputs(root: Path, shard: str, part: ResolvedPart, dtype: str) -> list[_Output]:
    """The tensors of the shard that takes the place of `shard`."""
    kind, width = DTYPES[dtype]
    quantized: dict[str, ResolvedModule] = {}
    dequantized: set[str] = set()
    consumed: set[str] = set()
    for module in part.modules:
        if module.scheme.is_unquantized:
            continue
        if module.status in ("invalid", "unsupported") or "codes" not in module.tensors:
            problem = "; ".join(module.problems) or "its tensors and metadata contradict each other"
            raise InvalidCheckpointError(f"cannot be dequantized: {problem}", file=shard, key=module.name)
        consumed |= {info.name for role, info in module.tensors.items() if role != "bias"}
        if module.scheme.weight.element == "bf16":
            consumed.discard(module.tensors["codes"].name)
        else:
            quantized[module.tensors["codes"].name] = module
            dequantized.add(module.name)
    outputs = []
    for info in read_header(root, shard).tensors:
        found = quantized.get(info.name)
        if found is not None:
            lead = (found.experts,) if found.experts else ()
            shape = (*lead, found.out_features, found.in_features)
            size = int(np.prod(shape)) * width
            outputs.append(_Output(weight_name(found), kind, shape, size, module=found))
        elif info.name not in consumed and not _describes(info, dequantized):
            outputs.append(_Output(info.name, info.dtype, info.shape, info.nbytes, source=info))
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise InvalidCheckpointError("would be written twice", file=shard, key=double)
    # Widest elements first, as the safetensors library writes them: every tensor then starts aligned.
    return sorted(outputs, key=lambda o: (-_BYTES_OF.get(o.dtype, 2 if "16" in o.dtype else 1), o.name))


def _describes(info: TensorInfo, modules: Collection[str]) -> bool:
    """True for what lies beside the weight of one of `modules` and, in no role of it, tells how it was quantized:
    bitsandbytes' state and tables, scales of inputs or outputs that nothing asks for."""
    owner, leaf = split_name(info)
    return owner in modules and leaf != "bias"


def _write_shard(
    root: Path, shard: str, path: Path, outputs: Sequence[_Output], reader: ShardReader, dtype: str, work: _Progress
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {k: v for k, v in read_header(root, shard).metadata.items() if "quantization" not in k}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for output in outputs:
        span = [end, end + output.nbytes]
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": span}
        end = span[1]
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb") as target, (root / shard).open("rb") as source:
        target.write(len(blob).to_bytes(8, "little") + blob)
        for output in outputs:
            if output.source is not None:
                _copy_bytes(source, output.source, target, work)
            elif output.module is not None:
                for rows in dequantized_rows(output.module, reader):
                    data = round_to(rows, dtype)
                    target.write(data.tobytes())
                    work.add(data.nbytes)


def _copy_bytes(source: BinaryIO, info: TensorInfo, target: BinaryIO, work: _Progress) -> None:
    source.seek(info.start)
    left = info.nbytes
    while left:
        chunk = source.read(min(left, _CHUNK))
        if not chunk:
            raise InvalidCheckpointError("the file is shorter than its header says", file=info.shard, key=info.name)
        target.write(chunk)
        work.add(len(chunk))
        left -= len(chunk)


# --- numbers -----------------------------------------------------------------------------------------------------


def dequantized_rows(module: ResolvedModule, reader: TensorReader) -> Iterator[Array]:
    """The weight of `module` in float64, a few rows at a time, in the order of the checkpoint; experts in turn."""
    for expert in range(module.experts) if module.experts else (None,):
        weight = read_canonical(module, reader, AS_IS, expert=expert)
        pre_scale = weight.tensors.get("pre_scale")
        unit = weight.scheme.weight.block[0] if weight.scheme.weight.granularity == "block" else 1
        step = max(unit, _CHUNK // 8 // max(weight.in_features, 1) // unit * unit)
        for start in range(0, weight.out_features, step):
            values = dequantize(_rows(weight, start, min(start + step, weight.out_features), unit))
            values = untransformed(values, weight)
            yield values if pre_scale is None else values * pre_scale.astype(np.float64)


def _rows(weight: CanonicalWeight, start: int, stop: int, unit: int) -> CanonicalWeight:
    """Rows start..stop as a weight; `unit` is the height of a block of scales, and divides `start`."""
    tensors = dict(weight.tensors)
    for role in ROW_ROLES:
        if role in tensors:
            height = unit if role == "scale" else 1
            tensors[role] = tensors[role][start // height : -(-stop // height)]
    return replace(weight, out_features=stop - start, tensors=tensors)


def round_to(values: Array, dtype: str) -> Array:
    """float64 to "f32" or "bf16", rounding once, to nearest even.

    NumPy would go through float32 on the way to bf16 and round twice; so float32 is rounded to odd in between.
    """
    narrow = values.astype(np.float32)
    if dtype == "f32":
        return narrow
    wide = narrow.astype(np.float64)
    inexact = (wide != values) & np.isfinite(wide)
    bits = narrow.view(np.uint32)
    bits -= inexact & (np.abs(wide) > np.abs(values))
    bits |= inexact
    return bits.view(np.float32).astype(ml_dtypes.bfloat16)


# --- the other files ---------------------------------------------------------------------------------------------


def _folder_of(component: Component) -> str:
    return f"{component.name}/" if component.name else ""


def _index_files(root: Path, component: Component) -> list[str]:
    folder = _folder_of(component)
    return [folder + name for name in sorted(os.listdir(root / folder)) if name.endswith(_INDEX)]


def _write_indexes(root: Path, component: Component, plan: Mapping[str, Sequence[_Output]], temporary: Path) -> None:
    """Every index of the component that lists a converted shard, with the new names and sizes."""
    folder = _folder_of(component)
    for index in _index_files(root, component):
        content = dict(read_json(root, index))
        listed = dict.fromkeys(content.get("weight_map", {}).values())
        if not any(folder + shard in plan for shard in listed):
            continue
        outputs = {shard: plan.get(folder + shard, ()) for shard in listed}
        content["weight_map"] = {o.name: shard for shard, held in outputs.items() for o in held}
        size = sum(o.nbytes for held in outputs.values() for o in held)
        content["metadata"] = {**content.get("metadata", {}), "total_size": size}
        _write_json(temporary / index, content)


def _write_config(root: Path, component: Component, temporary: Path) -> None:
    if component.config and (root / component.config_file).is_file():
        _write_json(temporary / component.config_file, _without_quantization(read_json(root, component.config_file)))


def _without_quantization(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_quantization(v) for k, v in value.items() if k not in DROPPED_KEYS}
    return [_without_quantization(v) for v in value] if isinstance(value, list) else value


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_others(root: Path, parts: Sequence[ResolvedPart], shards: set[str], temporary: Path) -> None:
    """Everything else in the folder; hidden files and folders (caches) are left out."""
    folders = {_folder_of(part.component) for part in parts}
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        folder = Path(directory).relative_to(root).as_posix()
        prefix = "" if folder == "." else f"{folder}/"
        for name in sorted(files):
            file = prefix + name
            target = temporary / file
            if name.startswith(".") or file in shards or target.exists():
                continue
            dropped = name in DROPPED_FILES or name.startswith("quant_model_description")
            if dropped and prefix in folders | {""}:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, target)
