"""Several processes train what one does: same global batch, same loss, same weights; real launches on CPU with gloo."""

import json
import socket
import subprocess
import sys
import time

import pytest
import torch
from command_line import arguments_of, environment, run, start, train
from conftest import ROOT
from filelock import FileLock
from safetensors.torch import load_file

# What `accelerate launch` starts for several GPUs of one machine; for CPUs it wants MPI instead.
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
SHARDED = ("train.shard_target=true", "train.build=false")
# gradients of a part, then of all
PHASES = "train.settings.phases=[{share: 0.5, train: [fc]}, {share: 0.5, vocabulary: null}]"
SHORT = ("train.settings.steps=6", "train.settings.validation_answers=1", "train.settings.validation_trees=0")


def typed(home, *arguments):
    """By the launcher itself: three new interpreters."""
    command = [sys.executable, *LAUNCH, "-m", "specbench.train", *arguments_of(home, "train", *arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def launch(home, *arguments):
    """Two forked processes in the environment that the launcher gives its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = [start(home, "train", *arguments, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]
    done = [process.completed() for process in both]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]


def outcome(home, name):
    folder = home / "out" / name
    return load_file(folder / "model.safetensors"), json.loads((folder / "provenance.json").read_text())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stored", ("drafter=eagle2", "+drafter.noise=0")),
        ("sharded", ("drafter=eagle2", "+drafter.noise=0", "train.online=true", *SHARDED)),
        ("taps", ("drafter=moa", "+drafter.window=1", "+drafter.confine=0", *SHARDED)),
        ("phases", ("drafter=eagle2", "+drafter.noise=0", PHASES)),
    ],
)
def test_two_processes_train_what_one_does(home, name, options):
    seed = f"train.corpus.seed={len(name)}"  # a corpus of its own, written by both processes
    both = [
        lambda: (typed if name == "stored" else launch)(home, *train(home, f"{name}-2"), *SHORT, *options, seed),
        lambda: run(home, "train", *train(home, f"{name}-1"), *SHORT, *[o for o in options if o not in SHARDED], seed),
    ]
    for train_once in both[::-1] if SHARDED[0] in options else both:  # a target in parts writes no corpus
        train_once()
    (one, said_one), (two, said_two) = outcome(home, f"{name}-1"), outcome(home, f"{name}-2")
    assert [said["processes"] for said in (said_one, said_two)] == [1, 2]
    assert said_one["tokens_seen"] == said_two["tokens_seen"]
    assert "chain_tau" in said_one["history"][-1] and "tree_tau" not in said_one["history"][-1], "none was asked for"
    assert said_one["history"][-1]["loss"] == pytest.approx(said_two["history"][-1]["loss"], abs=2e-4)
    for key, value in one.items():
        unlike = (value - two[key]).abs() >= 0.01 * value.abs().max() + 1e-4
        # Where a gradient is nothing but rounding, AdamW takes a step by its sign: up to 0.7% by processor; of gradients
        # that are not averaged come 12 to 81%.
        assert unlike.float().mean() < 0.05, key


def test_a_launch_goes_on_only_with_as_many_processes(home):
    launch(home, *train(home, "resumed"), *SHORT, "train.minutes=0.001")
    state = torch.load(home / "cache" / "training" / "tiny" / "resumed" / "checkpoint.pt", weights_only=True)
    assert len(state["rng"]) == 2
    message = run(home, "train", *train(home, "resumed"), *SHORT, ok=False)
    assert "of 2 processes, this run has 1" in message


def test_a_batch_must_have_a_row_for_every_process(home):
    with pytest.raises(AssertionError, match="so many rows of all 2 processes together; set it to 2 or more"):
        launch(home, *train(home, "rows"), *SHORT, "train.batch=1")


def test_a_target_in_parts_writes_no_corpus(home):
    message = run(home, "train", *train(home, "parts"), "train.shard_target=true", ok=False)
    assert "train.build=false" in message


def test_a_training_waits_for_a_job_that_writes_the_corpus_only_where_states_are_missing(home):
    corpus = ("train.corpus.seed=77", "train.corpus.tokens=400")  # a corpus of its own, whose text is complete
    run(home, "train", *train(home, "corpus-first"), *SHORT, *corpus)
    settings = (home / "cache" / "corpora").glob("*/settings.json")
    (folder,) = (path.parent for path in settings if '"seed": 77' in path.read_text())
    with FileLock(folder / ".lock"):
        run(home, "train", *train(home, "corpus-second"), *SHORT, *corpus)
        next(folder.glob("shard-*.safetensors")).unlink()
        third = start(home, "train", *train(home, "corpus-third"), *SHORT, *corpus)
        time.sleep(8)
        assert third.poll() is None
    assert third.completed().returncode == 0 and outcome(home, "corpus-third")
