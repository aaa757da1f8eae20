"""What training and drafting cost, method by method, on the default target: `python tests/drafter_benchmarks.py FOLDER`.

1. Training: peak memory above what was resident before, and seconds a step, against simulated steps (Beagle's memory is
   claimed constant, HASS's grows), and tokens a second of every method. Random tokens and states, 8 sequences of 256.
2. Drafting: milliseconds a cycle and the shares of the LM head, of the drafter's own network, and of the rest.

Every training is measured in a process of its own, since a peak cannot be taken back. Writes `drafters.json`.
"""

import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks import ROOT, TOKENS, configured
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from specbench import measure
from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Batch, Step
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless

SEQUENCES, LENGTH, VOCABULARY, REPEATS, PROMPTS = 8, 256, 8192, 5, 4
METHODS = ("vanilla", "medusa", "eagle2", "hass", "coral", "eagle2_router", "beagle", "moa")
STEPS = (1, 2, 3, 4, 5)


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("run", list(overrides))


def resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def train(overrides: tuple[str, ...], progress: float, queue: Any) -> None:
    """Seconds and peak of a step, forward to update, at this share of the training."""
    config = composed(*overrides, "drafter.weights=null")
    target, _ = instantiate(config.model).load()
    drafter = instantiate(config.drafter)
    drafter.bind(target)
    drafter.train()
    own = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own)
    tokens = torch.randint(target.vocab_size, (SEQUENCES, LENGTH))
    states = torch.randn(SEQUENCES, LENGTH, target.hidden_size, dtype=target.dtype)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    peak, seconds = measure.PeakMemory(target.device), []
    gc.collect()
    before = resident()
    peak.start()
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        batch = Batch(tokens, states, everywhere, everywhere, torch.arange(VOCABULARY), progress)
        if drafter.taps.kv or drafter.taps.hidden:
            batch.states, batch.hidden, batch.kv = target.tapped(tokens, drafter.taps)
        drafter.loss(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    middle = statistics.median(seconds[1:])  # the first one warms up
    queue.put(
        {
            "seconds_per_step": middle,
            "tokens_per_s": tokens.numel() / middle,
            "peak_mib": (int(peak.read()["resident"]) - before) / 2**20,
            "parameters": sum(p.numel() for p in own),
        }
    )


def apart(overrides: tuple[str, ...], progress: float = 1.0) -> dict[str, float]:
    """`train` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=train, args=(overrides, progress, queue))
    process.start()
    found: dict[str, float] = queue.get(timeout=600)
    process.join()
    print(overrides, progress, {k: round(v, 2) for k, v in found.items()}, flush=True)
    return found


class Shares:
    """Seconds inside some functions, while drafting only."""

    def __init__(self) -> None:
        self.drafting, self.seconds = False, dict.fromkeys(("draft", "head", "network"), 0.0)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outermost = part == "draft"
            if not self.drafting and not outermost:
                return function(*args, **kwargs)
            self.drafting = True
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin
                self.drafting = not outermost

        object.__setattr__(owner, name, timed)


def drafting(target: Target, name: str, prompts: list[list[int]], *overrides: str) -> dict[str, float]:
    """Milliseconds a cycle and shares of drafting: LM head, the drafter's network, the rest (growth, caches)."""
    drafter: Any = configured(name, target, *overrides)
    inner = getattr(drafter, "base", drafter)
    shares, forward = Shares(), target.head.forward
    for method in ("propose", "observe"):
        shares.wrap(drafter, method, "draft")
    if hasattr(drafter, "base"):  # a router multiplies slices of the head itself
        shares.wrap(inner, "target_logits", "head")
    else:
        shares.wrap(target.head, "forward", "head")
    for method in ("network", "layer_attention", "cross", "_self_attention"):
        if hasattr(inner, method):
            part = getattr(inner, method)
            shares.wrap(*((part, "forward") if isinstance(part, torch.nn.Module) else (inner, method)), "network")
    cycles = 0
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        if index == 1:
            cycles, shares.seconds = 0, dict.fromkeys(shares.seconds, 0.0)
        events = decode(target, drafter, prompt, Limits(TOKENS), Lossless(), Sampler())
        cycles += sum(isinstance(e, Step) for e in events)
    target.head.forward = forward  # type: ignore[method-assign]
    total = shares.seconds["draft"]
    head, network = shares.seconds["head"] / total, shares.seconds["network"] / total
    found = {"ms_per_cycle": 1000 * total / cycles, "head": head, "network": network, "rest": 1 - head - network}
    print(name, overrides, {k: round(v, 3) for k, v in found.items()}, flush=True)
    return found


def main(folder: Path) -> None:
    target, chat = instantiate(composed().model).load()
    questions = instantiate(composed(f"data.limit={PROMPTS}").dataset).load()
    prompts = [chat.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]
    shipped = ("vanilla", "medusa", "eagle1", "eagle2", "hass", "coral", "eagle2_router", "coral_router", "beagle", "moa")
    found = {
        "machine": measure.hardware(target.device),
        "versions": measure.versions(),
        "commit": measure.commit(),
        "dtype": str(target.dtype),
        "training": {m: apart((f"drafter={m}",)) for m in METHODS},
        "hass_steps": {n: apart(("drafter=hass", f"+drafter.steps={n}")) for n in STEPS},
        "beagle_steps": {n: apart(("drafter=beagle", f"+drafter.steps={n}")) for n in STEPS},
        "drafting": {name: drafting(target, name, prompts) for name in shipped},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drafters.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
