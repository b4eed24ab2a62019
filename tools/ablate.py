"""Vary the settings of a trainer, or its script, and measure what changes.

    # on a laptop: small models, about a minute and a half for each run
    python3 tools/ablate.py --vary MLP_MULT=2,4 -- python3 data/quickstart.py
    ITERATIONS=2000 python3 tools/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 \\
        -- torchrun --standalone --nproc_per_node=8 train_gpt.py
    python3 tools/ablate.py --script train_gpt.py,ema.py -- python3 {script}

ablate.py runs the command after -- as it is, with SEED, RUN_ID and the varied settings in its
environment. The command must write logs/<RUN_ID>.jsonl below the folder where ablate.py is started.
Each combination of values is a variant, and all variants are compared with the first one. --script
replaces {script} in the command by each of the scripts. A round runs every variant with one seed,
and each round starts with the next variant. Variants are compared seed by seed. ablate.py prints
the differences with 95 % intervals, and calls a difference measurable if it is significant after a
correction for the number of variants.

If you give the same command again, finished runs are kept, and the others are run again. You may
add seeds and values. If a run fails, the other runs continue.

Exit code: 0 done, 1 a run failed or cannot be compared, 2 wrong usage, 130 interrupted.
"""

# This module builds on runs.py (reads logs), samples.py (tests), report.py (tables and plot),
# figures.py (matplotlib) and packed.py (packed scripts).

import argparse
import ast
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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from cli import ToolError
from figures import import_matplotlib
from packed import parse_script, unpack_script
from report import plot, report
from runs import Logs, Run, parse_value, read_log
from samples import (
    Test,
    choose_unit,
    find_split_faults,
    holm,
    pairs_by_seed,
    relevant_differences,
    result_value,
    t_test,
)

SET_FOR_EACH_RUN = ("RUN_ID", "SEED")
SCRIPT = "{script}"  # is replaced in the command by each script of --script
TRAINER, QUICKSTART = cli.ROOT / "train_gpt.py", cli.ROOT / "data" / "quickstart.py"
# Environment variables that change a run although they are no settings of a trainer.
SYSTEM_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|NCCL|GLOO|CUDA|CUBLAS|CUDNN|PYTORCH|TORCH|TRITON)_|PYTHON"
)
# Variables that differ between two terminals or jobs, and do not change what is computed.
SURROUNDINGS = re.compile(
    r"CUDA_VISIBLE_DEVICES|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|PYCACHEPREFIX|IOENCODING|UTF8)|PATH|"
    r"HOME|USER|LOGNAME|HOSTNAME|PWD|OLDPWD|SHELL|SHLVL|TERM|LANG|TMPDIR|(RUN|JOB)_ID|(LOCAL_)?RANK|"
    r"(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|SSH|XDG|TORCHELASTIC|WANDB)_\w+"
)


AGAIN = "give --out another folder to make all runs again, or restore what has changed"


class Variant(NamedTuple):
    """A combination of values, and a script if scripts are varied."""

    settings: tuple[tuple[str, str], ...]
    script: str | None = None  # as the user wrote it

    @property
    def label(self) -> str:
        parts = [self.script] if self.script else []
        return " ".join([*parts, *(f"{name}={value}" for name, value in self.settings)])


class PlannedRun(NamedTuple):
    """A variant with a seed."""

    variant: Variant
    seed: int
    run_id: str
    command: Sequence[str]
    log: Path


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return {NAME: values} of texts such as NAME=v1,v2. Raises ToolError if one is malformed."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ToolError(f"--vary {text} must be NAME=value,value, such as TRAIN_PREFETCH=1,0")
        if name in SET_FOR_EACH_RUN:
            raise ToolError(f"--vary {text}: every run has its own {name}; use --seeds for seeds")
        sign = ";" if ";" in values else ","
        settings.setdefault(name, []).extend(v.strip() for v in values.rstrip(";").split(sign))
        if "" in settings[name] or len(set(settings[name])) < len(settings[name]):
            raise ToolError(
                f"--vary {text}: the values must be comma-separated, distinct and not empty"
            )
    return settings


def parse_scripts(text: str | None, command: Sequence[str]) -> list[str | None]:
    """Return the scripts that replace {script}; [None] if the command has no {script}."""
    if (text is not None) != any(SCRIPT in word for word in command):
        raise ToolError(
            f"--script A.py,B.py needs {SCRIPT} in the command, and the reverse; give both"
        )
    scripts = text.split(",") if text else [None]
    for name in scripts:
        if name and not Path(name).is_file():
            raise ToolError(f"--script {text}: {name}: no such file; give the paths of scripts")
    return scripts


def parse_seeds(text: str) -> list[int]:
    """Return the seeds: "3" means three, from SEED (1337) on; "1337,42" means these two."""
    if not re.fullmatch(r"(?!0$)\d+(,\d+)*,?", text):
        raise ToolError(
            f"--seeds {text} must be a number of seeds, such as 3, or a list, such as 1337,42,7"
        )
    if "," in text:
        return [*dict.fromkeys(map(int, text.rstrip(",").split(",")))]
    first = int(os.environ.get("SEED", 1337))
    return [*range(first, first + int(text))]


class Ablation:
    """The planned runs, and `folder` for report.txt, picture.png and what each run printed. The
    runs write their logs to logs/<RUN_ID>.*, as always."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.vary = parse_vary(options.vary)
        self.command = options.command
        self.seeds = parse_seeds(options.seeds)
        self.variants = [
            Variant(tuple(zip(self.vary, values, strict=True)), script)
            for script in parse_scripts(options.script, options.command)
            for values in itertools.product(*self.vary.values())
        ]
        if len(self.variants) < 2:
            raise ToolError(
                "nothing to compare: give at least two values, such as MLP_MULT=2,4, or two scripts"
            )
        self.varied = [*(["script"] if options.script else []), *self.vary]
        self.folder = options.out or Path("logs", f"ablate-{'-'.join(self.varied).lower()}"[:80])
        known = self.known_settings()
        self.names_in_files: set[str] = set()  # possible variables in the files of the commands
        self.runs = []
        for round_number, seed in enumerate(self.seeds):
            # Each round begins one variant further, so that no variant always comes first.
            first = round_number % len(self.variants)
            for variant in self.variants[first:] + self.variants[:first]:
                self.runs.append(self.plan_run(variant, seed, known))

    def build_command(self, variant: Variant) -> list[str]:
        return [word.replace(SCRIPT, variant.script or SCRIPT) for word in self.command]

    def known_settings(self) -> dict[str, set[str]]:
        """Return {script: the names of its settings} for the scripts in the command, or else for
        train_gpt.py. Raises ToolError if a script does not have a varied setting."""
        words = dict.fromkeys(word for v in self.variants for word in self.build_command(v))
        known = {word: names for word in words if (names := read_setting_names(Path(word)))}
        if not known:
            known = {str(TRAINER): read_setting_names(TRAINER)}
            if all(Path(word).resolve() != QUICKSTART for word in words):
                return known  # another trainer may have other settings
        for (script, names), name in itertools.product(known.items(), self.vary):
            by_itself = find_variables(Path(script).read_bytes())
            if name not in {*names, *by_itself} and not SYSTEM_VARIABLES.match(name):
                similar = cli.did_you_mean(name, names)
                words = f"{script} has no such setting; --help lists them{similar}"
                raise ToolError(f"--vary {name}: {words}")
        return known

    def plan_run(self, variant: Variant, seed: int, known: dict[str, set[str]]) -> PlannedRun:
        """Return a run whose RUN_ID contains a checksum of all that decides the run's result: the
        command, the files in the command and those that they import, train_gpt.py, the given
        settings, and the environment variables whose names are in these files or that PyTorch
        reads. So runs of another experiment are never mixed in."""
        command = self.build_command(variant)
        files = [*command, variant.script or "", *(known.keys() & {str(TRAINER)})]
        files = [file for file in files if os.path.isfile(file)]
        files += [str(path) for file in files for path in find_imported_files(Path(file))]
        contents = [Path(file).read_bytes() for file in files]
        mentioned = set().union(*map(find_variables, contents))
        self.names_in_files |= mentioned
        names = set().union(*known.values()) | {n for n in os.environ if SYSTEM_VARIABLES.match(n)}
        names |= mentioned
        names -= {name for name in names if SURROUNDINGS.fullmatch(name)} | {*SET_FOR_EACH_RUN}
        settings = {name: os.environ[name] for name in names & os.environ.keys()}
        settings |= dict(variant.settings)
        checksum = hashlib.sha256(repr((command, contents, sorted(settings.items()))).encode())
        words = [variant.script.removesuffix(".py")] if variant.script else []
        words += [value for _, value in variant.settings]
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words))[:40]
        run_id = f"{self.folder.name}-{readable}-{checksum.hexdigest()[:8]}-seed{seed}"
        return PlannedRun(variant, seed, run_id, command, Path("logs", f"{run_id}.jsonl"))

    def read_result(self, run: PlannedRun) -> Run | None:
        """Return the run as its log describes it; None if it is not finished."""
        runs = read_log(run.log).runs
        if not runs or runs[0].status != "finished" or runs[0].result is None:
            return None
        check_settings(run, runs[0], self.names_in_files)
        return runs[0]

    def run_all(self) -> list[str]:
        """Run what is not finished, and return the failures. Raises ToolError if the command does
        not accept its settings: then the other runs would fail, too."""
        todo = [run for run in self.runs if self.read_result(run) is None]
        failures = []
        kept = [run for run in self.runs if run not in todo]
        if kept:
            self.check_data_of(kept)
            print(f"{len(kept)} of {len(self.runs)} runs are finished and kept")
        began = time.monotonic()
        for number, run in enumerate(todo, 1):
            label = f"{run.variant.label} seed {run.seed}"
            prefix = f"[{number}/{len(todo)}] {label}"
            print(f"{prefix}: started", flush=True)
            code, log = self.run_one(run)
            if code == 0 and log:
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(f"{prefix}: finished, about {left:,.0f} s left", flush=True)
                continue
            reason = f"exit code {code}"
            if code == 0:
                reason += f", but the run in {run.log} did not finish"
            print(f"{prefix}: FAILED ({reason})")
            self.print_end_of_output(run)
            failures.append(f"{label}: {reason}")
            if code == 0 and not run.log.exists():
                words = "the command must train, and must not set RUN_ID itself"
                raise ToolError(f"{run.log} was not written; {words}")
            if code == 2:  # wrong usage
                reason = "the command rejects its settings (see above), so no other run was started"
                raise ToolError(f"{label}: {reason}")
        return failures

    def check_data_of(self, kept: Sequence[PlannedRun]) -> None:
        """Raise ToolError if a shard that a finished run has used has changed since: then the other
        runs would not differ only in what is varied."""
        changed = {}  # {shard: has it changed?}
        for run in kept:
            log = read_log(run.log).runs[0]
            for name, identity in log.fingerprint.items():
                path = Path(str(log.config.get("data_path", "")), name)
                if not re.fullmatch(r"fineweb_(train|val)_\d+\.bin", name) or not path.is_file():
                    continue
                known = path, identity
                if known not in changed:
                    changed[known] = cli.shard_identity(path) != identity
                if changed[known]:
                    raise ToolError(f"{path} has changed since {run.log} was written; {AGAIN}")

    def print_end_of_output(self, run: PlannedRun) -> None:
        printed = (self.folder / f"{run.run_id}.out").read_bytes()[-20_000:]
        lines = printed.decode("utf-8", "replace").splitlines()[-12:]
        print("\n".join(f"      {line[:300]}" for line in lines), flush=True)

    def run_one(self, run: PlannedRun) -> tuple[int, Run | None]:
        """Run it from its beginning; return its exit code and its result. The files of an earlier,
        unfinished attempt are removed."""
        for path in Path("logs").glob(f"{run.run_id}.*"):
            path.unlink()
        shutil.rmtree(Path("checkpoints", run.run_id), ignore_errors=True)
        settings = dict(run.variant.settings) | {"SEED": str(run.seed), "RUN_ID": run.run_id}
        code = run_child(run.command, settings, self.folder / f"{run.run_id}.out")
        return code, self.read_result(run)


def check_settings(run: PlannedRun, log: Run, names_in_files: Collection[str]) -> None:
    """Raise ToolError if, by its log, the run did not have the settings that were varied. A log
    does not contain variables that the script reads by itself. Raise it, too, if the log is a copy
    of another run's."""
    logged_id = str(log.config.get("run_id", run.run_id))
    if logged_id != run.run_id:
        raise ToolError(f"{run.log} is the log of another run, {logged_id}; move it away")
    for name, text in (*run.variant.settings, ("SEED", str(run.seed))):
        logged = log.config.get(name.lower()) if name.isupper() else None
        read_elsewhere = SYSTEM_VARIABLES.match(name) or name in (*names_in_files, "SEED")
        if logged is None and read_elsewhere:
            continue
        # The log may have another path of the same file.
        if logged != parse_value(text) and Path(str(logged)).name != Path(text).name:
            words = (
                "the trainer has no such setting, or the command sets it itself; remove it there"
            )
            raise ToolError(f"{name}={text}: the run had {logged}: {words}")


def find_variables(script: bytes) -> set[str]:
    """Return the names in a script that may be environment variables: Python's strings that are
    names, such as in os.environ["NAME"], and the $NAME of a shell."""
    if b"\0" in script:  # a program, such as Python's
        return set()
    text = unpack_script(script) or script
    found = re.findall(rb"""["']([A-Za-z_]\w{2,})["']|\$\{?([A-Za-z_]\w{2,})""", text)
    return {(quoted or of_shell).decode() for quoted, of_shell in found}


def find_imported_files(script: Path) -> list[Path]:
    """Return the files beside a script that it imports, and those that these import. The programs
    of this repository are left out: their helpers do not change what a run computes."""
    found: dict[Path, None] = {}
    todo = [] if script.resolve().parent in (cli.ROOT / "data", cli.ROOT / "tools") else [script]
    while todo:
        path = todo.pop()
        content = path.read_bytes() if path.suffix == ".py" else b""
        names = set()
        with contextlib.suppress(ValueError):  # a script that Python does not compile
            for node in ast.walk(parse_script(unpack_script(content) or content)):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module)
        beside = [path.with_name(f"{name.partition('.')[0]}.py") for name in sorted(names)]
        new = [other for other in beside if other.is_file() and other not in (script, *found)]
        found |= dict.fromkeys(new)
        todo += new
    return [*found]


def read_setting_names(script: Path) -> set[str]:
    """Return the names of a script's settings, which its --print-config prints; an empty set if
    the file is no such script."""
    text = script.read_bytes() if script.suffix == ".py" and script.is_file() else b""
    if b"--print-config" not in (unpack_script(text) or text):
        return set()
    command = [sys.executable, str(script), "--print-config"]
    environ = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        return {name.upper() for name in json.loads(done.stdout)}
    except (ValueError, TypeError, subprocess.TimeoutExpired):
        return set()


def run_child(command: Sequence[str], settings: Mapping[str, str], output: Path) -> int:
    """Run the command, write what it prints to the file `output`, and return its exit code. If this
    process is interrupted, the command is ended, too."""
    with open(output, "wb") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        environ = {**os.environ, **settings}
        child = subprocess.Popen(command, env=environ, start_new_session=True, **streams)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                end_process_group(child)


def end_process_group(child: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it has started. SIGKILL comes last: torchrun needs time to end its
    workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(timeout=20)
            return


class Difference(NamedTuple):
    """How much higher a quantity of a variant is than that of the first variant, by seed."""

    variant: Variant
    metric: str
    unit: str
    pairs: int
    test: Test
    measurable: bool = False  # by Holm's method for all differences of one kind

    @property
    def equal(self) -> bool:
        return self.test.low == self.test.high == 0

    @property
    def words(self) -> str:
        interval = f"{self.test.low:+.4g} to {self.test.high:+.4g}"
        return f"{self.test.difference:+.4g} {self.unit} ({interval})"

    def cells(self) -> list[str]:
        verdict = "measurable" if self.measurable else "not measurable"
        if self.equal:
            verdict = "equal"
        return [self.variant.label, self.metric, str(self.pairs), self.words, verdict]


METRICS: dict[
    str, tuple[str, Callable[[Run], float | None]]
] = {  # what is compared besides the loss
    "step time": ("ms", lambda run: run.step_ms),
    "input wait": ("ms per step", lambda run: run.input_wait_per_step()),
    "validation time": ("s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
}
RunsByVariant = dict[Variant, list[Run]]  # the finished runs; the first variant comes first


def find_differences(runs: RunsByVariant) -> list[Difference]:
    """Return the differences between the first variant and each other one that has at least two
    seeds in common with it: first all losses, then the other quantities. Holm's method corrects
    the losses together, and the other quantities together."""
    first, *others = runs
    unit = choose_unit([run for group in runs.values() for run in group])
    loss = {"loss": (unit, lambda run: result_value(run, unit))}
    found = []
    for metrics in (loss, METRICS):
        together = []
        for (metric, (metric_unit, value)), variant in itertools.product(metrics.items(), others):
            pairs = pairs_by_seed(runs[first], runs[variant], value)
            if len(pairs) > 1:
                test = t_test(*zip(*pairs, strict=True), by_seed=True)
                together.append(Difference(variant, metric, metric_unit, len(pairs), test))
        p_values = holm([difference.test.p_two_sided for difference in together])
        for difference, p in zip(together, p_values, strict=True):
            found.append(difference._replace(measurable=p < 0.05))
    return found


def refusals(first: Sequence[Run], other: Sequence[Run]) -> list[str]:
    """Return why the runs of the first and of another variant do not measure what was varied."""
    mixed = dict.fromkeys([*relevant_differences(first), *relevant_differences(other)])
    reasons = []
    if mixed:
        reasons.append(f"the runs of one variant differ in {', '.join(mixed)} ({AGAIN})")
    for runs in (first, other):
        losses = {run.result.val_loss for run in runs}
        if len(losses) == 1 and len({run.known_seed for run in runs}) > 1:
            words = "the loss is equal to the last digit for all seeds, so the command does not use"
            reasons.append(f"{words} SEED, and the spread between seeds is not known")
            break
    return [*reasons, *find_split_faults([*first, *other], ["partial_val"])]


def judge(runs: RunsByVariant, variant: Variant, changes: Sequence[Difference]) -> str:
    """Return one line on what is known about a variant."""
    first = next(iter(runs))
    text = f"{variant.label} against {first.label}: "
    if reasons := refusals(runs[first], runs[variant]):
        return text + f"not an ablation: {'; '.join(reasons)}"
    if not changes:
        return text + "one seed cannot tell a difference from chance; use --seeds 3"
    measurable = [f"{change.metric} {change.words}" for change in changes if change.measurable]
    text += ", ".join(measurable) or "nothing is measurable"
    if changes[0].metric == "loss" and changes[0].equal:
        text += "; the losses are equal to the last digit: the variants compute the same"
    return text


def describe_wait(change: Difference, changes: Sequence[Difference]) -> str:
    """Return in words how much of a difference in step time is input wait; empty for another
    quantity, or if it is not known."""
    waits = [other for other in changes if other.metric == "input wait"]
    if change.metric != "step time" or not waits or waits[0].pairs != change.pairs:
        return ""
    waited = waits[0].test.difference
    rest = change.test.difference - waited
    return f", of which {waited:+.4g} ms is input wait and {rest:+.4g} ms is all else"


def conclude(ablation: Ablation, failures: Sequence[str]) -> int:
    """Print the report on the finished runs, write it and the plot, and return the exit code."""
    runs: RunsByVariant = {variant: [] for variant in ablation.variants}
    for run in ablation.runs:
        if log := ablation.read_result(run):
            runs[run.variant].append(log)
    finished = [log for logs in runs.values() for log in logs]
    if not finished:
        print("no run has finished; what the runs printed is above")
        return 1
    first, *others = runs
    found = find_differences(runs)
    rows, verdicts = [], []
    for variant in others:
        changes = [difference for difference in found if difference.variant == variant]
        rows += [difference.cells() for difference in changes]
        verdicts.append(judge(runs, variant, changes))
    head = ["variant", "quantity", "pairs", "difference (95 % interval)", "verdict"]
    losses = sum(difference.metric == "loss" for difference in found)
    title = "Verdict (95 % intervals; a lower loss is better; measurable: p < 0.05, corrected by "
    title += f"Holm for {losses} differences of losses, and for {len(found) - losses} others)"
    blocks = [[title, *(f"  {line}" for line in verdicts)]]
    if rows:
        title = "Differences from the first variant, paired by seed"
        waits = [
            f"step time of {change.variant.label}: {change.test.difference:+.4g} ms{words}"
            for change in found
            if (words := describe_wait(change, [c for c in found if c.variant == change.variant]))
        ]
        blocks.append([title, *cli.format_table(head, rows), *waits])
    if failures:
        blocks.append(["Failed", *(f"  {failure}" for failure in failures)])
    blocks.append([report(Logs(finished))])
    text = "\n\n".join("\n".join(block) for block in blocks)
    print(f"\n{text}\n")
    (ablation.folder / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    drawn = {variant.label: logs for variant, logs in runs.items() if logs}
    plotted = plot([*drawn.values()], [*drawn], ablation.folder / "picture.png", verdicts)
    files = "report.txt, picture.png" if plotted else "report.txt"
    print(f"{ablation.folder}: {files}   logs: logs/{ablation.folder.name}-*")
    is_refused = any(refusals(runs[first], runs[variant]) for variant in others)
    return int(bool(failures) or is_refused or not plotted)


def ablate(options: argparse.Namespace) -> int:
    # A missing package must be noticed before hours of runs, not after them.
    import_matplotlib()
    import scipy  # noqa: F401

    ablation = Ablation(options)
    variants, seeds = len(ablation.variants), len(ablation.seeds)
    counts = f"{variants} variants x {seeds} seeds: {variants * seeds} runs"
    print(f"{' and '.join(ablation.varied)}: {counts}")
    ablation.folder.mkdir(parents=True, exist_ok=True)
    Path("logs").mkdir(exist_ok=True)
    return conclude(ablation, ablation.run_all())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        description=__doc__,
        usage="ablate.py --vary NAME=v1,v2 [...] [--script A.py,B.py] [options] -- COMMAND",
    )
    add = parser.add_argument
    text = "setting to vary; may be repeated; separate values that contain commas by semicolons: "
    text += '"NAMES=.attn.,.mlp.;.mlp."'
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help=text)
    add("--script", metavar="A.py,B.py", help="scripts that replace {script} in the command")
    add(
        "--seeds",
        default="3",
        help="number of seeds from SEED (1337) on, or a list: 1337,42,7 (default: 3)",
    )
    help_text = "folder for the report; each RUN_ID begins with its name"
    help_text += " (default: logs/ablate-<names>)"
    add("--out", type=Path, metavar="FOLDER", help=help_text)
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.command = words[at + 1 :]
    if not options.command:
        parser.exit(2, "error: give the command after --, such as: -- python3 train_gpt.py\n")
    if shutil.which(options.command[0]) is None:
        parser.error(f"{options.command[0]}: no such program; put settings before ablate.py")
    # SIGTERM does the same as Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    words = "finished runs are kept; give the same command again to run the others"
    return cli.run(lambda: ablate(options), refused=2, interrupted=words)


if __name__ == "__main__":
    sys.exit(main())
