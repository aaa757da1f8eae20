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
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch.nn.functional import scaled_dot_product_attention

from specbench.common import environment
from specbench.common.timing import Clock
from specbench.engine import attention
from specbench.engine.device import pick_device

NODES = (1, 60)  # queries of a pass: plain decoding's, a tree's


@dataclass(frozen=True)
class Sizes:
    """Of what is measured; by default those of Llama-2-7B, and products as large as a GPU needs.

    Attributes:
        copied: bytes. side: of a matrix. repeats: of which the median counts. heads, head_dim, lengths: of attention.
    """

    copied: int = 4 << 30
    side: int = 8192
    repeats: int = 11
    heads: int = 32
    head_dim: int = 128
    lengths: range = range(200, 232)


TOY = Sizes(1 << 20, 64, 3, 2, 8, range(8, 12))


def answers(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is asked, by name; nothing is measured before it is called."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    yield "machine", lambda: machine(device)
    yield "copy", lambda: copying(device, sizes)
    yield "read", lambda: reading(device, sizes)
    yield "launch", lambda: launching(device, sizes)
    yield "product", lambda: product(device, dtype, sizes)
    for cudnn in (False, True) if device.type == "cuda" else (False,):
        for nodes in NODES:
            name = f"attention, {nodes} nodes, cuDNN {'on' if cudnn else 'off'}"
            yield name, lambda nodes=nodes, cudnn=cudnn: attending(device, dtype, nodes, cudnn, sizes)  # type: ignore[misc]


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
    for line in requires("specbench") or [] if environment.installed("specbench") else []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        here = environment.installed(needed.name)
        if here is None or not needed.specifier.contains(here, prereleases=True):
            found.append(str(needed))
    return found


def copying(device: torch.device, sizes: Sizes) -> dict[str, float]:
    source = torch.empty(sizes.copied // 4, device=device).normal_()
    sink = torch.empty_like(source)
    seconds = _median(device, sizes.repeats, lambda: sink.copy_(source))
    return {"bytes": source.nbytes, "ms": 1000 * seconds, "gb_per_s": 2 * source.nbytes / seconds / 1e9}


def reading(device: torch.device, sizes: Sizes) -> dict[str, float]:
    source = torch.empty(sizes.copied // 4, device=device).normal_()
    seconds = _median(device, sizes.repeats, source.amax)
    return {"bytes": source.nbytes, "ms": 1000 * seconds, "gb_per_s": source.nbytes / seconds / 1e9}


def launching(device: torch.device, sizes: Sizes, count: int = 1000) -> dict[str, float]:
    """The host's time for each of `count` launches in a row, without and with a wait behind each."""
    x, clock = torch.zeros(1, device=device), Clock(device)

    def launches() -> None:
        for _ in range(count):
            x.add_(1)

    def waits() -> None:
        for _ in range(count):
            x.add_(1)
            clock()

    return {
        "launch_us": 1e6 * _median(device, sizes.repeats, launches) / count,
        "wait_us": 1e6 * _median(device, sizes.repeats, waits) / count,
    }


def product(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> dict[str, float]:
    a, b = (torch.randn(sizes.side, sizes.side, device=device, dtype=dtype) for _ in range(2))
    seconds = _median(device, sizes.repeats, lambda: a @ b)
    return {"side": sizes.side, "ms": 1000 * seconds, "tflops": 2 * sizes.side**3 / seconds / 1e12}


def attending(device: torch.device, dtype: torch.dtype, nodes: int, cudnn: bool, sizes: Sizes) -> dict[str, Any]:
    """Attention of a few queries to a cache that grows. first_ms: of each length; again_ms: a second time, the median."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    clock = Clock(device)
    first: list[float] = []
    again: list[float] = []
    queries = torch.randn(1, sizes.heads, nodes, sizes.head_dim, device=device, dtype=dtype)
    for length in sizes.lengths:
        keys = torch.randn(1, sizes.heads, length, sizes.head_dim, device=device, dtype=dtype)
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
def _median(device: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Seconds of one call; the first one warms up."""
    clock, seconds = Clock(device), []
    for _ in range(repeats + 1):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return statistics.median(seconds[1:])


def main(path: Path, sizes: Sizes) -> None:
    """Write the answers that the file lacks, and print each."""
    known = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.is_file() else set()
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, ask in answers(pick_device("auto"), sizes):
        if name in known:
            continue
        begin = time.monotonic()
        answer = {"name": name, **ask(), "seconds": round(time.monotonic() - begin, 2)}
        print(json.dumps(answer), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), TOY if "--toy" in sys.argv[2:] else Sizes())
