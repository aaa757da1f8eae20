"""Clock, peak memory, and what machine and software this is. Knows no drafter."""

import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CGROUPS = Path("/sys/fs/cgroup")
LIMIT, OLD_LIMIT = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


class Clock:
    """Seconds, after everything issued so far has run: on a GPU each reading waits for the device."""

    def __init__(self, device: torch.device):
        self.cuda = device if device.type == "cuda" else None

    def __call__(self) -> float:
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)
        return time.perf_counter()


class Others:
    """How many cores other processes kept busy, on average since `start`: what makes a timing worthless."""

    def start(self) -> None:
        self.begin = self._now()

    def read(self) -> float | None:
        """Cores; None where the kernel does not tell (`/proc/stat`)."""
        if self.begin is None or (now := self._now()) is None:
            return None
        seconds, busy, own = (b - a for a, b in zip(self.begin, now, strict=True))
        return round(max(0.0, busy - own) / seconds, 2) if seconds > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds on the clock, of all processors' work, of this process's and its dead children's."""
        try:
            ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
            idle = ticks[3] + ticks[4]
            own = os.times()
            busy = (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")
            return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system
        except (OSError, ValueError, IndexError):  # not Linux
            return None


class PeakMemory:
    """Peak memory since `start`. On a GPU the allocator's peak and the driver's view; else the peak resident set.

    Where the kernel cannot reset a process's peak (`/proc/self/clear_refs`), the peak is that of the whole process so
    far, which the result then says.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def start(self) -> None:
        self.reset = True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.reset = False

    def read(self) -> dict[str, int | bool]:
        """Bytes by source."""
        if self.device.type == "cuda":
            return {"allocator": torch.cuda.max_memory_allocated(self.device), "driver": _driver_bytes(self.device)}
        try:
            line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
            return {"resident": int(line.split()[1]) * 1024, "since_start": self.reset}
        except (OSError, StopIteration):  # not Linux
            import resource

            scale = 1 if platform.system() == "Darwin" else 1024
            return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, "since_start": False}

    def bytes(self) -> int:
        """Of the allocator on a GPU, else of the process."""
        found = self.read()
        return int(found["allocator"] if "allocator" in found else found["resident"])


def _driver_bytes(device: torch.device) -> int:
    """This process's memory as the NVIDIA driver counts it; 0 where the driver does not tell."""
    import pynvml

    pynvml.nvmlInit()
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        mine = [p for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        return int(mine[0].usedGpuMemory or 0) if mine else 0
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def free_memory(device: torch.device, everywhere: bool = False) -> int:
    """Bytes that a device can still give; `everywhere`: all GPUs that torch sees.

    On a CPU what is available, the kernel's file cache included, to this machine and to each control group around this
    process (a container, a batch job).
    """
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count()) if everywhere else [device]
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    return max(0, min([_available(), *_left_in_groups(CGROUPS, Path("/proc/self/cgroup"))]))


def _available() -> int:
    """Bytes that the kernel can give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """Bytes that control groups still allow, version 2 or 1. root: where they lie. own: which ones this process is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, place = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, (limit, used) = (root / "memory", OLD_LIMIT) if kinds else (root, LIMIT)
        group = top / place.lstrip("/")
        for folder in (one for one in (group, *group.parents) if one.is_relative_to(top)):
            try:
                sizes = [int((folder / name).read_text()) for name in (limit, used)]
                said = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit, or a group of the host that a container does not see
                continue
            files = sum(int(said.get(f"{'total_' * bool(kinds)}{part}_file", 0)) for part in ("inactive", "active"))
            yield sizes[0] - sizes[1] + files


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, in words a table can show."""
    cpu = platform.processor() or platform.machine()
    try:
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    except OSError:
        pass
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),  # widest vectors: models of one name differ in them
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default").lower(),  # of threads: spinning or asleep
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": torch.cuda.device_count(),
    }


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    return {"python": platform.python_version()} | {p: version(p) for p in ("torch", "transformers", "accelerate")}


@functools.cache
def commit() -> str:
    """The checkout's commit, `+` behind it where tracked files differ from it; `unknown` outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
        return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load() -> float | None:
    """Processes that wanted a core over the last minute, on average; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
