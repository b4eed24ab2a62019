"""Is a record better than the one before, by more than chance?"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from facts import Facts, facts_of, list_folder
from findings import Finding
from reader import ALPHA, NATS, Question, Result, Sample, compare_samples
from rules import not_a_record
from submission import is_number

SCORE = re.compile(r"(\d{0,4}\.?\d{1,12})\s*(nats|bpb)?")


@dataclass(frozen=True)
class Previous:
    """Results to beat: of each seed, or one number twice."""

    name: str
    results: tuple[Result, ...]


def read_previous(given: str) -> Previous:
    """--previous: a score, or a folder of which the logs count. Raises ValueError, in words."""
    if os.path.isdir(given):
        return previous_record(given)
    score = SCORE.fullmatch(given)
    if not score:
        raise ValueError(
            f"--previous {given}: neither a folder nor a score, such as 1.1228 or 1.8957nats"
        )
    value = float(score[1])
    if not value > 0:
        raise ValueError(f"--previous {given}: a score above 0, such as 1.1228")
    if score[2] == "nats":
        return Previous(given, (Result("other", "previous", val_loss=value),) * 2)
    return Previous(f"{value} bpb", (Result("other", "previous", val_bpb=value),) * 2)


def previous_record(folder: str) -> Previous:
    names = list(list_folder(Path(folder)).sizes)
    if finding := not_a_record(Path(folder), folder, names):
        raise ValueError(f"--previous {folder}: {finding.message}")
    facts = facts_of(folder, Path(os.path.abspath(folder)), folder, None)
    results = [logged.result for logged in facts.submitted]
    stated = facts.submission.values.get("val_bpb")
    if not results and is_number(stated):
        results = [Result("other", "submission.json", val_bpb=float(stated))]
    if not results:
        raise ValueError(f"--previous {folder}: no finished log in it: give its score, as 1.1228")
    return Previous(facts.place.name, tuple(results * 2 if len(results) == 1 else results))


def significance(facts: Facts, previous: Previous) -> Iterator[Finding]:
    """Welch's test by logs/significance.py: in bits per byte where tokenizers differ."""
    if not facts.submitted:
        return
    if len(facts.submitted) < 2:
        yield Finding("R902", "one run shows no significance: run three seeds")
        return
    ours = Sample([logged.result for logged in facts.submitted])
    comparison = compare_samples(ours, Sample(list(previous.results)), Question())
    for note in comparison.notes:
        yield Finding("R904", f"{previous.name}: {note}")
    if comparison.unit == NATS and previous.results[0].val_bpb is None:
        message = f"{previous.name}: nats can be compared only where the tokenizer is the same"
        yield Finding("R904", message)
    if comparison.test is None:
        message = f"{previous.name} is in nats, these logs are not: give a score in bits per byte"
        yield Finding("R903", message)
        return
    test, better = comparison.test, comparison.shown
    message = (
        f"{abs(test.difference):.5f} {comparison.unit} "
        f"{'better' if test.difference >= 0 else 'worse'} than {previous.name}; "
        f"better by {test.margin:.5f}: p = {test.p:.2g}"
    )
    if not better:
        message += f", not below {ALPHA:g}: not shown"
    yield Finding("R901" if better else "R902", message)
