"""The bar on a terminal: drawn at counts alone, so that nothing runs beside timed work."""

import io
import sys
import threading

from specbench.common.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_drawn_at_counts_by_no_thread_of_its_own(monkeypatch):
    terminal, before = Terminal(), threading.active_count()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("decoding", 4, "questions", lambda: "2.1x so far") as reached:
        assert threading.active_count() == before
        for count in (1, 2):
            drawn = len(terminal.getvalue())
            reached(count)
            assert f"{count}/4 questions" in terminal.getvalue()[drawn:] and "2.1x so far" in terminal.getvalue()[drawn:]
