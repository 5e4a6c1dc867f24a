"""The words that `stam train` and `stam teacher` take before their options, and what may go with --resume."""

import dataclasses
import difflib
import sys
from pathlib import Path

from stam.cli.logging import OPTIONS as LOGGING
from stam.cli.parsing import names_of, value_of, wants_help
from stam.cli.settings_file import read_settings
from stam.data.sources import DIGITS, is_data, nearest_data
from stam.errors import ConfigError, DataError, StamError, require, require_choice
from stam.files import from_user
from stam.learning import distributed
from stam.learning.experiment import extend, recipe_of, reopen
from stam.learning.recipes import RECIPES, get_recipe
from stam.learning.runs import RunError
from stam.settings import RunConfig
from stam.zoo import SYSTEMS

DEFAULT_RECIPE = "digits"
DEFAULT_FOR_IMAGES = "tiny"
_NAMES = (*RECIPES, *SYSTEMS)
_ALIKE = 0.75  # how much like a recipe's name a word must be to be meant as one
_WITH_RESUME = ("--resume", "--out", "--epochs", *LOGGING)


def recipes_and_data(in_full: bool, recipe: str, is_fitted: bool = False) -> str:
    """Returns what help says of RECIPE and DATA.

    Args:
        in_full: Whether variants of recipes are named one by one, or by their ending.
        recipe: The recipe whose settings are shown.
        is_fitted: Whether some of them are chosen by the images.
    """
    return f"{_recipes_and_data(in_full)}\n\n{_defaults(recipe, is_fitted)}"


def _defaults(recipe: str, is_fitted: bool) -> str:
    chosen = (
        " Epochs, batch size, learning rates, core and augmentation that you do not give are chosen by your "
        "images and this machine; --no-fit takes those of the recipe."
    )
    another = f"Defaults are those of the recipe {recipe}; RECIPE --help shows those of another."
    return another + (chosen if is_fitted else "")


def _recipes_and_data(in_full: bool) -> str:
    data = (
        "DATA is a folder of class folders, a CSV file with the columns path, label and (optional) split, "
        "tar shards, or the word digits."
    )
    if in_full:
        systems = f"stam train also takes another hard-attention system: {', '.join(SYSTEMS)} (docs/zoo.md)."
        return f"{data}\n\nRECIPE is one of: {', '.join(RECIPES)}.\n\n{systems}"
    return (
        f"{data}\n\nRECIPE is a set of defaults: {DEFAULT_FOR_IMAGES} for your own images where none is "
        "named, small or base for a larger core, digits, or an experiment of the paper. stam list names all."
    )


def main_recipes() -> tuple[list[str], list[str], list[str]]:
    """Returns the recipes without their variants, those that have variants, and how those end."""
    own = [name.removeprefix(DEFAULT_RECIPE) for name in RECIPES if name.startswith(f"{DEFAULT_RECIPE}-")]
    endings = [ending for ending in own if f"imagenette{ending}" in RECIPES]
    varied = [name for name in RECIPES if all(name + ending in RECIPES for ending in endings)]
    variants = {name + ending for name in varied for ending in endings}
    return [name for name in RECIPES if name not in variants], varied, endings


def recipe_first(positionals: list[str]) -> list[str]:
    """Returns RECIPE and DATA in that order, also where they were written the other way round."""
    if len(positionals) != 2:
        return positionals
    first, second = positionals
    first_is_data = first == DIGITS or (first not in _NAMES and is_data(first))
    second_is_recipe = second in _NAMES and second != DIGITS
    swapped = first_is_data and not is_data(second) and (second_is_recipe or first != DIGITS)
    return [second, first] if swapped else positionals


def _closest(word: str) -> str | None:
    """Returns the recipe or system that a word is nearly the name of."""
    return next(iter(difflib.get_close_matches(word, _NAMES, n=1, cutoff=_ALIKE)), None)


def _unknown(word: str) -> StamError:
    """Says what a word may have meant that is neither a recipe nor data: a misspelt folder is more likely."""
    close = _closest(word)
    if close is not None:
        return ConfigError(f"unknown recipe '{word}': did you mean '{close}'?")
    return DataError(f"no such folder: '{word}'; {nearest_data(from_user(word))}")


def choose_recipe(
    positionals: list[str], without_data: bool = False, for_help: bool = False
) -> tuple[str, str | None]:
    """Returns the recipe and the data that the words before the options name.

    Args:
        positionals: Those words.
        without_data: Whether data may be missing, as when only help is asked for.
        for_help: Whether only help is asked for: most who ask have images of their own.
    """
    if not positionals:
        return DEFAULT_FOR_IMAGES if for_help else DEFAULT_RECIPE, None
    first, *rest = positionals
    if first not in RECIPES and not rest:
        if not is_data(first):
            raise _unknown(first)
        return DEFAULT_FOR_IMAGES, first
    if first not in RECIPES and _closest(first) in SYSTEMS:
        raise _unknown(first)
    get_recipe(first)
    needs_data = not first.startswith("digits") and not without_data
    require(
        bool(rest) or not needs_data,
        f"the recipe '{first}' needs data: stam train {first} path/to/images --out RUN",
    )
    return first, rest[0] if rest else None


def choose_base(
    positionals: list[str], options: list[str], command: str
) -> tuple[str, str | None, RunConfig]:
    """Returns the recipe, the data that is named and the settings over which the options go.

    Args:
        positionals: The words before the options.
        options: All options; `--config` among them names a file of settings.
        command: The command, train or teacher.
    """
    given = value_of(options, "--config")
    without_data = wants_help(options) or "--resume" in options
    if given is None or wants_help(options):
        recipe, path = choose_recipe(positionals, without_data, wants_help(options))
        base = get_recipe(recipe)
    else:
        file = read_settings(given, command)
        recipe, path = choose_recipe(positionals, without_data=True)
        is_named = bool(positionals) and positionals[0] in RECIPES
        if file.recipe is not None and not file.is_record:
            require_choice(f"'{given}': recipe", file.recipe, tuple(RECIPES))
        require(
            not (is_named and file.is_record and file.recipe in RECIPES and file.recipe != recipe),
            f"'{given}' is of a run of '{file.recipe}', whose settings are taken: leave out {recipe}",
        )
        if file.recipe in RECIPES and not is_named:
            recipe = str(file.recipe)
        elif not is_named and (path or file.data) not in (None, DIGITS):
            recipe = DEFAULT_FOR_IMAGES
        base, path = file.over(recipe), path or file.data
        require(
            path is not None or without_data or recipe.startswith("digits"),
            f"'{given}' names no data: stam {command} {recipe} path/to/images --config {given} --out RUN",
        )
    if path is not None:
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, path=path))
    return recipe, path, base


def refuse(options: list[str], names: tuple[str, ...], why: str) -> None:
    """Raises where an option is given that would be overruled."""
    for name in names_of(options):
        if name in names:
            raise ConfigError(f"{name} cannot be set here: {why}")


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


def extend_if_asked(out: Path, command: str, options: list[str]) -> None:
    """Gives a run that is to be resumed more epochs, where --epochs asks for them, and says what that means.

    Args:
        out: The run folder.
        command: The command that is to go on, train or teacher.
        options: All options given.
    """
    epochs = epochs_asked(options)
    if epochs is None:
        return
    if distributed.rank() == 0:
        print(extend(out, command, epochs), file=sys.stderr)
    distributed.wait()  # the others read what was written


def epochs_asked(options: list[str]) -> int | None:
    """Returns the --epochs that are given to a run that is resumed, if they are."""
    epochs = value_of(options, "--epochs")
    if epochs is None:
        return None
    require(epochs.isdecimal(), f"--epochs must be a whole number, got '{epochs}'")
    return int(epochs)
