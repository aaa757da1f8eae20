"""Options of every command are held to the declared types: one line, exit code 2, nothing loaded, nothing written."""

import copy
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from battery import COUNT, attempt, bad_values, leaves, refuse
from conftest import DRAFTERS, ROOT, TRAINED
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import specbench.evidence
import specbench.export
import specbench.report
import specbench.run
import specbench.serve
import specbench.study
import specbench.train
from specbench.common.errors import SpecBenchError
from specbench.common.types import Count
from specbench.config import validation
from specbench.config.train_spec import TrainOptions
from specbench.data.conversations import Conversations
from specbench.data.prompts import PromptSet
from specbench.engine.loading import ModelSpec

COMMANDS: dict[str, Any] = {
    "run": specbench.run,
    "train": SimpleNamespace(main=specbench.train.main, Options=TrainOptions),
    "export": specbench.export,
    "report": specbench.report,
    "study": specbench.study,
    "serve": specbench.serve,
    "evidence": specbench.evidence,
}
GROUPS = {"model": "model", "dataset": "dataset", "tree": "tree"}


@functools.cache
def composed(command: str, *overrides: str) -> Any:
    """A command's configuration; composing one takes a third of a second."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(command, list(overrides))


def named(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


def everything() -> list[tuple[str, tuple[str, ...]]]:
    """A configuration of every YAML file of every group, at a command that takes it."""
    runs = [
        ("run", (f"{group}={name}",)) for group in ("drafter", "model", "dataset", "tree", "link") for name in named(group)
    ]
    recipes = [tuple(name.split("_", 1)) for name in named("recipe")]
    pairs = {*recipes, *(("small", d) for d in TRAINED), *((t, "eagle2") for t in named("train"))}
    trainings = [("train", (f"drafter={d}", f"train={t}")) for t, d in sorted(pairs)]
    return [
        *runs,
        *trainings,
        *(("study", (f"study={name}",)) for name in named("study")),
        ("export", ()),
        ("report", ()),
        ("serve", ()),
    ]


class Loaded(BaseException):
    """A command went on to load something: its options did not stop it."""


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch, tmp_path):
    """Commands in this process neither load nor write."""

    def loaded(*_: Any, **__: Any) -> None:
        raise Loaded

    for kind in (ModelSpec, PromptSet, Conversations):
        monkeypatch.setattr(kind, "load", loaded)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    yield
    GlobalHydra.instance().clear()


def test_the_schema_and_the_yaml_files_agree():
    for command, overrides in everything():
        validation.check(composed(command, *overrides), COMMANDS[command].Options)


def test_every_option_of_a_yaml_file_is_declared_with_a_type():
    """An option without a type would be held to nothing."""
    for command, overrides in everything():
        plain: Any = OmegaConf.to_container(composed(command, *overrides), resolve=True)
        for path, annotation in leaves(plain, COMMANDS[command].Options):
            assert annotation is not Any, path


def put(plain: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a plain configuration with one option set."""
    whole = copy.deepcopy(plain)
    *parents, last = path.split(".")
    functools.reduce(lambda node, name: node[name], parents, whole)[last] = value
    return whole


def test_bad_values_of_every_option_are_refused_by_name():
    """Every value that is not of an option's declared type, for every option of every drafter and command."""
    tried: set[tuple[str, str]] = set()
    places = [
        *(("train", f"drafter={d}") for d in TRAINED),
        *(("run", f"drafter={d}") for d in DRAFTERS),
        *(("run", f"dataset={d}") for d in named("dataset")),
        *((command,) for command in ("serve", "evidence", "export", "report")),
        ("study", "study=bench"),
    ]
    for command, *overrides in places:
        plain: Any = OmegaConf.to_container(composed(command, *overrides), resolve=True)
        for path, annotation in leaves(plain, COMMANDS[command].Options):
            for value in bad_values(annotation):
                if (f"{command} {path} {annotation}", value) in tried:
                    continue  # another drafter has it alike
                tried.add((f"{command} {path} {annotation}", value))
                bad = put(plain, path, OmegaConf.to_container(OmegaConf.create(f"x: {value}"))["x"])
                with pytest.raises(SpecBenchError) as refused:
                    validation.check_node(bad, (COMMANDS[command].Options,))
                message = str(refused.value)
                assert message.startswith(path) and "\n" not in message, message
    COUNT.tried += len(tried)
    assert len(tried) > 600


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("_target_"), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(data=st.data())
def test_anything_at_all_is_held_or_refused_in_one_line(data):
    """Whatever stands at an option or a node, no other exception comes of it, and what is held is JSON of the type."""
    command, override = data.draw(
        st.sampled_from([("run", "drafter=moa"), ("train", "drafter=coral"), ("report", "format=markdown")])
    )
    plain: Any = OmegaConf.to_container(composed(command, override), resolve=True)
    path = data.draw(st.sampled_from([path for path, _ in leaves(plain, COMMANDS[command].Options)] + list(plain)))
    message = None
    try:
        validation.check_node(put(plain, path, data.draw(ANYTHING)), (COMMANDS[command].Options,))
    except SpecBenchError as error:
        message = str(error)
    assert message is None or (message.startswith(path) and len(message.splitlines()) == 1)


def test_a_key_of_control_characters_stays_on_one_line():
    plain: Any = OmegaConf.to_container(composed("train", "drafter=coral"), resolve=True)
    with pytest.raises(SpecBenchError, match=r"^train\.settings\.groups\.\\x1e=null: must be a valid number$"):
        validation.check_node(put(plain, "train.settings.groups", {"\x1e": None}), (COMMANDS["train"].Options,))


EVERY = 5  # options, of which one is tried through a whole command, which takes half a second each


def cases(command: str, overrides: tuple[str, ...]) -> list[tuple[str, str]]:
    """For every option of a configuration one bad value, the kinds in turn; and what to put on the command line."""
    plain: Any = OmegaConf.to_container(composed(command, *overrides), resolve=True)
    found = []
    for number, (path, annotation) in enumerate(leaves(plain, COMMANDS[command].Options)):
        if values := bad_values(annotation):
            found.append((path, f"++{path}={values[number % len(values)]}"))
    return found


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("run", ("drafter=medusa",)),
        ("run", ("drafter=moa",)),
        ("train", ("drafter=coral",)),
        ("export", ()),
        ("report", ()),
        ("study", ("study=bench",)),
    ],
)
def test_commands_refuse_bad_options(command, overrides, tmp_path):
    """Through the whole command: one line that names the option, exit code 2, and no file touched.

    Of every few options one: that each is refused by name is what the tests above show without a command.
    """
    (tmp_path / "rows.jsonl").write_text("earlier\n")
    base = [*overrides, *([f"results={tmp_path}"] if command in ("run", "report", "study") else [f"hydra.run.dir={ROOT}"])]
    wrong = [
        why
        for path, override in cases(command, overrides)[::EVERY]
        if (why := refuse(COMMANDS[command], command, [*base, override], path.split("[")[0], [tmp_path]))
    ]
    assert not wrong


WHOLE = {  # what is wrong with a command line as a whole, and what the line must name
    "run": {
        "rerun=nonsense": "rerun",
        "+foo=1": "foo",
        "foo=1": "foo",
        "drafer=eagle2": "did you mean drafter?",
        "decode.max_new_token=3": "did you mean decode.max_new_tokens?",
        "drafter=eagle9": "eagle9",
        "drafter=null": "drafter",
        "model=null": "model",
        "dataset=null": "dataset",
        "tree=null": "tree",
        "~sampler": "sampler",
        "sampler.temperature=1e-38": "sampler.temperature=1e-38: must be 0, or from 0.0001",
        "sampler.temperature=1e7": "sampler.temperature",
        "drafter": "drafter",
        "tree.depth=[": "",
        "results=${nothing}": "nothing",
        "results='${oc.env:SPECBENCH_NOT_SET}'": "SPECBENCH_NOT_SET",
        "results='${results}'": "",
        "results=???": "results",
        "drafter._target_=os.system": "drafter._target_",
        "drafter._target_=nowhere.Nothing": "drafter._target_",
        "drafter._target_=specbench.engine.policies.Chain": "drafter._target_",
        "~drafter._target_": "drafter._target_",
        "drafter.growth=5": "drafter.growth",
        "drafter.growth={depth: 3}": "drafter.growth",
        "sampler._target_=specbench.engine.decode.RunSettings": "sampler._target_",
        "+drafter._partial_=true": "_partial_",
        "+tree.paths=[]": "tree.paths",
        "alpha=[0.5]": "alpha",
        "model.weights=random": "alpha",
        "results=/dev/null/x": "/dev/null",
        "tree=medusa_dense + tree.paths=[]": "tree.paths",
        "tree=medusa_dense + tree.paths=[[0,0]]": "tree.paths",
        "drafter=medusa + tree=eagle2": "drafter.heads",
        "tree=chain + tree.gamma=1000000000": "tree.gamma=1000000000: must be less than or equal to 256",
        "drafter=lookahead + drafter.window=256 + drafter.level=64": "drafter=lookahead: trees of up to",
        "drafter.name=none": "drafter.name=none: this is the name of another drafter, not of Eagle",
        "drafter=none + drafter.name=suffix": "drafter.name=suffix",
        "drafter=[suffix,lookahead] + drafter.name=mine": "drafter.name",
        "+baseline.name=mine": "baseline.name",
        "baseline._target_=drafters.suffix.Suffix + +baseline.name=none": "baseline.name=none: this is the name of another",
        "model.name=..": "model.name=..: must match pattern",
    },
    "train": {
        "drafter=none": "none",
        "train.settings.decay=cubic": "train.settings.decay",
        "train.settings.steps=-1": "train.settings.steps",
        "train.settings.epochs=0": "train.settings.epochs",
        "train.settings.warmup=-1": "train.settings.warmup",
        "train.settings.seed=abc": "train.settings.seed",
        "train.settings.phases=[{share: 0.5}]": "sum to 1",
        "train.settings.phases=[{share: 1, drafter: {nonsense: 1}}]": "train.settings.phases[0].drafter.nonsense",
        "train.settings.phases=[{share: 1, drafter: {noise: abc}}]": "train.settings.phases[0].drafter.noise",
        "train.settings.phases=[{share: 1, lrs: 2}]": "did you mean lr?",
        "train.settings.phases=[{lr: 1}]": "train.settings.phases[0].share",
        "train.settings.phases=[5]": "train.settings.phases[0]",
        "train.settings.phases=5": "train.settings.phases",
        "train.settings.warmup_steps=3": "warmup",
        "train.out=/dev/null/x": "/dev/null",
        "train.out=/proc/x": "/proc",
        "train.batch=0": "train.batch",
        "train.row_tokens=1": "train.row_tokens",
        "drafter.name=hass": "drafter.name=hass",
        "train.corpus.shard=0": "train.corpus.shard",
        "train.corpus.temperatures=[]": "train.corpus.temperatures",
        "train.corpus.temperatures=[1e-9]": "train.corpus.temperatures",
        "train.shard_target=true": "build=false",
        "train.shard_target=true + train.build=false + train.until=acceptance": "in one process",
        "train.text.wheel.sha256=abc": "train.text.wheel.sha256",
    },
    "study": {
        "study=bench + cells=[]": "cells=[]",
        "study=bench + datasets=[]": "datasets=[]",
        "study=bench + seeds=[]": "seeds=[]",
        "study=../study/bench": "study=../study/bench",
    },
    "export": {"drafter.weights=null": "drafter.weights", "format=gguf": "format", "out=/dev/null/x": "/dev/null"},
    "report": {
        "format=pdf": "format",
        "format=eagle": "import=",
        "results=/nowhere": "/nowhere",
        "claims=5": "claims",
        "claims=[beagle,5]": "claims",
    },
}


@pytest.mark.parametrize("command", WHOLE)
def test_commands_refuse_what_is_wrong_as_a_whole(command, tmp_path):
    place = [f"results={tmp_path}"] if command in ("run", "study") else []
    wrong = []
    for override, mentions in WHOLE[command].items():
        own = [] if override.startswith("results") else place
        if why := refuse(COMMANDS[command], command, [*own, *override.split(" + ")], mentions, [tmp_path]):
            wrong.append(f"{override}: {why}")
    assert not wrong


def test_the_nearest_known_option_is_named():
    @dataclasses.dataclass
    class Taker:
        depth: Count
        kind: Literal["a", "b"] = "a"

    with pytest.raises(SpecBenchError, match=r"^tree\.dept: no such option; did you mean depth\?$"):
        validation.check_node({"dept": 3}, (Taker,), "tree")
    with pytest.raises(SpecBenchError, match=r"^tree\.depth is missing; Taker needs it$"):
        validation.check_node({"kind": "b"}, (Taker,), "tree")
    with pytest.raises(SpecBenchError, match=r"^tree\.kind=c: must be 'a' or 'b'$"):
        validation.check_node({"depth": 1, "kind": "c"}, (Taker,), "tree")
    validation.check_node({"depth": 1}, (Taker,), "tree")


def test_a_fault_of_the_program_leaves_its_traceback_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(specbench.report, "Sources", lambda *_, **__: {}["nothing"])
    code, err, _ = attempt(specbench.report, "report", f"results={tmp_path}")
    assert code == 2 and err.count("\n") == 1 and "KeyError" in err
    log = Path(err.split("traceback is in ")[1].rstrip(")\n"))
    assert "Traceback" in log.read_text() and "nothing" in log.read_text()
