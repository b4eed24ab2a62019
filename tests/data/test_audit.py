"""Tests of audit.py: it proves a correct count and reports each mistake.

The SentencePiece models are trained in a fixture.
"""

import json
import math
import os
import random
import re
import shutil
from pathlib import Path

import audit
import dataset
import numpy as np
import pytest
import sentencepiece
import tokenize_docs
from cli import ToolError
from running import SMALL_MODEL, TRAINER, call_tool, run_script, train_tokenizer, write_split

SPACE, BOS = "\u2581", 1
TEXT = (
    "the count of bytes in each piece is what a score rests on so it must be right for plain words "
    "and for naïve cafés, Größe, 12 345 tests; (brackets) too: «quotes» and dashes"
)
RARE = ["日本", "😀", "\u2581bar\u2581", "ﬁ", "\ufffd", "a\nb\tc", "\u00a0x\u3000", "  two"]
VARIANTS = {
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "identity": {},
    "no_byte_fallback": {"byte_fallback": False},
}
VARIANTS["dummy_prefix"] = VARIANTS["nmt_nfkc"] | {"add_dummy_prefix": True}
MARKS = ["\ue001", "\ue002", "\ue003", "\ue004"]
VARIANTS["caseops"] = VARIANTS["nmt_nfkc"] | {"user_defined_symbols": MARKS}


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return documents of 3 to 30 words, some of them rare."""
    choice = random.Random(seed)
    return [
        " ".join(
            choice.choice(TEXT.split() if choice.random() < 0.85 else RARE)
            for _ in range(choice.randint(3, 30))
        )
        for _ in range(count)
    ]


# No model was trained on the last character, so it becomes 4 byte tokens.
DOCUMENTS = [" begins with a space", "", *make_documents(25), "ends in an emoji 🦊"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    sentences = make_documents(300, seed=7) + ["    indented    text        here"] * 40
    models = {"byte": folder / "byte.json"}
    models["byte"].write_text('{"config": {"byte_offset": 4}}')  # as the challenge's tool writes it
    for name, variant in VARIANTS.items():
        path = folder / f"{name}.model"
        models[name] = train_tokenizer(path, sentences, character_coverage=0.98, **variant)
    return models


def encode(model: Path, text: str) -> list[int]:
    """Return BOS and the tokens of a text."""
    if model.suffix == ".json":
        return [BOS, *(value + 4 for value in text.encode())]
    return [BOS, *sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(text)]


class DataSet:
    """A data set in a folder, made by the test with a tokenizer, and its audit.

    `ids` are the tokens of each document. A test changes them and calls `write`.
    """

    def __init__(self, folder: Path, model: Path, documents: list[str]) -> None:
        self.folder, self.model, self.documents = folder, model, documents
        self.ids = [encode(model, text) for text in documents]
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        self.docs = folder / "docs.jsonl"
        self.docs.write_text("".join(lines))
        self.write()

    def write(self) -> None:
        """Write the tokens as three validation shards."""
        tokens = np.array([token for ids in self.ids for token in ids], dtype=np.uint16)
        write_split(self.folder, "val", tokens, [len(tokens) // 3, len(tokens) // 2])

    def audit(self, *more: object, docs: bool = True, seq_len: int = 1) -> tuple[int, str]:
        """Run audit.py in this process; return (exit code, what it printed)."""
        words = ["--tokenizer", self.model, "--data", self.folder, "--seq-len", seq_len, *more]
        words += ["--docs", self.docs] if docs else []
        code, output = call_tool(audit.main, *words)
        last_line = output.splitlines()[-1]
        assert last_line.startswith({0: "proved", 1: "mistake", 3: "not proved"}[code])
        return code, output


@pytest.fixture
def make_set(tmp_path: Path, models: dict[str, Path]):
    """Return a function that makes a DataSet with the tokenizer of a name."""
    return lambda name, documents=DOCUMENTS: DataSet(tmp_path / name, models[name], documents)


def read_number(output: str, label: str = "counted") -> int:
    """Return the number after a label at the beginning of a line of the output."""
    return int(re.search(rf"^{label} +([\d,]+)", output, re.MULTILINE)[1].replace(",", ""))


@pytest.mark.parametrize("name", ["nmt_nfkc", "identity", "dummy_prefix", "byte"])
def test_a_correct_split_is_proved(make_set, name: str) -> None:
    data = make_set(name)
    code, output = data.audit()
    assert code == 0, output
    assert f"those of the text of all {len(DOCUMENTS)} documents" in output
    if name == "identity":  # all bytes are counted, except those of a space after BOS
        texts = [text.replace(SPACE, " ") for text in DOCUMENTS]
        after_bos = sum(text.startswith(" ") for text in texts)
        assert read_number(output) == sum(len(text.encode()) for text in texts) - after_bos
        assert f"{after_bos} spaces after BOS are not counted" in output and after_bos
    assert data.audit(docs=False)[0] == 3


def test_the_last_line_says_what_the_normaliser_changed(make_set) -> None:
    documents = ["plain", "ﬁ ligature", "  two  spaces", "\u2581 mark"]
    output = make_set("nmt_nfkc", documents).audit()[1]
    assert "normaliser changed 3 of the documents: " in output
    assert " have 38 bytes as written, and 30 bytes after the change" in output
    assert read_number(output) == len("plainfi ligaturetwo spacesmark")
    assert "changed 1 of the documents" in make_set("identity", documents).audit()[1]  # U+2581


@pytest.mark.parametrize("name", ["identity", "byte"])
def test_the_trainer_counts_the_same_bytes(make_set, tmp_path: Path, name: str) -> None:
    """The trainer's bytes follow from its score: val_bpb / val_loss = tokens / bytes / ln 2."""
    data = make_set(name, DOCUMENTS * 3)
    write_split(data.folder, "train", np.full(5000, BOS), [])
    vocab_size = 260 if name == "byte" else audit.Tokenizer(data.model).vocab_size
    settings = {**SMALL_MODEL, "ITERATIONS": 1, "RUN_ID": "r", "VOCAB_SIZE": vocab_size}
    settings |= {"DATA_PATH": data.folder, "TOKENIZER_PATH": data.model, "TRAIN_SEQ_LEN": 16}
    done = run_script(TRAINER, tmp_path / "run", **settings)
    assert done.code == 0, done.err
    [score] = done.events("score")
    code, output = data.audit(seq_len=16)
    assert code == 0
    wanted = read_number(output, "scored") * score["val_loss"] / math.log(2) / score["val_bpb"]
    assert read_number(output) == pytest.approx(wanted, rel=1e-9)


SPLIT_MISTAKES = {  # name: (a change of the documents' tokens, pattern of the output)
    "no BOS": (
        lambda ids: ids[3].pop(0),
        "document 3: its text goes on after the end of the original; a BOS is missing",
    ),
    "no tail": (
        lambda ids: ids[-1].__delitem__(slice(5, None)),
        r"document 28: its text ends \d+ characters too early",
    ),
    "half a character": (
        lambda ids: ids[-1].pop(),
        r"document 28: \d+ bytes are counted, .* do not form a character",
    ),
    "foreign id": (
        lambda ids: ids[5].__setitem__(2, 50_000),
        "document 6: id 50000 is not in the vocabulary",
    ),
    "another word": (
        lambda ids: ids[6].__setitem__(slice(1, 3), ids[7][1:3]),
        r"document 7: after \d characters its text is",
    ),
}


@pytest.mark.parametrize("name", ["identity", "byte"])
@pytest.mark.parametrize("mistake", SPLIT_MISTAKES)
def test_a_mistake_in_a_split_is_reported(make_set, name: str, mistake: str) -> None:
    data, (make, words) = make_set(name), SPLIT_MISTAKES[mistake]
    make(data.ids)
    data.write()
    code, output = data.audit()
    assert code == 1 and re.search(words, output), output


def test_a_tokenizer_that_loses_text_is_reported(make_set) -> None:
    code, output = make_set("no_byte_fallback", ["some words, " * 9 + "日本"]).audit(docs=False)
    assert code == 1 and "stands for text that is lost" in output, output
    few, right = map(
        int, re.search(r"(\d+) bytes are counted, but its text has (\d+)", output).groups()
    )
    assert (
        few < right and f"the true val_bpb is {few / right:.4f} times the counted val_bpb" in output
    )


def test_another_tokenizer_is_reported(make_set, models: dict[str, Path]) -> None:
    """It is noticed from the documents, or without them from tokenizer.sha256."""
    data = make_set("identity")
    dataset.record_tokenizer(data.folder, data.model)
    assert data.audit(docs=False)[0] == 3
    data.model = models["dummy_prefix"]
    code, output = data.audit(docs=False)
    assert code == 1 and f"give --tokenizer {models['identity']}" in output
    (data.folder / "tokenizer.sha256").unlink()
    assert data.audit(docs=False)[0] == 3
    assert data.audit()[0] == 1


@pytest.mark.parametrize("block", [5, 1 << 20])
@pytest.mark.parametrize("name", ["identity", "byte"])
def test_ten_leaked_documents_are_reported(make_set, name: str, block: int, monkeypatch) -> None:
    """Some of them continue in the next block or shard. A document of BOS alone is not reported."""
    monkeypatch.setattr(audit, "BLOCK_TOKENS", block)
    data = make_set(name)
    others = [encode(data.model, text) for text in ["", *make_documents(100, seed=9)]]
    train = [*others[:50], *data.ids[3:12], *others[50:], data.ids[12]]
    first, size = sum(map(len, others[:50])), len(data.ids[3])
    write_split(data.folder, "train", np.concatenate(train), [first, size + 5])
    for docs in (True, False):
        code, output = data.audit(docs=docs)
        assert code == 1 and "proved" not in output, output
        assert "10 of 28 validation documents (35.71%) are also in the training shards" in output
        assert "the first is document 4, in fineweb_train_000001.bin" in output
    code, output = data.audit("--train-shards", 1)
    assert code == 0 and "none of the documents is in the first 1 of 3 training shards" in output, (
        output
    )
    write_split(data.folder, "train", np.concatenate(others), [first, 9])
    assert "; none of the documents is in the 3 training shards" in data.audit()[1]


@pytest.mark.parametrize("block", [5, 1 << 20])
def test_a_training_token_outside_the_vocabulary_is_a_mistake(
    make_set, block: int, monkeypatch
) -> None:
    """It is found in any training shard that is read, and its place is printed."""
    monkeypatch.setattr(audit, "BLOCK_TOKENS", block)
    data = make_set("byte")
    tokens = np.full(40, 9)
    tokens[::7] = BOS
    write_split(data.folder, "train", tokens, [17])
    assert data.audit()[1].endswith("training shards, whose tokens are all in the vocabulary\n")
    tokens[[16, 20]] = 260, 65535
    write_split(data.folder, "train", tokens, [17])
    for docs in (True, False):
        code, output = data.audit(docs=docs)
        found = [line.split("bin: ")[1] for line in output.splitlines() if "among the" in line]
        assert code == 1 and [line.split("; the shard")[0] for line in found] == [
            f"tokens that are not among the 260 ids of the tokenizer: 1, the first is id {place}"
            for place in ("260 at token 16", "65535 at token 3")
        ]
    assert data.audit("--train-shards", 0)[0] == 0


@pytest.fixture
def exported_set(make_set, tmp_path: Path):
    """Return a data set of bytes, made by tokenize_docs.py, with several shards of each split."""
    data = make_set("byte", [text * 200 for text in make_documents(40, seed=3)])
    words = [data.docs, "--bytes", "--name", "made", "--out", tmp_path, "--shard-tokens", 70_000]
    options = tokenize_docs.parse_arguments([str(word) for word in words])
    data.folder, data.model = tokenize_docs.make_data_set(options)[0]
    return data


def change_middle_byte(path: Path) -> None:
    """Change a byte that the shard's identity does not cover: it covers 64 KiB at each end."""
    before = dataset.describe_shard(path)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"?")
    assert dataset.describe_shard(path)["identity"] == before["identity"]


SHARD_MISTAKES = {
    "missing": (Path.unlink, "{}: is missing"),
    "one byte": (change_middle_byte, "{}: its content differs from export.json"),
    "a folder": (
        lambda path: (path.unlink(), path.mkdir()),
        r"{}: cannot be read \(Is a directory",
    ),
    "cut": (
        lambda path: os.truncate(path, 1500),
        r"{}: is truncated or not a shard \(1,500 bytes\)",
    ),
    "another": (
        lambda path: shutil.copy(path, path.with_name("fineweb_train_000099.bin")),
        "fineweb_train_000099.bin: is not listed in export.json",
    ),
}


@pytest.mark.parametrize("split", ["val", "train"])
@pytest.mark.parametrize("mistake", SHARD_MISTAKES)
def test_a_shard_that_differs_from_export_json_is_reported(
    exported_set, split: str, mistake: str
) -> None:
    """This does not need --docs. Only the last shard is removed, so that no number is left out."""
    make, words = SHARD_MISTAKES[mistake]
    path = sorted(exported_set.folder.glob(f"fineweb_{split}_*.bin"))[
        -1 if mistake == "missing" else 0
    ]
    make(path)
    code, output = exported_set.audit(docs=False)
    assert code == 1 and re.search(words.format(path.name), output), output
    assert "mistake: 1 found" in output


def test_a_data_set_of_one_document_is_proved(exported_set, tmp_path: Path) -> None:
    exported_set.docs = tmp_path / "novel.txt"
    exported_set.docs.write_text("\n\n".join(make_documents(40, seed=3)))
    words = [exported_set.docs, "--one-document", "--bytes", "--name", "one", "--out", tmp_path]
    options = tokenize_docs.parse_arguments([str(word) for word in words])
    exported_set.folder, exported_set.model = tokenize_docs.make_data_set(options)[0]
    assert (
        "proved: the counted bytes are those of the text of all 1 documents"
        in exported_set.audit()[1]
    )


def test_shards_are_compared_with_export_json(exported_set) -> None:
    code, output = exported_set.audit(docs=False)
    assert code == 3 and re.search(
        r"^shards +\d+ shards were compared with export.json$", output, re.M
    ), output
    path = exported_set.folder / "export.json"
    for damage in ("", "[]", '{"shards": {"val": {"a": 1}, "train": {}}, "complete": true}'):
        path.write_text(damage)
        with pytest.raises(
            ToolError, match="export.json: is damaged .* restore it, or make the data set"
        ):
            exported_set.audit()


def encode_case(text: str) -> str:
    """Return a text in lower case, with the four marks of CaseOps."""
    text = re.sub("[\ue001-\ue004]", lambda found: "\ue004" + found[0], text)

    def mark(found: re.Match) -> str:
        word = found[0]
        if word[1:].islower() or len(word) == 1:
            return word if word.islower() else "\ue001" + word.lower()
        if word.isupper():
            return "\ue002" + word.lower()
        return re.sub("[A-Z]", lambda capital: "\ue003" + capital[0].lower(), word)

    return re.sub("[A-Za-z]+", mark, text)


CASED = ["The NASA Launch of OpenAI", "iPhone, E\u0301tude, XE\u0301", "a\ue001b \ue004C"]
CASED += ["Größe I'M 日本🦊"]
CASED += [text.title() if len(text) % 2 else text for text in make_documents(20, seed=5)]


@pytest.fixture
def cased(make_set):
    """Return a data set in CaseOps, with the bytes of each token in the original text."""
    data = make_set("caseops", [encode_case(text) for text in CASED])
    data.docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in CASED))
    data.bytes = []
    for ids, text in zip(data.ids, CASED, strict=True):
        # The audit does not compare how the bytes are distributed over the tokens of a document.
        each, more = divmod(len(text.encode()), len(ids) - 1)
        data.bytes += [0, *[each] * (len(ids) - 2), each + more]

    def write_bytes() -> None:
        total = len(data.bytes)
        write_split(data.folder, "val_bytes", np.array(data.bytes), [total // 3, total // 2])

    data.write_bytes = write_bytes
    write_bytes()
    return data


def test_byte_counts_beside_the_tokens_are_proved(cased) -> None:
    code, output = cased.audit()
    assert code == 0, output
    assert read_number(output) == sum(len(text.encode()) for text in CASED)
    assert "those of fineweb_val_bytes_*.bin; the tokenizer's table would count " in output
    assert cased.audit(docs=False)[0] == 3


def test_wrong_byte_counts_beside_the_tokens_are_reported(cased) -> None:
    """One byte moves to the next document, so that the sum over all documents stays.

    A BOS has bytes, and a document has another text.
    """
    end = len(cased.ids[0])
    cased.bytes[end - 1 : end + 2] = cased.bytes[end - 1] - 1, 2, cased.bytes[end + 1] - 1
    cased.ids[4][1:3] = cased.ids[5][1:3]
    cased.write()
    cased.write_bytes()
    code, output = cased.audit()
    assert code == 1
    assert "document 1: 24 bytes are counted, but the original has 25" in output
    assert "bytes are counted wrongly in 2 documents" in output
    assert "document 2: its BOS has 2 bytes" in output
    assert "document 5: after " in output


def test_files_of_another_data_set_and_missing_files_are_errors(cased) -> None:
    cased.bytes.pop()
    cased.write_bytes()
    with pytest.raises(
        ToolError, match="fineweb_val_bytes_.* numbers; get all files from the same data set"
    ):
        cased.audit()
    for path in cased.folder.glob("fineweb_val_bytes_*.bin"):
        path.unlink()
    assert cased.audit()[0] == 1, "the table does not count the original's bytes"
    (cased.folder / "fineweb_val_000000.bin").unlink()
    with pytest.raises(
        ToolError, match="fineweb_val_000001.bin: the next shard must have the number 000000"
    ):
        cased.audit(docs=False)
