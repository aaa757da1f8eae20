"""Clock, peak memory, and the load of other processes."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from specbench.common import gpu


class Clock:
    """A clock in seconds, which waits for the work that a GPU was given."""

    def __init__(self, device: torch.device):
        self.cuda = device if device.type == "cuda" else None

    def __call__(self) -> float:
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)
        return time.perf_counter()


class Span:
    """Time between moments on a GPU; `float` gives seconds, once the GPU has passed them all."""

    def __init__(self, *pairs: tuple[Any, Any]):
        self.pairs = pairs

    def __add__(self, other: "Span") -> "Span":
        return Span(*self.pairs, *other.pairs)

    def __float__(self) -> float:
        return sum(begin.elapsed_time(end) for begin, end in self.pairs) / 1000


class Moment:
    """A point on a GPU's own timeline, which the host does not wait for."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def __sub__(self, earlier: "Moment") -> Span:
        return Span((earlier.event, self.event))


class PhaseClock:
    """A clock for the phases of a generation: on a GPU events in its stream, so that host and GPU go on side by side.

    What it returns may be subtracted, and differences added, as numbers are; after `wait` each `float` of these is seconds.
    What the host does while the GPU works takes no time; while the GPU has nothing to do, it does. Of a model on several
    GPUs the first one's timeline counts, which waits for the others' results. Off a GPU it is `time.perf_counter`.
    """

    def __init__(self, device: torch.device):
        self.cuda = device if device.type == "cuda" else None

    def __call__(self) -> Any:
        return time.perf_counter() if self.cuda is None else Moment(self.cuda)

    def wait(self) -> None:
        """Until the GPU has passed every moment."""
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)


class BackgroundLoad:
    """The mean number of cores that other processes kept busy since `start`."""

    def start(self) -> None:
        self.begin = self._now()

    def read(self) -> float | None:
        """Cores; None where the kernel does not say."""
        if self.begin is None or (now := self._now()) is None:
            return None
        seconds, busy, own = (b - a for a, b in zip(self.begin, now, strict=True))
        return round(max(0.0, busy - own) / seconds, 2) if seconds > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds on the clock, of all processors' work, and of the work of this process and its ended children."""
        try:
            total, own = psutil.cpu_times(), os.times()
        except OSError:  # a container without /proc/stat
            return None
        busy = sum(total[:8]) - total.idle - getattr(total, "iowait", 0.0)  # later fields are part of user time
        return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system


class PeakMemory:
    """Peak memory since `start`: on a GPU of torch's allocator and of the driver, else the peak resident set.

    If the kernel cannot reset a process's peak (`/proc/self/clear_refs`), it is the peak since the process began, and
    `since_start` is False.
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
        """Bytes by source; on a GPU without `driver` where that does not say."""
        if self.device.type == "cuda":
            return self._read_gpu()
        try:
            line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
            return {"resident": int(line.split()[1]) * 1024, "since_start": self.reset}
        except (OSError, StopIteration):  # not Linux
            import resource

            scale = 1 if platform.system() == "Darwin" else 1024
            return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, "since_start": False}

    def _read_gpu(self) -> dict[str, int | bool]:
        """allocator, reserved: peaks of torch's allocator. driver: of this process. device: of all processes, now."""
        free, total = torch.cuda.mem_get_info(self.device)
        peaks = {
            "allocator": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
            "device": total - free,
        }
        driver = gpu.process_bytes(self.device)
        return peaks if driver is None else {**peaks, "driver": driver}

    def bytes(self) -> int:
        """Peak bytes: the allocator's on a GPU, else of the process."""
        peaks = self.read()
        return int(peaks["allocator"] if "allocator" in peaks else peaks["resident"])
