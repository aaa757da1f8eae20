"""A draft vocabulary: fewer ids to draft from, the same text; and lists that are not the target's are refused."""

import json

import numpy as np
import pytest
import torch
from battery import refuse
from conftest import ROOT, TRAINED, make, tiny
from decoding import PROMPT, generate, plain
from drafting import ORDER, listing
from hydra.errors import InstantiationException
from test_verify import GROWTHS, SAMPLED, Tables, V, emitted, joint, p_value
from transformers import LlamaConfig, LlamaForCausalLM
from tree_checks import check

from drafters.medusa import Medusa
from specbench import export, run, train
from specbench.common.errors import SpecBenchError
from specbench.data.corpus_file import unpack
from specbench.engine import vocabulary
from specbench.engine.causal_lm import CausalLM
from specbench.engine.policies import Chain, Dynamic
from specbench.engine.sampling import Sampler
from specbench.training.corpus import CorpusSettings, CorpusText
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import chains, replay

ROUTED = [d for d in TRAINED if d.endswith("_router")]
NARROW = [d for d in TRAINED if d not in ROUTED]
COUNT = 20


@pytest.fixture
def target(tmp_path):
    return listing(tiny(), tmp_path)


def narrow(drafter, target, *overrides, count=COUNT):
    return make(drafter, target, f"drafter.vocabulary={count}", *overrides)


# What is decoded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", NARROW)
def test_greedy_output_is_the_targets_own_and_candidates_are_listed(drafter, target):
    made, trees = narrow(drafter, target), []
    propose = made.propose

    def noted(*arguments):
        trees.append(propose(*arguments))
        return trees[-1]

    made.propose = noted
    truth = plain(target, PROMPT, 40)
    assert generate(target, made)[0] == truth
    assert not set(truth) <= set(ORDER[:COUNT].tolist()), "the text must hold ids that cannot be drafted"
    for tree in trees:
        check(tree)
        assert set(tree.tokens[1:].tolist()) <= set(ORDER[:COUNT].tolist())


@pytest.mark.parametrize("drafter", NARROW)
def test_a_list_of_all_ids_drafts_what_no_list_drafts(drafter, target):
    plainly, listed = make(drafter, target), narrow(drafter, target, count=61)
    assert listed.active_parameters == plainly.active_parameters
    for sampler in (Sampler(), Sampler(0.9)):
        trees = []
        for made in (plainly, listed):
            with torch.inference_mode():
                target.reset(100, made.taps)
                states = target.prefill(torch.tensor(PROMPT))
                made.reset(100)
                made.observe(states, 7)
                trees.append(made.propose(7, sampler, torch.Generator().manual_seed(0)))
        if trees[0].q is None:  # the same ids; sampled ones are drawn in the order of the list
            assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].parents, trees[1].parents)
        else:
            torch.testing.assert_close(trees[0].q[0], trees[1].q[0])


@pytest.mark.parametrize("drafter", NARROW)
def test_logits_are_the_full_heads_rows_and_cost_is_theirs(drafter, target):
    full, made = make(drafter, target), narrow(drafter, target)
    logits = []
    for one in (full, made):
        with torch.inference_mode():
            target.reset(100, one.taps)
            one.reset(100)
            one.observe(target.prefill(torch.tensor(PROMPT)), 7)
            below = one.expand(torch.tensor([5, 9]), torch.tensor([-1, -1]), 1, torch.eye(2, dtype=torch.bool))
            logits.append(torch.cat([one.root_logits()[None], below]))
    assert logits[1].shape == (3, COUNT)
    torch.testing.assert_close(logits[1], logits[0][:, ORDER[:COUNT]])
    assert full.active_parameters - made.active_parameters == (61 - COUNT) * target.hidden_size
    assert made.contents[vocabulary.FILE] == vocabulary.digest_of(ORDER) and vocabulary.FILE not in full.contents


@pytest.mark.parametrize("options", [{"head_per_level": True}, {"head_rank": 3}])
def test_output_layers_of_a_drafters_own_are_narrowed_with_it(options, target):
    made = {}
    for count in (None, COUNT):
        made[count] = Medusa("medusa", Dynamic(3, 3, 9), vocabulary=count, **options)
        torch.manual_seed(1)
        with torch.no_grad():
            made[count].bind(target)
    full, listed = made[None], made[COUNT]
    with torch.no_grad():
        for correction in full.corrections:
            correction[1].weight.normal_()
        own = full.state_dict()
        listed.load_state_dict({n: own[n] if own[n].shape == t.shape else own[n][ORDER[:COUNT]] for n, t in _own(listed)})
        for one in (full, listed):
            target.reset(100)
            one.observe(target.prefill(torch.tensor(PROMPT)), 7)
    torch.testing.assert_close(listed.levels, full.levels[:, ORDER[:COUNT]])
    saved = (61 - COUNT) * (target.hidden_size + 5 * (3 if "head_rank" in options else target.hidden_size))
    assert full.active_parameters - listed.active_parameters == saved
    assert generate(target, listed)[0] == plain(target, PROMPT, 40)


def _own(module):
    return module.state_dict().items()


def test_biases_caps_and_missing_rows_are_the_models(target):
    """A draft model of the family whose vocabulary is shorter never drafts the ids that it has not."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    model.lm_head = torch.nn.Linear(32, 50)
    model.config.final_logit_softcapping = 2.0
    lm = CausalLM(model)
    states = torch.randn(4, 32) * 9
    found = vocabulary.Head(lm, ORDER)(states)
    assert bool((ORDER >= 50).any())
    torch.testing.assert_close(found[:, ORDER < 50], lm.logits(states)[:, ORDER[ORDER < 50]])
    assert found[:, ORDER >= 50].isneginf().all() and found[:, ORDER < 50].abs().max() <= 2


# Sampling ---------------------------------------------------------------------------------------------------------------


class Listing(Tables):
    """The toy world, whose drafter can say four of the six ids only, in another order."""

    listed = vocabulary.DraftVocabulary(torch.tensor([4, 1, 5, 2]), V, "")

    def q(self, prefix):
        return super().q(prefix)[self.listed.ids]


@pytest.mark.parametrize("sampler", [SAMPLED, Sampler(0.7, top_p=0.8)])
@pytest.mark.parametrize("growth", GROWTHS)
def test_what_is_emitted_follows_the_target_though_little_can_be_drafted(growth, sampler):
    world = Listing(seed=3)
    samples = emitted(world, GROWTHS[growth], sampler, 3000, 11, 2)
    assert p_value(samples, joint(world, sampler, 2)) > 1e-3
    assert {0, 3} & set(samples[:, 0].tolist()), "ids that are not listed must be emitted, too"


def test_a_q_that_is_not_spread_would_be_noticed(monkeypatch):
    """The order of the list is not that of ids: put behind one another, q would stand at other ids than were drawn."""
    wrong = lambda self, q: torch.nn.functional.pad(q, (0, self.size - q.shape[1]))  # noqa: E731
    monkeypatch.setattr(vocabulary.DraftVocabulary, "spread", wrong)
    world = Listing(seed=3)
    with np.errstate(all="ignore"):
        assert p_value(emitted(world, GROWTHS["static-replacement"], SAMPLED, 3000, 11, 2), joint(world, SAMPLED, 2)) < 1e-6


# Held-out answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["eagle2", "vanilla", "medusa", "beagle", "moa"])
def test_drafts_from_all_positions_are_what_decoding_drafts(drafter, target):
    made = narrow(drafter, target)
    made.growth = Chain(3)
    answers = [HeldOutAnswer(PROMPT + plain(target, PROMPT, 30), len(PROMPT))]
    assert chains(target, made, answers, 3) == replay(target, made, answers)


# Refused ----------------------------------------------------------------------------------------------------------------


def test_lists_that_are_not_this_targets_are_refused(tmp_path):
    target = tiny()
    with pytest.raises(SpecBenchError, match="came from no configuration"):
        narrow("eagle2", target)
    target.listing = tmp_path / "none" / vocabulary.FILE
    with pytest.raises(SpecBenchError, match=r"no list of frequent ids at .*train.until=vocabulary"):
        narrow("eagle2", target)
    listing(target, tmp_path / "other", target_fingerprint="0123456789abcdef")
    with pytest.raises(SpecBenchError, match="made for another target"):
        narrow("eagle2", target)
    listing(target, tmp_path / "shorter", ORDER[:30])
    narrow("eagle2", target, count=30)
    with pytest.raises(SpecBenchError, match=r"drafter.vocabulary=31: .* has 30 ids"):
        narrow("eagle2", target, count=31)
    with pytest.raises(SpecBenchError, match="takes 10 candidates"):
        narrow("eagle2", target, count=9)


@pytest.mark.parametrize("damage", ["swapped", "cut", "unsaid"])
def test_damaged_lists_are_refused(damage, target):
    path = target.listing
    if damage == "swapped":
        from safetensors.torch import save_file

        save_file({"ids": ORDER.flip(0).int()}, path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        provenance = json.loads((path.parent / vocabulary.PROVENANCE).read_text())
        del provenance["sha256"]
        (path.parent / vocabulary.PROVENANCE).write_text(json.dumps(provenance))
    with pytest.raises(SpecBenchError, match=r"not the ids whose SHA-256|damaged|sha256"):
        narrow("eagle2", target)


@pytest.mark.parametrize("drafter", ROUTED)
def test_a_router_takes_no_list(drafter, target):
    with pytest.raises(InstantiationException, match="router"):
        narrow(drafter, target)
    with pytest.raises(InstantiationException, match="router"):
        make(drafter, target, f"+drafter.base.vocabulary={COUNT}")


@pytest.mark.parametrize(("command", "name"), [(train, "train"), (export, "export"), (run, "run")])
def test_commands_that_take_no_list_say_so(command, name, tmp_path):
    out = f"{({'train': 'train.out', 'export': 'out', 'run': 'results'})[name]}={tmp_path / 'out'}"
    arguments = [f"drafter={'coral_router' if name == 'run' else 'eagle2'}", "drafter.vocabulary=100", out]
    assert refuse(command, name, arguments, "drafter.vocabulary", [tmp_path]) is None


# Lists ------------------------------------------------------------------------------------------------------------------


def test_a_list_counts_the_training_text(tmp_path):
    from corpora import SMALL, Words, chats_of

    target = tiny()
    text = CorpusText(
        CorpusSettings(**(SMALL | {"validation": 2, "tokens": 150})), target, Words(), lambda: chats_of(60), tmp_path
    )
    text.prepare()
    text.write()
    ids, provenance = text.frequent(61, "tiny")
    counts = torch.zeros(61, dtype=torch.long)
    for one in text.texts():
        for token in one.tokens if one.index >= 2 else []:
            counts[token] += 1
    assert provenance["training_tokens"] == counts.sum() and provenance["occurring"] == (counts > 0).sum() < 61
    assert ids.tolist() == sorted(range(61), key=lambda i: (-int(counts[i]), i))
    assert torch.equal(text.frequent(7, "tiny")[0], ids[:7])


def test_the_shipped_list_is_that_of_the_shipped_corpus():
    """Counted when the corpus was shorter: rows name the list, so that it stays until drafters are trained anew."""
    folder = ROOT / "drafters" / "weights" / "smollm2-135m"
    provenance = json.loads((folder / vocabulary.PROVENANCE).read_text())
    corpus = json.loads((folder / "corpus.json").read_text())
    assert (provenance["target_fingerprint"], provenance["corpus"]) == (corpus["target_fingerprint"], corpus["corpus"])
    target = tiny()
    target.listing, target.fingerprint = folder / vocabulary.FILE, lambda: provenance["target_fingerprint"]
    listed = vocabulary.listed(target, provenance["ids"])
    assert listed.digest == provenance["sha256"]
    texts = [t for t in unpack(folder / "corpus.safetensors.xz") if t.index >= corpus["settings"]["validation"]]
    tokens = torch.tensor([i for t in texts for i in t.tokens])
    assert provenance["training_tokens"] <= corpus["training_tokens"] == len(tokens)
    counts = tokens[: provenance["training_tokens"]].bincount(minlength=49152)  # the corpus as it was then
    best = counts.argsort(descending=True, stable=True)
    for count in (1024, 8192, provenance["ids"]):
        covered, most = (float(counts[ids[:count]].sum() / counts.sum()) for ids in (listed.ids, best))
        assert covered > most - 0.0005, f"the first {count} ids of the list are not the most frequent"
