"""What a study is: one table or figure of a paper as an experiment, written down in `conf/study/<name>.yaml`.

A study owns its arms, how they are trained and decode, what it needs, the published numbers that it stands beside, and
the claims that it can judge. Its arms decode the same prompts in turn in one process beside one baseline, and a claim
compares arms of its own study alone. Read by the door (`specbench.study`) and by reports, which need no model.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt, Interval, MinLen
from pydantic import AfterValidator, StringConstraints, with_config
from typing_extensions import NotRequired, TypedDict

from specbench.common.errors import SpecBenchError
from specbench.common.io import STRICT, read_yaml, readable
from specbench.common.storage import PROJECT
from specbench.common.types import Name, Natural, Text
from specbench.records.metrics import RATES

FOLDER = PROJECT / "conf" / "study"
OF_ARMS = (  # what is no sum over rows
    "parameters", "draft_cost", "draft_cost_by_parameters", "expected_speed_up", "promised_speed_up",
)  # fmt: skip
METRICS = (*RATES, *OF_ARMS)

Override = Annotated[str, StringConstraints(pattern=r"^[+~]{0,2}[\w/@.]+(=.*)?$")]  # as typed behind a door
Quantity = Annotated[str, StringConstraints(pattern=r"^\w+(\.\w+)+$")]  # of a measurement, as `memory.peak`
Measured = Literal[
    "memory", "training", "drafting", "overhead", "target_pass", "clients", "generate"
]  # see `specbench.evaluation.measurements`
Aspect = Literal["tree", "dataset", "temperature", "length", "dtype", "prompts"]


class Arm(TypedDict):
    """One side of a study.

    run: what `specbench.run` would be told. train: what `specbench.train` would be told beside the drafter's options in
    `run`; without it the weights are those that lie there. weights: the arm whose training this one uses. seeds: of
    training.
    """

    run: Annotated[list[Override], MinLen(1)]
    train: NotRequired[list[Override]]
    weights: NotRequired[Name]
    seeds: NotRequired[Annotated[list[Natural], MinLen(1)]]


class Needs(TypedDict, total=False):
    """What must be there for a study to run, or for a claim to be judged.

    device: cuda. vocabulary: a target with as many ids. billions: a target of as many parameters. trained: tokens that
    every trained arm has seen. alike: all trained arms saw as many tokens, within 5%, seeds averaged. pretrained: an arm
    whose weights somebody else trained on far more text. project: what this project has not.
    """

    device: Literal["cuda"]
    vocabulary: Annotated[int, Gt(0)]
    billions: Annotated[float, Gt(0)]
    trained: Annotated[float, Gt(0)]
    alike: Literal[True]
    pretrained: Name
    project: Text


class At(TypedDict, total=False):
    """Which of a study's cells; the first one's dataset and greedy decoding, unless said otherwise.

    category: of its prompts; `over_at` then stands for all other categories.
    """

    dataset: Name
    category: Name
    temperature: Annotated[float, Gt(0)]


# "is" is a keyword, hence the call.
Test = TypedDict(
    "Test",
    {
        "metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "measured": NotRequired[Quantity],
        "of": Name,
        "at": NotRequired[At],
        "over": NotRequired[Name],
        "over_at": NotRequired[At],
        "over_metric": NotRequired[Literal[METRICS]],  # type: ignore[valid-type]
        "than": NotRequired[Annotated[float, Gt(0)]],
        "is": NotRequired[Literal["more", "less"]],
        "by": NotRequired[float],
        "within": NotRequired[Annotated[float, Gt(0)]],
    },
)


def _complete(test: Test) -> Test:
    if ("metric" in test) == ("measured" in test):
        raise ValueError("a test is about a `metric` of rows, or about something `measured` beside them")
    if ("is" in test) == ("within" in test):
        raise ValueError("a test expects a direction (`is`) or an interval (`within`)")
    if not {"over", "over_at", "over_metric", "than"} & set(test):
        raise ValueError(
            "a test compares: with another arm (`over`), cell (`over_at`), metric (`over_metric`) or number (`than`)"
        )
    if "category" in test.get("over_at", {}):
        raise ValueError("`over_at` names no category: it stands for all others than the one of `at`")
    return test


class Claim(TypedDict):
    """What a paper says, what it printed, and the tests of it; none where the project lacks what they would be about."""

    says: Text
    source: Text
    published: Text
    needs: NotRequired[Needs]
    tests: list[Annotated[Test, AfterValidator(_complete)]]


class Shown(TypedDict):
    """A published table beside which the study's numbers stand: which arm each row, or `row | column`, is about.

    paper, table: as in `results/published/*.csv`.
    """

    paper: Text
    table: Text
    rows: Mapping[str, Name]


@with_config(STRICT)
class Study(TypedDict):
    """One `conf/study/*.yaml`.

    cells: what `specbench.run` would be told of prompts, lengths, temperature and `replay`, a list a cell. varies: what
    the study is about, so that arms may differ in it. priority: of its measurements, 1 first, 5 unless it says so. measure:
    how many times over each quantity is taken, in one cell.
    """

    title: Text
    source: Annotated[list[Text], MinLen(1)]
    needs: NotRequired[Needs]
    arms: Annotated[Mapping[Name, Arm], MinLen(1)]
    cells: Annotated[list[list[Override]], MinLen(1)]
    varies: NotRequired[list[Aspect]]
    priority: NotRequired[Annotated[int, Interval(ge=1, le=9)]]
    measure: NotRequired[Mapping[Measured, Natural]]
    shows: NotRequired[list[Shown]]
    claims: NotRequired[list[Claim]]


def check(study: Study, name: str) -> Study:
    """What a shape cannot say: that names name something. Raises `SpecBenchError`."""
    arms = study["arms"]
    named = [a["weights"] for a in arms.values() if "weights" in a]
    named += [arm for shown in study.get("shows", []) for arm in shown["rows"].values()]
    for claim in study.get("claims", []):
        if not claim["tests"] and "project" not in {**study.get("needs", {}), **claim.get("needs", {})}:
            raise SpecBenchError(f"study {name}: {claim['says']!r} has no test; say in needs.project what it waits for")
        named += [test[side] for test in claim["tests"] for side in ("of", "over") if side in test]
    for arm in named:
        if arm not in arms and arm != "none":
            raise SpecBenchError(f"study {name}: no arm is called {arm}; there are {', '.join(arms)}")
    for label, one in arms.items():
        if one.get("weights") and "train" not in arms[one["weights"]]:
            raise SpecBenchError(f"study {name}: arm {label} takes the weights of {one['weights']}, which is not trained")
        if not any(o.startswith("drafter=") for o in one["run"]):
            raise SpecBenchError(f"study {name}: arm {label} names no drafter; begin its `run` with drafter=NAME")
    return study


def read(path: Path) -> Study:
    """One file. Raises `SpecBenchError`."""
    study: Study = read_yaml(path, Study)
    return check(study, path.stem)


def load(folder: Path = FOLDER, problems: list[str] | None = None) -> dict[str, Study]:
    """All studies by name. problems: see `specbench.common.io.readable`."""
    return {path.stem: study for path, study in readable(sorted(folder.glob("*.yaml")), read, problems)}


def unmet(needs: Mapping[str, Any], header: Mapping[str, Any] | None, cuda: bool) -> list[str]:
    """What of a list of needs is not there, in words.

    Args:
        header: of the cell that would answer; None where nothing was run. cuda: is there a GPU, if nothing was run?
    """
    found = []
    if "project" in needs:
        found.append(needs["project"])
    if needs.get("device") == "cuda" and not (
        str(header["target"].get("device", "")).startswith("cuda") if header else cuda
    ):
        found.append("a GPU")
    if header is None:
        return found
    if header["target"].get("vocabulary", 0) < needs.get("vocabulary", 0):
        found.append(f"a target with {needs['vocabulary']:,} ids")
    if header["target"]["parameters"] < 0.8e9 * needs.get("billions", 0):
        found.append(f"a target of {needs['billions']:g} billion parameters")
    seen: dict[str, list[int]] = {}  # tokens by arm, of each of its seeds
    for label, arm in header["arms"].items():
        if arm["weights"].get("history"):
            seen.setdefault(arm.get("of", label), []).append(arm["weights"]["tokens_seen"])
    means = [sum(tokens) / len(tokens) for tokens in seen.values()]
    if seen and min(map(min, seen.values())) < needs.get("trained", 0):
        found.append(f"drafters trained on {needs['trained'] / 1e6:g} M tokens")
    if needs.get("alike") and means and max(means) > 1.05 * min(means):
        found.append("drafters trained on as many tokens each")
    if needs.get("pretrained") in seen:
        found.append(f"a pretrained draft model as {needs['pretrained']}")
    return found


def option(overrides: Iterable[str], name: str, default: str) -> str:
    """An option's value among overrides; the last word counts."""
    values = [value for key, _, value in (word.partition("=") for word in overrides) if key.lstrip("+") == name]
    return values[-1] if values else default


def replayed(overrides: Iterable[str]) -> bool:
    return option(overrides, "replay", "false") == "true"


def measuring_cell(study: Study) -> int:
    """The cell in which quantities are measured beside rows, once a study: the first one whose seconds count."""
    return next((number for number, overrides in enumerate(study["cells"]) if not replayed(overrides)), 0)


def sources(studies: Iterable[Study]) -> set[str]:
    """Tables and figures that have a study."""
    return {source for study in studies for source in study["source"]}
