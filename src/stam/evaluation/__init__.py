"""Every number of the paper's analysis, for any agent and data: plain results, no pictures."""

from stam.evaluation.comparison import Comparison, compare
from stam.evaluation.cost import (
    actor_multiply_adds,
    core_multiply_adds,
    measure_cost,
    multiply_adds,
    step_multiply_adds,
)
from stam.evaluation.early_exit import Exits, fit_threshold, look_until_sure, sweep, time_early_exit
from stam.evaluation.evaluate import EvaluationPlan, evaluate, reader_for
from stam.evaluation.examples import Example, collect_examples, load_examples, save_examples
from stam.evaluation.opening import Opened, open_run
from stam.evaluation.results import Evaluation, load_evaluation, save_evaluation
from stam.evaluation.runs import (
    evaluate_run,
    evaluated,
    examples_path,
    figures_folder,
    mistakes_path,
    result_suffix,
)

__all__ = [
    "Comparison",
    "Evaluation",
    "EvaluationPlan",
    "Example",
    "Exits",
    "Opened",
    "actor_multiply_adds",
    "collect_examples",
    "compare",
    "core_multiply_adds",
    "evaluate",
    "evaluate_run",
    "evaluated",
    "examples_path",
    "figures_folder",
    "fit_threshold",
    "load_evaluation",
    "load_examples",
    "look_until_sure",
    "measure_cost",
    "mistakes_path",
    "multiply_adds",
    "open_run",
    "reader_for",
    "result_suffix",
    "save_evaluation",
    "save_examples",
    "step_multiply_adds",
    "sweep",
    "time_early_exit",
]
