"""Vary a trainer's settings and measure what they do:
runs take turns, are paired by seed, end in 95 % intervals.

    python3 logs/ablate.py --vary TRAIN_PREFETCH=1,0 --seeds 3 --steps 200 -- python3 train_gpt.py
    python3 logs/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 --seconds 600 -- \\
        torchrun --standalone --nproc_per_node=8 train_gpt.py

Settings are environment variables. Each combination of values is an arm, the first one is what the
others are held against. A repeat runs every arm with one seed, beginning one arm further each time,
and then the first arm once more with the same seed: what two equal runs differ by is the machine's
(--no-control leaves the second run out).
python3 and torchrun mean those of the Python that runs this tool.

Each run has a folder of its own. The same command again keeps the runs that are finished, redoes
the others and adds new seeds and values. A run that fails is shown with its last lines, and the
rest goes on; wrong settings (exit code 2) end everything, as does Ctrl-C, which keeps what is
finished.

Before a long one: python3 logs/preflight.py -- COMMAND

Exit code: 0 done, 1 a run failed or is no part of an ablation, 2 wrong usage or settings,
130 interrupted.
"""

import argparse
import difflib
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import compare
import launch
import stats
from launch import OURS, ToolError, Trainer, clock
from read_log import Logs, Run, read_logs

try:
    from tqdm import tqdm
except ImportError:
    sys.exit(f"error: tqdm is missing: run {sys.executable} -m pip install tqdm")

# Variables that a trainer need not name, and that change its runs.
SURROUNDINGS = re.compile(r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON")

# --- the plan ---


@dataclass(frozen=True)
class Arm:
    """A combination of values: what it is called, and the name of its files."""

    settings: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings)

    @property
    def slug(self) -> str:
        """Told apart where long, or made of values with signs that no RUN_ID may have."""
        words = "_".join(
            f"{name.lower()}-{re.sub(r'[^A-Za-z0-9.]+', '-', value)}"
            for name, value in self.settings
        )
        plain = all(re.fullmatch(r"[\w.-]*[A-Za-z0-9]", v, re.ASCII) for _, v in self.settings)
        if len(words) <= 80 and plain and "_" not in "".join(v for _, v in self.settings):
            return words
        return f"{words[:60]}_{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Planned:
    """A run of the plan. control: the first arm's second run of a repeat."""

    arm: Arm
    seed: int
    control: bool = False

    @property
    def run_id(self) -> str:
        return f"{self.arm.slug}_seed{self.seed}" + "_again" * self.control

    @property
    def words(self) -> str:
        return f"{self.arm.label} seed {self.seed}" + " (again)" * self.control


def plan(arms: Sequence[Arm], seeds: Sequence[int], control: bool) -> list[Planned]:
    """All runs in their order: a repeat a seed, rotated by one arm each, so that no arm always
    comes first."""
    result = []
    for repeat, seed in enumerate(seeds):
        turn = repeat % len(arms)
        result += [Planned(arm, seed) for arm in (*arms[turn:], *arms[:turn])]
        result += [Planned(arms[0], seed, control=True)] * control
    return result


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """NAME=v1,v2 each."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            example = "write NAME=value,value, such as TRAIN_PREFETCH=1,0"
            raise ToolError(f"--vary {text}: {example}")
        if name in OURS:
            instead = "; use --seeds" if name == "SEED" else ""
            raise ToolError(f"--vary {text}: every run has its own {name}{instead}")
        found.setdefault(name, []).extend(value.strip() for value in values.split(","))
        if "" in found[name] or len(set(found[name])) < len(found[name]):
            raise ToolError(f"--vary {text}: values must differ, none may be empty")
    if math.prod(len(values) for values in found.values()) < 2:
        raise ToolError("nothing varies: name two values, such as --vary TRAIN_PREFETCH=1,0")
    return found


def parse_seeds(text: str, environ: Mapping[str, str]) -> list[int]:
    """3: so many, from SEED (1337) on; 1337,42: these."""
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
        if "," not in text:
            first = int(environ.get("SEED", 1337))
            numbers = list(range(first, first + numbers[0]))
    except ValueError as error:
        words = "write how many, such as 3, or which, such as 1337,42,7"
        raise ToolError(f"--seeds {text}: {words}") from error
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ToolError(f"--seeds {text}: one at least, whole numbers from 0, each once")
    return numbers


@dataclass
class Ablation:
    """What is to be run, with what, where."""

    trainer: Trainer
    vary: dict[str, list[str]]
    seeds: list[int]
    control: bool
    mode: tuple[str, str] | None  # ("steps" or "seconds", how many)
    arms: list[Arm] = field(init=False)
    runs: list[Planned] = field(init=False)

    def __post_init__(self) -> None:
        combinations = itertools.product(*self.vary.values())
        self.arms = [Arm(tuple(zip(self.vary, values, strict=True))) for values in combinations]
        self.runs = plan(self.arms, self.seeds, self.control)

    def settings(self, run: Planned) -> dict[str, str]:
        """The variables of a run."""
        return {**self.fixed, **dict(run.arm.settings), "SEED": str(run.seed), "RUN_ID": run.run_id}

    @property
    def fixed(self) -> dict[str, str]:
        """What the mode sets in every run."""
        kind, length = self.mode or ("", "")
        steps = {"ITERATIONS": length, "MAX_WALLCLOCK_SECONDS": "0"}
        return {"steps": steps, "seconds": {"MAX_WALLCLOCK_SECONDS": length}}.get(kind, {})

    def base(self, configuration: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
        """What all runs of a folder have in common; a change of it makes another ablation."""
        trainer, owned = self.trainer, {*self.vary, *self.fixed, *OURS}
        settings = trainer.settings(configuration).items()
        script = trainer.script and hashlib.sha256(trainer.script.read_bytes()).hexdigest()[:16]
        return {
            "command": trainer.words,
            "folder": str(trainer.folder),
            "script_sha256": script,
            "mode": " ".join(self.mode) if self.mode else "as set",
            "settings": {name: value for name, value in settings if name not in owned},
            "machine": launch.machine(),
            "versions": launch.versions(trainer),
        }

    def words(self) -> str:
        length = f"{self.mode[1]} {self.mode[0]} each" if self.mode else "as long as set"
        count = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        seeds = ", ".join(map(str, self.seeds))
        return f"{', '.join(self.vary)}: {len(self.arms)} arms x {count} ({seeds}), {length}"


# --- the folder ---


class Folder:
    """Where an ablation lives: manifest.json, runs/<RUN_ID>/ to work in, logs/ with copies of all
    logs, the report."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.manifest_path = path, path / "logs", path / "manifest.json"
        self.manifest: dict[str, Any] = {}

    def open(self, base: Mapping[str, Any]) -> None:
        """Takes the folder for this ablation, if it is empty or this ablation's and free."""
        other = "name another --out"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            strange = [path.name for path in self.path.iterdir() if path.name != ".lock"]
            self.lock = (self.path / ".lock").open("w", encoding="utf-8")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            words = "another ablate.py, or a run that it started, is at work in it: wait for it, or"
            raise ToolError(f"{self.path}: {words} {other}") from error
        except OSError as error:
            raise ToolError(f"{self.path}: cannot be used: {error.strerror}: {other}") from error
        if strange and not self.manifest_path.exists():
            words = "holds files, but no manifest.json of an ablation"
            raise ToolError(f"{self.path}: {words}: {other}")
        if self.manifest_path.exists():
            self.manifest = self._read()
            if changed := _changed(self.manifest["base"], base):
                words = f"holds runs made otherwise ({'; '.join(changed)})"
                raise ToolError(f"{self.path}: {words}: {other}")
        self.manifest = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "runs": {},
        } | self.manifest
        self.manifest["base"] = dict(base)
        self.logs.mkdir(exist_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            if isinstance(found["base"], dict) and isinstance(found["runs"], dict):
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        words = "cannot be read: name another --out, or remove the folder"
        raise ToolError(f"{self.manifest_path}: {words}")

    def save(self, **news: Any) -> None:
        self.manifest.update(news)
        write_atomic(self.manifest_path, json.dumps(self.manifest, indent=1))

    def record(self, run: Planned, **news: Any) -> None:
        self.manifest["runs"].setdefault(run.run_id, {}).update(news)
        self.save()

    def work(self, run: Planned) -> Path:
        return self.path / "runs" / run.run_id

    def collect(self, run: Planned) -> None:
        """Copies a run's logs into logs/; of a trainer that writes none, what it printed."""
        for suffix in (".txt", ".jsonl"):
            source = self.work(run) / "logs" / f"{run.run_id}{suffix}"
            target = self.logs / f"{run.run_id}{suffix}"
            target.unlink(missing_ok=True)
            if suffix == ".txt" and not source.exists():
                source = self.work(run) / "output.txt"
            if source.exists():
                shutil.copyfile(source, target)

    def result(self, run: Planned) -> Run | None:
        """What the run's logs say, if it was this run and it is finished."""
        found = read_logs([self.logs / f"{run.run_id}.txt"]).runs
        entry = self.manifest["runs"].get(run.run_id, {})
        made = entry.get("settings"), entry.get("seed"), entry.get("exit_code") or 0
        if not found or made != (dict(run.arm.settings), run.seed, 0):
            return None
        read = found[-1]
        ended = read.status == "finished" or entry.get("exit_code") == 0 and not read.config
        logged = ((read.config.get(name.lower()), value) for name, value in run.arm.settings)
        if not ended or read.seed not in (None, run.seed) or any(_other(*pair) for pair in logged):
            return None
        read.seed = run.seed
        read.config = {name.lower(): value for name, value in run.arm.settings} | read.config
        return read


def _other(logged: Any, value: str) -> bool:
    """Does a log contradict a value that was set? Of texts, only whether there is one counts."""
    if logged is None or isinstance(logged, str):
        return False
    try:
        return float(logged) != float(value)
    except (TypeError, ValueError):
        return False


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two bases, each in a few words."""
    result = []
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            keys = dict.fromkeys((*before, *after))
            pairs = [(key, before.get(key, "not set"), after.get(key, "not set")) for key in keys]
        else:
            pairs = [(name, str(before)[:60], str(after)[:60])]
        result += [f"{key} was {one}, is {two}" for key, one, two in pairs if one != two]
    return result


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- running ---


class Progress:
    """A bar on a terminal, in runs and shares of them; elsewhere a line a run."""

    def __init__(self, total: int) -> None:
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left {postfix}"
        self.done = 0
        self.bar = tqdm(total=total, bar_format=form, disable=None, leave=False)

    def begin(self, words: str) -> None:
        self.started = time.monotonic()
        self.words = f"[{self.done + 1}/{self.bar.total}] {words}"
        self.bar.set_description_str(self.words)
        if self.bar.disable:
            print(f"{self.words}: started", flush=True)

    def tick(self, output: Path) -> None:
        step, share = reached(launch.last_lines(output, 40))
        self.bar.n = self.done + min(share, 0.99)
        self.bar.set_postfix_str(step)

    def over(self, words: str) -> None:
        self.done += 1
        self.bar.n = self.done
        after = clock(time.monotonic() - self.started)
        self.bar.write(f"{self.words}: {words} after {after}")
        sys.stdout.flush()


def reached(lines: Sequence[str]) -> tuple[str, float]:
    """(step:n/N, share of the run) of the last line that tells a step."""
    for line in reversed(lines):
        if found := re.search(r"(?<!_)step:(\d+)/(\d+)", line):
            share = int(found[1]) / max(1, int(found[2]))
            return found[0], share
    return "", 0.0


def run_all(ablation: Ablation, folder: Folder) -> list[str]:
    """Runs what is not finished; returns the failures. Wrong settings end it (ToolError)."""
    entries, failures = folder.manifest["runs"], []
    for run in ablation.runs:
        if entries.get(run.run_id, {}).get("status") == "running":
            folder.collect(run)  # it may have outlived a process that was killed
    todo = [run for run in ablation.runs if folder.result(run) is None]
    if kept := len(ablation.runs) - len(todo):
        print(f"{kept} of {len(ablation.runs)} runs are finished and kept", flush=True)
    progress = Progress(len(todo))
    with progress.bar:
        for run in todo:
            code, finished = run_one(ablation, folder, run, progress)
            if not finished:
                print(launch.indented(launch.last_lines(folder.work(run) / "output.txt")))
                unfinished = ", but its log has no end" * (code == 0)
                failures.append(f"{run.words}: exit code {code}{unfinished}")
            if code == 2:
                words = "the trainer refuses its settings (above): nothing more was run"
                raise ToolError(f"{run.words}: {words}")
    return failures


def run_one(
    ablation: Ablation, folder: Folder, run: Planned, progress: Progress
) -> tuple[int, bool]:
    """A run from its start to its record in the manifest: (exit code, is it finished)."""
    started = time.time()
    made = {"settings": dict(run.arm.settings), "seed": run.seed, "control": run.control}
    state = {"status": "running", "started": started, "load": os.getloadavg()[0], "exit_code": None}
    folder.record(run, **made, **state)
    progress.begin(run.words)
    work = launch.fresh_folder(folder.work(run), ablation.trainer)
    settings, held = ablation.settings(run), (folder.lock.fileno(),)
    try:
        code = launch.run_child(ablation.trainer, work, settings, watch=progress.tick, held=held)
    except KeyboardInterrupt:
        folder.record(run, status="interrupted")
        raise
    folder.collect(run)
    folder.record(run, exit_code=code, wall_s=round(time.time() - started, 3))
    finished = code == 0 and folder.result(run) is not None
    folder.record(run, status="finished" if finished else "failed")
    progress.over("finished" if finished else f"FAILED (exit code {code})")
    return code, finished


# --- what came out ---


@dataclass
class Difference:
    """An arm minus the first arm, paired by seed; low, high (95 %) and the smallest difference that
    could have been seen are None for a single pair."""

    arm: str
    metric: str
    unit: str
    pairs: int
    first_mean: float
    mean: float
    low: float | None = None
    high: float | None = None
    seen_from: float | None = None
    measurable: bool = False

    @property
    def equal(self) -> bool:
        return self.mean == self.low == self.high == 0

    @property
    def words(self) -> str:
        if self.low is None:
            return "one pair: no interval"
        if self.measurable:
            return "measurable"
        return "equal to the digit" if self.equal else "not measurable"

    @property
    def percent(self) -> str:
        if not self.first_mean or self.unit not in ("ms", "s", "steps"):
            return "-"
        return f"{100 * self.mean / abs(self.first_mean):+.2f} %"


@dataclass
class Results:
    """The finished runs of an ablation, and what follows from them."""

    ablation: Ablation
    runs: dict[Planned, Run]

    @functools.cached_property
    def metrics(self) -> list[tuple[str, str, Callable[[Run], float | None]]]:
        """(name, unit, value of a run) of all that is compared."""
        found = list(self.runs.values())
        bpb = bool(compare.other_tokenizers(found))

        def loss(run: Run) -> float | None:
            return run.headline and (run.headline.val_bpb if bpb else run.headline.val_loss)

        result: list[tuple[str, str, Callable[[Run], float | None]]] = [
            ("step time", "ms", lambda run: run.step_times().mean),
            ("validation time", "s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
            ("loss", "bits a byte" if bpb else "nats", loss),
        ]
        if len({run.last_step for run in found}) > 1:
            result.insert(1, ("steps", "steps", lambda run: float(run.last_step)))
        return result

    def values(
        self, arm: Arm, value: Callable[[Run], float | None], control: bool = False
    ) -> dict[int, float]:
        """Of each seed, where it is known."""
        found = {
            run.seed: value(read)
            for run, read in self.runs.items()
            if run.arm == arm and run.control == control
        }
        return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}

    def noise(self, value: Callable[[Run], float | None]) -> float:
        """What second runs of the first arm differ by from the first ones of their seed, at
        most."""
        arm = self.ablation.arms[0]
        first, again = self.values(arm, value), self.values(arm, value, control=True)
        return max((abs(again[seed] - first[seed]) for seed in first if seed in again), default=0.0)

    def differences(self) -> list[Difference]:
        result, first_arm = [], self.ablation.arms[0]
        for arm, (name, unit, value) in itertools.product(self.ablation.arms[1:], self.metrics):
            first, second = self.values(first_arm, value), self.values(arm, value)
            seeds = [seed for seed in first if seed in second]
            if not seeds:
                continue
            a, b = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            about = arm.label, name, unit, len(seeds), statistics.fmean(a)
            if len(seeds) == 1:
                result.append(Difference(*about, b[0] - a[0]))
                continue
            test, alone = stats.paired(a, b), self.noise(value)
            clear = not test.low <= 0 <= test.high and abs(test.difference) > alone
            seen_from = max(test.seen_from, alone)
            figures = test.difference, test.low, test.high, seen_from
            result.append(Difference(*about, *figures, clear))
        return result

    def refusals(self) -> dict[str, list[str]]:
        """Of each arm, why its runs and the first arm's are no ablation of what was varied."""
        result, first = {}, self.ablation.arms[0]
        for arm in self.ablation.arms[1:]:
            pairs = zip(first.settings, arm.settings, strict=True)
            varied = [name for (name, old), (_, new) in pairs if old != new]
            groups = [
                [read for run, read in self.runs.items() if run.arm == one and not run.control]
                for one in (first, arm)
            ]
            options = argparse.Namespace(metric="bpb", margin=0.0, alpha=0.05, varied=varied)
            found = compare.compare_groups(*groups, options).refusals if all(groups) else []
            # One seed is no sample, which the table says.
            result[arm.label] = [why for why in found if "a test needs two" not in why]
        return {label: why for label, why in result.items() if why}


def arm_lines(results: Results) -> list[str]:
    arms, rows = results.ablation.arms, []
    for arm, control in [*((arm, False) for arm in arms), (arms[0], True)]:
        columns = [results.values(arm, value, control) for _, _, value in results.metrics]
        count = sum(run.arm == arm and run.control == control for run in results.runs)
        if count or not control:
            figures = itertools.chain(*(_mean_std(list(column.values())) for column in columns))
            rows.append([arm.label + " (again)" * control, str(count), *figures])
    head = ["arm", "runs"]
    for name, unit, _ in results.metrics:
        head += [f"{name}, {unit}" if unit != name else name, "std"]
    return ["Arms (mean and standard deviation over seeds)", *compare.table(head, rows, 1)]


def _mean_std(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    group = stats.summary(values)
    mean = f"{group.mean:.5g}" if abs(group.mean) >= 100 else f"{group.mean:.4f}"
    return mean, f"{group.std:.2g}" if group.n > 1 else "-"


def difference_lines(found: Sequence[Difference]) -> list[str]:
    rows = [
        [
            d.arm,
            d.metric,
            str(d.pairs),
            f"{d.mean:+.4g} {d.unit}",
            d.percent,
            "-" if d.low is None else f"{d.low:+.4g} to {d.high:+.4g}",
            compare.cell(d.seen_from, ".4g"),
            d.words,
        ]
        for d in found
    ]
    head = ["arm", "of", "pairs", "difference", "%", "95 % interval", "seen from", "so"]
    title = "Differences from the first arm, paired by seed (seen from: smaller ones cannot be)"
    lines = [title, *compare.table(head, rows, 2)] if rows else []
    if (known := sum(d.low is not None for d in found)) > 4:
        chance = "where nothing differs, one in 20 leaves out zero by chance"
        lines.append(f"({known} intervals: {chance})")
    return lines


def machine_lines(results: Results) -> list[str]:
    noise = [
        f"{name} {alone:.4g} {unit}"
        for name, unit, value in results.metrics
        if (alone := results.noise(value))
    ]
    most = "two runs of the first arm with one seed differ by at most"
    return (
        [f"The machine itself: {most} {', '.join(noise)}; less is not measurable"] if noise else []
    )


def verdict(results: Results, found: Sequence[Difference]) -> str:
    """The outcome in one sentence."""
    first, refused = results.ablation.arms[0].label, results.refusals()
    clauses = [f"{arm} is no ablation: {'; '.join(why)}" for arm, why in refused.items()]
    found = [d for d in found if d.arm not in refused]
    clear, rest = [d for d in found if d.measurable], [d for d in found if not d.measurable]
    clauses += [
        f"{d.arm} changes {d.metric} by {d.mean:+.4g} {d.unit} "
        f"(95 % interval {d.low:+.4g} to {d.high:+.4g}) against {first}"
        for d in clear
    ]
    if not found:
        clauses += ["no pair of finished runs"] if not refused else []
    elif all(d.low is None for d in found):
        words = "one seed a pair: whether its differences are more than chance cannot be told"
        clauses.append(f"{words}: the same command with --seeds 3 can")
    elif rest:
        open_ones = ", ".join(dict.fromkeys(_not_seen(d) for d in rest))
        arms = f"between {found[0].arm} and {first}" if len({d.arm for d in found}) == 1 else ""
        clauses.append(f"no measurable difference {arms}: {open_ones}".replace(" :", ":"))
    return "Verdict: " + "; ".join(clauses)


def _not_seen(d: Difference) -> str:
    if d.equal:
        return f"{d.metric} equal to the digit"
    if d.seen_from is None:
        return d.metric
    return f"{d.metric} (with {d.pairs} seeds from {d.seen_from:.3g} {d.unit} on it would be seen)"


def conclude(ablation: Ablation, folder: Folder, failures: Sequence[str]) -> int:
    """Prints and keeps the report of what is finished: the verdict first."""
    runs = {run: read for run in ablation.runs if (read := folder.result(run)) is not None}
    if not runs:
        print("no run is finished: what they printed is above")
        return 1
    results = Results(ablation, runs)
    found = results.differences()
    summary = verdict(results, found)
    blocks = [
        [summary],
        difference_lines(found),
        arm_lines(results),
        machine_lines(results),
        ["Failed", *(f"  {failure}" for failure in failures)] if failures else [],
        compare.report(Logs(runs=list(runs.values())), None),
        [ablation.words()],
    ]
    full = sum(read.stopped_early is None for read in runs.values())
    if full and ablation.mode and ablation.mode[0] == "seconds":
        words = f"ITERATIONS, not the time, ended {full} of {len(runs)} runs: raise it"
        blocks.insert(1, [f"Note: {words}"])
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}\n")
    write_atomic(folder.path / "report.txt", f"{text}\n")
    folder.save(differences=[asdict(d) for d in found], verdict=summary)
    arms = [[read for run, read in runs.items() if run.arm == arm] for arm in ablation.arms]
    picture = folder.path / "picture.png"
    print(compare.draw(arms, picture, "steps", "") or f"picture: {picture}")
    print(f"report: {folder.path / 'report.txt'}   logs: {folder.logs}")
    return int(bool(failures or results.refusals()))


def check_names(ablation: Ablation, configuration: Mapping[str, Any] | None) -> None:
    """Names that the trainer does not know vary nothing, unless they are its surroundings'."""
    source, known = ablation.trainer.source(), [name.upper() for name in configuration or {}]
    for name in ablation.vary:
        if name in known or re.search(rf"\b{name}\b", source) or SURROUNDINGS.match(name):
            continue
        close = difflib.get_close_matches(name.upper(), known, 1, 0.7)
        script = ablation.trainer.script or "the command"
        remedy = f"did you mean {close[0]}?" if close else "vary a name that its --help lists"
        raise ToolError(f"--vary {name}: {script} has no such setting: {remedy}")


def ablate(options: argparse.Namespace, trainer: Trainer) -> int:
    lengths = (("steps", options.steps), ("seconds", options.seconds))
    mode = next((length for length in lengths if length[1] is not None), None)
    vary, seeds = parse_vary(options.vary), parse_seeds(options.seeds, os.environ)
    ablation = Ablation(trainer, vary, seeds, options.control, mode)
    folder = Folder(options.out or Path("logs") / f"ablate-{'-'.join(vary).lower()}"[:120])
    if twice := next((name for name in vary if name in ablation.fixed), None):
        raise ToolError(f"--vary {twice}: --{mode[0]} sets it: leave out one of them")
    configuration, seen = None, set()
    for arm in ablation.arms:
        # A wrong value is found now, not after the runs before it; each value is asked about once.
        if not seen >= set(arm.settings):
            configuration = trainer.configuration(**{**ablation.fixed, **dict(arm.settings)})
            seen |= set(arm.settings)
    check_names(ablation, configuration)
    again = "the first arm again at the end of each repeat" if options.control else "no control"
    print(f"{ablation.words()}; {len(ablation.runs)} runs, {again}")
    if options.dry_run:
        for number, run in enumerate(ablation.runs, 1):
            variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in ablation.settings(run).items())
            print(f"{number:4}  {variables} {trainer.words}")
        print(f"nothing was run; the folder would be {folder.path}")
        return 0
    folder.open(ablation.base(configuration))
    order = [run.run_id for run in ablation.runs]
    folder.save(vary=vary, seeds=seeds, control=options.control, order=order)
    try:
        failures = run_all(ablation, folder)
    except KeyboardInterrupt:
        finished = sum(folder.result(run) is not None for run in ablation.runs)
        kept = f"{finished} of {len(ablation.runs)} runs are finished and kept in {folder.path}"
        print(f"\ninterrupted: {kept}; the same command goes on")
        return 130
    return conclude(ablation, folder, failures)


# --- command line ---


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = launch.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ablate.py --vary NAME=v1,v2 [...] [options] -- COMMAND",
    )
    add = parser.add_argument
    words = "a setting and its values; may be repeated"
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help=words)
    words = "how many seeds, from SEED (1337) on, or which: 1337,42,7 (default: 3)"
    add("--seeds", default="3", help=words)
    words = "fixed steps: ITERATIONS=N, MAX_WALLCLOCK_SECONDS=0"
    add("--steps", metavar="N", help=words)
    words = "fixed time: MAX_WALLCLOCK_SECONDS=S (ITERATIONS as set)"
    add("--seconds", metavar="S", help=words)
    add("--out", type=Path, metavar="FOLDER", help="default: logs/ablate-<names>")
    words = "do not run the first arm twice in each repeat"
    add("--no-control", dest="control", action="store_false", help=words)
    words = "show the runs in their order, run nothing"
    add("--dry-run", action="store_true", help=words)
    ours, command = launch.split_command(arguments)
    options = parser.parse_args(ours)
    if fault := fault_of_options(options, command):
        parser.exit(2, f"error: {fault}\n")
    return options, command


def fault_of_options(options: argparse.Namespace, command: Sequence[str]) -> str:
    if not options.vary:
        return "say what varies, such as --vary TRAIN_PREFETCH=1,0"
    if not command:
        return "name the trainer's command after --, such as: -- python3 train_gpt.py"
    if options.steps and options.seconds:
        return "--steps and --seconds: name one of them"
    for name, kind in (("steps", int), ("seconds", float)):
        value = getattr(options, name)
        try:
            if value is not None and not 0 < kind(value) < 1e9:
                raise ValueError
        except ValueError:
            return f"--{name} {value}: a number above 0, such as 200"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    options, command = parse(sys.argv[1:] if arguments is None else arguments)
    return launch.run_tool(lambda: ablate(options, Trainer(command, Path.cwd(), os.environ)))


if __name__ == "__main__":
    sys.exit(main())
