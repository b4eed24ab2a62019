"""The limits of the house: how all code is written, how long it may be, what lies where.

And what the README promises about its own commands.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

TRAINER = ROOT / "train_gpt.py"
# A newcomer reads to the banner. What is behind it keeps a run fast, safe and measurable.
MAX_LINES, MAX_BYTES = 2_870, 134_000
FIRST_PART = 1_250  # lines before the banner
MAX_FUNCTION, MAX_FUNCTION_ELSEWHERE = 45, 60  # lines; in the trainer, elsewhere
OBVIOUS = 20  # lines of a function that may go without a docstring
PACKAGES = {"torch", "numpy", "sentencepiece", "huggingface_hub"}
TOP = {".ci", ".gitignore", ".ruff.toml", "LICENSE", "README.md", "requirements.txt"}
ROOMS = {"data", "logs", "records", "tests"}


def files(*more: str) -> list[str]:
    """The repository's files; `--others`: those that git ignores not, but does not have yet."""
    command = ["git", "ls-files", "--exclude-standard", "--cached", *more]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(name for name in set(listed.stdout.splitlines()) if (ROOT / name).exists())


def is_frozen(name: str) -> bool:
    """Is it what was run for a record? That never follows later changes."""
    return name.startswith("records/track_")


def scripts() -> list[str]:
    return [name for name in files("--others") if name.endswith(".py") and not is_frozen(name)]


def ruff(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# How it is written.


def test_all_code_is_formatted_and_lint_clean() -> None:
    for arguments in (("format", "--check"), ("check",)):
        done = ruff(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_hidden_from_ruff() -> None:
    """It sees every file but the frozen ones. Only imports behind a room's path may be excused."""
    seen = ruff("check", "--show-files").stdout.splitlines()
    assert sorted(str(Path(path).relative_to(ROOT)) for path in seen if path.endswith(".py")) == (
        scripts()
    )
    excused = {
        rule
        for name in scripts()
        for rules in re.findall(r"[#] (?:ruff: *)?noqa(.*)", (ROOT / name).read_text("utf-8"))
        for rule in re.findall(r"[A-Z]+\d+", rules) or ["all"]
    }
    assert excused <= {"E402", "F401"}


def test_the_trainer_fits_its_walls() -> None:
    text = TRAINER.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.encode("utf-8")) < MAX_BYTES
    first = len(text.split("\n# ===== MACHINERY: ")[0].splitlines())
    assert first < FIRST_PART
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {len(text.splitlines()):,}; you edit the first {first:,} |" in readme


def test_a_records_script_is_written_as_the_trainer_is() -> None:
    """It was frozen as it ran, and was readable when it was."""
    for script in sorted((ROOT / "records").glob("track_*/*/*.py")):
        for arguments in (("format", "--check"), ("check",)):
            command = [sys.executable, "-m", "ruff", *arguments, "--no-cache"]
            command += ["--config", "extend-exclude=[]", str(script)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, int]]:
    """Each function, and its lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.end_lineno - node.lineno + 1


def test_functions_are_short() -> None:
    long = []
    for name in scripts():
        most = MAX_FUNCTION if name == "train_gpt.py" else MAX_FUNCTION_ELSEWHERE
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        long += [f"{name}: {f.name}: {lines}" for f, lines in functions(tree) if lines > most]
    assert long == []


def test_the_trainer_says_what_its_parts_are_for() -> None:
    """The module, every class, and every function that cannot be seen through at a glance."""
    tree = ast.parse(TRAINER.read_text(encoding="utf-8"))
    parts = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    parts += [f for f, lines in functions(tree) if lines > OBVIOUS and not f.name.startswith("_")]
    assert ast.get_docstring(tree) and len(parts) > 20
    assert [part.name for part in parts if not ast.get_docstring(part)] == []


# What lies where, and what it needs.


def test_the_house_has_its_rooms_and_nothing_else() -> None:
    assert {name.split("/")[0] for name in files()} == TOP | ROOMS | {"train_gpt.py"}


def test_a_record_is_whole_without_the_rest() -> None:
    folders = sorted((ROOT / "records").glob("track_*/*/"))
    assert folders
    for folder in folders:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\w+", folder.name)
        names = {path.name for path in folder.iterdir()}
        assert names >= {"README.md", "submission.json", "train_gpt.py"}
        assert any(re.fullmatch(r"train\w*(-\w+)*\.log", name) for name in names)


def imported(tree: ast.AST) -> set[str]:
    """The packages that a script imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_the_trainer_imports_four_packages_and_no_room() -> None:
    names = imported(ast.parse(TRAINER.read_text(encoding="utf-8")))
    assert names - set(sys.stdlib_module_names) <= PACKAGES


def test_requirements_are_those_packages_pinned() -> None:
    lines = (ROOT / "requirements.txt").read_text().split()
    assert {re.fullmatch(r"([\w-]+)==[\d.]+", line)[1] for line in lines} == PACKAGES
    assert "torch==2.13.0" in lines


# What imports what: logs/ is a library, and records/ builds on it.


MODULES = {path.stem: path for room in ("logs", "records") for path in (ROOT / room).glob("*.py")}


def imports(path: Path) -> set[str]:
    """The modules of these rooms that a module imports, anywhere in it."""
    text = path.read_text(encoding="utf-8")
    return {*re.findall(r"(?m)^ *(?:from|import) (\w+)", text)} & {*MODULES}


def test_no_two_modules_import_each_other() -> None:
    """Neither directly nor around a corner: taking away what imports nothing leaves nothing."""
    left = {name: imports(path) for name, path in MODULES.items()}
    logs = {name for name, path in MODULES.items() if path.parent.name == "logs"}
    assert not any(left[name] - logs for name in logs), "only records/ builds on another room"
    while free := [name for name, needed in left.items() if not needed & set(left)]:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert left == {}


def test_importing_a_module_of_the_library_does_nothing() -> None:
    """No exit, no output, and no package that only some questions need."""
    library = "lines scripts runs results configuration significance cli tables"
    code = f"import sys\nfor name in {library.split()}: __import__(name)\n"
    code += "print({'scipy', 'pandas', 'matplotlib', 'torch', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "logs", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


# The README's own commands.


def first_block(heading: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(r"```\w*\n(.*?)```", section, re.DOTALL).group(1).strip().splitlines()


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_readme_commands_are_one_complete_line(heading: str) -> None:
    [command] = first_block(heading)
    subprocess.run(["bash", "-n", "-c", command], check=True)
    assert command.startswith("python3 -m venv .venv && ") and "requirements.txt" in command
    for word in re.findall(r"[\w./]+\.(?:py|txt)", command):
        assert (ROOT / word).exists(), word


def test_every_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:data|logs|records|tests)/[\w./]+\.(?:py|md|txt))\b", text))
    assert "train_gpt.py" in text and len(named) > 3
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_ci_runs_the_readme_test_command_and_what_is_slow() -> None:
    script = ROOT / ".ci" / "run"
    assert "## Test it" in script.read_text() and "-m slow" in script.read_text()
    assert script.stat().st_mode & 0o111
