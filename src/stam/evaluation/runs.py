"""Evaluates runs and keeps the results in their folders: what they are called, what is there already."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from stam.errors import StamError, require
from stam.evaluation.evaluate import EvaluationPlan, evaluate, looking, reader_for
from stam.evaluation.examples import collect_examples, look_closely, save_examples
from stam.evaluation.opening import EVALUATION_FILE, EXAMPLES_FILE, MISTAKES_FILE, Opened, open_run
from stam.evaluation.results import Evaluation, load_evaluation, save_evaluation
from stam.files import make_folder
from stam.learning import distributed
from stam.weights import MODEL_FILE, find_agent


def evaluate_run(
    run: str | Path,
    plan: EvaluationPlan,
    device: torch.device,
    *,
    data: str | None = None,
    teacher: str | None = None,
    limit: int | None = None,
    num_examples: int = 6,
    store: bool = False,
    out: Path | None = None,
) -> tuple[Evaluation, Path]:
    """Evaluates a run and writes the result; returns it with its path.

    Args:
        run: A run folder, a weights folder, the name of an agent that ships, or `hub:NAME`.
        plan: What to measure and how; without a `resize_size`, scenes are resized as the run says.
        device: Where to.
        data: What to evaluate on; by default the run's own validation part.
        teacher: A teacher's folder or DeiT file; by default the run's own, if it has one.
        limit: Use so many scenes only, drawn at random, always the same.
        num_examples: Scenes to keep for pictures, glimpse by glimpse.
        store: Keep the fitted threshold and temperature, and their policy, with the weights; the first
            location too, where the plan measures it.
        out: The file to write; by default one in the run folder, see `result_name`.
    """
    opened = open_run(run, data, teacher, limit, plan.resize_size)
    if opened.note and distributed.rank() == 0:
        print(opened.note, file=sys.stderr)
    plan = dataclasses.replace(plan, resize_size=opened.resize_size)
    agent, own = opened.agent.to(device), opened.agent.facts.policy
    policy = plan.policy or own
    if store:
        opened.require_keeps(policy)
    path = _result_path(opened, plan, out)
    evaluation = evaluate(
        agent,
        opened.scenes,
        plan,
        opened.teacher.to(device) if opened.teacher is not None else None,
        source=opened.source,
        name=opened.name,
        settings=opened.settings,
    )
    if distributed.rank() == 0:
        answers, how = evaluation.answers, (evaluation.num_glimpses, evaluation.policy)
        wrong = np.array([mistake.scene for mistake in answers.mistakes] if answers is not None else [], int)
        with looking(agent, plan) as looker:  # as it was measured
            reader = reader_for(looker, opened.scenes, plan, progress=False)
            shown = collect_examples(looker, reader, num_examples, *how)
            mistakes = look_closely(looker, reader, wrong, *how)
        if store:
            fitted = evaluation.early_exit.fit.threshold, evaluation.calibration.temperature
            begins = evaluation.first_locations
            opened.store(*fitted, policy, None if begins is None else begins.chosen)
            too = "" if begins is None else ", and the first location,"
            print(f"stored threshold, temperature and policy{too} in {opened.agent_path}", file=sys.stderr)
        if out is None:
            keep_earlier(path, evaluation)
        save_examples(shown, examples_path(path))
        mistakes_path(path).unlink(missing_ok=True)  # there may be none any more
        save_examples(mistakes, mistakes_path(path))
        save_evaluation(evaluation, path)
    distributed.wait()  # the result is there for all
    return evaluation, path


def evaluated(run: str | Path, device: torch.device, given: Path | None = None) -> Path:
    """Returns the path of a run's evaluation; a run that has none is evaluated now.

    Args:
        run: A run, as `evaluate_run` takes it, or a result of one.
        device: Where to evaluate.
        given: Another result to use instead of the run's own.
    """
    if given is not None:
        if not given.is_file():
            raise StamError(f"no evaluation at '{given}': stam evaluate makes one")
        return given
    if Path(run).is_file():
        return Path(run)
    agent = find_agent(run)
    path = agent.home / EVALUATION_FILE
    (is_missing,) = distributed.any_process(not path.is_file())  # the same for all, before anybody writes it
    if not is_missing and not agent.is_borrowed:
        if (agent.folder / MODEL_FILE).stat().st_mtime > path.stat().st_mtime:
            print(
                f"{run} was trained on since it was evaluated: stam evaluate {run} measures it anew",
                file=sys.stderr,
            )
    elif is_missing:
        if distributed.rank() == 0:
            print(f"{run} was not evaluated yet: doing that first", file=sys.stderr)
        evaluate_run(str(run), EvaluationPlan(precision="auto"), device)
    return path


def _result_path(opened: Opened, plan: EvaluationPlan, out: Path | None) -> Path:
    """Returns where the result goes, in a folder that is there."""
    path = out or opened.path / result_name(opened, plan)
    if out is None and distributed.rank() == 0:
        make_folder(opened.path)
    require(not path.is_dir(), f"--out '{path}' is a folder: name a file, such as {path / EVALUATION_FILE}")
    if out is not None and not path.parent.is_dir():
        raise StamError(f"--out '{path}': the folder '{path.parent}' does not exist; make it first")
    return path


def keep_earlier(path: Path, evaluation: Evaluation) -> None:
    """Moves a result aside that this one would replace, unless it answers the same question."""

    def question(found: Evaluation) -> tuple[object, ...]:
        return found.data, found.num_glimpses, found.seeds, found.precision

    if not path.is_file():
        return
    try:
        if question(load_evaluation(path)) == question(evaluation):
            return
    except StamError:
        pass  # nobody knows what it is
    number, aside = 1, path.with_name(f"{path.stem}-earlier.json")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}-earlier-{number}.json")
    for beside in (examples_path, mistakes_path):
        if beside(path).is_file():
            beside(path).replace(beside(aside))
    path.replace(aside)
    print(f"the result that was there is now {aside}", file=sys.stderr)


def result_name(opened: Opened, plan: EvaluationPlan) -> str:
    """Returns the result's file name: what is otherwise than the run's own is part of it."""
    parts = [Path(EVALUATION_FILE).stem]
    if plan.policy not in (None, opened.agent.facts.policy):
        parts.append(str(plan.policy).replace(":", "-"))
    if not opened.own_data:
        parts.append(Path(opened.source).stem)
    return "-".join(parts) + ".json"


def figures_folder(path: Path, home: Path) -> Path:
    """Returns where the figures of a result go; each result of a run has a folder of its own."""
    return home / f"figures{result_suffix(path)}"


def result_suffix(path: Path) -> str:
    """Returns what the names of everything made from a result end in: nothing for a run's own, or -NAME."""
    rest = path.stem.removeprefix(Path(EVALUATION_FILE).stem)
    return f"-{rest}" if rest and not rest.startswith("-") else rest


def examples_path(path: Path) -> Path:
    """Returns where the examples that belong to a result lie."""
    return _beside(path, Path(EXAMPLES_FILE))


def mistakes_path(path: Path) -> Path:
    """Returns where the scenes of its worst mistakes lie."""
    return _beside(path, Path(MISTAKES_FILE))


def _beside(path: Path, kind: Path) -> Path:
    stem = path.stem.replace(Path(EVALUATION_FILE).stem, kind.stem, 1)
    return path.with_name((stem if stem != path.stem else f"{path.stem}-{kind.stem}") + kind.suffix)
