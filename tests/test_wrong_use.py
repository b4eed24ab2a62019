"""Wrong use of each program, as users meet it: one line with the remedy, an exit code, no files."""

import re
import sys
from pathlib import Path

import cli
import pytest
from running import ROOT, run_script

# Program and arguments, exit code, words of the line.
ROWS = """
data/quickstart.py --script none.py | 2 | --script none.py: there is no such file
data/quickstart.py DATA_PATH=novel.txt | 2 | novel.txt --name mine makes shards of text
data/quickstart.py DATA_PATH= | 2 | tokenize_docs.py FILE_OR_FOLDER --name mine
data/quickstart.py DATA_PATH=sets | 2 | DATA_PATH=sets: set a folder in it, such as sets/mine
data/quickstart.py --script cli.py DATA_PATH=sets/mine TOKENIZER_PATH=byte.json | 2 | wrote no logs/
data/quickstart.py --steps 5 | 2 | unrecognized arguments: --steps: --help lists
data/cached_challenge_fineweb.py --train-shards -1 | 2 | -1: write a whole number from 0 on
data/audit.py --data docs.jsonl --tokenizer x.model | 2 | x.model: not a usable tokenizer
data/audit.py --data novel.txt --tokenizer byte.json | 2 | give a data set's folder
data/tokenize_docs.py none.txt | 2 | no such file: name text files
data/tokenize_docs.py novel.txt ./novel.txt | 2 | named twice
data/tokenize_docs.py latin.txt novel.txt --bytes | 2 | iconv -f WINDOWS-1252 -t UTF-8
data/tokenize_docs.py utf16.txt --bytes | 2 | utf16.txt: UTF-16? Run iconv -f UTF-16LE
data/tokenize_docs.py a.png novel.txt --bytes | 2 | a binary file, no text; name text files
data/cached_challenge_fineweb.py 5 --train-shards 3 | 2 | 5 shards: give one number
data/tokenize_docs.py docs.jsonl --bytes | 2 | docs.jsonl:31: not an object
data/tokenize_docs.py half.jsonl --bytes | 2 | half.jsonl:1: not an object
data/tokenize_docs.py keys.jsonl --bytes | 2 | it has id, content, and no "text"
data/tokenize_docs.py novel.txt --bytes --vocab-size 512 | 2 | --vocab-size: not allowed with arg
data/tokenize_docs.py novel.txt --model byte.json | 2 | a byte tokenizer; give --bytes
data/tokenize_docs.py novel.txt --bytes --num-val-docs 9 | 2 | set --num-val-docs 1
data/tokenize_docs.py none.txt --vocab-size 260 | 2 | 260: write a whole number from 261 to 65536
data/tokenize_docs.py novel.txt --vocab-size 9000 | 2 | or less, or give more text
data/tokenize_docs.py novel.txt --model novel.txt | 2 | no SentencePiece model
tools/compare.py | 2 | name logs, such as logs/*.txt
tools/compare.py --a x | 2 | belong together
tools/compare.py x,y | 2 | x,y: no such file: separate logs by blanks
tools/compare.py x --plto y.png | 2 | unrecognized arguments: --plto y.png: --help lists
tools/compare.py x --plot y.pdf | 2 | --plot y.pdf: name a file that ends in .png or .svg
tools/compare.py x --margin nan | 2 | nan: write a number from 0 on, such as 0.5
tools/compare.py x --margin 0.1 | 2 | --margin does nothing without --a
tools/compare.py none.log | 1 | error: none.log: cannot be read: No such file or directory
tools/ablate.py | 2 | name the command after --
tools/ablate.py -- python3 x.py | 2 | nothing varies: name two values
tools/ablate.py --vary MLP_MULT=2,4 -- pyton3 x.py | 2 | pyton3: no such program
tools/timeline.py none.json.gz | 1 | error: none.json.gz: No such file or directory
tools/timeline.py novel.txt | 1 | novel.txt: damaged or no trace
tools/timeline.py novel.txt --picture p.pdf | 2 | p.pdf: must end in .svg or .png
tools/sample.py | 1 | logs: no such file: train first, or name a log
tools/sample.py logs/none.jsonl | 1 | logs/none.jsonl: no such file
tools/sample.py --prompt {latin} | 2 | --prompt: not UTF-8: write it in UTF-8
tools/recipe.py apply --stack a --to x.py --stack b | 2 | --stack is given twice
tools/verify.py none.py | 1 | none.py: no file of this name
tools/verify.py broken.py | 1 | broken.py: no class Trainer
tools/verify.py novel.txt | 1 | a script of Python is expected
tools/verify.py {root}/tools/cli.py | 1 | cli.py: no class Trainer
tools/ablate.py --vary MLP_MULT 2,4 -- python3 x.py | 2 | 2,4: values are one word, with commas
tools/verify.py train_gpt.py --EMA_DECAY=0.9 | 2 | settings are NAME=value without dashes
tools/recipe.py apply sp8192 --to x.py | 1 | it is a stack: --stack sp8192
tools/package.py --pack novel.txt --name x | 2 | --pack stands alone
tools/verify.py train_gpt.py ITERATIONS | 2 | ITERATIONS: settings are NAME=value
tools/verify.py {root}/train_gpt.py MUON_BETA=1 | 1 | train_gpt.py has no such setting
tools/verify.py {root}/train_gpt.py VAL_TOKENS=99 | 1 | VAL_TOKENS cannot be given
tools/verify.py MLP_MULT=2 train_gpt.py | 2 | settings are NAME=value, each once, after the script
tools/verify.py train_gpt.py MLP_MULT=2 MLP_MULT=3 | 2 | NAME=value, each once
tools/recipe.py apply ema --to x.py --set muon_wd=1 | 2 | write NAME=VALUE with a name in capital le
tools/recipe.py apply emma --to x.py | 1 | {root}/records/recipes: did you mean ema?
tools/recipe.py apply ema --to novel.txt | 1 | --to novel.txt: a script of Python is expected
tools/recipe.py apply ema --to random.py | 1 | random is the name of a module that a trainer imports
tools/recipe.py new ema2 --from broken.py | 1 | broken.py: not an edited copy of train_gpt.py
tools/package.py | 2 | no log is named: name logs/<RUN_ID>.txt of each seed
tools/package.py logs/none.txt --track track_10min_16mb | 2 | needed: --name, --author, --github-id
tools/package.py --pack broken.py | 1 | does not compile it: line 1
tools/check.py . --track 10min | 2 | invalid choice: '10min'
tools/check.py none | 2 | no such folder: name the folder of a record
tools/check.py {root}/records/track_non_record_16mb | 2 | holds records: name one of its folders
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user works."""
    (tmp_path / "novel.txt").write_text("word " * 5000 + "\n\n" + "text " * 3000)
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9")
    (tmp_path / "docs.jsonl").write_text('{"text": "good"}\n' * 30 + "{text: 1}\n")
    (tmp_path / "keys.jsonl").write_text('{"id": 1, "content": "x"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud83d"}\n')
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "utf16.txt").write_bytes("word\n\n".encode("utf-16-le") * 500)
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    (tmp_path / "sets" / "mine" / "fineweb_train_000000.bin").touch()
    (tmp_path / "cli.py").write_text("no = 'trainer'")
    (tmp_path / "byte.json").write_text('{"kind": "byte", "offset": 4}')
    return tmp_path


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_wrong_use_is_one_line(folder: Path, row: str) -> None:
    command, code, words = (
        row.replace("{root}", str(ROOT)).replace("{latin}", "\udce9").split(" | ")
    )
    program, *arguments = command.split()
    arguments += ["--out", "made"] if "tokenize_docs" in program else []
    before = {*folder.rglob("*")}
    done = run_script(ROOT / program, folder, *arguments)
    assert done.code == int(code), done.err
    assert done.out == "" or re.search("tokenize_docs|--script cli", row), "its progress"
    assert words in done.err and done.err.count("\n") == 1, done.err
    made = {*folder.rglob("*")} - before
    assert not any(path.suffix in (".bin", ".txt", ".jsonl") for path in made)


def test_missing_packages_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the file that lists them, and with the environment of the README if that is not used."""
    gone = {"scipy", "pandas", "torch"}
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in gone else name)
    monkeypatch.setattr(cli, "OWN", ROOT / "README.md")
    monkeypatch.setattr(cli, "VENV", Path(sys.prefix))
    trainer, tools = f"-r {ROOT}/requirements.txt", f"-r {ROOT}/tools/requirements.txt"
    for program, package, words in (
        ("data/quickstart.py", "torch", f"torch is missing: run {sys.executable} -m pip install "),
        ("data/quickstart.py", "scipy.stats", f"pandas, scipy are missing: run {sys.executable} -"),
        ("tools/verify.py", "torch", "torch, pandas, scipy are missing: run "),
    ):
        monkeypatch.setattr(cli.sys, "argv", [str(ROOT / program)])
        assert cli.missing(package).startswith(words)
    assert cli.missing("torch").endswith(f" install {trainer} {tools}")
    monkeypatch.setattr(cli, "VENV", ROOT)
    assert f": run it with {cli.OWN}, or {sys.executable}" in cli.missing("torch")
