"""Rehearse train_gpt.py and the stacks with their own data sizes; print how long each stage took.

    python3 tests/rehearsal/rehearse.py                    all of them, narrow, on 2 ranks
    python3 tests/rehearsal/rehearse.py caseops SEED=3     one stack, with another setting
    python3 tests/rehearsal/rehearse.py --full-width sp8192    the size of the submission in bytes

The arithmetic of the model is replaced by stand-ins (stand_in.py), and the shards are those of
real_size.py. What must come out is computed from the shards: the checksum of what each step trains
on, on two ranks, after RESUME and where the training tokens begin again; and the scores, also of
validation sets in several shards. A resumed run must end at its time limit, less what it reserves
for GPTQ, and a record can be made. A rehearsal takes minutes and 1.2 GB of memory (--full-width:
4 GB). The exit code is 1 if something is wrong. planted.py shows which faults a rehearsal finds.
"""

import io
import json
import math
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "tools")]
import package  # noqa: E402
import real_size  # noqa: E402
import recipe  # noqa: E402
from packed import pack  # noqa: E402
from running import Run, clean_environment, import_script, make_config, torchrun  # noqa: E402
from samples import SIZE_LIMIT_BYTES  # noqa: E402

# The scripts that are rehearsed ("root" is train_gpt.py), and the kind of their data.
CASES = {"root": "sp1024", "baseline_plus": "sp1024", "sp8192": "sp8192", "sp8192_ttt": "sp8192"}
CASES |= {"caseops": "caseops"}
COMMON = {"MAX_WALLCLOCK_SECONDS": 0, "RUN_ID": "rehearsal", "TRAIN_LOG_EVERY": 1}
NARROW = {"MODEL_DIM": 128, "ITERATIONS": 3, "WARMUP_STEPS": 2}
# The resumed run ends at a time limit, a few seconds later than the run that it continues. The time
# limit comes after about 10 of these steps.
RESUMED = {"ITERATIONS": 40, "RESUME": "auto", "VAL_TOKENS": 2_000_000}
STEP_SECONDS = 0.4
SECONDS_AFTER_RESUME = 4
FULL_WIDTH = {"ITERATIONS": 0, "WARMUP_STEPS": 0, "VAL_TOKENS": 300_000}


class Rehearsal(NamedTuple):
    """The result of a rehearsal."""

    faults: list[str]
    stages: list[dict[str, Any]]  # of each stage: name, size, seconds, MiB
    total: int = 0  # bytes of the packed script and the artifact together


def build_script(name: str) -> str:
    """Return the text of train_gpt.py ("root") or of a stack."""
    root = recipe.TRAINER.read_text(encoding="utf-8")
    if name == "root":
        return root
    stack = recipe.load_stack(name)
    text = recipe.combine(root, [recipe.load_recipe(each) for each in stack["recipes"]])
    return recipe.with_defaults(text, stack["settings"])


def run(script: Path, ranks: int, settings: dict[str, Any], **variables: object) -> list[str]:
    """Run the script on so many ranks; return its error lines, or an empty list.

    `variables` are those of stand_in.py.
    """
    words = [str(script), *(f"{name}={value}" for name, value in settings.items())]
    command = [*torchrun(HERE / "stand_in.py", ranks), *words]
    options = {"cwd": script.parent, "env": clean_environment(**variables), "text": True}
    done = subprocess.run(command, **options, capture_output=True)
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith(("train_gpt.py:", "AssertionError"))]
    return (errors or lines[-1:]) if done.returncode else []


def find_wrong_scores(kind: str, folder: Path) -> list[str]:
    """Return a line for each last score of a log that is not the one computed from the shards."""
    log = Run(folder)
    config = log.events("config")[-1]
    row = config["train_seq_len"]
    last_row = (
        1 if config.get("lora_rank") else row
    )  # a script that scores documents scores all targets
    faults = []
    for name, length in (("validation", row), ("score", last_row)):
        last = log.events(name)[-1]
        found = last["val_loss"], last["val_bpb"]
        wanted = real_size.expected_score(kind, folder / "data", length, config["val_tokens"])
        if any(abs(one - other) > 1e-11 for one, other in zip(found, wanted, strict=True)):
            faults.append(f"{name}: nats and bits {found}, computed from the shards {wanted}")
    return faults


def find_package_faults(folder: Path) -> list[str]:
    """Return the errors if package.py does not make a folder that check.py accepts."""
    options = {"--track": "track_non_record_16mb", "--name": "Rehearsal", "--author": "A"}
    options |= {"--github-id": "a", "--description": "At its own size"}
    words = [str(word) for pair in options.items() for word in pair]
    printed = io.StringIO()
    package.RECORDS = folder
    with redirect_stdout(printed), redirect_stderr(printed):
        code = package.main([str(folder / "logs" / "rehearsal.txt"), *words])
    return [f"package.py: {printed.getvalue()}"] if code else []


def find_wrong_data(kind: str, folder: Path, config: dict[str, Any]) -> list[str]:
    """Return a line if a step has another checksum than the tokens in the shards have.

    Also the checksum of the step that reads over the end of the training tokens is compared.
    """
    done = {event["step"]: event["data_crc"] for event in Run(folder).events("step")}
    crc = 0
    for step in range(1, max(done) + 1):
        crc += real_size.expected_crc(kind, folder / "data", config, range(step - 1, step))
        wanted = f"{crc % 2**32:08x}"
        if done.get(step) != wanted:
            return [f"step {step}: data_crc {done.get(step)}, computed from the shards {wanted}"]
    step = real_size.wrapping_step(kind, config)
    found = json.loads((folder / "checksum.json").read_text())
    wanted = real_size.expected_crc(kind, folder / "data", config, range(step, step + 1))
    if found != wanted:
        return [
            f"step {step + 1}, over the end of the data: checksum {found:08x}, not {wanted:08x}"
        ]
    return []


def find_time_faults(folder: Path, limit_ms: float) -> list[str]:
    """Return a line if a run did not end at its time limit.

    Where it must end depends on how long its own steps took: a step is not begun if it would end
    after the limit.
    """
    ends = {event["step"]: event["train_time_ms"] for event in Run(folder).events("step")}
    last = max(ends)
    longest = max(ends[step] - ends.get(step - 1, 0.0) for step in ends)
    if last >= RESUMED["ITERATIONS"]:
        return [
            f"the run did not end at the time limit of {limit_ms:.0f} ms, but after step {last}"
        ]
    if ends[last - 1] >= limit_ms:
        return [
            f"step {last} began at {ends[last - 1]:.0f} ms, after the limit of {limit_ms:.0f} ms"
        ]
    if ends[last] + 2 * longest < limit_ms:
        return [f"the run ended at {ends[last]:.0f} ms, long before its limit of {limit_ms:.0f} ms"]
    return []


def rehearse_resumed(name: str, folder: Path, given: dict[str, Any]) -> list[str]:
    """Continue a run on one rank until its time limit; return what is wrong."""
    [config] = Run(folder).events("config")
    done_ms = Run(folder).events("step")[-1]["train_time_ms"]
    reserve = config["gptq_reserve_seconds"] if config.get("gptq_batches") else 0.0
    limit = math.ceil(done_ms / 1000 + reserve + SECONDS_AFTER_RESUME)
    more = RESUMED | {"MAX_WALLCLOCK_SECONDS": limit}
    faults = run(folder / "packed.py", 1, given | more, STEP_SECONDS=STEP_SECONDS)
    if faults:
        return faults
    if not any("resumed_from" in event for event in Run(folder).events("checkpoint")):
        faults.append("RESUME=auto started from step 1")
    faults += find_wrong_data(CASES[name], folder, config)
    faults += find_time_faults(folder, 1000 * (limit - reserve))
    return faults + find_wrong_scores(CASES[name], folder)


def rehearse(name: str, folder: Path, settings: dict[str, Any], text: str = "") -> Rehearsal:
    """Rehearse train_gpt.py ("root") or a stack, or another `text` of its script.

    With the settings of NARROW, this is a run on two ranks, a record made from it, and a resumed
    run on one rank. Otherwise (at full width) it is a run without steps on one rank.
    """
    is_narrow = settings.keys() >= NARROW.keys()
    text = text or build_script(name)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    config = asdict(make_config(import_script(folder / f"{name}.py"), **COMMON, **settings))
    kind = CASES[name]
    given = COMMON | real_size.write_data(kind, folder / "data", config) | settings
    script = folder / "packed.py"
    script.write_bytes(pack(text.encode()))
    step = real_size.wrapping_step(kind, config)
    faults = run(script, 2 if is_narrow else 1, given, REHEARSED_STEP=step)
    stages = [json.loads(line) for line in (folder / "stages.jsonl").read_text().splitlines()]
    if faults:
        return Rehearsal(faults, stages)
    faults += find_wrong_scores(kind, folder)
    [config] = Run(folder).events("config")
    passes = sum(row["stage"] == "SGD" for row in stages)
    if is_narrow and config.get("sgd_docs") and passes != config["sgd_phases"]:
        faults.append(f"{passes} of {config['sgd_phases']} passes of SGD")
    [sizes] = Run(folder).events("artifact")
    total = sizes["artifact_bytes"] + sizes["code_bytes"]
    if total > SIZE_LIMIT_BYTES:
        faults.append(f"{total:,} bytes are over the size limit of {SIZE_LIMIT_BYTES:,}")
    if is_narrow and not faults:
        faults += find_wrong_data(kind, folder, config)
        faults += find_package_faults(folder) + rehearse_resumed(name, folder, given)
    return Rehearsal([*dict.fromkeys(faults)], stages, total)


def print_stages(name: str, done: Rehearsal) -> None:
    """Print the table of stages, the size of the submission, and what is wrong."""
    print(f"\n{name:26} {'size':>22} {'seconds':>9} {'MiB':>6}")
    for row in done.stages:
        print("  {stage:24} {size:>22} {s:9.1f} {mib:6}".format_map(row))
    print(
        f"  packed script and artifact: {done.total:,} bytes, "
        f"{SIZE_LIMIT_BYTES - done.total:,} left"
    )
    print("".join(f"  WRONG: {fault}\n" for fault in done.faults), end="", flush=True)


def main(arguments: list[str]) -> int:
    settings = FULL_WIDTH if "--full-width" in arguments else NARROW
    settings = settings | dict(word.split("=", 1) for word in arguments if "=" in word)
    failed = False
    for name in [word for word in arguments if word in CASES] or [*CASES]:
        with tempfile.TemporaryDirectory(prefix="rehearsal") as folder:
            done = rehearse(name, Path(folder), settings)
        print_stages(name, done)
        failed = failed or done.faults != []
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
