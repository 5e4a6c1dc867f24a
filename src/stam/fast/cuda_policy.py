"""The policy that is trained, drawn from by two kernels where nothing is learned from the draw."""

import torch

from stam.fast import kernels
from stam.model.policy import Decision, SampledPolicy, Seen, State
from stam.model.randomness import Randomness, random_source


class FusedSampledPolicy(SampledPolicy):
    """Draws the same locations from the same random numbers, but for ties within rounding."""

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Draws a location and returns it with its log-probability."""
        if num_seen is None or torch.is_grad_enabled() or not kernels.usable(state):
            return super().decide(state, seen, generator, num_seen)
        from stam.fast.kernels import decisions

        candidates = decisions.unseen(seen, seen.shape[1] - num_seen)
        logits = self.actor(state, candidates).float()
        noise = random_source(generator).uniform(tuple(seen.shape), seen.device)
        tau = torch.as_tensor(self.tau, dtype=torch.float32, device=seen.device)
        return Decision(*decisions.draw(logits, candidates, noise, tau))
