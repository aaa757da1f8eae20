"""The commands over a socket: a server, clients that come and go or are killed, links that are slow."""

import asyncio
import signal
import socket
import statistics
import time

import pytest
from command_line import run, start, study, weight

from specbench.remote.link import _emulate
from specbench.remote.network_emulator import Network, listen
from specbench.remote.transport import parse_address


def served(home, *arguments, **more):
    """A running server and its address."""
    process = start(home, "serve", "threads=1", "port=0", *arguments, **more)
    deadline = time.monotonic() + 120
    while " at tcp://" not in (refusal := process.files[1].read_text() if process.files[1].exists() else ""):
        assert time.monotonic() < deadline and process.poll() is None, refusal
        time.sleep(0.05)
    return process, refusal.split(" at ")[1].split(";")[0]


def stopped(process):
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, process.files[1].read_text()


def test_two_commands_answer_as_one(home, tmp_path):
    """A server, and a run that drafts: the answers are the local run's, and rows say what travelled."""
    process, address = served(home)
    try:
        common = ["drafter=eagle2", weight(home, "eagle2"), "data.limit=2"]
        run(home, "run", f"link={address}", *common, f"results={tmp_path / 'there'}")
        run(home, "run", *common, f"results={tmp_path / 'here'}")
    finally:
        stopped(process)
    there, here = (_rows(tmp_path / side) for side in ("there", "here"))
    assert [(r.key, r.tokens) for r in there] == [(r.key, r.tokens) for r in here]
    for row in there:
        assert row.link.round_trips == len(row.accepted) + 1 and row.link.sent["tree"] > 0
        assert ("last" in row.link.received) == (row.drafter == "eagle2")
    assert all(row.link is None for row in here)


def _rows(folder):
    from specbench.records.blocks import NAME, read_block
    from specbench.records.rows import Row

    (path,) = folder.rglob(NAME)
    return [row for row in read_block(path)[1] if isinstance(row, Row)]


def test_a_run_starts_a_server_of_its_own_behind_a_profile(home, tmp_path):
    run(home, "run", "link=lan", "drafter=prompt_lookup", "data.limit=1", f"results={tmp_path}")
    assert all(row.link.round_trips == len(row.accepted) + 1 for row in _rows(tmp_path))


CUT = """\
title: Links that break
source: [nowhere]
cells:
  - [dataset=mtbench, data.limit=1, link=lan, link.cut_after=3, link.on_disconnect=stop]
  - [dataset=mtbench, data.limit=1, link=lan, link.cut_after=6, link.on_disconnect=stop]
arms:
  lookup: {run: [drafter=prompt_lookup]}
claims: []
"""


def test_every_cell_of_a_study_has_the_link_that_it_names(home, tmp_path):
    study(home, CUT, "cut", f"results={tmp_path}")
    for tokens in (3, 6):
        (folder,) = (tmp_path / "cut" / "tiny").glob(f"*cut{tokens}")
        assert {len(row.tokens) for row in _rows(folder) if row.drafter == "lookup"} == {tokens}


def test_a_delay_below_a_millisecond_is_no_millisecond():
    listener = socket.create_server(("127.0.0.1", 0))
    address, emulator = _emulate(f"tcp://127.0.0.1:{listener.getsockname()[1]}", Network(delay_ms=0.2))
    with listener, socket.create_connection(parse_address(address)) as near, listener.accept()[0] as far:
        trips = []
        for _ in range(50):
            begin = time.perf_counter()
            near.sendall(b"x")
            far.sendall(far.recv(1))
            near.recv(1)
            trips.append(time.perf_counter() - begin)
    emulator.communicate()
    assert 0.0004 <= min(trips) < 0.0018, "milliseconds were rounded up: 2 or more for both ways"


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["link=direct"], "link.to is missing"),
        (["link.cut_after=25"], "link.cut_after is for a target on a server"),
        (["link=tcp://127.0.0.1:1", "link.timeout_s=0.5"], "is specbench.serve running there"),
        (["link=tcp://192.0.2.1:5555"], "SPECBENCH_TOKEN"),
        (["link=lan", "replay=true"], "replay=true runs no target passes"),
        (["link=lan", "backend=graphs"], "backend=graphs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(home, arguments, refusal):
    assert refusal in run(home, "run", "drafter=none", *arguments, ok=False)


def test_a_server_beyond_loopback_wants_a_token(home):
    assert "SPECBENCH_TOKEN" in run(home, "serve", "host=0.0.0.0", ok=False)


def test_who_has_not_the_token_gets_no_answer(home, tmp_path):
    process, address = served(home, SPECBENCH_TOKEN="secret")
    try:
        asked = [f"link={address}", "link.timeout_s=3", "drafter=none", "data.limit=1", f"results={tmp_path}"]
        for token in ("", "another"):
            assert "with the same SPECBENCH_TOKEN" in run(home, "run", *asked, ok=False, SPECBENCH_TOKEN=token)
        run(home, "run", *asked, "link.timeout_s=60", SPECBENCH_TOKEN="secret")
    finally:
        stopped(process)


# The shaper -------------------------------------------------------------------------------------------------------------


async def _echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


class Hurried(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while bytes move and jumps over waits: what else the machine does takes no time."""

    def __init__(self):
        super().__init__()
        self.now, self.waiting = 0.0, self._selector.select
        self._selector.select = self.select

    def time(self):
        return self.now

    def select(self, timeout):
        """What has come, within a moment for what is under way on loopback; else the next timer is due."""
        found = self.waiting(60 if timeout is None else min(timeout, 0.01))
        if not found and timeout is None:
            raise TimeoutError("nothing is left to wait for")
        if not found:
            self.now += timeout
        return found


def shaped(shape, messages):
    """Seconds of the loop's own clock from each message to the last byte of its echo."""

    async def measure():
        echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
        proxy = await listen("127.0.0.1", echo.sockets[0].getsockname()[1], shape)
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.sockets[0].getsockname()[1])
        found, loop = [], asyncio.get_running_loop()
        for message in messages:
            begin = loop.time()
            writer.write(message)
            assert await reader.readexactly(len(message)) == message
            found.append(loop.time() - begin)
        writer.close()
        return found

    loop = Hurried()
    try:
        return loop.run_until_complete(measure())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


def test_a_link_is_as_late_as_it_says():
    assert max(shaped(Network(), [b"x"] * 20)) < 0.001
    assert shaped(Network(delay_ms=40), [b"x"] * 8) == pytest.approx([0.08] * 8, abs=0.001)


def test_a_link_takes_no_more_than_it_says():
    """200 kB at 8 Mbit/s: 0.2 s in each direction, of which what came already goes back meanwhile."""
    (seconds,) = shaped(Network(mbit=8), [bytes(range(256)) * 800])
    assert 0.19 < seconds < 0.35


def test_a_lost_packet_is_a_pause():
    always = shaped(Network(loss=1.0, pause_ms=50), [b"x"] * 3)
    assert min(always) > 0.09
    some = shaped(Network(loss=0.5, pause_ms=50), [b"x"] * 24)
    assert len({round(s / 0.05) for s in some}) > 1 and sum(some) == pytest.approx(24 * 0.05, rel=0.6)


def test_jitter_keeps_the_order_and_its_spread():
    """Two independent delays N(30, 10) ms a message."""
    found = shaped(Network(delay_ms=30, jitter_ms=10), [bytes([i]) * 10 for i in range(30)])
    assert statistics.mean(found) == pytest.approx(0.06, abs=0.015)
    assert 0.006 < statistics.stdev(found) < 0.03
