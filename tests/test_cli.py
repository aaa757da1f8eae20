"""The command lines, run for real on a tiny model: rows, resume after kill -9, bad input, training and its resume."""

import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command_line import (
    blocks_of,
    call,
    kill_after_rows,
    records_of,
    rows_of,
    run,
    start,
    train,
    typed,
    wait_for_rows,
    weight,
)
from conftest import ROOT, composed
from safetensors.torch import load_file

from specbench.config.cli import expand_shorthands
from specbench.records import blocks
from specbench.records.blocks import NAME, locked
from specbench.reporting import cells


def test_run_writes_rows_prints_a_table_and_does_nothing_twice(home):
    first = typed(home, "run", "drafter=eagle2", "data.limit=5", weight(home, "eagle2"))
    assert first.returncode == 0, first.stderr[-3000:]
    out = first.stdout
    assert "eagle2" in out and "plain" in out and re.search(r"^eagle2 .* same$", out, re.M)
    assert all(len(line) <= 80 for line in out.splitlines()), "wider than a terminal"
    header, rows = rows_of(home, "eagle2")
    assert header["hardware"]["cores"] and header["versions"]["torch"] and header["commit"]
    assert {(r.drafter, r.question, r.turn) for r in rows} == {
        (d, str(q), t) for d in ("none", "eagle2") for q in (0, 2, 4, 7, 9) for t in (0, 1)
    }
    again = run(home, "run", "drafter=eagle2", "data.limit=5", weight(home, "eagle2"))
    assert again == out
    assert rows_of(home, "eagle2")[1] == rows
    table = call(home, "report", f"results={home / 'results'}", "format=markdown")
    assert "| eagle2 |" in table.stdout, table.stderr


def test_several_drafters_decode_beside_one_baseline_and_leave_files_for_other_programs(home):
    results = home / "several"
    out = run(home, "run", "drafter=[suffix,prompt_lookup]", "data.limit=2", f"results={results}", "details=true")
    assert [line.split()[0] for line in out.splitlines()[2:5]] and {"suffix", "prompt_lookup", "plain"} <= set(out.split())
    assert "accepted by step" in out
    (path,) = results.rglob(NAME)
    header, records = blocks.read_block(path)
    assert list(header["arms"]) == ["none", "suffix", "prompt_lookup"]
    (table,) = json.loads((path.parent / "summary.json").read_text())
    assert {row["arm"]: row["generations"] for row in table["rows"]} == {"none": 4, "suffix": 4, "prompt_lookup": 4}
    assert "too few for a verdict" in table["verdict"]
    answers = [json.loads(line) for line in (path.parent / "answers.jsonl").read_text().splitlines()]
    plain = {
        (r.question, r.turn): r.tokens for r in records if getattr(r, "drafter", "") == "none" and hasattr(r, "tokens")
    }
    assert {(a["question"], a["turn"]): a["ids"] for a in answers} == plain and all(a["text"] for a in answers)
    twice = run(home, "run", "drafter=[suffix,suffix]", ok=False)
    assert twice.startswith("specbench: drafter=[suffix,suffix]: each drafter once")


def test_a_sweep_ends_with_one_table(home):
    results = home / "table"
    done = call(home, "run", "-m", "drafter=suffix,prompt_lookup", "data.limit=2", f"results={results}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("speed-up [95%]") == 1 and done.stdout.count("\nplain ") == 1
    assert {"suffix", "prompt_lookup"} <= set(done.stdout.split()) and not list(results.glob(".sweep*"))


def test_a_whole_number_as_temperature_is_resumed_and_shown(home):
    words = "drafter=suffix", "data.limit=1", "sampler.temperature=1", f"results={home / 'whole'}"
    first, second = run(home, "run", *words), run(home, "run", *words)
    assert "T=1" in first and first == second and len(blocks_of(home / "whole", "suffix")) == 1


def test_a_refusal_and_a_report_can_be_typed_too(home):
    refused = typed(home, "run", "drafter=none", "rerun=perhaps")
    assert refused.returncode == 2 and refused.stderr == "specbench: rerun=perhaps: must be 'missing' or 'all'\n"
    table = typed(home, "report", f"results={ROOT / 'tests' / 'golden' / 'rows'}", "format=markdown")
    assert table.returncode == 0 and "| eagle2" in table.stdout, table.stderr


def test_a_head_is_exported_to_a_new_folder_only(home, tmp_path):
    out = tmp_path / "head"
    asked = "drafter=eagle2", weight(home, "eagle2"), "format=sglang", f"out={out}"
    done = typed(home, "export", *asked)
    assert done.returncode == 0 and f"tensors in {out}" in done.stdout, done.stderr
    assert f"serve it with: python -m sglang.launch_server --model-path {home / 'model'} --speculative-alg" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert "is there already" in run(home, "export", *asked, ok=False)


@pytest.mark.parametrize(
    ("drafter", "server", "message"),
    [
        (
            "suffix",
            "vllm",
            "format=vllm: it has no weights to export (vllm takes eagle3, medusa; sglang takes coral,",
        ),
        ("beagle", "sglang", "sglang has no model of Beagle's kind"),
        ("medusa", "sglang", "sglang has no model of Medusa's kind"),
        ("eagle2", "vllm", "train without one (+drafter.bias=false) or use format=sglang (vllm takes"),
        ("eagle2_token", "sglang", "drafter.inputs=token: sglang serves (state, next token) pairs only"),
    ],
)
def test_what_a_format_does_not_take_is_refused_before_anything_is_loaded(home, tmp_path, drafter, server, message):
    asked = f"drafter={drafter}", f"format={server}", f"out={tmp_path / 'out'}", "model.path=/nowhere"
    assert message in run(home, "export", *asked, ok=False)


def test_a_sweep_reports_a_failed_cell_and_runs_the_others(home):
    results = home / "sweep"
    done = call(home, "run", "-m", "drafter=vanilla,eagle2", "data.limit=1", f"results={results}", weight(home, "eagle2"))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "1 cells failed, named above" in done.stderr.splitlines()[-1]
    assert "vanilla" in done.stderr and "do not fit" in done.stderr
    assert len(list(results.rglob(NAME))) == 1


def test_run_survives_kill_9_and_repeats_and_loses_nothing(home):
    results = home / "killed"
    arguments = ["drafter=eagle2", f"results={results}", "decode.max_new_tokens=50", weight(home, "eagle2")]
    path, before = kill_after_rows(start(home, "run", *arguments), results, 5)
    assert 5 < before.count(b"\n") < 1 + 12 * 2 * 2, "killed too late to show anything"
    run(home, "run", *arguments)
    assert path.read_bytes() == before, "a block that ended is never touched"
    assert_complete(results, "eagle2")
    assert len(blocks_of(results, "eagle2")) == 2


def assert_complete(results, drafter):
    """Every generation is there; only the baseline may stand in two blocks, beside the rows that were missing."""
    _, rows = records_of(results, drafter)
    keys = [r.key for r in rows if r.drafter == drafter]
    assert len(keys) == len(set(keys)) == 12 * 2
    assert {r.key[1:] for r in rows if r.drafter == "none"} == {key[1:] for key in keys}
    (entry,) = [e for e in cells.collect(blocks.below(results)) if e.name == drafter]
    assert entry.summary.prompts == 24 and len(entry.baseline) == 24


def test_an_interrupted_run_says_how_to_go_on(home, tmp_path):
    arguments = ["drafter=none", f"results={tmp_path}", "decode.max_new_tokens=50"]
    process = start(home, "run", *arguments)
    wait_for_rows(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    done = process.completed()
    assert done.returncode == 130
    assert done.stderr.endswith("specbench: interrupted; run the same command again to continue\n")
    run(home, "run", *arguments)
    _, rows = records_of(tmp_path, "none")
    assert len({r.key for r in rows}) == len(rows) == 12 * 2


BAD = {
    "no sequences": (["batch=0"], "batch"),
    "fewer than none": (["batch=-2"], "batch"),
    "a batch and a replay": (["batch=2", "replay=true"], "replay=true is for one sequence at a time"),
    "a batch over a link": (["batch=2", "link=4g"], "link=4g is for one sequence at a time"),
    "a batch of a drafter that cannot": (
        ["drafter=ouroboros", "batch=2"],
        "drafter=ouroboros drafts for one sequence at a time",
    ),
    "a batch larger than memory": (["batch=100000", "drafter=none"], "a smaller batch="),
    "unknown key": (["decode.nonsense=1"], "nonsense"),
    "unknown drafter": (["drafter=eagel"], "eagle3"),
    "missing weights": (["drafter=eagle2", "drafter.weights=/nowhere"], "train them"),
    "another target's weights": (
        ["drafter=eagle2", "drafter.weights=drafters/weights/smollm2-135m/eagle2"],
        "not for this one",
    ),
    "no such data": (["data.root=/nowhere"], "no data file"),
    "no such model": (["model.path=/nowhere"], "config.json"),
    "no such draft model": (["drafter=vanilla", "drafter.path=/nowhere"], "no draft model"),
    "a GPU where none is": (["model.device=cuda:7"], "model.device=cpu"),
    "a dtype that is none": (["model.dtype=floaty"], "floaty"),
    "negative temperature": (["sampler.temperature=-1"], "temperature"),
    "odd rerun": (["rerun=perhaps"], "must be 'missing' or 'all'"),
    "no prompt left": (["data.limit=0"], "data.limit=0: must be greater than or equal to 1"),
    "a tree that is none": (["drafter=vanilla", "tree.gamma=0"], "gamma"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(home, case):
    arguments, message = BAD[case]
    first = [] if any(a.startswith("drafter=") for a in arguments) else ["drafter=none"]
    assert message in run(home, "run", *first, *arguments, ok=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["w1"]}\n{"turns": ["w', "cut off"),
        ("hello\n", "not JSON"),
        ("[1]\n", "JSON object"),
        ('{"turns": ["  "]}\n', "empty prompt"),
        ('{"turns": []}\n', "not a text"),
        ("", "no prompts"),
    ],
)
def test_bad_data_files_are_one_clear_line(home, tmp_path, content, message):
    (tmp_path / "mtbench.jsonl").write_text(content)
    assert message in run(home, "run", "drafter=none", f"data.root={tmp_path}", ok=False)


def test_a_prompt_longer_than_the_context_is_a_visible_row_and_the_others_run(home, tmp_path):
    long = {"question_id": "long", "turns": ["w1 " * 300]}
    (tmp_path / "mtbench.jsonl").write_text(json.dumps(long) + '\n{"question_id": "short", "turns": ["w5"]}\n')
    results = tmp_path / "results"
    message = run(home, "run", "drafter=none", f"data.root={tmp_path}", f"results={results}", ok=False)
    assert "1 generations failed" in message
    _, rows = records_of(results, "none")
    assert [r.kind for r in rows] == ["error", "prompt"] and "300" in rows[0].error


def test_training_writes_weights_that_run_uses(home):
    done = typed(home, "train", *train(home, "plain"))
    assert done.returncode == 0, done.stderr[-3000:]
    provenance = json.loads((home / "out" / "plain" / "provenance.json").read_text())
    assert provenance["tokens_seen"] > 0 and provenance["steps"] > 20
    assert all(point["tree_tau"] >= 1 <= point["chain_tau"] for point in provenance["history"])
    out = run(
        home, "run", "drafter=eagle2", f"drafter.weights={home / 'out' / 'plain'}", f"results={home / 'r2'}", "data.limit=1"
    )
    assert "eagle2" in out


def test_trees_are_fitted_to_weights_and_machine(home):
    """From the training's end over a run's header to the command that shows costs; and what is missing is said and made."""
    run(home, "train", *train(home, "fitted"))
    folder = home / "out" / "fitted"
    followed = (folder / "acceptance.json").read_text()
    weights = "drafter=eagle2", f"drafter.weights={folder}"
    for tree in ("fitted", "fitted_static", "rate"):
        output = run(home, "run", *weights, f"tree={tree}", f"results={home / tree}", "data.limit=1")
        header = json.loads(next((home / tree).rglob(NAME)).read_text().split("\n")[0])
        chosen = header["arms"]["eagle2"]["fitted"]
        assert chosen["choice"]["speedup"] >= chosen["runner_up"]["speedup"] > 0 and set(chosen["costs"]) >= {
            "verify",
            "level",
        }
        assert "eagle2" in output
    assert len(list((home / "cache" / "costs" / "tiny").glob("eagle2-*.json"))) == 1, "the same costs are timed once"
    output = run(home, "cost", *weights, "contexts=[8,16]", f"out={home / 'costs'}")
    assert "fastest: depth=" in output and (home / "costs" / "tiny-eagle2.png").stat().st_size > 10_000
    assert "are for trees that are fitted" in run(home, "cost", *weights, "tree=chain", ok=False)
    assert "in this process; set link=local" in run(home, "cost", *weights, "link=lan", ok=False)
    assert "one drafter at a time" in run(home, "cost", "drafter=[eagle2,hass]", ok=False)
    recycling = "drafter=token_recycling", "tree=fitted_static"
    assert "its acceptance is not measured" in run(home, "cost", *recycling, ok=False)
    (folder / "acceptance.json").unlink()
    run(home, "train", *train(home, "fitted", "train.follow=false"))
    assert "until=acceptance" in run(home, "run", *weights, "tree=rate", f"results={home / 'rate'}", ok=False)
    run(home, "train", *train(home, "fitted", "train.until=acceptance"))
    assert json.loads((folder / "acceptance.json").read_text())["weights"] == json.loads(followed)["weights"]


def test_sublayers_to_skip_are_searched_and_taken(home):
    out = home / "out" / "skip"
    output = run(home, "train", *train(home, "skip", "drafter=self_speculation", "train.until=search"))
    assert "plain decoding expected" in output and json.loads((out / "skip.json").read_text())["trials"] > 0
    wanted = "drafter=self_speculation", f"drafter.searched={out}", f"results={home / 'skipped'}", "data.limit=1"
    assert "self_speculation" in run(home, "run", *wanted)
    assert "nothing to search" in run(home, "train", *train(home, "skip", "train.until=search"), ok=False)


def test_training_survives_kill_9_bit_for_bit(home):
    run(home, "train", *train(home, "whole"))
    process = start(home, "train", *train(home, "killed"))
    checkpoint = home / "cache" / "training" / "tiny" / "killed" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if torch.load(checkpoint, weights_only=True)["step"] >= 8:
                break
        except (OSError, RuntimeError, EOFError):
            pass
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = torch.load(checkpoint, weights_only=True)
    assert 8 <= state["step"] < state["total"], "killed too late to show anything"
    run(home, "train", *train(home, "killed"))
    for name in ("whole", "killed"):
        assert (home / "out" / name / "model.safetensors").is_file()
    whole, killed = ((home / "out" / n / "model.safetensors").read_bytes() for n in ("whole", "killed"))
    assert whole == killed and not checkpoint.exists(), "the same recipe would end at once instead of training anew"


def test_two_trainings_of_one_name_would_share_a_checkpoint(home):
    with locked(home / "cache" / "training" / "tiny" / "taken", "training", wait=False):
        message = run(home, "train", *train(home, "taken"), ok=False)
    assert "another process trains taken" in message and "train.name=NAME" in message


def kill_often(begin, times, longest):
    """Start a command again and again, each time killed at another moment; whether any was killed before its end."""
    moments = random.Random(7)
    cut_short = 0
    for _ in range(times):
        process = begin()
        time.sleep(moments.uniform(0.2, longest))
        cut_short += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    return cut_short


def test_a_run_killed_at_six_moments_loses_and_doubles_nothing(home, tmp_path):
    arguments = ["drafter=eagle2", f"results={tmp_path}", "decode.max_new_tokens=100", weight(home, "eagle2")]
    assert kill_often(lambda: start(home, "run", *arguments), 6, 2.5) >= 2
    run(home, "run", *arguments)
    assert_complete(tmp_path, "eagle2")


def test_a_training_killed_at_six_moments_ends_with_the_same_weights(home):
    run(home, "train", *train(home, "once"))
    assert kill_often(lambda: start(home, "train", *train(home, "often")), 6, 3.0) >= 2
    run(home, "train", *train(home, "often"))
    once, often = ((home / "out" / n / "model.safetensors").read_bytes() for n in ("once", "often"))
    assert once == often


def test_a_sweep_trains_every_drafter_by_its_own_recipe(home):
    everywhere = [
        a for a in train(home, "sweep") if not a.startswith(("drafter=", "train.name=", "train.settings.warmup="))
    ]
    own = f"train.out={home / 'out'}/sweep-${{drafter.name}}"
    run(home, "train", "-m", *everywhere, "drafter=medusa,eagle2", own, "train.settings.steps=3")
    warmups = {}
    for drafter in ("medusa", "eagle2"):
        recipe = json.loads((home / "out" / f"sweep-{drafter}" / "provenance.json").read_text())["recipe"]
        warmups[drafter] = recipe["settings"]["warmup"]
    assert warmups == {"medusa": 0.1, "eagle2": 0.03}


def test_a_gpus_recipes_train_every_drafter_at_toy_size(home):
    """Packed rows, half precision over weights in float32, every conversation held several times."""
    everywhere = [a for a in train(home, "gpu") if not a.startswith(("drafter=", "train.name=", "train.batch="))]
    small = ["train=gpu", "model.dtype=bfloat16", "train.batch=2", "train.row_tokens=64", "train.corpus.rows=16"]
    drafters = ["vanilla", "medusa", "eagle2", "hass", "eagle3", "coral", "beagle", "moa"]
    own = [f"train.out={home / 'out'}/gpu-${{drafter.name}}", "train.name=gpu-${drafter.name}"]
    run(home, "train", "-m", *everywhere, *small, f"drafter={','.join(drafters)}", *own, "train.settings.steps=5")
    for drafter in drafters:
        provenance = json.loads((home / "out" / f"gpu-{drafter}" / "provenance.json").read_text())
        assert provenance["steps"] == 5 and provenance["recipe"]["settings"]["precision"] == "bf16"
        assert provenance["data"]["unique_tokens"] > 3 * 52 * 20, "four draws of 52 conversations"
        assert len(provenance["held_out"]["answers"]) == 2 and provenance["held_out"]["chain_tau"] >= 1
    table = call(home, "report", f"training={home / 'out'}").stdout
    assert all(f"| gpu-{d} |" in table for d in drafters)


def test_a_packed_corpus_saves_the_writing(home, tmp_path):
    packed, until = f"train.packed={tmp_path / 'shipped'}", "train.until=corpus"
    run(home, "train", *train(home, "pack", "train.corpus.seed=3"), packed, until, "train.pack=public domain")
    provenance = json.loads((tmp_path / "shipped" / "corpus.json").read_text())
    assert provenance["license"] == "public domain" and provenance["training_tokens"] > 500 and provenance["held_out"] == 8
    assert not (home / "out" / "pack").exists(), "nothing was trained"
    shutil.rmtree(
        next(p.parent for p in (home / "cache" / "corpora").rglob("settings.json") if '"seed": 3' in p.read_text())
    )
    run(home, "train", *train(home, "unpacked", "train.corpus.seed=3", "train.settings.steps=2"), packed)
    folder = next(p.parent for p in (home / "cache" / "corpora").rglob("answers-packed.jsonl"))
    assert [p.name for p in folder.glob("answers-*.jsonl")] == ["answers-packed.jsonl"], "nothing was written anew"


def test_a_list_of_frequent_ids_takes_text_alone(home, tmp_path):
    own = ["train.corpus.seed=4", f"train.packed={tmp_path}", "train.until=vocabulary"]
    assert "frequent ids in" in run(home, "train", *train(home, "listed", *own))
    assert sorted(load_file(tmp_path / "vocabulary.safetensors")["ids"].tolist()) == list(range(61))
    settings = next(p for p in (home / "cache" / "corpora").rglob("settings.json") if '"seed": 4' in p.read_text())
    assert not list(settings.parent.glob("*.safetensors")), "states were computed"
    assert not (home / "out" / "listed").exists(), "something was trained"


def test_training_online_equals_training_stored(home):
    """The same corpus, states read from disk or computed in the loop: the same first loss up to bfloat16 storage."""
    logs = []
    for name, online in (("stored", "false"), ("online", "true")):
        run(home, "train", *train(home, name, f"train.online={online}", "train.settings.steps=3"))
        logs.append(json.loads((home / "out" / name / "provenance.json").read_text())["history"][-1])
    assert logs[0]["tokens"] == logs[1]["tokens"]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=2e-2)


def test_training_on_stored_layers_equals_training_online(home):
    """EAGLE-3 reads three layers: from disk where the corpus stores them."""
    logs = []
    options = ["drafter=eagle3", "drafter.draft_vocabulary=null", "train.settings.steps=3"]
    for name, more in (("beside", []), ("read", ["train.corpus.layers=[0,1]"])):
        out = run(home, "train", *train(home, name, *options, *more))
        logs.append(json.loads((home / "out" / name / "provenance.json").read_text())["history"][-1])
    assert list((home / "cache" / "corpora").rglob("layer-0/shard-*.safetensors")), out
    assert logs[0]["tokens"] == logs[1]["tokens"]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=2e-2)


def test_training_says_what_it_takes_and_refuses_what_cannot_fit(home):
    message = run(home, "train", *train(home, "plan", "train.settings.steps=2"))
    assert "more tokens of text, states of" in message and "GB free" in message
    folder = home / "out" / "plan"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    message = run(home, "train", *train(home, "plan", "train.missing=true"))
    assert "there already" in message and (folder / "model.safetensors").stat().st_mtime_ns == before
    huge = "train.batch=4096", "train.row_tokens=1000000"
    assert "more memory" in run(home, "train", *train(home, "huge"), *huge, ok=False)
    assert not (home / "out" / "huge").exists()


def test_training_overwrites_nothing_unasked(home):
    """Weights of the same recipe are made anew; of another one, or under version control, only with train.overwrite."""
    once = train(home, "kept", "train.settings.steps=2", "train.follow=false")
    run(home, "train", *once)
    weights = home / "out" / "kept" / "model.safetensors"
    before = weights.read_bytes()
    run(home, "train", *once, "train.settings.checkpoint_minutes=1")  # says nothing about what comes out
    other = [*once, "train.settings.lr=0.01", "train.name=other"]
    output = run(home, "train", *other, ok=False)
    assert (
        "made with another settings.lr;" in output and "train.overwrite=true" in output and weights.read_bytes() == before
    )
    run(home, "train", *other, "train.overwrite=true")
    assert weights.read_bytes() != before
    (weights.parent / "provenance.json").unlink()
    assert "no provenance.json" in run(home, "train", *other, ok=False)
    skip = weights.with_name("skip.json")
    skip.write_text("{}")
    for command in (["git", "init", "--quiet"], ["git", "add", "model.safetensors", "skip.json"]):
        subprocess.run(command, cwd=weights.parent, check=True)
    assert "model.safetensors is under version control" in run(home, "train", *other, ok=False)
    searching = [*other, "drafter=self_speculation", "train.until=search"]
    assert "skip.json is under version control" in run(home, "train", *searching, ok=False)
    assert skip.read_text() == "{}"


def test_training_on_the_text_itself(home):
    run(home, "train", *train(home, "text", "train.corpus.source=text", "train.corpus.text_tokens=40"))
    assert (home / "out" / "text" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter=none"], "nothing to train"),
        (["train.corpus.source=songs"], "must be 'answers' or 'text'"),
        (["train.text.path=/nowhere"], "no training text"),
        (["train.settings.decay=steps"], "must be 'constant', 'linear' or 'cosine'"),
        (["train.settings.phases=[{share: 0.5}]"], "do not sum to 1"),
        (["train.settings.phases=[{share: 1.0, drafter: {colour: 3}}]"], "phases[0].drafter.colour: no such option"),
    ],
)
def test_bad_training_input_is_one_clear_line(home, arguments, message):
    assert message in run(home, "train", *train(home, "bad"), *arguments, ok=False)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["model.path=/somewhere/My model (2)"], ["model.path='/somewhere/My model (2)'", "model.name=My-model-2-"]),
        (["drafter=none", "model.path='/somewhere/x'"], ["drafter=none", "model.path='/somewhere/x'", "model.name=x"]),
        (["model.path=/somewhere/x", "model.name=mine"], ["model.path=/somewhere/x", "model.name=mine"]),
        (["model=llama2-7b", "model.path=/somewhere/x"], ["model=llama2-7b", "model.path=/somewhere/x"]),
        (["model.path=null"], ["model.path=null"]),
        (["model.path=~/x"], ["model.path='~/x'", "model.name=x"]),
        (["-m", "model.path=/a/x,/b/y"], ["-m", "model.path=/a/x,/b/y", "model.name='${folder:${model.path}}'"]),
        (["drafter=none"], ["drafter=none"]),
    ],
)
def test_a_folder_alone_names_its_model(typed, words):
    """Else its rows would stand under the default target's name, and that one's weights would be looked for."""
    assert expand_shorthands(typed) == words


def test_in_a_sweep_each_folder_names_its_own_model():
    for folder in ("/a/x", "/b/y"):
        words = [f"model.path={folder}", "model.name='${folder:${model.path}}'"]
        assert composed("run", *words).model.name == Path(folder).name


def test_an_address_is_a_link_of_its_own():
    assert expand_shorthands(["drafter=[a,b]"]) == ["drafter=a", "drafters=[a,b]"]
    assert expand_shorthands(["link=tcp://127.0.0.1:5555"]) == ["link=direct", "link.to=tcp://127.0.0.1:5555"]


def test_a_flag_behind_a_folder_takes_no_override():
    for flags in (["--info"], ["--cfg", "job"]):
        assert expand_shorthands(["model.path=/x/m", *flags]) == ["model.path=/x/m", "model.name=m", *flags]
