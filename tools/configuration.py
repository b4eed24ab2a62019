"""What a configuration is, in what runs differ, which runs are seeds of one.

What a run is made of is known by checksums (made_of) where its events tell them.
"""

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import arm_of, headline
from runs import Run

# Names of the run, its files and its processes: no part of a configuration.
NOT_CONFIGURATION = re.compile(
    r"run_id|seed|resume|device|rank|local_rank|distributed|is_main_process|warning|logfile|"
    r".*(_|log)(dir|path|file|files)"
)
MADE_OF = {  # conditions that are checksums: the names of what they are made of
    "tokenizer": "tokenizer",
    "validation_shards": r"fineweb_val_\d+\.bin",
    "training_shards": r"fineweb_train_\d+\.bin",
}
# Files that decide what is trained on: compared by their names, wherever they lie.
DATA_FILES = {"data_path", "data_dir", "datasets_dir", "tokenizer_path"}
# Shown where they differ, but no reason why results would: periods of lines, surroundings.
HARMLESS = re.compile(
    r"(train|val|checkpoint|trace|training)_(.*_)?(every|keep)|trace_steps|checkpoint_.*_steps|"
    r"python|cpus|platform|data_dir|val_progress_log_every"
)
# Not settings: they have no value that one could set.
FACTS = {
    "code", "code_bytes", "model_params", "world_size", "effective_grad_accum_steps", "dataset",
    "train_shards", "val_split_tokens", "partial_val", "python", "torch", "cuda", "device", "gpus",
    "cpus", *MADE_OF,
}  # fmt: skip


@dataclass
class Difference:
    """A condition that is not equal in all runs: each value with the numbers (from 0) of its runs,
    and the runs whose logs do not tell it."""

    name: str
    values: list[tuple[Any, list[int]]]
    unknown: list[int]
    harmless: bool


def conditions(run: Run) -> dict[str, Any]:
    """Settings, code, versions, devices, data; not the seed."""
    values: dict[str, Any] = {}
    for name, value in run.config.items():
        if name in DATA_FILES and isinstance(value, str):
            values[name] = Path(value).name
        elif name in DATA_FILES or not NOT_CONFIGURATION.fullmatch(name):
            values[name] = value
    if run.grad_accum_steps is not None:
        values.pop("grad_accum_steps", None)
    script = run.made_of.get("script") or run.source_sha256
    values |= {
        "code": script and script[:12],
        "code_bytes": run.sizes.code or run.source_bytes,
        "model_params": run.model_params,
        "world_size": run.world_size,
        "effective_grad_accum_steps": run.grad_accum_steps,
        "dataset": run.dataset,
        "train_shards": run.train_shards,
        "val_split_tokens": run.val_tokens,
        "partial_val": run.partial_val,
        **run.versions,
        **run.hardware,
        **checksums(run),
    }
    return {name: value for name, value in values.items() if value is not None}


def checksums(run: Run) -> dict[str, str]:
    """Of the tokenizer and of each split: eight digits that stand for all of its shards."""
    result = {}
    for name, pattern in MADE_OF.items():
        parts = {k: v for k, v in run.made_of.items() if re.fullmatch(pattern, k)}
        if parts:
            text = json.dumps(parts, sort_keys=True)
            shards = f"{len(parts)} shards, " if len(parts) > 1 else ""
            result[name] = shards + hashlib.sha256(text.encode()).hexdigest()[:8]
    return result


def differences(runs: Sequence[Run]) -> tuple[list[Difference], int]:
    """Conditions that differ, and how many are equal in all runs that tell them."""
    known = [conditions(run) for run in runs]
    # Where all have a hash of the code, the number of its bytes says nothing more.
    hashed = all("code" in setup for setup in known)
    result, equal = [], 0
    for name in dict.fromkeys(name for setup in known for name in setup):
        values: dict[Any, list[int]] = {}
        for index, setup in enumerate(known):
            if name in setup:
                values.setdefault(setup[name], []).append(index)
        if len(values) > 1:
            unknown = [index for index, setup in enumerate(known) if name not in setup]
            harmless = HARMLESS.fullmatch(name) is not None or hashed and name == "code_bytes"
            result.append(Difference(name, list(values.items()), unknown, harmless))
        else:
            equal += 1
    return sorted(result, key=lambda difference: difference.harmless), equal


def telling(runs: Sequence[Run], allow: Collection[str] = ()) -> list[str]:
    """Names of the conditions that differ and may change a result; not those that are allowed."""
    allowed = {name.lower() for name in allow}
    names = [d.name for d in differences(runs)[0] if not d.harmless]
    return [name for name in names if name.lower() not in allowed]


def seed_groups(runs: Sequence[Run], allow: Collection[str] = ()) -> list[list[int]]:
    """Numbers of the runs that differ in nothing but seed, harmless settings and surroundings."""
    names = telling(runs, allow)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, run in enumerate(runs):
        known = conditions(run)
        groups.setdefault(tuple(known.get(name) for name in names), []).append(index)
    parts: dict[tuple[Any, ...], list[int]] = {}
    for setup, group in groups.items():
        # With a seed twice it is several: logs do not tell all, such as how slow a disk was.
        twice = len({runs[index].known_seed for index in group}) < len(group)
        for index in group:
            parts.setdefault((setup, twice and arm_of(runs[index])), []).append(index)
    return sorted(parts.values())


def same_data(runs: Sequence[Run]) -> tuple[int, dict[str, list[int]]] | None:
    """The last step of which all runs that have one logged a data_crc, and the runs of each crc
    there."""
    known = {index: crcs for index, run in enumerate(runs) if (crcs := run.crc_at())}
    common = set.intersection(*map(set, known.values())) if len(known) > 1 else set()
    if not common:
        return None
    step, groups = max(common), {}
    for index, crcs in known.items():
        groups.setdefault(crcs[step], []).append(index)
    return step, groups


def trace(run: Run) -> tuple[Any, ...] | None:
    """What two logs of one run have in common to the digit, and two runs do not; None: too little
    is known."""
    if run.train_time_ms is None or not run.last_step:
        return None
    result = headline(run)
    scores = result and [x and round(x, 8) for x in (result.val_bpb, result.val_loss)]
    return (run.seed, *times(run), scores and tuple(scores))


def times(run: Run) -> tuple[Any, ...]:
    """The times of a run: equal to the millisecond in no two runs, whatever their seeds say."""
    steps = tuple(ms and round(ms) for ms in (step.train_time_ms for step in run.steps))
    return run.last_step, round(run.train_time_ms or 0), steps


def written(name: str, value: Any) -> str:
    """A setting as it is set in front of a command; what is none as `name value`."""
    if value is None:
        return f"{name} not known"
    if name in FACTS or "_io_" in name:
        return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
    value = int(value) if isinstance(value, bool) else value
    return f"{name.upper()}={value}"


def label(run: Run, names: Sequence[str]) -> str:
    known = conditions(run)
    return " ".join(written(name, known.get(name)) for name in names)
