"""Reading and writing weights: one file a dialect, and `locate`, which says what a path or a name means."""

from stam.weights.authors import load_authors
from stam.weights.deit import (
    adapt_deit,
    copy_teacher,
    heads_like,
    load_deit,
    load_teacher,
    read_classifiers,
    read_deit,
)
from stam.weights.folder import (
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    MODEL_FILE,
    is_agent_folder,
    load_agent,
    load_teacher_folder,
    save_agent,
    save_teacher,
)
from stam.weights.locate import (
    HASHES_FILE,
    FoundAgent,
    find_agent,
    find_core,
    find_teacher,
    package_folder,
    package_names,
)
from stam.weights.opening import load, open_teacher, start_agent
from stam.weights.state_dict import Source, StateDict, load_strictly, read_state_dict

__all__ = [
    "CONFIG_FILE",
    "FORMAT",
    "FORMAT_VERSION",
    "HASHES_FILE",
    "MODEL_FILE",
    "FoundAgent",
    "Source",
    "StateDict",
    "adapt_deit",
    "copy_teacher",
    "find_agent",
    "find_core",
    "find_teacher",
    "heads_like",
    "is_agent_folder",
    "load",
    "load_agent",
    "load_authors",
    "load_deit",
    "load_strictly",
    "load_teacher",
    "load_teacher_folder",
    "open_teacher",
    "package_folder",
    "package_names",
    "read_classifiers",
    "read_deit",
    "read_state_dict",
    "save_agent",
    "save_teacher",
    "start_agent",
]
