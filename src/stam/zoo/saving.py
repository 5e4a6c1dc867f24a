"""The systems by name, and their weights folders: `model.safetensors` and `config.json`, as of agents."""

import importlib
import json
from pathlib import Path

from safetensors.torch import save

from stam.config import from_plain, to_plain
from stam.errors import ConfigError, WeightsError, did_you_mean
from stam.files import save_folder
from stam.model.agent import Agent
from stam.weights import CONFIG_FILE, MODEL_FILE, find_agent, load_agent, load_strictly, read_state_dict
from stam.weights.folder import ZOO_FORMAT, format_of, is_agent_folder, read_record, require_outline
from stam.zoo.system import System, SystemConfig

FORMAT = ZOO_FORMAT
FORMAT_VERSION = "1.0"

TITLES = {  # of the systems, one file each, as their papers write them
    "ram": "RAM",
    "dram": "DRAM",
    "gfnet": "GFNet",
    "saccader": "Saccader",
    "tnet": "TNet",
    "stn": "STN",
    "patchdrop": "PatchDrop",
}
SYSTEMS = tuple(TITLES)


def require_system(name: str) -> type[System]:
    """Returns the class of a system; an unknown name names the nearest."""
    if name not in SYSTEMS:
        raise ConfigError(f"unknown system '{name}': {did_you_mean(name, SYSTEMS)}")
    module = importlib.import_module(f"stam.zoo.{name}")
    return getattr(module, name.capitalize())


def build(name: str, config: SystemConfig) -> System:
    """Builds a system with fresh weights."""
    return require_system(name)(config)


def save_system(system: System, folder: str | Path) -> None:
    """Writes a system as a folder of `model.safetensors` and `config.json`."""
    state = {name: value.detach().cpu().contiguous() for name, value in system.state_dict().items()}
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": system.name,
        "system": to_plain(system.config),
    }
    content = json.dumps(record, indent=2) + "\n"
    save_folder(Path(folder), {MODEL_FILE: save(state), CONFIG_FILE: content})


def load_system(folder: str | Path) -> System:
    """Reads a system that `save_system` wrote, in evaluation mode."""
    folder = Path(folder)
    weights = folder / MODEL_FILE
    record = read_record(folder, FORMAT, "name", "system")
    try:
        kind = require_system(str(record["name"])[:40])
        config = from_plain(kind.settings, record["system"])
        require_outline(lambda: kind(config), 1, weights)  # before memory is taken for its sizes
        system = kind(config)
    except ConfigError as error:
        raise WeightsError(f"'{folder / CONFIG_FILE}' does not describe a system: {error}") from error
    load_strictly(system, read_state_dict(weights), f"'{weights}'")
    return system.eval()


def load(path: str | Path) -> System:
    """Loads a system of the zoo in evaluation mode, from a run folder or a weights folder."""
    return load_system(find_agent(path).folder)


def load_looker(folder: str | Path) -> Agent | System:
    """Reads what a weights folder holds: an agent, or a system of the zoo."""
    return load_system(folder) if is_system_folder(Path(folder)) else load_agent(folder)


def is_system_folder(folder: Path) -> bool:
    """Tells whether a folder holds a saved system of the zoo."""
    return is_agent_folder(folder) and format_of(folder) == FORMAT
