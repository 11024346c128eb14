"""The four vendors' probes on machines that are described as text and folders."""

from __future__ import annotations

from pathlib import Path

import omniplat_ascend.probe as ascend
import omniplat_cuda.probe as cuda
import omniplat_rocm.probe as rocm
import omniplat_xpu.probe as xpu
import pytest

from omniplat.device import ARCHITECTURES, Device
from omniplat.errors import BackendUnavailableError

SMI = "GPU-aa11, 9.0, 143771, NVIDIA H200\nGPU-bb22, 10.0, 183359, NVIDIA B200\n"
CUDA_TORCH = {"torch": "2.13.0", "triton": ""}

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        48                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3359 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 91.1        47                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3359 / 65536         |
+===========================+===============+====================================================+
"""


def test_probes_answer_here() -> None:
    for module in (cuda, rocm, xpu, ascend):
        try:
            found = module.probe()
        except BackendUnavailableError:
            continue
        assert found.available == (not found.reason)


class TestCuda:
    def test_two_devices(self) -> None:
        found = cuda.examine(SMI, True, None, CUDA_TORCH)
        assert found.available
        assert found.devices == ("cuda:sm90", "cuda:sm100")
        assert found.found[0] == Device("cuda", "sm90", "NVIDIA H200", 143771 << 20, False, {"torch": "2.13.0"})

    @pytest.mark.parametrize(
        ("mask", "devices"),
        [("1", ("cuda:sm100",)), ("GPU-bb", ("cuda:sm100",)), ("1,0", ("cuda:sm100", "cuda:sm90")), ("", ())],
    )
    def test_mask(self, mask: str, devices: tuple[str, ...]) -> None:
        found = cuda.examine(SMI, True, mask, CUDA_TORCH)
        assert found.devices == devices
        assert found.available == bool(devices)
        assert devices or "hides every device" in found.reason

    @pytest.mark.parametrize(
        ("torch", "words"), [("2.13.0+cpu", "torch 2.13.0+cpu is not a CUDA build"), ("", "torch is not installed")]
    )
    def test_without_runtime(self, torch: str, words: str) -> None:
        found = cuda.examine(SMI, True, None, {"torch": torch})
        assert (found.available, found.installed, found.reason) == (False, False, words)
        assert found.devices

    def test_torch_builds(self) -> None:
        assert [cuda.has_cuda(text) for text in ("2.13.0", "2.13.0+cu130", "2.13.0+cpu", "2.9.0+rocm6.4", "")] == [
            True, True, False, False, False,
        ]  # fmt: skip

    def test_driver_that_does_not_answer(self) -> None:
        with pytest.raises(BackendUnavailableError, match="nvidia-smi lists none"):
            cuda.examine("", True, None, CUDA_TORCH)

    def test_no_device(self) -> None:
        found = cuda.examine("No devices were found\n", False, None, CUDA_TORCH)
        assert (found.available, found.reason) == (False, "no NVIDIA device is here")

    def test_old_device(self) -> None:
        found = cuda.examine("GPU-1, 7.0, 16160, Tesla V100\n", True, None, CUDA_TORCH)
        assert not found.available
        assert "architecture that is not supported" in found.reason


def kfd(root: Path, *targets: int) -> Path:
    for index, target in enumerate((0, *targets)):
        node = root / rocm.TOPOLOGY / str(index)
        (node / "mem_banks/0").mkdir(parents=True)
        simd = 304 if target else 0
        (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simd}\ngfx_target_version {target}\n")
        (node / "name").write_text("ip discovery\n")
        (node / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
    return root


class TestRocm:
    @pytest.mark.parametrize(
        ("number", "name"),
        [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110001, "gfx1101"), (120000, "gfx1200")],
    )
    def test_names(self, number: int, name: str) -> None:
        assert rocm.gfx_name(number) == name
        assert name in ARCHITECTURES["rocm"]

    def test_device(self, tmp_path: Path) -> None:
        found = rocm.examine(kfd(tmp_path, 90402, 90500), (None, "1"), {"torch": "2.9.0+rocm6.4", "amd-aiter": ""})
        assert (found.available, found.devices) == (True, ("rocm:gfx950",))
        assert found.found[0].memory == 206141652992

    def test_without_runtime(self, tmp_path: Path) -> None:
        found = rocm.examine(kfd(tmp_path, 90402), (None, None), {"torch": "2.13.0", "amd-aiter": ""})
        assert (found.available, found.installed) == (False, False)
        assert found.reason == "torch 2.13.0 is not a ROCm build"

    def test_other_machines(self, tmp_path: Path) -> None:
        versions = {"torch": "2.9.0+rocm6.4"}
        assert rocm.examine(tmp_path / "none", (None, None), versions).reason == "no AMD device is here"
        assert "not supported" in rocm.examine(kfd(tmp_path / "old", 90000), (None, None), versions).reason
        assert "hide every device" in rocm.examine(kfd(tmp_path / "masked", 90402), ("", None), versions).reason


def drm(root: Path, *ids: str, vendor: str = "0x8086") -> Path:
    for index, number in enumerate(ids):
        folder = root / f"sys/class/drm/renderD{128 + index}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{number}\n")
    return root


class TestXpu:
    def test_architectures(self) -> None:
        assert set(xpu.PCI_IDS) == set(ARCHITECTURES["xpu"])
        numbers = [number for ids in xpu.PCI_IDS.values() for number in ids]
        assert len(numbers) == len(set(numbers))

    def test_device(self, tmp_path: Path) -> None:
        found = xpu.examine(drm(tmp_path, "0xe20b", "0x0bd5"), None, {"torch": "2.13.0+xpu"})
        assert (found.available, found.devices) == (True, ("xpu:bmg", "xpu:pvc"))
        masked = xpu.examine(tmp_path, "1", {"torch": "2.13.0+xpu"})
        assert masked.devices == ("xpu:pvc",)

    def test_other_graphics(self, tmp_path: Path) -> None:
        versions = {"torch": "2.13.0+xpu"}
        for root in (drm(tmp_path / "a", "0x3e92"), drm(tmp_path / "b", "0xe20b", vendor="0x1002"), tmp_path / "c"):
            assert xpu.examine(root, None, versions).reason == "no supported Intel GPU is here"

    def test_without_runtime(self, tmp_path: Path) -> None:
        found = xpu.examine(drm(tmp_path, "0xe20b"), None, {"torch": "2.13.0"})
        assert (found.available, found.installed, found.reason) == (False, False, "torch 2.13.0 is not an XPU build")


class TestAscend:
    VERSIONS = {"torch-npu": "2.13.0", "torch": "2.13.0+cpu"}  # noqa: RUF012

    def test_table(self) -> None:
        assert ascend.chip_names(NPU_SMI) == ["910B3", "910B3"]

    @pytest.mark.parametrize(
        ("name", "arch"),
        [("910B3", "a2"), ("910", "a3"), ("910_9392", "a3"), ("910_9589", "a5"), ("950PR", "a5"), ("310P3", "310p")],
    )
    def test_architectures(self, name: str, arch: str) -> None:
        assert ascend.arch_of(name) == arch
        assert arch in ARCHITECTURES["npu"]

    def test_device(self) -> None:
        found = ascend.examine(2, NPU_SMI, "1", "/usr/local/Ascend/cann", self.VERSIONS)
        assert (found.available, found.devices) == (True, ("npu:a2",))
        assert found.found[0].name == "910B3"

    def test_without_cann(self) -> None:
        found = ascend.examine(2, NPU_SMI, None, "", self.VERSIONS)
        assert (found.available, found.installed) == (False, True)
        assert "CANN" in found.reason

    def test_without_torch_npu(self) -> None:
        found = ascend.examine(2, NPU_SMI, None, "", {"torch-npu": "", "torch": ""})
        assert (found.installed, found.reason) == (False, "torch-npu is not installed")

    def test_old_chip_mask_and_silence(self) -> None:
        old = NPU_SMI.replace("910B3 ", "910A  ")
        assert "not supported" in ascend.examine(2, old, None, "x", self.VERSIONS).reason
        assert "hides every device" in ascend.examine(2, NPU_SMI, "", "x", self.VERSIONS).reason
        assert ascend.examine(0, "", None, "", self.VERSIONS).reason == "no Ascend device is here"
        with pytest.raises(BackendUnavailableError, match="npu-smi lists none"):
            ascend.examine(2, "", None, "", self.VERSIONS)

    def test_cann(self, tmp_path: Path) -> None:
        assert ascend.find_cann(tmp_path, {}) == ""
        assert ascend.find_cann(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path / "gone")}) == ""
        assert ascend.find_cann(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path)}) == str(tmp_path)
        (tmp_path / "usr/local/Ascend/cann").mkdir(parents=True)
        assert ascend.find_cann(tmp_path, {}) == str(tmp_path / "usr/local/Ascend/cann")
