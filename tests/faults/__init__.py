"""Faults injected into real runs: python -m pytest tests/faults prints the matrix."""
