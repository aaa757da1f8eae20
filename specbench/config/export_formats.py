"""Which drafters the serving engines can load, as configured."""

from pathlib import Path
from typing import Any, Literal, get_args

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from specbench.common.errors import SpecBenchError
from specbench.config.cli import CONF

Format = Literal["vllm", "sglang"]


def require_exportable(config: DictConfig) -> None:
    """Raises `SpecBenchError` if `config.format` cannot hold the trained weights of `config.drafter`."""
    if config.drafter.get("weights", "") is None:
        raise SpecBenchError("drafter.weights=null would export random weights; name the folder of trained ones")
    if config.drafter.get("vocabulary") is not None:
        raise SpecBenchError("drafter.vocabulary is no part of what is exported; leave it out, and set it in the server")
    if reason := _obstacle(config.drafter, config.format):
        lists = "; ".join(f"{name} takes {', '.join(exportable(name))}" for name in get_args(Format))
        raise SpecBenchError(f"drafter={config.drafter.name} format={config.format}: {reason} ({lists})")


def exportable(server: str) -> list[str]:
    """The drafters of `conf/drafter` that a server can load."""
    files: dict[str, Any] = {path.stem: OmegaConf.load(path) for path in Path(CONF, "drafter").glob("*.yaml")}
    return sorted(name for name, file in files.items() if _obstacle(file.get("drafter", file), server) is None)


def _obstacle(options: Any, server: str) -> str | None:
    """Why a server cannot load a drafter with these options; None: it can."""
    drafter: Any = get_class(options["_target_"])
    return drafter.export_obstacle(server, options)
