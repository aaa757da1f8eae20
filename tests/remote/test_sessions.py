"""Trees of several clients in one pass: each answer is what the client gets alone, and what a failure costs the others."""

import torch
from conftest import make, tiny
from test_hostile import BEGIN, PASS, TAPS, Raw
from test_remote import LIMITS, folder, serving  # noqa: F401 - a fixture

from specbench.common.errors import SpecBenchError
from specbench.engine.target import Target
from specbench.remote import protocol
from specbench.remote.sessions import Sessions
from specbench.remote.target import RemoteTarget
from specbench.remote.throughput import throughput

PROMPTS = [[5, 9, 11], [7] * 20, [3, 4]]
TREES = [{**PASS, "tokens": [8, 9, 10], "parents": [0, 0]}, {**PASS, "tokens": [12], "parents": []}, None]


def begun(target, prompts=PROMPTS, **taps):
    sessions = Sessions(target, LIMITS, {})
    opened = [sessions.new() for _ in prompts]
    for session, prompt in zip(opened, prompts, strict=True):
        sessions.begin(session, {**BEGIN, "prompt": prompt, "taps": {**TAPS, **taps}})
    return sessions, opened


def answered(sessions, opened, requests, together):
    trees = [sessions.tree(session, request) for session, request in zip(opened, requests, strict=True)]
    if together:
        states = sessions.forward(opened, trees)
    else:
        states = [sessions.forward([session], [tree])[0] for session, tree in zip(opened, trees, strict=True)]
    return [sessions.accept(*parts) for parts in zip(opened, trees, states, strict=True)]


@torch.inference_mode()
def test_each_gets_what_it_gets_alone():
    found = {}
    for together in (False, True):
        sessions, opened = begun(tiny(), hidden=[1])
        cycles = [answered(sessions, opened, TREES, together) for _ in range(4)]
        found[together] = [[(answer["path"], answer["token"]) for answer in cycle] for cycle in cycles]
        assert all(len(answer["hidden"]) == 1 and answer["hidden"][0]["b"] for answer in cycles[0])
    assert found[True] == found[False]


@torch.inference_mode()
def test_clients_come_and_go():
    sessions, opened = begun(tiny())
    expected = answered(*begun(tiny(), [PROMPTS[2]] * 3), TREES, False)[0]["token"]
    for session in opened[1], opened[0]:
        sessions.end(session)
    other = sessions.new()  # takes the first place that is free
    sessions.begin(other, {**BEGIN, "prompt": PROMPTS[2]})
    assert [a["token"] for a in answered(sessions, [opened[2], other], [TREES[0]] * 2, True)] == [expected] * 2
    for session in opened[2], other:
        sessions.end(session)
    assert not sessions.slots.storage and not sessions.slots.sequences


@torch.inference_mode()
def test_who_shares_a_pass():
    sessions, (one, other, _) = begun(tiny())
    assert sessions.share_a_pass(one, 1, other, 8) and sessions.share_a_pass(one, 40, other, 20)
    assert not sessions.share_a_pass(one, 1, other, 9)
    sessions.begin(other, {**BEGIN, "taps": {**TAPS, "hidden": [1]}})
    assert not sessions.share_a_pass(one, 1, other, 1)
    sessions, (one, other, _) = begun(tiny("mistral"))  # its windows need passes of their own
    assert not sessions.share_a_pass(one, 1, other, 1)


def test_a_failing_tree_fails_its_client_alone(monkeypatch):
    with serving(tiny()) as server:
        clients = [Raw(server.address) for _ in range(3)]
        assert all(client.ask(BEGIN)["kind"] == "answer" for client in clients)
        forward, widths = server.sessions.forward, []

        def failing(sessions, trees):
            widths.append(len(trees))
            if any(int(tree.tokens[0]) == 7 for tree in trees):
                raise SpecBenchError("seven")
            return forward(sessions, trees)

        monkeypatch.setattr(server.sessions, "forward", failing)
        peers = list(server.clients)
        monkeypatch.setattr(server, "_turn", lambda: peers if all(c.has_work for c in server.clients.values()) else [])
        for token, client in enumerate(clients, 6):
            client.socket.send(protocol.encode({**PASS, "tokens": [token], "parents": []}))
        assert [client.receive()["kind"] for client in clients] == ["answer", "error", "answer"]
        assert widths == [3, 1, 1, 1]
        for client in clients:
            client.close()


def test_streams_share_their_passes(folder, monkeypatch):  # noqa: F811
    with serving(Target.load(folder, torch.float32, torch.device("cpu"))) as server:
        forward, widths = server.sessions.forward, []
        monkeypatch.setattr(server.sessions, "forward", lambda s, t: (widths.append(len(s)), forward(s, t))[1])

        def connect():
            there = RemoteTarget.at(server.address, folder, torch.float32, torch.device("cpu"))
            return there, make("none", there, "drafter.streamed=true")

        throughput(4, connect, [PROMPTS[0]], 100)
        assert sum(widths) >= 300 and len(widths) < sum(widths) / 2
