"""Edits of train_gpt.py as a participant makes them: correct ones, and mistakes that train_gpt.py
does not report, or only on two ranks.

The edits are in edits_*.txt. An edit begins with `== name | faults that verify.py reports |
options`. Each further line has a sign in front: a space for a line of the script at which the
edit is made, `-` for a line that is removed, `<` for a line that is added before, `>` for a line
that is added after or instead of it. `~a => b` replaces a part of a line. `%name` is an edit of
edits_parts.txt, which several edits share; `| a => b` after it replaces words in it."""

from pathlib import Path

from running import ROOT

Edits = list[tuple[str, str]]  # (text that the script has once, what replaces it)
OPTIONS = {  # of verify.verdicts
    "score differs": {"score_differs": True},
    "six layers": {"settings": {"NUM_LAYERS": "6"}},
    "with base": {"base": ROOT / "train_gpt.py", "settings": {"GPU_PREFETCH": "1"}},
}


def parse_edits(rows: list[str]) -> Edits:
    found: Edits = []
    above = ""
    for row in rows:
        sign, line = row[0], row[1:] + "\n"
        if sign == "%":
            name, *changes = row[1:].split(" | ")
            for old, new in PARTS[name][1]:
                for change in changes:
                    new = new.replace(*change.split(" => "))
                found.append((old, new))
        elif sign == "~":
            old, new = row[1:].split(" => ")
            found.append((old, new))
        elif sign == "<":
            above += line
        elif sign == ">":
            old, new = found.pop()
            found.append((old, new + line))
        else:
            found.append((line, above + line * (sign == " ")))
            above = ""
    return found


def read(kind: str) -> dict[str, tuple[set[str], Edits, dict]]:
    """Return {name: (properties with a fault, the edits, options of verify.verdicts)}."""
    found = {}
    text = Path(__file__).with_name(f"edits_{kind}.txt").read_text("utf-8")
    for section in f"\n{text}".split("\n== ")[1:]:
        title, *rows = section.splitlines()
        name, *words = title.split(" | ")
        options = OPTIONS[words.pop()] if words and words[-1] in OPTIONS else {}
        rows = [row for row in rows if row and row[0] != "#"]
        found[name] = {*" ".join(words).split()}, parse_edits(rows), options
    return found


PARTS = read("parts")
RIGHT = read("right")
MISTAKES = read("mistakes")
