"""Faults injected into real runs: `python -m pytest tests/faults` ends with a table of them.

What breaks a part alone is tested beside that part: `python -m pytest -m row tests` shows all.
"""
