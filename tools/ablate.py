"""Vary the settings of a trainer, or its script, and measure what changes.

    # on a laptop: small models, about a minute and a half for each run
    python3 tools/ablate.py --vary MLP_MULT=2,4 -- python3 data/quickstart.py
    ITERATIONS=2000 python3 tools/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 \\
        -- torchrun --standalone --nproc_per_node=8 train_gpt.py
    python3 tools/ablate.py --script train_gpt.py,ema.py -- python3 {script}
    python3 tools/ablate.py --variants ideas.txt --for-each DATA_PATH=code,prose --jobs 2 -- ...

ablate.py runs the command after -- as it is, with SEED, RUN_ID and the varied settings in its
environment. The command must write logs/<RUN_ID>.jsonl below the folder where ablate.py is started.
Each combination of values is a variant, and all variants are compared with the first one. --script
replaces {script} in the command by each of the scripts. --variants reads variants from a file, one
in each line, such as `ema: EMA_DECAY=0.99`; the first line may be `base:`. --for-each repeats all
runs with each of its values, for example on several texts, and compares only runs of the same
value. In a round, every variant is run with one seed. Each round starts one variant later, so that
none always comes first. Variants are compared seed by seed. ablate.py prints the differences with
95 % intervals, and calls a difference measurable if it is significant after a correction for the
number of differences. How many seeds show which difference depends on the edit: tools/README.md has
a table, and the report estimates it for its own runs.

If you give the same command again, finished runs are kept, and the others are run again. You may
add seeds and values. If a run fails, the other runs continue.

Exit code: 0 done, 1 a run failed or cannot be compared, 2 wrong usage, 130 interrupted.
"""

# This module builds on runs.py (reads logs), samples.py (tests), report.py (tables and plot),
# figures.py (matplotlib) and packed.py (packed scripts).

import argparse
import ast
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python3 -P does not add it
import cli
from cli import ToolError
from figures import import_matplotlib
from packed import parse_script, unpack_script
from report import Effect, plot, plot_effects, report
from runs import Logs, Run, parse_value, read_log
from samples import (
    Test,
    choose_unit,
    detectable_difference,
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


Settings = tuple[tuple[str, str], ...]  # (NAME, value) pairs


def format_settings(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings)


class Variant(NamedTuple):
    """A combination of values, and a script if scripts are varied."""

    settings: Settings
    script: str | None = None  # as the user wrote it
    name: str = ""  # in the file of --variants

    @property
    def label(self) -> str:
        parts = [self.name] if self.name else [self.script or "", format_settings(self.settings)]
        return " ".join(part for part in parts if part)


class PlannedRun(NamedTuple):
    """A variant with a seed, in one of the blocks of --for-each."""

    block: Settings
    variant: Variant
    seed: int
    run_id: str
    command: Sequence[str]
    log: Path

    @property
    def settings(self) -> Settings:
        return self.block + self.variant.settings

    @property
    def label(self) -> str:
        return " ".join([*filter(None, [format_settings(self.block), self.variant.label])])


def readable_name(variant: Variant, block: Settings) -> str:
    """Return the part of a RUN_ID that a person reads: the variant's name, or its script and
    values, and the values of --for-each."""
    words = [variant.script.removesuffix(".py")] if variant.script else []
    words += [variant.name] if variant.name else [value for _, value in variant.settings]
    words += [Path(value).name for _, value in block]
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words))[:40]


def parse_vary(texts: Sequence[str], option: str = "--vary") -> dict[str, list[str]]:
    """Return {NAME: values} of texts such as NAME=v1,v2. Raises ToolError if one is malformed."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ToolError(f"{option} {text} must be NAME=value,value, such as TRAIN_PREFETCH=1,0")
        if name in SET_FOR_EACH_RUN:
            raise ToolError(f"{option} {text}: every run has its own {name}; use --seeds for seeds")
        sign = ";" if ";" in values else ","
        settings.setdefault(name, []).extend(v.strip() for v in values.rstrip(";").split(sign))
        if "" in settings[name] or len(set(settings[name])) < len(settings[name]):
            raise ToolError(
                f"{option} {text}: the values must be comma-separated, distinct and not empty"
            )
    return settings


def read_variants(path: Path) -> list[Variant]:
    """Return the variants in a file: a name in each line, a colon, and settings NAME=value, which
    may be quoted as in a shell. Raises ToolError if a line is malformed or a name is there twice.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(
            f"--variants {path} cannot be read: {cli.one_line(error)}; give a file with a line "
            "`name: NAME=value NAME=value ...` for each variant"
        ) from error
    variants: dict[str, Variant] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"--variants {path}, line {number}"
        name, colon, words = (part.strip() for part in line.partition(":"))
        try:
            pairs = [word.partition("=") for word in shlex.split(words)]
        except ValueError as error:
            raise ToolError(f"{where}: {error}") from error
        names = [pair[0] for pair in pairs]
        are_settings = all(sign and re.fullmatch(r"\w+", each) for each, sign, _ in pairs)
        if not (name and colon and are_settings):
            raise ToolError(f"{where}: `{line}` must be `name: NAME=value NAME=value ...`")
        if len(set(names)) < len(names) or set(names) & {*SET_FOR_EACH_RUN}:
            words = "each setting may be there once, and SEED and RUN_ID are set for each run"
            raise ToolError(f"{where}: {words}")
        if name in variants:
            raise ToolError(f"{where}: the name {name} is there twice; give each variant its own")
        variants[name] = Variant(tuple((n, value) for n, _, value in pairs), None, name)
    return [*variants.values()]


def parse_scripts(text: str | None, command: Sequence[str]) -> list[str | None]:
    """Return the scripts that replace {script}; [None] if the command has no {script}."""
    if (text is not None) != any(SCRIPT in word for word in command):
        raise ToolError(f"--script and {SCRIPT} in the command must be used together; give both")
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
    """The planned runs, and `folder` for report.txt, the plots and what each run printed. The runs
    write their logs to logs/<RUN_ID>.*, as always."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.command = options.command
        self.jobs = options.jobs
        self.seeds = parse_seeds(options.seeds)
        vary = parse_vary(options.vary)
        scripts = parse_scripts(options.script, options.command)
        if options.variants and (vary or options.script):
            raise ToolError(
                "--variants cannot be combined with --vary or --script; give one of them"
            )
        if options.variants:
            self.variants = read_variants(options.variants)
            if len(self.variants) < 2:
                raise ToolError(
                    f"--variants {options.variants} has {len(self.variants)} variants; write at "
                    "least two, the first of which may be `base:`"
                )
        else:
            self.variants = [
                Variant(tuple(zip(vary, values, strict=True)), script)
                for script in scripts
                for values in itertools.product(*vary.values())
            ]
        if len(self.variants) < 2:
            raise ToolError(
                "nothing to compare: give at least two values, such as MLP_MULT=2,4, or two scripts"
            )
        for_each = parse_vary(options.for_each, "--for-each")
        self.blocks: list[Settings] = [
            tuple(zip(for_each, values, strict=True))
            for values in itertools.product(*for_each.values())
        ]
        own = [name for variant in self.variants for name, _ in variant.settings]
        if both := sorted(for_each.keys() & set(own)):
            raise ToolError(f"--for-each {both[0]}: the variants set {both[0]}, too; set it once")
        self.names = [*for_each, *dict.fromkeys(own)]  # of all settings that differ between runs
        self.varied = [*(["script"] if options.script else []), *vary]
        if options.variants:
            self.varied = [options.variants.stem]
        self.folder = options.out or Path("logs", f"ablate-{'-'.join(self.varied).lower()}"[:80])
        known = self.known_settings()
        self.names_in_files: set[str] = set()  # possible variables in the files of the commands
        self.runs = []
        for round_number, seed in enumerate(self.seeds):
            # Each round begins one variant further, so that no variant always comes first.
            first = round_number % len(self.variants)
            for block in self.blocks:
                for variant in self.variants[first:] + self.variants[:first]:
                    self.runs.append(self.plan_run(block, variant, seed, known))

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
        for (script, names), name in itertools.product(known.items(), self.names):
            by_itself = find_variables(Path(script).read_bytes())
            if name not in {*names, *by_itself} and not SYSTEM_VARIABLES.match(name):
                similar = cli.did_you_mean(name, names)
                words = f"{script} has no such setting; --help lists them{similar}"
                raise ToolError(f"{name}: {words}")
        return known

    def plan_run(
        self, block: Settings, variant: Variant, seed: int, known: dict[str, set[str]]
    ) -> PlannedRun:
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
        settings |= dict(block + variant.settings)
        checksum = hashlib.sha256(repr((command, contents, sorted(settings.items()))).encode())
        name = f"{self.folder.name}-{readable_name(variant, block)}"
        run_id = f"{name}-{checksum.hexdigest()[:8]}-seed{seed}"
        return PlannedRun(block, variant, seed, run_id, command, Path("logs", f"{run_id}.jsonl"))

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
        waiting = deque(enumerate(todo, 1))
        started: list[tuple[PlannedRun, str, subprocess.Popen[bytes]]] = []
        ended = 0
        try:
            while waiting or started:
                while waiting and len(started) < self.jobs:
                    number, run = waiting.popleft()
                    prefix = f"[{number}/{len(todo)}] {run.label} seed {run.seed}"
                    print(f"{prefix}: started", flush=True)
                    started.append((run, prefix, self.start(run)))
                time.sleep(0.1)
                for each in [each for each in started if each[2].poll() is not None]:
                    started.remove(each)
                    ended += 1
                    run, prefix, child = each
                    left = (time.monotonic() - began) / ended * (len(todo) - ended)
                    failures += self.conclude_run(run, prefix, child.returncode, left)
        finally:
            for _, _, child in started:
                end_process_group(child)
        return failures

    def conclude_run(self, run: PlannedRun, prefix: str, code: int, left: float) -> list[str]:
        """Print how a run has ended, and return its failure in a list, empty if there is none.
        left: seconds until all runs have ended. Raises ToolError if other runs would fail, too."""
        if code == 0 and self.read_result(run):
            print(f"{prefix}: finished, about {left:,.0f} s left", flush=True)
            return []
        reason = f"exit code {code}"
        if code == 0:
            reason += f", but the run in {run.log} did not finish"
        print(f"{prefix}: FAILED ({reason})")
        self.print_end_of_output(run)
        failure = f"{run.label} seed {run.seed}: {reason}"
        if code == 0 and not run.log.exists():
            words = "the command must train, and must not set RUN_ID itself"
            raise ToolError(f"{run.log} was not written; {words}")
        if code == 2:  # wrong usage
            reason = "the command rejects its settings (see above), so no other run was started"
            raise ToolError(f"{run.label} seed {run.seed}: {reason}")
        return [failure]

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

    def start(self, run: PlannedRun) -> "subprocess.Popen[bytes]":
        """Start a run from its beginning. What it prints is written to a file of `folder`. The
        files of an earlier, unfinished attempt are removed."""
        for path in Path("logs").glob(f"{run.run_id}.*"):
            path.unlink()
        shutil.rmtree(Path("checkpoints", run.run_id), ignore_errors=True)
        settings = dict(run.settings) | {"SEED": str(run.seed), "RUN_ID": run.run_id}
        with open(self.folder / f"{run.run_id}.out", "wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            environ = {**os.environ, **settings}
            return subprocess.Popen(run.command, env=environ, start_new_session=True, **streams)


def check_settings(run: PlannedRun, log: Run, names_in_files: Collection[str]) -> None:
    """Raise ToolError if, by its log, the run did not have the settings that were varied. A log
    does not contain variables that the script reads by itself. Raise it, too, if the log is a copy
    of another run's."""
    logged_id = str(log.config.get("run_id", run.run_id))
    if logged_id != run.run_id:
        raise ToolError(f"{run.log} is the log of another run, {logged_id}; move it away")
    for name, text in (*run.settings, ("SEED", str(run.seed))):
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


@functools.cache
def find_variables(script: bytes) -> Set[str]:
    """Return the names in a script that may be environment variables: Python's strings that are
    names, such as in os.environ["NAME"], and the $NAME of a shell."""
    if b"\0" in script:  # a program, such as Python's
        return set()
    text = unpack_script(script) or script
    found = re.findall(rb"""["']([A-Za-z_]\w{2,})["']|\$\{?([A-Za-z_]\w{2,})""", text)
    return {(quoted or of_shell).decode() for quoted, of_shell in found}


@functools.cache
def find_imports(content: bytes) -> Set[str]:
    """Return the names of the modules that a script imports."""
    names = set()
    with contextlib.suppress(ValueError):  # a script that Python does not compile
        for node in ast.walk(parse_script(unpack_script(content) or content)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return names


def find_imported_files(script: Path) -> list[Path]:
    """Return the files beside a script that it imports, and those that these import. The programs
    of this repository are left out: their helpers do not change what a run computes."""
    found: dict[Path, None] = {}
    todo = [] if script.resolve().parent in (cli.ROOT / "data", cli.ROOT / "tools") else [script]
    while todo:
        path = todo.pop()
        names = find_imports(path.read_bytes() if path.suffix == ".py" else b"")
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


def end_process_group(child: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it has started. SIGKILL comes last: torchrun needs time to end its
    workers. If a shell has started this program in the background, SIGINT is ignored here, and in
    the command, too."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        numbers.remove(signal.SIGINT)
    for number in numbers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(timeout=20)
            return


class Difference(NamedTuple):
    """How much higher a quantity of a variant is than that of the first variant, by seed."""

    block: Settings
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
    def spread(self) -> float:
        """The standard deviation of the difference between seeds."""
        from scipy import stats

        standard_errors = stats.t.ppf(0.975, self.test.df)  # in half of the interval
        half = (self.test.high - self.test.low) / 2
        return half / standard_errors * math.sqrt(self.pairs)

    @property
    def words(self) -> str:
        interval = f"{self.test.low:+.4g} to {self.test.high:+.4g}"
        return f"{self.test.difference:+.4g} {self.unit} ({interval})"

    @property
    def verdict(self) -> str:
        if self.equal:
            return "equal"
        return "measurable" if self.measurable else "not measurable"

    def cells(self) -> list[str]:
        return [self.variant.label, self.metric, str(self.pairs), self.words, self.verdict]


METRICS: dict[
    str, tuple[str, Callable[[Run], float | None]]
] = {  # what is compared besides the loss
    "step time": ("ms", lambda run: run.step_ms),
    "input wait": ("ms per step", lambda run: run.input_wait_per_step()),
    "validation time": ("s", lambda run: run.val_total_ms and run.val_total_ms / 1e3),
    "artifact": ("bytes", lambda run: run.model_bytes),
}
MANY = 3  # variants beside the first one, from which on they are also sorted by their effect
MOST_DRAWN = 8  # with more variants, picture.png is left out: its labels would cover each other
RunsByVariant = dict[Variant, list[Run]]  # the finished runs; the first variant comes first


def find_differences(blocks: Mapping[Settings, RunsByVariant], unit: str = "") -> list[Difference]:
    """Return the differences between the first variant and each other one of the same block that
    has at least two seeds in common with it: first all losses, then the other quantities. Holm's
    method corrects the losses of all blocks together, and the other quantities together. unit: of
    the losses; empty: nats if all runs have one tokenizer, else bits per byte."""
    unit = unit or choose_unit(
        [run for runs in blocks.values() for group in runs.values() for run in group]
    )
    loss = {"loss": (unit, lambda run: result_value(run, unit))}
    found = []
    for metrics in (loss, METRICS):
        together = []
        for block, runs in blocks.items():
            first, *others = runs
            for (metric, (metric_unit, value)), variant in itertools.product(
                metrics.items(), others
            ):
                pairs = pairs_by_seed(runs[first], runs[variant], value)
                if len(pairs) > 1:
                    test = t_test(*zip(*pairs, strict=True), by_seed=True)
                    difference = Difference(block, variant, metric, metric_unit, len(pairs), test)
                    together.append(difference)
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
        common = {run.known_seed for run in runs[first]} & {r.known_seed for r in runs[variant]}
        if len(common) == 1:
            return text + "one seed cannot tell a difference from chance; use --seeds 3"
        return text + "no seed has a finished run of both"
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


def effect_lines(differences: Sequence[Difference]) -> list[str]:
    """Return a table of the variants of a block, the one with the lowest loss first."""
    rows = []
    by_metric: dict[str, dict[Variant, Difference]] = {}
    for difference in differences:
        by_metric.setdefault(difference.metric, {})[difference.variant] = difference
    losses = by_metric.get("loss", {}).values()
    for loss in sorted(losses, key=lambda difference: difference.test.difference):
        others = (by_metric.get(name, {}).get(loss.variant) for name in ("step time", "artifact"))
        words = [f"{other.test.difference:+.4g} {other.unit}" if other else "" for other in others]
        rows.append([loss.variant.label, loss.words, loss.verdict, *words])
    head = ["variant", "loss (95 % interval)", "verdict", "step time", "artifact"]
    return cli.format_table(head, rows)


SEEDS = (3, 5, 10, 20)  # for which the report says how large a difference must be


def seeds_lines(losses: Sequence[Difference], comparisons: int) -> list[str]:
    """Return a table: for each number of seeds, the smallest difference of the loss that is likely
    to be measurable; an empty list if no difference varies. comparisons: the number that Holm's
    method corrects for."""
    spreads = [loss.spread for loss in losses if loss.spread > 0]
    if not spreads:
        return []
    spread = statistics.median(spreads)
    unit = losses[0].unit
    rows = [
        [str(seeds), f"{detectable_difference(spread, seeds, comparisons):.3g} {unit}"]
        for seeds in SEEDS
    ]
    count = f" with {comparisons} comparisons" if comparisons > 1 else ""
    return [
        *cli.format_table(["seeds", "difference"], rows),
        f"An estimate: at least 80 of 100 experiments{count} find a difference of this size.",
        f"A difference varies between seeds by a standard deviation of {spread:.3g} {unit} (median "
        "of the variants).",
    ]


def block_text(block: Settings) -> str:
    """Return what follows a title: which block it is about; empty if there is only one."""
    return f", with {format_settings(block)}" if block else ""


def block_report(
    block: Settings,
    runs: RunsByVariant,
    found: Sequence[Difference],
    verdicts: Sequence[str],
    comparisons: int,
) -> list[list[str]]:
    """Return the parts of the report on the runs of a block, each a list of lines. comparisons: the
    number of losses that are corrected together."""
    others = [*runs][1:]
    parts = [[f"Verdict{block_text(block)}", *(f"  {line}" for line in verdicts)]]
    if len(others) >= MANY:
        title = f"Effect on the loss, the lowest loss first{block_text(block)}"
        parts.append([title, *effect_lines(found)])
    rows, waits = [], []
    for variant in others:
        changes = [difference for difference in found if difference.variant == variant]
        rows += [difference.cells() for difference in changes]
        for change in changes:
            if words := describe_wait(change, changes):
                difference = f"{change.test.difference:+.4g} ms{words}"
                waits.append(f"step time of {change.variant.label}: {difference}")
    if rows:
        head = ["variant", "quantity", "pairs", "difference (95 % interval)", "verdict"]
        title = f"Differences from the first variant, paired by seed{block_text(block)}"
        parts.append([title, *cli.format_table(head, rows), *waits])
    if lines := seeds_lines([each for each in found if each.metric == "loss"], comparisons):
        title = f"How large a difference of losses must be to be measurable{block_text(block)}"
        parts.append([title, *lines])
    return parts


def write_effects_plot(differences: Sequence[Difference], path: Path) -> dict[str, bool]:
    """Write the forest plot of the losses if there are many. Return {its name: was it written?}."""
    effects = [
        Effect(
            each.variant.label, format_settings(each.block), each.unit, each.test, each.measurable
        )
        for each in differences
        if each.metric == "loss"
    ]
    return {path.name: plot_effects(effects, path)} if len(effects) >= MANY else {}


def conclude(ablation: Ablation, failures: Sequence[str]) -> int:
    """Print the report on the finished runs, write it and the plots, and return the exit code."""
    blocks: dict[Settings, RunsByVariant] = {
        block: {variant: [] for variant in ablation.variants} for block in ablation.blocks
    }
    for run in ablation.runs:
        if log := ablation.read_result(run):
            blocks[run.block][run.variant].append(log)
    if not any(logs for runs in blocks.values() for logs in runs.values()):
        print("no run has finished; what the runs printed is above")
        return 1
    found = find_differences(blocks)
    losses = sum(difference.metric == "loss" for difference in found)
    text = "95 % intervals; a lower loss is better; measurable: p < 0.05, corrected by Holm for "
    text += f"{losses} differences of losses, and for {len(found) - losses} others"
    if ablation.jobs > 1:
        text += f"\n{ablation.jobs} runs shared the machine, each with OMP_NUM_THREADS="
        text += f"{os.environ['OMP_NUM_THREADS']}, so steps took longer than they do alone"
    parts = [[text]]
    tables = []
    pictures = []  # what `plot` gets for each block
    is_refused = False
    for number, (block, runs) in enumerate(blocks.items(), 1):
        first, *others = runs
        changes = [difference for difference in found if difference.block == block]
        verdicts = [
            judge(runs, variant, [c for c in changes if c.variant == variant]) for variant in others
        ]
        parts += block_report(block, runs, changes, verdicts, losses)
        is_refused = is_refused or any(refusals(runs[first], runs[variant]) for variant in others)
        drawn = {variant.label: logs for variant, logs in runs.items() if logs}
        if drawn:
            # Runs of two blocks may be on two texts, which cannot be compared.
            logs = Logs([log for group in runs.values() for log in group])
            tables.append([*([format_settings(block)] if block else []), report(logs)])
        if 0 < len(drawn) <= MOST_DRAWN:
            # Values may be paths that end in the same name, so the number of the block comes first.
            words = [str(number), *(Path(value).name for _, value in block)] if block else []
            path = ablation.folder / f"{'-'.join(['picture', *words])}.png"
            pictures.append(([*drawn.values()], [*drawn], path, verdicts))
    if failures:
        parts.append(["Failed", *(f"  {failure}" for failure in failures)])
    parts += tables
    text = "\n\n".join("\n".join(part) for part in parts)
    print(f"\n{text}\n")
    (ablation.folder / "report.txt").write_text(f"{text}\n", encoding="utf-8")
    written = {picture[2].name: plot(*picture) for picture in pictures}
    written |= write_effects_plot(found, ablation.folder / "effects.png")
    files = ", ".join(["report.txt", *(name for name, is_written in written.items() if is_written)])
    print(f"{ablation.folder}: {files}   logs: logs/{ablation.folder.name}-*")
    return int(bool(failures) or is_refused or not all(written.values()))


def ablate(options: argparse.Namespace) -> int:
    # A missing package must be noticed before hours of runs, not after them.
    import_matplotlib()
    import scipy  # noqa: F401

    if options.jobs > 1:  # the number of threads is a part of what makes runs different
        threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    ablation = Ablation(options)
    variants, seeds, blocks = map(len, (ablation.variants, ablation.seeds, ablation.blocks))
    counts = f"{variants} variants x {seeds} seeds"
    counts += f" x {blocks} values of --for-each" if blocks > 1 else ""
    print(f"{' and '.join(ablation.varied)}: {counts}: {len(ablation.runs)} runs")
    if ablation.jobs > 1:
        threads = os.environ["OMP_NUM_THREADS"]
        print(f"{ablation.jobs} runs at a time, each with OMP_NUM_THREADS={threads}")
    ablation.folder.mkdir(parents=True, exist_ok=True)
    Path("logs").mkdir(exist_ok=True)
    return conclude(ablation, ablation.run_all())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        description=__doc__,
        usage="ablate.py --vary NAME=v1,v2 [...] [--script A.py,B.py] [options] -- COMMAND\n"
        "       ablate.py --variants FILE [options] -- COMMAND",
    )
    add = parser.add_argument
    text = "setting to vary; may be repeated; separate values that contain commas by semicolons: "
    text += '"NAMES=.attn.,.mlp.;.mlp."'
    add("--vary", action="append", default=[], metavar="NAME=v1,v2", help=text)
    add("--script", metavar="A.py,B.py", help="scripts that replace {script} in the command")
    text = "file with a variant in each line, `name: NAME=value NAME=value ...`; all are compared "
    text += "with the first one"
    add("--variants", type=Path, metavar="FILE", help=text)
    text = (
        "repeat all runs with each value, and compare only runs of the same value; may be repeated"
    )
    add("--for-each", action="append", default=[], metavar="NAME=v1,v2", help=text)
    text = (
        "number of runs at a time (default: 1); unless OMP_NUM_THREADS is set, they share the cores"
    )
    add("--jobs", type=int, default=1, metavar="N", help=text)
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
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    if not options.command:
        parser.exit(2, "error: give the command after --, such as: -- python3 train_gpt.py\n")
    if shutil.which(options.command[0]) is None:
        parser.error(f"{options.command[0]}: no such program; put settings before ablate.py")
    # SIGTERM does the same as Ctrl-C, also where a shell has started this program in the background
    # and Ctrl-C is therefore ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = "finished runs are kept; give the same command again to run the others"
    return cli.run(lambda: ablate(options), refused=2, interrupted=words)


if __name__ == "__main__":
    sys.exit(main())
