"""tools/sample.py: the tokens equal those of a plain loop over `logits`, the model is that of the
given run, and errors are one line."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import cli
import pytest
import sample
import sentencepiece
import torch
from packed import packed_form
from running import (
    ROOT,
    SMALL_MODEL,
    TRAINER,
    Corpus,
    byte_data,
    make_config,
    run_script,
    train_gpt,
)

RUN = {**SMALL_MODEL, "ITERATIONS": 4, "VAL_LOSS_EVERY": 0, "RUN_ID": "r", "TRAIN_SEQ_LEN": 16}
RUN |= {"MATRIX_LR": 0.2, "TIED_EMBED_LR": 0.5, "TRAIN_BATCH_TOKENS": 1024, "VAL_TOKENS": 64}
Trained = tuple[Path, dict]
Sample = Callable[..., tuple[int, str, str]]


def as_printed(text: str) -> str:
    """Return a text that a model wrote as sample.py prints it."""
    return "\n".join(map(cli.printable, text.expandtabs().split("\n"))) + "\n"


def train(folder: Path, script: Path = TRAINER, **settings: object) -> Trained:
    run = run_script(script, folder, **{**RUN, **settings})
    assert run.code == 0, run.err
    artifact = folder / "logs" / "r.int8.ptz"
    if not artifact.exists():
        shutil.copy(folder / "final_model.int8.ptz", artifact)
    return folder, {**RUN, **settings}


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("bytes")
    return train(folder, **byte_data(folder / "data"))


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Return a function that runs sample.py in a folder and returns exit code, text and errors."""

    def run(folder: Path, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        code = cli.run(lambda: sample.main([str(word) for word in arguments]))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def plain_loop(run: Trained, tokens: list[int], length: int) -> list[int]:
    """Return the most likely tokens after the first one, computed with the trainer's own model."""
    folder, settings = run
    config = make_config(**settings)
    model = train_gpt.GPT(config, torch.float32)
    data = (folder / "logs" / "r.int8.ptz").read_bytes()
    model.load_state_dict(train_gpt.unpack(data, model.state_dict()))
    for _ in range(length):
        logits = model.logits(torch.tensor([tokens[-config.train_seq_len :]]))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    found = tokens[1:]
    return found[: found.index(1)] if 1 in found else found  # the model ends the document there


def test_greedy_text_is_that_of_a_plain_loop(byte_run: Trained, write: Sample) -> None:
    """The text is longer than a sequence. The label says the run, its score and its file."""
    prompt = "def é"
    tokens = plain_loop(byte_run, [1, *(byte + 4 for byte in prompt.encode())], 40)
    text = bytes(i - 4 for i in tokens if i >= 4).decode("utf-8", "replace")
    for log in ("logs/r.txt", "logs/r.jsonl"):
        options = (log, "--temperature", 0, "--length", 40, "--prompt", prompt)
        code, out, label = write(byte_run[0], *options)
        assert (code, out) == (0, as_printed(text)) and len(tokens) > 20
        assert label.startswith("run r, val_bpb ") and label.endswith(", logs/r.int8.ptz\n")


def test_pieces_become_text_also_with_a_packed_script(
    tmp_path: Path, corpus: Corpus, write: Sample
) -> None:
    script = tmp_path / "packed_form.py"
    script.write_bytes(packed_form((ROOT / "train_gpt.py").read_bytes()))
    run = train(tmp_path, script, **corpus.env, VOCAB_SIZE=300, NUM_LAYERS=3)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(corpus.tokenizer))
    tokens = plain_loop(run, [1, *pieces.encode("def ")], 30)
    options = ("logs/r.txt", "--temperature", 0, "--length", 30, "--prompt", "def ")
    code, out, _ = write(tmp_path, *options)
    assert code == 0 and out == as_printed(pieces.decode(tokens))
    assert out.startswith("def ") and len(out) > 10


def test_a_seed_repeats_its_text_and_another_seed_has_another_text(
    byte_run: Trained, write: Sample
) -> None:
    def text(seed: int) -> str:
        return write(byte_run[0], "--seed", seed, "--length", 30, "--temperature", 2)[1]

    assert text(1) == text(1) != text(2)


def test_only_the_50_most_likely_tokens_are_drawn() -> None:
    model = torch.nn.Linear(1, 1)  # its logits fall a little from token to token
    model.logits = lambda seen: -1e-3 * torch.arange(300.0).expand(1, seen.shape[1], 300)
    options = SimpleNamespace(seed=1, length=2000, temperature=1.0)
    config = SimpleNamespace(train_seq_len=8, vocab_size=300)
    assert {*sample.generate(model, [299], config, options)[1:]} == {*range(50)}


def test_without_a_log_the_newest_run_is_taken(
    byte_run: Trained, tmp_path: Path, write: Sample
) -> None:
    shutil.copytree(byte_run[0], tmp_path, dirs_exist_ok=True)
    for old in [*(tmp_path / "logs").iterdir()]:
        shutil.copy(old, old.with_name("newer" + old.name.removeprefix("r")))
    os.utime(tmp_path / "logs" / "newer.jsonl", (time.time() + 9,) * 2)
    assert "run newer, " in write(tmp_path)[2]


def damage(logs: Path) -> None:
    """Overwrite the artifact, and keep its length."""
    path = logs / "r.int8.ptz"
    path.write_bytes(b"x" * path.stat().st_size)


def nest(logs: Path) -> None:
    """Replace the tokenizer by one that Python cannot read, with a checksum that fits."""
    tokenizer = logs.parent / "deep.json"
    tokenizer.write_text("[" * 100_000)
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    text = re.sub(r'"tokenizer": "\w+"', f'"tokenizer": "{digest}"', (logs / "r.jsonl").read_text())
    text = re.sub(r'"tokenizer_path": "[^"]+"', f'"tokenizer_path": "{tokenizer}"', text)
    (logs / "r.jsonl").write_text(text)


# The given log, how the run is damaged, words of the error.
FAULTS = [
    ("logs/r.txt", nest, "deep.json is not a usable tokenizer; set TOKENIZER_PATH to"),
    (
        "logs/r.txt",
        lambda logs: (logs / "r.int8.ptz").unlink(),
        "r.int8.ptz: No such file or directory; give another file or folder",
    ),
    (
        "logs/r.txt",
        lambda logs: (logs / "r.int8.ptz").write_bytes(b"other"),
        "logs/r.int8.ptz has 5 bytes, but the run's artifact has ",
    ),
    ("logs", damage, "logs/r.txt: its script cannot build the model from logs/r.int8.ptz: "),
]


@pytest.mark.parametrize(("given", "change", "words"), FAULTS)
def test_an_error_is_one_line(
    byte_run: Trained, tmp_path: Path, write: Sample, given: str, change: Callable, words: str
) -> None:
    shutil.copytree(byte_run[0], tmp_path, dirs_exist_ok=True)
    change(tmp_path / "logs")
    code, out, error = write(tmp_path, *given.split())
    assert (code, out, error.count("\n")) == (1, "", 1) and error.startswith("error: ")
    assert words in error
