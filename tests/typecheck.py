"""The run-time type checker the tests use: a function of the package checks what it takes and returns.

jaxtyping's own decorator binds the arguments of every call and checks them twice, which was a third of the
time of the tests. This one checks them once, by the same rules.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

# an int is good wherever a float is; an error is a TypeError, as jaxtyping's own
_check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))
_jaxtyped = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Checks the functions of a package, which is not yet imported."""
    # the hook writes `@jaxtyping.jaxtyped(...)` at every function and class
    jaxtyping.jaxtyped = lambda typechecker: typechecker  # type: ignore[assignment]
    jaxtyping.install_import_hook(package, "typecheck.checked")


def checked(given: Any) -> Any:
    """Checks the calls of a function, or the fields of a dataclass when one is made."""
    if not inspect.isclass(given):
        return _checked_function(given)
    if dataclasses.is_dataclass(given) and "__init__" in vars(given):
        given.__init__ = _checked_function(given.__init__)
    return given


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    annotations = inspect.get_annotations(function).values()
    # jaxtyping lets names pass that are imported for type checkers only; and in a package with a module
    # `list` beartype alone would look for lists there
    is_lazy = inspect.isgeneratorfunction(function)  # beartype alone would check when it is first asked
    if is_lazy or "__path__" in function.__globals__ or any(map(_is_quoted, annotations)):
        return _jaxtyped(function, typechecker=_check)
    checking = _check(function)
    names_sizes = any("jaxtyping." in repr(each) for each in annotations)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*arguments, **options)
        if not names_sizes:
            return checking(*arguments, **options)
        with _jaxtyped("context"):  # "batch" is one size in this call, and may be another in the next
            return checking(*arguments, **options)

    return call


def _is_quoted(annotation: Any) -> bool:
    return isinstance(annotation, str | ForwardRef) or any(map(_is_quoted, get_args(annotation)))
