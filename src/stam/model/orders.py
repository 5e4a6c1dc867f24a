"""Fixed orders over the grid: what a learned policy is compared with."""

from collections.abc import Callable

from stam.scene.grid import Grid


def spiral_order(grid: Grid) -> list[int]:
    """From the centre cell outward, ring by ring, clockwise; cells outside the grid are stepped over."""
    row, column = grid.rows // 2, grid.columns // 2
    visited = [grid.index((row, column))]
    turns = [(0, 1), (1, 0), (0, -1), (-1, 0)]  # right, down, left, up
    side = 0
    while len(visited) < grid.num_locations:
        row_step, column_step = turns[side % 4]
        for _ in range(side // 2 + 1):
            row, column = row + row_step, column + column_step
            if 0 <= row < grid.rows and 0 <= column < grid.columns:
                visited.append(grid.index((row, column)))
        side += 1
    return visited


def plus_order(grid: Grid) -> list[int]:
    """The centre, then the middle row and column outward, then the rest by distance from the centre."""
    centre = (grid.rows // 2, grid.columns // 2)

    def rank(location: int) -> tuple[bool, int, int]:
        row, column = grid.row_column(location)
        on_cross = row == centre[0] or column == centre[1]
        return not on_cross, _distance(grid, location), location

    return sorted(range(grid.num_locations), key=rank)


def centre_out_order(grid: Grid) -> list[int]:
    """All locations by distance from the centre, nearest first."""
    return sorted(range(grid.num_locations), key=lambda location: (_distance(grid, location), location))


def _distance(grid: Grid, location: int) -> int:
    row, column = grid.row_column(location)
    return (row - grid.rows // 2) ** 2 + (column - grid.columns // 2) ** 2


ORDERS: dict[str, Callable[[Grid], list[int]]] = {
    "plus": plus_order,
    "spiral": spiral_order,
    "centre-out": centre_out_order,
}
