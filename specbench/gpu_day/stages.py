"""What each stage of a GPU day runs: steps of commands that exist, each with its share of the stage's minutes.

    probe     versions, bandwidth, launch cost, attention with cuDNN's kernels on and off; the tests that need a GPU
    bench7b   Llama-2-7B's shape: random weights, ASSUMED acceptance; speed, energy, floor, traces of a few cycles
    model     the default target in three precisions: are greedy answers the baseline's; what the engine costs
    train     drafters on the shipped corpus
    memory    peak memory of every drafter beside targets of 7B and 8B shape, random weights

Nothing here is written to `results/`. A dry run takes the same steps at toy size, on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Chances that the next token of a draft is accepted, by depth: 4.0 tokens a pass with a tree of six levels, about what
# EAGLE-2's paper reports. Assumed, since random weights accept nothing.
ALPHA = "alpha=[0.83,0.81,0.79,0.78,0.77,0.77]"
RANDOM = ("model.weights=random", ALPHA)
TOY_SHAPE = (
    "model.shape={model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 61, max_position_embeddings: 256}"
)
FAST = ("eagle2", "eagle1", "medusa", "beagle", "moa")  # of the papers, with networks of their own
SHIPPED = ("eagle2", "hass", "coral", "beagle", "moa", "medusa", "vanilla")
COPYING = ("suffix", "prompt_lookup", "token_recycling", "lookahead", "hybrid")
DTYPES = ("float32", "float16", "bfloat16")
TESTS = {"ids": "ids", "captured": "captured", "others": "not ids and not captured"}  # step -> by their names
BACKENDS = ("eager", "graphs")  # the ways to run a pass that are compared


@dataclass(frozen=True)
class Step:
    """One command of a stage.

    Attributes:
        module: run with `python -m`. words: its arguments.
        minutes: after which it is stopped; it goes on there when it is run again.
        kind: which options of the caller it takes, see `taken`; `plain` takes none.
        budget: the option by which it ends in time by itself; None: it has none.
    """

    name: str
    module: str
    words: tuple[str, ...]
    minutes: float
    kind: str = "plain"
    budget: str | None = None

    def command(self, options: Sequence[str], minutes: float) -> list[str]:
        """Arguments of the interpreter, with the caller's options that it knows."""
        limit = [] if self.budget is None else [f"{self.budget}={minutes:.2f}"]
        return ["-m", self.module, *self.words, *(o for o in options if taken(o, self.kind)), *limit]


def taken(option: str, kind: str) -> bool:
    """Does a step of this kind take the option? One such as train.batch=4 is for trainings, data.root=… for decoding."""
    group = option.split("=")[0].split(".")[0].lstrip("+")
    return (
        group
        in {
            "plain": (),
            "train": ("model", "threads", "train"),
            "study": ("model", "threads", "data", "decode", "drafter"),
            "random": ("threads", "data", "decode"),  # a target of a shape of its own
        }[kind]
    )


def _study(name: str, work: Path, words: Sequence[str], minutes: float, kind: str = "study") -> Step:
    words = (*words, f"results={work / 'results' / name}")
    return Step(name, "specbench.study", words, minutes, kind, "minutes")


def _probe(work: Path, dry: bool) -> list[Step]:
    toy = ("--toy",) if dry else ()
    tests = ("-q", "-x" if dry else "--maxfail=40", "-rs", "tests/test_gpu.py", "-k")
    return [
        Step("probe", "specbench.gpu_day.probe", (str(work / "probe.jsonl"), *toy), 1.4),
        *(Step(f"tests-{name}", "pytest", (*tests, chosen), 2.2) for name, chosen in TESTS.items()),
    ]


def _size(dry: bool, limit: int, tokens: int) -> list[str]:
    limit, tokens = (1, 6) if dry else (limit, tokens)
    return [f"data.limit={limit}", f"decode.max_new_tokens={tokens}"]


def _random(model: str, dry: bool) -> list[str]:
    return [f"model={model}", *RANDOM, *([TOY_SHAPE, "model.max_context=256", "model.dtype=float32"] if dry else [])]


def _bench7b(work: Path, dry: bool) -> list[Step]:
    arms, ways = FAST[:1] if dry else FAST, BACKENDS
    steps = []
    for backend in ways:
        words = ["study=bench", "cells=[0]", "datasets=[mtbench]", *_random("llama2-7b", dry), f"backend={backend}"]
        words += [f"arms=[{','.join(arms)}]", *_size(dry, 4, 256), "memory=0"]
        steps.append(_study(f"speed-{backend}", work, words, 3.6 / len(ways), "random"))
        for drafter in ("eagle2",) if dry else ("none", "eagle2"):
            words = [str(work), *_random("llama2-7b", dry), f"drafter={drafter}", f"backend={backend}"]
            name = f"trace-{drafter}-{backend}"
            steps.append(Step(name, "specbench.gpu_day.cycles", tuple(words), 1.1, "random"))
    return steps


def _model(work: Path, dry: bool) -> list[Step]:
    arms = ("eagle2",) if dry else (*SHIPPED, *COPYING)
    steps = []
    for dtype in DTYPES[:2] if dry else DTYPES:
        words = ["study=bench", "cells=[0]", "datasets=[mtbench]", f"arms=[{','.join(arms)}]", *_size(dry, 20, 128)]
        steps.append(_study(f"lossless-{dtype}", work, [*words, f"model.dtype={dtype}", "memory=0"], 1.8))
    engine = ["study=engine", "cells=[0]", *(["arms=[none]"] if dry else []), *_size(dry, 4, 64), "memory=0"]
    return [*steps, _study("engine", work, engine, 2.5)]


def _train(work: Path, dry: bool) -> list[Step]:
    drafters = ("eagle2",) if dry else SHIPPED
    settings = ["train=small"] if dry else [
        "train=gpu", "train.corpus.tokens=8000000", "train.corpus.draws=2", "train.corpus.precision=auto",
        "train.settings.epochs=3", "train.corpus.states=false",
    ]  # fmt: skip
    steps = []
    for drafter in drafters:
        words = (*settings, f"drafter={drafter}", f"train.out={work / 'weights' / drafter}", "train.missing=true")
        steps.append(Step(f"train-{drafter}", "specbench.train", words, 8.0 / len(drafters), "train", "train.minutes"))
    return steps


def _memory(work: Path, dry: bool) -> list[Step]:
    arms = ("eagle2",) if dry else (*FAST, "hass", "hybrid", "coral_router")
    steps = []
    for model in ("llama2-7b", "llama3-8b"):
        words = ["study=bench", "cells=[0]", "datasets=[mtbench]", f"arms=[{','.join(arms)}]", *_random(model, dry)]
        steps.append(_study(f"memory-{model}", work, [*words, *_size(dry, 1, 64), "memory=1"], 4.0, "random"))
    return steps


STAGES: dict[str, Callable[[Path, bool], list[Step]]] = {
    "probe": _probe,
    "bench7b": _bench7b,
    "model": _model,
    "train": _train,
    "memory": _memory,
}
