"""Check whether an edited train_gpt.py still does what a run promises.

    python3 tools/verify.py mine.py EMA_DECAY=0.9 ...    with the settings that turn your edit on

verify.py runs the script several times on the CPU, with a tiny model and with data that it makes,
and compares the runs. It prints a line for each property: `ok`, `note` (for you to judge) or
`FAULT`. tools/README.md explains the properties.

Exit code: 0 no faults, 1 there is a fault or the script does not run, 2 wrong usage.
"""

# This module reads the command line and prints. It imports judge.py, which imports torch, only when
# the arguments are right, so that --help and a wrong file name are answered at once.

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli

HINTS_FILE = Path(__file__).with_name("hints.txt")


def read_hints():
    """Return [(property, words, what a fault means and where to look)] of hints.txt.

    A hint with words in brackets, as in `clock (fall below 0): ...`, is about the faults whose text
    contains these words. A property's hint without words is about all its other faults."""
    hints = []
    for line in HINTS_FILE.read_text("utf-8").splitlines():
        head, text = line.split(": ", 1)
        name, _, words = head.partition(" (")
        hints.append((name, words.removesuffix(")"), text))
    return hints


def find_hint(name, text):
    """Return the hint for a fault of this property with this text. In hints.txt, a property's hints
    with words are above the one without words, which fits every text."""
    return next(hint for each, words, hint in read_hints() if each == name and words in text)


def verdicts(script, settings, base=None, score_differs=False):
    """Yield (property, "ok", "note" or "FAULT", text) for a script with these settings. Raises
    ToolError if the script does not run."""
    import judge  # slow to import

    yield from judge.verdicts(script, settings, base, score_differs)


def check_source(parser, name, wanted):
    """End the program with one line if the file `name` is not a readable train_gpt.py. wanted: what
    the user should give."""
    path = Path(name)
    if not path.is_file():
        parser.error(f"{name}: there is no such file; give {wanted}")
    source = path.read_bytes()
    if b"class Trainer" not in source:
        raise cli.ToolError(
            f"{name}: it has no class Trainer; give an edited train_gpt.py, not a packed one"
        )
    try:
        compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # a ValueError for a zero byte in older versions
        line = getattr(error, "lineno", None)
        where = f"{name}, line {line}" if line else name
        shown = (getattr(error, "text", None) or "").strip()
        raise cli.ToolError(
            f"{where}: Python cannot read this line: {getattr(error, 'msg', error)}"
            + (f": `{shown}`" if shown else "")
        ) from error


def main(arguments):
    parser = cli.Parser(
        description=__doc__,
        usage="verify.py script [NAME=value ...] [--score-differs] [--base FILE]",
    )
    add = parser.add_argument
    add("script", nargs="?", help="an edited copy of train_gpt.py")
    text = "settings that turn your edit on (any setting of the script; default: none)"
    add("settings", nargs="*", metavar="NAME=value", help=text)
    text = (
        "the score is, on purpose, not computed from the logits of plain sequences alone (windows, "
    )
    text += "test-time training); other properties of the score are checked instead"
    add("--score-differs", action="store_true", help=text)
    text = "say what changes compared with this script (default: train_gpt.py)"
    add("--base", metavar="FILE", default=cli.ROOT / "train_gpt.py", help=text)
    options = parser.parse_intermixed_args(arguments)
    if options.script is None:
        parser.error("give the script to check, such as mine.py; settings NAME=value may follow")
    settings = {}
    for pair in options.settings:
        name, equals, text = pair.partition("=")
        if not equals or name in settings:
            parser.error(f"{pair}: settings must be NAME=value, each once, after the script")
        settings[name] = text

    def check_and_print():
        check_source(parser, options.script, "an edited copy of train_gpt.py")
        check_source(parser, options.base, "the script with which to compare after --base")
        return print_verdicts(options.script, settings, options.base, options.score_differs)

    return cli.run(check_and_print)


def print_verdicts(script, settings, base, score_differs):
    """Print the verdicts and return the exit code."""
    faults = 0
    for name, kind, text in verdicts(script, settings, base, score_differs):
        print(f"{kind:5} {name:10} {text}", flush=True)
        if kind == "FAULT":
            faults += 1
            print(f"{'':16} {find_hint(name, text)}", flush=True)
    print(f"faults: {faults}")
    return int(faults > 0)


if __name__ == "__main__":
    # So that `finally` blocks end the runs and remove their folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
