"""A profiler's trace of a few cycles of one drafter, and what it says in numbers.

python -m specbench.gpu_day.cycles FOLDER model=llama2-7b model.weights=random alpha=[0.8] drafter=eagle2

Writes <drafter>-<backend>.trace.json.gz for a browser's trace viewer, and <drafter>-<backend>.json: per cycle operators,
launches, waits, the device's busy time, and the time from begin to end. With the profiler on, cycles are slower;
the rows of `specbench.run` say how fast they are.
"""

import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from specbench.common.storage import write_file
from specbench.common.timing import Clock, PhaseClock
from specbench.config import run_spec
from specbench.config.cli import composed
from specbench.engine.decode import Limits, decode
from specbench.engine.target import Target
from specbench.evaluation import arms
from specbench.evaluation.arms import Arm
from specbench.tuning.target_cost import text

CYCLES, WARM, PROMPT = 5, 8, 128  # traced cycles, those before them, tokens of the prompt
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
TOP = 25  # operators that are listed


def trace(target: Target, arm: Arm, folder: Path, backend: str) -> dict[str, Any]:
    """Decode, trace some cycles, and write both files; returns what is in the smaller one."""
    spec, clock = arm.spec, Clock(target.device)
    rule, sampler = arm.bound.rule, spec.sampler
    prompt = text(target, min(PROMPT, target.max_context // 4))
    coins = torch.Generator(target.device).manual_seed(0) if rule.simulated or not sampler.greedy else None
    events = decode(
        target, arm.bound.drafter, prompt, Limits(target.max_context), rule, sampler, coins, PhaseClock(target.device)
    )
    next(events)
    list(islice(events, WARM))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if target.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        begin = clock()
        cycles = len(list(islice(events, CYCLES)))
        seconds = clock() - begin
    found = summary(profiler, cycles, seconds)
    found |= {"drafter": arm.label, "backend": backend, "simulated": rule.simulated, "dtype": str(target.dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{arm.label}-{backend}.trace.json.gz"))
    write_file(folder / f"{arm.label}-{backend}.json", json.dumps(found, indent=1))
    return found


def summary(profiler: Any, cycles: int, seconds: float) -> dict[str, Any]:
    """Numbers of a trace, per cycle. seconds: of all cycles, with what the profiler does meanwhile."""
    events = profiler.key_averages()
    operators = [e for e in events if e.key.startswith("aten::")]
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    busy = sum(e.self_device_time_total for e in on_device)  # operators have their kernels' time once more
    slowest = sorted(events, key=lambda e: -(e.self_device_time_total or e.self_cpu_time_total))[:TOP]

    def count(names: Sequence[str]) -> float:
        return sum(e.count for e in events if e.key in names) / cycles

    return {
        "cycles": cycles,
        "ms": 1000 * seconds / cycles,
        "device_ms": busy / 1000 / cycles,
        "operators": sum(e.count for e in operators) / cycles,
        "launches": count(LAUNCHES),
        "waits": count(WAITS),
        "slowest": [
            {"name": e.key, "count": e.count / cycles, "device_ms": e.self_device_time_total / 1000 / cycles,
             "host_ms": e.self_cpu_time_total / 1000 / cycles}
            for e in slowest
        ],
    }  # fmt: skip


def main(folder: Path, words: list[str]) -> None:
    config = composed("run", words)
    spec = run_spec.from_config(config)
    torch.set_num_threads(spec.threads or torch.get_num_threads())
    made = arms.make(spec)
    target, _ = arms.load(spec, [made[0]])
    found = trace(target, arms.build(spec, target, made=made), folder, spec.backend)
    print(json.dumps({key: value for key, value in found.items() if key != "slowest"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "traces", sys.argv[2:])
