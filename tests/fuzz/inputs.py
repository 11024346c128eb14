"""Inputs for the fuzzers: checkpoints held in memory, and what can be done to their JSON and headers.

OMNIPLAT_FUZZ=N makes every fuzzer try N times as many inputs; OMNIPLAT_CASES names a folder of further checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from omniplat.checkpoint.tensors import DTYPE_BITS
from tests.cases.description import build, descriptions

ROOT = Path(__file__).resolve().parents[2]
TIMES = int(os.environ.get("OMNIPLAT_FUZZ", "1"))
#: Tensors of a checkpoint that is mutated: more would cost time and show nothing new.
MAX_TENSORS = 400


def profile(examples: int) -> settings:
    """Settings of one fuzzer that tries `examples` inputs, times OMNIPLAT_FUZZ."""
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )


@dataclass(frozen=True)
class Base:
    """A real checkpoint: its JSON files by name, and its shards as files to link to."""

    name: str
    files: Mapping[str, Any]
    shards: Mapping[str, Path]

    def write(self, folder: Path, texts: Mapping[str, str]) -> Path:
        """The checkpoint with the files of `texts` in place of its own."""
        for name in (*self.files, *self.shards):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(texts.get(name, json.dumps(content)), errors="surrogatepass")
        for name, path in self.shards.items():
            (folder / name).symlink_to(path)
        return folder


def read_base(folder: Path) -> Base | None:
    """None for a checkpoint without valid JSON, or that is too large."""
    files: dict[str, Any] = {}
    shards: dict[str, Path] = {}
    tensors = 0
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json" and path.name not in ("tokenizer.json", "vocab.json"):
            try:
                files[name] = json.loads(path.read_text())
            except ValueError:
                return None
        elif path.suffix == ".safetensors":
            shards[name] = path
            with path.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                tensors += opened.read(length).count(b"data_offsets") if length < 1 << 20 else MAX_TENSORS
    return (
        Base(folder.parent.name if folder.name == "checkpoint" else folder.name, files, shards)
        if files and shards and tensors <= MAX_TENSORS
        else None
    )


@cache
def bases(store: Path) -> tuple[Base, ...]:
    """The real checkpoints of the repository, and those of OMNIPLAT_CASES built below `store`."""
    folders = sorted((ROOT / "tests" / "data" / "checkpoints").glob("*/checkpoint"))
    for path in descriptions():
        build(json.loads(path.read_text()), store / path.stem)
        folders.append(store / path.stem)
    return tuple(base for folder in folders if (base := read_base(folder)) is not None)


# -- JSON ------------------------------------------------------------------------------------------

#: Numbers as text, since some are none that Python writes.
NUMBERS = st.sampled_from(["0", "-1", "1", "2", "3", "4", "7", "8", "16", "32", "100", "128", "1e9", "1e308", "1e999",
                           "-0.0", "0.5", "9" * 18, "9" * 30, "9" * 400, "NaN", "Infinity", "1e-400",
                           str(2**63)])  # fmt: skip
NAMES = st.sampled_from(["", ".", "..", "*", "a", "lm_head", "model.layers.0", "re:", "re:(a+)+$", "re:[", "re:*", "(",
                         "re:(?i)x", "re:" + "(" * 200 + ")" * 200, "\x1b[31m", "\r\n", "\u202e", "\x9b2J", "a" * 5000,
                         "weight", "to_qkv", "Linear", "default", "re:(?P<x>a)(?P=x)", "re:" + "a?" * 50 + "a" * 50,
                         "-:.*", "+:.*", "re:(x+x+)+y", "[!", "re:\\", "../../etc/passwd", "/etc/passwd", "\0", "null",
                         "int4", "fp8", "float8_e4m3fn", "mx_fp", "nvfp4", "group", "tensor", "channel", "block",
                         "static", "dynamic", "auto-round", "fp8_e4m3", "e8m0", "gemm", "gptq",
                         "torch.float16"])  # fmt: skip
KEYS = NAMES | st.sampled_from(["bits", "group_size", "data_type", "quant_method", "weights", "num_bits", "strategy",
                                "type", "targets", "ignore", "format", "quant_algo", "config_groups", "text_config",
                                "extra_config", "quantization_config", "weight_block_size", "dtype", "kv_cache_scheme",
                                "num_attention_heads", "head_dim", "model_type", "num_experts", "sym",
                                "desc_act"])  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """JSON text that is written as it is."""

    text: str


LEAVES = st.none() | st.booleans() | NUMBERS.map(Raw) | NAMES | st.text(max_size=8)
DEEP = st.integers(100, 20_000).map(lambda depth: Raw("[" * depth + "]" * depth))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
) | st.one_of(LEAVES, DEEP)  # fmt: skip


def dumps(value: Any) -> str:
    """`value` as JSON, with `Raw` as it is and lists of `Pair` as objects, whose keys may repeat."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dumps(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Repeated):
        pairs = [*value.values.items(), (value.key, value.again)]
        return "{" + ", ".join(f"{json.dumps(key)}: {dumps(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumps, value)) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class Repeated:
    """An object one of whose keys stands there twice."""

    values: Mapping[str, Any]
    key: str
    again: Any


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `path`."""
    if not path:
        return new
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], tuple(rest), new)
    return copy


@st.composite
def mutated(draw: st.DrawFn, value: Any, likely: tuple[str, ...] = ()) -> Any:
    """`value` with one to three places changed: replaced, removed, renamed, wrapped, repeated, or given more."""
    for _ in range(draw(st.integers(1, 3))):
        paths = list(places(value))
        wanted = [path for path in paths if any(key in likely for key in path)]
        path = draw(st.sampled_from(wanted if wanted and draw(st.integers(0, 9)) else paths))
        here = at(value, path)
        how = draw(st.sampled_from(["replace", "replace", "remove", "rename", "wrap", "repeat", "add", "unwrap"]))
        if isinstance(here, (Raw, Repeated)):
            how = "replace"
        new: Any
        if how == "wrap":
            new = draw(st.sampled_from([[here], {"": here}, {"default": here}, str(here)[:200]]))
        elif how == "remove" and path:
            parent = at(value, path[:-1])
            if isinstance(parent, dict):
                path, new = path[:-1], {key: inner for key, inner in parent.items() if key != path[-1]}
            else:
                path, new = path[:-1], [inner for index, inner in enumerate(parent) if index != path[-1]]
        elif how == "rename" and isinstance(here, dict) and here:
            old = draw(st.sampled_from(sorted(here)))
            new = {(draw(KEYS) if key == old else key): inner for key, inner in here.items()}
        elif how == "add" and isinstance(here, dict):
            new = {**here, draw(KEYS): draw(VALUES)}
        elif how == "add" and isinstance(here, list):
            new = [*here, draw(VALUES)]
        elif how == "repeat" and isinstance(here, dict) and here:
            new = Repeated(here, draw(st.sampled_from(sorted(here))), draw(VALUES))
        elif how == "unwrap" and isinstance(here, (dict, list)) and here:
            new = next(iter(here.values())) if isinstance(here, dict) else here[0]
        else:
            new = draw(VALUES)
        value = replaced(value, path, new)
        if isinstance(new, Repeated):
            break
    return value


# -- headers ---------------------------------------------------------------------------------------

LEAF_NAMES = ["weight", "weight_scale", "weight_packed", "weight_scale_inv", "input_scale", "weight_scale_2", "qweight",
              "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_global_scale", "bias", "W_q",
              "meta", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "SCB",
              "weight_format", "scale", "zero", "lora_down", "proj_down", "smooth_factor", "wscales", "comfy_quant",
              "scale_weight", "scale_input", "weight_offset", "deq_scale", "quant_bias", "mul_scale", "nbits", "shape",
              "weight:_data", "weight._data", "weight._scale", "_blocks", "weight_scale_1",
              "pre_quant_scale"]  # fmt: skip
MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.experts.0.up_proj",
           "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.experts", "lm_head", "transformer_blocks.0.attn",
           "model.layers.0.mlp.experts.gate_up_proj", "", "a\x1b[2Jb", "model.layers.0.self_attn.v_proj"]  # fmt: skip
DIMS = st.sampled_from([0, 1, 2, 3, 4, 16, 31, 32, 64, 128, 256, 2**31, 2**62])
SHAPES = st.lists(DIMS, max_size=4).map(tuple)
SIZED = st.lists(st.sampled_from([1, 2, 4, 16, 32, 64, 128]), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.tuples(st.sampled_from(MODULES), st.sampled_from(LEAF_NAMES)).map(lambda pair: ".".join(filter(None, pair))),
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SIZED),
    min_size=1,
    max_size=12,
).map(lambda found: {name: (dtype, shape) for name, (dtype, shape) in found.items()
                     if DTYPE_BITS[dtype] >= 8 or (shape and shape[-1] % 4 == 0)})  # fmt: skip


def write_header(path: Path, header: str | bytes, payload: int = 0, length: int | None = None) -> None:
    """A shard with this header text, a length that may lie, and zeros behind it."""
    blob = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    with path.open("wb") as file:
        file.write((len(blob) if length is None else length).to_bytes(8, "little") + blob)
        file.truncate(8 + len(blob) + payload)
