"""Say whether a record would be accepted, with one line per finding. No file of the record is run.

    python3 tools/check.py FOLDER...       records/<track>/<YYYY-MM-DD>_<Description>, or anywhere
    python3 tools/check.py FOLDER --track track_10min_16mb     judge it by that track's rules

refused: it breaks a rule of the challenge. warned: a maintainer will ask about it. not checked:
what no log can show. The runs that are judged are those whose mean is the stated val_bpb: other
arms and earlier stages in the folder do not count.
Whether it is better than another record is asked by compare.py --a FOLDER --b OTHER.

Exit code: 0 no folder was refused, 1 a folder was refused, 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
from record import TRACKS, check_folder, lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="a record's folder")
    add("--track", choices=TRACKS, help="judge by the rules of this track")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder: name the folder of a record")
        if not (folder / "submission.json").exists() and list(folder.glob("*/submission.json")):
            parser.error(f"{folder}: holds records: name one of its folders")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    refused = False
    for number, folder in enumerate(options.folders):
        report = check_folder(folder, options.track)
        refused |= report.verdict == "refused"
        print("\n" * (number > 0) + "\n".join(lines(report, folder)))
    return int(refused)


if __name__ == "__main__":
    cli.end_with_the_reader()
    sys.exit(cli.run(main))
