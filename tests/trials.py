"""Every mend alone: `python tests/trials.py FOLDER [DRAFTER[:NAME] …] [seeds=0,1] [tokens=500000]`.

A trial is the shipped recipe's predecessor with one thing changed; it and its base train once on the corpus' first
`tokens`, with the same seeds, and are measured on the same held-out answers. A row a training goes to FOLDER/trials.jsonl
as soon as it is there; what is there is not done again. The table is FOLDER/README.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from specbench import measure
from specbench.engine.weights import PROVENANCE
from specbench.reporting.tables import markdown_table
from specbench.reporting.trainings import TRIALS, Trial, trial_lines

ROOT = Path(__file__).resolve().parents[1]
BASE = "base"
BUDGET = (
    "~recipe",
    "train.batch=2",
    "train.settings.lr=1.0e-3",
    "train.settings.checkpoint_minutes=5",
    "train.settings.validate_minutes=1000",  # at the end only
    "train.build=false",
    "train.settings.phases=[{share: 0.97}, {share: 0.03, vocabulary: null}]",
    "train.settings.decay=cosine",
    "train.settings.floor=0",
    "train.settings.epochs=1",
)


def phases(*said: str) -> str:
    return f"train.settings.phases=[{', '.join('{' + one + '}' for one in said)}]"


FULL = "vocabulary: null"
OWN = "drafter: {steps: 1, topk_weight: 0.0}"  # EAGLE's objective in HASS's clothes
HASS = "drafter: {steps: 3, beta: 1.0, topk: 10, topk_weight: 1.0}"
CORAL_OWN = "drafter: {steps: 1, csra_weight: 0.0, step_regression: 1.0}"
CORAL = "drafter: {steps: 3, csra_weight: null, step_regression: 0.5}"
EARLY, LATE = "drafter: {stage: early, window: 1}", "drafter: {stage: late, steps: 4}"


def halves(first: str, second: str) -> str:
    return phases(f"share: 0.5, {first}", f"share: 0.47, {second}", f"share: 0.03, {FULL}")


# What every training of a drafter has here, its base included: the recipe and the network before the mends.
BEFORE: dict[str, tuple[str, ...]] = {
    "eagle2": (),
    "hass": (halves(OWN, HASS),),
    "coral": (halves(CORAL_OWN, CORAL),),
    "beagle": ("++drafter.grouped=true", "++drafter.noise=0", halves(EARLY, LATE)),
    "vanilla": ("++drafter.norm_from=ones",),
    "medusa": (),
    "moa": (
        "++drafter.periods=[5,15]",
        "++drafter.confine=0",
        "drafter.mlp_ratios={lsa: 0.8, sa: 0.8, ca: 0.8}",
    ),
}
SCHEDULE = ("train.settings.decay=linear", "train.settings.floor=0.05")
CHANGES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "eagle2": {
        "floor": ("a floor under the learning rate", SCHEDULE),
        "full-20": ("all ids from 0.8 on, with the floor", (*SCHEDULE, phases("share: 0.8", f"share: 0.2, {FULL}"))),
        "answers-only": ("what the assistant said is scored alone", ("train.answers_only=true",)),
        "balanced-start": ("fc hears embeddings as loudly as states", ("++drafter.balanced_start=true",)),
        "clip-value": ("gradients clipped by value, as the authors do", ("train.settings.clip_by=value",)),
        "noise-authors": ("the authors' noise, 0.1 * 512 / T", ("++drafter.noise_law=authors",)),
        "sampled-3072": ("3,072 ids a batch in the loss", ("train.settings.sampled=3072",)),
        "packed": ("packed rows instead of padding", ("train.row_tokens=1040", "train.batch=1")),
        "drawn": (
            "3,072 of 8,192 ids and 1,024 of the others a batch, one phase, with the floor",
            (*SCHEDULE, "train.settings.phases=[]", "train.settings.sampled=3072", "train.settings.others=1024"),
        ),
        "batch-16": ("16 dialogues a step instead of 2", ("train.batch=16",)),
        "batch-4": ("4 dialogues a step instead of 2", ("train.batch=4",)),
        "muon-16": (
            "Muon for matrices, 16 dialogues a step",
            ("train.batch=16", "train.settings.optimizer=muon", "train.settings.lr=0.01"),
        ),
    },
    "hass": {
        "aligned-from-0": ("aligned from the first step", (phases(f"share: 0.97, {HASS}", f"share: 0.03, {FULL}"),)),
        "source": ("beta 0.5, K = 5, w = 0.5", (halves(OWN, "drafter: {steps: 3, beta: 0.5, topk: 5, topk_weight: 0.5}"),)),
        "no-topk": ("alignment only", (halves(OWN, "drafter: {steps: 3, beta: 1.0, topk_weight: 0.0}"),)),
    },
    "coral": {
        "aligned-from-0": ("aligned from the first step", (phases(f"share: 0.97, {CORAL}", f"share: 0.03, {FULL}"),)),
    },
    "beagle": {
        "heads": ("keys and values for every head (eq. 2)", ("++drafter.grouped=false",)),
        "noise": ("N(0, 0.2) on states (A.3)", ("++drafter.noise=0.2",)),
        "late-from-0.2": (
            "late stage from a fifth on, with the floor",
            (*SCHEDULE, phases(f"share: 0.2, {EARLY}", f"share: 0.77, {LATE}", f"share: 0.03, {FULL}")),
        ),
    },
    "vanilla": {
        "norm": ("final norm of the target's", ("++drafter.norm_from=target",)),
        "pruned": (
            "first and last layer of the target, its norm",
            ("++drafter.norm_from=target", "++drafter.start_from=target", "++drafter.intermediate_size=null"),
        ),
        "pruned-832": (
            "the same, its MLPs cut to 832 neurons",
            ("++drafter.norm_from=target", "++drafter.start_from=target"),
        ),
    },
    "medusa": {
        "own-heads": ("a low-rank output layer of each head's own", ("++drafter.head_rank=16",)),
        "answers-only": ("what the assistant said is scored alone", ("train.answers_only=true",)),
    },
    "moa": {
        "periods": ("windows by the tree's depth", ("++drafter.periods=null",)),
        "draws": ("windows by depth, four masks a pass", ("++drafter.periods=null", "++drafter.draws=4")),
        "confine": ("the authors' curriculum", ("++drafter.confine=0.5",)),
        "ratios": ("MLP ratios of the paper", ("drafter.mlp_ratios=null",)),
    },
}
BESIDE = {
    ("vanilla", "pruned"): "norm",
    ("vanilla", "pruned-832"): "norm",
}  # what a trial is compared with, where that is not the base
KEPT = {  # decided from the table, once a trial's row is in
    ("eagle2", "answers-only"): False,
    ("eagle2", "balanced-start"): True,
    ("eagle2", "drawn"): True,
    ("eagle2", "batch-16"): False,
    ("eagle2", "batch-4"): False,
    ("eagle2", "muon-16"): False,
    ("vanilla", "norm"): True,
    ("vanilla", "pruned"): True,  # its MLPs cut to the width of the trained ones, or its file would be too large
}


def trials() -> list[Trial]:
    """Every base, followed by what is compared with it."""
    found = []
    for drafter, changes in CHANGES.items():
        found.append(Trial(drafter, BASE, "before the mends"))
        for name, (why, _) in changes.items():
            found.append(Trial(drafter, name, why, BESIDE.get((drafter, name), BASE), KEPT.get((drafter, name))))
    return found


def options_of(trial: Trial, seed: int, tokens: int) -> list[str]:
    """What the trainer's door is told."""
    changed = CHANGES[trial.drafter].get(trial.name, ("", ()))[1]
    if trial.drafter == "moa":  # its target runs beside it, over every layer of which its own attention runs
        tokens //= 4
    options = [*BUDGET, *BEFORE[trial.drafter], *changed, f"train.settings.seed={seed}", f"train.corpus.tokens={tokens}"]
    by_key = {o.lstrip("+").partition("=")[0]: o for o in options}  # the last word counts
    return [f"drafter={trial.drafter}", *by_key.values()]


def train(folder: Path, trial: Trial, seed: int, tokens: int) -> dict[str, object]:
    """One training; its row."""
    name = f"{trial.drafter}-{trial.name}-{seed}"
    out = ROOT / "results/local/trials" / name
    options = options_of(trial, seed, tokens)
    command = [sys.executable, "-m", "specbench.train", *options]
    command += [f"train.name=trial-{name}", f"train.out={out}", "train.missing=true"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    said = json.loads((out / PROVENANCE).read_text())
    kept = ("held_out", "hours", "steps", "tokens_seen", "parameters", "machine", "versions", "commit")
    return {"drafter": trial.drafter, "trial": trial.name, "seed": seed, "options": options} | {k: said[k] for k in kept}


def main(folder: Path, chosen: list[str], seeds: list[int], tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["drafter"], r["trial"], r["seed"]) for r in rows}
    for seed in seeds:
        for trial in trials():
            wanted = not chosen or {trial.drafter, f"{trial.drafter}:{trial.name}"} & set(chosen)
            if not wanted or (trial.drafter, trial.name, seed) in done:
                continue
            print(f"== {trial.drafter} {trial.name} seed {seed}", flush=True)
            rows.append(train(folder, trial, seed, tokens))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            write_table(folder, rows)
    write_table(folder, rows)


def write_table(folder: Path, rows: list[dict[str, object]]) -> None:
    machines = sorted({str(r["machine"]["device"]) for r in rows})  # type: ignore[index]
    text = [
        "# Trials",
        "",
        "One thing changed at a time, beside the same training without it: same tokens, in the same order; seeds pooled;",
        "tau of a chain of 5 on the held-out answers, resampled alike for both. Written by `tests/trials.py` from",
        f"`trials.jsonl` ({', '.join(machines)}).",
        "",
        markdown_table(TRIALS, trial_lines(trials(), rows)),
        "",
    ]
    (folder / "README.md").write_text("\n".join(text))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python tests/trials.py FOLDER [DRAFTER[:NAME] …] [seeds=0,1] [tokens=500000]")
    measure.commit()
    said = dict(a.split("=") for a in sys.argv[2:] if "=" in a)
    main(
        Path(sys.argv[1]).resolve(),
        [a for a in sys.argv[2:] if "=" not in a],
        [int(s) for s in said.get("seeds", "0,1").split(",")],
        int(said.get("tokens", "500000")),
    )
