"""Download the published FineWeb tokens: manifest, tokenizer and shards; on request the documents.

    python3 data/cached_challenge_fineweb.py                      80 training shards, 16 GB
    python3 data/cached_challenge_fineweb.py --train-shards 1     the smallest set, 0.3 GB
    python3 data/cached_challenge_fineweb.py --verify             check the files on disk

A file gets its final name only after its checksum has been compared with the hub's. After Ctrl-C, a
signal or a crash, run the same command again: complete files stay, and incomplete files continue
where they stopped. Until a file is complete, its content is in .NAME.SET.partial in the same
folder. Training may start during the download: see data/README.md.
data/ and data/datasets may be links to another disk.

The program writes only shards under data/datasets, tokenizers in data/tokenizers, and manifest.json
and the documents in data/. It never replaces a tokenizer or documents that it did not download.

Environment variables:
  MATCHED_FINEWEB_REPO_ID             another repository, as owner/name
  MATCHED_FINEWEB_REMOTE_ROOT_PREFIX  another folder in the repository
  HF_ENDPOINT                         another hub
  HF_TOKEN                            a token that may read a private or gated repository

Files are downloaded over HTTP even if hf-xet is installed (huggingface_hub installs it), because
hf-xet cannot continue a file.
"""

# Builds on dataset.py, on cli.py of tools/, and on the client library huggingface_hub, which the
# functions that need it import, so that --help works without it.

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from typing import Any

# python3 -P does not put the folder of the script on the path.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dataset
from dataset import DATA, cli

DATA_SET_PREFIX = "fineweb10B_"
CHECKSUM_FILE = "sha256sums"
DEFAULT_TRAIN_SHARDS = 80
DOCUMENT_FILES = ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
# The names that files of a data set may have. A file with any other name is never written, whatever
# the manifest says.
ALLOWED_NAMES = (
    r"datasets/\w[\w.-]*/fineweb_(train|val|val_bytes)_\d{6}\.bin"
    r"|tokenizers/\w[\w.-]*\.(model|vocab|json)"
)


class Hub:
    """The files of a repository on the hub, and their download for one data set.

    The files are those of the repository's newest commit at the time of creation. Raises ToolError
    if the hub cannot be reached.
    """

    def __init__(self, retries: int, data_set: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, logging

        logging.set_verbosity_error()
        disable_progress_bars()
        self.repo = os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf")
        self.root = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/")
        self.retries = retries
        self.data_set = data_set
        api = HfApi()
        try:
            commit = api.dataset_info(self.repo, timeout=30).sha
            revision = {"repo_type": "dataset", "revision": commit}
            entries = list(
                api.list_repo_tree(self.repo, self.root or None, recursive=True, **revision)
            )
        except Exception as error:  # the HTTP library's errors have other names in each version
            text, _ = describe_error(error)
            raise cli.ToolError(
                f"{api.endpoint}, {self.repo}: {text}; "
                "check the network, HF_ENDPOINT and MATCHED_FINEWEB_REPO_ID (owner/name)"
            ) from None
        self.url_options = {**revision, "endpoint": api.endpoint}
        self.files = {os.path.relpath(e.path, self.root or "."): e for e in entries}

    def file_info(self, name: str) -> Any:
        """Return the hub's entry of a file, with its size and checksum.

        Raises ToolError if the hub does not have the file.
        """
        if name not in self.files:
            raise cli.ToolError(
                f"{self.repo}: {name} is not on the hub; "
                "check the options and MATCHED_FINEWEB_REPO_ID"
            )
        return self.files[name]

    def download(self, name: str) -> None:
        """Download a file, or the missing rest of it, and move it to its final place.

        The file is moved only if its checksum matches the hub's. After an error that may pass, the
        download is tried again up to `retries` times. Raises ToolError if it does not succeed.
        """
        path = DATA / name
        info = self.file_info(name)
        fault = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        # The partial file is on the same disk as the final one, so that it can be renamed. Its name
        # contains that of the data set, because only the data set's folder is locked: a tokenizer
        # may be downloaded for two data sets at the same time.
        partial = path.with_name(f".{path.name}.{self.data_set}.partial")
        for attempt in range(self.retries + 1):
            if attempt:
                print(f"{name}: {fault}; trying again", file=sys.stderr)
                time.sleep(min(60, 2**attempt))
            try:
                self.append_missing_bytes(name, partial)
            except Exception as error:
                fault, status = describe_error(error)
                # Trying again does not change these answers of the hub, nor an error of the system
                # such as a full disk (errno).
                if status in (401, 403, 404) or getattr(error, "errno", None):
                    break
                continue
            if checksum_matches(partial, info):
                os.replace(partial, path)
                return
            what_it_is = dataset.identify(dataset.read_head(partial))[1].partition(";")[0]
            fault = f"the downloaded file {what_it_is or 'has a wrong checksum'}"
            os.unlink(partial)
        raise cli.ToolError(f"{name}: {fault}; run the same command again")

    def append_missing_bytes(self, name: str, partial: Path) -> None:
        """Download the bytes of a file that `partial` does not contain yet, and append them."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.repo, os.path.join(self.root, name), **self.url_options)
        size = self.file_info(name).size
        headers = build_hf_headers()
        with open(partial, "ab") as file:
            if file.tell() > size:
                file.seek(0)
                file.truncate()
            http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)


def describe_error(error: Exception) -> tuple[str, int]:
    """Return (the error as one line, its HTTP status); the status is 0 without an answer."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    text = cli.one_line(error)[:200]
    if status in (401, 403):
        text += "; if it is private or gated, set HF_TOKEN to a token that may read it"
    return text, status


def checksum_matches(path: Path, info: Any) -> bool:
    """Return True if a file has the size and the checksum of the hub's entry `info`."""
    if not path.is_file() or path.stat().st_size != info.size:
        return False
    if info.lfs:
        return dataset.file_sha256(path) == info.lfs.sha256
    # For small files, which are not stored with git LFS, the hub knows the checksum of git.
    blob = b"blob %d\0" % info.size + path.read_bytes()
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == info.blob_id


def read_checksums(folder: Path) -> dict[str, str]:
    """Return {path relative to `folder`: SHA-256} of the files that were downloaded for a data set.

    They are read from the data set's sha256sums, a file for `sha256sum -c`.
    """
    path = folder / CHECKSUM_FILE
    text = os.fsdecode(path.read_bytes()) if path.is_file() else ""
    # Damaged lines are ignored: the next download compares their files with the hub's checksums.
    lines = [line for line in text.splitlines() if re.fullmatch(r"[0-9a-f]{64}  \S.*", line)]
    return {line[66:]: line[:64] for line in lines}


def write_checksums(folder: Path, checksums: dict[str, str]) -> None:
    """Write the data set's sha256sums, the file that read_checksums reads."""
    lines = [os.fsencode(f"{digest}  {name}\n") for name, digest in checksums.items()]
    dataset.write_atomic(folder / CHECKSUM_FILE, *lines)


def ensure_file(hub: Hub, name: str, recorded: str | None) -> str:
    """Download a file unless it is in its place with the right checksum; return its SHA-256.

    `recorded` is the SHA-256 from an earlier download, or None. If it is the hub's, a file of the
    right size is not read again. Raises ToolError if a tokenizer or a file of documents differs
    from the hub's and was not downloaded by this program.
    """
    path = DATA / name
    info = hub.file_info(name)
    has_right_size = path.is_file() and path.stat().st_size == info.size
    if has_right_size and info.lfs and recorded == info.lfs.sha256:
        return recorded
    if not checksum_matches(path, info):
        may_replace = recorded or name.endswith(".bin")
        if path.exists() and not may_replace:
            kind, what_it_is = dataset.identify(dataset.read_head(path))
            is_other = f" ({what_it_is.partition(';')[0]})" if kind else ""
            raise cli.ToolError(
                f"{path}: differs from the file on the hub and was not downloaded by this "
                f"program{is_other}; move it away"
            )
        hub.download(name)
    if name.endswith(".bin"):
        dataset.count_shard_tokens(path)  # raises ToolError if the header is wrong
    return info.lfs.sha256 if info.lfs else dataset.file_sha256(path)


def read_manifest(variant: str) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Read the entries of a data set and of its tokenizer from data/manifest.json.

    Returns (entry of the data set, entry of its tokenizer, number of its validation shards, number
    of its training shards). Raises ToolError if the manifest is missing or damaged, or does not
    list the data set.
    """
    path = DATA / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        known = [entry["name"].removeprefix(DATA_SET_PREFIX) for entry in manifest["datasets"]]
        if variant not in known:
            raise cli.ToolError(
                f"--variant {variant}: there is no such data set; {path} lists {', '.join(known)}"
            )
        entry = manifest["datasets"][known.index(variant)]
        tokenizers = {tokenizer["name"]: tokenizer for tokenizer in manifest["tokenizers"]}
        tokenizer = tokenizers[entry["tokenizer_name"]]
        num_val = int(entry["stats"]["files_val"])
        num_train = int(entry["stats"]["files_train"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what_it_is = dataset.identify(dataset.read_head(path))[1] if path.is_file() else ""
        fault = what_it_is.partition(";")[0] or f"is missing or damaged ({error!r})"
        raise cli.ToolError(f"{path}: {fault}; run without --skip-manifest") from None
    return entry, tokenizer, num_val, num_train


def list_wanted_files(variant: str, train_shards: int | None, hub: Hub) -> tuple[list[str], int]:
    """Return (the files of a data set to download, how many of them precede the training shards).

    The files are in the order in which training needs them, the tokenizer first. Some data sets
    have fineweb_val_bytes_*.bin: the number of bytes of each validation token in the original text.
    train_shards=None means 80 training shards, or all if there are fewer. Raises ToolError if the
    manifest is not usable, or the data set does not have so many shards.
    """
    entry, tokenizer, num_val, num_train = read_manifest(variant)
    names = [tokenizer[key] for key in ("model_path", "vocab_path", "path") if tokenizer.get(key)]
    wanted = min(DEFAULT_TRAIN_SHARDS, num_train) if train_shards is None else train_shards
    if not 0 <= wanted <= num_train:
        raise cli.ToolError(
            f"--train-shards {wanted}: {variant} has {num_train} training shards; "
            f"give a number from 0 to {num_train}"
        )
    folder = f"datasets/{DATA_SET_PREFIX}{variant}"
    splits = {"val": num_val, "train": wanted}
    if entry.get("val_bytes_glob") or f"{folder}/fineweb_val_bytes_000000.bin" in hub.files:
        splits = {"val": num_val, "val_bytes": num_val, "train": wanted}
    for split, count in splits.items():
        names += [f"{folder}/fineweb_{split}_{i:06d}.bin" for i in range(count)]
    for name in names:
        if not re.fullmatch(ALLOWED_NAMES, str(name)):
            raise cli.ToolError(
                f"{DATA}/manifest.json: {variant} contains {name!r}, "
                "which is neither a shard nor a tokenizer; check MATCHED_FINEWEB_REPO_ID"
            )
    return names, len(names) - wanted


def download(options: argparse.Namespace, folder: Path) -> None:
    """Download the files of a data set that are missing or damaged.

    During the download the folder contains .producing, so that training can start before the end.
    Raises ToolError if a file cannot be downloaded.
    """
    hub = Hub(options.retries, folder.name)
    if not options.skip_manifest:
        hub.download("manifest.json")
    names, before_training = list_wanted_files(options.variant, options.train_shards, hub)
    if options.with_docs:
        names += DOCUMENT_FILES
    infos = [
        hub.file_info(name) for name in names
    ]  # a missing file is an error before any download
    recorded = dataset.find_recorded_tokenizer(folder)
    tokenizer_lfs = infos[0].lfs
    if recorded and tokenizer_lfs and recorded[0] != tokenizer_lfs.sha256:
        raise cli.ToolError(
            f"{folder}: was made with another tokenizer than the repository has now; "
            "move the folder away to download all of it again, "
            "or set MATCHED_FINEWEB_REPO_ID to another repository"
        )
    checksums = {}
    for path, digest in read_checksums(folder).items():
        # If the folder has moved to another disk, its path to the tokenizer is wrong: drop it.
        is_lost = path[:2] == ".." and not (folder / path).exists()
        if not is_lost:
            checksums[path] = digest
    paths = [dataset.relative_path(folder, DATA / name) for name in names]
    pool = ThreadPoolExecutor(options.jobs)
    with dataset.ProducingFile(folder) as producing:
        jobs = [
            pool.submit(ensure_file, hub, name, checksums.get(path))
            for name, path in zip(names, paths, strict=True)
        ]
        try:
            # Results are recorded in order, although a later file may be complete earlier.
            for number, job in enumerate(jobs):
                while not wait([job], timeout=2.0).done:
                    producing.update()
                checksums[paths[number]] = job.result()
                write_checksums(folder, checksums)
                if number == 0:
                    dataset.record_tokenizer(folder, DATA / names[0])
                producing.update(val_complete=number + 1 >= before_training)
                print(f"{number + 1} of {len(jobs)} files: {names[number]}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    vocab_size = re.search(r"\d+|$", options.variant)[0]  # of names like sp8192_... and byte260
    print(f"{folder}: the download is complete")
    print(dataset.training_commands(folder, DATA / names[0], vocab_size))


def verify(folder: Path) -> None:
    """Compare the files on disk with the checksums of the download.

    Raises ToolError that lists missing and damaged files. The next download replaces them.
    """
    checksums = read_checksums(folder)
    if not checksums:
        raise cli.ToolError(
            f"{folder}: there are no checksums of a download ({CHECKSUM_FILE}); "
            "run without --verify"
        )
    wrong = [name for name in checksums if dataset.file_sha256(folder / name) != checksums[name]]
    # A checksum that no file has makes the next download fetch these files again.
    write_checksums(folder, {**checksums, **dict.fromkeys(wrong, "0" * 64)})
    not_recorded = {path.name for path in folder.glob("fineweb_*.bin")} - set(checksums)
    wrong += sorted(not_recorded)
    if (folder / ".producing").exists():
        wrong.append(".producing (the download is incomplete)")
    if wrong:
        raise cli.ToolError(
            f"{folder}: these files are missing or damaged: {', '.join(wrong)}; "
            "run without --verify to download them again"
        )
    print(f"{folder}: all {len(checksums)} files match their checksums")


def main() -> None:
    parser = cli.Parser(description=__doc__)
    add, number = parser.add_argument, cli.number(int, 0)
    text = "number of training shards (the same as --train-shards)"
    add("number", nargs="?", type=number, metavar="TRAIN_SHARDS", help=text)
    text = "number of training shards, 200 MB each (default: 80, or all if there are fewer)"
    add("--train-shards", type=number, metavar="N", help=text)
    text = "the data set fineweb10B_VARIANT: sp1024, sp8192, byte260, ... (default: sp1024)"
    add("--variant", default="sp1024", help=text)
    text = f"also download {' and '.join(DOCUMENT_FILES)}, about 48 GB"
    add("--with-docs", action="store_true", help=text)
    text = "use data/manifest.json as it is, without downloading it"
    add("--skip-manifest", action="store_true", help=text)
    text = "download nothing; compare the files on disk with their checksums"
    add("--verify", action="store_true", help=text)
    text = "parallel downloads (default: 8)"
    add("--jobs", type=cli.number(int, 1), default=8, metavar="N", help=text)
    text = "retries per file after an error (default: 6)"
    add("--retries", type=number, default=6, metavar="N", help=text)
    options = parser.parse_args()
    numbers = [n for n in (options.number, options.train_shards) if n is not None]
    if len(numbers) > 1 or numbers and options.verify:
        parser.error(
            f"{numbers[0]}: the number of training shards must be given only once, "
            "and not with --verify"
        )
    options.train_shards = numbers[0] if numbers else None
    options.variant = options.variant.removeprefix(DATA_SET_PREFIX)
    if not re.fullmatch(r"\w[\w.-]*", options.variant):
        parser.error(
            f"--variant {options.variant}: must be part of the name of a data set, such as sp1024"
        )
    folder = DATA / "datasets" / (DATA_SET_PREFIX + options.variant)
    if (folder / dataset.EXPORT_FILE).exists():
        raise cli.ToolError(
            f"{folder}: this data set was made by tokenize_docs.py; "
            "move it away before a download, or check it with audit.py"
        )
    if not options.verify:
        import_module("huggingface_hub")  # if it is missing, this is said before a folder is made
    with dataset.locked(folder):
        if options.verify:
            verify(folder)
        else:
            download(options, folder)


if __name__ == "__main__":
    dataset.run_tool(main, "run the same command again to continue where it stopped")
