"""Vary a trainer's settings or its script, and measure what changes.
Runs take turns and are paired by seed. Differences are printed with 95 % intervals.

    python3 logs/ablate.py --vary TRAIN_PREFETCH=1,0 --seeds 3 --steps 200 -- python3 train_gpt.py
    python3 logs/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 --seconds 600 -- \\
        torchrun --standalone --nproc_per_node=8 train_gpt.py
    python3 logs/ablate.py --script train_gpt.py,ema.py -- python3 train_gpt.py

Settings are environment variables. Each combination of values is an arm. The other arms are
compared with the first one. --script replaces the script of the command by others; a copy of each
is kept beside its logs. Settings that only one script has are printed with their defaults: a recipe
that is off by default would only repeat the other script. Each repeat runs every arm with one seed,
and starts with the next arm.
python3 and torchrun are those of the Python that runs this tool.

Each run has a folder of its own. If you give the same command again, finished runs are kept, and
others are run again; you may add seeds and values. If a run fails, the other runs continue.

Exit code: 0 done, 1 a run failed or cannot be compared, 2 wrong usage or settings,
130 interrupted.
"""

import argparse
import difflib
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cli
import launch
from cli import Parser, cell, table
from configuration import same_data, telling, written
from launch import OURS, ToolError, Trainer
from results import headline
from runs import Logs, Run, read_logs
from significance import BITS, NATS, other_tokenizers, paired, value_of
from tables import report

# Variables that a trainer need not name, and that change its runs.
SURROUNDINGS = re.compile(r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON")
# They change when a batch is read, never which.
OVERLAP = {"TRAIN_PREFETCH", "TRAIN_COPY_STREAM", "VAL_PREFETCH", "VAL_COPY_STREAM"}
OVERLAP |= {"TRAIN_PREFETCH_QUEUE"}
Configuration = dict[str, dict[str, Any]]  # name: value and source

# --- the plan ---


@dataclass(frozen=True)
class Arm:
    """A combination of values, with its script where scripts vary: what it is called, and the name
    of its files."""

    settings: tuple[tuple[str, str], ...]
    script: str | None = None  # as it was given

    @property
    def label(self) -> str:
        parts = [self.script] if self.script else []
        return " ".join([*parts, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def slug(self) -> str:
        """Names with a hash where they are long, or have signs that no RUN_ID may have."""
        values = [value for _, value in self.settings]
        pairs = [(name.lower(), value) for name, value in self.settings]
        if self.script:
            values.append(self.script.removesuffix(".py"))
            pairs.insert(0, ("script", values[-1]))
        text = "_".join(f"{name}-{re.sub(r'[^A-Za-z0-9.]+', '-', value)}" for name, value in pairs)
        plain = all(re.fullmatch(r"[\w.-]*[A-Za-z0-9]", value, re.ASCII) for value in values)
        if len(text) <= 80 and plain and "_" not in "".join(values):
            return text
        return f"{text[:60]}_{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Planned:
    """A run of the plan."""

    arm: Arm
    seed: int

    @property
    def run_id(self) -> str:
        return f"{self.arm.slug}_seed{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.arm.label} seed {self.seed}"


def plan(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Planned]:
    """All runs in their order: one repeat per seed. Each repeat begins one arm further, so that no
    arm always comes first."""
    result = []
    for repeat, seed in enumerate(seeds):
        turn = repeat % len(arms)
        result += [Planned(arm, seed) for arm in (*arms[turn:], *arms[:turn])]
    return result


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """NAME=v1,v2 each."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            example = "write NAME=value,value, such as TRAIN_PREFETCH=1,0"
            raise ToolError(f"--vary {text}: {example}")
        if name in OURS:
            instead = "; use --seeds" if name == "SEED" else ""
            raise ToolError(f"--vary {text}: every run has its own {name}{instead}")
        settings.setdefault(name, []).extend(value.strip() for value in values.split(","))
        if "" in settings[name] or len(set(settings[name])) < len(settings[name]):
            rule = "values must differ, none may be empty"
            other = "for such values give a script for each: records/recipe.py apply, and --script"
            raise ToolError(f"--vary {text}: {rule}, and commas part them; {other}")
    return settings


def parse_scripts(text: str | None, trainer: Trainer) -> dict[str, Trainer]:
    """Each script with the command that runs it. A copy of it is run in a folder of its own, where
    its name must not hide a module that it imports."""
    names = [name.strip() for name in text.split(",")] if text else []
    if len(set(names)) < len(names):
        raise ToolError(f"--script {text}: scripts must differ")
    for name in names:
        if fault := cli.fault_of_script_name(name):
            raise ToolError(f"--script {name}: {fault}")
    return {name: trainer.with_script(Path(name)) for name in names}


def parse_seeds(text: str, environ: Mapping[str, str]) -> list[int]:
    """3: so many, from SEED (1337) on; 1337,42: these."""
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
        if "," not in text:
            first = int(environ.get("SEED", 1337))
            numbers = list(range(first, first + numbers[0]))
    except ValueError as error:
        remedy = "write how many, such as 3, or which, such as 1337,42,7"
        raise ToolError(f"--seeds {text}: {remedy}") from error
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ToolError(f"--seeds {text}: one at least, whole numbers from 0, each once")
    return numbers


@dataclass
class Ablation:
    """What is to be run, with what, where."""

    trainer: Trainer
    vary: dict[str, list[str]]
    seeds: list[int]
    mode: tuple[str, str] | None  # ("steps" or "seconds", how many)
    scripts: dict[str, Trainer] = field(default_factory=dict)  # where they vary
    # What --print-config says of each script; None is the command's own script.
    configurations: dict[str | None, Configuration | None] = field(default_factory=dict)
    arms: list[Arm] = field(init=False)
    runs: list[Planned] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = [
            Arm(tuple(zip(self.vary, values, strict=True)), script)
            for script in (self.scripts or [None])
            for values in itertools.product(*self.vary.values())
        ]
        if len(self.arms) < 2:
            remedy = "name two values, such as --vary TRAIN_PREFETCH=1,0, or two scripts"
            raise ToolError(f"nothing varies: {remedy}")
        self.runs = plan(self.arms, self.seeds)

    def trainer_of(self, arm: Arm) -> Trainer:
        return self.scripts[arm.script] if arm.script else self.trainer

    def settings(self, run: Planned) -> dict[str, str]:
        """The variables of a run."""
        return {**self.fixed, **dict(run.arm.settings), "SEED": str(run.seed), "RUN_ID": run.run_id}

    @property
    def fixed(self) -> dict[str, str]:
        """What the mode sets in every run."""
        kind, length = self.mode or ("", "")
        steps = {"ITERATIONS": length, "MAX_WALLCLOCK_SECONDS": "0"}
        return {"steps": steps, "seconds": {"MAX_WALLCLOCK_SECONDS": length}}.get(kind, {})

    def base(self) -> dict[str, Any]:
        """What all runs of a folder have in common; a change of it makes another ablation."""
        owned, settings = {*self.vary, *self.fixed, *OURS}, {}
        for script, trainer in (self.scripts or {None: self.trainer}).items():
            settings |= trainer.settings(self.configurations.get(script))
        return {
            "command": self.trainer.command_line,
            **({} if self.scripts else {"script": sha256(self.trainer)}),
            "mode": " ".join(self.mode) if self.mode else "as set",
        } | {name: value for name, value in settings.items() if name not in owned}

    def own_defaults(self, script: str | None, other: str | None) -> list[str]:
        """The settings that only one of two scripts has, where they are at their default."""
        ours, theirs = (self.configurations.get(name) for name in (script, other))
        if ours is None or theirs is None:
            return []
        own = {name: entry for name, entry in ours.items() if name not in theirs}
        return [written(k, v["value"]) for k, v in own.items() if v.get("source") == "default"]

    def own_lines(self) -> list[str]:
        """Said before anything runs, as the default of a recipe's setting is off."""
        first, *others = self.scripts or [None]
        pairs = [pair for other in others for pair in ((other, first), (first, other))]
        return [
            f"only {script}, not {other}, has these settings, at their defaults: {defaults}"
            for script, other in pairs
            if (defaults := ", ".join(self.own_defaults(script, other)))
        ]

    def description(self) -> str:
        length = f"{self.mode[1]} {self.mode[0]} each" if self.mode else "as long as set"
        count = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        seeds = ", ".join(map(str, self.seeds))
        varied = ", ".join([*(["the script"] if self.scripts else []), *self.vary])
        return f"{varied}: {len(self.arms)} arms x {count} ({seeds}), {length}"


def sha256(trainer: Trainer) -> str:
    return hashlib.sha256(trainer.source().encode()).hexdigest()[:16]


# --- the folder ---


class Folder:
    """Where an ablation lives: manifest.json, the report, runs/<RUN_ID>/ with the logs of each."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest_path = path, path / "manifest.json"
        self.scripts: dict[str, str] = {}  # of all runs in it: name, sha256

    def open(self, base: Mapping[str, Any], scripts: Mapping[str, str]) -> None:
        """Takes the folder for this ablation, if it is new or this ablation's. Values, seeds and
        scripts may be new; a script of a run that was made may not have changed."""
        other, made, known = "name another --out", dict(base), {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.manifest_path.exists():
                manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
                made, known = dict(manifest["base"]), dict(manifest.get("scripts", {}))
        except OSError as error:
            raise ToolError(f"{self.path}: cannot be used: {error.strerror}: {other}") from error
        except (ValueError, KeyError, TypeError) as error:
            message = "cannot be read: name another --out, or remove the folder"
            raise ToolError(f"{self.manifest_path}: {message}") from error
        pairs = [(name, made.get(name), base.get(name)) for name in {**made, **base}]
        pairs += [(name, known[name], scripts[name]) for name in scripts if name in known]
        shown = {None: "not set"}
        changed = [
            f"{name} was {shown.get(old_value, old_value)}, is {shown.get(new_value, new_value)}"
            for name, old_value, new_value in pairs
            if old_value != new_value
        ]
        if changed:
            reason = f"holds runs made otherwise ({'; '.join(changed)})"
            raise ToolError(f"{self.path}: {reason}: change that back, or {other}")
        self.scripts = {**known, **scripts}
        self.save(base=made)

    def save(self, **manifest: Any) -> None:
        text = json.dumps({**manifest, "scripts": self.scripts}, indent=1)
        self.manifest_path.write_text(text, encoding="utf-8")

    def work(self, run: Planned) -> Path:
        return self.path / "runs" / run.run_id

    def result(self, run: Planned) -> Run | None:
        """What the run's log says, or what it printed, if it is finished."""
        own = self.work(run) / "logs" / f"{run.run_id}.txt"
        runs = read_logs([own if own.exists() else self.work(run) / "output.txt"]).runs
        if not runs or runs[-1].status != "finished" or runs[-1].seed not in (None, run.seed):
            return None
        read = runs[-1]
        read.seed = run.seed
        read.config = {name.lower(): value for name, value in run.arm.settings} | read.config
        return read


# --- running ---


def run_all(ablation: Ablation, folder: Folder) -> list[str]:
    """Runs what is not finished; returns the failures. Wrong settings end it (ToolError)."""
    from tqdm import tqdm  # optional

    failures = []
    todo = [run for run in ablation.runs if folder.result(run) is None]
    if kept := len(ablation.runs) - len(todo):
        print(f"{kept} of {len(ablation.runs)} runs are finished and kept", flush=True)
    with tqdm(todo, unit="run", disable=None, leave=False) as bar:
        for number, run in enumerate(bar, 1):
            bar.write(f"[{number}/{len(todo)}] {run.label}: started")
            sys.stdout.flush()
            work = launch.fresh_folder(folder.work(run), ablation.trainer)
            trainer = ablation.trainer_of(run.arm)
            trainer = trainer.frozen_in(work) if run.arm.script else trainer
            code = launch.run_child(trainer, work, ablation.settings(run))
            if code == 0 and folder.result(run) is not None:
                continue
            bar.write(f"[{number}/{len(todo)}] {run.label}: FAILED (exit code {code})")
            bar.write(launch.indented(launch.last_lines(work / "output.txt")))
            unfinished = ", but its log has no end" * (code == 0)
            failures.append(f"{run.label}: exit code {code}{unfinished}")
            if code == 2:
                reason = "the trainer refuses its settings (above): nothing more was run"
                raise ToolError(f"{run.label}: {reason}")
    return failures


# --- what came out ---


@dataclass
class Difference:
    """An arm minus the first arm, paired by seed; low, high (95 %) and the smallest difference that
    could have been seen are None for a single pair."""

    arm: str
    metric: str
    unit: str
    pairs: int
    mean: float
    low: float | None = None
    high: float | None = None
    seen_from: float | None = None
    measurable: bool = False

    @property
    def equal(self) -> bool:
        return self.mean == self.low == self.high == 0

    @property
    def judgement(self) -> str:
        if self.low is None:
            return "one pair: no interval"
        if self.measurable:
            return "measurable"
        return "equal to the digit" if self.equal else "not measurable"


@dataclass
class Results:
    """The finished runs of an ablation, and what follows from them."""

    ablation: Ablation
    runs: dict[Planned, Run]

    @property
    def metrics(self) -> list[tuple[str, str, Callable[[Run], float | None]]]:
        """(name, unit, value of a run) of all that is compared."""
        runs = list(self.runs.values())
        unit = BITS if other_tokenizers([headline(run) for run in runs]) else NATS
        result: list[tuple[str, str, Callable[[Run], float | None]]] = [
            ("step time", "ms", lambda run: run.step_times().mean),
            ("input wait", "ms per step", lambda run: run.input_wait_per_step()),
            ("validation time", "s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
            ("loss", unit, lambda run: value_of(headline(run), unit)),
        ]
        if len({run.last_step for run in runs}) > 1:
            result.insert(1, ("steps", "steps", lambda run: float(run.last_step)))
        return result

    def values(self, arm: Arm, value: Callable[[Run], float | None]) -> dict[int, float]:
        """Of each seed, where it is known."""
        values = {run.seed: value(read) for run, read in self.runs.items() if run.arm == arm}
        return {k: v for k, v in values.items() if v is not None and math.isfinite(v)}

    def differences(self) -> list[Difference]:
        result, first_arm = [], self.ablation.arms[0]
        for arm, (name, unit, value) in itertools.product(self.ablation.arms[1:], self.metrics):
            first, second = self.values(first_arm, value), self.values(arm, value)
            seeds = [seed for seed in first if seed in second]
            if not seeds:
                continue
            a, b = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            about = arm.label, name, unit, len(seeds)
            if len(seeds) == 1:
                result.append(Difference(*about, b[0] - a[0]))
                continue
            test = paired(a, b)
            figures = test.difference, test.low, test.high, test.seen_from
            result.append(Difference(*about, *figures, test.measurable))
        return result

    def refusals(self) -> dict[str, list[str]]:
        """Of each arm, why its runs and the first arm's are no ablation of what was varied."""
        result, groups = {}, {arm: [] for arm in self.ablation.arms}
        for run, read in self.runs.items():
            groups[run.arm].append(read)
        (first, ours), *others = groups.items()
        for arm, theirs in others:
            why = []
            for runs in (ours, theirs):
                mixed = telling(runs)
                why += [f"its runs or the first arm's differ in {', '.join(mixed)}"] * bool(mixed)
            varied = {name for name, _ in {*arm.settings} - {*first.settings}}
            data = same_data([*ours, *theirs])
            only_overlap = varied <= OVERLAP and arm.script == first.script
            if only_overlap and data and len(data[1]) > 1:
                crcs = " and ".join(data[1])
                why.append(f"it trained on other data (data_crc {crcs} at step {data[0]})")
            if why:
                result[arm.label] = why
        return result

    def repeats(self) -> list[Arm]:
        """The arms that computed the same as the first one: in every seed that both have, all
        losses are equal to the digit."""
        first_arm, *others = self.ablation.arms
        first, result = self.losses(first_arm), []
        for arm in others:
            theirs = self.losses(arm)
            seeds = first.keys() & theirs.keys()
            if seeds and all(first[seed] == theirs[seed] for seed in seeds):
                result.append(arm)
        return result

    def losses(self, arm: Arm) -> dict[int, tuple[Any, ...]]:
        """Of each seed, all losses that the log prints."""
        results = {run.seed: losses(read) for run, read in self.runs.items() if run.arm == arm}
        return {seed: printed for seed, printed in results.items() if any(printed)}


def losses(run: Run) -> tuple[Any, ...]:
    """What a run computed: the losses of its steps, its validations and its result."""
    result = headline(run)
    steps = [(step.step, step.train_loss) for step in run.steps]
    validations = [(item.step, item.val_loss, item.val_bpb) for item in run.validations]
    return steps, validations, result and (result.val_loss, result.val_bpb)


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    rows = [
        [
            d.arm,
            d.metric,
            str(d.pairs),
            f"{d.mean:+.4g} {d.unit}",
            "-" if d.low is None else f"{d.low:+.4g} to {d.high:+.4g}",
            cell(d.seen_from, ".4g"),
            d.judgement,
        ]
        for d in differences
    ]
    head = ["arm", "quantity", "pairs", "difference", "95 % interval", "detectable", "verdict"]
    title = (
        "Differences from the first arm, paired by seed (detectable: the smallest that could be)"
    )
    return [title, *table(head, rows, 2)] if rows else []


def verdict(results: Results, differences: Sequence[Difference]) -> str:
    """The outcome in one sentence."""
    first, refused = results.ablation.arms[0].label, results.refusals()
    clauses = [f"{arm} is no ablation: {'; '.join(why)}" for arm, why in refused.items()]
    changes = [d for d in differences if d.arm not in refused]
    clear, rest = [d for d in changes if d.measurable], [d for d in changes if not d.measurable]
    clauses += [
        f"{d.arm} changes {d.metric} by {d.mean:+.4g} {d.unit} "
        f"(95 % interval {d.low:+.4g} to {d.high:+.4g}) against {first}"
        for d in clear
    ]
    if not changes:
        clauses += ["no pair of finished runs"] if not refused else []
    elif all(d.low is None for d in changes):
        reason = "one seed per pair cannot tell whether a difference is more than chance"
        clauses.append(f"{reason}: the same command with --seeds 3 can")
    elif rest:
        open_ones = ", ".join(dict.fromkeys(_not_seen(d) for d in rest))
        arms = f"between {changes[0].arm} and {first}" if len({d.arm for d in changes}) == 1 else ""
        clauses.append(f"no measurable difference {arms}: {open_ones}".replace(" :", ":"))
    repeats = [arm for arm in results.repeats() if arm.label not in refused]
    clauses += [repeat_clause(results.ablation, arm) for arm in repeats]
    return "Verdict: " + "; ".join(clauses)


def repeat_clause(ablation: Ablation, arm: Arm) -> str:
    """That an arm computed the same as the first one; of two scripts, which settings may be off."""
    first = ablation.arms[0]
    text = f"{arm.label} computed the same as {first.label}: all losses are equal to the digit"
    for script, other in ((arm.script, first.script), (first.script, arm.script)):
        if defaults := ablation.own_defaults(script, other):
            text += f" (is {script} switched off by the default {', '.join(defaults)}? Compare two "
            text += f"values: --vary {defaults[0]},VALUE -- python3 {script}; or write another "
            text += "default: records/recipe.py apply with --set)"
    return text


def _not_seen(d: Difference) -> str:
    if d.equal:
        return f"{d.metric} equal to the digit"
    if d.seen_from is None:
        return d.metric
    reach = f"{d.seen_from:.3g} {d.unit}"
    return f"{d.metric} ({d.pairs} seeds can detect a difference of {reach} or more)"


def conclude(ablation: Ablation, folder: Folder, failures: Sequence[str]) -> int:
    """Prints and keeps the report of what is finished: the verdict first."""
    runs = {run: read for run in ablation.runs if (read := folder.result(run)) is not None}
    if not runs:
        print("no run is finished: what they printed is above")
        return 1
    results = Results(ablation, runs)
    differences = results.differences()
    summary = verdict(results, differences)
    blocks = [
        [summary, *ablation.own_lines()],
        difference_lines(differences),
        ["Failed", *(f"  {failure}" for failure in failures)] if failures else [],
        report(Logs(runs=list(runs.values()))),
        [ablation.description()],
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}\n")
    (folder.path / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    entries = [asdict(d) for d in differences]
    folder.save(base=ablation.base(), verdict=summary, differences=entries)
    arms = [[read for run, read in runs.items() if run.arm == arm] for arm in ablation.arms]
    picture = folder.path / "picture.png"
    print(draw([arm for arm in arms if arm], picture) or f"picture: {picture}")
    print(f"report: {folder.path / 'report.txt'}   logs: {folder.path / 'runs'}")
    return int(bool(failures or results.refusals()))


def draw(arms: Sequence[Sequence[Run]], path: Path) -> str:
    import picture  # numpy and matplotlib

    return picture.attempt(arms, picture.Wish(path))


def check_names(ablation: Ablation, arm: Arm, configuration: Mapping[str, Any] | None) -> None:
    """Names that the trainer does not know vary nothing, unless they are its surroundings'."""
    trainer = ablation.trainer_of(arm)
    source, known = trainer.source(), [name.upper() for name in configuration or {}]
    for name in ablation.vary:
        if name in known or re.search(rf"\b{name}\b", source) or SURROUNDINGS.match(name):
            continue
        close = difflib.get_close_matches(name.upper(), known, 1, 0.7)
        script = trainer.script or "the command"
        remedy = f"did you mean {close[0]}?" if close else "vary a name that its --help lists"
        raise ToolError(f"--vary {name}: {script} has no such setting: {remedy}")


def check_settings(ablation: Ablation) -> dict[str | None, Configuration | None]:
    """A wrong value is found now, not after the runs before it; each value is asked about once for
    each script."""
    configurations, seen = {}, set()
    for arm in ablation.arms:
        asked = {(arm.script, setting) for setting in arm.settings} or {(arm.script, None)}
        if not seen >= asked:
            settings = {**ablation.fixed, **dict(arm.settings)}
            configuration = ablation.trainer_of(arm).configuration(**settings)
            seen |= asked
            check_names(ablation, arm, configuration)
            configurations.setdefault(arm.script, configuration)
    return configurations


def warn_of_warmdown(configurations: dict[str | None, dict[str, Any] | None]) -> None:
    """Rates that begin at a few percent make arms look equal."""
    names = ("iterations", "warmdown_iters", "max_wallclock_seconds")
    for script, configuration in configurations.items():
        if not configuration or not all(name in configuration for name in names):
            continue
        steps, warmdown, cap = (configuration[name]["value"] for name in names)
        if cap <= 0 and steps < warmdown:
            print(
                f"warning: {script or 'the script'}: WARMDOWN_ITERS={warmdown} is more than the "
                f"{steps} steps: learning rates begin at {100 * steps / warmdown:.1f} % of what is "
                "set: set a lower WARMDOWN_ITERS"
            )


def ablate(options: argparse.Namespace, trainer: Trainer) -> int:
    lengths = (("steps", options.steps), ("seconds", options.seconds))
    mode = next((length for length in lengths if length[1] is not None), None)
    vary, seeds = parse_vary(options.vary), parse_seeds(options.seeds, os.environ)
    scripts = parse_scripts(options.script, trainer)
    ablation = Ablation(trainer, vary, seeds, mode, scripts)
    names = [*(["script"] if scripts else []), *vary]
    folder = Folder(options.out or Path("logs") / f"ablate-{'-'.join(names).lower()}"[:120])
    if twice := next((name for name in vary if name in ablation.fixed), None):
        raise ToolError(f"--vary {twice}: --{mode[0]} sets it: leave out one of them")
    ablation.configurations = check_settings(ablation)
    print(f"{ablation.description()}; {len(ablation.runs)} runs")
    warn_of_warmdown(ablation.configurations)
    for line in ablation.own_lines():
        print(line)
    folder.open(ablation.base(), {name: sha256(command) for name, command in scripts.items()})
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
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ablate.py --vary NAME=v1,v2 [...] [--script A.py,B.py] [options] -- COMMAND",
    )
    add = parser.add_argument
    help_text = "a setting and its values; may be repeated"
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help=help_text)
    help_text = "scripts to use instead of the command's; each must be one complete file"
    add("--script", metavar="A.py,B.py", help=help_text)
    help_text = "how many seeds from SEED (1337) on, or a list: 1337,42,7 (default: 3)"
    add("--seeds", default="3", help=help_text)
    length = parser.add_mutually_exclusive_group().add_argument
    help_text = "train N steps: sets ITERATIONS=N and MAX_WALLCLOCK_SECONDS=0"
    length("--steps", type=above_zero, metavar="N", help=help_text)
    help_text = "train S seconds: sets MAX_WALLCLOCK_SECONDS=S; ITERATIONS is not changed"
    length("--seconds", type=above_zero, metavar="S", help=help_text)
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of all results (default: logs/ablate-<names>)",
    )
    options, command = launch.parse_with_command(parser, arguments)
    if not (options.vary or options.script):
        parser.error("nothing varies: name --vary NAME=v1,v2 or --script A.py,B.py")
    return options, command


def above_zero(text: str) -> str:
    """A setting's value as it was written."""
    if not re.fullmatch(r"\d{0,9}(\.\d+)?", text) or not float(text or 0):
        raise argparse.ArgumentTypeError(f"a number above 0, not {text}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    options, command = parse(sys.argv[1:] if arguments is None else arguments)
    return launch.run_tool(lambda: ablate(options, Trainer(command, Path.cwd(), os.environ)))


if __name__ == "__main__":
    sys.exit(cli.run(main))
