"""Checkpoints that their producers wrote, served by `vllm.LLM`: what is said is what the producers' weights say.

The repository's own checkpoints, and those of the folder that OMNIPLAT_CORPUS names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from omniplat.api import make_planned
from tests.goldens.entries import Entry, bundled, corpus
from tests.vllm.reference import Reference
from tests.vllm.serve import PROMPT, UNINSTALLED, Answer, Request, serve_all

#: Largest difference of a log probability in float32.
BOUND = 5e-5
#: Where activations are quantized, what one value that rounds the other way may make of one position.
ROUNDED = 0.1


def entries() -> list[Entry]:
    found = {entry.name: entry for entry in [*bundled(), *corpus()]}
    return [entry for entry in found.values() if _model_type(entry) in ("qwen2_moe", "qwen3", "qwen3_moe")]


def _model_type(entry: Entry) -> str:
    config = entry.checkpoint / "config.json"
    return str(json.loads(config.read_text())["model_type"]) if config.is_file() else ""


ENTRIES = entries()


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """By name and mode. Those with `off` come from a process of their own, which never registered anything."""

    def ask(*modes: str) -> dict[str, Answer]:
        # In float32 nothing but what is compared differs; vLLM's own kernels want what it is asked for usually.
        requests = [
            Request(
                f"{entry.name} {mode}",
                str(entry.checkpoint),
                mode,
                {"dtype": "float32" if mode == "all" else "bfloat16"},
            )
            for entry in ENTRIES
            for mode in modes
        ]
        return serve_all(requests, modes[0], tmp_path_factory.mktemp("served"))

    return ask("all", "gaps") | ask("off") | ask(UNINSTALLED)


@cache
def expected(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    """log p of every token at the positions that `tokens` were chosen at."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    reference = Reference(entry, make_planned(entry.checkpoint, "cpu"))
    return reference.logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]


def ids(entry: Entry) -> str:
    return entry.name


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_tokens_are_those_of_the_producers_weights(entry: Entry, answers: dict[str, Answer]) -> None:
    answer = answers[f"{entry.name} all"]
    assert answer.error == ""
    assert answer.quantization == "omniplat"
    assert {"OmniplatLinearMethod", "OmniplatMoEMethod"} & set(answer.methods.values())
    wanted = expected(entry.name, tuple(answer.tokens))
    assert list(wanted.argmax(1)) == list(answer.tokens)
    worst = np.abs(wanted - np.array(answer.logprobs)).max(1)
    plan = make_planned(entry.checkpoint, "cpu").plan
    weight_only = all(str(layer.executes).endswith("/a16") for layer in plan.layers)
    assert np.sort(worst)[-1 if weight_only else -2] <= BOUND
    assert worst.max() <= ROUNDED


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_gaps_are_what_vllm_does_not_run(entry: Entry, answers: dict[str, Answer]) -> None:
    stock, gaps, everything = (answers[f"{entry.name} {mode}"] for mode in ("off", "gaps", "all"))
    assert gaps.error == ""
    if stock.error:
        assert gaps.quantization == "omniplat"
        assert gaps.methods == everything.methods
        assert any("which vLLM does not: " in line for line in gaps.log)
    else:
        assert gaps.quantization == stock.quantization
        assert gaps.methods == stock.methods
        assert (gaps.tokens, gaps.logprobs) == (stock.tokens, stock.logprobs)
        assert [line for line in gaps.log if "leaves" in line] == gaps.log
        assert len(gaps.log) == 1


@pytest.mark.parametrize("entry", ENTRIES, ids=ids)
def test_off_leaves_no_trace(entry: Entry, answers: dict[str, Answer]) -> None:
    answer = answers[f"{entry.name} off"]
    assert answer.log == []
    assert not any("Omniplat" in method for method in answer.methods.values())
    assert "omniplat/integrations" not in answer.error
    # Nothing differs from an environment in which omniplat is not installed.
    assert replace(answers[f"{entry.name} {UNINSTALLED}"], key=answer.key, error="") == replace(answer, error="")
    assert _last_line(answers[f"{entry.name} {UNINSTALLED}"]) == _last_line(answer)


def _last_line(answer: Answer) -> str:
    """What the error says: methods that it lists come in any order."""
    return "".join(sorted(answer.error.strip().rpartition("\n")[2]))


def test_schemes_that_vllm_refuses_on_cpus_are_served(answers: dict[str, Answer]) -> None:
    stored = {
        weight
        for entry in ENTRIES
        if answers[f"{entry.name} off"].error and not answers[f"{entry.name} gaps"].error
        for weight in entry.weights.values()
    }
    assert {"mxfp4", "nvfp4", "nf4-b64"} <= stored
