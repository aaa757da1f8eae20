"""Medusa: the calibrated tree against brute force, shared candidates, what the heads are trained on."""

import itertools
import json

import pytest
import torch
from conftest import make, tiny
from decoding import PROMPT, generate, plain
from drafting import batch_of, optimise, trained
from safetensors.torch import save_file

from drafters.medusa import Medusa
from specbench.common.errors import SpecBenchError
from specbench.engine import checkpoints
from specbench.engine.policies import AccuracyTree
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import answer_states


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nodes", [2, 5, 12])
def test_the_tree_expects_most_of_all_trees_of_its_size(seed, nodes):
    """Greedy choice equals the best ancestor-closed set: the most valuable paths, since no path beats its prefix."""
    accuracy = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).tolist()  # not sorted by rank on purpose
    growth = AccuracyTree(nodes)
    growth.calibrate(accuracy)
    worth = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(3), repeat=length):
            value = 1.0
            for level, rank in enumerate(path):
                value *= accuracy[level][rank]
            worth[path] = value
    best = sum(sorted(worth.values(), reverse=True)[: nodes - 1])
    chosen = []
    for node in range(1, growth.nodes):
        path = []
        while node:
            path.insert(0, growth.ranks[node])
            node = growth.parents[node]
        chosen.append(tuple(path))
    assert len(set(chosen)) == nodes - 1
    assert sum(worth[p] for p in chosen) == pytest.approx(best)


def test_calibration_is_the_acceptance_that_drafting_finds():
    """Accuracy of head k at rank r, counted by proposing a full product of two levels at every position."""
    target = tiny()
    made, _ = trained("medusa", target)
    tokens = PROMPT + plain(target, PROMPT, 30)
    found = made.calibrate([answer_states(target, HeldOutAnswer(tokens, len(PROMPT)))])
    with torch.inference_mode():
        target.reset(60)
        states = target.prefill(torch.tensor(tokens))
        for level in range(made.heads):
            hits, cases = [0] * 10, 0
            for root in range(len(PROMPT), len(tokens) - level - 1):
                made.observe(states.select(torch.arange(root)), tokens[root])
                ids = made.levels[level].topk(10).indices.tolist()
                cases += 1
                if tokens[root + level + 1] in ids:
                    hits[ids.index(tokens[root + level + 1])] += 1
            assert found[level] == pytest.approx([h / cases for h in hits])


def test_the_tree_ships_with_the_weights(tmp_path):
    from conftest import configuration
    from hydra.utils import instantiate

    from specbench.engine import weights

    target = tiny()
    made, _ = trained("medusa", target)
    accuracy = made.calibrate([answer_states(target, HeldOutAnswer(PROMPT + plain(target, PROMPT, 30), len(PROMPT)))])
    provenance = {"target_fingerprint": target.fingerprint(), "calibration": accuracy}
    weights.save(made, tmp_path, provenance)
    again = instantiate(configuration("medusa").drafter, weights=str(tmp_path))
    again.bind(target)
    assert (again.growth.parents, again.growth.ranks) == (made.growth.parents, made.growth.ranks)
    assert generate(target, again)[0] == plain(target, PROMPT, 40)


def test_heads_start_as_the_targets_own_and_may_have_their_own_output():
    target = tiny()
    batch = batch_of(target, rows=2)
    for override in ("+drafter.head_per_level=false", "+drafter.head_per_level=true", "+drafter.head_rank=4"):
        made = make("medusa", target, override)
        assert len(made.outputs) == (made.heads if "true" in override else 0)
        assert len(made.corrections) == (made.heads if "rank" in override else 0)
        with torch.inference_mode():
            made.observe(known(target, batch.tokens[0]), 7)
            assert torch.allclose(made.levels, target.logits(batch.states[0, -1]).expand_as(made.levels), atol=1e-5)


def test_a_correction_of_low_rank_is_a_head_of_its_own_wherever_it_is_read(tmp_path):
    """Its logits are those of W2 + B A in training, drafting and calibration; vLLM is handed that sum."""
    target = tiny()
    batch = batch_of(target)
    shared, made = (make("medusa", target, f"+drafter.head_rank={rank}") for rank in (0, 4))
    losses = [optimise(m, batch, 80)[-1] for m in (shared, made)]
    assert losses[1] < 0.9 * losses[0], "it learnt no more than the shared head"
    tensors, config = made.export_tensors("vllm", target)
    assert not config["original_lm_head"]
    state = batch.states[0, -1]
    with torch.inference_mode():
        made.observe(known(target, batch.tokens[0]), 7)
        for level in range(made.heads):
            hidden = made.network(state, level)
            expected = hidden @ tensors[f"lm_heads.{level}.weight"].T
            torch.testing.assert_close(made.levels[level], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(made.output(hidden, level), expected, atol=1e-4, rtol=1e-4)
            some = torch.tensor([3, 50, 7])
            torch.testing.assert_close(made.output(hidden, level, some), expected[some], atol=1e-4, rtol=1e-4)
    again = make("medusa", target, "+drafter.head_per_level=true")
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    again.checkpoint = checkpoints.read(str(tmp_path))
    again.head_rank = 4  # a published file decides
    again.bind(target)
    with torch.inference_mode():
        again.observe(known(target, batch.tokens[0]), 7)
    torch.testing.assert_close(again.levels, made.levels, atol=1e-4, rtol=1e-4)


def test_a_correction_of_rank_12_fits_the_default_target():
    """Five heads in bfloat16 within what a weights file may have here."""
    width, vocabulary, heads, rank = 576, 49152, 5, 12
    target = tiny()
    made = make("medusa", target, f"+drafter.head_rank={rank}")
    small = sum(p.numel() for n, p in made.named_parameters() if p.requires_grad)
    assert small == heads * (32 * 32 + 32 + rank * (32 + 61))
    assert 2 * heads * (width * width + width + rank * (width + vocabulary)) < 9_990_000


def test_both_kinds_of_own_head_are_refused():
    with pytest.raises(SpecBenchError, match="leave out head_per_level"):
        Medusa("medusa", AccuracyTree(8), head_rank=4, head_per_level=True)


def test_a_head_does_not_look_from_one_turns_answer_into_the_next():
    """Head k at state i counts if tokens i + 2 … i + k + 1 are all an answer's."""
    target = tiny()
    made, batch = make("medusa", target), batch_of(target, rows=1, length=16)
    answer = torch.tensor([c == "a" for c in "qqqaaaaaqaaaaaaq"])[None]  # a question of one token between two answers
    batch.scored = torch.zeros_like(answer)
    batch.scored[:, :-1] = answer[:, 1:]
    counted = []
    made.head_loss = lambda loss, logits, hidden, states, count, vocabulary: (counted.append(count), loss)[1]
    made.loss(batch)
    expected = [sum(bool(answer[0, i + 2 : i + k + 2].all()) for i in range(16 - k - 1)) for k in range(1, made.heads + 1)]
    assert counted == expected
    lax = [int(answer[0, k + 1 :].sum()) for k in range(1, made.heads + 1)]
    assert counted != lax


def known(target, tokens):
    target.reset(len(tokens))
    return target.prefill(tokens)


def test_confined_vocabulary_drops_labels_outside_it():
    target = tiny()
    made, batch = make("medusa", target), batch_of(target)
    whole = made.loss(batch)["head_1"]
    batch.vocabulary = torch.arange(61)
    assert float(made.loss(batch)["head_1"]) == pytest.approx(float(whole), rel=1e-5)
    batch.vocabulary = batch.tokens.unique()[:20]
    assert torch.isfinite(made.loss(batch)["loss"])
