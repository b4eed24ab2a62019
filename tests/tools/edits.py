"""Edits of train_gpt.py, as a competitor makes them: right ones, and mistakes that it says nothing
about, or only on two ranks.

They stand in edits_*.txt. Each begins with `== name | what verify.py names | options`. A line of
the script that an edit stands at has a space in front, or - if it leaves; lines that come before it
have a <, lines after it (or in its place) a >. `~a => b` changes a part of a line. `%name` is what
several edits have, `| a => b`: with other words.
"""

from pathlib import Path

from running import ROOT

Edits = list[tuple[str, str]]  # (text that the script has once, what replaces it)
OPTIONS = {  # of verify.verdicts
    "score differs": {"score_differs": True},
    "six layers": {"settings": {"NUM_LAYERS": "6"}},
    "with base": {"base": ROOT / "train_gpt.py", "settings": {"GPU_PREFETCH": "1"}},
}


def edits_of(rows: list[str]) -> Edits:
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
    """{name: (the properties that are named, the edits, options of verify.verdicts)}"""
    found = {}
    text = Path(__file__).with_name(f"edits_{kind}.txt").read_text("utf-8")
    for section in f"\n{text}".split("\n== ")[1:]:
        title, *rows = section.splitlines()
        name, *words = title.split(" | ")
        options = OPTIONS[words.pop()] if words and words[-1] in OPTIONS else {}
        rows = [row for row in rows if row and row[0] != "#"]
        found[name] = {*" ".join(words).split()}, edits_of(rows), options
    return found


PARTS = read("parts")
RIGHT = read("right")
MISTAKES = read("mistakes")
