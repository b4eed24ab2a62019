"""Vary a trainer's settings or its script, and measure what changes.
Runs take turns and are paired by seed. Differences are printed with 95 % intervals, and called
measurable if they are so for all arms together.

    # on a laptop: small models, about a minute and a half a run
    python3 tools/ablate.py --vary MLP_MULT=2,4 -- python3 data/quickstart.py
    ITERATIONS=2000 python3 tools/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 \\
        -- torchrun --standalone --nproc_per_node=8 train_gpt.py
    python3 tools/ablate.py --script train_gpt.py,ema.py -- python3 {script}

The command runs as it is given, with SEED, RUN_ID and the settings in its environment; it must
write logs/<RUN_ID>.jsonl where it is started. Each combination of values is an arm, and the others
are compared with the first one. --script puts each of these scripts in place of {script}. Each
round runs every arm with one seed, and starts with the next arm.

If you give the same command again, finished runs are kept, and others are run again; you may add
seeds and values. If a run fails, the other runs continue.

Exit code: 0 done, 1 a run failed, or cannot be compared, 2 wrong usage, 130 interrupted.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with python3 -P
import cli
from cli import ToolError
from packed import unpacked
from report import plot, report
from runs import Logs, Run, read_log, typed
from samples import Test, faults_of_split, holm, pairs_by_seed, t_test, telling, unit_of, value_of

OURS = ("RUN_ID", "SEED")  # set for each run
SCRIPT = "{script}"  # in the command: a script of --script
TRAINER, QUICKSTART = cli.ROOT / "train_gpt.py", cli.ROOT / "data" / "quickstart.py"
# Variables that a trainer need not name, and that change its runs.
SURROUNDINGS = re.compile(r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON")


class Arm(NamedTuple):
    """A combination of values, with its script where scripts vary."""

    settings: tuple[tuple[str, str], ...]
    script: str | None = None  # as it was given

    @property
    def label(self) -> str:
        parts = [self.script] if self.script else []
        return " ".join([*parts, *(f"{name}={value}" for name, value in self.settings)])


class Planned(NamedTuple):
    """A run of the plan."""

    arm: Arm
    seed: int
    run_id: str
    command: Sequence[str]
    log: Path


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """NAME=v1,v2 each."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ToolError(f"--vary {text}: write NAME=value,value, such as TRAIN_PREFETCH=1,0")
        if name in OURS:
            raise ToolError(f"--vary {text}: every run has its own {name}: see --seeds")
        sign = ";" if ";" in values else ","
        settings.setdefault(name, []).extend(v.strip() for v in values.rstrip(";").split(sign))
        if "" in settings[name] or len(set(settings[name])) < len(settings[name]):
            raise ToolError(f"--vary {text}: values are comma-separated, distinct and not empty")
    return settings


def parse_scripts(text: str | None, command: Sequence[str]) -> list[str | None]:
    """The scripts that take the place of {script}; None: the command has none."""
    if (text is not None) != any(SCRIPT in word for word in command):
        raise ToolError(f"--script A.py,B.py belongs to {SCRIPT} in the command: name both")
    scripts = text.split(",") if text else [None]
    if lacking := [name for name in scripts if name and not Path(name).is_file()]:
        raise ToolError(f"--script {text}: {lacking[0]!r}: no such file: write its path")
    return scripts


def parse_seeds(text: str) -> list[int]:
    """3: so many, from SEED (1337) on; 1337,42: these."""
    if not re.fullmatch(r"(?!0$)\d+(,\d+)*,?", text):
        raise ToolError(f"--seeds {text}: write how many, such as 3, or which, such as 1337,42,7")
    if "," in text:
        return [*dict.fromkeys(map(int, text.rstrip(",").split(",")))]
    first = int(os.environ.get("SEED", 1337))
    return [*range(first, first + int(text))]


class Ablation:
    """What is run, and where its report lies: report.txt, picture.png, what each run printed. Logs
    are logs/<RUN_ID>.*, as always."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.vary, self.command = parse_vary(options.vary), options.command
        self.seeds = parse_seeds(options.seeds)
        self.arms = [
            Arm(tuple(zip(self.vary, values, strict=True)), script)
            for script in parse_scripts(options.script, options.command)
            for values in itertools.product(*self.vary.values())
        ]
        if len(self.arms) < 2:
            raise ToolError("nothing varies: name two values, such as MLP_MULT=2,4, or scripts")
        self.varied = [*(["script"] if options.script else []), *self.vary]
        self.folder = options.out or Path("logs", f"ablate-{'-'.join(self.varied).lower()}"[:80])
        known = self.known_settings()
        self.runs = [  # each round begins one arm further, so that no arm always comes first
            self.planned(self.arms[(turn + place) % len(self.arms)], seed, known)
            for turn, seed in enumerate(self.seeds)
            for place in range(len(self.arms))
        ]

    def command_of(self, arm: Arm) -> list[str]:
        return [word.replace(SCRIPT, arm.script or SCRIPT) for word in self.command]

    def known_settings(self) -> dict[str, set[str]]:
        """Scripts with the names of their settings. What is varied must be one of each script that
        can be asked; where none can be, they are those of train_gpt.py."""
        words = dict.fromkeys(word for arm in self.arms for word in self.command_of(arm))
        known = {word: names for word in words if (names := settings_of(Path(word)))}
        if not known:
            known = {str(TRAINER): settings_of(TRAINER)}
            if all(Path(word).resolve() != QUICKSTART for word in words):
                return known  # another trainer may have other names
        for (script, names), name in itertools.product(known.items(), self.vary):
            if name not in names and not SURROUNDINGS.match(name):
                raise ToolError(f"--vary {name}: {script} has no such setting: see its --help")
        return known

    def planned(self, arm: Arm, seed: int, known: dict[str, set[str]]) -> Planned:
        """Its RUN_ID has a checksum of what decides its result, so that no other run has it: the
        command, the files that it names, train_gpt.py, and the settings that are given."""
        command = self.command_of(arm)
        files = [*command, arm.script or "", *(known.keys() & {str(TRAINER)})]
        contents = [Path(file).read_bytes() for file in files if os.path.isfile(file)]
        names = set().union(*known.values()) - {*OURS}
        settings = {name: os.environ[name] for name in names & os.environ.keys()}
        settings |= dict(arm.settings)
        made_of = hashlib.sha256(repr((command, contents, sorted(settings.items()))).encode())
        words = [arm.script.removesuffix(".py")] if arm.script else []
        words += [value for _, value in arm.settings]
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words))[:40]
        run_id = f"{self.folder.name}-{readable}-{made_of.hexdigest()[:8]}-seed{seed}"
        return Planned(arm, seed, run_id, command, Path("logs", f"{run_id}.jsonl"))

    def result(self, run: Planned) -> Run | None:
        """What the run's log says, if it is finished."""
        runs = read_log(run.log).runs
        if not runs or runs[0].status != "finished" or runs[0].result is None:
            return None
        check(run, runs[0])
        return runs[0]

    def run_all(self) -> list[str]:
        """Runs what is not finished; returns the failures. Wrong settings end it (ToolError)."""
        todo = [run for run in self.runs if self.result(run) is None]
        failures = []
        if kept := len(self.runs) - len(todo):
            print(f"{kept} of {len(self.runs)} runs are finished and kept")
        began = time.monotonic()
        for number, run in enumerate(todo, 1):
            label = f"{run.arm.label} seed {run.seed}"
            place = f"[{number}/{len(todo)}] {label}"
            print(f"{place}: started", flush=True)
            code, log = self.run_one(run)
            if code == 0 and log:
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(f"{place}: finished, about {left:,.0f} s left", flush=True)
                continue
            reason = f"exit code {code}" + f", but {run.log} has no end" * (code == 0)
            print(f"{place}: FAILED ({reason})")
            printed = (self.folder / f"{run.run_id}.out").read_bytes()[-20_000:]
            lines = printed.decode("utf-8", "replace").splitlines()[-12:]
            print("\n".join(f"      {line[:300]}" for line in lines), flush=True)
            failures.append(f"{label}: {reason}")
            if code == 0 and not run.log.exists():
                raise ToolError(f"{run.log} was not written: train, and set no RUN_ID")
            if code == 2:
                reason = "the command refuses what it is given (above): nothing more was run"
                raise ToolError(f"{label}: {reason}")
        return failures

    def run_one(self, run: Planned) -> tuple[int, Run | None]:
        """Runs it from its beginning; what an unfinished run of it left is removed."""
        for path in Path("logs").glob(f"{run.run_id}.*"):
            path.unlink()
        shutil.rmtree(Path("checkpoints", run.run_id), ignore_errors=True)
        settings = dict(run.arm.settings) | {"SEED": str(run.seed), "RUN_ID": run.run_id}
        code = run_child(run.command, settings, self.folder / f"{run.run_id}.out")
        return code, self.result(run)


def check(run: Planned, log: Run) -> None:
    """Did the run have the settings that were varied? Its log says it."""
    for name, text in (*run.arm.settings, ("SEED", str(run.seed))):
        had = log.config.get(name.lower()) if name.isupper() else None
        if had is None and (SURROUNDINGS.match(name) or name == "SEED"):
            continue
        # A path may be another one of the same file.
        if had != typed(text) and Path(str(had)).name != Path(text).name:
            words = "no such setting, or the command sets it itself: take it out"
            raise ToolError(f"{name}={text}: the run had {had}: {words}")


def settings_of(script: Path) -> set[str]:
    """The names of a script's settings; empty: it is not a trainer that can be asked for them."""
    text = script.read_bytes() if script.suffix == ".py" and script.is_file() else b""
    if b"--print-config" not in (unpacked(text) or text):
        return set()
    command = [sys.executable, str(script), "--print-config"]
    environ = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        return {name.upper() for name in json.loads(done.stdout)}
    except (ValueError, TypeError, subprocess.TimeoutExpired):
        return set()


def run_child(command: Sequence[str], settings: Mapping[str, str], output: Path) -> int:
    """Runs the command to its exit code, with what it prints in `output`. Whatever ends this ends
    it, too."""
    with open(output, "wb") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        environ = {**os.environ, **settings}
        child = subprocess.Popen(command, env=environ, start_new_session=True, **streams)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                end(child)


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a command and its group: politely first, as torchrun has to end its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(timeout=20)
            return


class Difference(NamedTuple):
    """An arm minus the first arm, paired by seed."""

    arm: Arm
    metric: str
    unit: str
    pairs: int
    test: Test
    measurable: bool = False  # for all differences of a kind together

    @property
    def equal(self) -> bool:
        return self.test.low == self.test.high == 0

    @property
    def words(self) -> str:
        interval = f"{self.test.low:+.4g} to {self.test.high:+.4g}"
        return f"{self.test.difference:+.4g} {self.unit} ({interval})"

    def cells(self) -> list[str]:
        judged = "equal" if self.equal else "measurable" if self.measurable else "not measurable"
        return [self.arm.label, self.metric, str(self.pairs), self.words, judged]


METRICS: dict[str, tuple[str, Callable[[Run], float | None]]] = {  # beside the loss
    "step time": ("ms", lambda run: run.step_ms),
    "input wait": ("ms per step", lambda run: run.input_wait_per_step()),
    "validation time": ("s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
}
Runs = dict[Arm, list[Run]]  # the finished ones of each arm, the first arm first


def differences(runs: Runs) -> list[Difference]:
    """Of each arm from the first one where both have two seeds: the losses, and then the others.
    Which of a kind are measurable says Holm's rule for all of them together."""
    first, *others = runs
    unit = unit_of([run for arm in runs.values() for run in arm])
    found = []
    for metrics in ({"loss": (unit, lambda run: value_of(run, unit))}, METRICS):
        kind = []
        for (metric, (of, value)), arm in itertools.product(metrics.items(), others):
            pairs = pairs_by_seed(runs[first], runs[arm], value)
            if len(pairs) > 1:
                test = t_test(*zip(*pairs, strict=True), by_seed=True)
                kind.append(Difference(arm, metric, of, len(pairs), test))
        p_values = holm([one.test.p_of_none for one in kind])
        pairs = zip(kind, p_values, strict=True)
        found += [one._replace(measurable=p < 0.05) for one, p in pairs]
    return found


def refusals(ours: Sequence[Run], theirs: Sequence[Run]) -> list[str]:
    """Why the runs of an arm and of the first one do not measure what was varied."""
    mixed = dict.fromkeys([*telling(ours), *telling(theirs)])
    why = [f"runs of one arm differ in {', '.join(mixed)}"] if mixed else []
    return [*why, *faults_of_split([*ours, *theirs], ["partial_val"])]


def verdict(runs: Runs, arm: Arm, changes: Sequence[Difference]) -> str:
    """What is known about an arm, in one line."""
    first = next(iter(runs))
    text = f"{arm.label} against {first.label}: "
    if why := refusals(runs[first], runs[arm]):
        return text + f"not an ablation: {'; '.join(why)}"
    if not changes:
        return text + "one seed cannot tell a difference from chance: add --seeds 3"
    said = ", ".join(f"{d.metric} {d.words}" for d in changes if d.measurable)
    text += said or "nothing is measurable"
    if changes[0].metric == "loss" and changes[0].equal:
        text += "; the losses are equal to the digit: what was varied computes the same"
    return text


def conclude(ablation: Ablation, failures: Sequence[str]) -> int:
    """Prints and keeps the report of what is finished: the verdict first."""
    runs: Runs = {arm: [] for arm in ablation.arms}
    for run in ablation.runs:
        if log := ablation.result(run):
            runs[run.arm].append(log)
    finished = [log for logs in runs.values() for log in logs]
    if not finished:
        print("no run is finished: what they printed is above")
        return 1
    first, *others = runs
    found = differences(runs)
    head = ["arm", "quantity", "pairs", "difference (95 % interval)", "verdict"]
    rows = [one.cells() for arm in others for one in found if one.arm == arm]
    verdicts = [verdict(runs, arm, [one for one in found if one.arm == arm]) for arm in others]
    losses = sum(one.metric == "loss" for one in found)
    title = "Verdict (95 % intervals; a lower loss is better; measurable: p < 0.05, corrected by "
    title += f"Holm for {losses} differences of losses, and for {len(found) - losses} others)"
    blocks = [
        [title, *(f"  {line}" for line in verdicts)],
        ["Differences from the first arm, paired by seed", *cli.table(head, rows)] if rows else [],
        ["Failed", *(f"  {failure}" for failure in failures)] if failures else [],
        [report(Logs(finished))],
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}\n")
    (ablation.folder / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    drawn = {arm.label: logs for arm, logs in runs.items() if logs}
    plot([*drawn.values()], [*drawn], ablation.folder / "picture.png", verdicts)
    print(f"{ablation.folder}: report.txt, picture.png   logs: logs/{ablation.folder.name}-*")
    return int(bool(failures) or any(refusals(runs[first], runs[arm]) for arm in others))


def ablate(options: argparse.Namespace) -> int:
    import matplotlib  # noqa: F401  (before hours of runs)
    import scipy  # noqa: F401

    ablation = Ablation(options)
    arms, seeds = len(ablation.arms), len(ablation.seeds)
    print(f"{' and '.join(ablation.varied)}: {arms} arms x {seeds} seeds: {arms * seeds} runs")
    ablation.folder.mkdir(parents=True, exist_ok=True)
    Path("logs").mkdir(exist_ok=True)
    return conclude(ablation, ablation.run_all())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        description=__doc__,
        usage="ablate.py --vary NAME=v1,v2 [...] [--script A.py,B.py] [options] -- COMMAND",
    )
    add = parser.add_argument
    text = 'may be repeated; values with commas: "NAMES=.attn.,.mlp.;.mlp."'
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help=text)
    add("--script", metavar="A.py,B.py", help="complete scripts, for {script} in the command")
    add("--seeds", default="3", help="how many from SEED (1337) on, or 1337,42,7 (default: 3)")
    help_text = "folder of the report; its name begins each RUN_ID (default: logs/ablate-<names>)"
    add("--out", type=Path, metavar="FOLDER", help=help_text)
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.command = words[at + 1 :]
    if not options.command:
        parser.exit(2, "error: name the command after --, such as: -- python3 train_gpt.py\n")
    if shutil.which(options.command[0]) is None:
        parser.error(f"{options.command[0]}: no such program: settings stand in front of ablate.py")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # as Ctrl-C
    words = "finished runs are kept: give the same command again to run the others"
    return cli.run(lambda: ablate(options), refused=2, interrupted=words)


if __name__ == "__main__":
    sys.exit(main())
