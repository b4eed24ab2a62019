"""Is this machine ready for a run? The tool checks settings, data, tokenizer, devices and disk, and
runs 20 real steps with overlap on and 20 with overlap off. It takes about a minute.

    python3 logs/preflight.py -- python3 train_gpt.py
    python3 logs/preflight.py -- torchrun --standalone --nproc_per_node=8 train_gpt.py

Give it the command and the variables of the real run. Exit code: 0 ready, 2 not ready.
"""

import argparse
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cli
import launch
from launch import ToolError, Trainer, clock
from runs import Run, read_logs

# Each of the first ten steps is logged, and waits for the device; the rest run on.
STEPS, TIMED_FROM = 20, 10
OVERLAP_SWITCHES = ("TRAIN_PREFETCH", "TRAIN_COPY_STREAM", "VAL_PREFETCH", "VAL_COPY_STREAM")
# Of train and val loss on CUDA, whose sums are not repeatable: nats at the first step, and later,
# when differences have grown. A batch overwritten in flight has been seen to cost 0.4 nats at
# step 2.
CUDA_TOLERANCE = (1e-3, 2e-2)
CLEARLY = 3.0  # times as long: what ten steps can tell on a machine that does other work, too
SPARE_BYTES = 1 << 30  # of disk
CAP_BYTES = 16_000_000
GET_DATA = "start this where data/ is, with the shards fetched (see README), or set DATA_PATH"


class Checks:
    """What was looked at, printed as it is found."""

    def __init__(self) -> None:
        self.faults = 0

    def say(self, level: str, name: str, message: str) -> None:
        self.faults += level == "FAULT"
        print(f"{level:<6}{name:<10}{message}", flush=True)

    ok = functools.partialmethod(say, "ok")
    note = functools.partialmethod(say, "note")
    fault = functools.partialmethod(say, "FAULT")


Settings = Mapping[str, Any]  # as the trainer resolves them


# --- before anything runs ---


def shard_tokens(path: Path) -> int:
    """From a shard's header and size. Raises ValueError with what is wrong."""
    with open(path, "rb") as file:
        head, size = file.read(1024), os.fstat(file.fileno()).st_size
    magic, version, count = struct.unpack("<3i", head[:12]) if len(head) == 1024 else (0, 0, 0)
    if (magic, version) != (20240520, 1):
        raise ValueError(f"{path.name}: {size:,} bytes, no shard of version 1: fetch it again")
    if size != 1024 + 2 * count:
        promised = f"its header promises {1024 + 2 * count:,}"
        raise ValueError(f"{path.name}: {size:,} bytes, but {promised}: fetch it again")
    return count


def check_data(checks: Checks, trainer: Trainer, settings: Settings) -> dict[str, int]:
    """Shards and tokenizer; returns the tokens of each split."""
    folder, tokens = trainer.folder / str(settings["data_path"]), {"train": 0, "val": 0}
    for split in tokens:
        paths, faults = sorted(folder.glob(f"fineweb_{split}_*.bin")), []
        for path in paths:
            try:
                tokens[split] += shard_tokens(path)
            except (OSError, ValueError) as error:
                faults.append(str(error))
        if faults:
            more = f" and {len(faults) - 3} more" * (len(faults) > 3)
            checks.fault("data", f"{folder}: {'; '.join(faults[:3])}{more}")
        elif paths:
            count = f"{len(paths)} {split} shard{'s' * (len(paths) != 1)}"
            checks.ok("data", f"{count}, {tokens[split]:,} tokens in {folder}")
        elif split == "train" and (folder / ".producing").exists():
            checks.note("data", f"{folder}: no fineweb_train_*.bin so far: they are being made")
        else:
            checks.fault("data", f"{folder}: no fineweb_{split}_*.bin: {GET_DATA}")
    path = trainer.folder / str(settings["tokenizer_path"])
    data = path.read_bytes() if path.is_file() else b""
    if data:
        digest = hashlib.sha256(data).hexdigest()[:12]
        checks.ok("tokenizer", f"{path}, {len(data):,} bytes, sha256 {digest}")
    else:
        wrong = "is empty" if path.is_file() else "no such file"
        checks.fault("tokenizer", f"{path}: {wrong}: set TOKENIZER_PATH to the data set's")
    return tokens


def processes(command: Sequence[str], devices: int) -> int:
    """That a command starts on this machine: one, or torchrun's --nproc_per_node."""
    given = re.search(r"(?:^| )--nproc[-_]per[-_]node[= ](\w+)", " ".join(command))
    if not given:
        return 1
    return int(given[1]) if given[1].isdigit() else devices or 1  # gpu, auto


def check_devices(checks: Checks, trainer: Trainer, settings: Settings) -> None:
    """NVIDIA devices against what the command starts."""
    gpus = launch.gpus()
    count = processes(trainer.given, len(gpus))
    started = f"{count} process{'es' * (count != 1)}"
    remedy = f"set --nproc_per_node={len(gpus)}"
    if not gpus:
        cores = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        checks.note("devices", f"no NVIDIA device: {started} on the CPU, {cores}")
        return
    name = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
    driver = gpus[0]["driver"]
    checks.ok("devices", f"{len(gpus)} x {name}, driver {driver}, {count} of them used")
    if count < len(gpus) and "CUDA_VISIBLE_DEVICES" not in trainer.environ:
        checks.note("devices", f"the command uses {count} of {len(gpus)}: {remedy}")
    elif count > len(gpus):
        checks.fault("devices", f"{started} for {len(gpus)} devices: {remedy}")


# --- two short runs ---


def short_settings(settings: Settings) -> dict[str, str]:
    """20 steps that a run of any length begins with, on a part of the validation split; nothing
    else is written."""
    batch = int(settings["val_batch_size"])
    val_tokens = min(4 * batch + 1, int(settings["val_tokens"]) or 4 * batch + 1)
    return {
        "ITERATIONS": str(STEPS),
        "MAX_WALLCLOCK_SECONDS": "0",
        "WARMDOWN_ITERS": "0",
        "WARMUP_STEPS": str(int(min(3, settings["warmup_steps"]))),
        "TRAIN_LOG_EVERY": "10",
        "VAL_LOSS_EVERY": "0",
        "VAL_TOKENS": str(val_tokens),
    }


def short_runs(checks: Checks, trainer: Trainer, settings: Settings, out: Path) -> dict[str, Run]:
    """The runs with overlap `on` and `off` that finished; how others ended is said."""
    if trainer.environ.get("RESUME"):
        reason = "is not tried here: the run itself says whether the checkpoint fits"
        checks.note("resume", f"RESUME={trainer.environ['RESUME']} {reason}")
    for name in ("CHECKPOINT_EVERY", "RESUME", "TRACE_STEPS", "TRAINING_TIMING_BREAKDOWN"):
        trainer.environ.pop(name, None)  # of the real run, not of this trial
    results: dict[str, Run] = {}
    for name in ("on", "off"):
        work, started = launch.fresh_folder(out / name, trainer), time.monotonic()
        run_id = f"preflight_overlap_{name}"
        switches = {switch: str(int(name == "on")) for switch in OVERLAP_SWITCHES}
        print(f"...   run       {STEPS} steps with overlap {name}", flush=True)
        variables = {**short_settings(settings), **switches, "RUN_ID": run_id}
        code = launch.run_child(trainer, work, variables)
        runs = read_logs([work / "logs"]).runs
        for model in work.glob("final_model.*"):
            model.unlink()
        lines = launch.indented(launch.last_lines(work / "output.txt", 40 if code == 2 else 12))
        if code == 2:
            checks.fault("settings", f"the trainer refuses them:\n{lines}")
            return results
        if code or not runs or runs[-1].status != "finished" or runs[-1].last_step < STEPS:
            checks.fault("run", f"overlap {name}: ended with exit code {code}, see {work}\n{lines}")
            return results
        results[name] = runs[-1]
        seconds = f"{time.monotonic() - started:.0f} s, compilation and all"
        checks.ok("run", f"overlap {name}: finished in {seconds}")
    return results


def on_cpu(run: Run) -> bool:
    return run.hardware.get("device") in (platform.machine(), "cpu", "CPU")


def check_data_used(checks: Checks, on: Run, off: Run) -> None:
    """Overlap may change when a batch is read, never which."""
    first, second = on.crc_at(), off.crc_at()
    common = sorted(first.keys() & second.keys())
    wrong = next((step for step in common if first[step] != second[step]), None)
    if wrong is not None:
        crcs = f"data_crc {first[wrong]} and {second[wrong]} at step {wrong}"
        remedy = "run with TRAIN_PREFETCH=0, and report it"
        checks.fault("data", f"overlap on and off trained on different batches: {crcs}: {remedy}")
    elif not common:
        checks.fault("data", "the logs tell no data_crc: name this project's train_gpt.py")
    else:
        crcs = f"data_crc {first[common[-1]]} at step {common[-1]}"
        checks.ok("overlap", f"the same batches with overlap on and off: {crcs}")


def check_losses(checks: Checks, on: Run, off: Run) -> None:
    """Losses as equal as the device repeats."""
    early, late = (0.0, 0.0) if on_cpu(on) else CUDA_TOLERANCE
    losses = {s.step: s.train_loss for s in off.steps}
    pairs = [
        (
            f"train_loss at step {s.step}",
            s.train_loss,
            losses[s.step],
            early if s.step < 2 else late,
        )
        for s in on.steps
        if s.step in losses
    ]
    ends = [run.final_validation for run in (on, off)]
    if all(end is not None and end.val_loss is not None for end in ends):
        pairs.append(("val_loss", ends[0].val_loss, ends[1].val_loss, late))
    bound = f"within {early:g} nats at step 1 and {late:g} later" if late else "to the last digit"
    wrong = next((pair for pair in pairs if not abs(pair[1] - pair[2]) <= pair[3]), None)
    if wrong:
        difference = f"{wrong[0]} is {wrong[1]:.6f} with overlap on, {wrong[2]:.6f} off"
        checks.fault("overlap", f"losses differ: {difference}; they must agree {bound}: report it")
    else:
        checks.ok("overlap", f"{len(pairs)} losses agree {bound}")


# --- what they say of the real run ---


def timed_ms(run: Run) -> float | None:
    """Milliseconds a step after the first ten."""
    times = {s.step: s.train_time_ms for s in run.steps if s.train_time_ms is not None}
    if TIMED_FROM not in times or STEPS not in times:
        return run.step_times().mean
    return (times[STEPS] - times[TIMED_FROM]) / (STEPS - TIMED_FROM)


def say_overlap(checks: Checks, on: float, off: float) -> None:
    """Which is faster, as far as so few steps can tell."""
    times = f"{on:.2f} ms per step with overlap on, {off:.2f} off"
    if off / on > CLEARLY:
        checks.ok("time", times)
    elif on / off > CLEARLY:
        checks.note("time", f"{times}: overlap should not cost time: measure it with ablate.py")
    else:
        count = STEPS - TIMED_FROM
        checks.note("time", f"{times}: {count} steps each cannot tell them apart, ablate.py can")


def say_times(
    checks: Checks, runs: Mapping[str, Run], settings: Settings, tokens: Mapping[str, int]
) -> None:
    """Step time, steps that fit, passes over the data, the time of a validation."""
    on, off = (timed_ms(runs[name]) for name in ("on", "off"))
    if not (on and off):
        checks.fault("time", "the logs tell no step time")
        return
    say_overlap(checks, on, off)
    cap_s = settings["max_wallclock_seconds"]
    steps = iterations = int(settings["iterations"])
    takes = clock(iterations * on / 1e3)
    message = f"ITERATIONS={iterations:,} take about {takes}; no cap is set"
    if cap_s > 0:
        fit = int(1e3 * cap_s / on)  # a step that would end behind the cap is not begun
        steps = min(fit, iterations)
        end = f"of ITERATIONS={iterations:,}"
        if fit >= iterations:
            end = f"ITERATIONS={iterations:,} ends it first, after {takes}"
        message = f"about {fit:,} steps fit MAX_WALLCLOCK_SECONDS={cap_s:g}, {end}"
    checks.ok("steps", message)
    used = steps * int(settings["train_batch_tokens"])
    if tokens["train"]:
        passes = used / tokens["train"]
        message = f"{used:,} will be trained on: {passes:.2f} passes over the shards here"
        checks.say("note" if passes > 1 else "ok", "tokens", message)


def say_room(checks: Checks, run: Run) -> None:
    """Memory, and the artifact's bytes."""
    if run.peak_mib:
        checks.ok("memory", f"{run.peak_mib:,} MiB at the peak of rank 0")
    if run.sizes.total is not None:
        over = run.sizes.total > CAP_BYTES
        message = f"{run.sizes.total:,} bytes after {STEPS} steps, the cap is {CAP_BYTES:,}"
        message += ": a trained model packs to another size"
        checks.say("note" if over else "ok", "artifact", message)


def preflight(options: argparse.Namespace, trainer: Trainer) -> int:
    """All checks, in the order in which a fault would stop a run."""
    checks, out = Checks(), options.out
    configuration = trainer.configuration()
    if configuration is None:
        raise ToolError(f"{trainer.command_line}: no script with --print-config: name train_gpt.py")
    settings = {name: entry["value"] for name, entry in configuration.items()}
    given = trainer.settings(configuration).items()
    text = " ".join(f"{name}={value}" for name, value in given)
    checks.ok("settings", text or "none in the environment: all defaults")
    tokens = check_data(checks, trainer, settings)
    check_devices(checks, trainer, settings)
    free = shutil.disk_usage(trainer.folder).free
    space = f"{free / 1e9:.1f} GB free in {trainer.folder}"
    if free < SPARE_BYTES:
        checks.fault("disk", f"{space}: make room")
    if not checks.faults:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(
                f"{out}: cannot be made: {error.strerror}: name another --out"
            ) from error
        runs = short_runs(checks, trainer, settings, out)
        if len(runs) == 2:
            check_data_used(checks, runs["on"], runs["off"])
            check_losses(checks, runs["on"], runs["off"])
            say_times(checks, runs, settings, tokens)
            say_room(checks, runs["on"])
    if checks.faults:
        print(f"NOT READY: {checks.faults} fault{'s' * (checks.faults != 1)}, named above")
        return 2
    print(f"READY: {trainer.command_line}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="preflight.py [--out FOLDER] -- COMMAND",
    )
    folder = Path("logs", "preflight")
    help_text = f"folder for the logs (default: {folder})"
    parser.add_argument("--out", type=Path, default=folder, metavar="FOLDER", help=help_text)
    given = sys.argv[1:] if arguments is None else arguments
    options, command = launch.parse_with_command(parser, given)
    return launch.run_tool(lambda: preflight(options, Trainer(command, Path.cwd(), os.environ)))


if __name__ == "__main__":
    sys.exit(cli.run(main))
