"""Download the published FineWeb tokens: manifest, tokenizer, shards, and the documents on request.

    # 80 training shards, 16 GB
    python3 data/cached_challenge_fineweb.py --variant sp1024
    # the smallest set that trains, 0.3 GB
    python3 data/cached_challenge_fineweb.py --variant sp1024 --train-shards 1
    # read and check what is on disk, without a network
    python3 data/cached_challenge_fineweb.py --variant sp1024 --verify

A file gets its final name only after its size, checksum and shard header have been checked, so
training never reads half a file. Run the command again to fetch what is missing: it continues a
file that was cut off. Training may start during the download: the file .producing in the data set's
folder (see producer.py) says that more shards will come.

The tool writes only shards under data/datasets, tokenizers in data/tokenizers, and manifest.json
and the documents in data/. It never replaces a tokenizer or a document that it did not fetch, and
it refuses a repository that has another tokenizer now than the one your shards were made with.
MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX name another repository and a folder
in it, HF_ENDPOINT another hub.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producer import (
    PRODUCING,
    DataError,
    Parser,
    Producer,
    command_again,
    command_of,
    escaped,
    locked,
    missing_package,
    one_line,
    open_file,
    read_file,
    read_json,
    record_tokenizer,
    recorded_tokenizer,
    run_tool,
    to_train,
    write_json,
)
from tokenize_docs import SHARD_HEADER_WORDS, SHARD_MAGIC, SHARD_VERSION, STATE_NAME

try:
    from huggingface_hub import HfApi, constants, get_session, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars, logging
    from tqdm import tqdm
except ImportError as error:
    sys.exit(missing_package(error))

DATA = Path(__file__).resolve().parent
MANIFEST, KINDS = DATA / "manifest.json", ("datasets", "tokenizers")
VARIABLES = ("MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "HF_ENDPOINT")
PREFIX, DOCS = "fineweb10B_", ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
LINE_SECONDS, API_SECONDS = 10.0, 30.0
# The files of a data set. No file of another name is written, whatever a manifest says.
WORD = r"\w[\w.-]*"
FILE_NAMES = re.compile(
    rf"datasets/{WORD}/fineweb_(train|val)_\d{{6}}\.bin|tokenizers/{WORD}\.(model|vocab|json)", re.A
)


@dataclass
class Item:
    """A file to have: its path below data/ and below the remote folder, its bytes,
    its checksum (None: not known).
    """

    name: str
    size: int | None = None
    # "sha256:<hex>", or for files outside LFS "git:<hex>", the SHA-1 that git gives them.
    digest: str | None = None

    def __post_init__(self) -> None:
        self.path = DATA / self.name
        # Same folder: renaming it copies nothing.
        self.partial = self.path.with_name(f".{self.path.name}.partial")

    def missing_bytes(self) -> int:
        size, here = self.size or 0, size_of(self.path)
        return size - (here if here == self.size else min(size, size_of(self.partial)))

    def fault(self, path: Path, read_all: bool = True) -> str:
        """What is wrong with the size, shard header or checksum of the file at `path`, in words;
        nothing: empty.
        """
        size = size_of(path)
        if size == 0 or self.size not in (None, size):
            return f"{size:,} bytes instead of {self.size:,}" if size else "missing or empty"
        with open_file(path) as handle:
            if self.name.endswith(".bin"):
                magic, version, tokens = struct.unpack("<3i", handle.read(12).ljust(12))
                if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
                    return "its header is not that of a shard"
                if size != 4 * SHARD_HEADER_WORDS + 2 * tokens:
                    return (
                        f"{size:,} bytes, which is not what its header promises ({tokens:,} tokens)"
                    )
            if not self.digest or not read_all:
                return ""
            kind, _, expected = self.digest.partition(":")
            digest = (
                hashlib.sha256()
                if kind == "sha256"
                else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            )
            handle.seek(0)
            while block := handle.read(1 << 22):
                digest.update(block)
        return "" if digest.hexdigest() == expected else "its checksum is wrong"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


class Record:
    """What was verified once, by size, checksum and modification time,
    so that nobody reads it all again.
    """

    def __init__(self) -> None:
        self.path, self.lock = DATA / "datasets" / ".download.json", threading.Lock()
        self.files: dict[str, list[Any]] = {}  # by name
        # If there is none yet, or a damaged one, the files are read again.
        with suppress(OSError, DataError):
            found = read_json(self.path, "")
            self.files = {name: entry for name, entry in found.items() if is_entry(entry)}

    def entry(self, item: Item, fault: str = "") -> list[Any]:
        return [
            item.size,
            item.digest,
            None if fault or not item.path.is_file() else item.path.stat().st_mtime_ns,
        ]

    def digest(self, item: Item) -> str | None:
        """The checksum that the file had when it was fetched; None if that is not known."""
        return self.files.get(item.name, [None, None, None])[1]

    def check(self, item: Item, read_all: bool) -> str:
        """The fault of the file in its place;
        unless told to, reads only what was never verified.
        """
        known = self.files.get(item.name) == self.entry(item)
        if item.path == MANIFEST:  # may list more than the hub's
            return "" if known else "another one"
        fault = item.fault(item.path, read_all or not known)
        # A wrong file is noted only if we fetched it: others may be somebody's own.
        if item.digest and (read_all or not known) and (not fault or item.name in self.files):
            self.save(item, fault)
        return fault

    def save(self, item: Item, fault: str = "") -> None:
        with self.lock:
            self.files[item.name] = self.entry(item, fault)
            write_json(self.path, self.files)


def is_entry(value: object) -> bool:
    """Is it [size, digest, modification time], as Record.entry makes it?"""
    if not isinstance(value, list) or len(value) != 3:
        return False
    size, digest, modified = value
    numbers = all(number is None or type(number) is int for number in (size, modified))
    return numbers and (digest is None or isinstance(digest, str))


@contextmanager
def downloading(folder: Path, shards_promised: int) -> Iterator[Producer]:
    """Tell training that shards are coming to `folder`.

    Raises DataError if another download is running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(DATA / "datasets" / ".download.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # of another kind: a file system without locks
            if isinstance(error, BlockingIOError):
                raise DataError(
                    f"{DATA}: another download is running in it; wait until it has ended"
                ) from None
        again = command_again("data/cached_challenge_fineweb.py", sys.argv[1:], *VARIABLES)
        with locked(folder), Producer(folder, again, shards_promised=shards_promised) as producer:
            yield producer


def reason(error: BaseException) -> str:
    """An error as one line for people."""
    if isinstance(error, HfHubHTTPError):
        return f"the hub answered {error.response.status_code}"
    text = one_line(str(error).partition("\n")[0])[:200]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


def is_final(error: BaseException) -> bool:
    """Is trying again useless, because the hub or this machine refuses?"""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    local = (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ConnectionError)
    )
    return (
        local
        or isinstance(error, (OfflineModeIsEnabled, ValueError))
        or (400 <= status < 500 and status not in (408, 425, 429))
    )


def patiently(
    name: str, action: Callable[[], Any], retries: int, reached: Callable[[], int] = lambda: 0
) -> Any:
    """The action's result, tried again after faults, ever more slowly.

    Raises its error after `retries` in a row.
    """
    faults, best = 0, reached()
    while True:
        try:
            return action()
        except Exception as error:
            # The HTTP library's errors have other names in each version of the client.
            # Only bytes not seen before count as progress: a file that stays too short must end.
            faults, best = (1 if reached() > best else faults + 1), max(best, reached())
            if is_final(error) or faults > retries:
                raise
            tqdm.write(
                f"{name}: {reason(error)}; trying again ({faults} of {retries})", file=sys.stderr
            )
        time.sleep(min(60, 2 ** (faults - 1)))


class Hub:
    """The repository, at the commit that it had when we asked first.

    If it does not answer, or is not to be asked, the record of earlier downloads is used instead.
    `offline`: why.
    """

    def __init__(self, retries: int, offline: str = "") -> None:
        self.repo = os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf")
        root = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/")
        self.prefix = f"{root}/".lstrip("/")
        self.api, self.record, self.retries, self.offline = HfApi(), Record(), retries, offline
        # A range of a packed answer would not be a range of the file.
        self.headers = {**build_hf_headers(), "accept-encoding": "identity"}
        self.commit = getattr(self.ask(self.api.repo_info, timeout=API_SECONDS), "sha", None)

    def ask(self, question: Callable[..., Any], **arguments: Any) -> Any:
        """An answer of the hub's API; None if none comes, and `offline` says why.

        Raises DataError at a no.
        """
        get_session().timeout = API_SECONDS  # the client's own default is to wait for ever
        if self.offline:
            return None
        try:
            return patiently(
                self.repo,
                lambda: question(self.repo, repo_type="dataset", **arguments),
                min(self.retries, 3),
            )
        except Exception as error:
            self.offline = f"{self.api.endpoint}, {self.repo}: {reason(error)}"
            if is_final(error) and not isinstance(error, OfflineModeIsEnabled):
                raise DataError(self.offline) from None
            return None

    def items(self, names: list[str]) -> list[Item]:
        """Size and digest of each file, both None for a file that is not known."""
        known: dict[str, Any] = {}
        for at in range(0, len(names), 100):
            paths = [self.prefix + name for name in names[at : at + 100]]
            for file in self.ask(self.api.get_paths_info, paths=paths, revision=self.commit) or []:
                if hasattr(file, "blob_id"):  # not a folder
                    digest = f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}"
                    known[file.path.removeprefix(self.prefix)] = file.size, digest
        known = self.record.files if self.offline else known
        return [Item(name, *known.get(name, ())[:2]) for name in names]

    def complete(self, item: Item) -> str:
        """Bring a file to its place unless the right one is there.

        Returns or raises what stopped that.
        """
        if item.size is None:
            return "not on the hub"
        if fault := self.record.check(item, read_all=False):
            is_ours = item.path == MANIFEST or item.name.endswith(".bin")
            if size_of(item.path) and not (is_ours or item.name in self.record.files):
                return f"{fault}, and it was not fetched here; move it away"
            item.path.parent.mkdir(parents=True, exist_ok=True)
            if item.path != MANIFEST:
                item.path.unlink(missing_ok=True)  # training must not meet what is not the hub's
            patiently(
                item.name, lambda: self.fetch(item), self.retries, lambda: size_of(item.partial)
            )
            self.record.save(item)
        return ""

    def fetch(self, item: Item) -> None:
        """One attempt, from where the partial file ends."""
        url = hf_hub_url(
            self.repo, self.prefix + item.name, repo_type="dataset", revision=self.commit
        )
        with open(item.partial, "ab") as handle:
            handle.seek(handle.truncate(0 if handle.tell() > item.size else None))
            http_get(
                url,
                handle,
                resume_size=handle.tell(),
                headers=self.headers,
                expected_size=item.size,
            )
            handle.flush()
            os.fsync(handle.fileno())
        if fault := item.fault(item.partial):
            item.partial.unlink()
            raise DataError(f"of what came, {fault}")
        if item.path == MANIFEST:
            # Data sets made on this machine stay listed, unless our manifest is damaged.
            with suppress(DataError):
                hubs, ours = read_manifest(item.partial), read_manifest(MANIFEST)
                write_json(
                    item.partial,
                    {**ours, **hubs, **{k: [*{**ours[k], **hubs[k]}.values()] for k in KINDS}},
                )
        os.replace(item.partial, item.path)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, its two lists as dictionaries by name.

    Raises DataError where that cannot be.
    """
    try:
        manifest = json.loads(read_file(path))
        return {
            **manifest,
            **{kind: {str(entry["name"]): entry for entry in manifest[kind]} for kind in KINDS},
        }
    except (DataError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: no usable manifest ({error!r}); run without --skip-manifest and --verify"
        ) from None


def wanted_names(variant: str, train_shards: int | None) -> tuple[list[str], int]:
    """The files to have, in the order in which training needs them,
    and how many are training shards.
    """
    dataset, manifest = PREFIX + variant, read_manifest(MANIFEST)
    if dataset not in manifest["datasets"]:
        names = [name for name in manifest["datasets"] if name.startswith(PREFIX)]
        known = one_line(", ".join(name.removeprefix(PREFIX) for name in names)) or "none"
        raise argparse.ArgumentTypeError(
            f"--variant {variant}: {MANIFEST} lists {known}; it is fetched without --skip-manifest"
        )
    try:
        entry = manifest["datasets"][dataset]
        tokenizer = manifest["tokenizers"][entry["tokenizer_name"]]
        num_val, num_train = (int(entry["stats"][f"files_{split}"]) for split in ("val", "train"))
        names = [
            str(tokenizer[key])
            for key in ("model_path", "vocab_path", "path")
            if tokenizer.get(key)
        ]
        if not 1 <= num_val <= 1_000_000 or not 0 <= num_train <= 1_000_000:
            raise ValueError(f"{num_val} validation and {num_train} training shards")
        if not names:
            raise ValueError("its tokenizer has no file")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{MANIFEST}: its entry of {dataset} is not usable ({error!r})") from None
    wanted = min(80, num_train) if train_shards is None else train_shards
    if not 0 <= wanted <= num_train:
        raise argparse.ArgumentTypeError(
            f"--train-shards {wanted}: {variant} has {num_train}; give 0 to {num_train}"
        )
    names += [
        f"datasets/{dataset}/fineweb_{split}_{number:06d}.bin"
        for split, count in (("val", num_val), ("train", wanted))
        for number in range(count)
    ]
    if foreign := [name for name in names if not FILE_NAMES.fullmatch(name)]:
        raise DataError(
            f"{MANIFEST}: {dataset} is to have {foreign[0]!r}, which is no shard and no tokenizer; "
            "nothing was fetched: name another repository"
        )
    return list(dict.fromkeys(names)), wanted


def need_disk(items: list[Item]) -> None:
    """Raises DataError if a disk has less room than the missing files need."""
    places = [
        (next(folder for folder in item.path.parents if folder.is_dir()), item.missing_bytes())
        for item in items
    ]
    for folder in {folder for folder, _ in places}:
        need = sum(size for other, size in places if other.stat().st_dev == folder.stat().st_dev)
        if need > (free := shutil.disk_usage(folder).free):
            raise DataError(
                f"{folder}: {tqdm.format_sizeof(need)}B are needed, "
                f"{tqdm.format_sizeof(free)}B are free; make room, or ask for fewer --train-shards"
            )


def for_each(
    items: list[Item],
    job: Callable[[Item], str],
    jobs: int,
    missing: Callable[[Item], int] = Item.missing_bytes,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> dict[str, str]:
    """Do a job on every item, in order, several at once, and show the bytes;
    returns the faults by name.
    """
    pool = ThreadPoolExecutor(max(1, jobs))
    start, total = time.monotonic(), sum(item.size or 0 for item in items)
    first, next_line = total - sum(map(missing, items)), start + LINE_SECONDS
    reached = first
    active = futures = {pool.submit(job, item): item for item in items}
    with tqdm(
        total=total, initial=first, unit="B", unit_scale=True, disable=None, leave=False
    ) as bar:
        while active:
            active, now = wait(active, timeout=0.2).not_done, time.monotonic()
            done = total - sum(missing(futures[future]) for future in active)
            advance(max(0, done - reached))  # less than before: a file was bad and comes once more
            reached = done
            bar.update(done - bar.n)
            if bar.disable and (now > next_line or done > first and not active):
                next_line = now + LINE_SECONDS
                line = tqdm.format_meter(
                    done, total, now - start, 0, unit="B", unit_scale=True, initial=first
                )
                print(line, flush=True)
    faults = {item.name: future.exception() or future.result() for future, item in futures.items()}
    return {
        name: reason(fault) if isinstance(fault, Exception) else fault
        for name, fault in faults.items()
        if fault
    }


def demand_all(items: list[Item], known: str, faults: dict[str, str]) -> None:
    """Raises DataError where there are faults."""
    if faults:
        head = f"{DATA}: {len(faults)} of {len(items)} files are missing or wrong{known}:"
        raise DataError(
            "\n  ".join([head, *(f"{name}: {fault}" for name, fault in faults.items())])
        )


def refuse_another_tokenizer(items: list[Item], record: Record, folder: Path) -> None:
    """Raises DataError if the hub has another tokenizer now, but still the shards that are here:
    training on them with that tokenizer would give wrong bits per byte.
    """
    tokenizer, digests = items[0], {""}
    with suppress(DataError):  # a damaged record says nothing, and is written anew
        digests.add("sha256:" + recorded_tokenizer(folder)[0])
    digests.add(str(record.digest(tokenizer)))
    kind = str(tokenizer.digest).partition(":")[0]
    others = {
        digest for digest in digests if digest.partition(":")[0] == kind and digest[-1] != ":"
    }
    if not others - {tokenizer.digest}:
        return
    shards = [item for item in items if item.name.endswith(".bin") and size_of(item.path)]
    unchanged = [item for item in shards if record.digest(item) in (None, item.digest)]
    if unchanged:
        raise DataError(
            f"{tokenizer.path}: the repository has another tokenizer now than the one that made "
            f"the {len(unchanged)} shards in {folder}; "
            "remove that folder to fetch all of it anew, or name another repository"
        )


def check_only(
    options: argparse.Namespace, hub: Hub, items: list[Item], folder: Path, known: str
) -> None:
    """Check what is here, without the hub. Raises DataError if a file is missing or wrong."""
    faults = for_each(
        items,
        lambda item: hub.record.check(item, options.verify),
        options.jobs,
        missing=lambda item: item.size or 0,
    )
    demand_all(items, known, faults)
    unknown = [item.name for item in items if not item.digest]
    producing = folder / PRODUCING
    if producing.exists() and (unknown or options.verify):
        raise DataError(
            f"{producing}: more files were to come, or to be checked; "
            "run again without --verify, with a network"
        )
    if producing.exists():
        with locked(folder):
            producing.unlink(missing_ok=True)
    if unknown:
        count = f"{len(unknown)} of {len(items)} files"
        print(
            f"note: {count} have no checksum in {hub.record.path} (such as {unknown[0]}): "
            "of shards the header was checked, of others nothing",
            flush=True,
        )


def download(
    options: argparse.Namespace, hub: Hub, items: list[Item], folder: Path, train_shards: int
) -> None:
    """Fetch what is missing. Raises DataError if that is not possible."""
    refuse_another_tokenizer(items, hub.record, folder)
    need_disk(items)
    tokenizer = items[0]
    before_training = {item.name for item in items if "_val_" in item.name} | {tokenizer.name}
    with downloading(folder, train_shards) as producer:

        def complete(item: Item) -> str:
            fault = hub.complete(item)
            if item is tokenizer and not fault:
                record_tokenizer(folder, item.path)
            if item.name in before_training and not fault:
                before_training.discard(item.name)
                if not before_training:
                    producer.complete_val()
            return fault

        faults = for_each(items, complete, options.jobs, advance=producer.advance)
        demand_all(items, "", faults)


def variant_meant(given: str) -> str:
    """The variant that a number, a folder or capital letters mean: `1024`, `SP1024`."""
    name = Path(given).name.removeprefix(PREFIX)
    name = f"sp{name}" if name.isdecimal() else name
    return name.lower() if re.fullmatch(r"(sp|byte)\d+", name.lower()) else name


def run(options: argparse.Namespace) -> None:
    meant = variant_meant(options.variant)
    if meant != options.variant:
        raise argparse.ArgumentTypeError(f"--variant {options.variant}: did you mean {meant}?")
    endpoint = "" if options.verify else os.environ.get("HF_ENDPOINT", "")
    if endpoint and not re.match("https?://", endpoint):
        raise DataError(f"HF_ENDPOINT={endpoint}: an address is expected; set https://{endpoint}")
    folder = DATA / "datasets" / (PREFIX + options.variant)
    if (folder / STATE_NAME).exists():
        raise DataError(
            f"{folder}: was made by tokenize_docs.py; move it away to download its namesake"
        )
    if options.verify and not folder.exists():
        raise DataError(f"{folder}: nothing was downloaded here; run without --verify")
    hub = Hub(options.retries, "--verify asks no hub" if options.verify else "")
    if not (options.skip_manifest or hub.offline):
        faults = for_each(hub.items([MANIFEST.name]), hub.complete, 1)
        if faults:
            raise DataError(f"{MANIFEST}: {faults[MANIFEST.name]}")
    if hub.offline and not folder.exists():
        raise DataError(
            f"{hub.offline}; check the network and HF_ENDPOINT, and run again; "
            f"to train without a network: {command_of('data/quickstart.py')}"
        )
    names, train_shards = wanted_names(options.variant, options.train_shards)
    items = hub.items(names + DOCS * options.with_docs)
    known = f" as far as is known here ({hub.offline})" if hub.offline else ""
    if hub.offline:
        check_only(options, hub, items, folder, known)
    else:
        download(options, hub, items, folder, train_shards)
    vocab_size = "".join(filter(str.isdecimal, options.variant))
    print(
        f"{folder}: all {len(items)} files are right{known}\n"
        f"{to_train(folder, items[0].path, vocab_size)}",
        flush=True,
    )


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of shards (200 MB each); --variant names a data set"
        )
    return int(text)


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("number", nargs="?", type=whole, metavar="TRAIN_SHARDS", help="the same as --train-shards")
    shards = "training shards, 200 MB each (default: 80, or all there are)"
    add("--train-shards", type=whole, metavar="N", help=shards)
    add("--variant", default="sp1024", help="sp1024, sp8192, byte260 ... (default: sp1024)")
    add("--with-docs", action="store_true", help=f"also {' and '.join(DOCS)}, about 48 GB")
    add("--skip-manifest", action="store_true", help="use data/manifest.json as it is")
    verify = "only read the files here and compare them with what was recorded; no network"
    add("--verify", action="store_true", help=verify)
    add("--jobs", type=int, default=8, metavar="N", help="files fetched at once (default: 8)")
    tries = "retries after faults without progress (default: 6)"
    add("--retries", type=int, default=6, metavar="N", help=tries)
    options = parser.parse_args()
    options.train_shards = options.train_shards if options.number is None else options.number
    logging.set_verbosity(logging.CRITICAL)  # we say it ourselves, below one bar
    disable_progress_bars()
    # A broken connection loses at most so many bytes; the default is 10 MB.
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options)
    except (argparse.ArgumentTypeError, DataError, OSError) as error:
        # Several lines where several files are wrong.
        text = escaped(str(error))
        parser.exit(2 if isinstance(error, argparse.ArgumentTypeError) else 1, f"error: {text}\n")
    except KeyboardInterrupt:
        print(
            "\ninterrupted; the same command goes on where this one stopped",
            file=sys.stderr,
            flush=True,
        )
        # Without waiting for slow connections; what they have written is kept and continued.
        os._exit(130)


if __name__ == "__main__":
    run_tool(main)
