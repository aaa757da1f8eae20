"""What training and drafting cost, method by method, on the default target: `python tests/drafter_benchmarks.py FOLDER`.

1. Training: peak memory above what was resident before, and seconds a step, against simulated steps (Beagle's memory is
   claimed constant, HASS's grows), and tokens a second of every method. Random tokens and states, 8 sequences of 256.
2. Drafting: milliseconds a cycle and the shares of the LM head, of the drafter's own network, and of the rest.
3. Memory: peak resident set of a process that loads target and drafter and decodes one prompt, `none` being the baseline.

Every training and every peak is measured in a process of its own, since a peak cannot be taken back. The routers of other
sizes come from `tests/ablations.py FOLDER router`, which must have run before. Writes `drafters.json`.
"""

import gc
import itertools
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
ROUTERS = "results/local/ablations/router-N{}"


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


def occupy(overrides: tuple[str, ...], queue: Any) -> None:
    """Resident memory once target and drafter are loaded, and the peak of decoding one prompt, both in MiB."""
    config = composed(*overrides)
    target, chat = instantiate(config.model).load()
    drafter = configured(config.drafter.name, target)
    question = instantiate(composed("data.limit=1").dataset).load()[0]
    prompt = chat.encode([{"role": "user", "content": question.turns[0]}])
    gc.collect()
    loaded, peak = resident(), measure.PeakMemory(target.device)
    peak.start()
    for _ in decode(target, drafter, prompt, Limits(TOKENS), Lossless(), Sampler()):
        pass
    queue.put({"loaded_mib": loaded / 2**20, "peak_mib": int(peak.read()["resident"]) / 2**20})


def apart(work: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """What a function puts into its queue, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(*arguments, queue))
    process.start()
    found: dict[str, float] = queue.get(timeout=600)
    process.join()
    print(work.__name__, *arguments, {k: round(v, 2) for k, v in found.items()}, flush=True)
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
    for method in ("network", "across_layers", "cross", "_self_attention"):
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
    for n in (8, 16, 32):
        if not (ROOT / ROUTERS.format(n)).exists():
            raise SystemExit(
                f"no weights in {ROUTERS.format(n)}; run `python tests/ablations.py results/ablations router` first"
            )
    target, chat = instantiate(composed().model).load()
    questions = instantiate(composed(f"data.limit={PROMPTS}").dataset).load()
    prompts = [chat.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]
    shipped = ("vanilla", "medusa", "eagle1", "eagle2", "hass", "coral", "eagle2_router", "coral_router", "beagle", "moa")
    found = {
        "machine": measure.hardware(target.device),
        "versions": measure.versions(),
        "commit": measure.commit(),
        "dtype": str(target.dtype),
        "training": {m: apart(train, (f"drafter={m}",), 1.0) for m in METHODS},
        "hass_steps": {n: apart(train, ("drafter=hass", f"+drafter.steps={n}"), 1.0) for n in STEPS},
        "beagle_steps": {
            n: apart(train, ("drafter=beagle", "+drafter.stage=late", f"+drafter.steps={n}"), 1.0) for n in STEPS
        },
        "memory": {name: apart(occupy, (f"drafter={name}",)) for name in ("none", *shipped)},
        "drafting": {name: drafting(target, name, prompts) for name in shipped},
        "router": {
            f"N{n}-top{g}": drafting(
                target,
                "eagle2_router",
                prompts,
                f"+drafter.groups={n}",
                f"+drafter.active={g}",
                f"drafter.weights={ROUTERS.format(n)}",
            )
            for n, g in itertools.product((8, 16, 32), (1, 2, 3))
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drafters.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
