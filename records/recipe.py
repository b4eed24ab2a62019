"""Recipes: changes of train_gpt.py as tested patches, in records/recipes/<name>.diff.

    python3 records/recipe.py list                             all recipes
    python3 records/recipe.py apply ema int6 --to x.py         train_gpt.py with these two
    python3 records/recipe.py apply ema --to x.py --set EMA_DECAY=0.997
    python3 records/recipe.py new wider --from mine.py         a recipe from an edited train_gpt.py
    python3 records/recipe.py check                            do all of them apply today?
    python3 records/recipe.py update --from OLD_TRAIN_GPT.py   follow a change of train_gpt.py
    python3 records/recipe.py table                            the table of recipes/README.md

A recipe is off until you switch it on with its setting: EMA_DECAY=0.997 python3 x.py. `--set`
makes a value the default in the written file. Recipes are merged by git. If two changes cannot be
merged, both are shown and nothing is written.

Exit code: 0 done, 1 refused, with the reason, 2 wrong usage.
"""

import argparse
import ast
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NoReturn

from reader import fault_of_script_name

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "train_gpt.py"
FOLDER = ROOT / "records" / "recipes"
FIELDS = "setting", "source", "effect", "cost"  # of a header, after its sentence
NEEDED = "source", "effect"
TODO = "TODO"
EDITED = (  # the remedy where a recipe does not apply
    "if you edited it, keep that as a copy and take the committed one: `cp train_gpt.py mine.py && "
    "git checkout train_gpt.py`; then edit the file that apply writes"
)
MADE_BY = "# Made by records/recipe.py from train_gpt.py and these recipes: "
MARKERS = "<<<<<<<", "|||||||", "=======", ">>>>>>>"  # of git's conflicts


class RecipeError(Exception):
    """A refusal, in words for the user."""


class EditedError(RecipeError):
    """A recipe's lines are not found: somebody has edited them."""


# Recipes as files


@dataclass(frozen=True)
class Recipe:
    """A header of comment lines, and a unified diff against train_gpt.py."""

    name: str
    header: str
    diff: str

    @property
    def sentence(self) -> str:
        """What it does: the header's lines up to its first field."""
        texts = []
        for line in self.header.splitlines():
            if re.match(rf"# ({'|'.join(FIELDS)}):", line):
                break
            texts.append(line.removeprefix("#").strip())
        return " ".join(texts)

    def field(self, name: str) -> list[str]:
        """The field's lines. A line that is indented goes on with the one before it."""
        whole = re.sub(r"\n#   +", " ", self.header)
        return re.findall(rf"^# {name}: *(.+)$", whole, re.MULTILINE)

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """{NAME: (its default, a value that switches it on)}"""
        pattern = r"([A-Z0-9_]+)=(\S*), on: \1=(\S+)"
        matches = (re.match(pattern, text) for text in self.field("setting"))
        return {match[1]: (match[2], match[3]) for match in matches if match}

    def count(self, sign: str) -> int:
        """Lines added (+) or removed (-)."""
        return sum(line.startswith(sign) for line in self.diff.splitlines()[2:])

    @property
    def lines(self) -> str:
        return f"+{self.count('+')} -{self.count('-')}"

    def faults(self) -> list[str]:
        """What is missing in its header."""
        faults = [f"its header has no `# {name}:`" for name in NEEDED if not self.field(name)]
        if not self.sentence:
            faults.append("its header does not begin with a sentence")
        if TODO in self.header:
            faults.append(f"its header has a {TODO}")
        if len(self.settings) != len(self.field("setting")):
            faults.append("a setting's line is not `# setting: NAME=default, on: NAME=value`")
        added = re.findall(r"^\+    ([a-z0-9_]+): [\w\[\], \"]+ = .+  # ", self.diff, re.MULTILINE)
        if sorted(self.settings) != sorted(name.upper() for name in added):
            faults.append("its header's settings are not those that it adds to Config")
        return faults


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.diff"))


def load(name: str) -> Recipe:
    path = FOLDER / f"{name}.diff"
    if not path.is_file():
        known, meant = names(), re.findall(r"\w+", name.lower())
        meant = " ".join(word for word in meant if word in known)
        near = difflib.get_close_matches(name.lower(), known, 1, 0.75)
        remedy = f"there are {', '.join(known)}"
        if meant:
            remedy = f"write {meant}"
        elif near:
            remedy = f"did you mean {near[0]}? `recipe.py list` shows all"
        raise RecipeError(f"{name}: no such recipe in {FOLDER}: {remedy}")
    text = path.read_text(encoding="utf-8")
    header, separator, diff = text.partition("\n--- ")
    if not separator:
        raise RecipeError(f"{path}: no unified diff: it has no line that begins with ---")
    return Recipe(name, header + "\n", "--- " + diff)


# What git does


def git(folder: Path, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess:
    """Runs git in a folder of no repository, without the user's configuration."""
    program = shutil.which("git")
    if not program:
        raise RecipeError("git is missing, which applies and merges recipes: install git")
    env = {
        "PATH": os.environ.get("PATH", ""),
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    return subprocess.run(
        [program, *arguments], cwd=folder, env=env, input=given, capture_output=True, text=True
    )


def work_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="recipe")


@cache
def patched(base: str, recipe: Recipe) -> str:
    """`base` with one recipe; RecipeError where its lines are not found."""
    with work_folder() as name:
        folder = Path(name).resolve()
        (folder / "train_gpt.py").write_text(base, encoding="utf-8")
        done = git(folder, "apply", "-", given=recipe.diff)
        if done.returncode:
            line = re.search(r"train_gpt\.py:(\d+)", done.stderr)
            place = f"near line {line[1]}" if line else "than it expects"
            raise EditedError(f"{recipe.name} does not apply: train_gpt.py has other lines {place}")
        return (folder / "train_gpt.py").read_text(encoding="utf-8")


def difference(before: str, after: str) -> str:
    """A unified diff, with the names that `git apply` wants."""
    with work_folder() as name:
        folder = Path(name).resolve()
        for side, text in (("a", before), ("b", after)):
            (folder / side).mkdir()
            (folder / side / "train_gpt.py").write_text(text, encoding="utf-8")
        options = "--no-index", "--no-prefix", "--no-color", "--histogram"
        done = git(folder, "diff", *options, "a/train_gpt.py", "b/train_gpt.py")
        if done.returncode > 1:
            raise RecipeError(f"git diff failed: {done.stderr.strip()}")
        return done.stdout[done.stdout.find("--- a/") :] if done.stdout else ""


@dataclass(frozen=True)
class Side:
    """A text that takes part in a merge, and what it is called."""

    name: str
    text: str


def merged(ours: Side, base: str, theirs: Side) -> str:
    """Both changes of `base`. RecipeError shows both sides of what cannot be merged."""
    with work_folder() as name:
        folder = Path(name).resolve()
        for file, text in (("ours", ours.text), ("base", base), ("theirs", theirs.text)):
            (folder / file).write_text(text, encoding="utf-8")
        labels = "-L", ours.name, "-L", "train_gpt.py", "-L", theirs.name
        done = git(folder, "merge-file", "-p", "--diff3", *labels, "ours", "base", "theirs")
    if done.returncode > 127:
        raise RecipeError(f"git merge-file failed: {done.stderr.strip()}")
    return resolved(done.stdout, ours.name, theirs.name)


def resolved(text: str, ours: str, theirs: str) -> str:
    """git's merge, with lines that were added at one place put one after the other."""
    kept: list[str] = []
    shown: list[str] = []
    parts: list[list[str]] = []  # of the conflict that is being read: ours, base, theirs
    for line in text.splitlines(keepends=True):
        mark = line[:7] if line[:7] in MARKERS and (parts or line.startswith("<")) else ""
        if not parts and not mark:
            kept.append(line)
        elif mark == MARKERS[3]:
            both = joined(*parts)
            if both is None:
                shown.append(as_shown(parts, ours, theirs))
            kept += both or []
            parts = []
        elif mark:
            parts.append([])
        else:
            parts[-1].append(line)
    if shown:
        raise RecipeError(f"{ours} and {theirs} change the same lines:\n" + "\n".join(shown))
    return "".join(kept)


def joined(ours: list[str], base: list[str], theirs: list[str]) -> list[str] | None:
    """Both, where one of them only adds lines before or after those that the other changes."""
    size = len(base)
    if theirs[:size] == base:
        return ours + theirs[size:]
    if ours[:size] == base:
        return theirs + ours[size:]
    if theirs[-size:] == base:
        return theirs[:-size] + ours
    if ours[-size:] == base:
        return ours[:-size] + theirs
    return None


def as_shown(parts: list[list[str]], ours: str, theirs: str) -> str:
    titles = ours, "train_gpt.py", theirs
    return "".join(
        f"  --- {title}\n" + "".join(f"  {line}" for line in lines)
        for title, lines in zip(titles, parts, strict=True)
    )


def combined(base: str, recipes: Sequence[Recipe], parse: bool = True) -> str:
    """`base` with all recipes. `parse`: is what they make Python?"""
    text = base
    done: list[str] = []
    for recipe in recipes:
        mine = Side(" + ".join(done), text)
        other = patched(base, recipe)
        try:
            text = merged(mine, base, Side(recipe.name, other)) if done else other
        except RecipeError as error:
            message = f"{str(error).rstrip()}\nThey do not combine: leave one out"
            raise RecipeError(message) from error
        done.append(recipe.name)
    try:
        ast.parse(text if parse else "")
    except SyntaxError as error:
        reason = f"line {error.lineno} of what they make: {error.msg}"
        raise RecipeError(f"{' + '.join(done)}: {reason}") from error
    return text


# Settings


def with_defaults(text: str, assigned: dict[str, str]) -> str:
    """The script with other defaults. The script itself says which values a setting may have."""
    if not assigned:
        return text
    with work_folder() as name:
        script = Path(name, "train_gpt.py")
        script.write_text(text, encoding="utf-8")
        env = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1", **assigned}
        command = [sys.executable, str(script), "--print-config"]
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RecipeError(f"--set: {(done.stderr or done.stdout).strip()}")
    values = json.loads(done.stdout)
    for setting in assigned:
        field = setting.lower()
        if field not in values:
            new = [name.upper() for name in values if f"\n    {name}: " not in root_text()]
            remedy = f"these recipes add {', '.join(new)}; --help of train_gpt.py lists the others"
            raise RecipeError(f"--set {setting}: no such setting: {remedy}")
        line = re.compile(rf"^(    {field}: [^=\n]+ = )(.+?)(  # )", re.MULTILINE)
        value = repr(values[field]["value"]).replace("'", '"')
        text, count = line.subn(lambda match, value=value: match[1] + value + match[3], text, 1)
        if not count:
            raise RecipeError(f"--set {setting}: its line in Config is not found")
    return text


def assignments(arguments: Iterable[str]) -> dict[str, str]:
    assigned = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Z0-9_]+", name):
            raise RecipeError(f"--set {argument}: write NAME=VALUE, the name in capital letters")
        assigned[name] = value
    return assigned


# The commands


def root_text() -> str:
    return TRAINER.read_text(encoding="utf-8")


def list_recipes(options: argparse.Namespace) -> None:
    for name in names():
        recipe = load(name)
        print(f"{name:18} {recipe.lines:>8}  {recipe.sentence}")
        for setting, (default, on) in recipe.settings.items():
            print(f"{'':28} {setting}={default}, on: {setting}={on}")


def check_target(target: Path) -> None:
    """RecipeError for a name that a script must not have, and for a file that is there."""
    if fault := fault_of_script_name(target.name):
        raise RecipeError(f"--to {target}: {fault}")
    if target.exists():
        edit = f"; an edit of your own can be made a recipe: recipe.py new NAME --from {target}"
        edit = "" if target.resolve() == TRAINER else edit
        raise RecipeError(f"{target} exists, and stays as it is: name another file{edit}")
    if not target.parent.is_dir():
        raise RecipeError(f"--to {target}: no such folder: run mkdir -p {target.parent}")


def check_settings_named(assigned: Iterable[str], chosen: Sequence[str]) -> None:
    """RecipeError for a setting of a recipe that is not named."""
    for other in set(names()) - set(chosen):
        for setting in load(other).settings.keys() & set(assigned):
            raise RecipeError(f"--set {setting}: it is of the recipe {other}: name that one, too")


def apply_recipes(options: argparse.Namespace) -> None:
    target = Path(options.to)
    if not options.names:
        raise RecipeError("no recipe is named: write the names in front: apply ema --to x.py")
    if len(set(options.names)) < len(options.names):
        raise RecipeError("a recipe is named twice: name it once")
    check_target(target)
    recipes = [load(name) for name in options.names]
    assigned = assignments(options.set or [])
    check_settings_named(assigned, options.names)
    base = root_text()
    for recipe in recipes:
        try:
            patched(base, recipe)
        except EditedError as error:
            raise RecipeError(f"{error}: {EDITED}") from error
    text = with_defaults(combined(base, recipes), assigned)
    target.write_text(f"{MADE_BY}{', '.join(options.names)}\n{text}", encoding="utf-8")
    added = sum(recipe.count("+") for recipe in recipes)
    removed = sum(recipe.count("-") for recipe in recipes)
    print(f"{target}: train_gpt.py with {', '.join(options.names)} (+{added} -{removed} lines)")
    for recipe in recipes:
        off = {name: on for name, (_, on) in recipe.settings.items() if name not in assigned}
        if recipe.settings and len(off) == len(recipe.settings):
            settings = " ".join(f"{name}={on}" for name, on in off.items())
            print(f"  {recipe.name} is off until it is set: {settings}")


def read_script(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise RecipeError(f"--from {path}: {reason}: name a version of train_gpt.py") from error


def new_recipe(options: argparse.Namespace) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", options.name):
        raise RecipeError(f"{options.name}: a name has small letters, digits and _: wider_mlp")
    path = FOLDER / f"{options.name}.diff"
    if path.exists():
        raise RecipeError(f"{path} exists: name another, or remove it")
    text = read_script(options.source)
    if text.startswith(MADE_BY):
        text = text.split("\n", 1)[1]
    root = root_text()
    diff = difference(root, text)
    if not diff:
        raise RecipeError(f"{options.source} is train_gpt.py: there is nothing to make a recipe of")
    if 2 * Recipe(options.name, "", diff).count("-") > root.count("\n"):
        packed = "; package.py --unpack makes a packed script readable"
        raise RecipeError(f"{options.source}: no edited copy of train_gpt.py: name one{packed}")
    added = re.findall(r"^\+    ([a-z0-9_]+): [\w\[\], \"]+ = (.+?)  # ", diff, re.MULTILINE)
    digits = {"False": "0", "True": "1"}
    settings = [
        f"# setting: {name.upper()}={digits.get(default, default.strip(chr(34)))}, "
        f"on: {name.upper()}={TODO}"
        for name, default in added
    ]
    header = [
        f"# {TODO}: what it does, in one sentence.",
        *settings,
        f"# source: {TODO}: a paper or a pull request",
        f"# effect: {TODO}: the published effect, with its number",
        f"# cost: {TODO}: bytes of the artifact, milliseconds a step; or remove this line",
    ]
    path.write_text("\n".join(header) + "\n" + diff, encoding="utf-8")
    print(f"{path}: fill in its header, then: python3 records/recipe.py check")


def check_recipes(options: argparse.Namespace) -> None:
    base = root_text()
    faults = []
    good = []
    for name in names():
        recipe = load(name)
        faults += [f"{name}: {fault}" for fault in recipe.faults()]
        try:
            combined(base, [recipe])
            good.append(recipe)
        except RecipeError as error:
            faults.append(f"{error}: python3 records/recipe.py update --from OLD_TRAIN_GPT.py")
    print(f"{len(good)} of {len(names())} recipes apply to train_gpt.py")
    if options.pairs:
        for pair in combinations(good, 2):
            try:
                combined(base, pair, parse=False)
            except RecipeError as error:
                print("not together: " + str(error).splitlines()[0].rstrip(":"))
    if faults:
        raise RecipeError("\n".join(faults))


def update_recipes(options: argparse.Namespace) -> None:
    old, new = read_script(options.source), root_text()
    if "class GPT" not in old:
        remedy = "git show HEAD~1:train_gpt.py > old.py writes the last one"
        raise RecipeError(f"--from {options.source}: no earlier train_gpt.py: {remedy}")
    written = {}
    faults = []
    for name in names():
        recipe = load(name)
        try:
            theirs = Side(name, patched(old, recipe))
            diff = difference(new, merged(Side("today's train_gpt.py", new), old, theirs))
            if not diff:
                faults.append(f"{name}: today's train_gpt.py has it already: remove the recipe")
            elif diff != recipe.diff:
                written[name] = recipe.header + diff
        except RecipeError as error:
            faults.append(str(error))
    for name, text in written.items():
        (FOLDER / f"{name}.diff").write_text(text, encoding="utf-8")
    print(f"updated: {', '.join(written) or 'none'}")
    if faults:
        raise RecipeError("\n".join(faults))


def print_table(options: argparse.Namespace) -> None:
    print("| recipe | what it does | settings: default, on | lines | source | effect; cost |")
    print("|---|---|---|---|---|---|")
    for name in names():
        recipe = load(name)
        settings = [f"`{n}={default}`, `{on}`" for n, (default, on) in recipe.settings.items()]
        cells = [
            f"[{name}]({name}.diff)",
            recipe.sentence,
            "<br>".join(settings) or "none: it is on",
            recipe.lines,
            " ".join(recipe.field("source")),
            "; cost: ".join(recipe.field("effect") + recipe.field("cost")),
        ]
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}: --help lists the commands\n")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser
    command = add("list", help="list name, lines, sentence and settings of each recipe")
    command.set_defaults(run=list_recipes)
    command = add("apply", help="write train_gpt.py with some recipes to another file")
    command.add_argument("names", nargs="*", metavar="NAME", help="names of recipes, from list")
    command.add_argument("--to", required=True, metavar="FILE", help="file to write")
    text = "make these values the defaults"
    command.add_argument("--set", nargs="+", metavar="NAME=VALUE", action="extend", help=text)
    command.set_defaults(run=apply_recipes)
    command = add("new", help="make a recipe from an edited copy of train_gpt.py")
    command.add_argument("name", metavar="NAME", help="the recipe's name")
    text = "edited copy of train_gpt.py"
    command.add_argument("--from", dest="source", required=True, metavar="FILE", help=text)
    command.set_defaults(run=new_recipe)
    command = add("check", help="do all recipes apply to today's train_gpt.py?")
    text = "also list pairs that cannot be combined"
    command.add_argument("--pairs", action="store_true", help=text)
    command.set_defaults(run=check_recipes)
    command = add("update", help="merge a change of train_gpt.py into the recipes")
    text = "train_gpt.py as it was before the change"
    command.add_argument("--from", dest="source", required=True, metavar="OLD", help=text)
    command.set_defaults(run=update_recipes)
    command = add("table", help="print the table of records/recipes/README.md")
    command.set_defaults(run=print_table)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        options.run(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        message = f"{error.filename}: {error.strerror}: name another file"
        print(f"error: {message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a pager has seen enough
    sys.exit(main())
