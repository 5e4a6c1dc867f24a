"""Random numbers for the samples of a batch."""

import torch
from torch import Tensor


class RandomSource:
    """Draws numbers for the samples of a batch, from a generator or from torch's own.

    Training with several processes supplies a source whose draws do not depend on how many there are.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def uniform(self, shape: tuple[int, ...], device: torch.device, batch_dim: int = 0) -> Tensor:
        """Returns numbers in [0, 1).

        `batch_dim` says which dimension counts the samples, for a source that several processes share.
        """
        return self._rand(shape, device).to(device)

    def integers(self, high: int, batch_size: int, device: torch.device) -> Tensor:
        """Returns a number from 0 to high - 1 for each sample."""
        return self._randint(high, batch_size, device).to(device)

    def _rand(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self._place(device))

    def _randint(self, high: int, count: int, device: torch.device) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self._place(device))

    def _place(self, device: torch.device) -> torch.device:
        """Returns where numbers are drawn: where the generator lives."""
        return device if self.generator is None else self.generator.device


Randomness = torch.Generator | RandomSource | None


def random_source(given: Randomness) -> RandomSource:
    """Returns the source meant: the one given, or one around a generator."""
    return given if isinstance(given, RandomSource) else RandomSource(given)
