"""Which checkpoints omniplat takes from vLLM, and why: the answer behind `override_quantization_method`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from omniplat.api import require_runnable
from omniplat.errors import OmniplatError
from omniplat.integrations.dispatch import ALL, LOGGER, METHOD, OFF, dispatch_mode
from omniplat.integrations.vllm_names import EngineLayers, installed_family
from omniplat.integrations.vllm_native import is_asking, native_config
from omniplat.integrations.vllm_plan import plan_for_engine
from omniplat.integrations.vllm_probe import ModelSurface, gap
from omniplat.planner import Planned

logger = init_logger(LOGGER)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who runs a checkpoint. `native_problem` is why vLLM does not by itself, `problem` why omniplat does not; ""
    where they do. `asked` is False where vLLM was not asked."""

    claimed: bool
    native_method: str = ""
    native_problem: str = ""
    problem: str = ""
    asked: bool = True


def claims(hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any) -> bool:
    """True where omniplat takes the checkpoint. What it leaves to vLLM, and what it takes, is logged once."""
    mode = dispatch_mode()
    if mode == OFF or is_asking():
        return False
    if user_quant is not None and user_quant != hf_quant_cfg.get("quant_method"):
        return user_quant == METHOD
    checkpoint = getattr(hf_config, "_name_or_path", "")
    if not checkpoint:
        logger.warning_once("omniplat leaves a checkpoint to vLLM: its configuration does not say where it lies")
        return False
    try:
        verdict = judge(checkpoint, hf_quant_cfg, hf_config, mode)
    except OmniplatError as error:
        logger.warning_once("omniplat leaves %s to vLLM: %s", checkpoint, error.message)
        return False
    if verdict.claimed:
        why = f", which vLLM does not: {verdict.native_problem}" if verdict.native_problem else ""
        what = f"does not run {checkpoint}: {verdict.problem}" if verdict.problem else f"runs {checkpoint}"
        logger.info_once("omniplat %s%s", what, why)
    else:
        logger.info_once("omniplat leaves %s to vLLM's own %s", checkpoint, verdict.native_method)
    return verdict.claimed


def judge(checkpoint: str, hf_quant_cfg: dict[str, Any], hf_config: Any, mode: str) -> Verdict:
    """Who runs a checkpoint in `mode` (`gaps` or `all`), and why the other does not.

    Where neither does it is omniplat's, whose error tells why. Raises OmniplatError where the checkpoint cannot be
    read or vLLM not be asked.
    """
    revision = getattr(hf_config, "_commit_hash", None)
    planned = plan_for_engine(checkpoint, revision)
    problem = problem_of(planned)
    if mode == ALL and not problem:
        return Verdict(True, asked=False)
    native = native_config(hf_quant_cfg, None, hf_config, checkpoint, revision)
    native_problem = native.problem
    if native.config is not None:
        surface = ModelSurface(hf_config, quantization=native.method)
        family = installed_family(planned.resolutions[0].component)
        native_problem = gap(planned.layers, family, native.config, surface)
    return Verdict(bool(native_problem), native.method, native_problem, problem)


def problem_of(planned: Planned, component: str = "") -> str:
    """What stands in the way of running a plan inside vLLM; "" where nothing does."""
    try:
        require_runnable(planned.plan)
        EngineLayers(planned, component, "vllm")
    except OmniplatError as error:
        return error.message
    return ""
