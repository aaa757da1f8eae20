"""What a link and several clients make of speed: predicted from what was measured, and measured of a server.

Clients are threads of one process, each with a connection, a drafter and a cache on the server of its own: they share the
server, as they should, and the cores of one client, which whoever reads the number should know.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.engine.decode import Limits, Step, decode
from specbench.engine.interface import Drafter
from specbench.engine.remote import RemoteTarget
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.link import Link
from specbench.records import Row


@dataclass(frozen=True)
class Prediction:
    """Tokens a second over a link, and where a cycle's time goes."""

    tokens_per_s: float
    draft_s: float
    server_s: float
    line_s: float
    round_trip_s: float


def predicted(rows: Sequence[Row], link: Link) -> Prediction:
    """Speed over a link from round trip, bytes and tau alone, of rows of any server.

    tau / (drafting + server's pass + bytes over bandwidth + round trip), the prompt left out: it is sent before decoding.
    What loss and jitter cost is their mean; delays below 0 are cut off, so the mean of a delay lies above its setting.
    """
    cycles = sum(len(row.accepted) for row in rows)
    tokens = sum(len(row.tokens) - 1 for row in rows)
    used = [row.link for row in rows if row.link is not None]
    if not cycles or len(used) < len(rows):
        raise ValueError("rows of a target on a server are needed, with a cycle at least")
    prompts = sum(_prompt(row) for row in rows)
    total = sum(sum(u.sent.values()) + sum(u.received.values()) for u in used) - prompts
    line = total * 8 / (link.mbit * 1e6) / cycles if link.mbit else 0.0
    draft = sum(row.draft_s for row in rows) / cycles
    asked = sum(u.round_trips for u in used)
    server = sum(u.server_s for u in used) / asked
    trip = 2 * link.mean_delay_s()
    return Prediction(tokens / cycles / (draft + server + line + trip), draft, server, line, trip)


def _prompt(row: Row) -> int:
    """Bytes of a prompt's own exchange: its ids, and the share of the states that its positions have."""
    assert row.link is not None
    kept = sum(row.accepted) + len(row.accepted)
    share = row.prompt_tokens / (row.prompt_tokens + kept)
    states = sum(size for kind, size in row.link.received.items() if kind in ("last", "hidden", "kv"))
    return row.link.sent.get("prompt", 0) + int(share * states)


def throughput(
    clients: int, connect: Callable[[], tuple[RemoteTarget, Drafter]], prompts: Sequence[list[int]], tokens: int
) -> dict[str, float]:
    """Tokens a second of a server with so many clients, which all decode all prompts, each beginning with another.

    connect: makes one client's target and drafter.

    Returns:
        together: of all clients; slowest: of the one that got least; waited: share of a client's time that it waits.
    """
    made = [connect() for _ in range(clients)]
    found: list[tuple[int, float, float] | None] = [None] * clients
    ready = threading.Barrier(clients + 1)

    def work(number: int) -> None:
        target, drafter = made[number]
        ready.wait()
        begin, emitted, waited = time.perf_counter(), 0, 0.0
        for place in range(len(prompts)):
            prompt = prompts[(place + number) % len(prompts)]
            events = decode(target, drafter, prompt, Limits(tokens, target.stop_ids), Lossless(), Sampler())
            emitted += sum(len(event.tokens) if isinstance(event, Step) else 1 for event in events)
            waited += target.traffic.waited_s
        found[number] = emitted, time.perf_counter() - begin, waited

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    done = [one for one in found if one is not None]
    if len(done) < clients:
        raise RuntimeError(f"{clients - len(done)} of {clients} clients failed; see above")
    for target, _ in made:
        target.close()
    return {
        "together": sum(emitted for emitted, *_ in done) / seconds,
        "slowest": min(emitted / took for emitted, took, _ in done),
        "waited": sum(waited for *_, waited in done) / sum(took for _, took, _ in done),
    }
