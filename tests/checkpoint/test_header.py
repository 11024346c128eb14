"""Headers: what a valid one gives, and that every kind of invalid one ends in one error that names the shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniplat.checkpoint.header import MAX_HEADER_BYTES, read_header
from omniplat.checkpoint.tensors import DTYPE_BITS
from omniplat.errors import InvalidCheckpointError
from tests.support.checkpoints import write_shard


def raw_shard(path: Path, header: object, payload: int = 0) -> None:
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(blob).to_bytes(8, "little") + blob + bytes(payload))


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_tensors_in_file_order_with_absolute_offsets(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"b": ("BF16", (2, 3)), "a": ("U8", (5,))}, metadata={"format": "pt"})
    header = read_header(tmp_path, "a.safetensors")
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors] == [
        ("b", "BF16", (2, 3), 12),
        ("a", "U8", (5,), 5),
    ]
    assert header.metadata == {"format": "pt"}
    assert header.tensors[-1].end == (tmp_path / "a.safetensors").stat().st_size


def test_a_tensor_may_be_called_metadata(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"metadata": ("U8", (1,))})
    assert [t.name for t in read_header(tmp_path, "a.safetensors").tensors] == ["metadata"]


@pytest.mark.parametrize(
    ("header", "payload", "says"),
    [
        ({"t": entry("BF16", [2, 2], 0, 6)}, 6, "do not hold"),
        ({"t": entry("BF17", [2], 0, 4)}, 4, "BF17"),
        ({"t": entry("U8", [-1], 0, 1)}, 1, "negative"),
        ({"t": entry("U8", [4], 0, 4)}, 3, "truncated"),
        ({"t": entry("U8", [4], 0, 4)}, 9, "describes"),
        ({"t": entry("U8", [4], 4, 8)}, 8, "hole"),
        ({"t": entry("U8", [4], 0, 4), "u": entry("U8", [4], 2, 6)}, 6, "overlaps"),
        ({"t": entry("U8", [4], 4, 0)}, 8, "do not hold"),
        ({"t": {"dtype": "U8", "shape": [1]}}, 1, "do not hold"),
        ({"t": {"dtype": 3, "shape": [1], "data_offsets": [0, 1]}}, 1, "not valid"),
        ([1, 2], 0, "not valid"),
        (b"{not json", 0, "not valid"),
        (b'{"a": "\xff"}', 0, "not valid"),
        (b"[" * 5000, 0, "not valid"),
    ],
)
def test_a_broken_header_is_refused_by_name(tmp_path: Path, header: object, payload: int, says: str) -> None:
    raw_shard(tmp_path / "broken.safetensors", header, payload)
    with pytest.raises(InvalidCheckpointError) as caught:
        read_header(tmp_path, "broken.safetensors")
    assert caught.value.file == "broken.safetensors"
    assert says in caught.value.problem


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_room_for_a_header(tmp_path: Path, size: int) -> None:
    (tmp_path / "s.safetensors").write_bytes(bytes(size))
    with pytest.raises(InvalidCheckpointError, match="too short"):
        read_header(tmp_path, "s.safetensors")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_absurd_length_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    (tmp_path / "s.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidCheckpointError, match="limit"):
        read_header(tmp_path, "s.safetensors")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match="cannot be read"):
        read_header(tmp_path, "none.safetensors")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(k for k in DTYPE_BITS if DTYPE_BITS[k] >= 8)),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=5,
    ),
    cut=st.integers(0, 400),
    junk=st.binary(max_size=12),
)
def test_any_bytes_end_in_a_header_or_in_one_error(tmp_path: Path, tensors: dict, cut: int, junk: bytes) -> None:
    path = tmp_path / "f.safetensors"
    write_shard(path, {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()})
    blob = path.read_bytes()
    assert {t.name for t in read_header(tmp_path, path.name).tensors} == set(tensors)
    place = min(cut, len(blob))
    path.write_bytes(blob[:place] + junk + blob[place + len(junk) :])
    error = _error_of(tmp_path, path.name)
    assert error is None or error.file == path.name


def _error_of(root: Path, shard: str) -> InvalidCheckpointError | None:
    try:
        read_header(root, shard)
    except InvalidCheckpointError as error:
        return error
    return None
