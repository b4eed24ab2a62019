"""Tests of the repository's conventions: formatting, imports, the order of sections, and files.

They also check the commands and paths in the READMEs. No test limits the length of a text.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import check
import pytest
from running import ROOT, Call

BANNER = "\n# ===== MACHINERY: "
# What people change comes before the banner, the machinery after it.
BEFORE_BANNER = ["CONFIG", "MODEL", "OPTIMIZERS", "DATA", "EVALUATION", "ARTIFACT", "TRAINING"]
PACKAGES = {"torch", "numpy", "sentencepiece", "huggingface_hub"}
TOP = {".ci", ".gitignore", ".ruff.toml", "LICENSE", "README.md", "requirements.txt"}
TOP |= {"data", "logs", "records", "tests", "tools", "train_gpt.py"}


def list_files(ending: str) -> list[str]:
    """Return the repository's files with this ending, without the frozen records."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"*{ending}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = sorted(set(listed.stdout.splitlines()))
    return [n for n in names if not n.startswith("records/track_") and (ROOT / n).exists()]


def read_text(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_all_code_is_formatted_and_lint_clean() -> None:
    for arguments in (("format", "--check"), ("check",)):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_people_change_comes_first_in_the_trainer() -> None:
    """The sections that an experiment edits come before the banner, in the docstring's order."""
    text = read_text("train_gpt.py")
    first, machinery = text.split(BANNER)
    assert re.findall(r"(?m)^# === ([A-Z]+)", first) == BEFORE_BANNER
    assert " ".join(BEFORE_BANNER) in text.split('"""')[1]
    for section in re.findall(r"(?m)^# === ([A-Z]+)", machinery):
        assert section in text.split('"""')[1], f"the docstring does not list {section}"
    classes = re.findall(r"(?m)^class (\w+)", first)
    assert {"Config", "GPT", "Muon", "BatchPlan", "Validation", "Trainer"} <= {*classes}


def test_tools_import_only_modules_below_them() -> None:
    """The modules of tools/ form at most four levels, and there are no circular imports."""
    modules = {Path(name).stem: name for name in list_files(".py") if name.startswith("tools/")}

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"{name} imports itself through {above}"
        words = re.findall(r"^\s*(?:from|import) (\w+)", read_text(modules[name]), re.MULTILINE)
        return 1 + max([level(word, (*above, name)) for word in words if word in modules] or [0])

    assert {name: level(name) for name in modules if level(name) > 4} == {}


def test_the_top_folder_has_only_the_listed_files() -> None:
    assert {name.split("/")[0] for name in list_files("")} == TOP


@pytest.mark.parametrize("name", ["LeakyReLU2_LegalTTT_ParallelMuon_Pipeline", "OverlapAblation"])
def test_a_frozen_record_is_accepted_except_for_its_small_validation_set(
    name: str, call: Call
) -> None:
    [folder] = ROOT.glob(f"records/track_*/2026-11-2?_{name}")
    code, out, _ = call(check.main, folder)
    [warning] = re.findall(r"^  (?:refused|warned) +(.*)", out, re.MULTILINE)
    assert code == 0 and re.match("it counted 486,... bytes of text, the challenge's", warning)


def test_the_trainer_imports_the_packages_that_requirements_pin() -> None:
    names = set()
    for node in ast.walk(ast.parse(read_text("train_gpt.py"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) <= PACKAGES
    lines = read_text("requirements.txt").split()
    assert {re.fullmatch(r"([\w-]+)==[\d.]+", line)[1] for line in lines} == PACKAGES
    assert "torch==2.13.0" in lines


def test_tools_import_the_packages_that_their_requirements_pin() -> None:
    """The trainer's own packages are excluded; the tests' requirements include those of tools/."""
    texts = [read_text(name) for name in list_files(".py") if name.startswith("tools/")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {name.partition(".")[0] for name in names}
    own = {Path(name).stem for name in list_files(".py")} | set(sys.stdlib_module_names)
    pinned = re.findall(r"(?m)^([\w-]+)==", read_text("tools/requirements.txt"))
    assert imported - own - PACKAGES == {*pinned}
    assert "-r ../tools/requirements.txt" in read_text("tests/requirements.txt").splitlines()


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_readme_commands_are_one_complete_line(heading: str) -> None:
    section = read_text("README.md").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    [command] = re.search(r"```\w*\n(.*?)```", section, re.DOTALL).group(1).strip().splitlines()
    subprocess.run(["bash", "-n", "-c", command], check=True)
    assert command.startswith("python3 -m venv .venv && ") and "requirements.txt" in command
    for word in re.findall(r"[\w./]+\.(?:py|txt)", command):
        assert (ROOT / word).exists(), word


def test_every_path_in_a_readme_exists() -> None:
    missing = []
    for name in list_files("README.md"):
        named = set(
            re.findall(
                r"\b((?:data|tools|records|tests)/[\w./]+\.(?:py|md|txt))\b", read_text(name)
            )
        )
        folder = Path(name).parent
        missing += [
            f"{name}: {path}"
            for path in sorted(named)
            if not (ROOT / path).exists() and not (ROOT / folder / path).exists()
        ]
    assert missing == []


def test_ci_runs_the_readme_test_command_and_the_slow_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert "## Test it" in script.read_text() and "-m slow" in script.read_text()
    assert script.stat().st_mode & 0o111
