"""The target without some of its sublayers: against a copy whose sublayers are masked out and that has no cache."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ARCHITECTURES, make, tiny
from decoding import PROMPT, generate, plain
from tree_checks import check

from drafters.self_speculation import EarlyExit, SelfSpeculation, Threshold, alternate
from specbench.common.errors import SpecBenchError
from specbench.engine.interface import Sublayers, Taps
from specbench.engine.sampling import Sampler
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import replay_target
from specbench.tuning import layer_search

CONSTANTS = {"wanted": 0.9, "step": 0.01, "rate_memory": 0.5, "memory": 0.9}
ODD = Sublayers(frozenset({1}), frozenset({0, 2}))  # skipped: another set for attention than for MLPs


class Silent(torch.nn.Module):
    """A sublayer that says nothing."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, **kwargs):
        nothing = 0 * hidden_states
        return (nothing, None) if self.attention else nothing


def masked(target, skipped):
    """A copy of the model in which the skipped sublayers are silent."""
    model = copy.deepcopy(target.model)
    for layer in skipped.attention:
        model.model.layers[layer].self_attn = Silent(True)
    for layer in skipped.mlp:
        model.model.layers[layer].mlp = Silent(False)
    return model


def bound(target, skipped=ODD, **options):
    made = SelfSpeculation("self_speculation", **options)
    made.bind(target)
    made.keep(skipped.others(target.layers))
    return made


def quiet(skipped):
    """A target in which these sublayers say little, so that drafts without them are often right."""
    target = tiny()
    with torch.no_grad():
        for layer in skipped.attention:
            target.decoder.layers[layer].self_attn.o_proj.weight.mul_(0.2)
        for layer in skipped.mlp:
            target.decoder.layers[layer].mlp.down_proj.weight.mul_(0.1)
    return target


class Watched(SelfSpeculation):
    """Keeps every chain and the threshold it was drafted with."""

    def reset(self, capacity):
        super().reset(capacity)
        self.chains = []

    def propose(self, root, sampler, generator):
        before = self.threshold.value
        tree = super().propose(root, sampler, generator)
        check(tree)
        self.chains.append((tree.tokens.tolist(), before))
        return tree


@torch.inference_mode()
def slowly(target, skipped, cap, most, threshold):
    """Chains of Draft & Verify with prefix states of the whole model, everything recomputed for every token.

    The draft's input at a verified place is what the whole model has there; only the drafts' own went through less.
    """
    partial, whole = masked(target, skipped), target.model
    text, chains, gamma, rate = PROMPT + plain(target, PROMPT, 1), [], threshold, 0.0
    while len(text) < len(PROMPT) + cap:
        known = len(text) - 1  # verified, the root not among them
        chain = [text[-1]]
        while len(chain) <= most:
            logits = _mixed(whole, partial, text[:known], chain)
            chain.append(int(logits.argmax()))
            if float(logits.softmax(-1).max()) < gamma:
                break
        chains.append((chain, gamma))
        right = plain(target, text, len(chain))
        accepted = 0
        while accepted < len(chain) - 1 and chain[accepted + 1] == right[accepted]:
            accepted += 1
        rate = rate / 2 + accepted / (len(chain) - 1) / 2
        aim = gamma + 0.01 if rate < 0.9 else gamma if len(chain) - 1 == most else gamma - 0.01
        gamma = 0.9 * gamma + 0.1 * aim
        text += right[: accepted + 1]
    return chains


def _mixed(whole, partial, verified, chain):
    """Logits behind a chain: the partial model's, with the whole model's keys and values of what is verified."""
    from transformers import DynamicCache

    cache = DynamicCache(config=whole.config)
    whole(torch.tensor([verified]), past_key_values=cache, use_cache=True)
    for i, token in enumerate(chain):
        place = torch.tensor([[len(verified) + i]])
        logits = partial(torch.tensor([[token]]), past_key_values=cache, position_ids=place, use_cache=True).logits
    return logits[0, -1].float()


@pytest.mark.parametrize("way", ["lean", "plain"])
@pytest.mark.parametrize("skipped", [ODD, alternate(3)], ids=["odd", "alternate"])
def test_chains_are_those_of_a_masked_copy_recomputed_token_by_token(way, skipped):
    target = quiet(skipped)
    expected = slowly(target, skipped, 24, 5, 0.2)
    if way == "lean":
        target.optimize_for_inference()
        assert target.fused is not None
    made = Watched("self_speculation", most=5, threshold=0.2)
    made.bind(target)
    made.keep(skipped.others(3))
    tokens, steps = generate(target, made, cap=25)
    assert tokens == plain(quiet(skipped), PROMPT, 25)
    found = made.chains[: len(expected)]
    assert [chain for chain, _ in found] == [chain for chain, _ in expected[: len(found)]]
    assert [gamma for _, gamma in found] == pytest.approx([gamma for _, gamma in expected[: len(found)]])
    assert len(found) > 4 and len({len(chain) for chain, _ in found}) > 1, "the threshold ended no chain, or every one"
    assert any(s.accepted for s in steps), "nothing was accepted: verified rows were never taken over behind drafts"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_skipped_is_the_whole_model_and_drafts_its_own_tokens(architecture):
    target = tiny(architecture)
    target.optimize_for_inference()
    made = EarlyExit("early_exit", layers=3, most=4, threshold=0.0, step=0.0)
    made.bind(target)
    tokens, steps = generate(target, made, cap=1 + 5 * 6)
    assert tokens == plain(tiny(architecture), PROMPT, len(tokens))
    assert [(s.nodes, s.accepted) for s in steps] == [(4, 4)] * 6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("skipped", [Sublayers(frozenset(), frozenset()), ODD, alternate(3)], ids=str)
def test_a_subset_is_the_masked_model_both_ways(architecture, skipped):
    """Over a prompt; the parts that are skipped come back afterwards."""
    target, tokens = tiny(architecture), torch.tensor([PROMPT * 3])
    positions = torch.arange(tokens.shape[1])[None]
    kept = skipped.others(3)
    with torch.inference_mode():
        before = target.model(tokens).logits
        expected = masked(target, skipped)(tokens).logits
        for _ in ("plain", "lean where there is one"):
            cache = target.new_cache(tokens.shape[1], kept.attention)
            found = target.logits(target.subset(tokens, positions, None, cache, kept))
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
            assert next(iter(cache.storage.values()))[0].shape[0] == len(kept.attention), "rows of skipped layers"
            torch.testing.assert_close(target.model(tokens).logits, before, atol=1e-3, rtol=1e-3)
            target.optimize_for_inference()


def test_a_draft_of_low_confidence_is_verified_and_ends_the_chain():
    """Also where it is drawn: to leave it out would change what it was drawn from."""
    target = tiny()
    made = bound(target, threshold=1.0, most=6)
    target.reset(60, made.taps)
    made.reset(60)
    with torch.inference_mode():
        made.observe(target.prefill(torch.tensor(PROMPT)), 7)
        tree = made.propose(7, Sampler(1.0), torch.Generator().manual_seed(0))
        assert len(tree) == 2 and tree.q[0, tree.tokens[1]] > 0 and tree.q[0].sum() == pytest.approx(1)
        made.threshold.value = 0.0
        longest = made.propose(7, Sampler(1.0), torch.Generator().manual_seed(0))
    assert len(longest) == made.nodes == 7
    assert tree.tokens[1] == longest.tokens[1], "drafting left rows behind"
    assert torch.equal(tree.q[0], longest.q[0]) and longest.q[-1].sum() == 0


def test_threshold_against_a_literal_computation():
    threshold = Threshold(0.8, **CONSTANTS)
    threshold.learn(0, 3, full=False)  # rate 0, below 0.9
    assert (threshold.rate, threshold.value) == pytest.approx((0.0, 0.9 * 0.8 + 0.1 * 0.81))
    for _ in range(5):
        threshold.learn(4, 4, full=False)
    assert threshold.rate == pytest.approx(1 - 0.5**5)  # 0.96875
    value = 0.801 + 3 * 0.001 - 2 * 0.001  # 0.5, 0.75 and 0.875 raise it, 0.9375 and 0.96875 lower it
    assert threshold.value == pytest.approx(value)
    threshold.learn(12, 12, full=True)
    assert threshold.value == pytest.approx(value), "as many as can be were drafted: nothing to gain"


def test_a_new_prompt_begins_with_the_first_threshold():
    target = tiny()
    made = bound(target)
    first = generate(target, made, cap=20)
    assert made.threshold.value != 0.8
    assert [s.nodes for s in generate(target, made, cap=20)[1]] == [s.nodes for s in first[1]]


def test_parameters_are_those_of_kept_sublayers_and_head():
    target = tiny()
    made = bound(target)
    one = target.decoder.layers[0]
    attention, mlp = (sum(p.numel() for p in part.parameters()) for part in (one.self_attn, one.mlp))
    assert made.active_parameters == 2 * attention + mlp + target.head.weight.numel()
    assert made.taps.kv == (0, 2) and alternate(30).mlp == frozenset(range(1, 29, 2)) and not alternate(2).mlp


def test_a_set_without_attention_and_more_layers_than_there_are_are_refused():
    target = tiny()
    with pytest.raises(SpecBenchError, match="no attention"):
        bound(target, Sublayers(frozenset(range(3)), frozenset()))
    with pytest.raises(SpecBenchError, match=r"drafter.layers=4"):
        EarlyExit("early_exit", layers=4).bind(target)


def test_a_searched_set_is_taken_and_that_of_another_target_refused(tmp_path):
    target = tiny()
    path = tmp_path / "skip.json"

    def write(**changes):
        content = {"target": "tiny", "target_fingerprint": target.fingerprint(), "attention": [1], "mlp": [0, 2]}
        path.write_text(json.dumps(content | {"trials": 3} | changes))

    write()
    made = make("self_speculation", target)
    assert made.kept == alternate(3).others(3)
    made.searched = str(tmp_path)
    made.bind(target)
    assert made.kept == ODD.others(3)
    assert made.provenance["trials"] == 3 and set(made.contents) == {"skip.json"}
    with pytest.raises(SpecBenchError, match="searched for target tiny"):
        made.bind(tiny(seed=4))
    for changes, content in (({"mlp": [3]}, "layer 3"), ({"mlp": "all"}, "mlp")):
        write(**changes)
        with pytest.raises(SpecBenchError, match=content):
            made.bind(target)


def test_the_search_finds_the_best_of_a_small_space(tmp_path):
    """Six sublayers may go: two of them gain apart, two only together, two cost."""
    worth = {("attention", 1): 1.0, ("mlp", 3): 0.5, ("attention", 3): -0.4, ("mlp", 2): -0.2}
    asked = []

    def speed(skipped):
        asked.append(skipped)
        pair = {2 in skipped.attention, 1 in skipped.mlp}
        found = 0.6 if pair == {True} else 0.0 if pair == {False} else -0.5
        return found + sum(w for (part, i), w in worth.items() if i in getattr(skipped, part))

    def interrupted(skipped):
        if len(asked) == 30:
            raise KeyboardInterrupt
        return speed(skipped)

    journal = tmp_path / "new" / "search.journal"
    with pytest.raises(KeyboardInterrupt):
        layer_search.best(5, interrupted, alternate(5), 120, journal)
    found = layer_search.best(5, speed, alternate(5), 120, journal)
    assert found == Sublayers(frozenset({1, 2}), frozenset({1, 3}))
    assert asked[0] == alternate(5) and len(set(asked)) == len(asked), "the start comes first, and no set twice"


def test_predicted_speed_is_what_decoding_does_at_these_prices():
    """And the search leaves out what says little: of sublayers that are free to skip, the quiet ones."""
    skipped = Sublayers(frozenset({1}), frozenset())
    target = quiet(skipped)
    answers = [HeldOutAnswer([*prompt, *plain(target, prompt, 16)], len(prompt)) for prompt in (PROMPT, [7, 7, 30])]
    prices = layer_search.Prices(attention=2.0, mlp=3.0, rest=1.0, whole={1: 10.0, 3: 14.0, 5: 15.0})
    made = bound(target, skipped, most=4, threshold=0.5)
    with torch.inference_mode():
        known = [replay_target(target, answer, Taps(kv=(0, 1, 2)), 32).detach() for answer in answers]
        found = layer_search.predicted(made, known, prices)
        emitted = cycles = drafts = seconds = 0
        for answer in answers:
            tokens, steps = generate(target, made, answer.ids[: answer.begin], cap=16)
            assert tokens == answer.ids[answer.begin :]
            for step in steps:
                emitted, cycles, drafts = emitted + len(step.tokens), cycles + 1, drafts + step.nodes
                seconds += {1: 12.0, 2: 14.0, 3: 14.5, 4: 15.0}[step.nodes] + step.nodes * (1 + 2 * 2 + 3 * 3)
    assert (found.tau, found.drafts) == pytest.approx((emitted / cycles, drafts / cycles))
    assert found.speedup == pytest.approx(emitted * 10.0 / seconds)


def test_what_a_search_writes_is_what_the_drafter_reads(tmp_path):
    target = quiet(alternate(3))
    answers = [HeldOutAnswer([*PROMPT, *plain(target, PROMPT, 12)], len(PROMPT))]
    made = bound(target, alternate(3), most=4)
    result = layer_search.search(target, made, answers, tmp_path / "journal", trials=4)
    assert min(result["prices"]["rest"], *result["prices"]["whole"].values()) > 0
    assert result["predicted"]["speedup"] >= result["predicted_at_start"]["speedup"] > 0
    again = layer_search.search(target, made, answers, tmp_path / "journal", trials=4)
    assert (again["attention"], again["mlp"]) == (result["attention"], result["mlp"]), "what was tried is tried anew"
    layer_search.write(tmp_path, {"target": "tiny", "target_fingerprint": target.fingerprint()} | result)
    other = SelfSpeculation("self_speculation", searched=str(tmp_path))
    other.bind(target)
    assert (sorted({0, 1, 2} - other.kept.attention), sorted({0, 1, 2} - other.kept.mlp)) == (
        result["attention"],
        result["mlp"],
    )
    with pytest.raises(SpecBenchError, match="no held-out answers"):
        layer_search.search(target, made, [], tmp_path / "journal")


@pytest.mark.parametrize(("until", "policy"), [("weights", "PASSIVE"), ("search", None)])
def test_a_search_times_passes_with_threads_that_wait_as_they_do_in_decoding(until, policy):
    program = "import os, specbench.common.omp_policy; print(os.environ.get('OMP_WAIT_POLICY'))"
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", program, f"train.until={until}"], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(policy)
