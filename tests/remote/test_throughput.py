"""Speed over links: what is predicted of a link is what that link then does; and several clients of one server."""

import statistics

import pytest
import torch
from conftest import make
from decoding import PROMPT
from test_remote import benched, client, folder, server  # noqa: F401 - fixtures

from specbench.remote.link import Link
from specbench.remote.network_emulator import Network
from specbench.remote.target import RemoteTarget
from specbench.remote.throughput import throughput
from specbench.reporting.links import predicted


def test_a_delay_cut_off_at_nothing_has_the_mean_that_is_drawn():
    for delay, jitter in ((10.0, 10.0), (21.0, 19.0), (5.0, 0.0)):
        drawn = statistics.mean(Network(delay, jitter, loss=0.01, pause_ms=200).latency_s(100) for _ in range(40_000))
        assert Network(delay, jitter, loss=0.01, pause_ms=200).mean_latency_s() == pytest.approx(drawn, rel=0.05)


@pytest.mark.parametrize(("drafter", "more", "trips"), [("eagle2", [], 1), ("none", ["drafter.streamed=true"], 0)])
def test_predicted_speed_is_that_of_the_link(drafter, more, trips, server, folder):  # noqa: F811
    """From rows without delay, 60 ms of round trip: both sides of the prediction are what the shaped link then shows."""
    shape = Network(delay_ms=30.0, mbit=20.0)
    link = Link("slow", to=server.address, delay_ms=shape.delay_ms, mbit=shape.mbit)
    plainly, shaped = [], []  # rows so far: the quickest of each is what a machine with nothing else to do would show
    with client(server, folder) as near:
        far = link.connect(folder, torch.float32, torch.device("cpu"))
        try:
            for _ in range(10):
                plainly.append(benched(near, drafter, *more, cap=30))
                shaped.append(benched(far, drafter, *more, cap=30))
                row = min(shaped, key=lambda row: row.decode_s)
                prediction = predicted([min(plainly, key=lambda row: row.decode_s)], shape)
                took = (len(row.tokens) - 1) / prediction.tokens_per_s
                expected = pytest.approx(took, rel=0.35, abs=0.15)  # a stream of this tiny target lasts 0.1 s
                if len(shaped) > 1 and row.decode_s == expected:
                    break
        finally:
            far.close()
    assert prediction.trips_s == pytest.approx(0.06 * trips)
    assert row.decode_s == expected


def test_clients_share_a_server_and_each_gets_its_answer(server, folder):  # noqa: F811
    def connect():
        there = RemoteTarget.at(server.address, folder, torch.float32, torch.device("cpu"))
        return there, make("eagle2", there)

    for clients in (1, 3):
        found = throughput(clients, connect, [PROMPT, [9, 8, 7]], 12)
        assert found["together"] > 0 and 0 < found["slowest"] < 1.1 * found["together"] and 0 < found["waited"] < 1
