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
    """Make a corpus of real text: a tokenizer of 300 tokens, three train shards, one val shard."""
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
    """Make data; return settings of 20 steps, a checkpoint every 4, a validation every 10."""
    folder = tmp_path_factory.mktemp("faults") / "data"
    return {**SMALL_MODEL, **byte_data(folder, train_tokens=50_000, val_tokens=2000), **SHORT}


@pytest.fixture(scope="session")
def reference_run(data: dict, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Live]:
    """Return a function that gives the undisturbed run on so many ranks, made only once."""
    done: dict[int, Live] = {}

    def run(ranks: int) -> Live:
        if ranks not in done:
            folder: Path = tmp_path_factory.mktemp(f"reference_{ranks}")
            done[ranks] = Live(folder, ranks, **data).finish()
        return done[ranks]

    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that calls a tool's main and gives (exit code, output, errors)."""

    def run(main: Callable[..., int], *arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
