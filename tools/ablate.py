"""Vary a trainer's settings or its script, and measure what changes.
Runs take turns and are paired by seed. Differences are printed with 95 % intervals.

    # on a laptop: small models, about a minute and a half a run
    python3 tools/ablate.py --vary MLP_MULT=2,4 -- python3 data/quickstart.py
    ITERATIONS=2000 MAX_WALLCLOCK_SECONDS=0 python3 tools/ablate.py --vary MATRIX_LR=0.03,0.04 \\
        --vary MLP_MULT=2,3 -- torchrun --standalone --nproc_per_node=8 train_gpt.py
    python3 tools/ablate.py --script train_gpt.py,ema.py -- python3 train_gpt.py

Settings are environment variables. Each combination of values is an arm. The other arms are
compared with the first one. --script runs the command with each of these scripts. Each round runs
every arm with one seed, and starts with the next arm. python3 and torchrun are those of the Python
that runs this tool. Any command works that writes logs/<RUN_ID>.jsonl where it is started.

If you give the same command again, finished runs are kept, and others are run again; you may add
seeds and values. If a run fails, the other runs continue.

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
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
import launch
import picture
from cli import ToolError
from configuration import telling
from launch import OURS, Trainer
from results import headline
from runs import Logs, Run, read_logs
from significance import BITS, NATS, faults_of_split, other_tokenizers, paired, value_of
from tables import report

# Variables that a trainer need not name, and that change its runs.
SURROUNDINGS = re.compile(r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON")


@dataclass(frozen=True)
class Arm:
    """A combination of values, with its script where scripts vary."""

    settings: tuple[tuple[str, str], ...]
    script: str | None = None  # as it was given

    @property
    def label(self) -> str:
        parts = [self.script] if self.script else []
        return " ".join([*parts, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def slug(self) -> str:
        """Its values in a RUN_ID; with a hash where they are long or have other signs."""
        values = [value for _, value in self.settings]
        values = [Path(self.script).stem, *values] if self.script else values
        text = "-".join(values)
        if re.fullmatch(r"[A-Za-z0-9.]+(-[\w.]+)*", text, re.ASCII) and len(text) <= 60:
            return text
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", text)[:40].strip("-.")
        return f"{plain}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}".lstrip("-")


@dataclass(frozen=True)
class Planned:
    """A run of the plan."""

    arm: Arm
    seed: int

    @property
    def label(self) -> str:
        return f"{self.arm.label} seed {self.seed}"


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """NAME=v1,v2 each."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ToolError(f"--vary {text}: write NAME=value,value, such as TRAIN_PREFETCH=1,0")
        if name in OURS:
            instead = "; vary another setting, with --seeds 1,2" if name == "SEED" else ""
            raise ToolError(f"--vary {text}: every run has its own {name}{instead}")
        settings.setdefault(name, []).extend(value.strip() for value in values.split(","))
        if "" in settings[name] or len(set(settings[name])) < len(settings[name]):
            raise ToolError(f"--vary {text}: values are comma-separated, distinct and not empty")
    return settings


def parse_scripts(text: str | None, trainer: Trainer) -> dict[str | None, Trainer]:
    """Each script with the command that runs it; None: the command's own."""
    if text is None:
        return {None: trainer}
    trainers = {name.strip(): trainer.with_script(name.strip()) for name in text.split(",")}
    scripts = {Path(name).read_bytes() for name in trainers}
    if len(scripts) < text.count(",") + 1:
        raise ToolError(f"--script {text}: scripts must differ, not only in their names")
    return trainers


def parse_seeds(text: str) -> list[int]:
    """3: so many, from SEED (1337) on; 1337,42: these."""
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
        if "," not in text:
            first = int(os.environ.get("SEED", 1337))
            numbers = list(range(first, first + numbers[0]))
    except ValueError as error:
        remedy = "write how many, such as 3, or which, such as 1337,42,7"
        raise ToolError(f"--seeds {text}: {remedy}") from error
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ToolError(f"--seeds {text}: one at least, whole numbers from 0, each once")
    return numbers


class Ablation:
    """What is run, and where its report lies: report.txt, picture.png, what each run printed, and
    manifest.json, which says how each run was made. Logs are logs/<RUN_ID>.*, as always."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.vary = parse_vary(options.vary)
        self.seeds = parse_seeds(options.seeds)
        self.trainers = parse_scripts(options.script, Trainer(options.command))
        self.arms = [
            Arm(tuple(zip(self.vary, values, strict=True)), script)
            for script in self.trainers
            for values in itertools.product(*self.vary.values())
        ]
        if len(self.arms) < 2:
            raise ToolError("nothing varies: name two values, such as MLP_MULT=2,4, or scripts")
        self.runs = [  # each round begins one arm further, so that no arm always comes first
            Planned(self.arms[(turn + place) % len(self.arms)], seed)
            for turn, seed in enumerate(self.seeds)
            for place in range(len(self.arms))
        ]
        self.varied = [*(["script"] if options.script else []), *self.vary]
        name = f"ablate-{'-'.join(self.varied).lower()}"[:80]
        self.folder = options.out or Path("logs") / name
        if not re.fullmatch(r"\w[\w.-]*", self.folder.name, re.ASCII):
            raise ToolError(f"--out {self.folder}: its name begins each RUN_ID: use a-z 0-9 . _ -")
        self.manifest_path = self.folder / "manifest.json"
        self.made: dict[str, dict[str, str]] = {}

    def run_id(self, run: Planned) -> str:
        return f"{self.folder.name}-{run.arm.slug}-seed{run.seed}"

    def settings(self, run: Planned) -> dict[str, str]:
        """The variables of a run."""
        own = {"SEED": str(run.seed), "RUN_ID": self.run_id(run)}
        return {**dict(run.arm.settings), **own}

    def log(self, run: Planned) -> Path:
        return Path("logs", f"{self.run_id(run)}.jsonl")

    def result(self, run: Planned) -> Run | None:
        """What the run's log says, if it is finished."""
        runs = read_logs([self.log(run)]).runs if self.made.get(self.run_id(run)) else []
        ours = [one for one in runs if one.config.get("run_id") in (None, self.run_id(run))]
        return ours[0] if ours and ours[0].status == "finished" and headline(ours[0]) else None

    def how(self, run: Planned, log: Run | None) -> dict[str, str]:
        """How a run is made now: its command, its script, and the settings that its log knows."""
        trainer = self.trainers[run.arm.script]
        environ = {**os.environ, **self.settings(run)}
        known = {name.upper() for name in log.config} - {*OURS} if log else set()
        script = hashlib.sha256(trainer.source()).hexdigest()[:16]
        settings = {name: environ[name] for name in sorted(known & environ.keys())}
        return {"command": shlex.join(trainer.given), "script": script, **settings}

    def open(self) -> None:
        """Reads which runs this folder has; a run that was made in another way ends the tool."""
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("logs").mkdir(exist_ok=True)
        other = "change that back, or name another --out"
        if self.manifest_path.exists():
            try:
                self.made = dict(json.loads(self.manifest_path.read_text(encoding="utf-8"))["runs"])
            except (ValueError, KeyError, TypeError) as error:
                raise ToolError(f"{self.manifest_path}: cannot be read: remove it") from error
        for run in self.runs:
            run_id, log = self.run_id(run), self.result(run)
            if run_id not in self.made and self.log(run).exists():
                raise ToolError(f"{self.log(run)}: not a run of {self.folder}: name another --out")
            if log and (changed := differences_of(self.made[run_id], self.how(run, log))):
                raise ToolError(f"{self.log(run)}: was made otherwise ({changed}): {other}")

    def save(self, run: Planned, how: dict[str, str]) -> None:
        self.made[self.run_id(run)] = how
        self.manifest_path.write_text(json.dumps({"runs": self.made}, indent=1), encoding="utf-8")

    def check_settings(self) -> None:
        """Finds a wrong name or value before anything runs, where the script can be asked."""
        for arm in self.arms:
            trainer = self.trainers[arm.script]
            known = trainer.configuration(dict(arm.settings))
            if known is not None:
                self.check_names(known, str(trainer.script))

    def check_names(self, known: Mapping[str, Any], where: str) -> None:
        """Names that the trainer does not know vary nothing, unless they are its surroundings'."""
        names = [name.upper() for name in known]
        for name in self.vary:
            if name not in names and not SURROUNDINGS.match(name):
                close = difflib.get_close_matches(name.upper(), names, 1, 0.7)
                remedy = f"did you mean {close[0]}?" if close else "its --help lists all of them"
                raise ToolError(f"--vary {name}: {where} has no such setting: {remedy}")

    def check_values(self, run: Planned, log: Run) -> None:
        """A command may set a variable itself: then its runs vary nothing."""
        for name, text in run.arm.settings:
            had = log.config.get(name.lower())
            if isinstance(had, int | float) and had != float(text):
                self.save(run, {})  # it is run again
                words = "the command sets it itself: take it out of the command"
                raise ToolError(f"{name}={text}: the run had {had}: {words}")

    def run_all(self) -> list[str]:
        """Runs what is not finished; returns the failures. Wrong settings end it (ToolError)."""
        todo = [run for run in self.runs if self.result(run) is None]
        failures = []
        if kept := len(self.runs) - len(todo):
            print(f"{kept} of {len(self.runs)} runs are finished and kept")
        for number, run in enumerate(todo, 1):
            place = f"[{number}/{len(todo)}] {run.label}"
            print(f"{place}: started", flush=True)
            begun = time.monotonic()
            code, log = self.run_one(run)
            if code == 0 and log:
                self.check_names(log.config, str(self.log(run)))
                self.check_values(run, log)
                print(f"{place}: finished in {time.monotonic() - begun:.0f} s", flush=True)
                continue
            unfinished = f", but {self.log(run)} has no end" * (code == 0)
            print(f"{place}: FAILED (exit code {code}){unfinished}")
            print(launch.last_lines(self.folder / f"{self.run_id(run)}.out"), flush=True)
            failures.append(f"{run.label}: exit code {code}{unfinished}")
            if code == 0 and not self.log(run).exists():
                raise ToolError(f"{self.log(run)} was not written: name a command that trains")
            if code == 2:
                reason = "the trainer refuses its settings (above): nothing more was run"
                raise ToolError(f"{run.label}: {reason}")
        return failures

    def run_one(self, run: Planned) -> tuple[int, Run | None]:
        """Runs it from its beginning; what an unfinished run of it left is removed."""
        run_id = self.run_id(run)
        for path in Path("logs").glob(f"{run_id}.*"):
            path.unlink()
        shutil.rmtree(Path("checkpoints", run_id), ignore_errors=True)
        self.save(run, {})  # it is ours, and not finished
        output = self.folder / f"{run_id}.out"
        code = launch.run_child(self.trainers[run.arm.script], self.settings(run), output)
        runs = read_logs([self.log(run)]).runs
        self.save(run, self.how(run, runs[0] if runs else None))
        log = self.result(run)
        return code, log


def differences_of(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """In what two ways to make a run differ, in words; equal: empty."""
    pairs = {name: (old.get(name, "not set"), new.get(name, "not set")) for name in {**old, **new}}
    return "; ".join(f"{name} was {a}, is {b}" for name, (a, b) in pairs.items() if a != b)


@dataclass
class Difference:
    """An arm minus the first arm, paired by seed; the interval is None for a single pair."""

    arm: str
    metric: str
    unit: str
    pairs: int
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def measurable(self) -> bool:
        return self.low is not None and not self.low <= 0 <= self.high

    @property
    def equal(self) -> bool:
        return self.mean == self.low == self.high == 0

    @property
    def judgement(self) -> str:
        if self.low is None:
            return "one pair: no interval"
        return "measurable" if self.measurable else "equal" if self.equal else "not measurable"

    @property
    def interval(self) -> str:
        return "-" if self.low is None else f"{self.low:+.4g} to {self.high:+.4g}"


class Results:
    """The finished runs of an ablation, and what follows from them."""

    def __init__(self, ablation: Ablation) -> None:
        found = {run: ablation.result(run) for run in ablation.runs}
        self.runs = {run: log for run, log in found.items() if log}
        self.first, *self.others = ablation.arms

    def of(self, arm: Arm) -> dict[int, Run]:
        return {run.seed: log for run, log in self.runs.items() if run.arm == arm}

    @property
    def metrics(self) -> list[tuple[str, str, Callable[[Run], float | None]]]:
        """(name, unit, value of a run) of all that is compared."""
        unit = BITS if other_tokenizers([headline(run) for run in self.runs.values()]) else NATS
        result: list[tuple[str, str, Callable[[Run], float | None]]] = [
            ("loss", unit, lambda run: value_of(headline(run), unit)),
            ("step time", "ms", lambda run: run.step_ms),
            ("input wait", "ms per step", lambda run: run.input_wait_per_step()),
            ("validation time", "s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
        ]
        if len({run.last_step for run in self.runs.values()}) > 1:
            result.insert(1, ("steps", "steps", lambda run: float(run.last_step)))
        return result

    def differences(self, arm: Arm) -> list[Difference]:
        result, first, second = [], self.of(self.first), self.of(arm)
        for name, unit, value in self.metrics:
            pairs = [(value(first[seed]), value(second[seed])) for seed in first if seed in second]
            known = [
                pair for pair in pairs if all(v is not None and math.isfinite(v) for v in pair)
            ]
            if len(known) == 1:
                result.append(Difference(arm.label, name, unit, 1, known[0][1] - known[0][0]))
            elif known:
                test = paired(*zip(*known, strict=True))
                figures = test.difference, test.low, test.high
                result.append(Difference(arm.label, name, unit, len(known), *figures))
        return result

    def refusals(self, arm: Arm) -> list[str]:
        """Why the runs of an arm and of the first one do not measure what was varied."""
        ours, theirs = list(self.of(self.first).values()), list(self.of(arm).values())
        mixed = dict.fromkeys([*telling(ours), *telling(theirs)])
        why = [f"runs of one arm differ in {', '.join(mixed)}"] if mixed else []
        why += faults_of_split([*ours, *theirs], ["partial_val"])
        return why

    def verdict(self, arm: Arm) -> str:
        """What is known about an arm, in one line."""
        text, changes = f"{arm.label} against {self.first.label}: ", self.differences(arm)
        if why := self.refusals(arm):
            return text + f"not an ablation: {'; '.join(why)}"
        if not changes:
            return text + "no pair of finished runs"
        if changes[0].low is None:
            return text + "one seed cannot tell a difference from chance: add --seeds 3"
        clear = [
            f"{d.metric} {d.mean:+.4g} {d.unit} ({d.interval})" for d in changes if d.measurable
        ]
        rest = ", ".join(d.metric for d in changes if not d.measurable)
        text += ", ".join(clear) or "nothing is measurable"
        text += f"; not measurable: {rest}" if clear and rest else ""
        if changes[0].metric == "loss" and changes[0].equal:
            text += "; the losses are equal to the digit: what was varied computes the same"
        return text


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    rows = [
        [d.arm, d.metric, str(d.pairs), f"{d.mean:+.4g} {d.unit}", d.interval, d.judgement]
        for d in differences
    ]
    head = ["arm", "quantity", "pairs", "difference", "95 % interval", "verdict"]
    title = "Differences from the first arm, paired by seed"
    return [title, *cli.table(head, rows)] if rows else []


def conclude(ablation: Ablation, failures: Sequence[str]) -> int:
    """Prints and keeps the report of what is finished: the verdict first."""
    results = Results(ablation)
    if not results.runs:
        print("no run is finished: what they printed is above")
        return 1
    differences = [d for arm in results.others for d in results.differences(arm)]
    verdicts = [results.verdict(arm) for arm in results.others]
    blocks = [
        ["Verdict (differences with their 95 % intervals)", *(f"  {line}" for line in verdicts)],
        difference_lines(differences),
        ["Failed", *(f"  {failure}" for failure in failures)] if failures else [],
        report(Logs(runs=list(results.runs.values()))),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}\n")
    (ablation.folder / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    arms = [list(results.of(arm).values()) for arm in ablation.arms]
    path = ablation.folder / "picture.png"
    names = [arm.label for arm in ablation.arms]
    print(picture.attempt(arms, path, names) or f"picture: {path}")
    print(f"report: {ablation.folder / 'report.txt'}   logs: logs/{ablation.folder.name}-*")
    return int(bool(failures or any(map(results.refusals, results.others))))


def ablate(options: argparse.Namespace) -> int:
    import scipy  # noqa: F401  (before hours of runs)

    ablation = Ablation(options)
    ablation.check_settings()
    words = f"{len(ablation.arms)} arms x {len(ablation.seeds)} seeds: {len(ablation.runs)} runs"
    print(f"{' and '.join(ablation.varied)}: {words}")
    ablation.open()
    try:
        failures = ablation.run_all()
    except KeyboardInterrupt:
        kept = sum(ablation.result(run) is not None for run in ablation.runs)
        print(f"\ninterrupted: {kept} of {len(ablation.runs)} runs are finished and kept; ", end="")
        print("give the same command again to run the others")
        return 130
    return conclude(ablation, failures)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ablate.py --vary NAME=v1,v2 [...] [--script A.py,B.py] [options] -- COMMAND",
    )
    add = parser.add_argument
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help="may be repeated")
    add("--script", metavar="A.py,B.py", help="complete scripts, instead of the command's")
    help_text = "how many seeds from SEED (1337) on, or a list: 1337,42,7 (default: 3)"
    add("--seeds", default="3", help=help_text)
    help_text = "folder of the report; its name begins each RUN_ID (default: logs/ablate-<names>)"
    add("--out", type=Path, metavar="FOLDER", help=help_text)
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    options, stray = parser.parse_known_args(words[:at])
    if stray:
        parser.error(f"{stray[0]}: values are one word, with commas; the command stands after --")
    options.command = words[at + 1 :]
    if len(options.command) == 1:  # perhaps in quotes
        options.command = shlex.split(options.command[0])
    if not (options.vary or options.script):
        parser.error("nothing varies: name --vary NAME=v1,v2 or --script A.py,B.py")
    if not options.command:
        parser.exit(2, "error: name the command after --, such as: -- python3 train_gpt.py\n")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # as Ctrl-C
    return cli.run(lambda: ablate(options), refused=2)


if __name__ == "__main__":
    sys.exit(main())
