"""What an agent believes of a scene: its state, its two classifiers, and their ensemble."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stam.shapes import Bool, Float

SMALLEST_LOG_PROBABILITY = math.log(torch.finfo(torch.float32).tiny)  # a certain teacher stays finite


@dataclass(frozen=True)
class Belief:
    """What an agent makes of the glimpses it has seen.

    Attributes:
        state: The paper's Markov state s = [f_g ; f_d].
        class_logits: Classifier G, trained on the labels.
        distill_logits: Classifier D, trained to agree with the teacher.
    """

    state: Float[Tensor, "batch features"]
    class_logits: Float[Tensor, "batch classes"]
    distill_logits: Float[Tensor, "batch classes"]

    def log_probabilities(self, temperature: float = 1.0) -> Float[Tensor, "batch classes"]:
        """Returns the log of the ensemble: the mean of the two probability vectors (Eq. 1)."""
        return ensemble_log_probabilities(self.class_logits / temperature, self.distill_logits / temperature)

    def probabilities(self, temperature: float = 1.0) -> Float[Tensor, "batch classes"]:
        """Returns the ensemble probabilities."""
        return self.log_probabilities(temperature).exp()

    def divergence_from(self, log_q: Float[Tensor, "batch classes"]) -> Float[Tensor, " batch"]:
        """Returns KL(p || q) of the ensemble."""
        return kl_divergence(self.log_probabilities(), log_q)


def ensemble_log_probabilities(*logits: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch classes"]:
    """Returns the log of the mean of softmaxes (of probabilities, not of logits), in float32."""
    each = torch.stack([part.float().log_softmax(dim=-1) for part in logits])
    return each.logsumexp(dim=0) - math.log(len(logits))


def kl_divergence(
    log_p: Float[Tensor, "batch classes"], log_q: Float[Tensor, "batch classes"]
) -> Float[Tensor, " batch"]:
    """Returns KL(p || q) = sum p (log p - log q).

    With the student as p it is the reverse of the usual distillation loss, KL(teacher || student).
    """
    return (log_p.exp() * (log_p - log_q.clamp_min(SMALLEST_LOG_PROBABILITY))).sum(dim=1)


def is_confident(
    probabilities: Float[Tensor, "*batch classes"], threshold: float | Tensor
) -> Bool[Tensor, "*batch"]:
    """Tells where looking may stop: the largest probability is above the threshold (the paper's gamma)."""
    return probabilities.amax(dim=-1) > threshold
