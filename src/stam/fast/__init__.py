"""The same numbers as `stam.model`, computed sooner."""
