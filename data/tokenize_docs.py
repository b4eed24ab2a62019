"""Turn documents into a tokenizer and training shards.

    python3 data/tokenize_docs.py notes/*.txt --name notes --num-val-docs 20
    python3 data/tokenize_docs.py notes/*.txt --name notes --num-val-docs 20 --bytes
    python3 data/tokenize_docs.py docs.jsonl --name mine --model my_bpe.model
    python3 data/tokenize_docs.py docs.jsonl --live -- torchrun --nproc_per_node=8 train_gpt.py
    # the challenge's documents, normalised as the challenge does it
    python3 data/tokenize_docs.py data/docs_selected.jsonl --normalization nmt_nfkc

Input: .jsonl files with one {"text": ...} per line. Any other file is UTF-8 text and one document,
but a single text file is cut into documents after its blank lines, or by size if it has none.
Files named .json, .csv, .tsv, .parquet, .bin, .pdf, .docx, .gz or .zip are refused.
The first --num-val-docs documents are the validation split. Tokenizers are trained on the others
only, and a later document that repeats a validation document is left out.

The tokens of a document can be decoded to its exact text: spaces, tabs and line ends stay.
--normalization nmt_nfkc changes text first, as the published tokenizers do: runs of white space,
line ends and tabs become one space, and some characters become others. Bits per byte are then those
of the changed text.

Output, under --out:

    tokenizers/<name>_<vocabulary>_bpe.model (or <name>_byte260.json)
    datasets/<name>_sp<vocabulary>/ (or <name>_byte260/):
        fineweb_val_*.bin, fineweb_train_*.bin, export.json, tokenizer.sha256
    manifest.json: tokenizers and data sets, with counts and hashes

Shard k of a split holds its tokens [k * shard_tokens, (k + 1) * shard_tokens), so its content
depends only on its number. If the command was stopped, run it again: it goes on after the last
complete shard.

Training may run at the same time: the file .producing in the data set's folder (see producer.py)
tells it to wait for more shards. --live is for this: it makes small shards on half of the cores.
The command after -- starts with DATA_PATH, TOKENIZER_PATH and VOCAB_SIZE set, as soon as the
validation split and a training shard are complete. The Python that runs this tool also runs the
command, if that is torchrun, python3 or only the name of a script; torchrun's own report of a
failure is left out. The exit code is that of the command. If the command ends first, no more shards
are made. If this tool is interrupted, fails or is killed (kill -9), the command ends, too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from launching import starts_torchrun
from producer import (
    PRODUCING,
    DataError,
    Parser,
    Producer,
    StoppedEarlyError,
    before_what,
    command_again,
    locked,
    missing_package,
    one_line,
    open_file,
    read_file,
    read_json,
    record_tokenizer,
    run_tool,
    to_train,
    write_atomic,
    write_json,
)

try:
    import numpy as np
    import sentencepiece
except ImportError as error:
    sys.exit(missing_package(error))

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_WORDS = 20240520, 1, 256
BYTE_TOKENIZER = {"kind": "byte", "offset": 4}
BYTE_VOCAB_SIZE, BYTE_BOS_ID = 260, 1
STATE_NAME = "export.json"
BLOCK_BYTES = 1 << 18
MAX_DOCUMENT_BYTES = 64 << 20  # this, and that many bytes in flight, bound memory
PASSAGE_BYTES = 1 << 14  # a document cut from a single text file has no more
BLANK_LINES = re.compile(rb"\n[ \t\r]*\n\s*")
BLANK_LINES_AT_END = re.compile(rb"\n[ \t\r]*\n\s*\Z")
SPACE = "\u2581"  # SentencePiece's mark for a space
CUT_CHARACTERS = 1 << 20  # SentencePiece takes about 45 bytes of memory for each
CUT_HERE = re.compile(r"(?<=[^\W_]) (?=[^\W_])")  # a lone space between letters or digits
# At most 16,000 bytes: SentencePiece drops longer sentences without a word.
SENTENCE_CHARACTERS = 4000
PROGRESS_SECONDS = 10.0
SHARD_TOKENS = 100_000_000
LAUNCHER = re.compile(r"torchrun|accelerate|python[\d.]*")
ROW_TOKENS = 1024  # the trainer's default TRAIN_SEQ_LEN
# A second or two of work for one core, so that training begins soon;
# more than a step of 524,288 tokens, and each of many thousands of files still holds 2 MB.
LIVE_SHARD_TOKENS = 1_000_000


# === FILES ========================================================================================


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write uint16 tokens behind their header of 256 little-endian int32 words;
    returns the file's SHA-256.
    """
    header = np.zeros(SHARD_HEADER_WORDS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    return write_atomic(path, header, tokens.astype("<u2", copy=False))


# === DOCUMENTS ====================================================================================

OTHER_FORMATS = {
    ".json": "one JSON value",
    ".csv": "a table",
    ".tsv": "a table",
    ".parquet": "a table",
    ".bin": "tokens, no text",
    ".pdf": "no plain text",
    ".docx": "no plain text",
    ".gz": "packed",
    ".zip": "packed",
}
LINE_FORM = 'each line must be an object like {"text": "..."}; plain text is to be named .txt'


class Block(NamedTuple):
    """Some documents of a file. The first four fields say where reading can start again."""

    number: int  # of its first document in the whole input, from 0
    file: int  # index of its file
    offset: int  # its first byte in that file
    line: int  # its first line, from 1
    path: str
    documents: list[bytes]  # with all that separates them, as in the file

    def place(self, index: int) -> list[int]:
        """Where the block's index-th document begins, as its first four fields say it."""
        before = self.documents[:index]
        lines = sum(data.count(b"\n") for data in before)
        return [self.number + index, self.file, self.offset + self.size(index), self.line + lines]

    def size(self, count: int | None = None) -> int:
        """Bytes of its first `count` documents, or of all."""
        return sum(map(len, self.documents[:count]))

    def parse(self, index: int) -> tuple[str, bytes]:
        """(text, digest) of the index-th document. Raises DataError with file and line number."""
        data, lines_before = self.documents[index], 0
        try:
            text = data.decode("utf-8")
            if self.path.endswith(".jsonl"):
                text = json.loads(text)["text"]
            return text, hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        except UnicodeError as error:
            fault = f"not UTF-8 ({error}); unpack or convert it"
            if isinstance(error, UnicodeDecodeError):
                lines_before = data.count(b"\n", 0, error.start)
                again = f"iconv -f {encoding_of(data)} -t UTF-8 {self.path} > NEW_FILE"
                fault = f"not UTF-8 ({error}); if it is text, convert it: {again}"
        except (LookupError, TypeError, AttributeError):
            fault = f'no "text" that is a string; {LINE_FORM}'
        except (ValueError, RecursionError) as error:
            fault = f"not JSON ({getattr(error, 'msg', error)}); {LINE_FORM}"
        raise DataError(f"{self.path}:{self.place(index)[3] + lines_before}: {fault}")


def encoding_of(data: bytes) -> str:
    """The encoding that text in no UTF-8 most likely has, as iconv calls it."""
    return "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"


def passages(handle: BinaryIO) -> Iterator[bytes]:
    """A single text file as documents; reading may start at any of them and gives the same ones."""
    data, start, more = b"", 0, b"-"
    while more:
        more = handle.read(BLOCK_BYTES)
        data, start = data[start:] + more, 0
        while start < len(data) and (not more or len(data) > start + PASSAGE_BYTES):
            end = passage_end(data, start)
            yield data[start:end]
            start = end


def passage_end(data: bytes, start: int) -> int:
    """After the next blank lines; if there are none near, after a line, a word or a character."""
    limit = start + PASSAGE_BYTES
    if blank := BLANK_LINES.search(data, start, limit):
        return blank.end()
    if len(data) <= limit:
        return len(data)
    for separator in (b"\n", b" "):
        if end := data.rfind(separator, start, limit) + 1:
            return end
    while data[limit] & 0xC0 == 0x80 and limit > start + 1:  # inside a character
        limit -= 1
    return limit


@dataclass(frozen=True)
class Source:
    """Input files, in order. The first num_val_docs documents are the validation split."""

    files: tuple[str, ...]
    num_val_docs: int

    def documents(self, handle: BinaryIO, path: str) -> Iterator[bytes]:
        """The documents from the handle's position on; each has at most one byte too many."""
        if path.endswith(".jsonl"):
            return iter(lambda: handle.readline(MAX_DOCUMENT_BYTES + 1), b"")
        if len(self.files) == 1:
            return passages(handle)
        return iter([handle.read(MAX_DOCUMENT_BYTES + 1)])

    def blocks(
        self, number: int = 0, file: int = 0, offset: int = 0, line: int = 1
    ) -> Iterator[Block]:
        """The input from that place on, in bounded blocks.

        Raises DataError for a document that is too large.
        """
        for index in range(file, len(self.files)):
            path = self.files[index]
            block, size = Block(number, index, offset, line, path, []), 0
            with open_file(path) as handle:
                handle.seek(offset)
                for document in self.documents(handle, path):
                    block.documents.append(document)
                    size += len(document)
                    if len(document) > MAX_DOCUMENT_BYTES:
                        raise DataError(
                            f"{path}:{block.place(len(block.documents) - 1)[3]}: a document over "
                            f"{MAX_DOCUMENT_BYTES:,} bytes; split it"
                        )
                    if size >= BLOCK_BYTES:
                        yield block
                        block, size = Block(*block.place(len(block.documents)), path, []), 0
                if block.documents:
                    yield block
            number, offset, line = block.number + len(block.documents), 0, 1

    def how_cut(self) -> str:
        """How a single text file becomes documents, in words; empty for other input."""
        path = self.files[0]
        if len(self.files) > 1 or path.endswith(".jsonl"):
            return ""
        lines = documents = at_blank_lines = 0
        with open_file(path) as handle:
            for passage in passages(handle):
                lines += passage.count(b"\n")
                documents += 1
                at_blank_lines += BLANK_LINES_AT_END.search(passage) is not None
        by_size = f"by size, at most {PASSAGE_BYTES:,} bytes"
        if not at_blank_lines:
            how = f"{by_size} (no blank lines)"
        elif documents > at_blank_lines + 1:  # the last one ends with the file
            how = f"at blank lines, and {by_size}, where none is near"
        else:
            how = "at blank lines"
        return f"{path}: {lines:,} lines became {documents:,} documents: split {how}"

    def first_tenth(self) -> int:
        """How many of the first documents together have at most a tenth of the input's bytes."""
        count, left = 0, sum(map(os.path.getsize, self.files)) / 10
        for block in self.blocks():
            for document in block.documents:
                left -= len(document)
                if left < 0:
                    return count
                count += 1
        return count

    def val_digests(self) -> frozenset[bytes]:
        """Digests of the validation documents.

        Raises DataError where no document is left for training.
        """
        digests: list[bytes] = []
        for block in self.blocks():
            for index in range(len(block.documents)):
                if len(digests) == self.num_val_docs:
                    return frozenset(digests)
                digests.append(block.parse(index)[1])
        count = len(digests)
        remedy = f"set --num-val-docs {max(1, count // 10)}" if count > 1 else "give more documents"
        raise DataError(
            f"{self.files[0]}: {count} documents in all, and validation takes the first "
            f"{self.num_val_docs}: none left for training; {remedy}"
        )


# === TOKENIZERS ===================================================================================


class Tokenizer:
    """A SentencePiece .model or the byte tokenizer's .json. Raises DataError for anything else."""

    def __init__(self, path: Path) -> None:
        self.processor: sentencepiece.SentencePieceProcessor | None = None
        self.kind, self.vocab_size, self.bos_id = "byte", BYTE_VOCAB_SIZE, BYTE_BOS_ID
        try:
            if path.suffix != ".json":
                # Its own reading of the file takes no path that is not UTF-8.
                self.processor = sentencepiece.SentencePieceProcessor(model_proto=read_file(path))
                self.kind, self.vocab_size = "sentencepiece_bpe", self.processor.vocab_size()
                self.bos_id = self.processor.bos_id()
            elif json.loads(read_file(path)) != BYTE_TOKENIZER:
                raise ValueError(f"a byte tokenizer is {json.dumps(BYTE_TOKENIZER)}")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give a SentencePiece .model") from None
        except (ValueError, RuntimeError) as error:  # a RecursionError is a RuntimeError
            reason = error if isinstance(error, ValueError) else "no SentencePiece model"
            raise DataError(
                f"{path}: not a usable tokenizer ({reason}); give a SentencePiece .model"
            ) from None
        if self.bos_id < 0 or self.vocab_size > 1 << 16:
            raise DataError(
                f"{path}: {self.vocab_size} pieces and BOS id {self.bos_id}; "
                "shards need a BOS piece and at most 65,536 pieces"
            )

        self.can_cut = self.processor is not None and has_words(self.processor)

    def changes_text(self) -> str:
        """What its normaliser changes, in words; empty if nothing."""
        probe = " a  b\tc\n\nd\r\n\u00a0e\ufb01 "
        if not self.processor or self.processor.normalize(probe).replace(SPACE, " ") == probe:
            return ""
        return (
            "its normaliser changes text before it is tokenised: runs of white space, line ends "
            "and tabs become one space, and some characters become others; "
            "bits per byte are those of the changed text (--normalization identity changes nothing)"
        )

    def encode_block(self, block: Block) -> tuple[np.ndarray, list[int], list[bytes]]:
        """The uint16 tokens of all its documents, each begun by BOS,
        and the length and digest of each.
        """
        ids, digests = [], []
        for index in range(len(block.documents)):
            text, digest = block.parse(index)
            ids.append(self.encode(text))
            digests.append(digest)
        return np.concatenate(ids), [len(part) for part in ids], digests

    def encode(self, text: str) -> np.ndarray:
        """BOS and the tokens of one document, as uint16."""
        if self.processor is None:
            data = np.frombuffer(b"\0" + text.encode("utf-8"), dtype=np.uint8)
            ids = data + np.uint16(BYTE_TOKENIZER["offset"])
            ids[0] = self.bos_id
            return ids
        end = self.cut(text, 0)
        # Lists, or many documents per call, would make other threads wait.
        ids = self.processor.encode(text[:end], add_bos=True, out_type="numpy")
        parts = [ids.astype(np.uint16)]
        while end < len(text):
            start, end = end, self.cut(text, end)
            # After a letter a space is kept; at the start of a text it may be dropped.
            ids = self.processor.encode("a" + text[start:end], out_type="numpy")
            parts.append(ids[len(self.processor.encode("a")) :].astype(np.uint16))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def cut(self, text: str, start: int) -> int:
        """The end of the part from `start` on: a long text is encoded in parts of bounded memory,
        with the ids of the whole.
        """
        found = self.can_cut and CUT_HERE.search(text, start + CUT_CHARACTERS)
        return found.start() if found else len(text)


def has_words(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether no piece goes on across a space, so that what is before it cannot change the ids
    behind it. Only of BPE, whose scores are ranks: others add scores up, and round.
    """
    ids = range(processor.vocab_size())
    pieces = [processor.id_to_piece(i) for i in ids]
    return (
        SPACE in pieces
        and not any(SPACE in piece.lstrip(SPACE) or " " in piece for piece in pieces)
        and all(processor.get_score(i).is_integer() for i in ids)
    )


def training_sentences(source: Source, sample_bytes: int) -> Iterator[str]:
    """Training documents, all or an even sample of about sample_bytes of input,
    as sentences the trainer accepts.
    """
    val_digests = source.val_digests()
    threshold = sample_bytes / max(1, sum(os.path.getsize(path) for path in source.files)) * 2**32
    for block in source.blocks():
        for index in range(len(block.documents)):
            # The choice depends only on the number: a repeated command trains the same tokenizer.
            if zlib.crc32(b"%d" % (block.number + index)) >= threshold:
                continue
            text, digest = block.parse(index)
            if digest not in val_digests:
                # The trainer drops sentences that hold these.
                text = text.replace("\0", " ").replace("\t", " ")
                yield from (
                    text[at : at + SENTENCE_CHARACTERS]
                    for at in range(0, len(text), SENTENCE_CHARACTERS)
                )


def train_tokenizer(
    source: Source, vocab_size: int, normalization: str, sample_bytes: int = 50_000_000
) -> bytes:
    """Train a SentencePiece BPE model on the training documents; returns the model file's bytes.

    "identity" keeps every character, white space too. "nmt_nfkc" changes text, as the published
    tokenizers do: see Tokenizer.changes_text. Raises DataError if the documents are too small for
    such a vocabulary.
    """
    model = io.BytesIO()
    lossless = normalization == "identity"
    faults: list[BaseException] = []

    def sentences() -> Iterator[str]:
        # SentencePiece turns what this raises into a RuntimeError with a traceback in its text.
        try:
            yield from training_sentences(source, sample_bytes)
        except (DataError, OSError, KeyboardInterrupt) as fault:
            faults.append(fault)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
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
            # Without a lone U+2581 a single space would become three byte pieces
            # and count as three bytes.
            required_chars="\u2581",
            max_sentence_length=4 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "they hold no text"
        most, least = (re.search(text, reason) for text in (r"<= (\d+)", r"\d+ vs (\d+)"))
        remedy = f"set --vocab-size {most[1]} or less, or " if most else ""
        remedy = f"set --vocab-size {least[1]} or more, or " if least else remedy
        refusal = DataError(
            f"{source.files[0]}: these documents are too small for a vocabulary of {vocab_size} "
            f"({reason.partition('.')[0]}); {remedy}give more text, or --bytes"
        )
        raise (faults[0] if faults else refusal) from None
    return model.getvalue()


# === EXPORT =======================================================================================


def encode_in_order(
    blocks: Iterator[Block], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Block, np.ndarray, list[int], list[bytes]]]:
    """Each block with its encode_block; at most 2 blocks a thread are in flight, and of large
    documents fewer, which bounds memory.
    """
    pending: deque[tuple[Block, Future]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        while True:
            in_flight = sum(block.size() for block, _ in pending)
            while len(pending) < 2 * workers and in_flight < MAX_DOCUMENT_BYTES:
                if not (block := next(blocks, None)):
                    break
                pending.append((block, pool.submit(tokenizer.encode_block, block)))
                in_flight += block.size()
            if not pending:
                return
            block, future = pending.popleft()
            yield block, *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of export.json: the state of an export after its last complete shard."""
    return {
        "settings": settings,
        "tokenizer_sha256": "",
        "complete": False,
        # The next document, and how many of its tokens are in complete shards.
        "place": [0, 0, 0, 1],
        "tokens_done": 0,
        "shards": {"val": {}, "train": {}},  # split -> file name -> tokens and sha256
        "tokens": {"val": 0, "train": 0},
        "docs": {"val": 0, "train": 0, "repeats_of_val_left_out": 0},
        # Chained over the documents, so that it can be continued.
        "docs_sha256": {"val": "", "train": ""},
    }


def is_state(state: dict[str, Any]) -> bool:
    """Has this object, read from export.json, the form of new_state?"""
    form = new_state({})
    if any(type(state.get(key)) is not type(value) for key, value in form.items()):
        return False
    place, shards = state["place"], state["shards"]
    if len(place) != 4 or any(type(number) is not int for number in place):
        return False
    for key in ("shards", "tokens", "docs", "docs_sha256"):
        of_key = form[key].items()
        if any(type(state[key].get(name)) is not type(value) for name, value in of_key):
            return False
    every = [shard for split in ("val", "train") for shard in shards[split].values()]
    return all(isinstance(shard, dict) and type(shard.get("tokens")) is int for shard in every)


def val_is_complete(state: dict[str, Any], source: Source) -> bool:
    """Are all shards of the validation split written? The place is behind it then."""
    return state["complete"] or state["place"][0] >= source.num_val_docs


class ShardWriter:
    """Cuts each split's tokens into shards of exactly shard_tokens,
    of which only the last may be shorter.
    """

    def __init__(
        self, folder: Path, state: dict[str, Any], shard_tokens: int, save: Callable[[dict], None]
    ) -> None:
        self.folder, self.state, self.save = folder, state, save
        self.buffer = np.empty(shard_tokens, dtype=np.uint16)
        self.used = 0

    def add(self, split: str, tokens: np.ndarray, done: int, block: Block, index: int) -> None:
        """Append the tokens, from `done` on, of the block's index-th document."""
        while done < len(tokens):
            part = tokens[done : done + len(self.buffer) - self.used]
            self.buffer[self.used : self.used + len(part)] = part
            self.used += len(part)
            done += len(part)
            if self.used == len(self.buffer):
                self.flush(split, block.place(index), done)

    def flush(self, split: str, place: list[int], tokens_done: int = 0) -> None:
        """Write what is buffered as the split's next shard, then note where to go on."""
        shards = self.state["shards"][split]
        if self.used:
            name = f"fineweb_{split}_{len(shards):06d}.bin"
            shards[name] = {
                "tokens": self.used,
                "sha256": write_shard(self.folder / name, self.buffer[: self.used]),
            }
            self.state["tokens"][split] += self.used
            self.used = 0
        self.state.update(place=place, tokens_done=tokens_done)
        self.save(self.state)


def export_documents(
    source: Source,
    tokenizer_path: Path,
    writer: ShardWriter,
    *,
    workers: int,
    progress: Callable[[Block, int], None],
) -> None:
    """Write both splits' shards from where the writer's `state` stands;
    it is advanced and saved after each shard.

    `progress` hears of every document and its number of tokens, before they go into a shard:
    it may wait.
    """
    val_digests = source.val_digests()
    tokenizer = Tokenizer(tokenizer_path)
    state = writer.state
    done = state["tokens_done"]
    blocks = source.blocks(*state["place"])
    for block, tokens, lengths, digests in encode_in_order(blocks, tokenizer, workers):
        end = 0
        for index, (length, digest) in enumerate(zip(lengths, digests, strict=True)):
            start, end = end, end + length
            split = "val" if block.number + index < source.num_val_docs else "train"
            if block.number + index == source.num_val_docs and not done:
                writer.flush("val", block.place(index))
            if split == "train" and digest in val_digests:
                state["docs"]["repeats_of_val_left_out"] += 1
                continue
            if not done:  # else it was counted before the interruption
                state["docs"][split] += 1
                state["docs_sha256"][split] = sha256(state["docs_sha256"][split].encode() + digest)
            progress(block, length)
            writer.add(split, tokens[start:end], done, block, index)
            done = 0
    if not state["docs"]["train"]:
        raise DataError(
            f"{source.files[0]}: all training documents repeat validation documents; add others"
        )
    state["complete"] = True
    writer.flush("train", [0, 0, 0, 1])


# === THE COMMAND THAT TRAINS ======================================================================


class Interrupted(KeyboardInterrupt):
    """A signal that asks the tool to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Command:
    """The command after --, which runs beside the export. Without one, nothing happens here."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.process, self.guard, self.filter = words, None, None, None
        self.starting, self.pending = False, 0

    def on_signal(self, number: int, frame: object) -> None:
        """A signal's handler: raises Interrupted."""
        if not self.starting:
            raise Interrupted(number)
        self.pending = number

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Turn the signals that ask for an end into Interrupted;
        whoever started us may have them ignored.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in (number for number in numbers if before[number] != signal.SIG_IGN):
                signal.signal(number, self.on_signal)
            yield
        finally:
            for number in numbers:
                signal.signal(number, before[number])

    def start(self, settings: dict[str, str]) -> None:
        """Start it, unless it runs, with these settings in its environment."""
        if not self.words or self.process:
            return
        replaced = "".join(
            f"; replaces {name}={os.environ[name]}"
            for name, value in settings.items()
            if os.environ.get(name, value) != value
        )
        line = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        print(f"starting:  {line} {shlex.join(self.words)}{replaced}", flush=True)
        self.starting = True  # a signal now would find no process to be passed on to
        try:
            # In a session of its own it gets Ctrl-C only from us, once: at a second signal torchrun
            # would leave its workers behind.
            self.process = subprocess.Popen(
                self.words,
                env={**os.environ, **settings},
                start_new_session=True,
                stderr=self.error_lines(),
            )
            if self.filter:
                self.filter.stdin.close()  # it ends with those that write to it
            # Whatever ends us, this shell's input ends then, and it ends the command.
            self.guard = subprocess.Popen(
                ["sh", "-c", f"read over || kill {self.process.pid} 2>/dev/null"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            self.starting = False
        if self.pending:
            raise Interrupted(self.pending)

    def error_lines(self) -> int | None:
        """Where the command's error lines go. Those of torchrun go through a filter (launching.py):
        a process of its own, which goes on if this one is killed.
        """
        if not starts_torchrun(self.words):
            return None
        script = Path(__file__).with_name("launching.py")
        self.filter = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self.filter.stdin.fileno()

    def wait_for_error_lines(self) -> None:
        """Let the filter show the last lines; a process that torchrun left may still hold it."""
        if self.filter:
            with suppress(subprocess.TimeoutExpired):
                self.filter.wait(5)

    def pause(self, seconds: float) -> None:
        """Let so many seconds pass, where that is more than none.

        Raises StoppedEarlyError as soon as it has ended.
        """
        if seconds > 0:  # sleep(0) would still give the processor away, for every document
            if self.process is None:
                time.sleep(seconds)
            else:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
        if self.process is not None and self.process.poll() is not None:
            raise StoppedEarlyError("stopped early: its command has ended and needs no more")

    def wait(self) -> int:
        """Its exit code once it has ended, 128 and the signal where one killed it,
        as shells have it.
        """
        if self.process is None:
            return 0
        code = self.process.wait()
        self.guard.communicate(b"over\n")
        self.wait_for_error_lines()
        return code if code >= 0 else 128 - code

    def interrupt(self, number: int) -> None:
        """Pass a signal on and wait for the end;
        at a second signal, kill it with all that it has started.
        """
        if self.process is None or self.process.poll() is not None:
            return
        try:
            self.process.send_signal(number)
            print(
                "\ninterrupted; waiting for the command to end (press again to kill it)",
                file=sys.stderr,
                flush=True,
            )
            self.process.wait()
        except KeyboardInterrupt:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.wait_for_error_lines()


# === COMMAND LINE =================================================================================


def progress_printer(label: str, source: Source, place: list[int]) -> Callable[[Block, int], None]:
    """Prints share done, rate and time left:
    one rewritten line on a terminal, else a line now and then.
    """
    sizes = [os.path.getsize(path) for path in source.files]
    first = sum(sizes[: place[1]]) + place[2]
    started = printed = time.monotonic()
    tokens, terminal = 0, sys.stdout.isatty()

    def show(block: Block, block_tokens: int) -> None:
        nonlocal printed, tokens
        tokens += block_tokens
        now = time.monotonic()
        if now - printed < (0.5 if terminal else PROGRESS_SECONDS):
            return
        printed, seconds = now, now - started
        read = sum(sizes[: block.file]) + block.offset + block.size()
        left = int((sum(sizes) - read) * seconds / max(1, read - first))
        print(
            f"{label}: {100 * read / sum(sizes):.1f} % of {sum(sizes) / 1e6:,.1f} MB, "
            f"{tokens / seconds:,.0f} tokens/s, "
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left   ",
            end="\r" if terminal else "\n",
            flush=True,
        )

    return show


def tokenizer_content(source: Source, recipe: dict[str, Any]) -> bytes:
    """The tokenizer file of a recipe."""
    if "model" in recipe:
        return read_file(recipe["model"])
    if "vocab_size" not in recipe:
        return (json.dumps(BYTE_TOKENIZER) + "\n").encode()
    print(f"training a tokenizer of {recipe['vocab_size']} pieces ...", flush=True)
    return train_tokenizer(source, **recipe)


def open_state(folder: Path, tokenizer_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The export to begin or to go on with.

    Raises DataError where the folder holds something else.
    """
    remove = f"choose another --name, or remove {folder} and {tokenizer_path}"
    state = read_json(folder / STATE_NAME, remove)
    if not state:
        for path in [*sorted(folder.glob("fineweb_*.bin")), tokenizer_path]:
            if path.exists():
                raise DataError(f"{path}: was not made by this command; choose another --name")
        state = new_state(settings)
    if not is_state(state):
        raise DataError(f"{folder / STATE_NAME}: damaged (not the state of an export); {remove}")
    changed = [key for key, value in settings.items() if state["settings"].get(key) != value]
    if changed and not state["shards"]["val"]:
        return new_state(settings)  # nothing was made yet
    if changed:
        key = changed[0]
        words = f"another {key} ({state['settings'].get(key)}, now {settings[key]})"
        raise DataError(
            f"{folder}: made with {'other input files' if key == 'inputs' else words}; {remove}"
        )
    for name, shard in [*state["shards"]["val"].items(), *state["shards"]["train"].items()]:
        path = folder / name
        if not path.exists() or path.stat().st_size != 4 * SHARD_HEADER_WORDS + 2 * shard["tokens"]:
            print(
                f"{path}: missing or of a wrong size; starting from the first document", flush=True
            )
            return new_state(settings)
    if state["tokens"]["val"] and not state["complete"]:
        print(f"{folder}: going on at document {state['place'][0] + 1:,}", flush=True)
    return state


class DataSet(NamedTuple):
    """Where a data set and its tokenizer are."""

    out: Path
    folder: Path
    tokenizer_path: Path

    @classmethod
    def of(cls, out: Path, name: str, label: str) -> DataSet:
        stem = f"{name}_{label[2:]}_bpe.model" if label.startswith("sp") else f"{name}_{label}.json"
        return cls(out, out / "datasets" / f"{name}_{label}", out / "tokenizers" / stem)

    def settings(self) -> dict[str, str]:
        """The trainer's settings for it; the paths are absolute."""
        return {
            "DATA_PATH": str(self.folder.resolve()),
            "TOKENIZER_PATH": str(self.tokenizer_path.resolve()),
            "VOCAB_SIZE": str(Tokenizer(self.tokenizer_path).vocab_size),
        }


def run_export(
    source: Source,
    options: argparse.Namespace,
    label: str,
    recipe: dict[str, Any],
    *,
    command: Command,
) -> None:
    """Make one tokenizer and its data set, or what is missing of them,
    and enter both in the manifest.

    The command starts as soon as there is something to train on.
    Raises StoppedEarlyError where it ended before the export.
    """
    made = DataSet.of(options.out, options.name, label)
    inputs = [
        [os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns]
        for path in source.files
    ]
    with locked(made.folder):
        settings = {
            "inputs": inputs,
            "num_val_docs": source.num_val_docs,
            "shard_tokens": options.shard_tokens,
            "tokenizer": recipe,
        }
        state = open_state(made.folder, made.tokenizer_path, settings)
        if not state["complete"] or not has_digest(made.tokenizer_path, state["tokenizer_sha256"]):
            with Producer(made.folder, options.again) as producer:
                state = make_tokenizer(source, made, state, recipe)
                record_tokenizer(made.folder, made.tokenizer_path)
                make_shards(
                    source, made, state, options=options, producer=producer, command=command
                )
                # Before .producing goes away: it then says that the set is complete.
                update_manifest(made, state)
        else:
            record_tokenizer(made.folder, made.tokenizer_path)
            update_manifest(made, state)
            # The last one may have been killed between the last shard and this.
            (made.folder / PRODUCING).unlink(missing_ok=True)
    docs, tokens = state["docs"], state["tokens"]
    print(
        f"{made.folder}: {docs['val']:,} validation documents with {tokens['val']:,} tokens, "
        f"{docs['train']:,} training documents with {tokens['train']:,}; "
        f"{docs['repeats_of_val_left_out']:,} repeats of validation left out\n"
        f"{to_train(*made.settings().values())}\n"
        f"{before_what()}",
        flush=True,
    )
    if loss := Tokenizer(made.tokenizer_path).changes_text():
        print(f"note: {made.tokenizer_path}: {loss}", flush=True)
    for fault in faults_of_split(source, tokens):
        print(f"warning: {fault}", flush=True)
    command.start(made.settings())  # where no shard was left to be made


def faults_of_split(source: Source, tokens: dict[str, int]) -> list[str]:
    """What is wrong with the size of the validation split, with remedies."""
    faults, val, total = [], tokens["val"], tokens["val"] + tokens["train"]
    if val > total / 5:
        count = source.first_tenth()
        remedy = "put smaller documents first, or give more text"
        if 0 < count < source.num_val_docs:
            remedy = f"--num-val-docs {count} makes it a tenth, under another --name"
        faults.append(f"validation has {100 * val / total:.0f} % of all tokens: {remedy}")
    if val <= ROW_TOKENS:
        row = 2 ** int(math.log2(max(2, val - 1)))
        faults.append(
            f"validation has {val:,} tokens, too few for a row of {ROW_TOKENS:,}: "
            f"train with TRAIN_SEQ_LEN={row}, or give validation more documents"
        )
    return faults


def has_digest(path: Path, digest: str) -> bool:
    return path.exists() and sha256(read_file(path)) == digest


def make_tokenizer(
    source: Source, made: DataSet, state: dict[str, Any], recipe: dict[str, Any]
) -> dict[str, Any]:
    """Write the tokenizer unless it is there;
    returns the state, a new one where that changes every token.
    """
    if has_digest(made.tokenizer_path, state["tokenizer_sha256"]):
        return state
    content = tokenizer_content(source, recipe)
    if sha256(content) != state["tokenizer_sha256"]:
        state = {**new_state(state["settings"]), "tokenizer_sha256": sha256(content)}
    # First, so that the tokenizer is known as ours even if we are killed now.
    write_json(made.folder / STATE_NAME, state)
    write_atomic(made.tokenizer_path, content)
    return state


def make_shards(
    source: Source,
    made: DataSet,
    state: dict[str, Any],
    *,
    options: argparse.Namespace,
    producer: Producer,
    command: Command,
) -> None:
    """Write the shards that `state` lacks, and tell everyone:
    the file .producing, the manifest, the command.
    """
    clear_away(made.folder, {name for split in state["shards"].values() for name in split})
    started, show = False, progress_printer(made.folder.name, source, state["place"])
    pace = Pace(options.tokens_per_second)

    def start_once(state: dict[str, Any]) -> None:
        nonlocal started
        if not producer.val_complete and val_is_complete(state, source):
            producer.complete_val()
        if state["shards"]["train"] and not started:
            started = True
            update_manifest(made, state)
            command.start(made.settings())

    def save(state: dict[str, Any]) -> None:
        write_json(made.folder / STATE_NAME, state)
        start_once(state)

    def progress(block: Block, tokens: int) -> None:
        producer.advance(tokens)
        if not command.process:  # it has more to say
            show(block, tokens)
        command.pause(pace.lead(tokens) if state["docs"]["train"] else 0)

    try:
        start_once(state)
        if not state["complete"]:
            export_documents(
                source,
                made.tokenizer_path,
                ShardWriter(made.folder, state, options.shard_tokens, save),
                workers=options.workers,
                progress=progress,
            )
    except BaseException as error:
        if started:  # as of the last complete shard, not of the document that came last
            update_manifest(made, read_json(made.folder / STATE_NAME, "run again"))
        tell_end(error, made, len(state["shards"]["train"]), command, options.again)
        raise


def tell_end(
    error: BaseException, made: DataSet, train_shards: int, command: Command, again: str
) -> None:
    """Say how an export ended before its data set was complete, and pass an interrupt on."""
    if isinstance(error, StoppedEarlyError):
        print(
            f"{made.folder}: incomplete, {train_shards} training shards: its producer {error}; "
            f"the rest is made by: {again}",
            flush=True,
        )
    if isinstance(error, KeyboardInterrupt):
        # Before .producing says so: training then ends by the signal, not because shards are
        # missing.
        command.interrupt(getattr(error, "number", signal.SIGINT))


def clear_away(folder: Path, listed: set[str]) -> None:
    """Remove the remains of earlier runs in a folder that we have locked."""
    for path in folder.glob("fineweb_*.bin"):
        # Of an export that was begun anew: training must not read it as one of this export.
        if path.name not in listed:
            path.unlink()
    for path in folder.glob(".*.partial"):
        if not path.name.endswith(f".{os.getpid()}.partial"):  # ours: .producing is being written
            path.unlink()


class Pace:
    """Limits work to a number of tokens per second on average, from its first token on."""

    def __init__(self, tokens_per_second: int | None) -> None:
        self.rate, self.tokens, self.begin = tokens_per_second or math.inf, 0, time.monotonic()

    def lead(self, tokens: int) -> float:
        """How many seconds too early the next `tokens` are; 0 if a pause is not worth it."""
        if not self.tokens:
            self.begin = time.monotonic()
        self.tokens += tokens
        lead = self.tokens / self.rate - (time.monotonic() - self.begin)
        return lead if lead > 0.01 else 0.0


def update_manifest(made: DataSet, state: dict[str, Any]) -> None:
    """Enter a data set and its tokenizer in manifest.json, beside other entries.

    Of a data set that is not complete, it says so, and not how many training files it has:
    each moment there are more.
    """
    path = made.out / "manifest.json"
    manifest = read_json(path, "move it away and run again")
    try:
        tokenizers, datasets = (
            {str(entry["name"]): entry for entry in manifest.get(kind, [])}
            for kind in ("tokenizers", "datasets")
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a manifest of data sets ({error!r}); move it away and run again"
        ) from None
    tokenizer = Tokenizer(made.tokenizer_path)
    path_key = "path" if tokenizer.kind == "byte" else "model_path"
    tokenizers[made.tokenizer_path.stem] = {
        "name": made.tokenizer_path.stem,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "sha256": state["tokenizer_sha256"],
        path_key: f"tokenizers/{made.tokenizer_path.name}",
    }
    stats = {
        f"{what}_{split}": state[what][split]
        for split in ("train", "val")
        for what in ("docs", "tokens")
    }
    stats.update({f"files_{split}": len(state["shards"][split]) for split in ("train", "val")})
    if not state["complete"]:
        del stats["files_train"]
    datasets[made.folder.name] = {
        "name": made.folder.name,
        "tokenizer_name": made.tokenizer_path.stem,
        "path": f"datasets/{made.folder.name}",
        "stats": {
            **stats,
            "docs_repeats_of_val_left_out": state["docs"]["repeats_of_val_left_out"],
        },
        "docs_sha256": state["docs_sha256"],
        "shards": state["shards"],
        **({} if state["complete"] else {"complete": False}),
    }
    write_json(
        path, {**manifest, "tokenizers": [*tokenizers.values()], "datasets": [*datasets.values()]}
    )


def recipes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The data sets to make: suffix of the name -> what the tokenizer is made from."""
    wanted = [
        (f"sp{size}", {"vocab_size": size, "normalization": options.normalization})
        for size in options.vocab_size or ([] if options.model or options.bytes else [1024])
    ]
    wanted += [
        (
            f"sp{Tokenizer(path).vocab_size}",
            {"model": str(path), "sha256": sha256(read_file(path))},
        )
        for path in options.model or []
    ]
    wanted += [(f"byte{BYTE_VOCAB_SIZE}", {"bytes": True})] if options.bytes else []
    if len(dict(wanted)) < len(wanted):
        raise DataError(
            f"two tokenizers of the same size ({', '.join(dict(wanted))}); "
            "run one command for each, with its own --name"
        )
    return dict(wanted)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The options; `command` holds the words after --, empty where there are none.

    Exits where they are wrong.
    """
    parser = Parser(__doc__)
    add_set_arguments(parser)
    add_work_arguments(parser)
    cut = words.index("--") if "--" in words else len(words)
    if "--live" not in words[:cut]:
        behind = words[cut + 1 :]
        if not all(os.path.isfile(word) and not word.endswith(".py") for word in behind):
            parser.error(f"a command after -- needs --live: --live -- {shlex.join(behind)}")
        cut = len(words)  # as usual, what follows -- are files
    elif cut == len(words) and (command := command_without_dashes(words)):
        parser.exit(2, f"error: put -- before the command: --live -- {shlex.join(command)}\n")
    options = parser.parse_args(words[:cut])
    # Without the command: it would train again.
    options.again = command_again("data/tokenize_docs.py", words[:cut])
    options.command = with_this_python(words[cut + 1 :])
    options.shard_tokens = options.shard_tokens or (
        LIVE_SHARD_TOKENS if options.live else SHARD_TOKENS
    )
    options.workers = options.workers or max(1, (os.cpu_count() or 1) // (2 if options.live else 1))
    if fault := fault_of_options(options):
        parser.exit(2, f"error: {fault}\n")
    return options


def command_without_dashes(words: list[str]) -> list[str]:
    """The command among words that have no --; empty if there is none."""
    for before, (i, word) in zip([""] + words, enumerate(words), strict=False):
        is_value = before.startswith("--") and before not in ("--live", "--bytes")
        is_launcher = LAUNCHER.fullmatch(os.path.basename(word)) and not is_value
        if is_launcher or (before == "--live" and os.path.basename(word) == "train_gpt.py"):
            return words[i:]
    return []


def add_set_arguments(parser: argparse.ArgumentParser) -> None:
    """What the data set is made from and where it goes."""
    add, here = parser.add_argument, Path(__file__).resolve().parent
    add("files", nargs="*", metavar="FILE", help=".jsonl files, or text files")
    add("--out", type=Path, default=here, help="where to write (default: %(default)s)")
    add("--name", default="docs", help="the beginning of all names (default: docs)")
    size = "train a tokenizer of each size (default: 1024)"
    add("--vocab-size", type=positive, nargs="+", metavar="N", help=size)
    add("--model", type=Path, nargs="+", metavar="M", help="use these SentencePiece models instead")
    add("--bytes", action="store_true", help=f"use the byte tokenizer of {BYTE_VOCAB_SIZE} ids")
    count = "validation documents (default: 50000)"
    add("--num-val-docs", type=positive, default=50_000, metavar="N", help=count)


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """How the work is done."""
    add = parser.add_argument
    live = "make small shards, and train on them with the COMMAND after --"
    add("--live", action="store_true", help=live)
    tokens = f"tokens per shard (default: {SHARD_TOKENS}; with --live {LIVE_SHARD_TOKENS})"
    add("--shard-tokens", type=positive, metavar="N", help=tokens)
    kinds = ("identity", "nmt_nfkc")
    kept = "how text is changed (default: identity, which keeps it; nmt_nfkc: see above)"
    add("--normalization", choices=kinds, default=kinds[0], help=kept)
    threads = "threads (default: one per core; with --live one per two cores)"
    add("--workers", type=positive, metavar="N", help=threads)
    rate = "make at most N training tokens per second"
    add("--tokens-per-second", type=positive, metavar="N", help=rate)


def fault_of_options(options: argparse.Namespace) -> str:
    """What is wrong with the options, in words; empty if nothing."""
    if not options.files:
        return "no FILE is named; name it in front of --model and --vocab-size, which take several"
    for fault in filter(None, map(fault_of_file, options.files)):
        return fault
    places = [os.path.realpath(path) for path in options.files]
    for path, place in zip(options.files, places, strict=True):
        if places.count(place) > 1:
            return f"{path}: named {places.count(place)} times; name it once"
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        return f"--name {options.name}: it names files; give letters, digits, '.', '_', '-'"
    if options.shard_tokens >= 1 << 31:
        return f"--shard-tokens {options.shard_tokens}: a shard's header counts to 2147483647"
    tokenizers = len(options.vocab_size or []) + len(options.model or []) + options.bytes
    if options.live and tokenizers > 1:
        return "--live makes one data set: give one --vocab-size, one --model or --bytes"
    return fault_of_command(options.command)


def fault_of_file(path: str) -> str:
    if not os.path.isfile(path):
        what = "not a regular file" if os.path.lexists(path) else "no such file"
        if os.path.isdir(path):
            return f"{path}: a folder; name its files, such as {os.path.join(path, '*.txt')}"
        return f"{path}: {what}; give .jsonl or text files of this machine"
    if what := OTHER_FORMATS.get(Path(path).suffix.lower()):
        first = "unpack it, and " if what == "packed" else ""
        return f'{path}: {what}; {first}give .jsonl, one {{"text": "..."}} a line'
    return ""


def fault_of_command(words: list[str]) -> str:
    if words and "=" in words[0]:
        return f"{words[0]}: settings go in front of this tool, not behind --"
    own = words[1:] if words[:1] == [sys.executable] else words
    if len(own) == 1 and " " in own[0] and not os.path.isfile(own[0]):
        return f"'{own[0]}' is one word; write the command without the quotes"
    if words and not shutil.which(words[0]):
        return f"{words[0]}: no such command; write -- python3 train_gpt.py"
    for word in words:
        if word.endswith(".py") and not os.path.isfile(word):
            return f"{word}: no such script; name it with its folder"
    return ""


def with_this_python(words: list[str]) -> list[str]:
    """A command whose `python3`, `torchrun` or script alone is run by the Python that runs this,
    whether or not its environment is activated.
    """
    if not words or not importlib.util.find_spec("torch"):
        return words  # who prepares data without torch has another Python to train with
    program, *others = words
    if program.endswith(".py"):
        return [sys.executable, program, *others]
    if program in ("python", "python3"):
        return [sys.executable, *others]
    if program == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *others]
    return words


def main() -> int:
    options = parse_arguments(sys.argv[1:])
    command = Command(options.command)
    with command.hearing_signals():
        try:
            return export_all(options, command)
        except KeyboardInterrupt as interruption:
            number = getattr(interruption, "number", signal.SIGINT)
            command.interrupt(number)
            print(
                "\ninterrupted; the same command goes on after the last complete shard",
                file=sys.stderr,
            )
            return 128 + number


def export_all(options: argparse.Namespace, command: Command) -> int:
    """Make everything and wait for the command; returns the exit code."""
    try:
        source = Source(tuple(options.files), options.num_val_docs)
        if how := source.how_cut():
            print(how, flush=True)
        for label, recipe in recipes(options).items():
            run_export(source, options, label, recipe, command=command)
    except StoppedEarlyError:
        pass  # which it has told
    except (DataError, OSError) as error:
        elsewhere = "; name another folder with --out" if isinstance(error, OSError) else ""
        print(f"error: {one_line(error)}{elsewhere}", file=sys.stderr, flush=True)
        command.wait()  # it reads in .producing that no more will come
        return 1
    return command.wait()


if __name__ == "__main__":
    run_tool(main)
