"""Say whether a record would be accepted, with one line per finding. No file of the record is run.

    python3 records/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 records/check.py FOLDER --track track_10min_16mb     judge it by that track's rules
    python3 records/check.py FOLDER --previous FOLDER|SCORE      better, by 0.005 nats at p < 0.01?
    python3 records/check.py --rules                             list all findings with their codes

refused: it breaks a rule of the challenge. warned: a maintainer will ask about it. note: it is
only information for you.
SCORE is in bits per byte (1.1228) or in nats (1.8957nats).

Exit code: 0 no folder was refused, 1 a folder was refused, 2 wrong usage.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from facts import Facts, Files, facts_of, list_folder, track_named
from findings import (
    CODES,
    LEVELS,
    NOTE,
    RECORD,
    REFUSED,
    TRACKS,
    Finding,
    merged,
    plain,
)
from previous import Previous, read_previous, significance
from reader import CAP_BYTES, Parser, missing
from rules import RULES, not_a_record

INSTALL = "-r tests/requirements.txt"


@dataclass(frozen=True)
class Report:
    """A folder's facts, and what the rules say about them."""

    facts: Facts
    findings: tuple[Finding, ...]

    def level(self, finding: Finding) -> str:
        return CODES[finding.code].level(self.facts.track)

    @property
    def verdict(self) -> str:
        level = max(map(self.level, self.findings), key=LEVELS.index, default=NOTE)
        return "accepted" if level == NOTE else level

    @property
    def codes(self) -> set[str]:
        return {finding.code for finding in self.findings}


def check_folder(
    folder: str | os.PathLike[str],
    track: str | None = None,
    previous: Previous | None = None,
    *,
    place: str | os.PathLike[str] | None = None,
) -> Report:
    """Judges a folder; `place`: as if it lay there. Raises nothing for what the folder holds."""
    shown = os.fspath(place or folder)
    lies = Path(os.path.abspath(shown))
    names = list_folder(Path(folder)).sizes if os.path.isdir(folder) else {}
    if finding := not_a_record(Path(folder), shown, list(names)):
        return Report(Facts(shown, lies, Files(lies), track or RECORD), (finding,))
    facts = facts_of(folder, lies, shown, track)
    findings = [finding for rule in RULES for finding in rule(facts)]
    if previous is not None:
        findings += significance(facts, previous)
    judged = [
        finding
        for finding in merged(findings)
        if CODES[finding.code].level(facts.track) is not None
    ]
    return Report(facts, tuple(judged))


def guarded(folder: str, track: str | None, previous: Previous | None) -> Report:
    """One folder that defeats the check must not take the others' verdicts along."""
    try:
        return check_folder(folder, track, previous)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        message = f"the check failed on it ({type(error).__name__}: {error}): please report this"
        facts = Facts(folder, Path(folder), Files(Path(folder)), track or RECORD)
        return Report(facts, (Finding("R999", message),))


# --- the report as text and as JSON ---


def lines(report: Report) -> list[str]:
    facts = report.facts
    levels = [report.level(finding) for finding in report.findings]
    counts = [f"{levels.count(level)} {level}" for level in LEVELS[:0:-1] if level in levels]
    counted = f" ({', '.join(counts)})" if counts else ""
    result = [f"{plain(facts.shown)}: {report.verdict}{counted} as {facts.track}"]
    if facts.submitted:
        result.append(f"  {score_line(facts)}")
    result += [f"  {line}" for line in size_lines(facts)]
    by_level = sorted(report.findings, key=lambda finding: -LEVELS.index(report.level(finding)))
    return result + [
        f"  {report.level(finding):8}{finding.text} [{finding.code}]" for finding in by_level
    ]


def score_line(facts: Facts) -> str:
    scores = []
    for key in ("val_bpb", "val_loss"):
        if values := facts.results(key):
            spread = f" +- {stdev(values):.5f}" if len(values) > 1 else ""
            scores.append(f"{key} {fmean(values):.5f}{spread}")
    return f"{', '.join(scores)}, seeds {', '.join(map(str, facts.seeds)) or 'unknown'}"


def sizes(facts: Facts) -> dict[str, int]:
    """Bytes of the code, as it is and as it would be packed."""
    if facts.model_bytes is None or facts.code_bytes is None:
        return {}
    forms = {"as it is": facts.code_bytes}
    if facts.packed_bytes < facts.code_bytes:
        forms["packed"] = facts.packed_bytes
    return forms


def size_lines(facts: Facts) -> list[str]:
    result = []
    for form, code in sizes(facts).items():
        total = code + facts.model_bytes
        left = CAP_BYTES - total
        remainder = f"{left:,} left" if left >= 0 else f"{-left:,} too many"
        parts = f"code {form:8} {code:>9,} + model {facts.model_bytes:>12,} = {total:>12,} bytes"
        result.append(f"{parts}, {remainder}")
    return result


def as_json(report: Report) -> dict[str, Any]:
    """All that the text says, and which runs and result lines were judged."""
    facts = report.facts
    return {
        "folder": facts.shown,
        "track": facts.track,
        "verdict": report.verdict,
        "val_bpb": facts.results("val_bpb"),
        "val_loss": facts.results("val_loss"),
        "runs": [
            {
                "log": logged.log,
                "seed": logged.seed,
                "result": logged.result.tag,
                "val_bpb": logged.result.val_bpb,
                "val_loss": logged.result.val_loss,
                "eval_time_ms": logged.result.eval_ms,
                "train_time_ms": logged.run.train_time_ms,
                "model_bytes": logged.model_bytes,
            }
            for logged in facts.submitted
        ],
        "model_bytes": facts.model_bytes,
        "code_bytes": facts.code_bytes,
        "packed_code_bytes": facts.packed_bytes,
        "findings": [
            {
                "code": finding.code,
                "level": report.level(finding),
                "message": finding.message,
                "logs": list(finding.logs),
            }
            for finding in report.findings
        ],
    }


def rule_lines() -> list[str]:
    """--rules: each code with its level in the two tracks."""
    head = f"{'code':6}{TRACKS[0]:18}{TRACKS[1]:24}what it means"
    rows = [
        f"{name:6}{code.record:18}{code.other or '-':24}{code.meaning}"
        for name, code in CODES.items()
    ]
    return [head, *rows]


# --- command line ---


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="*", metavar="FOLDER", help="a record's folder")
    add("--track", type=track_argument, help="judge by the rules of " + " or ".join(TRACKS))
    add("--previous", metavar="FOLDER|SCORE", help="the record to beat")
    add("--json", action="store_true", help="print a list of reports as JSON")
    add("--rules", action="store_true", help="list the codes of all findings")
    options = parser.parse_args(arguments)
    if not options.folders and not options.rules:
        parser.error("no folder is named: name the folder of a record")
    try:
        options.previous = read_previous(options.previous) if options.previous is not None else None
    except ModuleNotFoundError as error:
        parser.error(missing(error.name, INSTALL))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def track_argument(text: str) -> str:
    track = track_named(Path(text).name)  # also of the track's folder
    if track is None:
        raise argparse.ArgumentTypeError(f"{text}: no such track: write {' or '.join(TRACKS)}")
    return track


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.rules:
        print("\n".join(rule_lines()))
        return 0
    try:
        reports = [guarded(name, options.track, options.previous) for name in options.folders]
    except ModuleNotFoundError as error:
        print(f"error: {missing(error.name, INSTALL)}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([as_json(report) for report in reports], indent=2, default=float))
    else:
        print("\n\n".join("\n".join(lines(report)) for report in reports))
    return int(any(report.verdict == REFUSED for report in reports))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager has seen enough
    sys.exit(main())
