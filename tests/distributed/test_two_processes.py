"""Two processes that add up their parts with torch.distributed, against one process that holds everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed
from safetensors.torch import save_file

from omniplat.runtime.tensors import to_tensor
from tests.distributed.processes import run_ranks
from tests.support.moe import FAMILIES, INNER, Source, write

SIZE = 2
#: Scheme of a pair of linear layers -> the family whose metadata says so.
PAIRS = {"mxfp4": "qwen2", "fp8": "deepseek"}
JOBS = [
    *(("pair-tp", scheme) for scheme in PAIRS),
    *((case, family) for case in ("moe-tp", "moe-ep") for family in FAMILIES),
]

Results = dict[str, tuple[float, float]]


def write_pair(folder: Path, scheme: str) -> None:
    """A gated MLP; its 256 inner columns are cut between groups by two ranks."""
    source = Source(5)
    folder.mkdir()
    tensors = source.mlp("model.layers.0.mlp", 2 * INNER, getattr(source, scheme))
    save_file({name: to_tensor(array) for name, array in tensors.items()}, folder / "model.safetensors")
    config = FAMILIES[PAIRS[scheme]](source)[0] | {"model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Of every process: case and folder -> (distance of the sum from the whole, share of this rank)."""
    root = tmp_path_factory.mktemp("distributed")
    for scheme in PAIRS:
        write_pair(root / scheme, scheme)
    for family in FAMILIES:
        write(root / family, family, seed=2)
    jobs = json.dumps([(case, str(root / folder)) for case, folder in JOBS])
    return [json.loads(out) for out in run_ranks("tests.distributed.worker", [jobs], root, SIZE)]


def test_gloo_is_here() -> None:
    assert torch.distributed.is_available()
    assert torch.distributed.is_gloo_available()


@pytest.mark.parametrize(("case", "folder"), JOBS)
def test_parts_of_two_processes_are_the_whole(case: str, folder: str, results: list[Results]) -> None:
    assert len(results) == SIZE
    for found in results:
        distance, share = found[f"{case} {folder}"]
        assert distance <= 1e-5
        assert 0.05 < share < 0.999
