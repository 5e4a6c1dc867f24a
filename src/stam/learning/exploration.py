"""Where a core looks while it learns alone: in the order centre-out, or in orders that stray from it.

A core that has seen only one order is worse with any other, and an actor will choose others. So half of a
batch follows centre-out, the best fixed order on photographs. The other half strays from it, from a little to
entirely.
"""

from functools import cache

import torch
from torch import Tensor

from stam.model.orders import centre_out_order
from stam.model.randomness import Randomness, random_source
from stam.scene.grid import Grid
from stam.shapes import Float, Int

_STRAYING = 0.5  # of the scenes of a batch
_MOST_NOISE = 60.0  # in places of the order: more than the grid has locations


def noisy_orders(
    grid: Grid, first_location: Int[Tensor, " batch"], num_glimpses: int, generator: Randomness = None
) -> Int[Tensor, "batch glimpses"]:
    """Returns where to look in each scene, from its first location on.

    Args:
        grid: Where glimpses lie.
        first_location: Where each scene's first glimpse is sensed.
        num_glimpses: Glimpses of each scene.
        generator: Source of randomness.
    """
    device, shape = first_location.device, (len(first_location), grid.num_locations)
    random = random_source(generator)
    choice, amount = random.uniform((len(first_location), 2), device).unbind(1)
    noise = torch.where(choice < _STRAYING, _MOST_NOISE * amount.square(), 0.0)
    keys = _ranks(grid, device) + noise[:, None] * _gumbel(random.uniform(shape, device))
    keys = keys.scatter(1, first_location[:, None], -torch.inf)
    return keys.argsort(dim=1)[:, :num_glimpses].contiguous()


@cache  # on the device: a CUDA graph cannot bring it there
def _ranks(grid: Grid, device: torch.device) -> Float[Tensor, " locations"]:
    """Returns the place of each location in the order centre-out."""
    ranks = torch.empty(grid.num_locations)
    ranks[torch.tensor(centre_out_order(grid))] = torch.arange(float(grid.num_locations))
    return ranks.to(device)


def _gumbel(uniform: Tensor) -> Tensor:
    """Returns noise that makes a sorted order a draw without replacement."""
    return -(-uniform.clamp(1e-6, 1 - 1e-6).log()).log()
