"""A repository of the Hub works where a folder does, and costs headers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniplat.api import make_planned
from omniplat.checkpoint.folder import Checkpoint, open_checkpoint
from omniplat.checkpoint.hub import FIRST_BYTES, HubRepository, is_hub_id, open_named
from omniplat.checkpoint.hub_http import Limits
from omniplat.errors import InvalidCheckpointError, UsageError
from tests.hub.conftest import Serve
from tests.hub.server import COMMIT, Behaviour
from tests.support.checkpoints import bf16, fp8_tensor, mxfp8, write_checkpoint, write_shard

CONFIG = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}


def dense(layers: int, hidden: int = 64) -> dict[str, Any]:
    """Attention blocks in FP8 with static input scales, which planning reads to know what may be fused."""
    tensors: dict[str, Any] = {"lm_head.weight": bf16(32, hidden)}
    for layer in range(layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= fp8_tensor(f"model.layers.{layer}.self_attn.{part}", hidden, hidden)
    return tensors


def traffic(opened: Checkpoint) -> tuple[int, int]:
    """(requests, bytes) so far."""
    source = opened.components[0].source
    assert isinstance(source, HubRepository)
    return source.client.requests, source.client.transferred


def document(checkpoint: Checkpoint) -> dict[str, Any]:
    plan = make_planned(checkpoint, "cpu").plan.to_dict()
    del plan["checkpoint"]
    return plan


def test_the_plan_is_that_of_the_folder(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(3), shards=3)
    serve(folder)
    opened = open_named("org/model")
    assert opened.revision == COMMIT
    assert str(opened.path) == "org/model"
    assert document(opened) == document(open_checkpoint(folder))


def test_a_pipeline(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "files"
    index = {"transformer": ["diffusers", "T"], "transformer_2": ["diffusers", "T"], "vae": [None, None]}
    for name in ("transformer", "transformer_2"):
        write_checkpoint(folder / name, CONFIG, dense(1))
    (folder / "model_index.json").write_text(json.dumps(index))
    serve(folder)
    opened = open_named("org/model", "main")
    assert [item.name for item in opened.components] == ["transformer", "transformer_2"]
    assert opened.absent_components == ("vae",)
    assert document(opened) == document(open_checkpoint(folder))


def test_a_revision_with_a_slash(tmp_path: Path, serve: Serve) -> None:
    hub = serve(write_checkpoint(tmp_path / "files", CONFIG, dense(1)))
    assert open_named("org/model", "refs/pr/1").revision == COMMIT
    assert hub.asked[0][0] == "/api/models/org/model/revision/refs/pr/1"


def test_a_header_longer_than_the_first_piece(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(200))
    assert int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little") > FIRST_BYTES
    serve(folder)
    assert set(open_named("org/model").components[0].tensors) == set(dense(200))


def test_files_lie_on_another_host_that_gets_no_token(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(2), shards=2)
    hub = serve(folder, Behaviour(redirect=True))
    assert document(open_named("org/model")) == document(open_checkpoint(folder))
    tokens = {path.startswith("/cdn/"): headers.get("authorization", headers.get("Authorization"))
              for path, headers in hub.asked}  # fmt: skip
    assert tokens == {True: None, False: "Bearer hf_secret"}


def test_small_tensors_are_read_for_all_blocks_at_once(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(20))
    serve(folder)
    opened = open_named("org/model")
    before, _ = traffic(opened)
    component = opened.components[0]
    values = {component.read_small(t) for n, t in component.tensors.items() if n.endswith("q_proj.input_scale")}
    after, _ = traffic(opened)
    assert values == {bytes(4)}
    assert after - before <= 20
    component.read_small(component.tensors["model.layers.7.self_attn.q_proj.input_scale"])
    assert traffic(opened)[0] == after


def test_neighbours_are_one_request(tmp_path: Path, serve: Serve) -> None:
    tensors = {f"blocks.{i}.shape": ("I64", (2,)) for i in range(50)}
    values = {f"blocks.{i}.shape": i.to_bytes(8, "little") * 2 for i in range(50)}
    serve(write_checkpoint(tmp_path / "files", {}, {**tensors, "big.weight": ("U8", (1 << 17,))}, values=values))
    opened = open_named("org/model")
    before, _ = traffic(opened)
    component = opened.components[0]
    assert {n: component.read_small(component.tensors[n]) for n in tensors} == values
    assert traffic(opened)[0] - before == 1


def test_too_many_small_tensors_that_lie_apart(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniplat.checkpoint.hub.MAX_TENSOR_READS", 3)
    serve(write_checkpoint(tmp_path / "files", CONFIG, dense(5, 128)))
    component = open_named("org/model").components[0]
    with pytest.raises(InvalidCheckpointError, match="hf download org/model"):
        component.read_small(component.tensors["model.layers.0.self_attn.q_proj.input_scale"])


def test_a_second_plan_of_a_commit_asks_for_nothing(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(3), shards=3)
    hub = serve(folder)
    first = document(open_named("org/model", COMMIT))
    asked = len(hub.asked)
    assert document(open_named("org/model", COMMIT)) == first
    assert len(hub.asked) == asked
    assert document(open_named("org/model")) == first
    assert [path for path, _ in hub.asked[asked:]] == ["/api/models/org/model"]


def test_what_huggingface_hub_has_downloaded_is_not_fetched(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(1))
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    hub = serve(folder)
    assert document(open_named("org/model")) == document(open_checkpoint(folder))
    assert [path for path, _ in hub.asked] == ["/api/models/org/model"]


def test_offline_a_snapshot_is_read_and_nothing_is_asked(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(1))
    hub = serve(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidCheckpointError, match="no such folder, HF_HUB_OFFLINE is set"):
        open_named("org/model")
    snapshots = tmp_path / "cache" / "models--org--model"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text(COMMIT)
    (snapshots / "snapshots").mkdir()
    folder.rename(snapshots / "snapshots" / COMMIT)
    assert open_named("org/model").components[0].tensors
    assert hub.asked == []


def test_a_checkpoint_of_150_gb_in_60_shards_costs_less_than_20_mb(tmp_path: Path, serve: Serve) -> None:
    tensors: dict[str, Any] = {}
    for layer in range(32):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= mxfp8(f"model.layers.{layer}.self_attn.{part}", 4096, 4096)
        for expert in range(64):
            base = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= mxfp8(f"{base}.gate_proj", 5760, 4096) | mxfp8(f"{base}.up_proj", 5760, 4096)
            tensors |= mxfp8(f"{base}.down_proj", 4096, 5760)
    quantization = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    folder = write_checkpoint(
        tmp_path / "files", {"model_type": "llama", "quantization_config": quantization}, tensors, shards=60
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 145e9
    hub = serve(folder)
    opened = open_named("org/model")
    assert document(opened) == document(open_checkpoint(folder))
    assert traffic(opened)[1] <= hub.sent < 20e6


def test_only_what_looks_like_an_id_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert is_hub_id("org/model")
    assert is_hub_id("Org-1/Model_2.5-FP8")
    for text in ("org/here", "model", "a/b/c", "./a/b", "../b", "/a/b", "a/", "/b", "a b/c", "a/..", "a/.b", "a//b",
                 "a/b.safetensors", "a/model.gguf", "a/config.json", "a/b\n", "ä/b", ""):  # fmt: skip
        assert not is_hub_id(text), text
    assert not is_hub_id(Path("org/model"))


def test_a_path_that_exists_wins(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "org" / "model", CONFIG, dense(1))
    hub = serve(folder)
    assert open_named("org/model").path == Path("org/model")
    assert open_named("org/model").revision == ""
    assert hub.asked == []


def test_a_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only repositories of the Hub have revisions"):
        open_named(tmp_path, "main")
    with pytest.raises(UsageError, match="is a path"):
        open_named(str(tmp_path / "nowhere"), "main")


def test_links_and_odd_names_in_a_listing(tmp_path: Path, serve: Serve) -> None:
    for name in ("../x", "/etc/x", "a//b", "a/./b", ""):
        listing = {"sha": COMMIT, "siblings": [{"rfilename": name, "size": 1}]}
        serve(tmp_path, Behaviour(listing=json.dumps(listing).encode()))
        with pytest.raises(InvalidCheckpointError, match="lists a file"):
            open_named("org/model", None, Limits(attempts=1))


def test_a_shard_that_the_listing_lacks(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(2), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    serve(folder)
    with pytest.raises(InvalidCheckpointError, match="does not exist"):
        open_named("org/model")


def test_one_broken_shard_among_many(tmp_path: Path, serve: Serve) -> None:
    folder = write_checkpoint(tmp_path / "files", CONFIG, dense(8), shards=8)
    write_shard(folder / "model-00003-of-00008.safetensors", {"x.weight": bf16(2, 2)})
    blob = (folder / "model-00003-of-00008.safetensors").read_bytes()
    (folder / "model-00003-of-00008.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + blob[8:])
    serve(folder)
    with pytest.raises(InvalidCheckpointError, match="header length") as caught:
        open_named("org/model")
    assert caught.value.file == "model-00003-of-00008.safetensors"
