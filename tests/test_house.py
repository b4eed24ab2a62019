"""The limits of the house, and the README's promises about its own commands."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

MAX_LINES, MAX_BYTES, MAX_FUNCTION, MAX_COLUMNS = 1366, 80_000, 60, 120
FILES = sorted(
    path
    for room in ("", "data", "logs", "records", "tests", "tests/gpu", "tests/bench", "tests/faults")
    for path in (ROOT / room).glob("*.py")
)


def test_the_trainer_fits_its_walls() -> None:
    text = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.encode("utf-8")) <= MAX_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_columns_and_functions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [
        number for number, line in enumerate(text.splitlines(), 1) if len(line) > MAX_COLUMNS
    ] == []
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION] == []
    assert [f.name for f in functions if len(f.args.args) + len(f.args.posonlyargs) > 6] == []


def test_the_trainer_imports_four_packages_and_no_room() -> None:
    allowed = {"numpy", "sentencepiece", "torch", "huggingface_hub"}
    tree = ast.parse((ROOT / "train_gpt.py").read_text(encoding="utf-8"))
    imports = [
        alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    ]
    roots = {alias.name.split(".")[0] for alias in imports}
    roots |= {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert roots - set(sys.stdlib_module_names) <= allowed


def test_requirements_are_pinned() -> None:
    names = []
    for line in (ROOT / "requirements.txt").read_text().split():
        names.append(re.fullmatch(r"([\w-]+)==[\d.]+", line).group(1))
    assert names == ["torch", "numpy", "sentencepiece", "huggingface_hub"]
    assert "torch==2.13.0" in (ROOT / "requirements.txt").read_text()


def first_block(heading: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.search(r"```\w*\n(.*?)```", section, re.DOTALL).group(1).strip().splitlines()


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_readme_commands_are_one_complete_line(heading: str) -> None:
    block = first_block(heading)
    assert len(block) == 1
    subprocess.run(["bash", "-n", "-c", block[0]], check=True)
    assert block[0].startswith("python3 -m venv .venv && ") and "requirements.txt" in block[0]
    for word in re.findall(r"[\w./]+\.(?:py|txt)", block[0]):
        assert (ROOT / word).exists(), word


def test_every_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b((?:data|logs|records|tests)/[\w./]+\.(?:py|md|txt))\b", text)) | {
        "train_gpt.py"
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "## Test it" in script and "-m slow" in script
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
