"""Losses, training loops, run folders and recipes."""
