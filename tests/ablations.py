"""Short trainings and decodings, one thing taken away at a time: `python tests/ablations.py FOLDER [GROUP[:NAME] …]`.

Rows go to FOLDER/<group>, under the variant's name; the trained variants go to results/local, which is not kept.
Whatever is there is not done again, so a killed run goes on where it was. Budgets are in `GROUPS`: within a group all get
the same number of steps over the same data in the same order.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m"
SHIPPED = f"drafters/weights/{MODEL}"
PROMPTS = ("dataset=mtbench", "data.limit=8")
CHAIN = ("tree=chain", "tree.gamma=5")


@dataclass(frozen=True)
class Variant:
    """A drafter, how it is trained (None: as shipped) and how it decodes."""

    drafter: str
    options: tuple[str, ...] = ()  # of the drafter, in training and decoding
    training: tuple[str, ...] | None = None
    decoding: tuple[str, ...] = CHAIN
    tokens: int = 24  # a generation


def scratch(steps: int, batch: int = 16) -> tuple[str, ...]:
    return (f"train.settings.steps={steps}", f"train.batch={batch}", *warmup(15))


def warmup(steps: int) -> tuple[str, ...]:
    """So many steps, and no recipe of the method's own, whose phases would change what a variant fixes."""
    return "~recipe", "train.settings.warmup=null", f"train.settings.warmup_steps={steps}"


ALIGNED = (  # EAGLE-2's shipped head, a short while longer
    f"train.start={SHIPPED}/eagle2",
    "train.settings.steps=40",
    "train.settings.lr=3.0e-4",
    *warmup(10),
)
HALF_LATE = "train.settings.phases=[{share: 0.5}, {share: 0.5, drafter: {stage: late}}]"
GROUPS: dict[str, dict[str, Variant]] = {
    # EAGLE, Figure 10: what a pair holds
    "inputs": {
        i: Variant("eagle2", (f"++drafter.inputs={i}",), scratch(80)) for i in ("shifted", "unshifted", "feature", "token")
    },
    # HASS: steps of alignment, then its Top-K term
    "hass-steps": {
        f"n{n}": Variant("hass", (f"++drafter.steps={n}", "++drafter.topk_weight=0", "++drafter.beta=1"), ALIGNED)
        for n in (1, 2, 3, 4)
    },
    "hass-topk": {
        "n3-topk10": Variant("hass", ("++drafter.topk=10", "++drafter.topk_weight=1", "++drafter.beta=1"), ALIGNED)
    },
    # CORAL, Tables 3 and 5: the same steps with contrastive alignment
    "coral-steps": {f"n{n}": Variant("coral", (f"++drafter.steps={n}",), ALIGNED) for n in (1, 2, 3, 4)},
    # Beagle, Figure 4: the early stage's window
    "beagle-window": {f"k{k}": Variant("beagle", (f"++drafter.window={k}",), scratch(60)) for k in (1, 2, 3, 4, 5)},
    # Beagle, section 4: a late stage after the early one, its steps weighted, against k5 above
    "beagle-late": {
        "late": Variant("beagle", ("++drafter.window=5",), (*scratch(60), HALF_LATE)),
        "late-uniform": Variant("beagle", ("++drafter.window=5", "++drafter.decreasing=false"), (*scratch(60), HALF_LATE)),
    },
    # MoA, Tables 2 and 5: the target's last layers, layer self-attention
    "moa": {
        "tli0": Variant("moa", (), scratch(100, 4)),
        "tli1": Variant("moa", ("drafter.tli=1",), scratch(100, 4)),
        "tli3": Variant("moa", ("drafter.tli=3",), scratch(100, 4)),
        "without-lsa": Variant("moa", ("++drafter.lsa=false",), scratch(100, 4)),
    },
    # MoA sees fewer tokens than the other shipped drafters: EAGLE-2 with as many
    "equal-tokens": {
        "moa-312": Variant("moa", decoding=()),
        "eagle2-312": Variant("eagle2", (), ("train.settings.steps=312",), decoding=()),
    },
    # Shipped weights, decoded in two ways
    "trees": {
        "dynamic-26": Variant("eagle2", decoding=("tree.nodes=26", "tree.depth=5")),
        "static-26": Variant("eagle1", decoding=()),
    },
    "beagle-concat": {
        "concat": Variant("beagle", decoding=()),
        "no-concat": Variant("beagle", ("++drafter.concat=false",), decoding=()),
    },
    # CORAL, Table 4: groups times active groups; one router a number of groups
    "router": {
        f"N{n}-top{g}": Variant(
            "eagle2_router",
            (f"++drafter.groups={n}", f"++drafter.active={g}"),
            ("train=router", "train.settings.steps=60"),
            decoding=(),
        )
        for n in (8, 16, 32)
        for g in (1, 2, 3)
    },
    # 0-alpha … 4-alpha of every shipped drafter
    "n-alpha": {
        f"{d}-chain": Variant(d, tokens=36)
        for d in ("vanilla", "medusa", "eagle2", "hass", "coral", "eagle2_router", "coral_router", "beagle", "moa")
    },
}


def call(door: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", f"specbench.{door}", *arguments], cwd=ROOT, env=environment, check=True)


def run(folder: Path, group: str, name: str, variant: Variant) -> None:
    """Train the variant if it is to be trained, then decode."""
    options = [f"drafter={variant.drafter}", *variant.options]
    weights = []
    if variant.training is not None:
        trained = group, name.split("-top")[0]  # a router's training does not know how many groups will be active
        out = f"results/local/ablations/{'-'.join(trained)}"  # relative: it stands in the rows
        call(
            "train",
            *options,
            f"train.name={'-'.join(trained)}",
            f"train.out={out}",
            *variant.training,
            "train.missing=true",
            "train.settings.validate_minutes=1000",  # at the end only
        )
        weights = [f"drafter.weights={out}"]
    shown = name if name.split("-")[0] == variant.drafter else f"{variant.drafter}-{name}"
    prompts = (*PROMPTS, f"decode.max_new_tokens={variant.tokens}")
    call("run", *options, f"drafter.name={shown}", *weights, *prompts, *variant.decoding, f"results={folder / group}")


def main(folder: Path, chosen: list[str]) -> None:
    for choice in chosen or GROUPS:
        group, _, one = choice.partition(":")
        if group not in GROUPS or one not in ("", *GROUPS[group]):
            raise SystemExit(f"no such group or variant: {choice}; there are the groups {', '.join(GROUPS)}")
        for name, variant in GROUPS[group].items():
            if one in ("", name):
                print(f"== {group} {name}", flush=True)
                run(folder, group, name, variant)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python tests/ablations.py FOLDER [GROUP[:NAME] …]")
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
