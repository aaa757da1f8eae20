"""The machine, its free memory, software versions and the commit."""

import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from specbench.common import gpu
from specbench.common.storage import PROJECT

if TYPE_CHECKING:
    import torch


CGROUPS = Path("/sys/fs/cgroup")
V2_FILES, V1_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def launched_processes() -> int:
    """How many processes `accelerate launch` or `torchrun` started together with this one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def free_memory(device: "torch.device", everywhere: bool = False) -> int:
    """Free bytes of a device; `everywhere`: of all GPUs that torch sees.

    On a CPU the file cache counts as free, and limits of this process's control groups (container, batch job) apply.
    """
    if device.type == "cuda":
        import torch

        gpus = range(torch.cuda.device_count()) if everywhere else [device]
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    available = psutil.virtual_memory().available  # without swapping
    return max(0, min([available, *_left_in_groups(CGROUPS, Path("/proc/self/cgroup"))]))


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """Free bytes of control groups, version 2 or 1. root: their folder. own: the list of this process's groups."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used) = (root / "memory", V1_FILES) if controllers else (root, V2_FILES)
        group = top / path.lstrip("/")
        for folder in (parent for parent in (group, *group.parents) if parent.is_relative_to(top)):
            try:
                sizes = [int((folder / name).read_text()) for name in (limit, used)]
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no limit, or a group of the host that a container does not see
                continue
            prefix = "total_" if controllers else ""
            files = sum(int(stat.get(f"{prefix}{part}_file", 0)) for part in ("inactive", "active"))
            yield sizes[0] - sizes[1] + files


def hardware(device: "torch.device") -> dict[str, Any]:
    """The machine as headers of blocks describe it."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "cpu": cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),  # the widest vectors
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default").lower(),  # of threads: spinning or sleeping
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": torch.cuda.device_count(),
        **({"gpu": _gpu(device)} if device.type == "cuda" else {}),
    }


def _gpu(device: "torch.device") -> dict[str, Any]:
    """Its driver and limits, and the libraries that torch was built with."""
    import torch

    return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), **gpu.description(device)}


def versions() -> dict[str, str]:
    """Versions of the software that headers name."""
    found = {p: installed(p) for p in ("torch", "transformers", "accelerate", "openvino")}
    return {"python": platform.python_version()} | {p: v for p, v in found.items() if v is not None}


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def commit() -> str:
    """The checkout's commit, with `+` appended if tracked files differ from it; `unknown` outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=PROJECT, capture_output=True, text=True)
        return head.stdout.strip()[:12] + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load() -> float | None:
    """Mean number of runnable processes over the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
