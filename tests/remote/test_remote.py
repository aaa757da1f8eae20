"""A target on a server: the same tokens as here, whatever drafts; and nobody is hurt by what others send."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import DRAFTERS, TRAINED, make, tiny
from decoding import PROMPT, generate, plain
from drafting import listing

from specbench.common.errors import SpecBenchError
from specbench.config import run_spec
from specbench.config.cli import composed
from specbench.data.prompts import Question
from specbench.engine.decode import Limits, RunSettings, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.engine.weights import trained
from specbench.evaluation import isolated, measurements
from specbench.evaluation.audit import _narrow, _plain, audit
from specbench.evaluation.runner import Bench, BoundDrafter
from specbench.records.rows import Row
from specbench.remote import protocol
from specbench.remote import serving as serving_module
from specbench.remote.server import Server
from specbench.remote.target import RemoteTarget

LIMITS = {"clients": 4, "message": 1 << 22, "prompt": 128, "context": 256, "nodes": 128}
STARTED_FROM_LAYERS = {"clover2"}  # whose training starts from the target's layers, which are not here
NEEDS_LAYERS = {"self_speculation", "early_exit"}


@contextmanager
def serving(target, address="tcp://127.0.0.1:0", condensers=(), idle_s=600.0, **limits):
    """A server in a thread of this process."""
    server = Server(target, address, {**LIMITS, **limits}, idle_s, condensers=condensers)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping = True
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def client(server, folder, **more):
    remote = RemoteTarget.at(server.address, folder, torch.float32, torch.device("cpu"), timeout_s=30, **more)
    try:
        yield remote
    finally:
        remote.close()


def wait_for(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("remote")
    tiny().model.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def server():
    with serving(tiny()) as running:
        yield running


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - NEEDS_LAYERS))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_remote_equals_local_token_for_token(drafter, temperature, server, folder):
    """Also cycle by cycle: the same trees were drafted from the same states."""
    sampler = Sampler(temperature)
    here = tiny()
    made = make(drafter, here)
    expected, steps = generate(here, made, cap=24, sampler=sampler)
    with client(server, folder) as there:
        drafting = make(drafter, there)
        if drafter in STARTED_FROM_LAYERS:
            drafting.load_state_dict(trained(made), strict=False)
        found, remote = generate(there, drafting, cap=24, sampler=sampler)
    assert found == expected
    assert [(s.accepted, s.nodes, s.drafted, s.ranks) for s in remote] == [
        (s.accepted, s.nodes, s.drafted, s.ranks) for s in steps
    ]


@pytest.mark.parametrize("drafter", [*sorted(NEEDS_LAYERS), "moa"])
def test_drafters_that_run_the_targets_layers_are_refused_before_anything_is_loaded(drafter):
    more = ["drafter.tli=1", "drafter.weights=null"] if drafter == "moa" else []
    spec = run_spec.from_config(composed("run", [f"drafter={drafter}", "link=lan", *more]))
    with pytest.raises(SpecBenchError, match="on the server"):
        spec.make_drafter()


def test_a_client_holds_no_layers(server, folder):
    with client(server, folder) as there:
        assert all(p.is_meta for p in there.decoder.layers.parameters())
        assert not there.head.weight.is_meta and not there.embedding.weight.is_meta
        assert generate(there, make("none", there), cap=9)[0] == plain(tiny(), PROMPT, 9)


def test_what_the_server_condenses_is_shorter_and_drafts_the_same(folder):
    """MoA's layers mixed where they are: the same cycles, and fewer bytes than keys and values of all layers."""
    here = tiny()
    expected, steps = generate(here, make("moa", here), cap=24)
    target = tiny()
    with serving(target, condensers=[make("moa", target)]) as mixing, client(mixing, folder) as there:
        found, remote = generate(there, make("moa", there), cap=24)
        short = there.traffic.received
        generate(there, make("moa", there, seed=7), cap=24)  # another network: its states come whole
        assert "kv" in there.traffic.received and "condensed" not in there.traffic.received
    assert (found, [s.accepted for s in remote]) == (expected, [s.accepted for s in steps])
    assert set(short) == {"tokens", "condensed", "frame"} and short["condensed"] < there.traffic.received["kv"]


# A stream -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_is_plain_decoding_that_nobody_asks_for(temperature, server, folder):
    """The same tokens as one round trip each, from a single one. A stream would end at a stop token."""
    sampler = Sampler(temperature)
    with client(server, folder) as there:
        for seed in range(9):
            expected, _ = generate(there, make("none", there), cap=24, sampler=sampler, seed=seed)
            assert there.traffic.round_trips == 24
            if not {*expected[:-1]} & {*there.stop_ids}:
                break
        found, steps = generate(there, make("none", there, "drafter.streamed=true"), cap=24, sampler=sampler, seed=seed)
        assert there.traffic.round_trips == 1
    assert found == expected and len(steps) == 23


def test_a_stream_ends_at_a_stop_token_or_where_it_was_to_end_and_others_go_on(folder):
    """One who only listens keeps nobody waiting, and who has heard enough is sent nothing more."""
    target = tiny()
    expected = plain(tiny(), PROMPT, 40)
    target.stop_ids = (expected[5],)
    with serving(target) as one, client(one, folder) as hearing, client(one, folder) as drafting:
        hearing.stop_ids = drafting.stop_ids = target.stop_ids
        streamed = make("none", hearing, "drafter.streamed=true")
        events = decode(hearing, streamed, PROMPT, Limits(40), Lossless(), Sampler())
        found = [next(events).token, *next(events).tokens]
        assert generate(drafting, make("eagle2", drafting), cap=40)[0] == expected
        found += [token for event in events for token in event.tokens]  # beyond the stop token: asked for once more
        assert found == expected
        assert hearing.traffic.round_trips == 1 + found[:-1].count(expected[5])
        wait_for(lambda: all(not client.streaming for client in one.clients.values()))


# Broken links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "more"), [("none", []), ("none", ["drafter.streamed=true"]), ("eagle2", []), ("moa", []), ("lookahead", [])]
)
def test_a_link_that_waits_goes_on_from_what_was_verified(drafter, more, server, folder):
    """Greedy answers do not change when the link breaks in between."""
    expected = plain(tiny(), PROMPT, 24)
    with client(server, folder, on_disconnect="wait", cut_after=9) as there:
        assert generate(there, make(drafter, there, *more), cap=24)[0] == expected
        assert there.traffic.resumed == 1


def test_a_link_that_waits_sends_a_prompt_again(server, folder, monkeypatch):
    with client(server, folder, on_disconnect="wait") as there:
        request, lost = there.connection.request, []

        def breaks_once(message):
            if message["kind"] == "begin" and not lost:
                lost.append(there.connection.close())
            return request(message)

        monkeypatch.setattr(there.connection, "request", breaks_once)
        assert generate(there, make("eagle2", there), cap=12)[0] == plain(tiny(), PROMPT, 12) and lost


def test_a_fault_of_the_server_ends_one_generation_alone(folder, monkeypatch):
    with serving(tiny()) as server, client(server, folder) as there:
        begin, failed = server.sessions.begin, []

        def fails_once(*arguments):
            if not failed:
                failed.append(1)
                raise RuntimeError("out of memory")
            return begin(*arguments)

        monkeypatch.setattr(server.sessions, "begin", fails_once)
        with pytest.raises(SpecBenchError, match="out of memory"):
            generate(there, make("none", there), cap=4)
        assert generate(there, make("none", there), cap=12)[0] == plain(tiny(), PROMPT, 12)


def test_a_server_in_another_precision_is_refused(server, folder):
    with pytest.raises(SpecBenchError, match=r"computes in float32, this side in bfloat16; set model\.dtype=float32"):
        RemoteTarget.at(server.address, folder, torch.bfloat16, torch.device("cpu"), timeout_s=30)


def test_a_server_ends_when_another_model_is_asked_for_and_begins_anew_when_it_died(monkeypatch):
    begun = []

    def start(model, threads, condensers):
        process = SimpleNamespace(alive=True, join=lambda: None)
        process.is_alive, process.terminate = lambda: process.alive, lambda: setattr(process, "alive", False)
        begun.append(process)
        return process, f"tcp://127.0.0.1:{len(begun)}"

    monkeypatch.setattr(serving_module, "_start", start)
    servers = serving_module.LocalServers()
    assert servers.address("a", 1) == servers.address("a", 1) == "tcp://127.0.0.1:1"
    begun[0].alive = False
    assert servers.address("a", 1) == "tcp://127.0.0.1:2"
    assert servers.address("b", 1) == "tcp://127.0.0.1:3" and [p.alive for p in begun] == [False, False, True]


def test_costs_over_a_link_are_measured_or_refused(server, folder):
    """Drafting is timed beside a remote target, caches here are counted; what needs its layers is refused in one line."""
    with client(server, folder) as there:
        for drafter in ("eagle2", "moa", "prompt_lookup"):
            arm = SimpleNamespace(
                bound=BoundDrafter(drafter, make(drafter, there), Lossless()), spec=SimpleNamespace(backend="eager")
            )
            load = measurements.Workload(there, [PROMPT], 8, arm.bound)
            assert measurements.QUANTITIES["drafting"].measure(load, arm)["ms"] > 0
            assert all(cache.nbytes >= 0 for cache in isolated._caches(there, arm.bound.drafter))
            for name in ("overhead", "target_pass", "generate", "busy"):
                with pytest.raises(SpecBenchError, match="on the server"):
                    measurements.QUANTITIES[name].measure(load, arm)


def test_a_draft_vocabulary_works_over_a_link(server, folder, tmp_path):
    with client(server, folder) as there:
        listing(there, tmp_path)
        drafter = make("eagle2", there, "drafter.vocabulary=40")
        assert generate(there, drafter, cap=12)[0] == plain(tiny(), PROMPT, 12)


def benched(there, drafter, *more, cap=20, expected=None):
    """The row of one generation. expected: the baseline's answer, against which it is audited."""
    bench = Bench(
        there, None, [BoundDrafter(drafter, make(drafter, there, *more), Lossless())], Sampler(), RunSettings(cap)
    )
    row = Row(drafter, "q", "c", 0, len(PROMPT), [], 0.0, 0.0)
    reference = None if expected is None else replace(row, tokens=expected)
    bench._decoded(row, bench.bound_drafters[0], PROMPT, reference)
    return row


@pytest.mark.parametrize("drafter", sorted(set(DRAFTERS) - NEEDS_LAYERS - {"none"}))
def test_cut_off_a_drafter_goes_on_alone_and_rows_say_what_is_its_own(drafter, server, folder):
    """What was verified is the target's; behind it stands what the drafter says, again and again the same."""
    with client(server, folder, on_disconnect="continue", cut_after=6) as there:
        row = benched(there, drafter)
        assert benched(there, drafter).alone == row.alone, "a second generation begins anew"
    assert row.tokens == plain(tiny(), PROMPT, 6), "the link is cut in the middle of a cycle, too"
    assert row.link.cut and len(row.tokens) + len(row.alone) <= 20
    if drafter in TRAINED:
        most = min(20 - len(row.tokens), make(drafter, tiny()).deepest or 99)
        assert len(row.alone) == most or row.alone[-1] in there.stop_ids


def test_alone_a_language_model_says_what_it_would_have_said(server, folder):
    """Vanilla needs no states: cut off, it goes on as its own greedy decoding does."""
    with client(server, folder, on_disconnect="continue", cut_after=6) as there:
        row = benched(there, "vanilla")
        lm = make("vanilla", there).lm
    text = PROMPT + row.tokens
    for token in row.alone:
        positions = torch.arange(len(text))[None]
        with torch.inference_mode():
            refusal = lm.logits(lm.run(torch.tensor([text]), positions, None, None)[0, -1])
        assert int(refusal.argmax()) == token
        text.append(token)


def test_a_link_that_stops_ends_the_row(server, folder):
    with client(server, folder, on_disconnect="stop", cut_after=6) as there:
        row = benched(there, "eagle2")
        assert len(row.tokens) == 6 and not row.alone and row.link.cut


def test_warming_up_is_never_cut(server, folder):
    """However early the link is to break, the first generation that can lose it is a row."""
    chat = SimpleNamespace(opening=lambda question: PROMPT)
    with client(server, folder, on_disconnect="stop", cut_after=2) as there:
        bound_drafters = [BoundDrafter("eagle2", make("eagle2", there), Lossless())]
        Bench(there, chat, bound_drafters, Sampler(), RunSettings(20))._warm_up([Question("q", "c", ("anything",))])
        assert there.traffic.round_trips > 2
        assert benched(there, "eagle2").link.cut


def test_an_audit_asks_a_server_in_the_same_passes(server, folder):
    """Plain, id by id and in a small tree, also where the link is to break early in an answer and where it broke."""
    here, expected = tiny(), plain(tiny(), PROMPT, 20)
    logits = torch.stack([_plain(here, expected), *_narrow(here, expected, [3, 4])])
    assert len(logits) == 3 and (logits - logits[0]).abs().max() < 1e-4
    wrong = [*expected[:9], (expected[9] + 1) % 60]
    with client(server, folder, on_disconnect="stop", cut_after=2) as there:
        row = benched(there, "eagle2", expected=wrong)
        assert row.link.cut and row.audit == {"verdict": "identical"}
        there.connection.close()
        there.cutting = False
        assert audit(there, PROMPT, expected, wrong) == pytest.approx(audit(here, PROMPT, expected, wrong), abs=1e-4)
        found = torch.stack([_plain(there, expected), *_narrow(there, expected, [3, 4])])
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)


def test_an_answer_that_parts_is_audited_over_a_link_that_breaks(server, folder):
    """The passes of an audit are no part of the generation: they are never cut."""
    expected = plain(tiny(), PROMPT, 20)
    with client(server, folder, on_disconnect="stop", cut_after=4) as there:
        row = benched(there, "eagle2", expected=[(expected[0] + 1) % 60, *expected[1:]])
    assert row.link.cut and row.audit["verdict"] == "bug" and row.audit["at"] == 0


# Bytes ------------------------------------------------------------------------------------------------------------------


def test_bytes_by_kind_are_all_bytes_and_what_is_not_read_does_not_travel(server, folder):
    with client(server, folder) as there:
        for drafter, kinds in {"eagle2": {"last"}, "moa": {"kv"}, "vanilla": set(), "none": set()}.items():
            generate(there, make(drafter, there), cap=12)
            traffic = there.traffic
            assert set(traffic.received) == {"tokens", "frame", *kinds}
            assert {"prompt", "tree", "frame"} <= set(traffic.sent)
            assert traffic.round_trips > 1 and 0 < traffic.server_s < traffic.waited_s
    message = {"kind": "pass", "n": 1, "tokens": [1, 2, 3], "parents": [0, 0]}
    data, sizes = protocol.encode_counted(message)
    assert data == protocol.encode(message) and sum(sizes.values()) == len(data)
    assert protocol.decode_counted(data, protocol.REQUEST) == (message, sizes)


@pytest.mark.parametrize("drafter", ["eagle2", "moa"])
def test_states_of_eight_bits_are_fewer_bytes_and_the_answer_stays(drafter, server, folder):
    with client(server, folder) as there:
        expected, steps = generate(there, make(drafter, there), cap=24)
        kind = "kv" if drafter == "moa" else "last"
        each = there.traffic.received[kind] / there.traffic.round_trips
    with client(server, folder, int8_states=True) as there:
        found, others = generate(there, make(drafter, there), cap=24)
        assert (
            there.traffic.received[kind] / there.traffic.round_trips < 0.6 * each
        )  # rows of few numbers here, and a factor
    assert found == expected and len(others) <= len(steps) + 3


def test_a_rounded_tensor_is_within_half_a_step_of_its_rows_largest_value():
    tensor = (
        torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
    )
    packed = protocol.pack(tensor, int8=True)
    found = protocol.unpack(packed, torch.device("cpu"), (3, 5, 64))
    assert len(packed["b"]) + len(packed["m"]) == tensor.numel() + 4 * 15
    assert bool(((found - tensor).abs() <= tensor.abs().amax(-1, keepdim=True) / 254 * 1.001).all())
    nothing = torch.zeros(2, 4)
    assert torch.equal(protocol.unpack(protocol.pack(nothing, int8=True), torch.device("cpu"), (2, 4)), nothing)
