"""Turn documents into a tokenizer and training shards.

    python3 data/tokenize_docs.py novel.txt --name novel
    python3 data/tokenize_docs.py notes/ --name notes --bytes
    python3 data/tokenize_docs.py docs.jsonl --name mine --model my_bpe.model
    python3 data/tokenize_docs.py data/docs_selected.jsonl --normalization nmt_nfkc

Input: files or folders. A folder stands for all files in it and below it, except those whose names
begin with a dot.
- A .jsonl, .ndjson, .jl or .json file contains one {"text": "..."} per line, each a document.
- A .parquet file contains a column "text" with one document per row (reading it requires pyarrow).
- Any other file is UTF-8 text and one document. But if the input is a single text file, it is split
  into documents at blank lines, or after 16 KiB where there are none (in a text of less than
  320 KiB: after a twentieth of it). With --one-document it is not split at blank lines: its first
  tenth is for validation, and the rest is for training.
- Files that end in .gz, .bz2, .xz or .zst are decompressed (.zst requires pyarrow).

The first --num-val-docs documents are the validation split. The default is a tenth of all, at most
50,000. Of a single text file, it is the documents in the first tenth of the text.
Tokenizers are trained on the other documents only. A later document that repeats a validation
document is left out.

The tokens of a document can be decoded to its exact text: spaces, tabs and line ends stay.
--normalization nmt_nfkc changes the text first, as the published tokenizers do: runs of white
space, line ends and tabs become one space, and some characters become others. Bits per byte are
then those of the changed text.

Output, in the folder --out:
  tokenizers/<name>_<vocabulary>_bpe.model    (<name>_<vocabulary>.model with --model,
                                              <name>_byte260.json with --bytes)
  datasets/<name>_sp<vocabulary>/             (<name>_byte260/ with --bytes) with
                                              fineweb_val_*.bin, fineweb_train_*.bin,
                                              export.json and tokenizer.sha256

If the command was stopped, run it again: it continues after the last complete shard. Training may
start before the last shard is made: see data/README.md.
"""

# Builds on dataset.py (files of a data set), on cli.py of tools/, and on numpy and sentencepiece.

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

# python3 -P does not put the folder of the script on the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dataset
from dataset import DATA, cli

if TYPE_CHECKING:
    # The functions that need these packages import them, so that --help works without them.
    import numpy as np
    import sentencepiece

BYTE_TOKENIZER = {"kind": "byte", "offset": 4}  # the ids 0 to 3 are control tokens; 1 is BOS
MIN_VOCAB_SIZE = 256 + 4 + 1  # the bytes; padding, BOS, EOS and unknown; a space
MAX_VOCAB_SIZE = 1 << 16  # a token is stored as a uint16
# The end of a compressed file's name, and the module that decompresses it.
DECOMPRESSORS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}
# The class of the module that decompresses one stream. For .gz and .zst, the readers of the modules
# already account for every byte of a file of several streams.
STREAM_DECOMPRESSORS = {".bz2": "BZ2Decompressor", ".xz": "LZMADecompressor"}
MAX_VAL_DOCS = 50_000  # the number of the challenge's validation documents
MAX_DOCUMENT_BYTES = 16 << 20  # SentencePiece needs about 45 bytes of memory for each byte
BATCH_BYTES = 1 << 20  # size of the batches that are encoded, and of the blocks that are read
PASSAGE_BYTES = 1 << 14  # largest document that is cut from a single text file
MIN_PASSAGES = 20  # of a single text, so that one passage cannot be much of it
PARQUET_BATCH_ROWS = 256  # rows of a Parquet file that are in memory at the same time
BLANK_LINES = re.compile(rb"\n[ \t\r]*\n\s*")
BYTE_ORDER_MARKS = {"UTF-16": (b"\xff\xfe", b"\xfe\xff")}
BYTE_ORDER_MARKS["UTF-32"] = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
SPACE = "\u2581"  # SentencePiece's mark for a space
SENTENCE_CHARACTERS = 4000  # at most 16,000 bytes; SentencePiece drops longer sentences silently
SAMPLE_BYTES = 50_000_000  # of the input files, as they are on disk, that train a tokenizer
SPLIT_NOTE = (
    "split into documents at blank lines; parts without blank lines are cut if they are long; "
    "use --one-document to keep the text together"
)
TOKENIZER_REMEDY = "give a SentencePiece .model, or a byte tokenizer's .json"
ONE_DOCUMENT_NOTE = (
    "the first tenth is the validation document, and the rest is for training; "
    "a document has at most 16 MiB"
)


# === DOCUMENTS ====================================================================================


class Document(NamedTuple):
    """A document as bytes, with the place in the input where it was found."""

    number: int  # in the whole input, from 0
    path: str
    line: int  # where it begins in the file: the line, or the row of a Parquet file
    data: bytes  # as in the file, with the blank lines that separate it from the next document

    def decode(self) -> str:
        """Return the document's text.

        Raises ToolError with file and line number if the data is not UTF-8 or not valid JSON.
        """
        try:
            text = self.data.decode("utf-8")
            if text.count("\0") > len(text) // 3 and content_suffix(self.path) != ".parquet":
                raise cli.ToolError(
                    f"{self.path}: the text seems to be UTF-16; "
                    "convert it with iconv -f UTF-16LE -t UTF-8"
                )
            if is_json_lines(self.path):
                text = parse_json_line(text.removeprefix("\ufeff"))
            text.encode("utf-8")  # fails if JSON contains half a surrogate pair
        except UnicodeDecodeError as error:
            raise self._encoding_error(error) from None
        except (ValueError, RecursionError) as error:
            raise cli.ToolError(
                f'{self.path}:{self.line}: must be an object like {{"text": "..."}} on one line '
                f"({error}); correct the line, or rename the file to .txt if it is plain text"
            ) from None
        return text

    def _encoding_error(self, error: UnicodeDecodeError) -> cli.ToolError:
        """Return the ToolError for data that is not UTF-8, with a command that converts it."""
        line = self.line + self.data.count(b"\n", 0, error.start)
        encoding = "WINDOWS-1252"
        for name, mark in BYTE_ORDER_MARKS.items():
            if self.data.startswith(mark):
                encoding = name
        if b"\0" in self.data and encoding == "WINDOWS-1252":
            fault = "is a binary file, not text"
            remedy = "give text files, .jsonl or .parquet files"
        else:
            suffix = compression_suffix(self.path)
            decompressed_path = shlex.quote(self.path[: len(self.path) - len(suffix)])
            what_to_do = "decompress and convert it" if suffix else "convert it"
            fault = f"is not UTF-8 ({error.reason})"
            remedy = f"if it is text, {what_to_do}: "
            remedy += f"iconv -f {encoding} -t UTF-8 {decompressed_path} > NEW_FILE"
        return cli.ToolError(f"{self.path}:{line}: {fault}; {remedy}")


def parse_json_line(line: str) -> str:
    """Return the text in a line of JSON lines.

    Raises ValueError, with a reason for the user, if the line is not an object with a "text".
    """
    if line.lstrip().startswith("["):
        raise ValueError(
            "it is an array; `jq -c '.[]' FILE > NEW.jsonl` writes each entry on its own line"
        )
    if line.strip() == "{":
        raise ValueError(
            "its object continues on the next line; "
            "`jq -c . FILE > NEW.jsonl` writes each object on one line"
        )
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"it is {cli.one_line(value)[:80]}")
    if "text" in value and not isinstance(value["text"], str):
        raise ValueError(
            f'its "text" is {cli.one_line(json.dumps(value["text"]))[:40]}, not a string'
        )
    if "text" not in value:
        keys = ", ".join(map(str, value))
        raise ValueError(f'it has no "text" with a string among its keys {keys[:80]}')
    return value["text"]


def compute_digest(content: bytes) -> bytes:
    """Return a digest of 16 bytes; equal documents have equal digests."""
    return hashlib.blake2b(content, digest_size=16).digest()


def compression_suffix(path: str) -> str:
    """Return the suffix of a compressed file, such as ".gz", or "" for any other file."""
    suffix = os.path.splitext(path.lower())[1]
    return suffix if suffix in DECOMPRESSORS else ""


def content_suffix(path: str) -> str:
    """Return the suffix that says what a file contains: ".jsonl" of a.JSONL and of a.jsonl.gz."""
    return os.path.splitext(path.lower().removesuffix(compression_suffix(path)))[1]


def is_json_lines(path: str) -> bool:
    """Return True if the file's name is that of a file of JSON lines."""
    return content_suffix(path) in (".jsonl", ".ndjson", ".jl", ".json")


def is_plain_text(path: str) -> bool:
    """Return True if the file's name is neither that of JSON lines nor that of a Parquet file."""
    return not is_json_lines(path) and content_suffix(path) != ".parquet"


class StreamsReader(io.RawIOBase):
    """Decompresses a file of one or more streams, as pbzip2, `cat` and Wikipedia's dumps make them.

    The readers of Python's bz2 and lzma cannot be used: if they cannot decompress the beginning of
    a later stream, they take the rest of the file for rubbish and drop it without a word. Here all
    bytes belong to a stream, or are zeros between or after the streams, as .xz files may have them.
    Reading raises an error of the decompressor, ValueError or EOFError for any other file.
    """

    def __init__(self, file: BinaryIO, new_decompressor: Callable[[], Any]) -> None:
        self.file = file
        self.new_decompressor = new_decompressor
        self.decompressor = new_decompressor()
        self.stream_start = 0
        self.next_bytes = b""  # that were read after the end of a stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with decompressed bytes; return how many, or 0 at the end of the file."""
        data = b""
        while not data:
            compressed = self.next_bytes
            self.next_bytes = b""
            if self.decompressor.eof:
                compressed = self.skip_zeros(compressed)
                if not compressed:
                    return 0
                self.stream_start = self.file.tell() - len(compressed)
                self.decompressor = self.new_decompressor()
            elif self.decompressor.needs_input and not compressed:
                compressed = self.file.read(BATCH_BYTES)
                if not compressed:
                    raise EOFError(f"the file ends within {self.describe_stream()}")
            data = self.decompress(compressed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def decompress(self, compressed: bytes, max_length: int) -> bytes:
        """Return decompressed bytes; say in which stream the file is damaged if it is."""
        try:
            data = self.decompressor.decompress(compressed, max_length)
        except Exception as error:
            raise ValueError(f"{cli.one_line(error)} in {self.describe_stream()}") from error
        if self.decompressor.eof:
            self.next_bytes = self.decompressor.unused_data
        return data

    def skip_zeros(self, read: bytes) -> bytes:
        """Return what follows the zeros at the beginning of `read` and of the rest of the file."""
        while not (rest := read.lstrip(b"\0")):
            read = self.file.read(BATCH_BYTES)
            if not read:
                break
        return rest

    def describe_stream(self) -> str:
        return f"the compressed stream that begins at byte {self.stream_start:,}"


@contextmanager
def open_decompressed(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for a `with` block, as (the file on disk, its decompressed content).

    Both are the same object if the file is not compressed. Raises ToolError if the file is damaged,
    or if the package that decompresses it is missing.
    """
    suffix = compression_suffix(path)
    try:
        with open(path, "rb") as file:
            module = import_module(DECOMPRESSORS[suffix]) if suffix else None
            if suffix == ".zst":
                yield file, io.BufferedReader(module.input_stream(file, compression="zstd"))
            elif suffix in STREAM_DECOMPRESSORS:
                new_decompressor = getattr(module, STREAM_DECOMPRESSORS[suffix])
                yield file, io.BufferedReader(StreamsReader(file, new_decompressor), BATCH_BYTES)
            else:
                yield file, module.open(file) if module else file
    except ImportError as error:
        alternative = ", or decompress the file" if suffix else ""
        raise cli.ToolError(f"{path}: {cli.missing_package(error.name)}{alternative}") from None
    except Exception as error:
        is_damage = isinstance(error, (OSError, EOFError, ValueError, zlib.error))
        is_system_error = bool(getattr(error, "errno", None))  # such as an error of the disk
        if not is_damage or is_system_error:
            raise
        reason = cli.one_line(error)[:200]
        raise cli.ToolError(
            f"{path}: is damaged, or its content is not what its name says ({reason}); "
            "restore the file"
        ) from None


def read_parquet_texts(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Yield the UTF-8 text of each row of a Parquet file, without reading a whole row group.

    Raises ToolError if the file has no column "text", or if a text is not a string.
    """
    parquet = import_module("pyarrow.parquet")
    with ExitStack() as stack:
        if not file.seekable():
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, copy, BATCH_BYTES)
            file = copy
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BATCH_BYTES)
        names = table.schema_arrow.names
        if "text" not in names:
            raise cli.ToolError(
                f'{path}: has the columns {cli.join_some(names)}, but no column "text"; '
                'write a file with a column "text"'
            )
        kind = table.schema_arrow.field("text").type
        kind = getattr(kind, "value_type", kind) if "dictionary" in str(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view", "null"):
            raise cli.ToolError(
                f'{path}: the column "text" has the type {kind}, not string; '
                "write a file whose column contains strings"
            )
        batches = table.iter_batches(PARQUET_BATCH_ROWS, columns=["text"])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise cli.ToolError(
                    f'{path}: "text" of row {number} is {cli.one_line(text)[:40]}, not a string; '
                    "remove the row"
                )
            yield text.encode("utf-8")


def check_content(path: str) -> None:
    """Raise ToolError if the beginning of a file is not what its name says.

    Such files are pointers of Git LFS, archives, pages of HTML in the place of other files, and
    JSON lines in a file with the name of plain text. A page of HTML may be a text.
    """
    suffix = compression_suffix(path)
    kind, what_it_is = dataset.identify(dataset.read_head(path))
    may_be_text = kind == "html" and is_plain_text(path) and not suffix
    if kind in ("lfs", "html", "archive", "pdf") and not may_be_text:
        raise cli.ToolError(f"{path}: {what_it_is}")
    if kind == "empty" and suffix:
        raise cli.ToolError(f"{path}: {what_it_is}")  # a compressed empty text has a head
    with open_decompressed(path) as (_, content):
        line = content.readline(MAX_DOCUMENT_BYTES)
        head = line + content.read(512) if len(line) < 512 else line
    kind, what_it_is = dataset.identify(head[:512])
    if kind in ("archive", "packed", "pdf") or kind == "html" and not is_plain_text(path):
        inside = "its decompressed content " if suffix else ""
        raise cli.ToolError(f"{path}: {inside}{what_it_is}")
    if not is_plain_text(path):
        return
    with suppress(ValueError, RecursionError):  # raised if the line is text and not JSON
        parse_json_line(line.decode("utf-8-sig"))
        raise cli.ToolError(
            f'{path}: is a text file by its name, but its first line is a JSON object with "text"; '
            f"rename it to end in .jsonl{suffix}, or insert an empty first line if it is text"
        )


def split_text(
    file: BinaryIO, first_bytes: int, max_bytes: int, at_blank_lines: bool
) -> Iterator[bytes]:
    """Yield a text as documents of at most max_bytes each, the first of at most first_bytes."""
    data = b""
    limit = max(1, first_bytes)
    while data := data + file.read(max(0, limit + 4 - len(data))):  # 4: a character's bytes
        end = find_document_end(data, limit, at_blank_lines)
        yield data[:end]
        data = data[end:]
        limit = max_bytes


def find_document_end(data: bytes, limit: int, at_blank_lines: bool) -> int:
    """Return where the document at the beginning of `data` ends: at most `limit`.

    It ends after the first blank lines if at_blank_lines is True. If there are none within the
    limit, it ends after the last line, else the last word, else the last character. Only a first
    character that is longer than the limit exceeds it.
    """
    if at_blank_lines and (blank := BLANK_LINES.search(data, 0, limit)):
        return blank.end()
    if len(data) <= limit:
        return len(data)
    for separator in (b"\n", b" "):
        if end := data.rfind(separator, 0, limit) + 1:
            return end
    begins = [end for end in range(limit - 3, limit + 4) if 0 < end < len(data)]
    begins = [end for end in begins if data[end] & 0xC0 != 0x80]  # of UTF-8 characters
    before = [end for end in begins if end <= limit]
    return max(before) if before else min(begins, default=len(data))


def list_input_files(paths: list[str]) -> list[str]:
    """Return the files to read: the given files, and in their place the files of given folders.

    Raises ToolError if a path does not exist, is not a regular file, or is given twice.
    """
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            files += list_folder(path)
        elif os.path.isfile(path):
            files.append(path)
        else:
            remedy = "give text files, .jsonl files or folders"
            if not os.path.lexists(path):
                fault = "there is no such file or folder"
                if path == "-":
                    remedy = "standard input is read several times, so write it to a file"
            else:
                fault = "is not a regular file"
                if not os.path.islink(path) or os.path.exists(path):
                    remedy = "it is read several times, so write its content to a file"
            raise cli.ToolError(f"{path}: {fault}; {remedy}")
    counts = Counter(map(os.path.realpath, files))
    if repeated := [path for path, count in counts.items() if count > 1]:
        raise cli.ToolError(f"{repeated[0]}: is given twice; give each file once")
    return files


def list_folder(folder: str) -> list[str]:
    """Return the regular files in a folder and below it, sorted, except those with hidden names.

    Prints how many other paths are left out. Raises ToolError if there are no files, and OSError if
    a folder cannot be read.
    """

    def raise_error(error: OSError) -> None:
        raise error

    files, left_out = [], []
    for place, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # os.walk does not follow links to folders: they are left out, and counted.
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in [*names, *links]:
            if name.startswith("."):
                continue
            path = Path(place, name)
            (files if path.is_file() else left_out).append(str(path))
    if not files:
        raise cli.ToolError(f"{folder}: the folder contains no files; give text or .jsonl files")
    if left_out:
        print(
            f"note: {len(left_out)} paths that are not regular files are left out, "
            f"for example {min(left_out)}"
        )
    return sorted(files)


class Source:
    """The documents of the input files, in order; the first num_val_docs are for validation.

    A single text file is split into passages at blank lines. With one_document=True it is split
    into its first tenth, for validation, and the rest.

    num_val_docs=None means a tenth of the documents, or of a single text. Raises ToolError for
    input that cannot be used.
    """

    def __init__(
        self, paths: list[str], num_val_docs: int | None = None, one_document: bool = False
    ) -> None:
        self.files = list_input_files(paths)
        self.is_one_text = len(self.files) == 1 and is_plain_text(self.files[0])
        self.one_document = one_document
        if one_document and not self.is_one_text:
            raise cli.ToolError(
                f"{paths[0]}: --one-document requires a single text file; run without the option"
            )
        # Noted before anything is read, so that a change of an input file can be noticed.
        self.file_states = self.read_file_states()
        ends = [*accumulate(size for _, size, _ in self.file_states)]
        self.bytes_before_file = [0, *ends[:-1]]
        self.total_bytes = ends[-1] or 1  # never 0: it is a divisor
        self.bytes_read = 0  # of all files, as they are on disk
        for path in self.files:
            check_content(path)
        self.num_val_docs = self.count_val_docs() if num_val_docs is None else num_val_docs

    def documents(self, first: int = 0) -> Iterator[Document]:
        """Yield the documents from number `first` on.

        Raises ToolError if a document is larger than MAX_DOCUMENT_BYTES.
        """
        number = 0
        for bytes_before, path in zip(self.bytes_before_file, self.files, strict=True):
            line = 1
            is_parquet = content_suffix(path) == ".parquet"
            with open_decompressed(path) as (file, content):
                for data in self.read_parts(path, content):
                    self.bytes_read = bytes_before + file.tell()
                    if len(data) > MAX_DOCUMENT_BYTES:
                        raise cli.ToolError(
                            f"{path}:{line}: the document is larger than "
                            f"{MAX_DOCUMENT_BYTES:,} bytes; split it"
                        )
                    is_empty_line = is_json_lines(path) and not data.strip()
                    if not is_empty_line:
                        if number >= first:
                            yield Document(number, path, line, data)
                        number += 1
                    line += 1 if is_parquet else data.count(b"\n")

    def read_parts(self, path: str, content: BinaryIO) -> Iterator[bytes]:
        """Return an iterator over the lines, rows or passages of a file, each one a document.

        No more than one byte above MAX_DOCUMENT_BYTES is read of a document that is too large.
        """
        if content_suffix(path) == ".parquet":
            return read_parquet_texts(content, path)
        if self.one_document:
            with open_decompressed(path) as (_, same_content):
                size = sum(map(len, iter(lambda: same_content.read(BATCH_BYTES), b"")))
            first_bytes = min(size // 10, MAX_DOCUMENT_BYTES)
            return split_text(content, first_bytes, MAX_DOCUMENT_BYTES, at_blank_lines=False)
        if self.is_one_text:
            with open_decompressed(path) as (_, same_content):
                size = len(same_content.read(MIN_PASSAGES * PASSAGE_BYTES))  # at most
            limit = max(1, size // MIN_PASSAGES)
            return split_text(content, limit, limit, at_blank_lines=True)
        read = content.readline if is_json_lines(path) else content.read
        return iter(lambda: read(MAX_DOCUMENT_BYTES + 1), b"")

    def count_val_docs(self) -> int:
        """Return a tenth of the number of documents, at most MAX_VAL_DOCS and at least 1.

        For a single text, see count_val_passages.
        """
        if self.is_one_text:
            return self.count_val_passages()
        return max(1, sum(1 for _ in islice(self.documents(), 10 * MAX_VAL_DOCS)) // 10)

    def count_val_passages(self) -> int:
        """Return how many of the first passages have a tenth of the bytes of the data set.

        Passages differ in size, so a tenth of them may be much more or less than a tenth of the
        text. Later passages that repeat a validation passage are not in the data set.
        """
        ends: list[int] = []  # of each of the first MAX_VAL_DOCS passages
        with_repeats: list[int] = []  # bytes of each of them with its repeats, 0 if it is a repeat
        numbers: dict[bytes, int] = {}  # of each of them, by its digest
        others = 0  # bytes of the passages that are neither among them nor repeat them
        for passage in self.documents():
            size = len(passage.data)
            digest = compute_digest(passage.data)
            if len(ends) < MAX_VAL_DOCS:
                numbers.setdefault(digest, len(ends))
                ends.append(size + (ends[-1] if ends else 0))
                with_repeats.append(0)
            if digest in numbers:
                with_repeats[numbers[digest]] += size
            else:
                others += size
                if others > 9 * ends[-1]:
                    break  # all of the first MAX_VAL_DOCS passages are less than a tenth
        training_bytes = others + sum(with_repeats)
        count = 1
        for number, (end, size) in enumerate(zip(ends, with_repeats, strict=True), 1):
            training_bytes -= size
            if 9 * end <= training_bytes:
                count = number
        return count

    def val_digests(self) -> frozenset[bytes]:
        """Return the digests of the validation documents.

        Raises ToolError if no document is left for training.
        """
        val_and_one_more = islice(self.documents(), self.num_val_docs + 1)
        digests = [compute_digest(document.decode().encode()) for document in val_and_one_more]
        if len(digests) > self.num_val_docs:
            return frozenset(digests[:-1])
        count = len(digests)
        if count > 1:
            remedy = f"set --num-val-docs {max(1, count // 10)}"
        else:
            remedy = "separate documents by blank lines, or give more files"
        raise cli.ToolError(
            f"{self.files[0]}: the number of documents is {count}, and the first "
            f"{self.num_val_docs} are for validation, so none is left for training; {remedy}"
        )

    def read_file_states(self) -> list[list[Any]]:
        """Return [path, size, time of the last change in ns] of each input file.

        The result differs if somebody has written to an input file in the meantime.
        """
        states = [(path, os.stat(path)) for path in self.files]
        return [[os.path.abspath(path), s.st_size, s.st_mtime_ns] for path, s in states]


def batch_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists of at least BATCH_BYTES; only the last may be smaller."""
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


def read_byte_offset(data: bytes) -> int:
    """Return the id of byte 0 from the .json file of a byte tokenizer.

    Raises ValueError, with a reason for the user, for any other file.
    """
    try:
        form = json.loads(data)
    except ValueError:
        raise ValueError("it is no JSON") from None
    config = form.get("config") if isinstance(form, dict) else None
    if isinstance(form, dict) and "offset" in form:
        offset = form["offset"]
    elif isinstance(config, dict) and "byte_offset" in config:
        offset = config["byte_offset"]
    else:
        what = f"has the keys {cli.join_some([*form])}" if isinstance(form, dict) else "is a value"
        raise ValueError(f'it is the JSON of another program: it {what}, but no "offset"')
    if type(offset) is not int or offset < 0:
        raise ValueError(f'its "offset" is {cli.one_line(offset)[:40]}, not a whole number')
    return offset


class Tokenizer:
    """A SentencePiece .model, or the .json file of a byte tokenizer.

    `processor` is the SentencePiece processor, or None for a byte tokenizer. Raises ToolError if
    the file is not a tokenizer, has no BOS token or too many tokens.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self.processor: sentencepiece.SentencePieceProcessor | None = None
        self.offset = 0  # of a byte tokenizer: byte b is token b + offset
        self.unknown_id = -1  # -1 is no token: a byte tokenizer has no unknown token
        try:
            data = path.read_bytes()
            _, what_it_is = dataset.identify(data[:512])
            if what_it_is:
                raise cli.ToolError(f"{path}: {what_it_is}")
            if path.suffix == ".json":
                self.offset = read_byte_offset(data)
                self.vocab_size = 256 + self.offset
                self.bos_id = 1
            else:
                self.processor = sentencepiece.SentencePieceProcessor(model_proto=data)
                self.vocab_size = len(self.processor)
                self.bos_id = self.processor.bos_id()
                self.unknown_id = self.processor.unk_id()
        except OSError as error:
            missing = not os.path.lexists(path)
            fault = "there is no such file" if missing else f"cannot be read ({error.strerror})"
            raise cli.ToolError(f"{path}: {fault}; {TOKENIZER_REMEDY}") from None
        except (ValueError, RecursionError, RuntimeError) as error:
            is_sentencepiece_error = type(error) is RuntimeError
            reason = "it is not a SentencePiece model" if is_sentencepiece_error else str(error)
            raise cli.ToolError(
                f"{path}: is not a usable tokenizer ({cli.one_line(reason)}); {TOKENIZER_REMEDY}"
            ) from None
        if self.bos_id < 0 or self.vocab_size > MAX_VOCAB_SIZE:
            raise cli.ToolError(
                f"{path}: has {self.vocab_size:,} tokens and the BOS id {self.bos_id}; "
                f"give a tokenizer with a BOS token and at most {MAX_VOCAB_SIZE:,} tokens"
            )

    def has_space_token(self) -> bool:
        """Return True if a SentencePiece model has a token for a single space.

        Without such a token, the bytes of spaces would be counted wrongly.
        """
        encode = self.processor.encode
        space_ids = {*encode(" ")} | ({*encode("a b")} - {*encode("ab")})
        for token in space_ids:
            if token == self.unknown_id or self.processor.is_byte(token):
                return False
        return True

    def describe_text_changes(self) -> str:
        """Return a sentence on what the tokenizer's normaliser changes, or "" if it is nothing."""
        probe = " a  b\tc\n\nd\r\n\u00a0e\ufb01 "
        if not self.processor or self.processor.normalize(probe).replace(SPACE, " ") == probe:
            return ""
        return (
            "its normaliser changes text: runs of white space, line ends and tabs become one "
            "space, and some characters become others; bits per byte are those of the changed text"
        )

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens; control tokens have none."""
        if self.processor:
            return self.processor.decode(ids)
        values = [token - self.offset for token in ids]
        return bytes(value for value in values if 0 <= value < 256).decode("utf-8", "replace")

    def encode(self, texts: list[str], threads: int = 1) -> list[np.ndarray]:
        """Return the tokens of each text, as uint16 arrays that begin with BOS."""
        import numpy as np

        if self.processor:
            encoded = self.processor.encode(
                texts, add_bos=True, out_type="numpy", num_threads=threads
            )
            return [ids.astype(np.uint16) for ids in encoded]
        bos = np.array([self.bos_id], np.uint16)
        offset = np.uint16(self.offset)
        contents = [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
        return [np.concatenate([bos, content + offset]) for content in contents]


def training_sentences(source: Source, errors: list[BaseException]) -> Iterator[str]:
    """Yield the text of training documents in pieces that SentencePiece accepts as sentences.

    If the input is larger than SAMPLE_BYTES, an even sample of the documents is used. An exception
    is also appended to `errors`, because SentencePiece turns it into a RuntimeError.
    """
    try:
        val_digests = source.val_digests()
        threshold = SAMPLE_BYTES / source.total_bytes * 2**32
        for document in source.documents():
            # The choice depends only on the document's number, so that the same command trains the
            # same tokenizer when it is repeated.
            if zlib.crc32(b"%d" % document.number) >= threshold:
                continue
            text = document.decode()
            if compute_digest(text.encode()) not in val_digests:
                # SentencePiece drops sentences with these characters.
                text = text.replace("\0", " ").replace("\t", " ")
                for start in range(0, len(text), SENTENCE_CHARACTERS):
                    yield text[start : start + SENTENCE_CHARACTERS]
    except (cli.ToolError, OSError, KeyboardInterrupt) as error:
        errors.append(error)
        raise


def train_tokenizer(source: Source, vocab_size: int, normalization: str) -> bytes:
    """Train a SentencePiece BPE model on the training documents; return its file as bytes.

    normalization="identity" keeps every character, white space too; "nmt_nfkc" changes the text as
    the published tokenizers do. Raises ToolError if the documents are too small for the vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    lossless = normalization == "identity"
    errors: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=training_sentences(source, errors),
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
            # Without a token for a single U+2581, a single space would become three byte tokens and
            # would be counted as three bytes.
            required_chars=SPACE,
            max_sentence_length=4 * SENTENCE_CHARACTERS,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise (errors[0] if errors else vocabulary_error(source, vocab_size, str(error))) from None
    return model.getvalue()


def vocabulary_error(source: Source, vocab_size: int, message: str) -> cli.ToolError:
    """Return the ToolError for SentencePiece's `message` that it cannot make such a vocabulary."""
    reason = message.rpartition("] ")[2].strip()
    if not reason:
        return cli.ToolError(
            f"{source.files[0]}: all training documents are empty or repeat validation documents; "
            "add other documents"
        )
    largest = re.search(r"<= (\d+)", reason)
    remedy = "use --bytes"
    if largest:
        remedy = f"set --vocab-size {largest[1]} or less, or give more text"
    return cli.ToolError(
        f"{source.files[0]}: a vocabulary of {vocab_size} tokens does not fit these documents "
        f"({reason.partition('.')[0]}); {remedy}"
    )


# === EXPORT =======================================================================================


class DataSet(NamedTuple):
    """The folder of the shards, and the file of the tokenizer that makes them."""

    folder: Path
    tokenizer: Path


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of export.json before the first shard.

    export.json holds the state of an export after its last complete shard.
    """
    return {
        "settings": settings,
        "tokenizer_sha256": "",
        "complete": False,
        # The number of the next document, and how many of its tokens are in complete shards.
        "document": 0,
        "tokens_done": 0,
        "shards": {"val": {}, "train": {}},  # split -> file name -> dataset.describe_shard
        "docs": {"val": 0, "train": 0, "repeats_of_val_left_out": 0},
        "tokens_left_out": 0,  # of the repeats
        "miscounted_tokens": {"val": 0, "train": 0},
    }


def count_tokens(state: dict[str, Any], split: str) -> int:
    """Return the number of tokens in the complete shards of a split ("val" or "train")."""
    return sum(entry["tokens"] for entry in state["shards"][split].values())


class ShardWriter:
    """Writes the tokens of each split as shards of `shard_tokens` tokens.

    Only the last shard of a split may be shorter. export.json is written after each shard.
    """

    def __init__(self, folder: Path, state: dict[str, Any], shard_tokens: int) -> None:
        import numpy as np

        self.folder, self.state = folder, state
        self.buffer = np.empty(shard_tokens, dtype="<u2")
        self.used = 0  # tokens in the buffer

    def add(self, split: str, tokens: np.ndarray, done: int, document: int) -> None:
        """Append the tokens of a document to a split; the first `done` of them are skipped.

        `document` is the number of the document. It is noted in export.json.
        """
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
        """Write the tokens in the buffer as the next shard of a split, then export.json.

        `document` and `tokens_done` say where to continue; complete=True ends the export.
        """
        import numpy as np

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
    data_set: DataSet,
    state: dict[str, Any],
    producing: dataset.ProducingFile,
    threads: int,
) -> None:
    """Write the shards of both splits, beginning where `state` says; update `state`.

    Raises ToolError if there are no training documents, or if an input file was changed.
    """
    val_digests = source.val_digests()
    tokenizer = Tokenizer(data_set.tokenizer)
    writer = ShardWriter(data_set.folder, state, state["settings"]["shard_tokens"])
    first_document, done = state["document"], state["tokens_done"]
    docs, miscounted = state["docs"], state["miscounted_tokens"]
    producing.update(val_complete=first_document >= source.num_val_docs)
    progress = cli.progress(f"{data_set.folder.name}, bytes of text", source.total_bytes)
    for batch in batch_documents(source.documents(first_document)):
        texts = [document.decode() for document in batch]
        encoded = tokenizer.encode(texts, threads)
        for document, text, tokens in zip(batch, texts, encoded, strict=True):
            split = "val" if document.number < source.num_val_docs else "train"
            is_first_of_training = document.number == source.num_val_docs and not done
            if is_first_of_training:
                writer.flush("val", document.number)
                producing.update(val_complete=True)
            if split == "train" and compute_digest(text.encode()) in val_digests:
                docs["repeats_of_val_left_out"] += 1
                if state["tokens_left_out"] is not None:
                    state["tokens_left_out"] += len(tokens)
                continue
            if not done:  # with tokens in a complete shard, it was counted before an interruption
                docs[split] += 1
                miscounted[split] += int((tokens == tokenizer.unknown_id).sum())
            writer.add(split, tokens, done, document.number)
            done = 0
        producing.update()
        progress.update(source.bytes_read - progress.n)
    if not docs["train"]:
        raise cli.ToolError(
            f"{source.files[0]}: all training documents repeat validation documents; "
            "add other documents"
        )
    for before, now in zip(source.file_states, source.read_file_states(), strict=True):
        if before != now:
            raise cli.ToolError(f"{now[0]}: was changed while it was read; {start_over(data_set)}")
    writer.flush("train", 0, complete=True)


def start_over(data_set: DataSet) -> str:
    """Return what the user can do about a data set that cannot be continued."""
    return f"choose another --name, or move {data_set.folder} and {data_set.tokenizer} away"


def open_state(data_set: DataSet, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the export that is to be continued, or the state of a new one.

    Raises ToolError if the files on disk are not those of an export with these settings.
    """
    state = dataset.read_export(data_set.folder)
    remedy = start_over(data_set)
    if state is None:
        for other in [*data_set.folder.glob("fineweb_*.bin"), data_set.tokenizer]:
            if os.path.lexists(other):
                raise cli.ToolError(f"{other}: was not made by this command; {remedy}")
        return new_state(settings)
    state.setdefault("tokens_left_out", None)  # begun by a version that did not count them
    old_settings = state["settings"]
    changed = [key for key in settings if old_settings.get(key) != settings[key]]
    if "inputs" in changed:
        raise cli.ToolError(
            f"{data_set.folder}: was made with other input files, or the files have changed since; "
            f"{remedy}"
        )
    if changed:
        old = {key: old_settings.get(key) for key in changed}
        new = {key: settings[key] for key in changed}
        raise cli.ToolError(
            f"{data_set.folder}: was made with {old}, but this command has {new}; {remedy}"
        )
    for name, entry in (state["shards"]["val"] | state["shards"]["train"]).items():
        try:
            dataset.check_shard(data_set.folder / name, entry)
        except cli.ToolError as error:
            raise cli.ToolError(f"{error}, or {remedy}") from None
    wanted = state["tokenizer_sha256"]
    if wanted and data_set.tokenizer.exists() and dataset.file_sha256(data_set.tokenizer) != wanted:
        raise cli.ToolError(f"{data_set.tokenizer}: was changed; {remedy}")
    return state


def ensure_tokenizer(source: Source, data_set: DataSet, state: dict[str, Any]) -> None:
    """Write the tokenizer unless it exists, and tokenizer.sha256; update `state`.

    Raises ToolError if an earlier tokenizer is missing and the new one would differ from it.
    """
    settings = state["settings"]["tokenizer"]
    if not data_set.tokenizer.exists():
        if "model" in settings:
            content = Path(settings["model"]).read_bytes()
        elif "bytes" in settings:
            content = json.dumps(BYTE_TOKENIZER).encode() + b"\n"
        else:
            print(f"training a tokenizer with {settings['vocab_size']} tokens ...", flush=True)
            content = train_tokenizer(source, **settings)
        digest = hashlib.sha256(content).hexdigest()
        if state["tokenizer_sha256"] not in ("", digest):
            raise cli.ToolError(
                f"{data_set.tokenizer}: is missing; restore it, or {start_over(data_set)}"
            )
        # export.json comes first: if the process is killed now, the tokenizer is known as ours.
        state["tokenizer_sha256"] = digest
        dataset.write_json(data_set.folder / dataset.EXPORT_FILE, state)
        dataset.write_atomic(data_set.tokenizer, content)
    dataset.record_tokenizer(data_set.folder, data_set.tokenizer)
    print(
        f"{data_set.tokenizer}: ready; training may start while shards are being made", flush=True
    )


def make_data_set(options: argparse.Namespace) -> tuple[DataSet, dict[str, Any]]:
    """Make a tokenizer and a data set, or the missing part; return them and the final state."""
    for package in ("numpy", "sentencepiece", "huggingface_hub.utils"):
        import_module(package)  # if a package is missing, this is said before the work begins
    for name in filter(os.path.isdir, options.files):
        if options.out.resolve().is_relative_to(Path(name).resolve()):
            raise cli.ToolError(
                f"--out {options.out}: is inside the input folder {name}; choose another folder"
            )
    label, tokenizer_ending, tokenizer_settings = plan_tokenizer(options)
    source = Source(options.files, options.num_val_docs, options.one_document)
    source.val_digests()  # raises ToolError for too few documents before a tokenizer is trained
    folder = options.out / "datasets" / f"{options.name}_{label}"
    data_set = DataSet(folder, options.out / "tokenizers" / f"{options.name}_{tokenizer_ending}")
    settings = {
        "inputs": source.file_states,
        "num_val_docs": source.num_val_docs,
        "shard_tokens": options.shard_tokens,
        "tokenizer": tokenizer_settings,
        "one_document": options.one_document,
    }
    if source.is_one_text:
        note = ONE_DOCUMENT_NOTE if options.one_document else SPLIT_NOTE
        print(f"{source.files[0]}: {note}", flush=True)
    with dataset.locked(data_set.folder):
        state = open_state(data_set, settings)
        if not state["complete"]:
            ensure_tokenizer(source, data_set, state)
            if state["shards"]["val"]:
                print(f"continuing at document {state['document'] + 1:,}", flush=True)
            try:
                with dataset.ProducingFile(data_set.folder) as producing:
                    export_documents(source, data_set, state, producing, options.workers)
            except cli.ToolError:
                # Without a shard nothing is lost. If the files stayed, the same command could not
                # continue with corrected input, because it would be other input.
                if not any(state["shards"].values()):
                    data_set.tokenizer.unlink(missing_ok=True)
                    (data_set.folder / dataset.EXPORT_FILE).unlink(missing_ok=True)
                raise
        # A command that was killed after the last shard leaves this file.
        (data_set.folder / ".producing").unlink(missing_ok=True)
    print(f"{data_set.folder}: {describe_counts(state)}", flush=True)
    return data_set, state


def describe_counts(state: dict[str, Any]) -> str:
    """Return how many documents and tokens a data set has, as one line."""
    docs = state["docs"]
    val_tokens, train_tokens = count_tokens(state, "val"), count_tokens(state, "train")
    repeats = docs["repeats_of_val_left_out"]
    left_out = state["tokens_left_out"]
    their_tokens = f" ({left_out:,} tokens)" if repeats and left_out is not None else ""
    return (
        f"{docs['val']:,} validation documents with {val_tokens:,} tokens, "
        f"{docs['train']:,} training documents with {train_tokens:,} tokens; "
        f"{repeats:,} repeats of validation documents{their_tokens} are left out"
    )


def plan_tokenizer(options: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """Decide which tokenizer to use.

    Returns (end of the data set's name, end of the tokenizer's name, settings for export.json from
    which the tokenizer is made). Raises ToolError if a given tokenizer cannot be used.
    """
    if options.bytes:
        return "byte260", "byte260.json", {"bytes": True}
    if options.model:
        tokenizer = Tokenizer(options.model)
        if not tokenizer.processor:
            raise cli.ToolError(
                f"--model {options.model}: is a byte tokenizer; use --bytes instead"
            )
        if not tokenizer.has_space_token():
            raise cli.ToolError(
                f"--model {options.model}: has no token for a single space, so bits per byte would "
                "be wrong; train it with required_chars='\u2581' and byte_fallback, "
                "or run without --model"
            )
        size = tokenizer.vocab_size
        settings = {"model": str(options.model), "sha256": dataset.file_sha256(options.model)}
        # The name does not say "bpe", because the model may be of another kind.
        return f"sp{size}", f"{size}.model", settings
    settings = {"vocab_size": options.vocab_size, "normalization": options.normalization}
    return f"sp{options.vocab_size}", f"{options.vocab_size}_bpe.model", settings


def notes_and_warnings(data_set: DataSet, state: dict[str, Any]) -> Iterator[str]:
    """Yield what the user should know about a data set, each with what can be done about it."""
    if changes := Tokenizer(data_set.tokenizer).describe_text_changes():
        yield f"note: {data_set.tokenizer}: {changes}"
    val, train = state["miscounted_tokens"]["val"], state["miscounted_tokens"]["train"]
    if val or train:
        yield (
            f"WARNING: {val:,} validation tokens and {train:,} training tokens are unknown to the "
            "tokenizer, so their bytes are not counted; use a tokenizer with byte_fallback"
        )
    val, train = count_tokens(state, "val"), count_tokens(state, "train")
    if val > (val + train) / 5:
        number, tokens = find_val_docs(data_set, (val + train) / 10)
        remedy = f"--num-val-docs {number} and another --name make it {tokens / (val + train):.0%}"
        if tokens > (val + train) / 5:
            remedy = "the first document alone is so large; put a smaller document first"
            if (state["tokens_left_out"] or 0) > train:
                remedy = "most of the text repeats validation documents; give other text"
        yield f"WARNING: validation has {val / (val + train):.0%} of all tokens; {remedy}"


def find_val_docs(data_set: DataSet, max_tokens: float) -> tuple[int, int]:
    """Return how many of the first validation documents have at most `max_tokens` tokens, at least
    1, and how many tokens they have."""
    import numpy as np

    paths = dataset.shard_paths(data_set.folder, "val")
    shards = [np.fromfile(path, "<u2", offset=dataset.HEADER_BYTES) for path in paths]
    tokens = np.concatenate(shards)
    # Every document begins with BOS, and BOS is nowhere else.
    begins = np.flatnonzero(tokens == Tokenizer(data_set.tokenizer).bos_id)
    ends = [*begins[1:].tolist(), len(tokens)]
    number = max(1, bisect_right(ends, max_tokens))
    return number, ends[number - 1]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line; exit with 2 after a one-line error."""
    parser = cli.Parser(description=__doc__)
    add, count = parser.add_argument, cli.number(int, 1)
    add("files", nargs="+", metavar="FILE", help="text, .jsonl or .parquet files, or folders")
    add("--out", type=Path, default=DATA, help="folder for the output (default: %(default)s)")
    text = "first part of the data set's and the tokenizer's name (default: docs)"
    add("--name", default="docs", help=text)
    add_exclusive = parser.add_mutually_exclusive_group().add_argument
    vocab_size = cli.number(int, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE)
    text = "number of tokens of the tokenizer that is trained (default: 1024)"
    add_exclusive("--vocab-size", type=vocab_size, default=1024, metavar="N", help=text)
    text = "use this SentencePiece model instead of training one"
    add_exclusive("--model", type=Path, metavar="M", help=text)
    text = "use the byte tokenizer, which has 260 ids, instead of training one"
    add_exclusive("--bytes", action="store_true", help=text)
    text = "number of validation documents (default: a tenth of all, see above)"
    add("--num-val-docs", type=count, metavar="N", help=text)
    text = "keep a single text together: its first tenth is for validation, the rest for training"
    add("--one-document", action="store_true", help=text)
    shard_tokens, text = cli.number(int, 1, 2**31 - 1), "tokens per shard (default: %(default)s)"
    add("--shard-tokens", type=shard_tokens, default=100_000_000, metavar="N", help=text)
    text = "how the text is changed (default: identity, which keeps it; nmt_nfkc: see above)"
    add("--normalization", choices=("identity", "nmt_nfkc"), help=text)
    cpus = len(os.sched_getaffinity(0))
    text = "threads (default: one for each CPU that this process may use, %(default)s)"
    add("--workers", type=count, default=cpus, metavar="N", help=text)
    options = parser.parse_args(words)
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        parser.error(
            f"--name {options.name}: is part of file names, so it may contain only letters, "
            "digits, '.', '_' and '-'"
        )
    if options.normalization and (options.model or options.bytes):
        parser.error("--normalization has no effect with --model or --bytes; run without it")
    options.normalization = options.normalization or "identity"
    return options


def main() -> None:
    data_set, state = make_data_set(parse_arguments(sys.argv[1:]))
    for line in notes_and_warnings(data_set, state):
        print(line)
    vocab_size = Tokenizer(data_set.tokenizer).vocab_size
    print(dataset.training_commands(data_set.folder, data_set.tokenizer, vocab_size))


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again to continue after the last complete shard")
