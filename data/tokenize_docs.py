"""Turn documents into a tokenizer and training shards.

    python3 data/tokenize_docs.py docs_selected.jsonl --out data --vocab-size 1024 --num-val-docs 50000
    python3 data/tokenize_docs.py notes/*.txt --name notes --num-val-docs 20 --bytes
    python3 data/tokenize_docs.py docs_selected.jsonl --name mine --model my_bpe.model

Input: .jsonl files with one {"text": ...} a line; any other file is UTF-8 text and one document. The first
--num-val-docs documents are the validation split. Tokenizers are trained on the others only, and a later document that
repeats a validation document is left out. Output, under --out:

    tokenizers/<name>_<vocabulary>_bpe.model (or <name>_byte260.json)
    datasets/<name>_sp<vocabulary>/ (or <name>_byte260/): fineweb_val_*.bin, fineweb_train_*.bin, export.json
    manifest.json: tokenizers and data sets, with counts and hashes

Shard k of a split holds its tokens [k * shard_tokens, (k + 1) * shard_tokens), so its content depends on nothing but
its number. The same command, run again, goes on after the last complete shard.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
    import sentencepiece
except ImportError as error:
    sys.exit(f"error: {error}; install what is needed: python3 -m pip install -r requirements.txt")

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_WORDS = 20240520, 1, 256
BYTE_TOKENIZER = {"kind": "byte", "offset": 4}
BYTE_VOCAB_SIZE, BYTE_BOS_ID = 260, 1
STATE_NAME = "export.json"
BLOCK_BYTES = 1 << 18
MAX_DOCUMENT_BYTES = 64 << 20  # with the bounded number of blocks in flight, this bounds memory
SENTENCE_CHARACTERS = 4000  # at most 16,000 bytes: SentencePiece drops longer sentences without a word
PROGRESS_SECONDS = 10.0


class DataError(Exception):
    """A fault the user can act on, in one line: what, where, which value, what to do."""


# === FILES ===========================================================================================================

def write_atomic(path: Path, *chunks: bytes | np.ndarray) -> str:
    """Write a file that appears complete or not at all; returns its SHA-256 in hexadecimal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    digest = hashlib.sha256()
    try:
        with open(partial, "wb") as handle:
            for chunk in chunks:
                handle.write(chunk)
                digest.update(chunk)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); remove it and run again") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write uint16 tokens behind their header of 256 little-endian int32 words; returns the file's SHA-256."""
    header = np.zeros(SHARD_HEADER_WORDS, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    return write_atomic(path, header, tokens.astype("<u2", copy=False))


# === DOCUMENTS =======================================================================================================

class Block(NamedTuple):
    """One text file, or some whole lines of a .jsonl file; the first four fields say where reading can start again."""
    number: int  # of its first document in the whole input, from 0
    file: int  # index of its file
    offset: int  # its first byte in that file
    line: int  # its first line, from 1
    path: str
    data: bytes

    def documents(self) -> list[bytes]:
        if not self.path.endswith(".jsonl"):
            return [self.data]
        lines = self.data.split(b"\n")
        return lines if lines[-1] else lines[:-1]

    def place(self, index: int) -> list[int]:
        """Where the block's index-th document begins, as its first four fields say it for the first one."""
        before = sum(len(line) + 1 for line in self.documents()[:index])
        return [self.number + index, self.file, self.offset + before, self.line + index]

    def parse(self, index: int, data: bytes) -> tuple[str, bytes]:
        """(text, digest) of the index-th document. Raises DataError with file and line number."""
        line = self.line + index
        try:
            text = data.decode("utf-8")
            if self.path.endswith(".jsonl"):
                text = json.loads(text)["text"]
            return text, hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        except UnicodeError as error:
            if isinstance(error, UnicodeDecodeError):
                line += data.count(b"\n", 0, error.start)
            raise DataError(f"{self.path}:{line}: not UTF-8 ({error}); convert it") from None
        except (LookupError, TypeError, AttributeError):
            fault = 'no "text" that is a string'
        except (ValueError, RecursionError) as error:
            fault = f"not JSON ({getattr(error, 'msg', error)})"
        raise DataError(f'{self.path}:{line}: {fault}; each line must be an object like {{"text": "..."}}')


@dataclass(frozen=True)
class Source:
    """Input files, in order. The first num_val_docs documents are the validation split."""
    files: tuple[str, ...]
    num_val_docs: int

    def blocks(self, number: int = 0, file: int = 0, offset: int = 0, line: int = 1) -> Iterator[Block]:
        """The input from that place on, in bounded blocks. Raises DataError for a document that is too large."""
        for index in range(file, len(self.files)):
            path = self.files[index]
            is_jsonl = path.endswith(".jsonl")
            with open(path, "rb") as handle:
                handle.seek(offset)
                data = handle.read(BLOCK_BYTES if is_jsonl else MAX_DOCUMENT_BYTES + 1)
                while data or (offset == 0 and not is_jsonl):  # an empty text file is a document too
                    data += handle.readline(MAX_DOCUMENT_BYTES + 1) if is_jsonl else b""
                    block = Block(number, index, offset, line, path, data)
                    documents = data.count(b"\n") + (not data.endswith(b"\n")) if is_jsonl else 1
                    if len(data) > MAX_DOCUMENT_BYTES:
                        raise DataError(f"{path}:{line + documents - 1}: a document over {MAX_DOCUMENT_BYTES:,} bytes; "
                                        "split it")
                    yield block
                    number, offset, line = number + documents, offset + max(1, len(data)), line + documents
                    data = handle.read(BLOCK_BYTES)
            offset, line = 0, 1

    def val_digests(self) -> frozenset[bytes]:
        """Digests of the validation documents. Raises DataError where no document is left for training."""
        digests: list[bytes] = []
        for block in self.blocks():
            for index, data in enumerate(block.documents()):
                if len(digests) == self.num_val_docs:
                    return frozenset(digests)
                digests.append(block.parse(index, data)[1])
        raise DataError(f"{self.files[0]}: {len(digests)} documents in all, and validation takes the first "
                        f"{self.num_val_docs}: none left for training; give more, or a smaller --num-val-docs")


# === TOKENIZERS ======================================================================================================

class Tokenizer:
    """A SentencePiece .model or the byte tokenizer's .json. Raises DataError for anything else."""

    def __init__(self, path: Path) -> None:
        self.processor: sentencepiece.SentencePieceProcessor | None = None
        self.kind, self.vocab_size, self.bos_id = "byte", BYTE_VOCAB_SIZE, BYTE_BOS_ID
        try:
            if path.suffix != ".json":
                self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
                self.kind, self.vocab_size = "sentencepiece_bpe", self.processor.vocab_size()
                self.bos_id = self.processor.bos_id()
            elif json.loads(path.read_bytes()) != BYTE_TOKENIZER:
                raise ValueError(f"a byte tokenizer is {json.dumps(BYTE_TOKENIZER)}")
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{path}: not a usable tokenizer ({' '.join(str(error).split())}); "
                            "give a SentencePiece .model") from None
        if self.bos_id < 0 or self.vocab_size > 1 << 16:
            raise DataError(f"{path}: {self.vocab_size} pieces and BOS id {self.bos_id}; shards need a BOS piece and "
                            "at most 65,536 pieces")

    def encode_block(self, block: Block) -> tuple[np.ndarray, list[int], list[bytes]]:
        """The uint16 tokens of all its documents, each begun by BOS, and the length and digest of each."""
        texts, digests = zip(*(block.parse(index, data) for index, data in enumerate(block.documents())))
        if self.processor is not None:  # which lets other threads run meanwhile
            ids = self.processor.encode(list(texts), num_threads=1, add_bos=True, out_type="numpy")
        else:
            ids = [np.frombuffer(b"\0" + text.encode("utf-8"), dtype=np.uint8) + np.uint16(BYTE_TOKENIZER["offset"])
                   for text in texts]
            for part in ids:
                part[0] = self.bos_id
        return np.concatenate(ids).astype(np.uint16), [len(part) for part in ids], list(digests)


def training_sentences(source: Source, sample_bytes: int) -> Iterator[str]:
    """Training documents, all or an even sample of about sample_bytes of input, as sentences the trainer accepts."""
    val_digests = source.val_digests()
    threshold = sample_bytes / max(1, sum(os.path.getsize(path) for path in source.files)) * 2**32
    for block in source.blocks():
        for index, data in enumerate(block.documents()):
            # The choice hangs on the number alone: a repeated command trains the same tokenizer.
            if zlib.crc32(b"%d" % (block.number + index)) >= threshold:
                continue
            text, digest = block.parse(index, data)
            if digest not in val_digests:
                text = text.replace("\0", " ").replace("\t", " ")  # the trainer drops sentences that hold these
                yield from (text[at:at + SENTENCE_CHARACTERS] for at in range(0, len(text), SENTENCE_CHARACTERS))


def train_tokenizer(source: Source, vocab_size: int, normalization: str, sample_bytes: int = 50_000_000) -> bytes:
    """Train a SentencePiece BPE model on the training documents; returns the model file's bytes.

    "identity" keeps every character, runs of spaces too; "nmt_nfkc" joins them, as the published tokenizers do.
    Raises DataError where the documents cannot carry such a vocabulary.
    """
    model = io.BytesIO()
    lossless = normalization == "identity"
    faults: list[BaseException] = []

    def sentences() -> Iterator[str]:
        # What this raises, the trainer turns into a RuntimeError with a traceback in its text.
        try:
            yield from training_sentences(source, sample_bytes)
        except (DataError, OSError, KeyboardInterrupt) as fault:
            faults.append(fault)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model, model_type="bpe", vocab_size=vocab_size,
            character_coverage=0.999, byte_fallback=True, split_digits=True, add_dummy_prefix=False,
            pad_id=0, bos_id=1, eos_id=2, unk_id=3, normalization_rule_name=normalization,
            remove_extra_whitespaces=not lossless, allow_whitespace_only_pieces=lossless,
            # Without a lone U+2581 a single space would become three byte pieces and count as three bytes.
            required_chars="\u2581", max_sentence_length=4 * SENTENCE_CHARACTERS, num_threads=1, minloglevel=2)
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip() or "they hold no text"
        raise faults[0] if faults else DataError(
            f"{source.files[0]}: these documents cannot carry a vocabulary of {vocab_size}: {reason}") from None
    return model.getvalue()


# === EXPORT ==========================================================================================================

def encode_in_order(blocks: Iterator[Block], tokenizer: Tokenizer,
                    workers: int) -> Iterator[tuple[Block, np.ndarray, list[int], list[bytes]]]:
    """Each block with its encode_block; at most 2 blocks a thread are in flight, which bounds memory."""
    pending: deque[tuple[Block, Future]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        while True:
            while len(pending) < 2 * workers and (block := next(blocks, None)):
                pending.append((block, pool.submit(tokenizer.encode_block, block)))
            if not pending:
                return
            block, future = pending.popleft()
            yield block, *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """What export.json holds: an export as of its last complete shard."""
    return {"settings": settings, "tokenizer_sha256": "", "complete": False,
            "place": [0, 0, 0, 1], "tokens_done": 0,  # the next document, and its tokens that complete shards hold
            "shards": {"val": {}, "train": {}},  # split -> file name -> tokens and sha256
            "tokens": {"val": 0, "train": 0}, "docs": {"val": 0, "train": 0, "repeats_of_val_left_out": 0},
            "docs_sha256": {"val": "", "train": ""}}  # chained over the documents, so that it can go on


class ShardWriter:
    """Cuts each split's tokens into shards of exactly shard_tokens, of which only the last may be shorter."""

    def __init__(self, folder: Path, state: dict[str, Any], shard_tokens: int, save: Callable[[dict], None]) -> None:
        self.folder, self.state, self.save = folder, state, save
        self.buffer = np.empty(shard_tokens, dtype=np.uint16)
        self.used = 0

    def add(self, split: str, tokens: np.ndarray, done: int, block: Block, index: int) -> None:
        """Append the tokens, from `done` on, of the block's index-th document."""
        while done < len(tokens):
            part = tokens[done:done + len(self.buffer) - self.used]
            self.buffer[self.used:self.used + len(part)] = part
            self.used += len(part)
            done += len(part)
            if self.used == len(self.buffer):
                self.flush(split, block.place(index), done)

    def flush(self, split: str, place: list[int], tokens_done: int = 0) -> None:
        """Write what is buffered as the split's next shard, then note where to go on."""
        shards = self.state["shards"][split]
        if self.used:
            name = f"fineweb_{split}_{len(shards):06d}.bin"
            shards[name] = {"tokens": self.used, "sha256": write_shard(self.folder / name, self.buffer[:self.used])}
            self.state["tokens"][split] += self.used
            self.used = 0
        self.state.update(place=place, tokens_done=tokens_done)
        self.save(self.state)


def export_documents(source: Source, tokenizer_path: Path, folder: Path, state: dict[str, Any], *, shard_tokens: int,
                     workers: int, save: Callable[[dict], None], progress: Callable[[Block, int], None]) -> None:
    """Write both splits' shards from where `state` stands; it is advanced and saved after each shard."""
    val_digests = source.val_digests()
    tokenizer = Tokenizer(tokenizer_path)
    writer = ShardWriter(folder, state, shard_tokens, save)
    done = state["tokens_done"]
    for block, tokens, lengths, digests in encode_in_order(source.blocks(*state["place"]), tokenizer, workers):
        progress(block, len(tokens))
        end = 0
        for index, (length, digest) in enumerate(zip(lengths, digests)):
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
            writer.add(split, tokens[start:end], done, block, index)
            done = 0
    if not state["docs"]["train"]:
        raise DataError(f"{source.files[0]}: all training documents repeat validation documents; give others")
    state["complete"] = True
    writer.flush("train", [0, 0, 0, 1])


# === COMMAND =========================================================================================================

def progress_printer(label: str, source: Source, place: list[int]) -> Callable[[Block, int], None]:
    """Prints share done, rate and time left: one rewritten line on a terminal, else a line now and then."""
    sizes = [os.path.getsize(path) for path in source.files]
    first = sum(sizes[:place[1]]) + place[2]
    started = printed = time.monotonic()
    tokens, terminal = 0, sys.stdout.isatty()

    def show(block: Block, block_tokens: int) -> None:
        nonlocal printed, tokens
        tokens += block_tokens
        now = time.monotonic()
        if now - printed < (0.5 if terminal else PROGRESS_SECONDS):
            return
        printed, seconds = now, now - started
        read = sum(sizes[:block.file]) + block.offset + len(block.data)
        left = int((sum(sizes) - read) * seconds / max(1, read - first))
        print(f"{label}: {100 * read / sum(sizes):.1f} % of {sum(sizes) / 1e6:,.1f} MB, {tokens / seconds:,.0f} "
              f"tokens/s, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left   ",
              end="\r" if terminal else "\n", flush=True)

    return show


def tokenizer_content(source: Source, recipe: dict[str, Any]) -> bytes:
    """The tokenizer file of a recipe."""
    if "model" in recipe:
        return Path(recipe["model"]).read_bytes()
    if "vocab_size" not in recipe:
        return (json.dumps(BYTE_TOKENIZER) + "\n").encode()
    print(f"training a tokenizer of {recipe['vocab_size']} pieces ...", flush=True)
    return train_tokenizer(source, **recipe)


def open_state(folder: Path, tokenizer_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The export to begin or to go on with. Raises DataError where the folder holds something else."""
    state = read_json(folder / STATE_NAME) or new_state(settings)
    if not (folder / STATE_NAME).exists():
        for path in [*sorted(folder.glob("fineweb_*.bin")), tokenizer_path]:
            if path.exists():
                raise DataError(f"{path}: was not made by this command; choose another --name")
    for key, value in settings.items():
        if state["settings"][key] != value:
            raise DataError(f"{folder}: made with another {key} ({state['settings'][key]}, now {value}); "
                            "choose another --name or remove the folder")
    for name, shard in [*state["shards"]["val"].items(), *state["shards"]["train"].items()]:
        path = folder / name
        if not path.exists() or path.stat().st_size != 4 * SHARD_HEADER_WORDS + 2 * shard["tokens"]:
            print(f"{path}: missing or of a wrong size; starting from the first document", flush=True)
            return new_state(settings)
    if state["tokens"]["val"] and not state["complete"]:
        print(f"{folder}: going on at document {state['place'][0] + 1:,}", flush=True)
    return state


def run_export(source: Source, options: argparse.Namespace, label: str, recipe: dict[str, Any]) -> None:
    """Make one tokenizer and its data set, or what is missing of them, and enter both in the manifest."""
    folder = options.out / "datasets" / f"{options.name}_{label}"
    stem = f"{options.name}_{label[2:]}_bpe.model" if label.startswith("sp") else f"{options.name}_{label}.json"
    tokenizer_path = options.out / "tokenizers" / stem
    inputs = [[os.path.abspath(path), os.path.getsize(path), os.stat(path).st_mtime_ns] for path in source.files]
    state = open_state(folder, tokenizer_path, {"inputs": inputs, "num_val_docs": source.num_val_docs,
                                                "shard_tokens": options.shard_tokens, "tokenizer": recipe})
    if not tokenizer_path.exists() or sha256(tokenizer_path.read_bytes()) != state["tokenizer_sha256"]:
        content = tokenizer_content(source, recipe)
        if sha256(content) != state["tokenizer_sha256"]:
            state = {**new_state(state["settings"]), "tokenizer_sha256": sha256(content)}
        write_json(folder / STATE_NAME, state)  # first, so that whenever we are killed the tokenizer is known as ours
        write_atomic(tokenizer_path, content)
    if not state["complete"]:
        export_documents(source, tokenizer_path, folder, state, shard_tokens=options.shard_tokens,
                         workers=options.workers, save=lambda state: write_json(folder / STATE_NAME, state),
                         progress=progress_printer(label, source, state["place"]))
    vocab_size = update_manifest(options.out, folder, tokenizer_path, state)
    docs, tokens = state["docs"], state["tokens"]
    print(f"{folder}: {docs['val']:,} validation documents with {tokens['val']:,} tokens, {docs['train']:,} training "
          f"documents with {tokens['train']:,}; {docs['repeats_of_val_left_out']:,} repeats of validation left out\n"
          f"to train: DATA_PATH={folder} TOKENIZER_PATH={tokenizer_path} VOCAB_SIZE={vocab_size}", flush=True)


def update_manifest(out: Path, folder: Path, tokenizer_path: Path, state: dict[str, Any]) -> int:
    """Enter a data set and its tokenizer in manifest.json, beside other entries; returns the vocabulary's size."""
    path = out / "manifest.json"
    manifest = read_json(path)
    tokenizers, datasets = ({entry["name"]: entry for entry in manifest.get(kind, [])}
                            for kind in ("tokenizers", "datasets"))
    tokenizer = Tokenizer(tokenizer_path)
    tokenizers[tokenizer_path.stem] = {
        "name": tokenizer_path.stem, "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id, "sha256": state["tokenizer_sha256"],
        "path" if tokenizer.kind == "byte" else "model_path": f"tokenizers/{tokenizer_path.name}"}
    stats = {f"{what}_{split}": state[what][split] for split in ("train", "val") for what in ("docs", "tokens")}
    stats.update({f"files_{split}": len(state["shards"][split]) for split in ("train", "val")})
    datasets[folder.name] = {
        "name": folder.name, "tokenizer_name": tokenizer_path.stem, "path": f"datasets/{folder.name}",
        "stats": {**stats, "docs_repeats_of_val_left_out": state["docs"]["repeats_of_val_left_out"]},
        "docs_sha256": state["docs_sha256"], "shards": state["shards"]}
    write_json(path, {**manifest, "tokenizers": [*tokenizers.values()], "datasets": [*datasets.values()]})
    return tokenizer.vocab_size


def recipes(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the command asks for: the data set's suffix -> what its tokenizer is made from."""
    wanted = [(f"sp{size}", {"vocab_size": size, "normalization": options.normalization})
              for size in options.vocab_size or ([] if options.model or options.bytes else [1024])]
    wanted += [(f"sp{Tokenizer(path).vocab_size}", {"model": str(path), "sha256": sha256(path.read_bytes())})
               for path in options.model or []]
    wanted += [(f"byte{BYTE_VOCAB_SIZE}", {"bytes": True})] if options.bytes else []
    if len(dict(wanted)) < len(wanted):
        raise DataError(f"two tokenizers of one size ({', '.join(dict(wanted))}); give each a command and a --name")
    return dict(wanted)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help=".jsonl files, or text files of one document each")
    add("--out", type=Path, default=Path(__file__).resolve().parent, help="where to write (default: %(default)s)")
    add("--name", default="docs", help="first part of the names of what is written (default: docs)")
    add("--vocab-size", type=positive, nargs="+", metavar="N", help="train a tokenizer of each size (default: 1024)")
    add("--model", type=Path, nargs="+", metavar="M", help="use these SentencePiece models instead")
    add("--bytes", action="store_true", help=f"use the byte tokenizer of {BYTE_VOCAB_SIZE} ids")
    add("--num-val-docs", type=positive, default=50_000, metavar="N", help="validation documents (default: 50000)")
    add("--shard-tokens", type=positive, default=100_000_000, metavar="N", help="tokens a shard (default: 100000000)")
    add("--normalization", choices=("nmt_nfkc", "identity"), default="nmt_nfkc",
        help="of a trained tokenizer; identity keeps runs of spaces, as code needs them (default: nmt_nfkc)")
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="threads (default: one a core)")
    options = parser.parse_args()
    try:
        for path in options.files:
            if not os.path.isfile(path):
                parser.exit(2, f"error: {path}: no such file\n")
        if options.shard_tokens >= 1 << 31:
            parser.exit(2, f"error: --shard-tokens {options.shard_tokens}: a shard's header counts to 2147483647\n")
        source = Source(tuple(options.files), options.num_val_docs)
        for label, recipe in recipes(options).items():
            run_export(source, options, label, recipe)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on after the last complete shard", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
