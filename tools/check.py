"""Say whether a record would be accepted, with one line per finding. No file of the record is run.

    python3 tools/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 tools/check.py FOLDER --track track_10min_16mb     judge it by that track's rules
    python3 tools/check.py FOLDER --previous FOLDER|SCORE      better, by 0.005 nats at p < 0.01?

refused: it breaks a rule of the challenge. warned: a maintainer will ask about it. note: for your
information. not checked: what no log can show.
SCORE is in bits per byte: 1.1228.

Exit code: 0 no folder was refused, 1 a folder was refused, 2 wrong usage.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import cli
from cli import plain, some
from facts import LEVELS, TRACKS, Facts, facts_of
from lines import Result
from rules import RULES, RUN_RULES, Said
from significance import ALPHA, CAP_BYTES, compare_samples

UNSEEN = "what the script computes: read it, and run it"
SCORE = re.compile(r"\d{0,4}\.?\d{1,12}")

# What is to be beaten: its name, and the results of its seeds, or one number twice.
Previous = tuple[str, list[Result]]


@dataclass(frozen=True)
class Finding:
    """What a rule has to say, in one sentence, about `logs` or the folder."""

    level: str  # one of LEVELS
    message: str
    logs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A folder's facts, and what the rules say about them, the worst first."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        levels = {one.level for one in self.findings}
        return next((level for level in ("refused", "warned") if level in levels), "accepted")


def check_folder(
    folder: Path, track: str | None = None, previous: Previous | None = None
) -> Report:
    """Judges a folder. Raises nothing for what it holds."""
    try:
        facts = facts_of(folder, track)
        said = [(one, "") for rule in RULES for one in rule(facts)]
        for rule in RUN_RULES:
            said += [(one, log) for log, run in facts.judged.items() for one in rule(facts, run)]
    except (OSError, ValueError, RecursionError) as error:
        return Report(Facts(folder), (Finding("refused", f"it cannot be read: {error}"),))
    if previous is not None:
        said += [(one, "") for one in significance(facts, *previous)]
    # The same finding about several logs is one finding; the worst are first.
    logs: dict[tuple[str, str], list[str]] = {}
    for one, log in said:
        logs.setdefault(one, []).extend([log] if log else [])
    found = [Finding(*one, tuple(names)) for one, names in logs.items()]
    return Report(facts, tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level))))


def lines(report: Report, shown: object) -> list[str]:
    """The report as text."""
    facts = report.facts
    result = [f"{plain(str(shown))}: {report.verdict} as {facts.track}"]
    scores = []
    for key in ("val_bpb", "val_loss"):
        if values := facts.results(key):
            spread = f" +- {stdev(values):.5f}" if len(values) > 1 else ""
            scores.append(f"{key} {fmean(values):.5f}{spread}")
    if scores:
        seeds = sorted(str(run.known_seed) for run in facts.judged.values())
        result.append(f"  {', '.join(scores)}, seeds {', '.join(seeds)}")
    if facts.model_bytes and facts.source:
        code = len(facts.source)
        total = facts.model_bytes + code
        left = f"{abs(CAP_BYTES - total):,} {'left' if total <= CAP_BYTES else 'too many'}"
        parts = f"code {code:,} + model {facts.model_bytes:,} = {total:,} bytes"
        result.append(f"  {parts}, {left}")
    for finding in report.findings:
        logs = finding.logs if len(finding.logs) < len(facts.judged) or not facts.judged else ()
        subject = f"{some(logs)}: " if logs else ""
        result.append(plain(f"  {finding.level:11}  {subject}{finding.message}"))
    return [*result, f"  not checked  {UNSEEN}"]


# --- better than the record before? ---


def read_previous(given: str) -> Previous:
    """--previous: a score, or a folder whose logs count. Raises ValueError, in words."""
    if os.path.isdir(given):
        facts = facts_of(Path(given))
        results = [run.result for run in facts.judged.values()]
        if not results:
            raise ValueError(f"--previous {given}: no finished log in it: give its score: 1.1228")
        return facts.root.name, results * 2 if len(results) == 1 else results
    if not SCORE.fullmatch(given) or not float(given) > 0:
        words = "neither a folder nor a score in bits per byte, such as 1.1228"
        raise ValueError(f"--previous {given}: {words}")
    return given, [Result("other", "previous", None, float(given))] * 2


def significance(facts: Facts, name: str, results: list[Result]) -> Said:
    """Welch's test by significance.py: in bits per byte where tokenizers differ."""
    if len(facts.judged) < 2:
        words = f"runs: {len(facts.judged)}: a test against {name} needs three seeds"
        yield facts.serious, words
        return
    comparison = compare_samples([run.result for run in facts.judged.values()], results)
    for note in comparison.notes:
        yield "note", f"{name}: {note}"
    test = comparison.test
    side = "better" if test.difference >= 0 else "worse"
    words = f"{abs(test.difference):.5f} {comparison.unit} {side} than {name}"
    words += f"; better by {test.margin:.5f}: p = {test.p:.2g}"
    words += "" if comparison.shown else f", not below {ALPHA:g}: not shown"
    yield ("note" if comparison.shown else facts.serious), words


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="a record's folder")
    add("--track", choices=TRACKS, help="judge by the rules of this track")
    add("--previous", metavar="FOLDER|SCORE", help="the record to beat")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder: name the folder of a record")
        if not (folder / "submission.json").exists() and list(folder.glob("*/submission.json")):
            parser.error(f"{folder}: holds records: name one of its folders")
        if options.previous and Path(options.previous).resolve() == folder.resolve():
            parser.error(f"--previous {folder}: it is the folder itself: name the one before")
    try:
        options.previous = read_previous(options.previous) if options.previous is not None else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    refused = False
    for number, folder in enumerate(options.folders):
        report = check_folder(folder, options.track, options.previous)
        refused |= report.verdict == "refused"
        print("\n" * (number > 0) + "\n".join(lines(report, folder)))
    return int(refused)


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
