"""`omniplat info --vllm --checkpoint` of what vLLM itself does not read: vllm-omni's models, and what is no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniplat.cli.vllm_info import vllm_info
from omniplat.errors import UsageError
from omniplat.integrations.dispatch import MODES, VARIABLE
from omniplat.integrations.vllm_info import collect_vllm_info
from tests.vllm.pipelines import write_pipeline
from tests.vllm.quantized_pipelines import in_blocks, quantize, quantize_as_modelopt

EXAMPLE = Path(__file__).parents[2] / "examples" / "hunyuan-image3-mxfp4-mxfp8" / "checkpoint"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("info")
    made = {name: write_pipeline(folder / name) for name in ("plain", "mxfp8", "modelopt", "modelopt everywhere")}
    quantize(made["mxfp8"] / "transformer", in_blocks)
    quantize_as_modelopt(made["modelopt"] / "transformer", "FP8")
    quantize_as_modelopt(made["modelopt everywhere"] / "transformer", "FP8", lambda name: True)
    (folder / "empty").mkdir()
    return {**made, "hunyuan": EXAMPLE, "missing": folder / "missing", "empty": folder / "empty"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "refused"),
    [("mxfp8", ""), ("modelopt", ""), ("modelopt everywhere", "vllm-omni builds img_in"), ("hunyuan", "")],
)
def test_who_runs_a_model_of_vllm_omni(
    name: str, refused: str, mode: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    report = collect_vllm_info(str(checkpoints[name])).checkpoint
    assert report is not None
    assert report.engine == "vllm-omni"
    if mode == "off":
        assert (report.runs, report.problem, report.engine_problem) == ("vllm-omni", "", "")
        return
    assert report.runs == ("nobody" if refused else "omniplat")
    assert refused in report.problem
    assert bool(report.problem) == bool(refused)
    # In `all` vllm-omni is asked about what omniplat refuses only.
    assert bool(report.engine_problem) == (mode == "gaps" or bool(refused))


@pytest.mark.parametrize("mode", ["gaps", "off"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("plain", "nothing of .* is quantized"), ("missing", "no such file or folder"), ("empty", "safetensors")],
)
def test_what_nobody_could_run_is_an_error_with_both_reasons(
    name: str, reason: str, mode: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match=rf"{reason}.*vLLM says: \w+Error: "):
        collect_vllm_info(str(checkpoints[name]))


def test_the_command_names_the_engine(checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert vllm_info(str(checkpoints["mxfp8"]), json_output=False) == 0
    printed = capfd.readouterr().out
    assert "run by omniplat" in printed
    assert "vllm-omni does not run it: transformer_blocks" in printed
