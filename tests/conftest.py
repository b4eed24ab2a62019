"""Fixtures of all tests: a small corpus with its tokenizer, a short run, calls of a tool's main."""

import argparse
import ast
import configparser
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from faults.live import Live
from running import SMALL_MODEL, Call, Corpus, byte_data, train_tokenizer, write_split

SHORT = {"ITERATIONS": 20, "VAL_LOSS_EVERY": 10, "RUN_ID": "r", "CHECKPOINT_EVERY": 4}
SHORT |= {"CHECKPOINT_KEEP": 9, "VAL_BATCH_SIZE": 1024}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Real text, a tokenizer of 300 pieces, three uneven train shards, one val shard."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [
        line
        for module in (argparse, ast, configparser, shutil)
        for line in inspect.getsource(module).lower().splitlines()
        if line.strip()
    ]
    tokenizer = train_tokenizer(
        folder / "spm.model", lines, vocab_size=300, character_coverage=0.98
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = ["\n".join(lines[i : i + 20]) for i in range(0, len(lines), 20)]
    ids = [[1, *model.encode(document)] for document in documents]
    val_count = len(ids) // 10
    val = np.concatenate(ids[:val_count])
    train = np.concatenate(ids[val_count:])
    write_split(folder / "data", "val", val, [])
    write_split(folder / "data", "train", train, [len(train) // 5, len(train) // 3])
    return Corpus(folder / "data", tokenizer, val)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """20 steps with a checkpoint every 4, validated before, in the middle and at the end."""
    folder = tmp_path_factory.mktemp("faults") / "data"
    return {**SMALL_MODEL, **byte_data(folder, train_tokens=50_000, val_tokens=2000), **SHORT}


@pytest.fixture(scope="session")
def whole(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Live]:
    """The run without a fault, on so many ranks."""
    done: dict[int, Live] = {}

    def run(ranks: int) -> Live:
        if ranks not in done:
            folder: Path = tmp_path_factory.mktemp(f"whole_{ranks}")
            done[ranks] = Live(folder, ranks, **data).finish()
        return done[ranks]

    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """A tool's main, called with arguments: its exit code, what it printed, its errors."""

    def run(main: Callable[..., int], *arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
