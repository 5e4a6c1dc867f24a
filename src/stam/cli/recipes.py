"""The words that `stam train` and `stam teacher` take before their options, and what may go with --resume."""

import difflib
from pathlib import Path

from stam.data.sources import DIGITS, is_data, nearest_data
from stam.errors import ConfigError, DataError, StamError, require
from stam.learning.experiment import recipe_of, reopen
from stam.learning.recipes import RECIPES, get_recipe
from stam.learning.runs import RunError
from stam.zoo import SYSTEMS

DEFAULT_RECIPE = "digits"
DEFAULT_FOR_IMAGES = "tiny"
_NAMES = (*RECIPES, *SYSTEMS)
_ALIKE = 0.75  # how much like a recipe's name a word must be to be meant as one
_WITH_RESUME = ("--resume", "--out", "--tensorboard")


def recipes_and_data(in_full: bool) -> str:
    """Returns what help says of RECIPE and DATA; variants of recipes one by one, or by their ending."""
    data = (
        "DATA is the word digits, a folder of class folders, a CSV file with the columns path, label and "
        "(optional) split, or tar shards.\n\nstam train also takes another "
        f"hard-attention system: {', '.join(SYSTEMS)} (docs/zoo.md)."
    )
    if in_full:
        return f"RECIPE is one of: {', '.join(RECIPES)}.\n\n{data}"
    endings = [name.removeprefix(DEFAULT_RECIPE) for name in RECIPES if name.startswith(f"{DEFAULT_RECIPE}-")]
    varied = [name for name in RECIPES if all(name + ending in RECIPES for ending in endings)]
    variants = {name + ending for name in varied for ending in endings}
    return (
        f"RECIPE is one of: {', '.join(name for name in RECIPES if name not in variants)}.\n\n"
        f"{', '.join(varied[:-1])} and {varied[-1]} may end in {', '.join(endings)}.\n\n{data}"
    )


def recipe_first(positionals: list[str]) -> list[str]:
    """Returns RECIPE and DATA in that order, also where they were written the other way round."""
    if len(positionals) != 2:
        return positionals
    first, second = positionals
    first_is_data = first == DIGITS or (first not in _NAMES and is_data(first))
    second_is_recipe = second in _NAMES and second != DIGITS
    swapped = first_is_data and not is_data(second) and (second_is_recipe or first != DIGITS)
    return [second, first] if swapped else positionals


def _unknown(word: str) -> StamError:
    """Says what a word may have meant that is neither a recipe nor data: a misspelt folder is more likely."""
    close = difflib.get_close_matches(word, _NAMES, n=1, cutoff=_ALIKE)
    if close:
        return ConfigError(f"unknown recipe '{word}': did you mean '{close[0]}'?")
    return DataError(f"no such folder: '{word}'; {nearest_data(Path(word).expanduser())}")


def choose_recipe(positionals: list[str], without_data: bool = False) -> tuple[str, str | None]:
    """Returns the recipe and the data that the words before the options name.

    Args:
        positionals: Those words.
        without_data: Whether data may be missing, as when only help is asked for.
    """
    if not positionals:
        return DEFAULT_RECIPE, None
    first, *rest = positionals
    if first not in RECIPES and not rest:
        if not is_data(first):
            raise _unknown(first)
        return DEFAULT_FOR_IMAGES, first
    get_recipe(first)
    needs_data = not first.startswith("digits") and not without_data
    require(
        bool(rest) or not needs_data,
        f"the recipe '{first}' needs data: stam train {first} path/to/images --out RUN",
    )
    return first, rest[0] if rest else None


def refuse(options: list[str], names: tuple[str, ...], why: str) -> None:
    """Raises where an option is given that would be overruled."""
    for option in options:
        if option.split("=")[0] in names:
            raise ConfigError(f"{option} cannot be set here: {why}")


def require_as_begun(
    out: Path, command: str, recipe: str | None, path: str | None, options: list[str]
) -> None:
    """Raises where a run to be resumed was not begun with what is given.

    Args:
        out: The run folder.
        command: The command that is to go on, train or teacher.
        recipe: The recipe named, if one was.
        path: The data named, if it was.
        options: All options given.
    """
    extra = [
        option for option in options if option.startswith("--") and option.split("=")[0] not in _WITH_RESUME
    ]
    if extra:
        raise RunError(f"--resume goes on with the settings of the run: leave out {' '.join(extra)}")
    folder = reopen(out, command)
    begun, data = recipe_of(folder), folder.config().data.path
    if recipe not in (None, begun):
        raise RunError(f"the run in '{out}' was begun with the recipe '{begun}': leave out {recipe}")
    if path is not None and Path(path).resolve() != Path(data).resolve():
        raise RunError(f"the run in '{out}' was begun with the data '{data}': leave out {path}")
