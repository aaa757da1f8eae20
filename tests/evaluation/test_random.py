"""Targets without weights: real time and memory, assumed acceptance, marked as such everywhere."""

import pytest
import torch
from command_line import run
from conftest import composed, make, tiny
from corpora import Numbers
from fixtures import settings
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.data.chat import Pieces
from specbench.data.prompts import Question
from specbench.engine import tree as trees
from specbench.engine.decode import RunSettings
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Simulated, verify
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records.blocks import NAME, Ledger, read_block
from specbench.records.rows import QuestionEnd, Row
from specbench.reporting.bundle import Report, Sources

SHAPE = (
    "model.weights=random",
    "+model.shape={model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 61, max_position_embeddings: 256}",
)


def random_tree(seed):
    """Three levels of up to four nodes below parents of the level above."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths, ranks, level = [-1], [0], [0], [0]
    for depth in range(1, 4):
        above, level = level, []
        chosen = sorted(above[int(torch.randint(len(above), (), generator=generator))] for _ in range(4))
        for i, parent in enumerate(chosen):
            level.append(len(parents))
            parents.append(parent)
            depths.append(depth)
            ranks.append(chosen[:i].count(parent))
    tokens = torch.randint(61, (len(parents),), generator=generator)
    return trees.build(tokens, torch.tensor(parents), torch.tensor(depths), torch.tensor(ranks), max_depth=3, width=4)


def test_the_coin_gives_the_assumed_acceptance():
    target, alpha = tiny(), [0.9, 0.5, 0.2]
    rule, sampler = Simulated(alpha), Sampler()
    reached, taken = [0, 0, 0], [0, 0, 0]
    for seed in range(3000):
        tree = random_tree(seed % 40)
        verified = verify(tree, torch.randn(len(tree), target.vocab_size), rule, sampler, None)
        depth = 0
        for node in verified.path:
            siblings = [n for n in range(1, len(tree)) if tree.parents[n] == tree.parents[node]]
            assert node == min(siblings)  # the best of them
            depth += 1
        below = verified.path[-1] if verified.path else 0
        could = bool((tree.parents == below).any())
        for level in range(3):
            if depth > level or (depth == level and could):
                reached[level] += 1
                taken[level] += depth > level
    for level in range(3):
        expected, n = alpha[level], reached[level]
        assert abs(taken[level] / n - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


def rows_alone_or_together(folder, target, sampler, orders):
    """Accepted lengths by question and turn, of cells that decode these questions in these orders with one rule."""
    chat = Numbers()
    bound_drafters = [BoundDrafter(d, make(d, target), Simulated([0.7, 0.6, 0.5])) for d in ("none", "eagle2")]
    found = []
    for number, order in enumerate(orders):
        bench = Bench(target, chat, bound_drafters, sampler, RunSettings(max_new_tokens=20))
        ledger = Ledger(folder / str(number), settings("eagle2"), "none", timed=True)
        bench.run([Question(str(i), "c", (f"{i} 3 14 15", "9 26")) for i in order], ledger)
        rows = [r for r in read_block(ledger.block.path)[1] if not isinstance(r, QuestionEnd)]
        found.append({row.key: (row.accepted, row.tokens) for row in rows})
    return found


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8)], ids=["greedy", "sampled"])
def test_the_coins_of_a_row_do_not_depend_on_what_was_decoded_before(tmp_path, sampler):
    """In another order, or alone: a row's coins come from run seed, question and turn."""
    target = tiny()
    target.stop_ids = ()
    together, turned, *alone = rows_alone_or_together(tmp_path, target, sampler, [(5, 6, 7), (7, 6, 5), (5,), (6,), (7,)])
    assert together == turned == {key: row for cell in alone for key, row in cell.items()}
    lengths = {tuple(row[0]) for key, row in together.items() if key[0] == "eagle2"}
    assert len(lengths) > 3, "every question and turn has coins of its own"


def test_pieces_are_about_four_characters_each():
    pieces = Pieces(61)
    ids = pieces("abcd" * 10)["input_ids"]
    assert len(ids) == 10 and len(set(ids)) == 1 and 0 <= ids[0] < 61
    assert len(pieces(pieces.decode([1, 2, 3] * 20))["input_ids"]) == pytest.approx(60, abs=2)


@pytest.mark.parametrize("drafter", ["eagle2", "coral_router", "medusa"])
def test_rows_of_a_random_target_say_so(home, drafter, tmp_path):
    results = f"results={tmp_path}"
    output = run(home, "run", f"drafter={drafter}", *SHAPE, "model.path=null", "alpha=[0.9,0.8]", "data.limit=3", results)
    assert "SIMULATED" in output
    header, rows = read_block(next(tmp_path.rglob(NAME)))
    assert header["simulated"] is True and header["arms"][drafter]["lossy"] is True
    rows = [r for r in rows if isinstance(r, Row)]
    assert {r.audit["verdict"] for r in rows} == {"simulated acceptance"}
    assert all(len(r.tokens) == 12 for r in rows)  # nothing stops it
    report = Report(Sources(tmp_path))
    assert report.main and all("random weights" in entry.model for entry in report.main)
    assert not [c for c in report.verdicts if c.verdict in ("reproduced", "not reproduced")]


def test_neither_half_goes_without_the_other(home):
    assert "give alpha=" in run(home, "run", "drafter=eagle2", *SHAPE, "model.path=null", ok=False)
    assert "leave it out" in run(home, "run", "drafter=eagle2", "alpha=[0.5]", ok=False)


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "qwen2.5-7b"])
def test_shapes_of_the_papers_targets_have_their_parameters(model):
    config = composed("run", f"model={model}").model
    shape = OmegaConf.to_container(config.shape, resolve=True)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert built.num_parameters() / 1e9 == pytest.approx(config.billions, rel=0.01)
