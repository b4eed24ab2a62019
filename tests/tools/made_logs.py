"""Logs and records for the tests of tools/."""

import json
import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from runs import Logs, read_log

RULE = "=" * 100
TOKENS, BYTES = (
    62_021_632,
    151_080_362,
)  # predicted tokens and bytes of the challenge's validation split
HEADER = (
    "tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04 "
    "train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 "
    "max_wallclock_seconds:600.000"
)
LOGGED = {"script": "", "smi": "", "world": 8, "steps": 13_790, "ms": 43.5, "crc": 0}
LOGGED |= {"partial": "", "eval_ms": 2100, "artifact": 15_700_000, "factor": 1.0}


def bpb_of(nats: float, factor: float = 1.0) -> float:
    return nats / math.log(2) * TOKENS / (BYTES * factor)


def log_text(seed: int = 1, nats: float = 1.9, **changed: Any) -> str:
    """Return a log as the challenge's script writes it. `changed` may contain values of LOGGED, the
    bytes `code` and `total`, and settings for the header."""
    one = SimpleNamespace(**{name: changed.pop(name, value) for name, value in LOGGED.items()})
    code = changed.pop("code", len(one.script.encode()))
    total = changed.pop("total", one.artifact + code)
    words = dict(word.split(":") for word in HEADER.split()) | changed
    lines = [f"{one.script}\n{RULE}\nRunning Python 3.12.3 (main, x)"] if one.script else []
    lines += [f"Running PyTorch 2.9.1+cu128\n{one.smi}\n{RULE}"] if one.smi else []
    lines += [
        "train_loader:dataset:fineweb10B_sp1024 train_shards:80",
        f"val_loader:shards pattern=./data/fineweb_val_*.bin tokens:{TOKENS}{one.partial}",
        f"model_params:17059912\nworld_size:{one.world} grad_accum_steps:1",
        " ".join(f"{name}:{value}" for name, value in words.items()),
        f"seed:{seed}",
    ]
    for k in (1, 10, 1000, 10_000, one.steps):
        took, before = f"train_time:{k * one.ms:.0f}ms", nats - 0.01 + 9 / k * (k < one.steps)
        crc = f" data_crc:{one.crc + k:08x}" if one.crc else ""
        lines += [
            f"step:{k}/20000 train_loss:{nats + 9 / k:.4f} {took} step_avg:{one.ms:.2f}ms{crc}",
            f"step:{k}/20000 val_loss:{before:.4f} val_bpb:{bpb_of(before, one.factor):.4f} {took}",
        ]
    bpb = bpb_of(nats, one.factor)
    lines += [
        f"stopping_early: wallclock_cap {took} step:{one.steps}/20000",
        f"Serialized model: 67000000 bytes\nCode size: {code} bytes",
        f"Serialized model int8+zlib: {one.artifact} bytes",
        f"Total submission size int8+zlib: {total} bytes",
        f"final_int8_zlib_roundtrip val_loss:{nats:.4f} val_bpb:{bpb:.4f} "
        f"eval_time:{one.eval_ms}ms{one.partial}",
        f"final_int8_zlib_roundtrip_exact val_loss:{nats:.8f} val_bpb:{bpb:.8f}{one.partial}\n",
    ]
    return "\n".join(lines)


def event_lines(seed: int = 1, status: str = "finished", **changed: Any) -> str:
    """Return the events of a run of our trainer. `changed` may contain `score` (in bits per byte;
    None: no score), `made_of` (entries of the fingerprint), `ms` (milliseconds of a step), `given`
    (settings that were given) and settings."""
    ms, given = changed.pop("ms", 40), {"SEED": str(seed)} | changed.pop("given", {})
    score, made_of = changed.pop("score", 1.2), {"script": "ab" * 32, "tokenizer": "cd" * 32}
    made_of |= {"fineweb_val_000000.bin": "5000 tokens, 0000beef"} | changed.pop("made_of", {})
    config = {"seed": seed, "matrix_lr": 0.04, "train_prefetch": True, "vocab_size": 1024} | changed
    config["grad_accum_steps"] = 0
    facts = {"model_params": 1000, "dataset": "mine", "train_shards": 3, "val_tokens": 1984}
    facts |= {"world_size": 2, "micro_steps": 4}
    timed = {"val_loss": 2.1, "train_time_ms": 4 * ms}
    events = [
        ("run", facts | {"run_id": "r", "argv": ["train_gpt.py"], "settings": given}),
        ("config", config),
        ("made_of", made_of),
        ("hardware", {"device": "x86_64", "cpus": 2, "torch": "2.13.0"}),
        ("validation", timed | {"step": 0, "val_bpb": 3.0, "train_time_ms": 0}),
        ("step", {"step": 1, "train_loss": 5.5, "train_time_ms": 40, "data_crc": "00aa0001"}),
        ("step", {"step": 4, "train_loss": 4.5, "train_time_ms": 160, "data_crc": "00aa0004"}),
        ("validation", timed | {"step": 4, "val_bpb": 1.3}),
        ("input", {"total_ms": 4, "timing_train_loop_ms": 4 * ms, "timing_val_total_ms": 70}),
        ("artifact", {"artifact_bytes": 3000, "code_bytes": 900}),
    ]
    if score is not None:
        events += [("score", {"val_loss": 2.00000000001, "val_bpb": score, "eval_time_ms": 30})]
    events += [("end", {"status": status, "exit_code": 0, "error": ""})]
    lines = [{"event": name, "time": 1.5} | values for name, values in events]
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_text(folder: Path, text: str | bytes, name: str = "train.log") -> Logs:
    """Write a log with this text and read it."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return read_log(folder / name)


# --- A record of three runs, and its folder ---

SCRIPT = (
    '"""A trainer."""\nimport os\nimport torch\n\n\ndef main():\n    print(torch, os)\n\n\nmain()\n'
)
SMI = "| NVIDIA-SMI 570.1   Driver Version: 570.1   CUDA Version: 12.8 |\n" + "\n".join(
    f"|   {n}  NVIDIA H100 80GB HBM3    On  |   00000000:19:00.0 Off | 0 |" for n in range(8)
)
NAME = "2026-04-01_WiderMLP"
ARTIFACT = 15_700_000


def record_log(**changed: Any) -> str:
    """Return a log of 8 H100s with its script and machine. Each seed has other times and another
    size; the size of seed 1 is the largest."""
    place = (changed.get("seed", 1) - 1) % 97
    artifact = changed.pop("artifact", ARTIFACT) - 100 * place
    own = {"script": SCRIPT, "smi": SMI, "ms": 43.5 + place * 1e-4, "artifact": artifact}
    return log_text(**own | changed)


# The parts of a record. `results`: {seed: nats}; `changed`: other values of submission.json (None:
# left out); `first`: (old, new) words in the log of seed 1; `each`: a change of every log; `files`:
# further files; `moved`: (old, new) name of a file.
RECORD_PARTS = {
    "results": {1: 1.9000, 42: 1.9010, 1337: 1.9005}, "script": SCRIPT, "changed": {},
    "readme": "# Wider MLP\n" + "What was done, and how it was run. " * 5,
    "first": ("", ""), "each": str, "files": {}, "moved": (),
}  # fmt: skip


def make_record(folder: Path, **log: Any) -> Path:
    """Write a correct record, except for the given changes."""
    one = SimpleNamespace(**{name: log.pop(name, value) for name, value in RECORD_PARTS.items()})
    submitted = make_submission(one.results, one.script, log) | one.changed
    given = {name: value for name, value in submitted.items() if value is not None}
    made = {"train_gpt.py": one.script, "README.md": one.readme}
    made["submission.json"] = json.dumps(given)
    for seed, nats in one.results.items():
        text = record_log(seed=seed, nats=nats, **{"script": one.script, **log})
        made[f"train_seed{seed}.log"] = one.each(text)
    old, new = one.first
    assert not old or old in made["train_seed1.log"]
    made |= {"train_seed1.log": made["train_seed1.log"].replace(old, new)} if old else {}
    for name, text in (made | one.files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if one.moved:
        (folder / one.moved[0]).rename(folder / one.moved[1])
    return folder


def make_submission(results: dict[int, float], script: str, log: dict[str, Any]) -> dict[str, Any]:
    loss, factor, code = fmean(results.values()), log.get("factor", 1.0), len(script.encode())
    each = {str(seed): {"val_loss": n, "val_bpb": bpb_of(n, factor)} for seed, n in results.items()}
    return {
        "name": "Wider MLP", "author": "Ada", "github_id": "ada", "date": "2026-04-01",
        "track": "10min_16mb", "seeds": list(results), "seed_results": each,
        "val_loss": round(loss, 8), "val_bpb": round(bpb_of(loss, factor), 8),
        "bytes_total": log.get("artifact", ARTIFACT) + code, "bytes_code": code,
    }  # fmt: skip
