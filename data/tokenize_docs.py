"""Turn documents into a tokenizer and training shards.

    python3 data/tokenize_docs.py novel.txt --name novel
    python3 data/tokenize_docs.py notes/ --name notes --bytes
    python3 data/tokenize_docs.py docs.jsonl --name mine --model my_bpe.model
    python3 data/tokenize_docs.py data/docs_selected.jsonl --normalization nmt_nfkc

Input: files or folders. A .jsonl, .ndjson, .jl or .json file has one {"text": "..."} per line, a
.parquet file a column "text". Any other file is UTF-8 text and one document, but a single text file
is cut into documents after its blank lines, or by size if it has none: then no document goes on in
the next one. With --one-document it stays together. Files may be packed: .gz, .bz2, .xz, .zst.
(.parquet and .zst need pyarrow.) Of a folder, all files are read but those with a dot in front.
The first --num-val-docs documents (default: a tenth, at most 50,000) are the validation split.
Tokenizers are trained on the others only, and a later document that repeats a validation document
is left out.

The tokens of a document can be decoded to its exact text: spaces, tabs and line ends stay.
--normalization nmt_nfkc changes text first, as the published tokenizers do: runs of white space,
line ends and tabs become one space, and some characters become others. Bits per byte are then those
of the changed text.

It writes tokenizers/<name>_<vocabulary>_bpe.model (<name>_<vocabulary>.model with --model,
<name>_byte260.json with --bytes) and, in datasets/<name>_sp<vocabulary>/ (or <name>_byte260/),
fineweb_val_*.bin, fineweb_train_*.bin, export.json and tokenizer.sha256, under --out.

If the command was stopped, run it again: it continues after the last complete shard. Training may
start before the last shard is made: see data/README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not there with python3 -P
import dataset
from dataset import DATA, cli

# isort: split
import numpy as np  # after cli, which says in one line what is to be installed
import sentencepiece

BYTE_TOKENIZER = {"kind": "byte", "offset": 4}  # 0 to 3 are controls, 1 is BOS
LEAST_VOCABULARY = 256 + 4 + 1  # bytes; pad, BOS, EOS, unknown; a space
MOST_VOCABULARY = 1 << 16  # a token is a uint16
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}  # what reads them
MAX_VAL_DOCS = 50_000  # the challenge's number
MAX_DOCUMENT_BYTES = 16 << 20  # SentencePiece takes about 45 bytes of memory for each
BATCH_BYTES = 1 << 20  # of documents that are encoded together, or of a file read at once
PASSAGE_BYTES = 1 << 14  # a document cut from a single text file has no more
ROWS = 256  # of a Parquet file that are in memory at once
BLANK_LINES = re.compile(rb"\n[ \t\r]*\n\s*")
SPACE = "\u2581"  # SentencePiece's mark for a space
SENTENCE_CHARACTERS = 4000  # at most 16,000 bytes: SentencePiece drops longer sentences silently
SAMPLE_BYTES = 50_000_000  # of input, as it is packed, that a tokenizer is trained on
CUT = "cut into documents at blank lines, or after 16 KiB; --one-document keeps the text together"
CUT_AS_ONE = "its first tenth is the validation document, the rest training, at most 16 MiB each"


# === DOCUMENTS ====================================================================================


class Document(NamedTuple):
    number: int  # in the whole input, from 0
    path: str
    line: int  # of the file, where it begins; of a Parquet file the row
    data: bytes  # with all that separates it from the next one, as in the file

    def text(self) -> str:
        """Raises ToolError with file and line number."""
        try:
            text = self.data.decode("utf-8")
            if is_json_lines(self.path):
                text = text_in_line(text.removeprefix("\ufeff"))
            elif text.count("\0") > len(text) // 3 and is_text(self.path):
                raise cli.ToolError(f"{self.path}: UTF-16? Run iconv -f UTF-16LE -t UTF-8 on it")
            text.encode("utf-8")  # JSON may hold half a surrogate pair
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            name = "UTF-16" if self.data.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"
            plain = shlex.quote(self.path[: len(self.path) - len(packing(self.path))])
            what = "unpack and convert it" if packing(self.path) else "convert it"
            fault = f"not UTF-8 ({error.reason}); if it is text, {what}: "
            fault += f"iconv -f {name} -t UTF-8 {plain} > NEW_FILE"
            if b"\0" in self.data and name != "UTF-16":
                fault = "a binary file, no text; name text files, .jsonl or .parquet files"
            raise cli.ToolError(f"{self.path}:{line}: {fault}") from None
        except (ValueError, RecursionError) as error:
            fault = f'not an object like {{"text": "..."}} on one line ({error})'
            remedy = "mend that; plain text needs a name such as .txt"
            raise cli.ToolError(f"{self.path}:{self.line}: {fault}; {remedy}") from None
        return text


def text_in_line(line: str) -> str:
    """The text in a line of JSON. Raises ValueError, in words."""
    if line.lstrip().startswith("["):
        raise ValueError("an array: `jq -c '.[]' FILE > NEW.jsonl` writes a line for each entry")
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        keys = ", ".join(map(str, value)) if isinstance(value, dict) else cli.one_line(value)
        raise ValueError(f'it has {keys[:80]}, and no "text" that is a string')
    return value["text"]


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def packing(path: str) -> str:
    """The end of a packed file's name in small letters; empty if it is none."""
    ending = os.path.splitext(path.lower())[1]
    return ending if ending in PACKED else ""


def kind(path: str) -> str:
    """The end of a file's name in small letters, without that of a packed one."""
    return os.path.splitext(path.lower().removesuffix(packing(path)))[1]


def is_json_lines(path: str) -> bool:
    return kind(path) in (".jsonl", ".ndjson", ".jl", ".json")


def is_text(path: str) -> bool:
    return not is_json_lines(path) and kind(path) != ".parquet"


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(a file, its content), the same unless it is packed. ToolError: damage, a missing package"""
    try:
        with open(path, "rb") as file:
            ending = packing(path)
            module = import_module(PACKED[ending]) if ending else None
            if ending == ".zst":
                yield file, io.BufferedReader(module.input_stream(file, compression="zstd"))
            else:
                yield file, module.open(file) if module else file
    except ImportError as error:
        remedy = f"{cli.missing(error.name)}{', or unpack it' if packing(path) else ''}"
        raise cli.ToolError(f"{path}: {remedy}") from None
    except Exception as error:
        is_damage = isinstance(error, (OSError, EOFError, ValueError, zlib.error))
        is_damage |= type(error).__name__ == "LZMAError"  # of a module that may be missing
        if not is_damage or getattr(error, "errno", None):  # the disk's own
            raise
        fault = f"damaged, or not what its name says ({cli.one_line(error)[:200]})"
        raise cli.ToolError(f"{path}: {fault}: restore it") from None


def rows_of(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The texts of a Parquet file. Of a row group a part is in memory."""
    parquet = import_module("pyarrow.parquet")
    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BATCH_BYTES)
    if "text" not in (names := table.schema_arrow.names):
        fault = f'it has the columns {cli.some(names)}, and none with the name "text"'
        raise cli.ToolError(f"{path}: {fault}: write one that has it")
    batches = table.iter_batches(ROWS, columns=["text"])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            fault = f'"text" of row {number} is {cli.one_line(text)[:40]}, no string'
            raise cli.ToolError(f"{path}: {fault}: leave that row out")
        yield text.encode("utf-8")


def refuse_json_as_text(path: str) -> None:
    """Raises ToolError for a text, by its name, that begins like a file of JSON lines."""
    with opened(path) as (_, content):
        line = content.readline(MAX_DOCUMENT_BYTES)
    with suppress(ValueError, RecursionError):  # then it is text
        text_in_line(line.decode("utf-8-sig"))
        fault = 'text by its name, but its first line is an object of JSON with "text"'
        remedy = f"name it .jsonl{packing(path)}; if it is text, begin it with an empty line"
        raise cli.ToolError(f"{path}: {fault}: {remedy}")


def cut(file: BinaryIO, first: int, most: int, at_blank_lines: bool) -> Iterator[bytes]:
    """A text as documents of at most `most` bytes, and the first of at most `first`."""
    data, limit = b"", max(1, first)
    while data := data + file.read(limit + 1 - len(data)):
        end = document_end(data, limit, at_blank_lines)
        yield data[:end]
        data, limit = data[end:], most


def document_end(data: bytes, limit: int, at_blank_lines: bool) -> int:
    """After the next blank lines; if there are none near, after a line, a word or a character."""
    if at_blank_lines and (blank := BLANK_LINES.search(data, 0, limit)):
        return blank.end()
    if len(data) <= limit:
        return len(data)
    for separator in (b"\n", b" "):
        if end := data.rfind(separator, 0, limit) + 1:
            return end
    while data[limit] & 0xC0 == 0x80 and limit > 1:  # inside a character
        limit -= 1
    return limit


def input_files(paths: list[str]) -> list[str]:
    """The files to read, those of folders in order."""
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            files += files_inside(path)
        elif os.path.isfile(path):
            files.append(path)
        else:
            what = "not a regular file" if os.path.lexists(path) else "no such file"
            raise cli.ToolError(f"{path}: {what}: name text files, .jsonl files or folders")
    if twice := [path for path, n in Counter(map(os.path.realpath, files)).items() if n > 1]:
        raise cli.ToolError(f"{twice[0]}: named twice: name it once")
    return files


def files_inside(folder: str) -> list[str]:
    """The regular files in a folder and below it, but for hidden names; says what it leaves out."""

    def refuse(error: OSError) -> None:
        raise error

    files, others = [], []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for path in [Path(place, n) for n in [*names, *links] if not n.startswith(".")]:
            (files if path.is_file() else others).append(str(path))
    if not files:
        raise cli.ToolError(f"{folder}: a folder without files: name text or .jsonl files")
    if others:
        print(f"note: left out: {len(others)} that are no regular file, as {min(others)}")
    return sorted(files)


class Source:
    """The documents of the input files, in order. The first num_val_docs are for validation. A
    single text is cut into passages, or with one_document into its first tenth and the rest.
    """

    def __init__(
        self, paths: list[str], num_val_docs: int | None = None, one_document: bool = False
    ) -> None:
        self.files = input_files(paths)
        self.is_one_text = len(self.files) == 1 and is_text(self.files[0])
        self.one_document = one_document
        if one_document and not self.is_one_text:
            raise cli.ToolError(f"{paths[0]}: --one-document: is for one text file: leave it out")
        self.stamps = self.stamps_now()  # before anything is read
        ends = [*accumulate(size for _, size, _ in self.stamps)]
        self.before, self.bytes = [0, *ends[:-1]], ends[-1] or 1  # before each file, of all
        self.bytes_read = 0
        for path in filter(is_text, self.files):
            refuse_json_as_text(path)
        self.num_val_docs = self.count_val_docs() if num_val_docs is None else num_val_docs

    def documents(self, first: int = 0) -> Iterator[Document]:
        """The documents from that number on. Raises ToolError for one that is too large."""
        number = 0
        for before, path in zip(self.before, self.files, strict=True):
            line, is_rows = 1, kind(path) == ".parquet"
            with opened(path) as (file, content):
                for data in self.parts(path, content):
                    self.bytes_read = before + file.tell()
                    if len(data) > MAX_DOCUMENT_BYTES:
                        limit = f"a document over {MAX_DOCUMENT_BYTES:,} bytes"
                        raise cli.ToolError(f"{path}:{line}: {limit}; split it")
                    if data.strip() or not is_json_lines(path):
                        if number >= first:
                            yield Document(number, path, line, data)
                        number += 1
                    line += 1 if is_rows else data.count(b"\n")

    def parts(self, path: str, content: BinaryIO) -> Iterator[bytes]:
        """What the documents of a file are made of; each has at most one byte too many."""
        if kind(path) == ".parquet":
            return rows_of(content, path)
        if self.one_document:
            with opened(path) as (_, again):
                size = sum(map(len, iter(lambda: again.read(BATCH_BYTES), b"")))
            first = min(size // 10, MAX_DOCUMENT_BYTES)
            return cut(content, first, MAX_DOCUMENT_BYTES, at_blank_lines=False)
        if self.is_one_text:
            return cut(content, PASSAGE_BYTES, PASSAGE_BYTES, at_blank_lines=True)
        read = content.readline if is_json_lines(path) else content.read
        return iter(lambda: read(MAX_DOCUMENT_BYTES + 1), b"")

    def count_val_docs(self) -> int:
        """A tenth of the documents, at most MAX_VAL_DOCS and at least one."""
        return max(1, sum(1 for _ in islice(self.documents(), 10 * MAX_VAL_DOCS)) // 10)

    def val_digests(self) -> frozenset[bytes]:
        """Digests of the validation documents. Raises ToolError if none is left for training."""
        first = islice(self.documents(), self.num_val_docs + 1)
        digests = [digest_of(document.text().encode()) for document in first]
        if len(digests) > self.num_val_docs:
            return frozenset(digests[:-1])
        count, remedy = len(digests), "separate documents by blank lines, or give more files"
        remedy = f"set --num-val-docs {max(1, count // 10)}" if count > 1 else remedy
        what = f"documents in all: {count}; validation takes the first {self.num_val_docs}"
        raise cli.ToolError(f"{self.files[0]}: {what}: none left for training: {remedy}")

    def stamps_now(self) -> list[list[Any]]:
        """What changes if somebody writes to an input file."""
        states = [(path, os.stat(path)) for path in self.files]
        return [[os.path.abspath(path), s.st_size, s.st_mtime_ns] for path, s in states]


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# === TOKENIZERS ===================================================================================


class Tokenizer:
    """A SentencePiece .model or a byte tokenizer's .json. Raises ToolError for anything else."""

    def __init__(self, path: Path) -> None:
        self.processor: sentencepiece.SentencePieceProcessor | None = None
        self.offset = 0  # of a byte tokenizer: byte b is token b + offset
        self.unknown_id = -1  # none
        try:
            data = path.read_bytes()
            if path.suffix == ".json":
                form = json.loads(data)
                self.offset = form["offset"] if "offset" in form else form["config"]["byte_offset"]
                self.vocab_size, self.bos_id = 256 + self.offset, 1
            else:
                self.processor = sentencepiece.SentencePieceProcessor(model_proto=data)
                self.vocab_size, self.bos_id = len(self.processor), self.processor.bos_id()
                self.unknown_id = self.processor.unk_id()
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            reason = getattr(error, "strerror", "") or cli.one_line(error)
            reason = "no SentencePiece model" if type(error) is RuntimeError else reason
            remedy = "give a SentencePiece .model, or a byte tokenizer's .json"
            raise cli.ToolError(f"{path}: not a usable tokenizer ({reason}); {remedy}") from None
        if self.bos_id < 0 or self.vocab_size > MOST_VOCABULARY:
            fault = f"{self.vocab_size} pieces and BOS id {self.bos_id}"
            remedy = f"shards need a BOS piece and at most {MOST_VOCABULARY:,} pieces"
            raise cli.ToolError(f"{path}: {fault}: {remedy}")

    def has_space(self) -> bool:
        """Has it a piece for a single space? Without one, bytes are counted wrongly."""
        encode = self.processor.encode
        spaces = {*encode(" ")} | ({*encode("a b")} - {*encode("ab")})
        return not any(i == self.unknown_id or self.processor.is_byte(i) for i in spaces)

    def changes_text(self) -> str:
        """What its normaliser changes, in words; empty if nothing."""
        probe = " a  b\tc\n\nd\r\n\u00a0e\ufb01 "
        if not self.processor or self.processor.normalize(probe).replace(SPACE, " ") == probe:
            return ""
        changes = "runs of white space, line ends and tabs become one space, and some characters"
        why = "bits per byte are those of the changed text"
        return f"its normaliser changes text: {changes} become others; {why}"

    def encode(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """BOS and the tokens of each document, as uint16."""
        if self.processor:
            many = self.processor.encode(texts, add_bos=True, out_type="numpy", num_threads=threads)
            return [ids.astype(np.uint16) for ids in many]
        bos, offset = np.array([self.bos_id], np.uint16), np.uint16(self.offset)
        contents = [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
        return [np.concatenate([bos, content + offset]) for content in contents]


def training_sentences(source: Source, faults: list[BaseException]) -> Iterator[str]:
    """Training documents, all or an even sample of SAMPLE_BYTES, as sentences that SentencePiece
    accepts. What is raised is in `faults`, too: SentencePiece makes a RuntimeError of it.
    """
    try:
        val_digests = source.val_digests()
        threshold = SAMPLE_BYTES / source.bytes * 2**32
        for document in source.documents():
            # The choice depends only on the number: a repeated command trains the same tokenizer.
            if zlib.crc32(b"%d" % document.number) >= threshold:
                continue
            text = document.text()
            if digest_of(text.encode()) not in val_digests:
                # SentencePiece drops sentences that hold these.
                text = text.replace("\0", " ").replace("\t", " ")
                for at in range(0, len(text), SENTENCE_CHARACTERS):
                    yield text[at : at + SENTENCE_CHARACTERS]
    except (cli.ToolError, OSError, KeyboardInterrupt) as fault:
        faults.append(fault)
        raise


def train_tokenizer(source: Source, vocab_size: int, normalization: str) -> bytes:
    """Trains a SentencePiece BPE model on the training documents; returns the file's bytes.

    "identity" keeps every character, white space too; "nmt_nfkc" changes text, as the published
    tokenizers do. Raises ToolError if the documents are too small for such a vocabulary.
    """
    model = io.BytesIO()
    lossless = normalization == "identity"
    faults: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=training_sentences(source, faults),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.999,
            byte_fallback=True,
            split_digits=True,
            add_dummy_prefix=False,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            normalization_rule_name=normalization,
            remove_extra_whitespaces=not lossless,
            allow_whitespace_only_pieces=lossless,
            # Without a lone U+2581 a single space would become, and count as, three byte pieces.
            required_chars=SPACE,
            max_sentence_length=4 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise (faults[0] if faults else too_small(source, vocab_size, str(error))) from None
    return model.getvalue()


def too_small(source: Source, vocab_size: int, words: str) -> cli.ToolError:
    """SentencePiece's refusal of a vocabulary, with what to do."""
    reason = words.rpartition("] ")[2].strip()
    if not reason:
        fault = "all training documents are empty or repeat validation documents"
        return cli.ToolError(f"{source.files[0]}: {fault}; add others")
    most = re.search(r"<= (\d+)", reason)
    remedy = f"set --vocab-size {most[1]} or less, or give more text" if most else "give --bytes"
    fault = f"no vocabulary of {vocab_size} fits these documents ({reason.partition('.')[0]})"
    return cli.ToolError(f"{source.files[0]}: {fault}: {remedy}")


# === EXPORT =======================================================================================


class DataSet(NamedTuple):
    folder: Path
    tokenizer: Path


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of export.json: the state of an export after its last complete shard."""
    return {
        "settings": settings,
        "tokenizer_sha256": "",
        "complete": False,
        # The number of the next document, and how many of its tokens are in complete shards.
        "document": 0,
        "tokens_done": 0,
        "shards": {"val": {}, "train": {}},  # split -> file name -> dataset.describe_shard
        "docs": {"val": 0, "train": 0, "repeats_of_val_left_out": 0},
        "miscounted_tokens": {"val": 0, "train": 0},
    }


def tokens_of(state: dict[str, Any], split: str) -> int:
    return sum(entry["tokens"] for entry in state["shards"][split].values())


class ShardWriter:
    """Cuts each split's tokens into shards of shard_tokens; only the last may be shorter."""

    def __init__(self, folder: Path, state: dict[str, Any], shard_tokens: int) -> None:
        self.folder, self.state = folder, state
        self.buffer = np.empty(shard_tokens, dtype="<u2")
        self.used = 0

    def add(self, split: str, tokens: np.ndarray, done: int, document: int) -> None:
        """Appends the tokens, from `done` on, of the document of that number."""
        while done < len(tokens):
            part = tokens[done : done + len(self.buffer) - self.used]
            self.buffer[self.used : self.used + len(part)] = part
            self.used += len(part)
            done += len(part)
            if self.used == len(self.buffer):
                self.flush(split, document, done)

    def flush(
        self, split: str, document: int, tokens_done: int = 0, complete: bool = False
    ) -> None:
        """Writes what is buffered as the split's next shard, then notes where to continue."""
        shards = self.state["shards"][split]
        if self.used:
            name = f"fineweb_{split}_{len(shards):06d}.bin"
            header = np.zeros(dataset.HEADER_BYTES // 4, dtype="<i4")
            header[:3] = dataset.SHARD_MAGIC, dataset.SHARD_VERSION, self.used
            dataset.write_atomic(self.folder / name, header, self.buffer[: self.used])
            shards[name] = dataset.describe_shard(self.folder / name)
            self.used = 0
        self.state |= {"document": document, "tokens_done": tokens_done, "complete": complete}
        dataset.write_json(self.folder / dataset.EXPORT_FILE, self.state)


def export_documents(
    source: Source,
    made: DataSet,
    state: dict[str, Any],
    producing: dataset.ProducingFile,
    threads: int,
) -> None:
    """Writes both splits' shards from where `state` stands; it is saved after each shard."""
    val_digests = source.val_digests()
    tokenizer = Tokenizer(made.tokenizer)
    writer = ShardWriter(made.folder, state, state["settings"]["shard_tokens"])
    begin, done = state["document"], state["tokens_done"]
    docs, wrong = state["docs"], state["miscounted_tokens"]
    producing.update(val_complete=begin >= source.num_val_docs)
    progress = cli.progress(f"{made.folder.name}, bytes of text", source.bytes)
    for batch in batches(source.documents(begin)):
        texts = [document.text() for document in batch]
        many = tokenizer.encode(texts, threads)
        for document, text, tokens in zip(batch, texts, many, strict=True):
            split = "val" if document.number < source.num_val_docs else "train"
            if document.number == source.num_val_docs and not done:
                writer.flush("val", document.number)
                producing.update(val_complete=True)
            if split == "train" and digest_of(text.encode()) in val_digests:
                docs["repeats_of_val_left_out"] += 1
                continue
            if not done:  # else it was counted before the interruption
                docs[split] += 1
                wrong[split] += int((tokens == tokenizer.unknown_id).sum())
            writer.add(split, tokens, done, document.number)
            done = 0
        producing.update()
        progress.update(source.bytes_read - progress.n)
    if not docs["train"]:
        fault = "all training documents repeat validation documents"
        raise cli.ToolError(f"{source.files[0]}: {fault}: add others")
    for before, now in zip(source.stamps, source.stamps_now(), strict=True):
        if before != now:
            raise cli.ToolError(f"{now[0]}: it was changed while it was read: {start_anew(made)}")
    writer.flush("train", 0, complete=True)


def start_anew(made: DataSet) -> str:
    """What to do about a data set that cannot be continued."""
    return f"choose another --name, or move {made.folder} and {made.tokenizer} away"


def open_state(made: DataSet, settings: dict[str, Any]) -> dict[str, Any]:
    """The export to begin or to continue. Raises ToolError if the folder holds something else."""
    state = dataset.read_export(made.folder)
    if state is None:
        for other in [*made.folder.glob("fineweb_*.bin"), made.tokenizer]:
            if os.path.lexists(other):
                raise cli.ToolError(f"{other}: was not made by this command: {start_anew(made)}")
        return new_state(settings)
    was = state["settings"]
    if changed := [key for key in settings if was.get(key) != settings[key]]:
        old, new = ({key: s.get(key) for key in changed} for s in (was, settings))
        others = "other input files, or they have changed since"
        what = others if "inputs" in changed else f"{old}, now {new}"
        raise cli.ToolError(f"{made.folder}: made with {what}: {start_anew(made)}")
    for name, entry in (state["shards"]["val"] | state["shards"]["train"]).items():
        try:
            dataset.check_shard(made.folder / name, entry)
        except cli.ToolError as error:
            raise cli.ToolError(f"{error}, or {start_anew(made)}") from None
    wanted = state["tokenizer_sha256"]
    if wanted and made.tokenizer.exists() and dataset.file_sha256(made.tokenizer) != wanted:
        raise cli.ToolError(f"{made.tokenizer}: it was changed: {start_anew(made)}")
    return state


def make_tokenizer(source: Source, made: DataSet, state: dict[str, Any]) -> None:
    """Writes the tokenizer unless it is there. Raises ToolError if it comes out otherwise."""
    recipe = state["settings"]["tokenizer"]
    if not made.tokenizer.exists():
        if "model" in recipe:
            content = Path(recipe["model"]).read_bytes()
        elif "bytes" in recipe:
            content = json.dumps(BYTE_TOKENIZER).encode() + b"\n"
        else:
            print(f"training a tokenizer of {recipe['vocab_size']} pieces ...", flush=True)
            content = train_tokenizer(source, **recipe)
        digest = hashlib.sha256(content).hexdigest()
        if state["tokenizer_sha256"] not in ("", digest):
            raise cli.ToolError(f"{made.tokenizer}: missing: restore it, or {start_anew(made)}")
        # First, so that the tokenizer is known as ours even if we are killed now.
        state["tokenizer_sha256"] = digest
        dataset.write_json(made.folder / dataset.EXPORT_FILE, state)
        dataset.write_atomic(made.tokenizer, content)
    dataset.record_tokenizer(made.folder, made.tokenizer)
    print(f"{made.tokenizer}: ready; training may start while shards are made", flush=True)


def make_data_set(options: argparse.Namespace) -> tuple[DataSet, dict[str, Any]]:
    """Makes a tokenizer and a data set, or what is missing of them."""
    for name in filter(os.path.isdir, options.files):
        if options.out.resolve().is_relative_to(Path(name).resolve()):
            where = f"--out {options.out}: it is in the input {name}"
            raise cli.ToolError(f"{where}: name another folder")
    label, ending, recipe = tokenizer_recipe(options)
    source = Source(options.files, options.num_val_docs, options.one_document)
    source.val_digests()  # refuses too few documents before a tokenizer is trained
    folder = options.out / "datasets" / f"{options.name}_{label}"
    made = DataSet(folder, options.out / "tokenizers" / f"{options.name}_{ending}")
    settings = {"inputs": source.stamps, "num_val_docs": source.num_val_docs}
    settings |= {"shard_tokens": options.shard_tokens, "tokenizer": recipe}
    settings |= {"one_document": options.one_document}
    if source.is_one_text:
        print(f"{source.files[0]}: {CUT_AS_ONE if options.one_document else CUT}", flush=True)
    with dataset.locked(made.folder):
        state = open_state(made, settings)
        if not state["complete"]:
            make_tokenizer(source, made, state)
            if state["shards"]["val"]:
                print(f"continuing at document {state['document'] + 1:,}", flush=True)
            try:
                with dataset.ProducingFile(made.folder) as producing:
                    export_documents(source, made, state, producing, options.workers)
            except cli.ToolError:
                if not any(state["shards"].values()):  # mended input may come next
                    made.tokenizer.unlink(missing_ok=True)
                    (made.folder / dataset.EXPORT_FILE).unlink(missing_ok=True)
                raise
        # A command that was killed may have left it.
        (made.folder / ".producing").unlink(missing_ok=True)
    docs, val, train = state["docs"], tokens_of(state, "val"), tokens_of(state, "train")
    said = f"{docs['val']:,} validation documents with {val:,} tokens"
    said += f", {docs['train']:,} training documents with {train:,}"
    said += f"; {docs['repeats_of_val_left_out']:,} repeats of validation left out"
    print(f"{made.folder}: {said}", flush=True)
    return made, state


def tokenizer_recipe(options: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """(the ends of the data set's name and of the tokenizer's, what the tokenizer is made from)"""
    if options.bytes:
        return "byte260", "byte260.json", {"bytes": True}
    if options.model:
        tokenizer, digest = Tokenizer(options.model), dataset.file_sha256(options.model)
        if not tokenizer.has_space():
            fault = "it has no piece for a single space: bits per byte would be wrong"
            remedy = "train it with required_chars='\u2581' and byte_fallback, or leave out --model"
            raise cli.ToolError(f"--model {options.model}: {fault}: {remedy}")
        recipe, size = {"model": str(options.model), "sha256": digest}, tokenizer.vocab_size
        return f"sp{size}", f"{size}.model", recipe  # it may be of another kind than BPE
    recipe = {"vocab_size": options.vocab_size, "normalization": options.normalization}
    return f"sp{options.vocab_size}", f"{options.vocab_size}_bpe.model", recipe


def remarks(made: DataSet, state: dict[str, Any]) -> Iterator[str]:
    """What to know about a data set, with remedies."""
    if loss := Tokenizer(made.tokenizer).changes_text():
        yield f"note: {made.tokenizer}: {loss}"
    val, train = state["miscounted_tokens"].values()
    if val or train:
        what = f"{val:,} validation tokens and {train:,} training tokens are unknown"
        yield f"WARNING: {what}, their bytes not counted: use a tokenizer with byte_fallback"
    val, train = tokens_of(state, "val"), tokens_of(state, "train")
    if val > (val + train) / 5:
        remedy = "name smaller documents first, or set --num-val-docs (and another --name)"
        yield f"WARNING: validation has {val / (val + train):.0%} of all tokens: {remedy}"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add, count = parser.add_argument, cli.number(int, 1)
    add("files", nargs="+", metavar="FILE", help="text, .jsonl or .parquet files, or folders")
    add("--out", type=Path, default=DATA, help="where to write (default: %(default)s)")
    add("--name", default="docs", help="the beginning of all names (default: docs)")
    one_of = parser.add_mutually_exclusive_group().add_argument
    pieces = cli.number(int, LEAST_VOCABULARY, MOST_VOCABULARY)
    one_of("--vocab-size", type=pieces, default=1024, metavar="N", help="pieces (default: 1024)")
    one_of("--model", type=Path, metavar="M", help="use this SentencePiece model instead")
    one_of("--bytes", action="store_true", help="use the byte tokenizer of 260 ids instead")
    add("--num-val-docs", type=count, metavar="N", help="default: a tenth, at most 50000")
    whole = "keep a single text together: its first tenth is for validation, the rest for training"
    add("--one-document", action="store_true", help=whole)
    tokens, text = cli.number(int, 1, 2**31 - 1), "tokens per shard (default: %(default)s)"
    add("--shard-tokens", type=tokens, default=100_000_000, metavar="N", help=text)
    text = "how text is changed (default: identity, which keeps it; nmt_nfkc: see above)"
    add("--normalization", choices=("identity", "nmt_nfkc"), help=text)
    cpus, text = len(os.sched_getaffinity(0)), "threads (default: all that it may use, %(default)s)"
    add("--workers", type=count, default=cpus, metavar="N", help=text)
    options = parser.parse_args(words)
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        parser.error(f"--name {options.name}: it names files; give letters, digits, '.', '_', '-'")
    if options.model and options.model.suffix == ".json":
        parser.error(f"--model {options.model}: a byte tokenizer; give --bytes")
    if options.normalization and (options.model or options.bytes):
        parser.error("--normalization: does nothing with --model or --bytes; leave it out")
    options.normalization = options.normalization or "identity"
    return options


def main() -> None:
    made, state = make_data_set(parse_arguments(sys.argv[1:]))
    for remark in remarks(made, state):
        print(remark)
    print(dataset.training_commands(*made, Tokenizer(made.tokenizer).vocab_size))


if __name__ == "__main__":
    dataset.run_tool(main, "the same command continues after the last complete shard")
