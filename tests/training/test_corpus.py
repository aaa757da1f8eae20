"""The corpus: rows of their own lengths, the target's answers turn after turn, shards, packing, one file of ids."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ARCHITECTURES, tiny
from corpora import SMALL, STOP, Words, chats_of, prompts_of
from decoding import plain
from safetensors.torch import save_file

from specbench.common.errors import SpecBenchError
from specbench.data.conversations import Conversations
from specbench.data.corpus_file import unpack
from specbench.engine.backends.quantised import EXACT, Int8Linear, quantised
from specbench.engine.interface import SIZE_STEP, Taps
from specbench.engine.rows import Rows
from specbench.training import precision
from specbench.training.answer_writer import Lengths, Prompt, write
from specbench.training.corpus import CorpusSettings, CorpusText
from specbench.training.corpus_reader import CorpusReader, held_out, packed
from specbench.training.shards import Shards


def states_of(target, ids):
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return target.run(tokens, torch.arange(len(ids))[None], None, None)[0]


# Rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_is_a_sequence_of_its_own(architecture):
    """Rows start, idle, end and move up; each pass' states are those of a full forward of that row's tokens."""
    target = tiny(architecture)
    rows = Rows(target, rows=5, capacity=32, group=2)
    generator = torch.Generator().manual_seed(0)
    texts = [[] for _ in range(5)]
    with rows.running():
        for step in range(26):
            fed = [None if step < place else int(torch.randint(60, (), generator=generator)) for place in range(5)]
            for text, token in zip(texts, fed, strict=True):
                text += [] if token is None else [token]
            states = rows.step(fed)
            for text, state, token in zip(texts, states, fed, strict=True):
                if token is not None:
                    torch.testing.assert_close(state, states_of(target, text)[-1], atol=2e-5, rtol=1e-4)
            if step in (9, 14, 15, 21):
                free, moves = rows.end(step % 2)
                for source, to in moves:
                    texts[to] = texts[source]
                texts[free] = []
            assert rows.lengths == [len(t) for t in texts]
            if step == 15:
                assert max(rows.lengths[4:]) <= max(rows.lengths[2:4]) <= max(rows.lengths[:2])
    assert target.config._attn_implementation == "sdpa"


# Answers ------------------------------------------------------------------------------------------------------------


def literal(target, prompt, lengths):
    """A greedy dialogue written token by token with full forwards, and its spans."""
    tokens, spans = [], []
    for number, turn in enumerate(prompt.turns):
        coming = list(turn)
        if number and coming[0] == tokens[-1]:
            coming = coming[1:]
        if number and len(tokens) + len(coming) + lengths.min_answer > lengths.whole:
            break
        tokens += coming
        begin = len(tokens)
        while len(tokens) < min(begin + lengths.answer, lengths.whole):
            tokens += plain(target, tokens, 1)
            if tokens[-1] in target.stop_ids:
                break
        spans.append((begin, len(tokens)))
    return tokens, spans


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_dialogues_are_what_the_target_says_greedily(rows):
    target = tiny(spread=0.7)
    target.stop_ids = (STOP, 17)
    lengths = Lengths(answer=9, whole=30, min_answer=4)
    found = {d.index: d for d in write(target, iter(prompts_of(12)), lengths, rows)}
    assert sorted(found) == list(range(12))
    for prompt in prompts_of(12):
        assert (found[prompt.index].tokens, found[prompt.index].spans) == literal(target, prompt, lengths)
    ends = [found[i].tokens[end - 1] in target.stop_ids for i in found for _, end in found[i].spans]
    assert any(ends) and not all(ends), "answers must end by a stop token and by the cap"
    assert len({len(found[i].spans) for i in found}) > 1, "some dialogues have room for one turn only, some for more"


def test_sampled_dialogues_do_not_depend_on_their_neighbours():
    target = tiny()
    lengths = Lengths(answer=9, whole=30, min_answer=4)
    alone = {d.index: d.tokens for p in prompts_of(6, 0.8) for d in write(target, iter([p]), lengths, 1)}
    together = {d.index: d.tokens for d in write(target, iter(prompts_of(6, 0.8)), lengths, 4)}
    assert alone == together
    assert any(together[i] != d.tokens for d in write(target, iter(prompts_of(6)), lengths, 4) for i in [d.index])


def test_sampling_follows_the_target():
    target = tiny(spread=0.25)
    prompts = (Prompt(i, ((3, 14, 15),), 1.0, seed=i) for i in range(3000))
    first = torch.tensor([d.tokens[3] for d in write(target, prompts, Lengths(answer=1, whole=9, min_answer=1), 500)])
    expected = target.logits(states_of(target, [3, 14, 15])[-1]).float().softmax(-1) * 3000
    found = first.bincount(minlength=len(expected)).double()
    many = expected >= 8
    chi = ((found - expected)[many] ** 2 / expected[many]).sum()
    degrees = int(many.sum()) - 1
    assert degrees > 10 and chi < degrees + 4 * (2 * degrees) ** 0.5


# 8 bits -------------------------------------------------------------------------------------------------------------


def test_eight_bits_are_near_the_layer_they_stand_for():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    x = torch.randn(3, 5, 64)
    x[..., 7] *= 60  # the kind of channel that language models have
    exact = linear(x)
    error = (Int8Linear(linear, x.abs().flatten(0, 1).amax(0))(x) - exact).std() / exact.std()
    rough = (Int8Linear(linear, torch.ones(64))(x) - exact).std() / exact.std()
    assert error < 0.02 < rough, (error, rough)


def test_a_quantised_copy_leaves_the_model_alone():
    target = tiny()
    before = {n: p.clone() for n, p in target.model.named_parameters()}
    text = torch.randint(0, 60, (1, 40))
    copy = quantised(target.model, text)
    assert all(torch.equal(p, before[n]) for n, p in target.model.named_parameters())
    assert isinstance(copy.lm_head, Int8Linear) and isinstance(target.model.lm_head, torch.nn.Linear)
    agree = copy(text).logits.argmax(-1) == target.model(text).logits.argmax(-1)
    assert agree.float().mean() > 0.9


# The folder ---------------------------------------------------------------------------------------------------------


def writer(target, root, packed_at=None, **changes):
    target.stop_ids = (STOP,)
    made = CorpusText(CorpusSettings(**(SMALL | changes)), target, Words(), lambda: chats_of(60), root, packed_at)
    made.prepare()
    return made


def test_states_of_a_corpus_are_read_in_one_precision_whatever_is_faster_later(tmp_path, monkeypatch):
    target, readings = tiny(), []
    for pays in (True, False):
        monkeypatch.setattr(precision, "bfloat16_pays", lambda width, pays=pays: pays)
        readings += [writer(target, tmp_path / folder, reading="auto").reading for folder in ("old", f"new-{pays}")]
    assert readings == ["bfloat16", "bfloat16", "bfloat16", "target"]
    assert writer(target, tmp_path / "old", reading="target").reading == "target"


def test_writing_goes_on_where_it_was_cut_off(tmp_path):
    target = tiny()
    whole = writer(target, tmp_path / "a")
    whole.write()
    texts = {t.index: t for t in whole.texts()}
    assert len(texts) == 60 and whole.missing() == 0
    half = writer(target, tmp_path / "b", tokens=400)
    half.write()
    written = sum(len(t.tokens) for t in half.texts() if t.index >= 6)
    assert 400 <= written < 1000 and half.missing() == 0
    path = next(half.folder.glob("answers-*.jsonl"))
    lines = path.read_bytes()
    path.write_bytes(lines[:-30])  # killed within a line
    rest = writer(target, tmp_path / "b")
    assert rest.missing() > 0 and rest.folder == half.folder
    rest.write()
    assert {t.index: t for t in rest.texts()} == texts
    assert writer(target, tmp_path / "b", answer_tokens=9).folder != half.folder


def test_held_out_dialogues_are_greedy_whatever_the_rest_is(tmp_path):
    target = tiny()
    hot = writer(target, tmp_path, temperatures=[0.9])
    hot.write()
    for text in hot.texts():
        greedy = all(text.tokens[b:e] == plain(target, text.tokens[:b], e - b) for b, e in text.spans)
        assert greedy or text.index >= 6
    assert any(t.tokens[b:e] != plain(target, t.tokens[:b], e - b) for t in hot.texts() for b, e in t.spans)


def test_where_conversations_are_the_text_the_target_still_answers_the_held_out_ones(tmp_path):
    target = tiny()
    made = writer(target, tmp_path, source="text", tokens=400)
    made.write()
    texts = made.texts()
    assert [t.index for t in texts[:7]] == [*range(7)] and sum(len(t.tokens) for t in texts[6:]) >= 400
    for text in texts[:6]:
        assert text.spans and all(text.tokens[b:e] == plain(target, text.tokens[:b], e - b) for b, e in text.spans)
    for text, chat in zip(texts[6:], made.chats[6:], strict=False):
        whole = made.chat.encode(chat, answer_follows=False)
        assert text.tokens == whole[: len(text.tokens)], "as they are"


def test_other_conversations_are_another_corpus(tmp_path):
    (tmp_path / "a.json").write_text('[{"id": "1", "conversations": []}]')
    (tmp_path / "b.json").write_text('[{"id": "2", "conversations": []}]')
    digests = {Conversations(str(tmp_path / name)).digest() for name in ("a.json", "b.json")}
    assert len({CorpusSettings().digest("x", digest) for digest in (None, *digests)}) == 3


def test_conversations_may_be_held_again(tmp_path):
    target = tiny()
    twice = writer(target, tmp_path, draws=2)
    twice.write()
    texts = {t.index: t for t in twice.texts()}
    assert len(texts) == 6 + 2 * 54
    assert all(texts[6 + i].tokens[:3] == texts[60 + i].tokens[:3] for i in range(54)), "the same questions"
    assert sum(texts[6 + i].tokens != texts[60 + i].tokens for i in range(54)) > 40, "other answers"


def test_one_file_carries_the_corpus(tmp_path):
    target = tiny()
    made = writer(target, tmp_path / "a")
    made.write()
    path = made.pack(tmp_path / "shipped", {"license": "none"})
    assert unpack(path) == made.texts()
    provenance = json.loads((tmp_path / "shipped" / "corpus.json").read_text())
    assert (
        provenance["training_tokens"] == sum(len(t.tokens) for t in made.texts() if t.index >= 6)
        and provenance["held_out"] == 6
    )
    target.run = lambda *a, **k: pytest.fail("nothing is left to write")
    taken = writer(target, tmp_path / "b", tmp_path / "shipped", tokens=provenance["training_tokens"])
    taken.load = lambda: pytest.fail("no conversation is needed")
    taken.write()
    assert taken.texts() == made.texts()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(SpecBenchError, match=r"corpus\.safetensors\.xz has not the SHA-256"):
        writer(target, tmp_path / "c", tmp_path / "shipped")


def test_a_packed_corpus_of_other_settings_is_not_taken(tmp_path):
    target = tiny()
    made = writer(target, tmp_path / "a")
    made.write()
    made.pack(tmp_path / "shipped", {})
    other = writer(target, tmp_path / "b", tmp_path / "shipped", answer_tokens=5)
    other.write()
    assert not list(other.folder.glob("answers-packed.jsonl")) and other.texts() != made.texts()


def test_a_quantised_layer_computes_the_same_with_bytes_and_with_whole_numbers_in_float32():
    linear, x = torch.nn.Linear(EXACT, 7), torch.randn(5, EXACT)
    ranges = x.abs().amax(0)
    with torch.no_grad():
        bytewise, floating = (Int8Linear(linear, ranges, bytewise=b)(x) for b in (True, False))
    assert torch.equal(bytewise, floating)
    assert torch.allclose(bytewise, linear(x), atol=0.05)


def test_answers_of_a_quantised_copy_are_another_corpus(tmp_path):
    """Apart from the held-out ones, which are the target's own, other ids come out; so the folders must not be one."""
    target = tiny(spread=0.25)
    own, copied = (writer(target, tmp_path, precision=precision) for precision in ("target", "int8"))
    assert own.folder != copied.folder
    for made in (own, copied):
        made.write()
    ours, theirs = ({t.index: t.tokens for t in made.texts()} for made in (own, copied))
    assert all(ours[i] == theirs[i] for i in range(6)) and ours != theirs
    text = [CorpusSettings(source="text", precision=precision) for precision in ("target", "int8", "auto")]
    assert len({settings.digest("x") for settings in text}) == 1, "nobody writes text that is there"


@pytest.mark.parametrize("precision", ["target", "int8"])
def test_auto_takes_over_a_packed_corpus_whoever_wrote_it(tmp_path, precision, monkeypatch):
    """Also where the other precision would pay; without one it is what pays here."""
    target, other = tiny(), {"target": "int8", "int8": "target"}[precision]
    made = writer(target, tmp_path / "a", precision=precision)
    made.write()
    made.pack(tmp_path / "shipped", {})
    monkeypatch.setattr("specbench.training.corpus.fastest", lambda device: other)
    taken = writer(target, tmp_path / "b", tmp_path / "shipped", precision="auto")
    assert taken.settings.precision == precision and taken.texts() == made.texts() and taken.missing() == 0
    assert writer(target, tmp_path / "c", precision="auto").settings.precision == other
    longer = writer(target, tmp_path / "d", tmp_path / "shipped", precision="auto", answer_tokens=9)
    assert longer.settings.precision == other and not longer.texts()
    with pytest.raises(ValueError, match="names no corpus"):
        CorpusSettings(precision="auto").digest("x")


# Shards and batches -------------------------------------------------------------------------------------------------


def test_shards_hold_the_targets_states_and_follow_their_text(tmp_path):
    target = tiny()
    part = writer(target, tmp_path, tokens=400)
    part.write()
    Shards(part).build()
    before = {p.name: p.stat().st_mtime_ns for p in part.folder.glob("*.safetensors")}
    whole = writer(target, tmp_path)
    whole.write()
    folder = Shards(whole).build()
    after = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    assert len(after) == 1 + 6 and after["validation.safetensors"] == before["validation.safetensors"]
    assert any(after[n] != t for n, t in before.items()), "a shard with more texts now is written anew"
    corpus = CorpusReader(folder, 4, False, 0)
    assert corpus.tokens == sum(len(t.tokens) for t in whole.texts() if t.index >= 6)
    batch = corpus.load(corpus.batches(0)[0], torch.device("cpu"), torch.float32)
    assert batch.tokens.shape[1] % SIZE_STEP == 0 and batch.states.shape[:2] == batch.tokens.shape
    assert not (batch.scored & ~batch.valid).any()
    for tokens, states, valid in zip(batch.tokens, batch.states, batch.valid, strict=True):
        ids = tokens[valid].tolist()
        torch.testing.assert_close(states[valid], states_of(target, ids), atol=2e-2, rtol=1e-2)  # stored in bfloat16


def test_of_more_text_only_so_many_tokens_are_read(tmp_path):
    target = tiny()
    writer(target, tmp_path).write()
    part = Shards(writer(target, tmp_path, tokens=400))
    used, unread = part.tokens()
    folder = part.build()
    read = CorpusReader(folder, 4, False, 0, limit=400)
    assert 0 < len(read.shards) == len(list(folder.glob("shard-*"))) < 6
    assert read.tokens == used >= 400
    assert unread > used, "held-out text is read too"
    assert part.tokens() == (used, 0)


@pytest.mark.parametrize("answers_only", [False, True])
def test_packed_rows_hold_what_padded_rows_hold(tmp_path, answers_only):
    target = tiny()
    text = writer(target, tmp_path)
    text.write()
    folder = Shards(text).build()

    def contents(row_tokens):
        corpus = CorpusReader(folder, 2, answers_only, 0, row_tokens=row_tokens)
        found, places, rows = [], 0, 0
        for items in corpus.batches(3):
            batch = corpus.load(items, torch.device("cpu"), torch.float32)
            places, rows = places + batch.tokens.numel(), rows + len(items)
            starts = torch.zeros_like(batch.tokens) if batch.starts is None else batch.starts
            for row in range(len(batch.tokens)):
                for start in starts[row][batch.valid[row]].unique().tolist():
                    here = batch.valid[row] & (starts[row] == start)
                    assert batch.positions[row][here].tolist() == list(range(int(here.sum())))
                    found.append((batch.tokens[row][here].tolist(), batch.scored[row][here].tolist()))
        return sorted(found), places, rows

    alone, padded, _ = contents(None)
    together, dense, _ = contents(96)
    assert alone == together
    assert dense < padded
    spans = {tuple(t.tokens): t.spans for t in text.texts()}
    for tokens, scored in alone:
        answered = {i for b, e in spans[tuple(tokens)] for i in range(b - 1, e - 1)}
        assert [i for i, s in enumerate(scored) if s] == (sorted(answered) if answers_only else list(range(len(tokens))))


def test_packing_loses_nothing_and_cuts_only_what_no_row_holds():
    sequences = [(SimpleNamespace(), 0, length) for length in (5, 9, 30, 2, 2, 7)]
    rows = packed(sequences, 12)
    assert max(sum(b - a for _, a, b in row) for row in rows) <= 12
    assert sorted(b - a for row in rows for _, a, b in row) == [2, 2, 5, 7, 9, 12]
    assert len(rows) == 4


def test_online_states_of_packed_rows_are_the_stored_ones(tmp_path):
    target = tiny("gemma3")
    text = writer(target, tmp_path)
    text.write()
    folder = Shards(text).build()
    stored = CorpusReader(folder, 4, False, 0, row_tokens=64)
    online = CorpusReader(folder, 4, False, 0, online=target, taps=Taps(kv=(0, 2)), row_tokens=64)
    items = stored.batches(0)[0]
    a = stored.load(items, torch.device("cpu"), torch.float32)
    b = online.load(items, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(a.states[a.valid], b.states[a.valid], atol=3e-2, rtol=1e-2)
    assert set(b.kv) == {0, 2}


def test_held_out_answers_are_of_several_turns(tmp_path):
    target = tiny()
    text = writer(target, tmp_path)
    text.write()
    folder = Shards(text).build()
    answers = held_out(folder, 6, min_tokens=2)
    by_ids = {tuple(t.tokens): t for t in text.texts() if t.index < 6}
    turns = set()
    for answer in answers:
        whole = next(t for ids, t in by_ids.items() if list(ids[: len(answer.ids)]) == answer.ids)
        assert (answer.begin, len(answer.ids)) in whole.spans
        turns.add(whole.spans.index((answer.begin, len(answer.ids))))
        torch.testing.assert_close(answer.states.float(), states_of(target, answer.ids), atol=2e-2, rtol=1e-2)
    assert len(answers) == 6 and len(turns) > 1


def test_questions_that_leave_no_room_for_an_answer_are_not_asked(tmp_path):
    short = writer(tiny(), tmp_path, text_tokens=10)  # questions have 5 to 6 ids, an answer at least 8
    short.write()
    assert short.texts() == []


def test_outputs_of_layers_are_stored_beside_the_states(tmp_path):
    """Written for a corpus that has its states already, then read as the target computes them."""
    target, settings = tiny(), {"layers": [2, 0, 2]}
    text = writer(target, tmp_path)
    text.write()
    bare = Shards(text)
    assert bare.hold([]) and not bare.hold([0])
    folder, less = bare.build(), bare.bytes_per_token
    assert not bare.hold([0])
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    shards = Shards(writer(target, tmp_path, **settings))
    used, unread = shards.tokens()
    assert shards.build() == folder and unread == used and shards.tokens()[1] == 0, "held-out dialogues need no layers"
    assert shards.bytes_per_token == less + 2 * 2 * target.hidden_size
    assert {p.parent.name for p in folder.glob("layer-*/*")} == {"layer-0", "layer-2"}
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert after == before, "states that trainings have read stay as they are"
    assert not bare.tokens()[1], "one that needs no layers finds its states"
    assert bare.hold([0, 2]) and not bare.hold([1]), "and one that reads these finds them without asking for them"
    taps = Taps(hidden=(2,), last=False)
    stored, online = (
        CorpusReader(folder, 4, False, 0, taps=taps),
        CorpusReader(folder, 4, False, 0, online=target, taps=taps),
    )
    items = stored.batches(0)[0]
    a, b = (corpus.load(items, torch.device("cpu"), torch.float32) for corpus in (stored, online))
    assert a.hidden.keys() == b.hidden.keys() == {2}
    torch.testing.assert_close(a.hidden[2][a.valid], b.hidden[2][b.valid], atol=3e-2, rtol=1e-2)


def test_a_layer_that_is_missing_damaged_or_not_the_targets_is_named(tmp_path):
    target = tiny()
    text = writer(target, tmp_path, layers=[1])
    text.write()
    folder = Shards(text).build()
    path = sorted(folder.glob("layer-1/*"))[0]
    with pytest.raises(SpecBenchError, match=r"layer-0/shard-\d+\.safetensors is not there; build the corpus"):
        CorpusReader(folder, 4, False, 0, taps=Taps(hidden=(0,)))
    path.write_bytes(b"no tensors")
    with pytest.raises(SpecBenchError, match=rf"{path.name} is damaged; remove it, and it is made again"):
        CorpusReader(folder, 4, False, 0, taps=Taps(hidden=(1,)))
    save_file({"states": torch.zeros(3, target.hidden_size)}, path)  # of a shard before it got more text
    assert Shards(text).tokens()[1] > 0
    Shards(text).build()
    assert CorpusReader(folder, 4, False, 0, taps=Taps(hidden=(1,))).tokens
    with pytest.raises(SpecBenchError, match=r"train\.corpus\.layers: there is no layer 3; the target has 3, from 0"):
        Shards(writer(target, tmp_path, layers=[3]))
