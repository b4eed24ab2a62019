"""Check whether an edited train_gpt.py still trains, resumes and scores correctly.

    python3 tools/verify.py mine.py EMA_DECAY=0.9 ...

mine.py is the edited script. After it come the settings that turn your edit on.

verify.py runs the script several times on the CPU, with a tiny model and with a small data set that
verify.py makes, and compares the runs. For example, it checks that a run that was resumed from a
checkpoint ends with the same weights as a run that was not interrupted. What it checks is called a
property. verify.py prints a line for each property, but some properties have a line only if there
is a fault. A line begins with one of these words:

    ok       the script has this property
    note     you have to judge whether the text of the line describes a mistake
    FAULT    the script does not have this property; the next line says where to look

tools/README.md explains the properties.

Exit code: 0 no faults, 1 there is a fault or the script does not run, 2 wrong usage.
"""

# This module reads the command line and prints. Importing judge.py imports torch, which takes
# seconds. So judge.py is imported only when the arguments are right; --help and errors of the
# command line are then answered at once.

import signal
import sys
from pathlib import Path

# With `python3 -P`, Python does not search this folder for modules such as cli.
sys.path.insert(0, str(Path(__file__).resolve().parent))
import cli

HINTS_FILE = Path(__file__).with_name("hints.txt")


def read_hints():
    """Return the hints of hints.txt as a list of (property, words, hint).

    A hint is a text that says what a fault of this property means, and where to look for the
    mistake. Each line of hints.txt is `property: hint` or `property (words): hint`, for example
    `clock (fall below 0): ...`. A hint with words is only about faults whose text contains these
    words. A hint without words is about all other faults of its property; `words` is then empty.
    """
    hints = []
    for line in HINTS_FILE.read_text("utf-8").splitlines():
        head, text = line.split(": ", 1)
        name, _, words = head.partition(" (")
        hints.append((name, words.removesuffix(")"), text))
    return hints


def find_hint(name, text):
    """Return the hint for a fault of the property `name`. text: the text of the fault.

    The first line of hints.txt that fits is used. A hint without words fits every text, so in
    hints.txt it must be the last hint of its property. Raises StopIteration if no hint fits.
    """
    return next(hint for each, words, hint in read_hints() if each == name and words in text)


def verdicts(script, settings, base=None, score_differs=False):
    """Run the script with these settings, and yield the verdicts: tuples (property, kind, text).

    The arguments, the kinds and the error are those of `judge.verdicts`.
    """
    import judge  # only here, because it is slow to import

    yield from judge.verdicts(script, settings, base, score_differs)


def check_source(parser, name, wanted):
    """Check that the file `name` exists, defines a class Trainer, and can be compiled by Python.

    If there is no such file, an error message is printed and the program ends with exit code 2.
    wanted: what the message asks the user to give. Raises ToolError if the file has no class
    Trainer, or has an error of syntax.
    """
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
    except (SyntaxError, ValueError) as error:
        # Older versions of Python raise a ValueError if the file contains a zero byte.
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
    """Print each verdict as a line, and its hint below each FAULT. The last line says how many
    faults there are.

    Return the exit code: 1 if there is a fault, 0 if there is none.
    """
    faults = 0
    for name, kind, text in verdicts(script, settings, base, score_differs):
        print(f"{kind:5} {name:10} {text}", flush=True)
        if kind == "FAULT":
            faults += 1
            print(f"{'':16} {find_hint(name, text)}", flush=True)
    print(f"faults: {faults}")
    return int(faults > 0)


if __name__ == "__main__":
    # Without this handler, SIGTERM would end the program without running its `finally` blocks.
    # These blocks end the processes of the tiny runs and remove their temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
