"""Other hard-attention systems, one file each, trained and evaluated as STAM is (docs/zoo.md)."""

from stam.zoo.checking import check_looker
from stam.zoo.saving import (
    SYSTEMS,
    TITLES,
    build,
    is_system_folder,
    load,
    load_looker,
    load_system,
    require_system,
    save_system,
)
from stam.zoo.system import System, SystemConfig

__all__ = [
    "SYSTEMS",
    "TITLES",
    "System",
    "SystemConfig",
    "build",
    "check_looker",
    "is_system_folder",
    "load",
    "load_looker",
    "load_system",
    "require_system",
    "save_system",
]
