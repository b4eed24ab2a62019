"""Tests of tokenize_docs.py: the shards, the validation split, the exact text, the errors."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from itertools import accumulate
from pathlib import Path

import dataset
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import sentencepiece
import tokenize_docs
from cli import ToolError
from running import ROOT, call_tool, train_tokenizer

SCRIPT = ROOT / "data" / "tokenize_docs.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
UNUSUAL_WHITE_SPACE = [
    "To be,\n   or not\nto be",
    "\ttabs\t\tand  runs   of    spaces ",
    "\n\n\nleading and trailing line ends\n\n",
    "windows\r\nlines\r\n\r\n",
    "no line end at the end",
    "no\u00a0break\u3000wide\u2003em\u200bzero\u2028line\x0bfeed\x0c",
    "   ",
    "\n",
    "e\u0301 \ufb01 \u2460 \uff21 \u00bd \ufeff",
    "a\0b",
]


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Return short texts with every kind of character that a tokenizer treats differently."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(300)]
    extras = ["naïve", "日本", "🙂", "2024", "\t", "\n\n", "  x", "a\u2028b"]
    return [
        f"{number} " + " ".join(rng.choices(words + extras, k=rng.randint(1, 60)))
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    lines = [json.dumps({"text": text, "url": "x"}) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_as(path: Path, documents: Path) -> Path:
    """Write the documents of a .jsonl file in the format that the name of `path` says."""
    content = documents.read_bytes()
    if path.suffix == ".parquet":
        table = pa.Table.from_pylist([json.loads(line) for line in content.splitlines()])
        pyarrow.parquet.write_table(table, path, row_group_size=300)
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(content[:999]) + lzma.compress(content[999:]))
    else:
        with pa.output_stream(path) as file:  # compresses the file if its name says so
            file.write(content)
    return path


def run(*arguments: object) -> str:
    """Run the program's main in this process; return what it printed. Raises ToolError."""
    return call_tool(tokenize_docs.main, *arguments)[1]


def read_documents(folder: Path, split: str) -> list[list[int]]:
    """Return the tokens of each document of a split, from the bytes of its shards.

    A document begins with BOS, which appears nowhere else. Asserts the name, the header and the
    exact size of each shard.
    """
    parts = []
    for number, path in enumerate(sorted(folder.glob(f"fineweb_{split}_*.bin"))):
        assert path.name == f"fineweb_{split}_{number:06d}.bin"
        content = path.read_bytes()
        words = np.frombuffer(content[:1024], "<i4").tolist()
        assert words == [20240520, 1, (len(content) - 1024) // 2] + [0] * 253
        parts.append(np.frombuffer(content[1024:], "<u2"))
    tokens = np.concatenate(parts)
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0
    return [part.tolist() for part in np.split(tokens, starts[1:])]


def val_share(folder: Path) -> float:
    """Return which part of the tokens of a data set is in the validation split."""
    val, train = (sum(map(len, read_documents(folder, split))) for split in ("val", "train"))
    return val / (val + train)


def decode_data_set(out: Path, name: str, size: int = 400) -> list[str]:
    """Return the texts of a data set, those of validation first."""
    [path] = out.glob(f"tokenizers/{name}_{size}*.model")
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    folder = out / "datasets" / f"{name}_sp{size}"
    documents = read_documents(folder, "val") + read_documents(folder, "train")
    return [model.decode(ids[1:]) for ids in documents]


def move_away(error: Exception) -> list[Path]:
    """Do what the error message says: move files away. Return their new paths."""
    paths = re.search(r"or move (\S+) and (\S+) away$", str(error)).groups()
    return [Path(path).rename(f"{path}.old") for path in paths]


def read_files(out: Path) -> dict[str, bytes]:
    """Return {relative path: content} of all files in a folder except export.json."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "export.json"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*UNUSUAL_WHITE_SPACE, *make_texts(390)]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("documents") / "docs.jsonl", texts)


OPTIONS = ("--vocab-size", 380, "--shard-tokens", 1000)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> Path:
    out = tmp_path_factory.mktemp("exported")
    run(documents, "--out", out, *OPTIONS)
    return out


def test_shards_contain_the_documents_in_order(exported: Path, texts: list[str]) -> None:
    """A tenth of the documents is for validation. Only the last shard of a split may be short."""
    folder = exported / "datasets" / "docs_sp380"
    assert decode_data_set(exported, "docs", 380) == texts
    assert len(read_documents(folder, "val")) == 40
    for split in ("val", "train"):
        sizes = [path.stat().st_size for path in sorted(folder.glob(f"fineweb_{split}_*.bin"))]
        assert len(sizes) > 3 and set(sizes[:-1]) == {1024 + 2000} and sizes[-1] <= 3024
    tokenizer = exported / "tokenizers" / "docs_380_bpe.model"
    checked = subprocess.run(["sha256sum", "-c", "tokenizer.sha256"], cwd=folder)
    assert checked.returncode == 0
    assert dataset.find_recorded_tokenizer(folder) == (dataset.file_sha256(tokenizer), tokenizer)
    assert not (folder / ".producing").exists()


def test_threads_batches_files_and_byte_order_marks_change_no_shard(
    tmp_path: Path, exported: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_docs, "BATCH_BYTES", 700)
    inputs = [tmp_path / "a.jsonl", tmp_path / "none.jsonl", tmp_path / "b.json"]
    for path, part in zip(inputs, (texts[:150], [], texts[150:]), strict=True):
        write_jsonl(path, part)
    inputs[2].write_bytes(b"\xef\xbb\xbf" + inputs[2].read_bytes())
    run(*inputs, "--out", tmp_path / "out", "--workers", 3, *OPTIONS)
    assert read_files(tmp_path / "out") == read_files(exported)


def test_a_file_that_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, documents: Path
) -> None:
    def assert_error(name: str, words: str) -> None:
        with pytest.raises(ToolError, match=f"{name}: .*{words}"):
            run(tmp_path / name, "--out", tmp_path / "out", "--bytes")
        assert not (tmp_path / "out").exists()

    for name in ("a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"):
        path = write_as(tmp_path / name, documents)
        os.truncate(path, path.stat().st_size - 20)
        assert_error(name, "is damaged, or its content is not what its name says")
    for table, words in (
        ({"content": ["a"]}, "has the columns content, but no column .text"),
        ({"text": ["a", None]}, ".text. of row 2 is None, not a string; remove the row"),
    ):
        pyarrow.parquet.write_table(pa.table(table), tmp_path / "b.parquet")
        assert_error("b.parquet", words)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("pyarrow", "pyarrow.parquet"):
            patch.setitem(sys.modules, module, None)
        assert_error("b.parquet", "pyarrow is missing; run .*pip install pyarrow$")
        assert_error(
            "a.jsonl.zst", "pyarrow is missing; run .*pip install pyarrow, or decompress the file"
        )


COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


@pytest.mark.parametrize("form", COMPRESSORS)
def test_every_byte_of_a_compressed_file_is_accounted_for(tmp_path: Path, form: str) -> None:
    """Files of several streams are whole, or an error. Python's readers drop what follows damage.

    Zeros may be between streams and behind them, except in .zst, where they are damage. In .gz and
    .bz2, some bytes hold nothing, such as the time in the head of a .gz.
    """
    lines = [json.dumps({"text": f"document {i} has {i * i} words"}) + "\n" for i in range(90)]
    parts = ["".join(lines[i : i + 30]).encode() for i in (0, 30, 60)]
    first, second, third = map(COMPRESSORS[form], parts)
    path = tmp_path / f"docs.jsonl.{form}"

    def reads_all(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            documents = list(tokenize_docs.Source([str(path)], 1).documents())
        except ToolError as error:
            assert "is damaged" in str(error) and "restore the file" in str(error)
            return False
        assert b"".join(document.data for document in documents) == b"".join(parts)
        return True

    assert reads_all(first + second + third)
    assert reads_all(first + bytes(8) + second + third + bytes(1024)) is (form != "zst")
    assert not reads_all(first + second + third + bytes(4) + b"rubbish")
    assert not reads_all(first + second + third[:-3])
    # The frames of this .zst have no checksum, so that only their head shows damage.
    places = range(6) if form == "zst" else [*range(60), len(second) // 2, len(second) - 1]
    harmless = 0
    for place in places:
        damaged = bytearray(second)
        damaged[place] ^= 255
        harmless += reads_all(first + damaged + third)
    assert harmless <= (6 if form == "gz" else 1)
    path.write_bytes(b"")
    with pytest.raises(ToolError, match="is empty; restore the file"):
        tokenize_docs.Source([str(path)])


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz", "a.parquet.xz"])
def test_a_parquet_file_may_be_compressed_and_must_have_strings(tmp_path: Path, name: str) -> None:
    compress = COMPRESSORS.get(name.rpartition(".")[2], bytes)
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        file = io.BytesIO()
        table = pa.table({"text": pa.array(["one", "two", "one"]).cast(kind)})
        pyarrow.parquet.write_table(table, file)
        (tmp_path / name).write_bytes(compress(file.getvalue()))
        texts = [
            document.data for document in tokenize_docs.Source([str(tmp_path / name)]).documents()
        ]
        assert texts == [b"one", b"two", b"one"]
    for kind in (pa.binary(), pa.int64(), pa.list_(pa.string())):
        pyarrow.parquet.write_table(pa.table({"text": pa.array([], kind)}), tmp_path / "b.parquet")
        with pytest.raises(ToolError, match="column .text. has the type .*, not string; write a"):
            tokenize_docs.Source([str(tmp_path / "b.parquet")])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><title>Sign in</title></html>\n"


def make_tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("docs.jsonl"), None)
    return file.getvalue()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.txt", POINTER, "is a pointer of Git LFS, not the file itself; run git lfs pull"),
        ("a.jsonl.xz", POINTER, "is a pointer of Git LFS"),
        ("a.model", POINTER, "is a pointer of Git LFS"),
        ("a.json", POINTER, "is a pointer of Git LFS"),
        ("a.bin", POINTER, "is a pointer of Git LFS"),
        ("a.jsonl", PAGE, "is a page of HTML, such as a server sends .*; download the file again"),
        ("a.txt.gz", PAGE, "is a page of HTML"),
        ("a.parquet", PAGE, "is a page of HTML"),
        ("a.model", PAGE, "is a page of HTML"),
        ("a.bin", PAGE, "is a page of HTML"),
        ("a.tar", make_tar(), "is a tar archive; unpack it with tar -xf"),
        (
            "a.tar.gz",
            gzip.compress(make_tar()),
            "its decompressed content is a tar archive; unpack",
        ),
        ("a.bin", make_tar(), "is a tar archive; unpack it"),
        ("a.docx", b"PK\3\4" + bytes(99), "is a ZIP archive; unpack it"),
        ("a.txt", gzip.compress(b"text"), "is a compressed file; .* let its name end in .gz"),
        ("a.pdf", b"%PDF-1.7\n\xe2\xe3", "is a PDF file; extract its text"),
        ("a.model", b"", "is empty; restore the file"),
        (
            "a.json",
            b'{"version": "1.0", "model": {}}',
            "JSON of another program: .* version, model",
        ),
        ("a.json", b'{"offset": "4"}', "its .offset. is 4, not a whole number"),
        ("a.json", b"[]", "JSON of another program: it is a value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a gzip contains the time
)
def test_a_file_of_another_kind_is_called_by_its_name(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    """As a document, a tokenizer or a shard."""
    path = tmp_path / name
    path.write_bytes(content)
    is_tokenizer = path.suffix in (".model", ".json")
    with pytest.raises(ToolError, match=f"{name}: .*{words}"):
        if is_tokenizer:
            tokenize_docs.Tokenizer(path)
        elif path.suffix == ".bin":
            dataset.count_shard_tokens(path)
        else:
            run(path, "--out", tmp_path / "out", "--bytes")


def test_a_page_of_html_may_be_a_text(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for number in range(3):
        (tmp_path / "docs" / f"{number}.html").write_bytes(PAGE + b"%d" % number)
    assert "2 training documents" in run(tmp_path / "docs", "--out", tmp_path, "--bytes")


@pytest.mark.parametrize("name, better", [("a.txt", "a.jsonl"), ("a.gz", "a.jsonl.gz")])
def test_json_lines_in_a_file_with_the_name_of_a_text_are_an_error(
    tmp_path: Path, documents: Path, name: str, better: str
) -> None:
    path, arguments = write_as(tmp_path / name, documents), ["--out", tmp_path, "--bytes"]
    with pytest.raises(
        ToolError, match=f"{name}: .* rename it to end in {better[1:]}, or insert an empty first"
    ):
        run(path, *arguments)
    assert "360 training documents" in run(path.rename(tmp_path / better), *arguments)
    (tmp_path / "b.txt").write_bytes(b"\n" + documents.read_bytes())
    assert "b_byte260: " in run(tmp_path / "b.txt", *arguments, "--name", "b")


def test_validation_never_appears_in_training(tmp_path: Path) -> None:
    texts = make_texts(60)
    path = write_jsonl(tmp_path / "docs.jsonl", [*texts, texts[3], "new one", texts[19], texts[3]])
    output = run(path, "--out", tmp_path, "--num-val-docs", 20, "--bytes")
    assert "41 training documents" in output and "3 repeats of validation documents (" in output
    left_out = sum(1 + len(texts[number].encode()) for number in (3, 19, 3))
    assert f" documents ({left_out:,} tokens) are left out" in output
    folder = tmp_path / "datasets" / "docs_byte260"
    val, train = (set(map(tuple, read_documents(folder, split))) for split in ("val", "train"))
    assert len(val) == 20 and len(train) == 41 and not val & train
    [percent, number] = re.findall(
        r"WARNING: validation has (\d+)% of all tokens; --num-val-docs (\d+) and another", output
    )[0]
    assert 30 < int(percent) < 45
    output = run(path, "--out", tmp_path, "--num-val-docs", number, "--bytes", "--name", "better")
    assert "WARNING" not in output
    folder = tmp_path / "datasets" / "better_byte260"
    assert 0.05 < val_share(folder) <= 0.1


def test_the_tokenizer_is_not_trained_on_validation_documents(tmp_path: Path) -> None:
    texts = make_texts(80)
    marked = [text + " qzqzqz" * 50 if number < 10 else text for number, text in enumerate(texts)]
    pieces = {}
    for name, documents in (("in_val", [*marked, marked[0]]), ("in_train", marked[::-1])):
        source = tokenize_docs.Source([str(write_jsonl(tmp_path / f"{name}.jsonl", documents))], 10)
        content = tokenize_docs.train_tokenizer(source, 400, "identity")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        pieces[name] = {model.id_to_piece(index) for index in range(400)}
        assert [model.pad_id(), model.bos_id(), model.eos_id(), model.unk_id()] == [0, 1, 2, 3]
        assert "\u2581" in pieces[name] and not any("202" in piece for piece in pieces[name])
    assert not any("qz" in piece for piece in pieces["in_val"])
    assert any("qz" in piece for piece in pieces["in_train"])


def test_a_tokenizer_is_trained_on_a_sample(documents: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokenize_docs, "SAMPLE_BYTES", 20_000)
    source = tokenize_docs.Source([str(documents)])
    sample = "".join(tokenize_docs.training_sentences(source, []))
    assert 10_000 < len(sample) < 30_000 < documents.stat().st_size


PLAIN = [f"some plain words {number} and more of them" for number in range(99)]


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_tokenizer_without_a_space_token_is_an_error(tmp_path: Path, byte_fallback: bool) -> None:
    texts = [text.replace(" ", "") for text in PLAIN]
    model = train_tokenizer(tmp_path / "m.model", texts, byte_fallback=byte_fallback)
    path = write_jsonl(tmp_path / "docs.jsonl", PLAIN)
    with pytest.raises(ToolError, match="no token for a single space, .*run without --model"):
        run(path, "--out", tmp_path / "out", "--model", model)
    assert not (tmp_path / "out").exists()


def test_a_warning_counts_the_unknown_tokens(tmp_path: Path) -> None:
    """With byte_fallback, a letter without a token becomes bytes. Otherwise it is unknown."""
    path = write_jsonl(tmp_path / "docs.jsonl", ["a ä", *PLAIN, "ö ü"])
    arguments = [path, "--num-val-docs", 1, "--out", tmp_path]
    greek = [f"λόγος και μέτρο {number}" for number in range(99)]
    for byte_fallback, texts, size in ((True, greek, 350), (False, PLAIN, 100)):
        name = f"fallback_{byte_fallback}"
        path = tmp_path / f"{name}.model"
        train_tokenizer(path, texts, byte_fallback=byte_fallback, vocab_size=size)
        output = run(*arguments, "--name", name, "--model", path)
        assert "100 training documents" in output and ("WARNING: " in output) != byte_fallback
    assert "WARNING: 1 validation tokens and 2 training tokens are unknown" in output


@pytest.mark.parametrize("form", ["folder", "one file"])
def test_decoding_gives_the_exact_text(tmp_path: Path, form: str) -> None:
    texts = [*UNUSUAL_WHITE_SPACE, *make_texts(200)]
    given = tmp_path / "docs"
    if form == "folder":
        given.mkdir()
        (given / ".hidden").write_bytes(b"\xff")
        (given / "a.git").mkdir()
        for number, text in enumerate(texts):
            path = given / f"{number:03d}{('.md', '.tex', '')[number % 3]}"
            path.write_bytes(text.encode())
    else:
        given.write_bytes("\r\n \n".join(texts).encode())
    output = run(given, "--name", "odd", "--out", tmp_path, "--vocab-size", 400)
    found = decode_data_set(tmp_path, "odd")
    if form == "one file":
        assert "".join(found) == given.read_bytes().decode()
        assert "split into documents at blank lines" in output and len(found) > 200
    else:
        assert found == texts
    assert "normaliser" not in output and "WARNING" not in output


@pytest.mark.parametrize("name", ["novel.txt", "novel.txt.xz"])
def test_one_document_keeps_a_text_together(tmp_path: Path, name: str) -> None:
    text = "".join(f"Paragraph {number},\r\nwörter.\r\n\r\n" for number in range(2000)).encode()
    given, arguments = tmp_path / name, ["--out", tmp_path, "--bytes"]
    given.write_bytes(lzma.compress(text) if given.suffix == ".xz" else text)
    output = run(given, *arguments)
    assert (
        "use --one-document to keep the text together" in output
        and "1,793 training documents" in output
    )
    run(given, *arguments, "--name", "one", "--one-document")
    folder = tmp_path / "datasets" / "one_byte260"
    [val], [train] = read_documents(folder, "val"), read_documents(folder, "train")
    assert bytes(token - 4 for token in val[1:] + train[1:]) == text
    assert 0.09 < len(val) / len(text) <= 0.1 and val[-1] == 4 + ord("\n")
    with pytest.raises(ToolError, match="--one-document requires a single text file; run without"):
        run(given, folder, "--out", tmp_path / "out", "--bytes", "--one-document")


def test_a_note_says_that_a_normaliser_changes_text(tmp_path: Path) -> None:
    """The note is printed for a tokenizer that is trained, and for a tokenizer that is given."""
    documents = write_jsonl(tmp_path / "docs.jsonl", [*UNUSUAL_WHITE_SPACE, *make_texts(200)])
    nmt = ["--vocab-size", 400, "--normalization", "nmt_nfkc"]
    output = run(documents, "--out", tmp_path, "--name", "nmt", *nmt)
    assert "note: " in output and "line ends and tabs become one space" in output
    assert decode_data_set(tmp_path, "nmt")[0] == "To be, or not to be"
    model = tmp_path / "tokenizers" / "nmt_400_bpe.model"
    output = run(documents, "--out", tmp_path, "--name", "given", "--model", model)
    assert "line ends and tabs become one space" in output
    assert decode_data_set(tmp_path, "given") == decode_data_set(tmp_path, "nmt")


SIZES = {"large passages first": [12_000] * 20 + [30] * 2000, "one short passage": [30_000]}
SIZES |= {"small passages first": SIZES["large passages first"][::-1], "one passage": [400_000]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_tenth_of_a_single_text_is_for_validation(tmp_path: Path, sizes: list[int]) -> None:
    """It is a tenth of its tokens, not of its passages, which may be of any size.

    Passages that repeat validation passages do not count, because they are left out.
    """
    numbers = "".join(f"{number} " for number in range(sum(sizes) // 5))
    passages = [
        numbers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=False)
    ]
    repeated = [*passages, *["again " * 1000] * 30, passages[0], *passages[:30]]
    for name, text in (("novel", passages), ("repeats", ["again " * 1000, *repeated])):
        (tmp_path / name).write_text("\n\n".join(text))
        output = run(tmp_path / name, "--out", tmp_path, "--bytes", "--name", name)
        assert 0.05 <= val_share(tmp_path / "datasets" / f"{name}_byte260") <= 0.15, output
        assert "WARNING" not in output


@pytest.mark.parametrize("separator", ["\n", " ", ""])
def test_text_without_blank_lines_is_split_by_size(tmp_path: Path, separator: str) -> None:
    """It is split at line ends, else at spaces, else between characters.

    Reading may begin at any document: the same documents follow.
    """
    text = separator.join(["wörter"] * 30_000)
    path = tmp_path / "novel.txt"
    path.write_bytes(text.encode())
    source = tokenize_docs.Source([str(path)])
    documents = list(source.documents())
    assert "".join(document.decode() for document in documents) == text
    assert len(documents) > 10 and max(len(d.data) for d in documents) <= 1 << 14
    assert all(document.data.endswith(separator.encode()) for document in documents[:-1])
    for number in (1, 7, len(documents) - 1):
        assert list(source.documents(number)) == documents[number:]


def test_a_note_says_which_paths_of_a_folder_are_left_out(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    (notes / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.txt", "z.txt"):
        (notes / name).write_text(name)
    (notes / "gone").symlink_to(tmp_path / "nothing")
    (notes / "linked").symlink_to(tmp_path)
    output = run(notes, "--out", tmp_path, "--bytes")
    assert (
        f"note: 2 paths that are not regular files are left out, for example {notes}/gone" in output
    )
    assert "2 training documents" in output
    with pytest.raises(ToolError, match="gone: is not a regular file"):
        run(notes / "gone", "--out", tmp_path, "--bytes")


def test_input_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "docs.jsonl", make_texts(50))
    encode = tokenize_docs.Tokenizer.encode

    def change_input_and_encode(self, texts: list[str], threads: int) -> list[np.ndarray]:
        path.write_bytes(path.read_bytes().replace(b"a", b"b"))
        return encode(self, texts, threads)

    monkeypatch.setattr(tokenize_docs.Tokenizer, "encode", change_input_and_encode)
    with pytest.raises(ToolError, match="was changed while it was read; choose") as error:
        run(path, "--out", tmp_path, "--bytes")
    folder = tmp_path / "datasets" / "docs_byte260"
    assert "changed while" in json.loads((folder / ".producing").read_text())["error"]
    monkeypatch.undo()
    with pytest.raises(ToolError, match="other input files"):
        run(path, "--out", tmp_path, "--bytes")
    move_away(error.value)
    run(path, "--out", tmp_path, "--bytes")
    assert not (folder / ".producing").exists() and len(read_documents(folder, "train"))


DYING_RUN = """
import os, signal, sys
import dataset, tokenize_docs
write, calls = dataset.write_atomic, []
def dying_write(path, *chunks):
    if path.suffix == ".bin":
        calls.append(path)
        if len(calls) == {when}:
            if {after}:
                write(path, *chunks)
            os.kill(os.getpid(), signal.SIGKILL)
    write(path, *chunks)
dataset.write_atomic = dying_write
sys.argv = {argv!r}
tokenize_docs.main()
"""


KILLED = [(1, False, "docs.parquet"), (2, True, "docs.jsonl.gz"), (9, True, "DOCS.JSONL")]
KILLED += [(9, False, "docs.jl"), (9, True, "docs.parquet"), (9, True, "docs.ndjson.bz2")]
KILLED += [(9, False, "docs.json.xz"), (12, True, "docs.jsonl.zst")]


@pytest.mark.parametrize("when, after, name", KILLED)
def test_a_killed_export_continues_to_the_same_files(
    tmp_path: Path, documents: Path, exported: Path, when: int, after: bool, name: str
) -> None:
    """The input may have any format.

    The process is killed before or after the when-th shard gets its final name.
    """
    path = write_as(tmp_path / name, documents)
    arguments = [str(word) for word in (path, "--out", tmp_path, *OPTIONS)]
    code = DYING_RUN.format(when=when, after=after, argv=[str(SCRIPT), *arguments])
    killed = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "datasets" / "docs_sp380"
    assert len(list(folder.glob("*.bin"))) == when - (not after)
    producing = json.loads((folder / ".producing").read_text())
    assert producing["val_complete"] is (when >= 9)
    output = shlex.split(producing["command"])
    assert output[:3] == ["cd", os.getcwd(), "&&"] and output[-len(arguments) :] == arguments
    run(*arguments)
    left = {name for name in read_files(tmp_path) if name.endswith((".partial", path.name))}
    files = {name: data for name, data in read_files(tmp_path).items() if name not in left}
    assert files == read_files(exported)
    run(*arguments)


def test_a_complete_set_is_left_alone(tmp_path: Path, documents: Path, exported: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in exported.rglob("*.[bm]*")}
    run(documents, "--out", exported, *OPTIONS)
    with pytest.raises(
        ToolError, match="'shard_tokens': 1000}, but this command has {'shard_tokens': 6}"
    ):
        run(documents, "--out", exported, "--vocab-size", 380, "--shard-tokens", 6)
    assert before == {path: path.stat().st_mtime_ns for path in exported.rglob("*.[bm]*")}
    theirs = tmp_path / "tokenizers" / "docs_380_bpe.model"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    with pytest.raises(ToolError, match="was not made by this command"):
        run(documents, "--out", tmp_path, *OPTIONS)
    assert theirs.read_bytes() == b"theirs"


def test_moving_away_what_the_error_says_helps(tmp_path: Path, documents: Path) -> None:
    arguments = [documents, "--out", tmp_path, *OPTIONS]
    run(*arguments)
    before = read_files(tmp_path)
    os.truncate(tmp_path / "datasets" / "docs_sp380" / "fineweb_train_000002.bin", 1500)
    with pytest.raises(ToolError, match="000002.bin: is truncated or not a shard") as error:
        run(*arguments)
    moved = move_away(error.value)
    run(*arguments)
    now = read_files(tmp_path)
    assert {name: now[name] for name in before} == before
    assert all(path.exists() for path in moved), "a file is lost"


def test_the_same_command_accepts_corrected_input(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "cut.jsonl", make_texts(40))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-9], encoding="utf-8")
    with pytest.raises(ToolError, match="cut.jsonl:40: must be an object"):
        run(path, "--out", tmp_path, "--bytes")
    path.write_text(whole, encoding="utf-8")
    assert "4 validation documents" in run(path, "--out", tmp_path, "--bytes")


def test_a_data_set_of_an_older_version_is_complete(tmp_path: Path) -> None:
    """Its export.json does not say how many tokens the repeats had, and the output does not."""
    path = write_jsonl(tmp_path / "docs.jsonl", ["one", "two", "one"])
    output = run(path, "--out", tmp_path, "--bytes")
    assert "1 repeats of validation documents (4 tokens) are left out" in output
    export = tmp_path / "datasets" / "docs_byte260" / "export.json"
    state = json.loads(export.read_text())
    del state["tokens_left_out"]
    export.write_text(json.dumps(state))
    assert "1 repeats of validation documents are left out" in run(
        path, "--out", tmp_path, "--bytes"
    )


def test_two_processes_cannot_make_the_same_data_set(tmp_path: Path, documents: Path) -> None:
    folder = tmp_path / "datasets" / "docs_byte260"
    with (
        dataset.locked(folder),
        pytest.raises(ToolError, match="another process is making this data set"),
    ):
        run(documents, "--out", tmp_path, "--bytes")
    run(documents, "--out", tmp_path, "--bytes")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_gets_its_data_set(
    tmp_path: Path, documents: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer trains there, too."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(dataset.fcntl, "flock", refuse)
    output = run(documents, "--out", tmp_path, "--bytes")
    folder = tmp_path / "datasets" / "docs_byte260"
    assert f"note: {folder}: the file system has no locks ({os.strerror(number)})" in output
    assert len(read_documents(folder, "train")) == 360


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """With 20 times the input, the peak of memory is at most 60 MB higher."""
    code = (
        "import resource, sys, tokenize_docs; tokenize_docs.main(); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for megabytes in (5, 100):
        path = tmp_path / f"{megabytes}.jsonl"
        with open(path, "w") as file:
            for number in range(megabytes):
                file.write((json.dumps({"text": f"{number} word" * 500}) + "\n") * 200)
        command = [sys.executable, "-c", code, path, "--name", f"m{megabytes}", "--bytes"]
        command += ["--out", tmp_path, "--shard-tokens", "1000000", "--num-val-docs", "1"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 60, peaks
