"""Which backend, on which device."""

from __future__ import annotations

import pytest

from omniplat import choose
from omniplat.choose import ChosenBackend, choose_backend, require_present
from omniplat.device import Device, parse_device
from omniplat.errors import BackendLoadError, BackendUnavailableError, UsageError
from omniplat.registry import probe_backend
from tests.registry.machines import Machine, backend

CUDA = backend("cuda", "cuda", "sees_cuda")
NPU = backend("ascend", "npu", "sees_npu")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds whose device nodes this machine shows; none at first."""
    kinds: list[str] = []
    monkeypatch.setattr(choose, "kinds_with_nodes", lambda: tuple(kinds))
    return kinds


def here(machine: Machine, **environ: str) -> ChosenBackend:
    return choose_backend(None, None, machine, environ)


def test_explicit_before_environment_before_automatic(nodes: list[str]) -> None:
    machine = Machine(CUDA, NPU)
    assert choose_backend(None, "ascend", machine, {"OMNIPLAT_BACKEND": "cuda"}).spec is NPU
    chosen = here(machine, OMNIPLAT_BACKEND="cuda")
    assert (chosen.spec, chosen.device.name, chosen.is_default) == (CUDA, "H200", False)
    assert "OMNIPLAT_BACKEND" in chosen.reason


def test_one_available_accelerator(nodes: list[str]) -> None:
    chosen = here(Machine(NPU, backend("xpu", "xpu", "sees_nothing")))
    assert chosen.spec is NPU
    assert chosen.device == Device("npu", "a2", described=False, versions={"torch-npu": "2.13.0"})
    assert chosen.device.versions == {"torch-npu": "2.13.0"}


def test_several_are_named(nodes: list[str]) -> None:
    with pytest.raises(UsageError, match=r"ascend \(npu:a2\)") as caught:
        here(Machine(CUDA, NPU))
    assert "cuda (cuda:sm90 (H200))" in caught.value.message
    assert caught.value.to_dict()["available"] == ["ascend", "cuda"]


def test_none_is_the_cpu_and_says_so(nodes: list[str]) -> None:
    chosen = here(Machine(backend("cuda", "cuda", "sees_nothing")))
    assert (chosen.spec.name, chosen.device.kind, chosen.is_default) == ("cpu", "cpu", True)
    assert chosen.reason == "no accelerator is available here, so the CPU"


def test_device_without_its_runtime_is_said(nodes: list[str]) -> None:
    chosen = here(Machine(backend("cuda", "cuda", "lacks_runtime")))
    assert chosen.spec.name == "cpu"
    assert "cuda:sm90 is here but not set up" in chosen.reason
    assert 'pip install "omniplat[cuda]"' in chosen.reason


def test_device_without_kernels_is_said(nodes: list[str]) -> None:
    chosen = here(Machine(backend("cuda", "cuda", "sees_cuda", kernels=0)))
    assert chosen.spec.name == "cpu"
    assert "backend cuda has no kernels yet" in chosen.reason


def test_accelerator_that_does_not_run_is_no_reason_for_the_cpu(nodes: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="CANN toolkit is not found"):
        here(Machine(backend("ascend", "npu", "does_not_run")))


@pytest.mark.parametrize(("probe", "words"), [("does_not_answer", "nvidia-smi lists none"), ("breaks", "no such file")])
def test_probe_that_fails_where_a_device_is(nodes: list[str], probe: str, words: str) -> None:
    nodes.append("cuda")
    with pytest.raises((BackendUnavailableError, BackendLoadError), match=words):
        here(Machine(backend("cuda", "cuda", probe)))


def test_probe_that_fails_where_no_device_is(nodes: list[str]) -> None:
    chosen = here(Machine(backend("cuda", "cuda", "breaks")))
    assert chosen.spec.name == "cpu"
    assert "OSError: no such file" in chosen.reason


def test_backend_that_fails_to_load_where_its_device_is(nodes: list[str]) -> None:
    nodes.append("npu")
    with pytest.raises(BackendLoadError, match="driver and runtime disagree") as caught:
        here(Machine(CUDA_ABSENT, broken=("ascend",)))
    assert isinstance(caught.value.__cause__, BackendLoadError)


def test_backend_that_fails_to_load_elsewhere_is_said(nodes: list[str]) -> None:
    chosen = here(Machine(CUDA_ABSENT, broken=("acme",)))
    assert chosen.spec.name == "cpu"
    assert "backend acme is broken" in chosen.reason


def test_broken_one_does_not_hide_a_working_accelerator(nodes: list[str]) -> None:
    nodes.append("cuda")
    assert here(Machine(CUDA, broken=("acme",))).spec is CUDA


CUDA_ABSENT = backend("cuda", "cuda", "sees_nothing")


def test_given_device(nodes: list[str]) -> None:
    device = parse_device("npu:a5")
    chosen = choose_backend(device, None, Machine(CUDA, NPU), {})
    assert (chosen.spec, chosen.device, chosen.is_default) == (NPU, device, False)


def test_given_cpu_is_for_the_cpu_backend(nodes: list[str]) -> None:
    machine = Machine(backend("toy", "cpu"))
    assert choose_backend(parse_device("cpu:avx2"), None, machine, {}).spec.name == "cpu"
    assert choose_backend(parse_device("cpu:avx2"), "toy", machine, {}).spec.name == "toy"
    assert choose_backend(None, "toy", machine, {}).device.kind == "cpu"


def test_given_device_that_the_named_backend_does_not_serve(nodes: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="it serves cuda, and the device is npu:a5"):
        choose_backend(parse_device("npu:a5"), "cuda", Machine(CUDA), {})


def test_given_device_that_several_serve(nodes: list[str]) -> None:
    with pytest.raises(UsageError, match=r"several backends are available: cuda \(cuda:sm90\), cuda2 "):
        choose_backend(parse_device("cuda"), None, Machine(backend("cuda2", "cuda"), CUDA), {})


def test_given_device_that_none_serves(nodes: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="no installed backend serves npu devices"):
        choose_backend(parse_device("npu"), None, Machine(CUDA), {})
    with pytest.raises(BackendLoadError, match="driver and runtime disagree"):
        choose_backend(parse_device("npu"), None, Machine(CUDA, broken=("ascend",)), {})


def test_named_backend_without_a_device(nodes: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="no device is here"):
        here(Machine(CUDA_ABSENT), OMNIPLAT_BACKEND="cuda")


@pytest.mark.parametrize(
    ("probe", "device", "says"),
    [
        ("sees_cuda", "cuda:sm90", ""),
        ("sees_npu", "npu:a2", ""),
        ("sees_cuda", "cuda:sm100", r"cuda:sm100 is not here, but cuda:sm90 \(H200\)"),
        ("sees_npu", "npu:a5", "npu:a5 is not here, but npu:a2"),
        ("sees_nothing", "cuda:sm90", "cuda:sm90 is not here: no device is here"),
        ("", "cuda:sm90", "declares no probe"),
        ("lacks_runtime", "cuda:sm90", "is not a CUDA build"),
        ("does_not_run", "npu:a2", "the CANN toolkit is not found"),
        ("does_not_answer", "cuda:sm90", "nvidia-smi lists none"),
    ],
)
def test_what_runs_a_plan_has_to_be_here(probe: str, device: str, says: str) -> None:
    spec, wanted = backend("b", device.partition(":")[0], probe), parse_device(device)
    if not says:
        require_present(spec, wanted)
        return
    with pytest.raises(BackendUnavailableError, match=says):
        require_present(spec, wanted)


def test_probe_of_the_wrong_type() -> None:
    with pytest.raises(BackendLoadError, match="its probe returned str"):
        probe_backend(backend("x", "cuda", "returns_no_probe"))
