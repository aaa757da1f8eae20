"""What a machine can do, before anything is decoded on it: one JSON line for each answer, so that a kill loses one.

python -m specbench.gpu_day.probe FILE [--toy]

    machine    hardware, driver, versions; packages that the project needs and the machine lacks
    copy       10^9 bytes a second, read and written, of a copy within the device's memory
    read       the same of a reduction, which only reads: what a plain decoding pass is bound by
    launch     microseconds to launch an operator that does nothing, and to wait for the device once
    product    TFLOP/s of a large product of matrices
    attention  milliseconds of the first and of a later call at lengths that grow, as in decoding, per choice of kernels
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch.nn.functional import scaled_dot_product_attention

from specbench.common import environment
from specbench.common.timing import Clock
from specbench.engine import attention
from specbench.engine.device import pick_device

COPY_BYTES, SIDE, REPEATS = 4 << 30, 8192, 11
HEADS, HEAD_DIM, NODES, LENGTHS = 32, 128, (1, 60), range(200, 232)  # of Llama-2-7B; of a tree; keys
TOY = {"COPY_BYTES": 1 << 20, "SIDE": 64, "REPEATS": 3, "HEADS": 2, "HEAD_DIM": 8, "LENGTHS": range(8, 12)}


def answers(device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is asked, by name; nothing is measured before it is called."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    yield "machine", lambda: machine(device)
    yield "copy", lambda: copying(device)
    yield "read", lambda: reading(device)
    yield "launch", lambda: launching(device)
    yield "product", lambda: product(device, dtype)
    for cudnn in (False, True) if device.type == "cuda" else (False,):
        for nodes in NODES:
            name = f"attention, {nodes} nodes, cuDNN {'on' if cudnn else 'off'}"
            yield name, lambda nodes=nodes, cudnn=cudnn: attending(device, dtype, nodes, cudnn)  # type: ignore[misc]


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions as in headers of blocks, free memory, and packages that are missing here."""
    return {
        "hardware": environment.hardware(device),
        "versions": environment.versions(),
        "free_bytes": environment.free_memory(device),
        "missing": missing(),
    }


def missing() -> list[str]:
    """Requirements of this project that are not installed, or in another version."""
    found = []
    for line in requires("specbench") or [] if _installed("specbench") else []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        if not _installed(needed.name) or not needed.specifier.contains(version(needed.name), prereleases=True):
            found.append(str(needed))
    return found


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def copying(device: torch.device) -> dict[str, float]:
    source = torch.empty(COPY_BYTES // 4, device=device).normal_()
    sink = torch.empty_like(source)
    seconds = _median(device, lambda: sink.copy_(source))
    return {"bytes": source.nbytes, "ms": 1000 * seconds, "gb_per_s": 2 * source.nbytes / seconds / 1e9}


def reading(device: torch.device) -> dict[str, float]:
    source = torch.empty(COPY_BYTES // 4, device=device).normal_()
    seconds = _median(device, source.amax)
    return {"bytes": source.nbytes, "ms": 1000 * seconds, "gb_per_s": source.nbytes / seconds / 1e9}


def launching(device: torch.device, count: int = 1000) -> dict[str, float]:
    """The host's time for each of `count` launches in a row, without and with a wait behind each."""
    x, clock = torch.zeros(1, device=device), Clock(device)

    def launches() -> None:
        for _ in range(count):
            x.add_(1)

    def waits() -> None:
        for _ in range(count):
            x.add_(1)
            clock()

    return {"launch_us": 1e6 * _median(device, launches) / count, "wait_us": 1e6 * _median(device, waits) / count}


def product(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    seconds = _median(device, lambda: a @ b)
    return {"side": SIDE, "ms": 1000 * seconds, "tflops": 2 * SIDE**3 / seconds / 1e12}


def attending(device: torch.device, dtype: torch.dtype, nodes: int, cudnn: bool) -> dict[str, Any]:
    """Attention of a few queries to a cache that grows. first_ms: of each length; again_ms: a second time, the median."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    clock = Clock(device)
    first: list[float] = []
    again: list[float] = []
    queries = torch.randn(1, HEADS, nodes, HEAD_DIM, device=device, dtype=dtype)
    for length in LENGTHS:
        keys = torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype)
        seen = torch.ones(1, 1, nodes, length, dtype=torch.bool, device=device)
        bias = None if nodes == 1 else attention.aligned_bias(seen, dtype)
        for times in (first, again):
            begin = clock()
            scaled_dot_product_attention(queries, keys, keys, attn_mask=bias)
            times.append(1000 * (clock() - begin))
    attention.prepare(device)
    first_ms = {"median": statistics.median(first[1:]), "largest": max(first[1:])}  # the very first loads kernels
    return {"lengths": len(first), "first_ms": first_ms, "again_ms": statistics.median(again)}


@torch.inference_mode()
def _median(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one call; the first one warms up."""
    clock, seconds = Clock(device), []
    for _ in range(REPEATS + 1):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return statistics.median(seconds[1:])


def main(path: Path, toy: bool) -> None:
    """Write the answers that the file lacks, and print each."""
    if toy:
        globals().update(TOY)
    known = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.is_file() else set()
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, ask in answers(pick_device("auto")):
        if name in known:
            continue
        begin = time.monotonic()
        answer = {"name": name, **ask(), "seconds": round(time.monotonic() - begin, 2)}
        print(json.dumps(answer), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--toy" in sys.argv[2:])
