"""Faults in real runs: how they end, what is on the disk, and what RESUME makes of it."""
