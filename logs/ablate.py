"""Vary a trainer's settings and measure what they do:
runs take turns, are paired by seed, end in 95 % intervals.

    python3 logs/ablate.py --vary TRAIN_PREFETCH=1,0 --seeds 3 --steps 200 -- python3 train_gpt.py
    python3 logs/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 --seconds 600 -- \\
        torchrun --standalone --nproc_per_node=8 train_gpt.py

Settings are environment variables. Each combination of values is an arm, the first one is what the
others are held against. A repeat runs every arm with one seed, beginning one arm further each time.
python3 and torchrun mean those of the Python that runs this tool.

Each run has a folder of its own. The same command again keeps the runs that are finished, redoes
the others and adds new seeds and values. A run that fails is shown, and the rest goes on.

Exit code: 0 done, 1 a run failed or is no part of an ablation, 2 wrong usage or settings,
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

import compare
import launch
import stats
from launch import OURS, ToolError, Trainer
from read_log import Logs, Run, read_logs

try:
    from tqdm import tqdm
except ImportError:
    sys.exit(f"error: {launch.missing('tqdm')}")

# Variables that a trainer need not name, and that change its runs.
SURROUNDINGS = re.compile(r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON")
# They change when a batch is read, never which.
OVERLAP = {"TRAIN_PREFETCH", "TRAIN_COPY_STREAM", "VAL_PREFETCH", "VAL_COPY_STREAM"}
OVERLAP |= {"TRAIN_PREFETCH_QUEUE"}

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
    """A run of the plan."""

    arm: Arm
    seed: int

    @property
    def run_id(self) -> str:
        return f"{self.arm.slug}_seed{self.seed}"

    @property
    def words(self) -> str:
        return f"{self.arm.label} seed {self.seed}"


def plan(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Planned]:
    """All runs in their order: a repeat a seed, rotated by one arm each, so that no arm always
    comes first."""
    result = []
    for repeat, seed in enumerate(seeds):
        turn = repeat % len(arms)
        result += [Planned(arm, seed) for arm in (*arms[turn:], *arms[:turn])]
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
    mode: tuple[str, str] | None  # ("steps" or "seconds", how many)
    configuration: dict[str, dict[str, Any]] | None = None  # as the trainer resolves it
    arms: list[Arm] = field(init=False)
    runs: list[Planned] = field(init=False)

    def __post_init__(self) -> None:
        combinations = itertools.product(*self.vary.values())
        self.arms = [Arm(tuple(zip(self.vary, values, strict=True))) for values in combinations]
        self.runs = plan(self.arms, self.seeds)

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
        trainer, owned = self.trainer, {*self.vary, *self.fixed, *OURS}
        settings = trainer.settings(self.configuration).items()
        return {
            "command": trainer.words,
            "script": hashlib.sha256(trainer.source().encode()).hexdigest()[:16],
            "mode": " ".join(self.mode) if self.mode else "as set",
        } | {name: value for name, value in settings if name not in owned}

    def words(self) -> str:
        length = f"{self.mode[1]} {self.mode[0]} each" if self.mode else "as long as set"
        count = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        seeds = ", ".join(map(str, self.seeds))
        return f"{', '.join(self.vary)}: {len(self.arms)} arms x {count} ({seeds}), {length}"


# --- the folder ---


class Folder:
    """Where an ablation lives: manifest.json, the report, runs/<RUN_ID>/ with the logs of each."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest_path = path, path / "manifest.json"

    def open(self, base: Mapping[str, Any]) -> None:
        """Takes the folder for this ablation, if it is new or this ablation's."""
        other, made = "name another --out", dict(base)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.manifest_path.exists():
                made = dict(json.loads(self.manifest_path.read_text(encoding="utf-8"))["base"])
        except OSError as error:
            raise ToolError(f"{self.path}: cannot be used: {error.strerror}: {other}") from error
        except (ValueError, KeyError, TypeError) as error:
            words = "cannot be read: name another --out, or remove the folder"
            raise ToolError(f"{self.manifest_path}: {words}") from error
        pairs = ((name, made.get(name), base.get(name)) for name in {**made, **base})
        if changed := [f"{name} was {one}, is {two}" for name, one, two in pairs if one != two]:
            words = f"holds runs made otherwise ({'; '.join(changed)})"
            raise ToolError(f"{self.path}: {words}: {other}")
        self.save(base=made)

    def save(self, **manifest: Any) -> None:
        self.manifest_path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def work(self, run: Planned) -> Path:
        return self.path / "runs" / run.run_id

    def result(self, run: Planned) -> Run | None:
        """What the run's log says, or what it printed, if it is finished."""
        own = self.work(run) / "logs" / f"{run.run_id}.txt"
        found = read_logs([own if own.exists() else self.work(run) / "output.txt"]).runs
        if not found or found[-1].status != "finished" or found[-1].seed not in (None, run.seed):
            return None
        read = found[-1]
        read.seed = run.seed
        read.config = {name.lower(): value for name, value in run.arm.settings} | read.config
        return read


# --- running ---


def run_all(ablation: Ablation, folder: Folder) -> list[str]:
    """Runs what is not finished; returns the failures. Wrong settings end it (ToolError)."""
    failures = []
    todo = [run for run in ablation.runs if folder.result(run) is None]
    if kept := len(ablation.runs) - len(todo):
        print(f"{kept} of {len(ablation.runs)} runs are finished and kept", flush=True)
    with tqdm(todo, unit="run", disable=None, leave=False) as bar:
        for number, run in enumerate(bar, 1):
            bar.write(f"[{number}/{len(todo)}] {run.words}: started")
            sys.stdout.flush()
            work = launch.fresh_folder(folder.work(run), ablation.trainer)
            code = launch.run_child(ablation.trainer, work, ablation.settings(run))
            if code == 0 and folder.result(run) is not None:
                continue
            bar.write(f"[{number}/{len(todo)}] {run.words}: FAILED (exit code {code})")
            bar.write(launch.indented(launch.last_lines(work / "output.txt")))
            unfinished = ", but its log has no end" * (code == 0)
            failures.append(f"{run.words}: exit code {code}{unfinished}")
            if code == 2:
                words = "the trainer refuses its settings (above): nothing more was run"
                raise ToolError(f"{run.words}: {words}")
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
    def words(self) -> str:
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

    def values(self, arm: Arm, value: Callable[[Run], float | None]) -> dict[int, float]:
        """Of each seed, where it is known."""
        found = {run.seed: value(read) for run, read in self.runs.items() if run.arm == arm}
        return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}

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
            test = stats.paired(a, b)
            clear = not test.low <= 0 <= test.high
            figures = test.difference, test.low, test.high, test.seen_from
            result.append(Difference(*about, *figures, clear))
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
                mixed = [d.name for d in compare.differences(runs)[0] if not d.harmless]
                why += [f"its runs or the first arm's differ in {', '.join(mixed)}"] * bool(mixed)
            varied = {name for name, _ in {*arm.settings} - {*first.settings}}
            data = compare.same_data([*ours, *theirs])
            if varied <= OVERLAP and data and len(data[1]) > 1:
                crcs = " and ".join(data[1])
                why.append(f"it trained on other data (data_crc {crcs} at step {data[0]})")
            if why:
                result[arm.label] = why
        return result


def difference_lines(found: Sequence[Difference]) -> list[str]:
    rows = [
        [
            d.arm,
            d.metric,
            str(d.pairs),
            f"{d.mean:+.4g} {d.unit}",
            "-" if d.low is None else f"{d.low:+.4g} to {d.high:+.4g}",
            compare.cell(d.seen_from, ".4g"),
            d.words,
        ]
        for d in found
    ]
    head = ["arm", "of", "pairs", "difference", "95 % interval", "seen from", "so"]
    title = "Differences from the first arm, paired by seed (seen from: smaller ones cannot be)"
    return [title, *compare.table(head, rows, 2)] if rows else []


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
        ["Failed", *(f"  {failure}" for failure in failures)] if failures else [],
        compare.report(Logs(runs=list(runs.values())), None),
        [ablation.words()],
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}\n")
    (folder.path / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    told = [asdict(d) for d in found]
    folder.save(base=ablation.base(), verdict=summary, differences=told)
    arms = [[read for run, read in runs.items() if run.arm == arm] for arm in ablation.arms]
    picture = folder.path / "picture.png"
    print(compare.draw(arms, picture, "steps", "") or f"picture: {picture}")
    print(f"report: {folder.path / 'report.txt'}   logs: {folder.path / 'runs'}")
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
    ablation = Ablation(trainer, vary, seeds, mode)
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
    print(f"{ablation.words()}; {len(ablation.runs)} runs")
    ablation.configuration = configuration
    folder.open(ablation.base())
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
    add("--vary", action="append", required=True, metavar="NAME=v1,v2", help=words)
    words = "how many seeds, from SEED (1337) on, or which: 1337,42,7 (default: 3)"
    add("--seeds", default="3", help=words)
    length = parser.add_mutually_exclusive_group().add_argument
    words = "fixed steps: ITERATIONS=N, MAX_WALLCLOCK_SECONDS=0"
    length("--steps", type=above_zero, metavar="N", help=words)
    words = "fixed time: MAX_WALLCLOCK_SECONDS=S (ITERATIONS as set)"
    length("--seconds", type=above_zero, metavar="S", help=words)
    add("--out", type=Path, metavar="FOLDER", help="default: logs/ablate-<names>")
    ours, command = launch.split_command(arguments)
    options = parser.parse_args(ours)
    if not command:
        parser.exit(2, "error: name the command after --, such as: -- python3 train_gpt.py\n")
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
    sys.exit(main())
