"""Where and through what one looks: the grid of glimpses, sensors, pixels, windows of larger scenes."""
