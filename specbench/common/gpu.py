"""What NVIDIA's driver says of a GPU, by its management library (NVML). Without a GPU it is `UNKNOWN`.

The library is loaded for each question and released after it, so that no handle outlives a change of the driver.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pynvml

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
UNKNOWN = "unknown"  # where the driver, or its permissions here, do not say
# Why clocks are below what the GPU was asked for; NVML's bits.
THROTTLE = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@contextmanager
def _nvml() -> Iterator[None]:
    """Inside, NVML may be called. Raises `pynvml.NVMLError` without a driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _handle(device: "torch.device") -> Any:
    """NVML's handle of a device of torch's, by UUID: `CUDA_VISIBLE_DEVICES` renumbers."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _said(ask: Callable[[], T]) -> T | None:
    """The answer; None where this GPU or this user gets none."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def visible() -> tuple[str, list[str]] | None:
    """The driver's version and the names of its GPUs; None without a driver or a GPU."""
    try:
        with _nvml():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
            return (pynvml.nvmlSystemGetDriverVersion(), names) if names else None
    except pynvml.NVMLError:
        return None


def process_bytes(device: "torch.device") -> int | None:
    """This process's memory as the driver counts it, the CUDA context included.

    None where the driver does not say: it knows no number, or this process by another id (a PID namespace).
    """
    try:
        with _nvml():
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(device))
    except pynvml.NVMLError:
        return None
    return next((int(p.usedGpuMemory) for p in running if p.pid == os.getpid() and p.usedGpuMemory), None)


def description(device: "torch.device") -> dict[str, Any]:
    """Driver and limits of a GPU, as headers of blocks describe it. Watts, MHz, GiB."""
    asked: dict[str, Callable[[Any], Any]] = {
        "driver": lambda _: pynvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "max_sm_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "max_memory_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "set_sm_mhz": lambda gpu: pynvml.nvmlDeviceGetApplicationsClock(gpu, pynvml.NVML_CLOCK_SM),
        "memory_gib": lambda gpu: round(pynvml.nvmlDeviceGetMemoryInfo(gpu).total / 2**30, 1),
    }
    try:
        with _nvml():
            gpu = _handle(device)
            found = {name: _said(lambda ask=ask: ask(gpu)) for name, ask in asked.items()}  # type: ignore[misc]
    except pynvml.NVMLError:
        found = dict.fromkeys(asked)
    return {name: UNKNOWN if value is None else value for name, value in found.items()}


@dataclass(frozen=True)
class State:
    """A GPU at a moment; None where the driver does not say.

    Attributes:
        energy_j: that it has used since the driver was loaded. sm_mhz: clock of its multiprocessors.
        throttled: why clocks are lowered. others: processes with a context on it besides this one.
    """

    energy_j: float | None = None
    sm_mhz: int | None = None
    throttled: list[str] | None = None
    others: int | None = None


def state(device: "torch.device") -> State:
    """The state now. It takes a few milliseconds, so it belongs outside of what is timed."""
    try:
        with _nvml():
            gpu = _handle(device)
            energy = _said(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu))  # mJ
            reasons = _said(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
            running = _said(lambda: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)])
            return State(
                energy_j=None if energy is None else energy / 1000,
                sm_mhz=_said(lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
                throttled=None if reasons is None else [name for bit, name in THROTTLE.items() if reasons & bit],
                others=None if running is None or os.getpid() not in running else len(running) - 1,
            )
    except pynvml.NVMLError:
        return State()


class Meter:
    """What a GPU did since `start`."""

    def __init__(self, device: "torch.device"):
        self.device = device if device.type == "cuda" else None

    def start(self) -> None:
        self.begin = State() if self.device is None else state(self.device)

    def read(self) -> State | None:
        """The state now, with the energy used since; None off a GPU."""
        if self.device is None:
            return None
        now = state(self.device)
        known = now.energy_j is not None and self.begin.energy_j is not None
        return replace(now, energy_j=now.energy_j - self.begin.energy_j if known else None)  # type: ignore[operator]
