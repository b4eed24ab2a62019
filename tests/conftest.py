"""Fixtures of all tests: a small corpus with its tokenizer, and calls of a tool's main."""

import argparse
import ast
import configparser
import inspect
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import sentencepiece
from running import Call, Corpus, train_tokenizer, write_split


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Real text (modules of the standard library), a 300-piece tokenizer,
    three uneven train shards, one val shard."""
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
    return Corpus(folder / "data", tokenizer, train, val)


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
