"""The Hugging Face hub: weights folders to it and from it.

A repository there is a weights folder as anywhere else: `model.safetensors` and `config.json`, beside a
README. Nothing else is read, so nothing that is fetched can run.
"""

import re
from pathlib import Path
from typing import Any

from stam.errors import FileError, MissingPackageError, WeightsError, require_package
from stam.files import read_json
from stam.weights.folder import CONFIG_FILE, MODEL_FILE

_EXTRA = "hub"
_CARD = "README.md"
_MOST_LABELS = 30


class HubError(WeightsError):
    """The hub could not be reached, or does not do as asked."""


def fetch(name: str, file: str) -> Path:
    """Returns a file of a repository, from the cache where it is there."""
    wanted = f"bring the file {file} of '{name}' and pass its path"
    try:
        hub = require_package("huggingface_hub", extra=_EXTRA)
    except MissingPackageError as error:
        raise WeightsError(f"'hub:{name}' {error}; or {wanted}") from error
    try:
        return Path(hub.hf_hub_download(name, file))
    except Exception as error:  # the hub's errors are many; all mean that the file is not to be had
        raise HubError(f"could not fetch '{name}' from the hub ({type(error).__name__}): {wanted}") from error


def push(folder: Path, name: str, private: bool = False, message: str = "") -> str:
    """Writes a weights folder to a repository in one commit, and makes the repository where there is none.

    Args:
        folder: Holds `model.safetensors` and `config.json`, of an agent, a teacher or a system of the zoo.
        name: `OWNER/NAME` of the repository.
        private: Whether a repository that is made can be seen by its owner only.
        message: What the commit says.

    Returns:
        Where to see it.

    Raises:
        HubError: The name is none, nobody is logged in, or the hub refuses.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        raise HubError(
            f"'{name}' is no repository: name it as OWNER/NAME, such as me/{folder.resolve().name}"
        )
    hub = require_package("huggingface_hub", extra=_EXTRA)
    api = hub.HfApi()
    if not hub.get_token():
        raise HubError("nobody is logged in to the hub: set HF_TOKEN, or run 'hf auth login'")
    files: dict[str, Any] = {file: str(folder / file) for file in (CONFIG_FILE, MODEL_FILE)}
    files[_CARD] = model_card(folder, name).encode()
    additions = [hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=files[file]) for file in files]
    try:
        url = str(api.create_repo(name, private=private, exist_ok=True))
        api.create_commit(name, additions, commit_message=message or "Weights of stam-vision")
    except Exception as error:  # likewise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HubError(
            f"could not write '{name}' to the hub ({said}): check the connection, the name and your rights"
        ) from error
    return url


def model_card(folder: Path, name: str) -> str:
    """Returns the README of a repository: the model's own, or one made of its configuration.

    Args:
        folder: The weights folder.
        name: What the repository will be called.
    """
    own = folder / _CARD
    if own.is_file():
        try:
            text = own.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read '{own}': {error}") from error
        return text if text.startswith("---") else f"{_HEADER}\n{text}"
    record = read_json(folder / CONFIG_FILE)
    record = record if isinstance(record, dict) else {}
    part: Any = next((record[key] for key in ("agent", "system", "teacher") if key in record), None)
    labels = part.get("labels", []) if isinstance(part, dict) else None
    if not isinstance(labels, list):
        raise FileError(f"'{folder / CONFIG_FILE}' does not describe a model: bring it back")
    shown = ", ".join(map(str, labels[:_MOST_LABELS])) + (", ..." if len(labels) > _MOST_LABELS else "")
    facts = [("classes", f"{len(labels)}: {shown}")]
    facts += [(key, part[key]) for key in ("image_size", "glimpse_size", "core", "policy") if key in part]
    lines = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in facts)
    return _MADE.format(header=_HEADER, name=name, kind=record.get("format", "model"), facts=lines)


_HEADER = """---
library_name: stam
pipeline_tag: image-classification
tags: [hard-attention, active-vision]
---
"""

_MADE = """{header}
# {name}

Weights of STAM, which classifies an image it never sees whole ({kind}).

{facts}

```python
import stam

agent = stam.load("hub:{name}")
print(agent.predict("image.jpg").label)
```
"""
