"""Faults injected into real runs: `python -m pytest tests/faults` ends with a table of them."""
