"""Where a core looks while it learns alone: in the order centre-out, or in noisy versions of it.

A core that has seen only one order is worse with any other, and an actor will choose others. So half of a
batch follows centre-out, the best fixed order on photographs. The other half follows random orders that
prefer what comes early there, from strongly to not at all: locations are drawn without replacement from a
softmax of minus their place in the order (Plackett-Luce), by adding Gumbel noise to the places and sorting.
"""

from functools import cache

import torch
from torch import Tensor

from stam.model.orders import centre_out_order
from stam.model.randomness import Randomness, random_source
from stam.scene.grid import Grid
from stam.shapes import Float, Int

_NOISY_FRACTION = 0.5  # of the scenes of a batch
_MOST_NOISE = 1.2  # standard scale of the noise, in places for each location of the grid: the order is lost


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
    is_noisy, amount = random.uniform((len(first_location), 2), device).unbind(1)
    scale = _MOST_NOISE * grid.num_locations * amount.square()
    scale = torch.where(is_noisy < _NOISY_FRACTION, scale, 0.0)
    keys = _places(grid, device) + scale[:, None] * _gumbel(random.uniform(shape, device))
    keys = keys.scatter(1, first_location[:, None], -torch.inf)
    return keys.argsort(dim=1)[:, :num_glimpses].contiguous()


@cache  # on the device: a CUDA graph cannot bring it there
def _places(grid: Grid, device: torch.device) -> Float[Tensor, " locations"]:
    """Returns the place of each location in the order centre-out."""
    places = torch.empty(grid.num_locations)
    places[torch.tensor(centre_out_order(grid))] = torch.arange(float(grid.num_locations))
    return places.to(device)


def _gumbel(uniform: Tensor) -> Tensor:
    """Returns Gumbel noise, from numbers between 0 and 1."""
    return -(-uniform.clamp(1e-6, 1 - 1e-6).log()).log()
