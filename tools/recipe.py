"""Apply recipes: changes of train_gpt.py as tested patches, in records/recipes/<name>.diff.

    python3 tools/recipe.py list                             all recipes and stacks
    python3 tools/recipe.py apply ema int6 --to x.py         train_gpt.py with these two
    python3 tools/recipe.py apply ema --to x.py --set EMA_DECAY=0.997
    python3 tools/recipe.py apply --stack NAME --to x.py     recipes and values that belong together
    python3 tools/recipe.py new wider --from mine.py         a recipe from an edited train_gpt.py

A recipe is off until you switch it on with its setting: python3 x.py EMA_DECAY=0.997. `--set`
makes a value the default in the written file. A stack (records/stacks/<name>.json) does this, too.
Recipes are merged by git. If two changes cannot be merged, both are shown and nothing is written.

Exit code: 0 done, 1 refused, with the reason, 2 wrong usage.
"""

# This module builds on cli.py and on git.

import argparse
import ast
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from cli import ToolError

TRAINER = cli.ROOT / "train_gpt.py"
FOLDER = cli.ROOT / "records" / "recipes"
STACKS = cli.ROOT / "records" / "stacks"
COMMANDS = STACKS / "commands.txt"
TODO = "TODO"
EDITED_HINT = (
    "restore train_gpt.py (make your edit a recipe first), or renew the recipe (new --again)"
)
MADE_BY = "# Made by tools/recipe.py from train_gpt.py and these recipes: "
# A conflict as git marks it: the lines of ours, of the base and of theirs.
CONFLICT = re.compile(
    r"^<{7} [^\n]*\n(.*?)^[|]{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Recipe:
    """A header of comment lines, and a unified diff against train_gpt.py. The header contains what
    tests/recipes/test_recipes.py checks."""

    name: str
    header: str
    diff: str

    @property
    def sentence(self) -> str:
        """What the recipe does: the lines of the header up to its first field."""
        text = re.split(r"\n# (?:setting|source|effect|cost|not with):", self.header)[0]
        return " ".join(line.removeprefix("#").strip() for line in text.splitlines())

    def field(self, name: str) -> list[str]:
        """Return the lines of a field. An indented line continues the line before it."""
        whole = re.sub(r"\n#   +", " ", self.header)
        return re.findall(rf"^# {name}: *(.+)$", whole, re.MULTILINE)

    @property
    def not_with(self) -> list[str]:
        """The recipes that must not be applied together with this one: one of the two would have no
        effect."""
        return re.findall(r"\w+", " ".join(self.field("not with")))

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """{NAME: (default, a value that switches the recipe on)}"""
        pattern = r"([A-Z0-9_]+)=(\S*), on: \1=(\S+)"
        matches = (re.match(pattern, text) for text in self.field("setting"))
        return {match[1]: (match[2], match[3]) for match in matches if match}

    def count(self, sign: str) -> int:
        """Return the number of added (+) or removed (-) lines."""
        return sum(line.startswith(sign) for line in self.diff.splitlines()[2:])


def list_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.diff"))


def list_stacks() -> list[str]:
    return sorted(path.stem for path in STACKS.glob("*.json"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe. Raises ToolError if there is none of this name."""
    path = FOLDER / f"{name}.diff"
    if not path.is_file():
        similar = cli.did_you_mean(name, list_names())
        if name in list_stacks():
            similar = f"; it is a stack, so write --stack {name}"
        words = f"no such recipe in {FOLDER}; recipe.py list shows all recipes and stacks"
        raise ToolError(f"{name}: {words}{similar}")
    header, _, diff = path.read_text(encoding="utf-8").partition("\n--- ")
    return Recipe(name, header + "\n", "--- " + diff)


def load_stack(name: str) -> dict[str, Any]:
    """Return a stack: its recipes in order, their settings, and how to run them. Raises ToolError
    if there is none of this name."""
    if name not in list_stacks():
        similar = cli.did_you_mean(name, list_stacks())
        raise ToolError(
            f"{name}: no such stack; the stacks are {', '.join(list_stacks())}{similar}"
        )
    return json.loads((STACKS / f"{name}.json").read_text(encoding="utf-8"))


def git(folder: Path, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess:
    """Run git in a folder outside any repository, without the user's configuration."""
    environment = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_GLOBAL": os.devnull}
    options = {
        "env": {**os.environ, **environment, "LC_ALL": "C"},
        "capture_output": True,
        "text": True,
    }
    return subprocess.run(["git", *arguments], cwd=folder, input=given, **options)


@cache
def apply_patch(base: str, recipe: Recipe) -> str:
    """Return `base` with one recipe. Raises ToolError if the recipe does not fit."""
    with tempfile.TemporaryDirectory(prefix="recipe") as name:
        folder = Path(name).resolve()
        (folder / "train_gpt.py").write_text(base, encoding="utf-8")
        done = git(folder, "apply", "-", given=recipe.diff)
        if done.returncode:
            line = re.search(r"train_gpt\.py:(\d+)|$", done.stderr)[1]
            words = f"train_gpt.py has other lines near line {line}; {EDITED_HINT}"
            raise ToolError(f"{recipe.name} does not apply: {words}")
        return (folder / "train_gpt.py").read_text(encoding="utf-8")


def merge(ours: tuple[str, str], base: str, theirs: tuple[str, str]) -> str:
    """Return `base` with two changes, which are given as (name, changed text). Raises ToolError
    with the lines that cannot be merged."""
    with tempfile.TemporaryDirectory(prefix="recipe") as name:
        folder = Path(name).resolve()
        for file, text in (("ours", ours[1]), ("base", base), ("theirs", theirs[1])):
            (folder / file).write_text(text, encoding="utf-8")
        labels = "-L", ours[0], "-L", "train_gpt.py", "-L", theirs[0]
        done = git(folder, "merge-file", "-p", "--diff3", *labels, "ours", "base", "theirs")
    text = CONFLICT.sub(resolve_conflict, done.stdout)
    if shown := [conflict[0] for conflict in CONFLICT.finditer(text)]:
        remedy = (
            "nothing was written; leave one of them out, or apply one of them, make the change of "
            "the other one by hand in the written file, and check it with tools/verify.py"
        )
        words = f"{ours[0]} and {theirs[0]} change the same lines:\n"
        raise ToolError(words + "".join(shown) + remedy)
    return text


def resolve_conflict(conflict: re.Match) -> str:
    """Return both changes if one of them only adds lines before or after those that the other one
    changes; otherwise return the conflict as it is."""
    ours, base, theirs = (part.splitlines(keepends=True) for part in conflict.groups())
    size = len(base)
    for one, other in ((ours, theirs), (theirs, ours)):
        if other[:size] == base:
            return "".join(one + other[size:])
    for one, other in ((ours, theirs), (theirs, ours)):
        if other[-size:] == base:
            return "".join(other[:-size] + one)
    return conflict[0]


def combine(base: str, recipes: Sequence[Recipe]) -> str:
    """Return `base` with all recipes. Raises ToolError if they cannot be combined."""
    text, done = base, ""
    chosen = {recipe.name for recipe in recipes}
    for recipe in recipes:
        if others := chosen.intersection(recipe.not_with):
            words = f"{recipe.name} and {others.pop()} do the same thing in two ways"
            raise ToolError(f"{words}, so one of them would have no effect; leave one out")
        other = apply_patch(base, recipe)
        text = merge((done, text), base, (recipe.name, other)) if done else other
        done += f" + {recipe.name}" if done else recipe.name
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        reason = f"line {error.lineno} of the combined script: {error.msg}"
        raise ToolError(f"{done}: {reason}") from error
    if faults := find_merge_faults(tree):
        remedy = "leave one recipe out" if recipes[1:] else "correct the recipe"
        raise ToolError(f"{done}: {cli.join_some(faults)}; {remedy}")
    return text


def find_merge_faults(tree: ast.Module) -> list[str]:
    """Return in words which functions, classes and settings a scope defines twice (the last one
    would win), and which statements cannot be reached."""
    found = []
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        names = [
            getattr(node, "name", None) or node.target.id
            for node in scope.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.decorator_list  # such as a property's setter
            or isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
        ]
        twice = sorted({name for name in names if names.count(name) > 1})
        found += [f"{name} is defined twice" for name in twice]
    blocks = [getattr(node, name, []) for node in ast.walk(tree) for name in ("body", "orelse")]
    for block in blocks:
        pairs = pairwise(block) if isinstance(block, list) else ()
        for node, after in pairs:
            if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                word = type(node).__name__.lower()
                found.append(f"line {after.lineno} of the combined script is behind a {word}")
    return found


def with_defaults(text: str, assigned: dict[str, str]) -> str:
    """Return the script with other defaults. The script itself checks the values."""
    if not assigned:
        return text
    with tempfile.TemporaryDirectory(prefix="recipe") as name:
        script = Path(name, "train_gpt.py")
        script.write_text(text, encoding="utf-8")
        env = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}
        given = [f"{setting}={value}" for setting, value in assigned.items()]
        command = [sys.executable, str(script), "--print-config", *given]
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        faults = [line.strip() for line in lines if line.strip().startswith((*given,))]
        raise ToolError(f"--set {'; '.join(faults or lines)}")
    values = json.loads(done.stdout)
    for setting in assigned:
        field = setting.lower()
        line = re.compile(rf"^(    {field}: [^=\n]+ = )(.+?)(  # )", re.MULTILINE)
        value = values[field]["value"]
        value = json.dumps(value) if isinstance(value, str) else repr(value)
        text, count = line.subn(lambda match, value=value: match[1] + value + match[3], text, 1)
        if not count:
            raise ToolError(f"--set {setting}: the line of this setting in Config was not found")
    return text


def list_recipes(options: argparse.Namespace) -> None:
    for name in list_names():
        recipe = load_recipe(name)
        lines = f"+{recipe.count('+')} -{recipe.count('-')}"
        print(f"{name:18} {lines:>8}  {recipe.sentence}")
        for setting, (default, on) in recipe.settings.items():
            print(f"{'':28} {setting}={default}, on: {setting}={on}")
    for name in list_stacks():
        values = load_stack(name)
        print(f"--stack {name}: {', '.join(values['recipes'])}: {values['score']}")


def apply_recipes(options: argparse.Namespace) -> None:
    target = Path(options.to)
    chosen = load_stack(options.stack) if options.stack else {"recipes": [], "settings": {}}
    wanted = [*dict.fromkeys([*chosen["recipes"], *options.names])]
    if not wanted:
        raise ToolError("apply needs a recipe: put its name first, as in: apply ema --to x.py")
    if target.exists():
        raise ToolError(
            f"{target} exists already (apply starts from train_gpt.py); give another file"
        )
    recipes = [load_recipe(name) for name in wanted]
    assigned = {name: str(value) for name, value in chosen["settings"].items()}
    for text in options.set:
        setting, _, value = text.partition("=")
        assigned[setting] = value
    text = with_defaults(combine(TRAINER.read_text(encoding="utf-8"), recipes), assigned)
    made_by = f"{MADE_BY}{', '.join(wanted)}" + f"; stack {options.stack}" * bool(options.stack)
    target.write_text(f"{made_by}\n{text}", encoding="utf-8")
    paths = str(TRAINER.resolve()), str(target.resolve())
    numbers = git(target.resolve().parent, "diff", "--no-index", "--numstat", *paths).stdout
    added, removed = numbers.split()[:2]
    print(f"{target}: train_gpt.py with {', '.join(wanted)} (+{added} -{removed} lines)")
    for recipe in recipes:
        settings = {name: on for name, (default, on) in recipe.settings.items() if default != on}
        off = [f"{name}={on}" for name, on in settings.items() if name not in assigned]
        if off:
            print(f"  {recipe.name} is off until you set {' '.join(off)}")
    if options.stack:
        print(f"  {chosen['score']} ({chosen['source']})")
        print("\n" + format_commands(options.stack, chosen, target))


def format_commands(name: str, chosen: dict[str, Any], target: Path) -> str:
    """Return the commands that make a record of a stack, from records/stacks/commands.txt."""
    script = os.path.relpath(target, cli.ROOT)
    values = chosen | {
        "root": shlex.quote(str(cli.ROOT)),
        "name": name,
        "title": name.capitalize(),
        "stem": target.stem,
        "packages": " ".join(chosen["packages"]),
        "download": round(chosen["gigabytes"] / 6),
        "dollars": round(3 * chosen["minutes"] * 24 / 60),
        "script": shlex.quote(script),
        "packed": shlex.quote(script.removesuffix(".py") + "_packed.py"),
    }
    return COMMANDS.read_text(encoding="utf-8").format(**values)


def new_recipe(options: argparse.Namespace) -> None:
    path = FOLDER / f"{options.name}.diff"
    if path.exists() and not options.again:
        raise ToolError(
            f"{path} exists already; give another name, or replace its lines with --again"
        )
    text = Path(options.source).read_text(encoding="utf-8", errors="replace")
    text = text.split("\n", 1)[1] if text.startswith(MADE_BY) else text
    root = TRAINER.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = text.splitlines(keepends=True)
    diff = difflib.unified_diff(root, lines, "a/train_gpt.py", "b/train_gpt.py")  # for git apply
    recipe = Recipe(options.name, "", "".join(diff))
    if not recipe.diff or 2 * recipe.count("-") > len(root):
        raise ToolError(
            f"{options.source} is not an edited copy of train_gpt.py; give an edited copy"
        )
    header = [f"# {TODO}: what it does, in one sentence."]
    header += [f"# setting: {TODO}=0, on: {TODO}=1"]
    header += [f"# source: {TODO}: a paper or a pull request"]
    header += [f"# effect: {TODO}: the published effect, with its number", ""]
    kept = load_recipe(options.name).header if path.exists() else "\n".join(header)
    path.write_text(kept + recipe.diff, encoding="utf-8")
    print(
        f"{path}: fill in the header, then run: python3 -m pytest tests/recipes -k {options.name}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(description=__doc__)
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    text = "list each recipe with its number of lines, a sentence and its settings"
    add("list", help=text).set_defaults(run=list_recipes)
    command = add("apply", help="write train_gpt.py with the given recipes to another file")
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="names of recipes, as list prints them"
    )
    command.add_argument(
        "--stack", metavar="NAME", help="apply the recipes and values of records/stacks/NAME.json"
    )
    command.add_argument("--to", required=True, metavar="FILE", help="file to write")
    text = "make these values the defaults in the written file"
    options = {"nargs": "+", "metavar": "NAME=VALUE", "action": "extend", "default": []}
    command.add_argument("--set", help=text, **options)
    command.set_defaults(run=apply_recipes)
    command = add("new", help="make a recipe from an edited copy of train_gpt.py")
    command.add_argument("name", metavar="NAME", help="the recipe's name")
    command.add_argument(
        "--from", dest="source", required=True, metavar="FILE", help="edited copy of train_gpt.py"
    )
    command.add_argument(
        "--again", action="store_true", help="replace the recipe's lines and keep its header"
    )
    command.set_defaults(run=new_recipe)
    options = parser.parse_args(arguments)
    parser.require([getattr(options, "source", None)], "give an edited copy of train_gpt.py")
    return cli.run(lambda: options.run(options) or 0)


if __name__ == "__main__":
    sys.exit(main())
