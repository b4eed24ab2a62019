"""Text from a trained model: the tokens are those of a plain loop over `logits`, the model is that
of the script that trained it, and what is wrong is one line."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    SMALL_MODEL,
    Corpus,
    Finished,
    byte_data,
    config_of,
    run_trainer,
    train_gpt,
)

sys.path.insert(0, str(ROOT / "logs"))
import sample  # noqa: E402  (rooms are folders of scripts, not packages)

pytestmark = pytest.mark.timeout(200)
RUN = {**SMALL_MODEL, "ITERATIONS": 4, "VAL_LOSS_EVERY": 0, "RUN_ID": "r", "TRAIN_SEQ_LEN": 16}
RUN |= {"MATRIX_LR": 0.2, "TIED_EMBED_LR": 0.5, "TRAIN_BATCH_TOKENS": 1024, "VAL_TOKENS": 64}
Sample = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict]:
    folder = tmp_path_factory.mktemp("bytes")
    settings = {**RUN, **byte_data(folder / "data"), "CHECKPOINT_EVERY": 2}
    made_with = hashlib.sha256((folder / "data" / "byte.json").read_bytes()).hexdigest()
    (folder / "data" / "tokenizer.sha256").write_text(f"{made_with}  byte.json\n")
    run = run_trainer(folder, **settings)
    assert run.code == 0, run.err
    return run, settings


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> tuple[Finished, dict]:
    settings = {**RUN, **corpus.env, "VOCAB_SIZE": 300, "NUM_LAYERS": 3}
    run = run_trainer(tmp_path_factory.mktemp("text"), **settings)
    assert run.code == 0, run.err
    return run, settings


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Runs sample.py in a folder: exit code, text, error."""

    def run(folder: Path, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        code = sample.main([str(word) for word in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def plain_loop(settings: dict, weights: dict, tokens: list[int], length: int) -> list[int]:
    """The most likely tokens, by the trainer's own model."""
    config = config_of(**settings)
    model = train_gpt.GPT(config, torch.float32)
    model.load_state_dict(weights)
    for _ in range(length):
        logits = model.logits(torch.tensor([tokens[-config.train_seq_len :]]))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens


def unpacked(run: Finished, settings: dict) -> dict:
    expected = train_gpt.GPT(config_of(**settings), torch.float32).state_dict()
    return train_gpt.unpack((run.folder / "final_model.int8.ptz").read_bytes(), expected)


def test_greedy_text_is_that_of_a_plain_loop(
    byte_run: tuple[Finished, dict], write: Sample
) -> None:
    """Longer than a row; of the artifact, and of a checkpoint with weights of its own."""
    run, settings = byte_run
    prompt = "def é"
    begin = [1, *(byte + 4 for byte in prompt.encode())]
    state = torch.load(run.folder / "checkpoints/r/step_00000002.pt", weights_only=True)
    weights = state["model"] if "model" in state else state["held"]["model"]
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.values():
        tensor.normal_(generator=generator)
    torch.save(state, run.folder / "checkpoints/r/step_00000009.pt")
    files = {
        "final_model.int8.ptz": unpacked(run, settings),
        "checkpoints/r/step_00000009.pt": weights,
    }
    texts = []
    for file, expected_weights in files.items():
        expected = plain_loop(settings, expected_weights, begin, 40)[1:]
        if 1 in expected:  # the model ends the document there
            expected = expected[: expected.index(1)]
        text = bytes(i - 4 for i in expected if i >= 4).decode("utf-8", "replace")
        options = ["--file", file, "--temperature", 0, "--length", 40, "--prompt", prompt]
        said = f"{file}: the model of logs/r.txt\n" if file.endswith(".ptz") else ""
        assert write(run.folder, *options) == (0, sample.printable(text) + "\n", said)
        texts.append(text)
        assert len(expected) > 20
    assert texts[0] != texts[1]


def test_a_model_sees_the_last_row_and_ends_with_the_document() -> None:
    """As a model would tell that draws what it sees: the next token is a sum over its tokens."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            chosen = (7 * tokens.sum() + len(tokens[0])) % 50
            return torch.nn.functional.one_hot(chosen.expand(tokens.shape), 50).float()

    options = SimpleNamespace(temperature=0, top_k=0, seed=1, length=30)
    expected = [1, 20, 21]
    for _ in range(30):
        seen = expected[-8:]
        expected.append((7 * sum(seen) + len(seen)) % 50)
    assert sample.write(Model(), [1, 20, 21], 8, -1, options) == expected
    end = expected[12]
    cut = expected.index(end, 3)
    assert sample.write(Model(), [1, 20, 21], 8, end, options) == expected[:cut]


def test_pieces_become_text(text_run: tuple[Finished, dict], corpus: Corpus, write: Sample) -> None:
    run, settings = text_run
    tokenizer = sample.Tokenizer(corpus.tokenizer)
    begin = tokenizer.encode("def ")
    expected = plain_loop(settings, unpacked(run, settings), begin, 30)[1:]
    expected = expected[: expected.index(1)] if 1 in expected else expected
    code, text, _ = write(run.folder, "--temperature", 0, "--length", 30, "--prompt", "def ")
    assert code == 0 and text == sample.printable(tokenizer.decode(expected)) + "\n"
    assert text.startswith("def ") and len(text) > 10


def test_a_seed_gives_its_text_again(byte_run: tuple[Finished, dict], write: Sample) -> None:
    run, _ = byte_run

    def text(*options: object) -> str:
        code, out, _ = write(run.folder, "--prompt", "x", *options)
        assert code == 0
        return out

    assert text("--seed", 7) == text("--seed", 7) != text("--seed", 8)
    assert text("--top-k", 1) == text("--temperature", 0) != text("--top-k", 0)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int) -> torch.Tensor:
        drawn = [sample.draw(logits, temperature, top_k, generator) for _ in range(4000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 4000

    for temperature in (0.5, 2.0):
        expected = (logits / temperature).softmax(-1)
        assert torch.allclose(shares(temperature, 0), expected, atol=0.03)
    assert shares(1.0, 2)[:2].tolist() == [0, 0] and (shares(1.0, 2)[2:] > 0.2).all()


@pytest.mark.slow
def test_an_edited_model_speaks(tmp_path: Path, write: Sample) -> None:
    """The script is that of the log, so its model may be another one; --script names one."""
    text = (ROOT / "train_gpt.py").read_text().replace("skip_weights", "other_weights")
    (tmp_path / "edited.py").write_text(text)
    settings = {**RUN, **byte_data(tmp_path / "data"), "CHECKPOINT_EVERY": 4}
    run = run_trainer(tmp_path, script=tmp_path / "edited.py", **settings)
    assert run.code == 0, run.err
    spoken = write(tmp_path, "--prompt", "x")
    assert spoken[0] == 0 and len(spoken[1]) > 3
    assert write(tmp_path, "--prompt", "x", "--script", tmp_path / "edited.py") == spoken
    code, _, error = write(tmp_path, "--script", ROOT / "train_gpt.py")
    assert code == 1 and error.count("\n") == 1 and "does not fit the script" in error
    assert error.endswith("name another --script\n")


FAULTS = {
    "no file": (["--file", "nowhere.ptz"], "nowhere.ptz: no such file"),
    "no log": (["--file", "of_another_run.ptz"], "name it with --log logs/<RUN_ID>.txt"),
    "a pipe": (["--file", "pipe.pt"], "pipe.pt: not a regular file"),
    "garbage": (["--file", "garbage.pt"], "garbage.pt: not a checkpoint"),
    "no model": (["--script", "empty.py"], "empty.py: has no read_config"),
    "a broken script": (["--script", "broken.py"], "broken.py: cannot be run: ValueError: a b"),
    "no tokenizer": (["--tokenizer", "garbage.pt"], "garbage.pt: not a tokenizer"),
    "another one": (["--tokenizer", "large.json"], "456 tokens, the model 260"),
    "of other shards": (["--tokenizer", "same_size.json"], "sha256 names another tokenizer"),
    "a folder": (["--file", "checkpoints/r"], "such as checkpoints/r/step_0000000"),
    "weights alone": (["--file", "final_model.pt"], "alone: --file final_model.int8.ptz has them"),
    "a log as a model": (["--file", "logs/r.txt"], "logs/r.txt: a log, no model"),
    "no such log": (["--log", "logs/x.txt"], "logs/x.txt: no such log"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_is_wrong_is_one_line(
    byte_run: tuple[Finished, dict], tmp_path: Path, write: Sample, case: str
) -> None:
    arguments, words = FAULTS[case]
    shutil.copytree(byte_run[0].folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "of_another_run.ptz").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ValueError('a\\n\\x1bb')")
    (tmp_path / "large.json").write_text('{"kind": "byte", "offset": 200}')
    (tmp_path / "same_size.json").write_text('{"kind":"byte","offset":4}')
    code, out, error = write(tmp_path, *arguments, "--prompt", "x")
    assert (
        (code, out) == (1, "")
        and error.startswith("error: ")
        and words in error.replace("\\x1b", "")
    )
    assert error.count("\n") == 1 and "\x1b" not in error


def test_the_newest_run_that_wrote_the_artifact_is_meant(
    byte_run: tuple[Finished, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(byte_run[0].folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs" / "newer.jsonl").write_text(json.dumps({"artifact_bytes": 1}) + '\n{"cut')
    assert sample.log_of(Path("final_model.int8.ptz")) == Path("logs/r.txt")


def test_an_artifact_with_the_log_of_another_run_is_refused(
    byte_run: tuple[Finished, dict], tmp_path: Path, write: Sample
) -> None:
    """It would be read with another run's script and settings."""
    shutil.copytree(byte_run[0].folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "logs" / "other.jsonl").write_text(json.dumps({"artifact_bytes": 1}))
    code, out, error = write(tmp_path, "--log", "logs/other.txt", "--prompt", "x")
    assert (code, out) == (1, "") and "logs/other.txt wrote 1: name its own log" in error
    assert write(tmp_path, "--log", "logs/r.txt", "--prompt", "x", "--length", "3")[0] == 0


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert sample.printable("a\x1b[2J\tb\n\x9b\u202e") == "a\\x1b[2J\tb\n\\x9b\\u202e"


def test_a_missing_package_is_one_line_with_the_command_that_brings_it() -> None:
    command = [sys.executable, "-S", str(ROOT / "logs" / "sample.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: sentencepiece is missing: run ")
    assert done.stderr.endswith(f"-m pip install -r {ROOT}/requirements.txt\n")
