"""What NVIDIA's driver is asked, with a fake of it: what it does not say is unknown, never 0, and never an error."""

import os

import pytest
import torch
from fake_nvml import ANSWERS, CUDA, install

from specbench.common import environment, gpu, timing
from specbench.common.errors import SpecBenchError
from specbench.engine.device import pick_device


@pytest.fixture
def driver(monkeypatch):
    found = install(monkeypatch)
    yield found
    assert found.opened == 0, "the library was not released"


def test_a_gpu_is_described_with_its_driver_and_limits(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    found = environment.hardware(CUDA)
    assert found["device"] == "NVIDIA H100"
    assert found["gpu"] == {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": "570.86.15",
        "power_limit_w": 700,
        "max_sm_mhz": 1980,
        "max_memory_mhz": 1980,
        "set_sm_mhz": 1755,
        "memory_gib": 80,
    }
    assert "gpu" not in environment.hardware(torch.device("cpu"))


def test_energy_clock_throttling_and_other_processes_are_read(driver):
    driver.joules, driver.others = 12.5, [1, 2]
    assert gpu.state(CUDA) == gpu.State(energy_j=12.5, sm_mhz=1410, throttled=["software power cap"], others=2)
    driver.reasons = 0x1  # idle
    assert gpu.state(CUDA).throttled == []


@pytest.mark.parametrize("silent", sorted(set(ANSWERS) - {"nvmlShutdown"}))
def test_what_the_driver_does_not_say_is_unknown(silent, driver):
    driver.silent = {silent}
    described, now = gpu.description(CUDA), gpu.state(CUDA)
    everything = silent in ("nvmlInit", "nvmlDeviceGetHandleByUUID")
    assert (set(described.values()) == {"unknown"}) == everything
    assert (now == gpu.State()) == everything
    if silent == "nvmlDeviceGetTotalEnergyConsumption":
        assert now.energy_j is None and now.sm_mhz == 1410
    if silent == "nvmlDeviceGetEnforcedPowerLimit":
        assert described["power_limit_w"] == "unknown" and described["driver"] == "570.86.15"


def test_another_namespace_of_processes_hides_this_one(driver):
    assert gpu.process_bytes(CUDA) == 3 << 30
    driver.hidden = True
    assert gpu.process_bytes(CUDA) is None and gpu.state(CUDA).others is None


@pytest.mark.parametrize("silent", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses"])
def test_peak_memory_has_no_number_that_the_driver_does_not_say(silent, driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 40))
    peak = timing.PeakMemory(CUDA)
    peak.start()
    assert peak.read() == {"allocator": 5, "reserved": 8, "device": 30, "driver": 3 << 30} and peak.bytes() == 5
    driver.silent = {silent}
    assert peak.read() == {"allocator": 5, "reserved": 8, "device": 30}
    driver.silent, driver.used = set(), None
    assert "driver" not in peak.read(), "the driver knows the process, and no number"


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(None, ["built without CUDA", "install a CUDA build"]), ("13.0", ["cannot use it", "driver to one for CUDA 13.0"])],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(cuda, words, driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SpecBenchError) as error:
        pick_device("auto")
    for word in [*words, "570.86.15", "NVIDIA H100", "model.device=cpu"]:
        assert word in str(error.value)
    assert "\n" not in str(error.value) and pick_device("cpu").type == "cpu"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert pick_device("auto").type == "cpu", "hidden on purpose"


def test_without_a_gpu_the_cpu_is_taken(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.names = []
    assert pick_device("auto").type == "cpu" and gpu.visible() is None
    driver.names, driver.silent = ["NVIDIA H100"], {"nvmlInit"}
    assert pick_device("auto").type == "cpu" and gpu.visible() is None


def test_each_process_of_a_launch_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1) and os.environ["LOCAL_RANK"] == "1"
