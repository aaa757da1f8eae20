"""The command `specbench`: each of its commands is `python -m specbench.<command>`; help and lists load nothing.

specbench run drafter=eagle2 dataset=mtbench
specbench run --help drafter=lookahead
specbench list drafters
"""

import runpy
import signal
import sys
import textwrap
from collections.abc import Callable

from specbench import __version__
from specbench.common.errors import SpecBenchError, nearest, visible
from specbench.config import listing, usage

LISTS = f"""usage: specbench list {"|".join(listing.KINDS)} [--model=NAME]

What there is to choose from, one line each: what it is, what it needs, whether it is here. Nothing is fetched for it.

drafters: here are weights for the target --model, if none is named the one that specbench run takes; others are trained \
by specbench train, or taken from the hub where somebody published them.
models: memory is that of the weights in bfloat16 (GPUs, CPUs with AMX) to float32 (other CPUs); what is not here is \
fetched on first use.
datasets: what is not here is fetched on first use; data.root=FOLDER takes FOLDER/NAME.jsonl instead.
studies: of which table or figure; whether rows of it lie under results.
Lines are cut at the terminal's width, or at COLUMNS."""


def main() -> None:
    """Run what the command line asks for; the exit code is that of the command, 2 for an unknown one."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except SpecBenchError as error:
        print(f"specbench: {error}", file=sys.stderr)
        sys.exit(2)


def _run(words: list[str]) -> int:
    command, *rest = words or [""]
    if command in usage.COMMANDS and not usage.asks_for_help(rest):
        sys.argv[1:] = rest
        runpy.run_module(f"specbench.{command}", run_name="__main__", alter_sys=True)
        return 0
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may stop
    print(_answer(command)(rest))
    return 0 if command else 2


def _answer(command: str) -> Callable[[list[str]], str]:
    """The function that answers without loading anything. Raises `SpecBenchError` for an unknown command."""
    if command in usage.COMMANDS:
        return lambda rest: usage.help_text(command, rest)
    answers: dict[str, Callable[[list[str]], str]] = {
        "list": lambda rest: _wrapped(LISTS) if usage.asks_for_help(rest) else listing.list_text(rest),
        "--version": lambda rest: f"specbench {__version__}",
        **dict.fromkeys(("", "help", *usage.FLAGS), lambda rest: _overview()),
    }
    if command not in answers:
        known = [*usage.COMMANDS, *filter(None, answers)]
        raise SpecBenchError(f"{visible(command)}: there is no such command{nearest(command, known)}")
    return answers[command]


def _overview() -> str:
    rows = [(command, usage.summary(command)) for command in usage.COMMANDS]
    rows += [("list", f"List {', '.join(listing.KINDS)}: what each needs, whether it is here")]
    rows += [("--version", "Say which version this is")]
    lines = [line for command, summary in rows for line in usage.row(command, summary, column=14)]
    examples = [f"  {line}" for line in (__doc__ or "").splitlines() if line.startswith("specbench ")]
    closing = "specbench COMMAND --help: its options, their defaults and meanings"
    return "\n".join(["usage: specbench COMMAND ...", "", *lines, "", *examples, "", closing])


def _wrapped(text: str) -> str:
    return "\n".join(line for block in text.splitlines() for line in textwrap.wrap(block, usage.WIDTH) or [""])


if __name__ == "__main__":
    main()
