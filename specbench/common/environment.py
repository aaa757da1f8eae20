"""What machine, software and commit this is, and how much memory is left. Knows no drafter."""

import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from specbench.common.storage import PROJECT

if TYPE_CHECKING:
    import torch


CGROUPS = Path("/sys/fs/cgroup")
LIMIT, OLD_LIMIT = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def free_memory(device: "torch.device", everywhere: bool = False) -> int:
    """Bytes that a device can still give; `everywhere`: all GPUs that torch sees.

    On a CPU what is available, the kernel's file cache included, to this machine and to each control group around this
    process (a container, a batch job).
    """
    if device.type == "cuda":
        import torch

        gpus = range(torch.cuda.device_count()) if everywhere else [device]
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    available = psutil.virtual_memory().available  # without swapping
    return max(0, min([available, *_left_in_groups(CGROUPS, Path("/proc/self/cgroup"))]))


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
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit, or a group of the host that a container does not see
                continue
            files = sum(int(stat.get(f"{'total_' * bool(kinds)}{part}_file", 0)) for part in ("inactive", "active"))
            yield sizes[0] - sizes[1] + files


def hardware(device: "torch.device") -> dict[str, Any]:
    """The machine, in words a table can show."""
    import torch

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
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": torch.cuda.device_count(),
    }


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    return {"python": platform.python_version()} | {p: version(p) for p in ("torch", "transformers", "accelerate")}


@functools.cache
def commit() -> str:
    """The checkout's commit, `+` behind it where tracked files differ from it; `unknown` outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=PROJECT, capture_output=True, text=True)
        return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load() -> float | None:
    """Processes that wanted a core over the last minute, on average; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
