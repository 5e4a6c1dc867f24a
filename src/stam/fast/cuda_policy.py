"""Learned policies with fewer launches around their actor, where nothing is learned from a decision."""

import torch

from stam.fast import kernels
from stam.model.policy import Decision, FirstThen, GreedyPolicy, Policy, SampledPolicy, Seen, State
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


class FusedGreedyPolicy(GreedyPolicy):
    """The learned policy at inference, whose candidates come from one kernel."""

    def decide(
        self, state: State, seen: Seen, generator: Randomness = None, num_seen: int | None = None
    ) -> Decision:
        """Picks the best-rated unseen location."""
        if num_seen is None or not kernels.usable(state):
            return super().decide(state, seen, generator, num_seen)
        from stam.fast.kernels import decisions

        candidates = decisions.unseen(seen, seen.shape[1] - num_seen)
        best = self.actor(state, candidates).argmax(dim=1, keepdim=True)
        return Decision(candidates.gather(1, best).squeeze(1))


def fuse_policy(policy: Policy) -> Policy:
    """Returns a policy that decides the same with fewer launches, where there is one."""
    if type(policy) is GreedyPolicy:
        return FusedGreedyPolicy(policy.actor, policy.sharpness)
    if type(policy) is FirstThen:
        return FirstThen(fuse_policy(policy.first), fuse_policy(policy.then), policy.num_first)
    return policy
