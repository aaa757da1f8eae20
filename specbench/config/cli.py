"""What all commands share: composing the configuration, and errors as one line with exit code 2.

A sweep continues after a failed job, and has its exit code at the end.
"""

import argparse
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specbench.common import environment, storage
from specbench.common.errors import Reported, SpecBenchError, format_exception, one_line, warn
from specbench.common.processes import INTERRUPTED
from specbench.config import catalog, usage, validation

CONF = str(storage.PROJECT / "conf")
QUOTES = "'\""


def handle_errors(job: Callable[..., None]) -> Callable[..., bool]:
    """A job that prints its errors, before Hydra adds lines of its own, and ends the process with the exit code.

    In a sweep it returns whether it succeeded instead.
    """

    @functools.wraps(job)
    def wrapped(*args: Any) -> bool:
        try:
            job(*args)
        except KeyboardInterrupt:
            sys.exit(_interrupted())
        except Reported:
            return False
        except Exception as error:
            code = _report(_missing_choice(error) or format_exception(error))
            if not sweeping() or environment.launched_processes() > 1:  # which must not go on with different jobs
                sys.exit(code)
            return False
        return True

    return wrapped


def command(name: str) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Makes a job the main function of a command, called with the configuration that `conf/<name>.yaml` composes."""

    def wrap(job: Callable[..., None]) -> Callable[[], None]:
        succeeded: list[bool] = []  # by job of a sweep in this process
        guarded = handle_errors(job)

        @functools.wraps(job)
        def recorded(config: DictConfig) -> bool:  # what `Sweep.on_job_end` counts
            succeeded.append(guarded(config))
            return succeeded[-1]

        run: Callable[[], None] = hydra.main(version_base="1.3", config_path=CONF, config_name=name)(recorded)

        @functools.wraps(job)
        def main() -> None:
            succeeded.clear()
            run()
            if not all(succeeded):
                sys.exit(2)

        return main

    return wrap


def choice(group: str) -> str:
    """The file of a group that the running command uses: `choice("study")`."""
    return str(HydraConfig.get().runtime.choices[group])


def typed_overrides() -> list[tuple[str, str]]:
    """The command line's overrides: option and whole override, in order."""
    task = words_of(HydraConfig.get())
    parsed = OverridesParser.create().parse_overrides(task)
    return [(option.key_or_group, word) for option, word in zip(parsed, task, strict=True)]


def selected(config: Any, option: str) -> Any:
    """An option's value; None if there is none, or if an interpolation in it cannot be resolved."""
    return OmegaConf.select(config, option, throw_on_resolution_failure=False)


def words_of(hydra_config: Any) -> list[str]:
    """The overrides that Hydra's own configuration lists, as they were typed: interpolations are the job's to resolve."""
    words: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    return list(words)


def run_cli(main: Callable[[], None], name: str | None = None) -> None:
    """Run a command. name: of its configuration, for its help and for messages on misspelt options."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors instead of printing them
    sys.argv[1:] = expand_shorthands(sys.argv[1:])
    try:
        if name is not None and usage.asks_for_help(sys.argv[1:]):
            print(usage.help_text(name, sys.argv[1:]))
            return
        if name is not None:
            catalog.require_optional(name, sys.argv[1:])
        main()
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except Exception as error:
        message = _missing_choice(error) or _unknown_option(error, name) or _parser_failure(error)
        sys.exit(_report(message or format_exception(error)))


def expand_shorthands(typed: list[str]) -> list[str]:
    """A command line with its shorthands as Hydra overrides.

    `link=tcp://host:port`  the link `direct` to this address
    `drafter=[a,b]`         several drafters beside one baseline: the first one's options, and the names of all
    `prompts=FILE`          a data set with that file's prompts and name, see `conf/dataset/prompts.yaml`
    `model.path=DIR`        without model.name=: the model is named after the folder, not like the default target
    """
    words: list[str] = []
    for word in typed:
        name, _, value = word.partition("=")
        several = re.match(r"drafter=\[([^\]]*)\]$", word)
        if several:
            words += [f"drafter={several[1].split(',')[0].strip()}", f"drafters=[{several[1]}]"]
        elif name == "prompts":
            words += ["dataset=prompts", f"dataset.path={_quoted_each(value)}"]
        elif name == "link" and value.startswith("tcp://"):
            words += ["link=direct", f"link.to={_quoted(value)}"]
        else:
            words.append(word)
    paths = [index for index, word in enumerate(words) if word.startswith("model.path=")]
    folder = words[paths[-1]].partition("=")[2] if paths else ""
    if folder not in ("", "null") and not any(re.match(r"model(\.name)?=", word) for word in words):
        swept = "," in folder and folder[:1] not in QUOTES  # each job's model has its own folder's name
        name = "'${folder:${model.path}}'" if swept else _model_name(folder.strip(QUOTES))
        words[paths[-1]] = f"model.path={_quoted_each(folder) if swept else _quoted(folder)}"
        words.insert(paths[-1] + 1, f"model.name={name}")  # not at the end, where a flag such as --info would take it
    return words


def _model_name(folder: str) -> str:
    """What a model in a folder is called."""
    return folder_name(Path(folder).expanduser().resolve().name, "model")


def _quoted_each(values: str) -> str:
    """The parts of a sweep, `a,b`, quoted for Hydra's grammar if necessary."""
    return ",".join(map(_quoted, values.split(",")))


def _quoted(value: str) -> str:
    """A text quoted for Hydra's grammar if necessary."""
    plain = value[:1] in ("", *QUOTES) or re.fullmatch(r"[A-Za-z0-9:./_-]+", value)
    return value if plain else "'" + value.replace("'", "\\'") + "'"


def folder_name(name: str, default: str) -> str:
    """A file's name, changed so that it can name a folder of rows, see `specbench.common.types.Name`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-.")[:100] or default


def composed(name: str, overrides: list[str]) -> DictConfig:
    """The configuration of a command with these overrides, inside or outside of a job."""
    if GlobalHydra.instance().is_initialized():
        return compose(name, overrides)
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose(name, overrides)


def trained_drafter(name: str, vocabulary: int | None = None, *, _parent_: Any) -> DictConfig:
    """The options in a trained drafter's file, as a node of another drafter's options: `${trained_drafter:eagle2}`.

    vocabulary: size of its draft vocabulary; None: as in its file. Raises `SpecBenchError` for an unknown name.
    """
    path = Path(CONF, "drafter", f"{name}.yaml")
    file: Any = OmegaConf.load(path) if path.is_file() else {}
    if "weights" not in file.get("drafter", {}):
        known = [other for other in catalog.names("drafter") if "weights" in catalog.file("drafter", other).node]
        raise SpecBenchError(f"there is no trained drafter {name}{validation.nearest(name, known)}")
    options: DictConfig = file.drafter
    if vocabulary is not None:
        options.vocabulary = vocabulary
    options._set_parent(_parent_)  # its interpolations refer to the whole configuration
    return options


def for_model(name: str, value: Any, other: Any = None, *, _root_: Any) -> Any:
    """A value for one target, another one for all others: `${for_model:smollm2-135m,640}`."""
    return value if _root_.model.name == name else other


OmegaConf.register_new_resolver("trained_drafter", trained_drafter)
OmegaConf.register_new_resolver("for_model", for_model)
OmegaConf.register_new_resolver("folder", _model_name)
OmegaConf.register_new_resolver("stem", lambda path: folder_name(Path(str(path or "prompts")).stem, "prompts"))


def sweeping() -> bool:
    """Is this job part of a sweep?"""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _missing_choice(error: BaseException) -> str | None:
    """The message on an unknown or missing choice of a group's file; None for other errors."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        folder, _, name = error.missing_cfg_file.rpartition("/")
        return catalog.unknown(folder, name, error.options)
    unnamed = re.match(r"You must specify '(\w+)'", str(error)) if isinstance(error, ConfigCompositionException) else None
    return f"{unnamed[1]} is missing: name one with {unnamed[1]}=; {catalog.where(unnamed[1])}" if unnamed else None


def _parser_failure(error: Exception) -> str | None:
    """The message on an exception from inside Hydra's parser; None for other errors."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, (HydraException, SpecBenchError)) or os.path.dirname(hydra.__file__) not in innermost:
        return None
    return f"{' '.join(sys.argv[1:])}: {one_line(error) or type(error).__name__}"


def _unknown_option(error: Exception, name: str | None) -> str | None:
    """The message on an override of an unknown option, with the nearest known one; None for other errors."""
    match = re.match(r"Could not override '([^']+)'", str(error)) if isinstance(error, HydraException) else None
    if match is None or name is None:
        return None
    groups = catalog.groups(name)
    chosen = [word.split(",")[0] for word in sys.argv[1:] if word.partition("=")[0] in groups]  # files bring options
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd")
    folder = parser.parse_known_args(sys.argv[1:])[0].config_dir  # of the user's own studies
    searched = [f"hydra.searchpath=[{_quoted('file://' + os.path.abspath(folder))}]"] if folder else []
    known: Any = OmegaConf.to_container(composed(name, [*chosen, *searched]))
    return f"{match[1]}: no such option{validation.nearest(match[1], dict.fromkeys(_keys(known)))}"


def _keys(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all options."""
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")


def _interrupted() -> int:
    """Say how to go on; returns the exit code."""
    warn("interrupted; run the same command again to continue")
    return INTERRUPTED


def _report(line: str) -> int:
    """Print an error; returns the exit code."""
    warn(line)
    return 2
