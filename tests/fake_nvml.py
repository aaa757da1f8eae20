"""A fake of NVIDIA's driver and of torch's view of one GPU, for machines without one."""

import os
from types import SimpleNamespace

import pynvml
import torch

from specbench.common import gpu

CUDA = torch.device("cuda", 0)


class Driver:
    """Answers as NVML does. `silent`: functions that are refused; `others`: ids of processes besides this one."""

    def __init__(self):
        self.silent, self.others, self.hidden = set(), [4711], False
        self.joules, self.reasons, self.names = 0.0, 0x4 | 0x1, ["NVIDIA H100"]
        self.used, self.opened = 3 << 30, 0

    def answer(self, name, value):
        def asked(*_):
            if name in self.silent:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value()

        return asked

    @property
    def processes(self):
        own = [] if self.hidden else [os.getpid()]
        return [SimpleNamespace(pid=pid, usedGpuMemory=self.used) for pid in [*self.others, *own]]

    def count(self, step):
        self.opened += step


ANSWERS = {
    "nvmlInit": lambda driver: driver.count(1),
    "nvmlShutdown": lambda driver: driver.count(-1),
    "nvmlSystemGetDriverVersion": lambda _: "570.86.15",
    "nvmlDeviceGetCount": lambda driver: len(driver.names),
    "nvmlDeviceGetHandleByIndex": lambda _: "gpu",
    "nvmlDeviceGetHandleByUUID": lambda _: "gpu",
    "nvmlDeviceGetName": lambda driver: driver.names[0],
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
    "nvmlDeviceGetMaxClockInfo": lambda _: 1980,
    "nvmlDeviceGetApplicationsClock": lambda _: 1755,
    "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 << 30),
    "nvmlDeviceGetTotalEnergyConsumption": lambda driver: int(driver.joules * 1000),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda driver: driver.reasons,
    "nvmlDeviceGetClockInfo": lambda _: 1410,
    "nvmlDeviceGetComputeRunningProcesses": lambda driver: driver.processes,
}


def install(monkeypatch) -> Driver:
    """Put the fake in NVML's place."""
    driver = Driver()
    for name, value in ANSWERS.items():
        monkeypatch.setattr(gpu.pynvml, name, driver.answer(name, lambda value=value: value(driver)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="c0ffee"))
    return driver
