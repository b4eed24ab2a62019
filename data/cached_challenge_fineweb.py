"""Download the published FineWeb tokens: manifest, tokenizer, shards, and the documents on request.

    python3 data/cached_challenge_fineweb.py                      80 training shards, 16 GB
    python3 data/cached_challenge_fineweb.py --train-shards 1     the smallest set, 0.3 GB
    python3 data/cached_challenge_fineweb.py --verify             check what is on disk

A file gets its final name after its checksum was compared with the hub's. After Ctrl-C, a signal or
a crash the same command continues: complete files stay, and so does what has come of the others, as
.NAME.SET.partial beside their places. Training may start during the download: see data/README.md.
data/ and data/datasets may be links to another disk.

It writes only shards under data/datasets, tokenizers in data/tokenizers, and manifest.json and the
documents in data/. It never replaces a tokenizer or documents that it did not fetch.
MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX name another repository and a folder
in it, HF_ENDPOINT another hub, HF_TOKEN a token for a private or gated repository. Files come over
HTTP: hf-xet, which is installed with huggingface_hub, cannot continue a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # not there with python3 -P
import dataset
from dataset import DATA, cli

# isort: split
from huggingface_hub import HfApi, hf_hub_url  # after cli, which says what to install
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, logging

PREFIX, SUMS = "fineweb10B_", "sha256sums"
DOCS = ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
# The files of a data set. No file of another name is written, whatever a manifest says.
FILE_NAMES = (
    r"datasets/\w[\w.-]*/fineweb_(train|val|val_bytes)_\d{6}\.bin"
    r"|tokenizers/\w[\w.-]*\.(model|vocab|json)"
)


class Hub:
    """The files of the repository, at the commit that it had when we asked, for one data set."""

    def __init__(self, retries: int, data_set: str) -> None:
        self.repo = os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf")
        self.root = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/")
        self.retries, self.data_set, api = retries, data_set, HfApi()
        try:
            commit = api.dataset_info(self.repo, timeout=30).sha
            where = {"repo_type": "dataset", "revision": commit}
            entries = list(
                api.list_repo_tree(self.repo, self.root or None, recursive=True, **where)
            )
        except Exception as error:  # the HTTP library's errors have other names in each version
            fault = f"{api.endpoint}, {self.repo}: {words_of(error)[0]}"
            remedy = "check the network, HF_ENDPOINT and MATCHED_FINEWEB_REPO_ID (owner/name)"
            raise cli.ToolError(f"{fault}; {remedy}") from None
        self.where = {**where, "endpoint": api.endpoint}
        self.files = {os.path.relpath(e.path, self.root or "."): e for e in entries}

    def info(self, name: str) -> Any:
        """A file's size and checksum. Raises ToolError if the hub does not have it."""
        if name not in self.files:
            raise cli.ToolError(f"{self.repo}: {name} is not on the hub; ask for other files")
        return self.files[name]

    def fetch(self, name: str) -> None:
        """Downloads a file, or the rest of it, compares its checksum and gives it its place."""
        path, info, fault = DATA / name, self.info(name), ""
        path.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk as its place, and only of the process that has locked this data set.
        partial = path.with_name(f".{path.name}.{self.data_set}.partial")
        for attempt in range(self.retries + 1):
            if attempt:
                print(f"{name}: {fault}; trying again", file=sys.stderr)
                time.sleep(min(60, 2**attempt))
            try:
                self.receive(name, partial)
            except Exception as error:
                fault, status = words_of(error)
                # Another try does not change these answers of the hub, or a full disk (errno).
                if status in (401, 403, 404) or getattr(error, "errno", None):
                    break
                continue
            if is_right(partial, info):
                os.replace(partial, path)
                return
            os.unlink(partial)
            fault = "what came has a wrong checksum"
        raise cli.ToolError(f"{name}: {fault}; run again")

    def receive(self, name: str, partial: Path) -> None:
        """Appends to the file what is missing."""
        url = hf_hub_url(self.repo, os.path.join(self.root, name), **self.where)
        size, headers = self.info(name).size, build_hf_headers()
        with open(partial, "ab") as file:
            if file.tell() > size:
                file.seek(0)
                file.truncate()
            http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size)


def words_of(error: Exception) -> tuple[str, int]:
    """(an error in one line, the hub's status if it is an answer, else 0)"""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    words = cli.one_line(error)[:200]
    if status in (401, 403):
        words += "; if it is private or gated, set HF_TOKEN to a token that may read it"
    return words, status


def is_right(path: Path, info: Any) -> bool:
    """Has the file the size and the checksum that the hub gives?"""
    if not path.is_file() or path.stat().st_size != info.size:
        return False
    if info.lfs:
        return dataset.sha256_of(path) == info.lfs.sha256
    blob = b"blob %d\0" % info.size + path.read_bytes()  # a small file, by git's own checksum
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == info.blob_id


def read_sums(folder: Path) -> dict[str, str]:
    """{name: checksum} of what was fetched for a data set, from a file for `sha256sum -c`."""
    path = folder / SUMS
    text = os.fsdecode(path.read_bytes()) if path.is_file() else ""
    # What is no such line is left out: the next download compares that file with the hub's sum.
    lines = [line for line in text.splitlines() if re.fullmatch(r"[0-9a-f]{64}  \S.*", line)]
    return {line[66:]: line[:64] for line in lines}


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    lines = [os.fsencode(f"{digest}  {name}\n") for name, digest in sums.items()]
    dataset.write_atomic(folder / SUMS, *lines)


def complete(hub: Hub, name: str, recorded: str | None) -> str:
    """Brings a file to its place unless the right one is there; returns its checksum."""
    path, info = DATA / name, hub.info(name)
    whole = path.is_file() and path.stat().st_size == info.size
    if whole and info.lfs and recorded == info.lfs.sha256:
        return recorded
    if not is_right(path, info):
        if path.exists() and not (recorded or name.endswith(".bin")):
            raise cli.ToolError(f"{path}: another file, which was not fetched here; move it away")
        hub.fetch(name)
    if name.endswith(".bin"):
        dataset.shard_tokens(path)  # its header
    return info.lfs.sha256 if info.lfs else dataset.sha256_of(path)


def wanted_names(variant: str, train_shards: int | None, hub: Hub) -> tuple[list[str], int]:
    """The files to have, in the order in which training needs them, the tokenizer first, and how
    many come before the first training shard. fineweb_val_bytes_*.bin, which some sets have: the
    bytes of each validation token in the original text.
    """
    path, folder = DATA / "manifest.json", f"datasets/{PREFIX}{variant}"
    try:
        manifest = json.loads(path.read_bytes())
        known = [entry["name"].removeprefix(PREFIX) for entry in manifest["datasets"]]
        if variant not in known:
            raise cli.ToolError(f"--variant {variant}: {path} lists {', '.join(known)}")
        entry = manifest["datasets"][known.index(variant)]
        tokenizers = {tokenizer["name"]: tokenizer for tokenizer in manifest["tokenizers"]}
        made_by = tokenizers[entry["tokenizer_name"]]
        names = [made_by[key] for key in ("model_path", "vocab_path", "path") if made_by.get(key)]
        num_val, num_train = (int(entry["stats"][f"files_{split}"]) for split in ("val", "train"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"no usable manifest ({error!r}); omit --skip-manifest"
        raise cli.ToolError(f"{path}: {fault}") from None
    wanted = min(80, num_train) if train_shards is None else train_shards
    if not 0 <= wanted <= num_train:
        raise cli.ToolError(f"--train-shards {wanted}: {variant} has 0 to {num_train}")
    splits = {"val": num_val, "train": wanted}
    if entry.get("val_bytes_glob") or f"{folder}/fineweb_val_bytes_000000.bin" in hub.files:
        splits = {"val": num_val, "val_bytes": num_val, "train": wanted}
    for split, count in splits.items():
        names += [f"{folder}/fineweb_{split}_{i:06d}.bin" for i in range(count)]
    if foreign := [name for name in names if not re.fullmatch(FILE_NAMES, str(name))]:
        what = f"has {foreign[0]!r}, which is neither a shard nor a tokenizer"
        raise cli.ToolError(f"{path}: {variant} {what}")
    return names, len(names) - wanted


def download(options: argparse.Namespace, folder: Path) -> None:
    hub = Hub(options.retries, folder.name)
    if not options.skip_manifest:
        hub.fetch("manifest.json")
    names, before_training = wanted_names(options.variant, options.train_shards, hub)
    names += DOCS * options.with_docs
    infos = [hub.info(name) for name in names]  # before any is fetched
    recorded = dataset.recorded_tokenizer(folder)
    if recorded and infos[0].lfs and recorded[0] != infos[0].lfs.sha256:
        fault = "made with another tokenizer than the repository has now"
        remedy = "move it away to fetch all of it again, or name another repository"
        raise cli.ToolError(f"{folder}: {fault}: {remedy}")
    # Without tokenizers that are no longer there because the folder has moved to another disk.
    sums = {n: s for n, s in read_sums(folder).items() if n[:2] != ".." or (folder / n).exists()}
    pool = ThreadPoolExecutor(options.jobs)
    with dataset.Producing(folder) as producing:
        places = [dataset.path_from(folder, DATA / name) for name in names]
        arguments = zip(names, map(sums.get, places), strict=True)
        jobs = [pool.submit(complete, hub, *pair) for pair in arguments]
        try:
            for number, job in enumerate(jobs):  # in order; later ones may be done before
                while not wait([job], timeout=2.0).done:
                    producing.touch()
                sums[places[number]] = job.result()
                write_sums(folder, sums)
                if number == 0:
                    dataset.record_tokenizer(folder, DATA / names[0])
                producing.touch(val_complete=number + 1 >= before_training)
                print(f"{number + 1} of {len(jobs)} files: {names[number]}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    vocab_size = re.search(r"\d+|$", options.variant)[0]  # sp8192_..., byte260
    print(f"{folder}: complete\n{dataset.how_to_train(folder, DATA / names[0], vocab_size)}")


def verify(folder: Path) -> None:
    """Compares the files here with what was recorded. Raises ToolError for what is wrong."""
    if not (sums := read_sums(folder)):
        raise cli.ToolError(f"{folder}: no checksums of a download; run without --verify")
    wrong = [name for name in sums if dataset.sha256_of(folder / name) != sums[name]]
    write_sums(folder, {**sums, **dict.fromkeys(wrong, "0" * 64)})  # the next download fetches them
    wrong += sorted({path.name for path in folder.glob("fineweb_*.bin")} - set(sums))
    if (folder / ".producing").exists():
        wrong.append(".producing: more files were to come")
    if wrong:
        raise cli.ToolError(f"{folder}: missing or wrong: {', '.join(wrong)}; run without --verify")
    print(f"{folder}: all {len(sums)} files are right")


def main() -> None:
    parser = cli.Parser(description=__doc__)
    add, number = parser.add_argument, cli.number(int, 0)
    add("number", nargs="?", type=number, metavar="TRAIN_SHARDS", help="as --train-shards")
    shards = "training shards, 200 MB each (default: 80, or all there are)"
    add("--train-shards", type=number, metavar="N", help=shards)
    add("--variant", default="sp1024", help="sp1024, sp8192, byte260 ... (default: sp1024)")
    add("--with-docs", action="store_true", help=f"also {' and '.join(DOCS)}, about 48 GB")
    add("--skip-manifest", action="store_true", help="use data/manifest.json as it is")
    add("--verify", action="store_true", help="compare the files here with their checksums")
    add("--jobs", type=cli.number(int, 1), default=8, metavar="N", help="at once (default: 8)")
    add("--retries", type=number, default=6, metavar="N", help="after a fault (default: 6)")
    options = parser.parse_args()
    numbers = [n for n in (options.number, options.train_shards) if n is not None]
    if len(numbers) > 1 or numbers and options.verify:
        parser.error(f"{numbers[0]} shards: give one number, and none with --verify")
    options.train_shards = numbers[0] if numbers else None
    options.variant = options.variant.removeprefix(PREFIX)
    logging.set_verbosity_error()
    disable_progress_bars()
    folder = DATA / "datasets" / (PREFIX + options.variant)
    if (folder / "export.json").exists():
        raise cli.ToolError(f"{folder}: made by tokenize_docs.py; move it away, or use audit.py")
    with dataset.locked(folder):
        return verify(folder) if options.verify else download(options, folder)


if __name__ == "__main__":
    dataset.run_tool(main, "the same command continues where it stopped")
