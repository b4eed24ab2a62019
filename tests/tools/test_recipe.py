"""tools/recipe.py: recipes are merged or their conflicts shown, made and renewed; stacks are
applied."""

import difflib
import json
import os
import subprocess
from itertools import combinations, product
from pathlib import Path

import pytest
import recipe
from running import Call

RECIPES = recipe.FOLDER

# A script of a few lines with the same kind of Config as the trainer's.
SCRIPT = '''"""A script."""
import json
import sys

Fixed = {float: float, bool: bool, str: str}


class Config:
    logit_softcap: Fixed[float] = 30.0  # logits; the cap
    run_id: str = "a"  # text; the name
    tie: Fixed[bool] = True  # 0/1; one matrix


def forward(x):
    # first line
    head = x
    # second line
    return head * 30
'''
MAIN = """
if "--print-config" in sys.argv:
    given = dict(word.split("=") for word in sys.argv[2:])
    values = {n: {"value": given.pop(n.upper(), "default")} for n in Config.__annotations__}
    if given or values.get("cap_more", {}).get("value") == "9":
        unknown = [f"{name}={text}: no such setting" for name, text in given.items()]
        fault = (unknown or ["CAP_MORE=9: set 0 or 1"])[0]
        sys.exit(f"wrong settings:\\n  {fault}\\n  DATA_PATH=.: no shards")
    print(json.dumps(values))
"""
HEADER = "# It does this.\n# source: none\n# effect: none\n"
HEAD, RETURN = "    head = x\n", "    return head * 30\n"
CAP = "    cap_more: Fixed[bool] = False  # 0/1; a cap\n"
OPTION = "    logit_softcap: Fixed[float] = 30.0  # logits; the cap\n"


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with a train_gpt.py, recipes and stacks."""
    for name in ("recipes", "stacks"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(recipe, "FOLDER", tmp_path / "recipes")
    monkeypatch.setattr(recipe, "STACKS", tmp_path / "stacks")
    monkeypatch.setattr(recipe, "TRAINER", tmp_path / "root.py")
    (tmp_path / "root.py").write_text(SCRIPT + MAIN)
    recipe.apply_patch.cache_clear()
    return tmp_path


def make(name: str, old: str, new: str, header: str = HEADER) -> None:
    """Write a recipe that replaces some lines of the script."""
    assert SCRIPT.count(old) == 1
    texts = SCRIPT + MAIN, (SCRIPT + MAIN).replace(old, new)
    lines = (text.splitlines(keepends=True) for text in texts)
    diff = difflib.unified_diff(*lines, "a/train_gpt.py", "b/train_gpt.py")
    (recipe.FOLDER / f"{name}.diff").write_text(header + "".join(diff))


def make_caps() -> None:
    setting = "# setting: CAP_MORE=0, on: CAP_MORE=1\n# source"
    make("caps", OPTION, CAP + OPTION, HEADER.replace("# source", setting))


def test_a_conflict_is_shown_with_both_sides(call: Call, repository: Path) -> None:
    make("one", RETURN, "    return head\n")
    make("two", RETURN, "    return 2 * head\n")
    code, out, err = call(recipe.main, "apply", "one", "two", "--to", repository / "x.py")
    assert (code, out) == (1, "") and not (repository / "x.py").exists()
    both = "error: one and two change the same lines:\n<<<<<<< one\n    return head\n"
    assert err.startswith(both) and RETURN in err and "    return 2 * head\n>>>>>>> two\n" in err
    assert err.splitlines()[-1].startswith(
        "nothing was written; leave one of them out, or apply one"
    )


def test_lines_added_at_one_place_are_in_the_given_order(call: Call, repository: Path) -> None:
    """Also directly before or after a line that another recipe changes."""
    make("one", HEAD, HEAD + "    # one\n")
    make("two", HEAD, HEAD + "    # two\n")
    make("three", HEAD, "    head = 2 * x\n")
    make("four", HEAD, "    # four\n" + HEAD)
    order = "two", "three", "one", "four"
    assert call(recipe.main, "apply", *order, "--to", repository / "x.py")[0] == 0
    text = (repository / "x.py").read_text()
    assert "    # four\n    head = 2 * x\n    # two\n    # one\n" in text
    assert text.startswith(recipe.MADE_BY + "two, three, one, four\n")


def test_new_makes_a_recipe_of_an_edited_copy(call: Call, repository: Path) -> None:
    edited = repository / "mine.py"
    edited.write_text((SCRIPT + MAIN).replace(OPTION, CAP + OPTION))
    assert call(recipe.main, "new", "caps", "--from", edited)[0] == 0
    made = recipe.load_recipe("caps")
    assert made.field("setting") == ["TODO=0, on: TODO=1"] and made.count("+") == 1
    assert call(recipe.main, "apply", "caps", "--to", repository / "x.py")[0] == 0
    assert (repository / "x.py").read_text().split("\n", 1)[1] == edited.read_text()
    # The written script can be edited, and the recipe renewed from it: the header is kept.
    make_caps()
    (repository / "x.py").write_text(
        (repository / "x.py").read_text().replace(RETURN, "    return head\n")
    )
    code, _, err = call(recipe.main, "new", "caps", "--from", repository / "x.py")
    assert (
        code == 1
        and "caps.diff exists already; give another name, or replace its lines with --again" in err
    )
    assert call(recipe.main, "new", "caps", "--from", repository / "x.py", "--again")[0] == 0
    again = recipe.load_recipe("caps")
    assert (again.count("+"), again.count("-")) == (2, 1) and again.sentence == "It does this."


def test_set_makes_values_the_defaults(call: Call, repository: Path) -> None:
    make_caps()
    apply = "apply", "caps", "--to", repository / "x.py", "--set"
    for value, words in {
        "CAP_MORE=9": "error: --set CAP_MORE=9: set 0 or 1\n",
        "CAP_MOER=1": "error: --set CAP_MOER=1: no such setting\n",
    }.items():
        code, out, err = call(recipe.main, *apply, value)
        assert (code, out, err) == (1, "", words) and not (repository / "x.py").exists()
    code, out, _ = call(recipe.main, *apply, "RUN_ID=a-b")
    assert code == 0 and "caps is off until you set CAP_MORE=1" in out
    assert '    run_id: str = "a-b"  # text; the name\n' in (repository / "x.py").read_text()


STACK = {
    "recipes": ["caps", "one"], "settings": {"CAP_MORE": 1, "LOGIT_SOFTCAP": 15},
    "data": "python3 data/cached_challenge_fineweb.py", "verify": "CAPS=1",
    "launch": "torchrun --standalone --nproc_per_node=8",
    "packages": ["brotli"], "gigabytes": 24, "minutes": 20,
    "source": "PR 1", "score": "1.2 bits per byte",
}  # fmt: skip


def test_a_stack_is_recipes_with_their_values(call: Call, repository: Path) -> None:
    """In the order of the stack, also with another recipe and another value."""
    make_caps()
    make("one", RETURN, "    return head\n")
    make("two", HEAD, HEAD + "    # two\n")
    (repository / "stacks" / "first.json").write_text(json.dumps(STACK))
    code, out, err = call(recipe.main, "apply", "--stack", "first", "--to", repository / "x.py")
    assert (code, err) == (0, "")
    summary, paste = out.split("From here to a record:\n")
    assert summary.splitlines()[1:] == ["  1.2 bits per byte (PR 1)", ""]
    assert "24 GB, 4 minutes" in paste and "3 x 20 minutes, about 24 dollars" in paste
    assert subprocess.run(["bash", "-n", "-c", paste]).returncode == 0
    path = os.path.relpath(repository / "x", recipe.cli.ROOT)
    wanted = [
        f"cd {recipe.cli.ROOT}",
        "python3 -m pip install -r requirements.txt -r tools/requirements.txt brotli",
        "python3 data/cached_challenge_fineweb.py",
        f"python3 tools/verify.py {path}.py --score-differs CAPS=1",
        f"python3 tools/package.py --pack {path}.py",
        f"SEED=$seed torchrun --standalone --nproc_per_node=8 {path}_packed.py || break",
        'python3 tools/package.py logs/x_seed*.txt --track track_10min_16mb --name "Stack first"',
        "python3 tools/check.py records/track_10min_16mb/*_StackFirst",
    ]
    places = [paste.index(command) for command in wanted]
    assert places == sorted(places)
    text = (repository / "x.py").read_text()
    assert text.startswith(recipe.MADE_BY + "caps, one; stack first\n")
    assert "    return head\n" in text
    assert '    cap_more: Fixed[bool] = "1"  # 0/1; a cap\n' in text
    assert '    logit_softcap: Fixed[float] = "15"  # logits; the cap\n' in text
    more = (
        "apply",
        "two",
        "--stack",
        "first",
        "--to",
        repository / "y.py",
        "--set",
        "LOGIT_SOFTCAP=20",
    )
    assert call(recipe.main, *more)[0] == 0
    text = (repository / "y.py").read_text()
    assert text.startswith(recipe.MADE_BY + "caps, one, two; stack first\n")
    assert 'float] = "20"' in text


def test_errors_are_one_line(call: Call, repository: Path) -> None:
    make_caps()
    make("block", HEAD, HEAD + "    if head:\n")
    make("late", RETURN, "    return head\n")
    file, foreign = repository / "x.py", repository / "foreign.py"
    foreign.write_text("import torch\n")

    def refuses(command: str, words: str) -> None:
        code, out, err = call(recipe.main, *command.split())
        assert (code, out) == (1, "") and words in err.replace(str(recipe.FOLDER), "recipes"), err
        assert err.count("\n") == 1 and not file.exists()

    refuses(f"apply caps --to {foreign}", "exists already (apply starts from train_gpt.py)")
    not_python = "block: line 19 of the combined script: expected an indented block"
    refuses(f"apply block --to {file}", not_python)
    recipe.TRAINER.write_text((SCRIPT + MAIN).replace("    # second line\n", "    # new\n"))
    moved = "late does not apply: train_gpt.py has other lines near line "
    refuses(f"apply late --to {file}", moved)
    refuses(
        f"apply late --to {file}",
        "restore train_gpt.py (make your edit a recipe first), or renew the recipe",
    )


def test_it_works_inside_another_repository(
    call: Call, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`git apply` would silently skip files that the other repository does not know."""
    make_caps()
    subprocess.run(["git", "init", "-q", repository], check=True)
    (repository / "sub").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(repository / "sub"))
    assert call(recipe.main, "apply", "caps", "--to", repository / "x.py")[0] == 0
    assert CAP in (repository / "x.py").read_text()


TWICE = "\n\ndef added(x):\n    return x"


def test_a_merge_with_a_name_defined_twice_or_an_unreachable_line_is_an_error(
    call: Call, repository: Path
) -> None:
    for name, end in (("first", " + 1\n"), ("second", " + 2\n")):
        make(name, RETURN, RETURN + TWICE + end)
    make("early", HEAD, HEAD + "    return x\n")
    make("late", HEAD, HEAD + "    x = 2\n")
    target = repository / "x.py"
    for names, words in (
        (("first", "second"), "first + second: added is defined twice; leave one recipe out"),
        (
            ("early",),
            "early: line 19 of the combined script is behind a return; correct the recipe",
        ),
    ):
        code, out, err = call(recipe.main, "apply", *names, "--to", target)
        assert (code, out, err) == (1, "", f"error: {words}\n") and not target.exists()


def test_recipes_that_do_the_same_are_not_applied_together(call: Call, repository: Path) -> None:
    make("one", HEAD, HEAD + "    # one\n", HEADER + "# not with: two, three\n")
    make("two", RETURN, "    return head\n")
    for order in (("one", "two"), ("two", "one")):
        code, _, err = call(recipe.main, "apply", *order, "--to", repository / "x.py")
        assert code == 1 and "one and two do the same thing in two ways" in err
    code, out, _ = call(recipe.main, "apply", "two", "--to", repository / "x.py")
    assert code == 0 and "with two (+2 -1 lines)" in out, "git counts the first line, too"


def test_recipes_of_this_repository_say_which_of_them_hide_others() -> None:
    """For example those that change how the run scores: one of two would silently win."""
    texts = {path.stem: path.read_text("utf-8") for path in RECIPES.glob("*.diff")}
    read = {name: recipe.Recipe(name, text, "").not_with for name, text in texts.items()}
    for one, other in (
        *combinations(("document_ttt", "global_sgd", "sliding_window"), 2),
        *product(("document_ttt", "global_sgd"), ("score_first_ttt",)),
        *product(("documents",), ("document_rows", "longer_rows")),
    ):
        assert other in read[one] or one in read[other]
