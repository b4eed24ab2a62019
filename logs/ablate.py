"""Vary a trainer's settings and measure what they do:
runs take turns, are paired by seed, end in 95 % intervals.

    python3 logs/ablate.py --vary TRAIN_PREFETCH=1,0 --seeds 3 --steps 200 -- python3 train_gpt.py
    python3 logs/ablate.py --vary MATRIX_LR=0.03,0.04 --vary MLP_MULT=2,3 --seconds 600 -- \\
        torchrun ... train_gpt.py
    python3 logs/ablate.py --preflight -- torchrun --standalone --nproc_per_node=8 train_gpt.py

Settings are environment variables. Each combination of values is an arm, the first one is what the
others are held against. A repeat runs every arm with one seed, beginning one arm further each time,
and then the first arm once more with the same seed: what two equal runs differ by is the machine's,
and the trend of all runs of the first arm is its drift (--no-control leaves the second run out).

Each run has a folder of its own. The same command again keeps the runs that are finished, redoes
the others and adds new seeds and values. A run that fails is shown with its last lines, and the
rest goes on; wrong settings (exit code 2) end everything, as does Ctrl-C, which keeps what is
finished.

--preflight takes about a minute: settings, data, tokenizer, disk, devices, and 20 real steps with
overlap on and off.

Exit code: 0 done (preflight: ready), 1 a run failed or is no part of an ablation,
2 wrong usage or settings (preflight: not ready), 130 interrupted.
"""

import argparse
import contextlib
import difflib
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import compare
import stats
from read_log import Run, read_logs

PATH_SETTINGS = (
    "DATA_PATH",
    "TOKENIZER_PATH",
    "DATA_DIR",
    "DATASETS_DIR",
    "TRAIN_FILES",
    "VAL_FILES",
    "RESUME",
)
DEFAULT_PATHS = {
    "DATA_PATH": "./data/datasets/fineweb10B_sp1024",  # the challenge's
    "TOKENIZER_PATH": "./data/tokenizers/fineweb_1024_bpe.model",
}
OURS = ("RUN_ID", "SEED")  # set a run, so never varied and never part of what runs have in common
LAST_LINES = 12  # shown of a run that failed
POLL_S = 0.5  # between two looks at a run's progress
PATIENCE_S = 20.0  # for a run to end after each signal
MODES = {"steps": ("ITERATIONS", "MAX_WALLCLOCK_SECONDS"), "seconds": ("MAX_WALLCLOCK_SECONDS",)}
# Each of the first ten steps is logged, and waits for the device; the rest run on.
PREFLIGHT_STEPS, TIMED_FROM = 20, 10
OVERLAP_SWITCHES = ("TRAIN_PREFETCH", "TRAIN_COPY_STREAM", "VAL_PREFETCH", "VAL_COPY_STREAM")
# Of train and val loss on CUDA, whose sums are not repeatable: nats at the first step,
# and later, when differences have grown through training. A batch overwritten in flight
# has been seen to cost 0.4 nats at step 2.
CUDA_TOLERANCE = (1e-3, 2e-2)
SPARE_BYTES = 1 << 30  # of disk, beyond the files of a run


class AblationError(Exception):
    """What is wrong, for people: one line, or the trainer's own list."""


# --- the trainer's command ---


class Trainer:
    """A command that starts a run, made independent of the folder in which it is started."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        """Raises AblationError where the program is not found."""
        self.given, self.folder = list(command), folder
        program = shutil.which(command[0], path=environ.get("PATH"))
        if program is None:
            raise AblationError(
                f"{command[0]}: no such program: activate its environment, or give its full path"
            )
        self.argv = [os.path.join(folder, program), *(self._absolute(word) for word in command[1:])]
        self.script = next(
            (Path(word) for word in self.argv if word.endswith(".py") and os.path.isfile(word)),
            None,
        )
        self.python = _interpreter(self.argv[0])
        self.environ = {k: v for k, v in environ.items() if k not in OURS}
        for name in ("PATH", "PYTHONPATH"):
            if name in environ:
                parts = environ[name].split(os.pathsep)
                self.environ[name] = os.pathsep.join(
                    os.path.join(folder, part) if part else part for part in parts
                )

    def _absolute(self, word: str) -> str:
        """Words that name a file here, such as train_gpt.py; nothing that only looks like one."""
        names_file = (
            not word.startswith("-")
            and ("." in word or os.sep in word)
            and (self.folder / word).is_file()
        )
        return os.path.join(self.folder, word) if names_file else word

    def source(self) -> str:
        return self.script.read_text(encoding="utf-8", errors="replace") if self.script else ""

    def variables(self, **settings: str) -> dict[str, str]:
        """The environment of a run.

        Relative paths of data are those of the folder where the command was given.
        """
        found = {**self.environ, **settings}
        for name in PATH_SETTINGS:
            value = found.get(name)
            if (
                value
                and not os.path.isabs(value)
                and (name != "RESUME" or (self.folder / value).exists())
            ):
                found[name] = os.path.normpath(self.folder / value)
        return found

    def configuration(self, **settings: str) -> dict[str, dict[str, Any]] | None:
        """--print-config: name -> {"value", "source"};
        None: the script has no such argument, or its Python is unknown.

        Raises AblationError with the script's own words where it refuses the settings.
        """
        if self.script is None or self.python is None or "--print-config" not in self.source():
            return None
        try:
            done = subprocess.run(
                [self.python, str(self.script), "--print-config"],
                cwd=self.folder,
                timeout=300,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env=self.variables(**settings),
            )
        except subprocess.TimeoutExpired as error:
            raise AblationError(
                f"{self.script.name} --print-config: no answer in 300 s: is its disk at work?"
            ) from error
        if done.returncode:
            raise AblationError(
                done.stderr.strip()
                or f"{self.script.name} --print-config: exit code {done.returncode}"
            )
        try:
            found = json.loads(done.stdout[done.stdout.index("{") :])
            return {name: dict(entry) for name, entry in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise AblationError(
                f"{self.script.name} --print-config: not the JSON object expected ({error})"
            ) from error

    def settings(self, configuration: Mapping[str, Mapping[str, Any]] | None) -> dict[str, str]:
        """The trainer's settings in the environment;
        without --print-config the names that its text quotes.
        """
        if configuration is not None:
            names = {
                name.upper()
                for name, entry in configuration.items()
                if entry.get("source") == "environment"
            }
        else:
            names = set(re.findall(r"""["']([A-Z][A-Z0-9_]{2,})["']""", self.source()))
            names -= {"PATH", "HOME", "RANK"}
        return {name: self.environ[name] for name in sorted(names & set(self.environ))}


def _interpreter(program: str) -> str | None:
    """The Python that runs a program such as torchrun:
    itself, or the one named in its first line; None: not known.
    """
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        return program
    with contextlib.suppress(OSError), open(program, "rb") as file:
        first = file.readline(500).decode("utf-8", "replace")
        words = first[2:].split() if first.startswith("#!") else []
        return shutil.which(words[-1]) if words and "python" in words[-1] else None
    return None


def fresh_folder(path: Path, trainer: Trainer) -> Path:
    """An empty working folder, in which the defaults ./data/... are found, too."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    if (trainer.folder / "data").is_dir():
        (path / "data").symlink_to(trainer.folder / "data")
    return path


def run_child(
    trainer: Trainer,
    work: Path,
    settings: Mapping[str, str],
    *,
    watch: Callable[[Path], None],
    held: Sequence[int] = (),
) -> int:
    """Runs the command in `work` to its exit code, its output in output.txt.
    Whatever ends this ends it, too.

    `held` are open files that it keeps open:
    a lock that lasts as long as the run, should this process be killed.
    """

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a background job starts ignores it

    output = work / "output.txt"
    with open(output, "wb") as out:
        child = subprocess.Popen(
            trainer.argv,
            cwd=work,
            env=trainer.variables(**settings),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=held,
            preexec_fn=heed_interrupts,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(POLL_S)
                watch(output)
        finally:
            if child.poll() is None:
                end(child)


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a command and its group: politely first, as torchrun has to end its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(PATIENCE_S)
            return


def last_lines(output: Path, count: int = LAST_LINES) -> list[str]:
    try:
        with open(output, "rb") as file:
            file.seek(max(0, output.stat().st_size - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[:300] for line in lines if line.strip()][-count:]


# --- this machine ---


def gpus() -> list[dict[str, str]]:
    """Name, driver, MiB in all and in use of each NVIDIA device; none without nvidia-smi."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        rows = [
            [word.strip() for word in line.split(",")]
            for line in done.stdout.splitlines()
            if line.count(",") == 3
        ]
        names = ("name", "driver", "total_mib", "used_mib")
        return [dict(zip(names, row, strict=True)) for row in rows]
    return []


def machine() -> dict[str, Any]:
    """What step times depend on; not the host's name, which a rented machine changes."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found[1] if found else cpu
    found = gpus()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "gpus": [gpu["name"] for gpu in found],
        "driver": found[0]["driver"] if found else None,
    }


def versions(trainer: Trainer) -> dict[str, str]:
    """Of the trainer's Python and packages; torch itself is not imported."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "found = {'python': platform.python_version()}\n"
        "for name in ('torch', 'numpy', 'sentencepiece', 'huggingface_hub', 'flash_attn'):\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            [trainer.python or "unknown", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=trainer.environ,
        )
        return dict(json.loads(done.stdout))
    return {}


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
        if len(words) <= 80 and all(
            re.fullmatch(r"[A-Za-z0-9.-]*[A-Za-z0-9]", value) for _, value in self.settings
        ):
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
    """All runs in their order:
    a repeat a seed, rotated by one arm each, so that no arm always comes first.
    """
    result = []
    for repeat, seed in enumerate(seeds):
        turn = repeat % len(arms)
        result += [Planned(arm, seed) for arm in (*arms[turn:], *arms[:turn])]
        result += [Planned(arms[0], seed, control=True)] * control
    return result


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """NAME=v1,v2 each. Raises AblationError."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise AblationError(
                f"--vary {text}: write NAME=value,value, such as TRAIN_PREFETCH=1,0"
            )
        if name in OURS:
            raise AblationError(
                f"--vary {text}: every run has its own {name}" + "; use --seeds" * (name == "SEED")
            )
        found.setdefault(name, []).extend(value.strip() for value in values.split(","))
        if "" in found[name] or len(set(found[name])) < len(found[name]):
            raise AblationError(f"--vary {text}: values must differ, none may be empty")
    if math.prod(len(values) for values in found.values()) < 2:
        raise AblationError(
            "--vary: nothing varies: name two values, such as --vary TRAIN_PREFETCH=1,0"
        )
    return found


def parse_seeds(text: str, environ: Mapping[str, str]) -> list[int]:
    """3: so many, from SEED (1337) on; 1337,42: these. Raises AblationError."""
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
        if "," not in text:
            first = int(environ.get("SEED", 1337))
            numbers = list(range(first, first + numbers[0]))
    except ValueError as error:
        raise AblationError(
            f"--seeds {text}: write how many, such as 3, or which, such as 1337,42,7"
        ) from error
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise AblationError(f"--seeds {text}: one at least, whole numbers from 0, each once")
    return numbers


# --- the folder ---


class Folder:
    """Where an ablation lives:
    manifest.json, runs/<RUN_ID>/ to work in, logs/ with copies of all logs, the report.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.manifest_path = path, path / "logs", path / "manifest.json"
        self.manifest: dict[str, Any] = {}

    def open(self, base: Mapping[str, Any]) -> None:
        """Takes the folder for this ablation.

        Raises AblationError if it holds something else, or another process has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            strange = [path.name for path in self.path.iterdir() if path.name != ".lock"]
            self.lock = (self.path / ".lock").open("w", encoding="utf-8")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AblationError(
                f"{self.path}: another ablate.py, or a run that it started, is at work in it: "
                "wait for it, or name another --out"
            ) from error
        except OSError as error:
            raise AblationError(
                f"{self.path}: cannot be used: {error.strerror}: name another --out"
            ) from error
        if not self.manifest_path.exists() and strange:
            raise AblationError(
                f"{self.path}: holds files, but no manifest.json of an ablation: name another --out"
            )
        if self.manifest_path.exists():
            self.manifest = self._read()
            changed = _changed(self.manifest["base"], base)
            if changed:
                raise AblationError(
                    f"{self.path}: holds runs made otherwise ({'; '.join(changed)}): "
                    "name another --out"
                )
        self.manifest.setdefault("created", _now())
        self.manifest.setdefault("runs", {})
        self.manifest["base"] = dict(base)
        self.logs.mkdir(exist_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            if isinstance(found["base"], dict) and isinstance(found["runs"], dict):
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise AblationError(
            f"{self.manifest_path}: cannot be read: name another --out, or remove the folder"
        )

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
        """What the run's logs say, its arm's values and seed included, if the run is finished."""
        paths = [
            path
            for suffix in (".txt", ".jsonl")
            if (path := self.logs / f"{run.run_id}{suffix}").exists()
        ]
        found = read_logs(paths).runs
        entry = self.manifest["runs"].get(run.run_id, {})
        ended = found and (
            found[-1].status == "finished" or entry.get("exit_code") == 0 and len(paths) == 1
        )
        made = entry.get("settings"), entry.get("seed"), entry.get("exit_code") or 0
        if not ended or made != (dict(run.arm.settings), run.seed, 0):
            return None
        read = found[-1]
        if read.seed not in (None, run.seed) or any(
            _other(read.config.get(name.lower()), value) for name, value in run.arm.settings
        ):
            return None
        read.seed = run.seed
        for name, value in run.arm.settings:
            read.config.setdefault(name.lower(), value)
        return read


def _other(logged: Any, value: str) -> bool:
    """Does a log contradict a value that was set?

    Numbers are compared as such; of texts, only whether there is one.
    """
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
            result += [
                f"{key} was {before.get(key, 'not set')}, is {after.get(key, 'not set')}"
                for key in dict.fromkeys((*before, *after))
                if before.get(key) != after.get(key)
            ]
        elif before != after:
            result.append(f"{name} was {str(before)[:60]}, is {str(after)[:60]}")
    return result


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# --- running ---


class Progress:
    """One line that is overwritten on a terminal; elsewhere a line a run."""

    def __init__(self, total: int, past_s: Sequence[float]) -> None:
        self.total, self.done = total, 0
        self.times, self.started = list(past_s), 0.0
        self.words = ""
        self.terminal = sys.stdout.isatty()

    def begin(self, words: str) -> None:
        self.started, self.words = time.monotonic(), f"[{self.done + 1}/{self.total}] {words}"
        if self.terminal:
            self._overwrite(self.words)
        else:
            print(f"{self.words}: started, {self.remaining(0.0)}", flush=True)

    def tick(self, output: Path) -> None:
        if self.terminal:
            step, share = reached(last_lines(output, 40))
            self._overwrite(f"{self.words}  {step}  {self.remaining(share)}")

    def remaining(self, share: float) -> str:
        """Time until the last run is over,
        from the runs that are, or from the share of this one.
        """
        elapsed = time.monotonic() - self.started
        if self.times:
            run_s = statistics.fmean(self.times)
        elif share > 0.02:
            run_s = elapsed / share
        else:
            return "ETA not known before the first run is over"
        return f"ETA {clock(max(run_s - elapsed, 0.0) + run_s * (self.total - self.done - 1))}"

    def over(self, words: str) -> None:
        self.done += 1
        if self.terminal:
            self._overwrite("")
        print(f"{self.words}: {words} after {clock(time.monotonic() - self.started)}", flush=True)

    def _overwrite(self, words: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print("\r" + words[:width].ljust(width), end="\r" * (not words), flush=True)


def reached(lines: Sequence[str]) -> tuple[str, float]:
    """(step:n/N, share of the run) of the last line that tells a step."""
    for line in reversed(lines):
        if found := re.search(r"(?<!_)step:(\d+)/(\d+)", line):
            share = int(found[1]) / max(1, int(found[2]))
            eta = re.search(r"\beta:([\d.]+)s", line)
            spent = re.search(r"train_time:\s?([\d.]+)ms", line)
            if eta and spent and float(spent[1]) > 0:
                # Where a cap ends the run, its steps are no measure.
                share = max(share, float(spent[1]) / (float(spent[1]) + 1e3 * float(eta[1])))
            return found[0], share
    return "", 0.0


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


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
        self.arms = [
            Arm(tuple(zip(self.vary, values, strict=True)))
            for values in itertools.product(*self.vary.values())
        ]
        self.runs = plan(self.arms, self.seeds, self.control)

    def settings(self, run: Planned) -> dict[str, str]:
        """The variables of a run."""
        return {**self.fixed, **dict(run.arm.settings), "SEED": str(run.seed), "RUN_ID": run.run_id}

    @property
    def fixed(self) -> dict[str, str]:
        """What the mode sets in every run."""
        if self.mode is None:
            return {}
        return (
            {"ITERATIONS": self.mode[1], "MAX_WALLCLOCK_SECONDS": "0"}
            if self.mode[0] == "steps"
            else {"MAX_WALLCLOCK_SECONDS": self.mode[1]}
        )

    def base(self, configuration: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
        """What all runs of a folder have in common; a change of it makes another ablation."""
        trainer, owned = self.trainer, {*self.vary, *self.fixed, *OURS}
        return {
            "command": shlex.join(trainer.given),
            "folder": str(trainer.folder),
            "script_sha256": trainer.script
            and hashlib.sha256(trainer.script.read_bytes()).hexdigest()[:16],
            "mode": " ".join(self.mode) if self.mode else "as set",
            "settings": {
                k: v for k, v in trainer.settings(configuration).items() if k not in owned
            },
            "machine": machine(),
            "versions": versions(trainer),
        }

    def words(self) -> str:
        length = f"{self.mode[1]} {self.mode[0]} each" if self.mode else "as long as set"
        seeds = (
            f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)} "
            f"({', '.join(map(str, self.seeds))})"
        )
        return f"{', '.join(self.vary)}: {len(self.arms)} arms x {seeds}, {length}"


def run_all(ablation: Ablation, folder: Folder) -> list[str]:
    """Runs what is not finished; returns the failures.

    Raises AblationError where settings are wrong.
    """
    entries, failures = folder.manifest["runs"], []
    for run in ablation.runs:
        if entries.get(run.run_id, {}).get("status") == "running":
            folder.collect(run)  # it may have outlived a process that was killed
    todo = [run for run in ablation.runs if folder.result(run) is None]
    if kept := len(ablation.runs) - len(todo):
        print(f"{kept} of {len(ablation.runs)} runs are finished and kept", flush=True)
    progress = Progress(
        len(todo),
        [
            entries[run.run_id]["wall_s"]
            for run in ablation.runs
            if run not in todo and "wall_s" in entries.get(run.run_id, {})
        ],
    )
    for run in todo:
        code, finished = run_one(ablation, folder, run, progress)
        if not finished:
            lines = "\n".join(f"    {line}" for line in last_lines(folder.work(run) / "output.txt"))
            print(lines or "    it printed nothing", flush=True)
            failures.append(
                f"{run.words}: exit code {code}" + ", but its log has no end" * (code == 0)
            )
        if code == 2:
            raise AblationError(
                f"{run.words}: the trainer refuses its settings (above): nothing more was run"
            )
    return failures


def run_one(
    ablation: Ablation, folder: Folder, run: Planned, progress: Progress
) -> tuple[int, bool]:
    """A run from its start to its record in the manifest: (exit code, is it finished)."""
    started = time.time()
    folder.record(
        run,
        settings=dict(run.arm.settings),
        seed=run.seed,
        control=run.control,
        status="running",
        started=started,
        load=os.getloadavg()[0],
        exit_code=None,
        host=platform.node(),
    )
    progress.begin(run.words)
    work = fresh_folder(folder.work(run), ablation.trainer)
    try:
        code = run_child(
            ablation.trainer,
            work,
            ablation.settings(run),
            watch=progress.tick,
            held=(folder.lock.fileno(),),
        )
    except KeyboardInterrupt:
        folder.record(run, status="interrupted")
        raise
    folder.collect(run)
    folder.record(run, exit_code=code, wall_s=round(time.time() - started, 3))
    finished = code == 0 and folder.result(run) is not None
    folder.record(run, status="finished" if finished else "failed")
    if finished:
        progress.times.append(time.time() - started)
    progress.over("finished" if finished else f"FAILED (exit code {code})")
    return code, finished


# --- what came out ---


@dataclass
class Difference:
    """An arm minus the first arm, paired by seed; the interval (95 %) is None for a single pair."""

    arm: str
    metric: str
    unit: str
    pairs: int
    first_mean: float
    mean: float
    low: float | None
    high: float | None
    measurable: bool

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
    def percent(self) -> float | None:
        return 100 * self.mean / abs(self.first_mean) if self.first_mean else None


@dataclass
class Results:
    """The finished runs of an ablation, and what follows from them."""

    ablation: Ablation
    runs: dict[Planned, Run]
    started: dict[Planned, float]  # Unix seconds

    @functools.cached_property
    def metrics(self) -> list[tuple[str, str, Callable[[Run], float | None]]]:
        """(name, unit, value of a run) of all that is compared."""
        found = list(self.runs.values())
        kind = compare.common_kind(found)
        bpb = len({run.val_tokens for run in found if run.val_tokens}) > 1 or any(
            run.headline and run.headline.val_loss is None for run in found
        )

        def loss(run: Run) -> float | None:
            score = compare.result_of(run, kind) if kind else None
            return None if score is None else score.val_bpb if bpb else score.val_loss

        def val_s(run: Run) -> float | None:
            return None if run.val_total_ms is None else run.val_total_ms / 1e3

        result: list[tuple[str, str, Callable[[Run], float | None]]] = [
            ("step time", "ms", lambda run: run.step_times().mean),
            ("validation time", "s", val_s),
            (f"loss ({kind})" if kind else "loss", "bits a byte" if bpb else "nats", loss),
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
        return {
            seed: number
            for seed, number in found.items()
            if number is not None and math.isfinite(number)
        }

    def noise(self, value: Callable[[Run], float | None]) -> list[float]:
        """What second runs of the first arm differ by from the first ones of their seed."""
        arm = self.ablation.arms[0]
        first, again = self.values(arm, value), self.values(arm, value, control=True)
        return [again[seed] - first[seed] for seed in first if seed in again]

    def differences(self) -> list[Difference]:
        result, first_arm = [], self.ablation.arms[0]
        for arm, (name, unit, value) in itertools.product(self.ablation.arms[1:], self.metrics):
            first, second = self.values(first_arm, value), self.values(arm, value)
            seeds = [seed for seed in first if seed in second]
            if not seeds:
                continue
            a, b = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            test = stats.paired(a, b) if len(seeds) > 1 else None
            mean, low, high = (
                (test.difference, test.low, test.high) if test else (b[0] - a[0], None, None)
            )
            alone = max(map(abs, self.noise(value)), default=0.0)
            clear = test is not None and not low <= 0 <= high and abs(mean) > alone
            result.append(
                Difference(
                    arm.label, name, unit, len(seeds), statistics.fmean(a), mean, low, high, clear
                )
            )
        return result

    def refusals(self) -> dict[str, list[str]]:
        """Of each arm, why its runs and the first arm's are no ablation of what was varied."""
        result, first = {}, self.ablation.arms[0]
        for arm in self.ablation.arms[1:]:
            varied = [
                name
                for (name, old), (_, new) in zip(first.settings, arm.settings, strict=True)
                if old != new
            ]
            groups = [
                [read for run, read in self.runs.items() if run.arm == one and not run.control]
                for one in (first, arm)
            ]
            options = argparse.Namespace(
                metric="bpb", score="auto", margin=0.0, alpha=0.05, varied=varied
            )
            found = compare.compare_groups(*groups, options).refusals if all(groups) else []
            # One seed is no sample, which the table says;
            # two that end alike to the digit are no repetition of a log.
            result[arm.label] = [why for why in found if "a test needs two" not in why]
        return {label: why for label, why in result.items() if why}

    def drift(self) -> tuple[float, float, float, float] | None:
        """(percent, low, high, hours) that the first arm's step time changed by,
        in a straight line; None: too few.
        """
        points = [
            (self.started[run] / 3600, ms)
            for run, read in self.runs.items()
            if run.arm == self.ablation.arms[0] and (ms := read.step_times().mean)
        ]
        if len(points) < 3:
            return None
        x, y = [p[0] for p in points], [p[1] for p in points]
        spread = statistics.pvariance(x) * len(x)
        if not spread:
            return None
        slope, level = statistics.linear_regression(x, y)
        rest = sum((b - level - slope * a) ** 2 for a, b in points)
        reach = stats.t_quantile(0.975, len(x) - 2) * math.sqrt(rest / (len(x) - 2) / spread)
        hours, mean = max(x) - min(x), statistics.fmean(y)
        changes = (slope, slope - reach, slope + reach)
        return *(100 * change * hours / mean for change in changes), hours


def arm_lines(results: Results) -> list[str]:
    rows = []
    arms = results.ablation.arms
    for arm, control in [*((arm, False) for arm in arms), (arms[0], True)]:
        columns = [
            list(results.values(arm, value, control).values()) for _, _, value in results.metrics
        ]
        count = sum(run.arm == arm and run.control == control for run in results.runs)
        if count or not control:
            label = arm.label + " (again)" * control
            rows.append([label, str(count), *itertools.chain(*map(_mean_std, columns))])
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
            "-"
            if d.percent is None or d.unit in ("nats", "bits a byte")
            else f"{d.percent:+.2f} %",
            "-" if d.low is None else f"{d.low:+.4g} to {d.high:+.4g}",
            d.words,
        ]
        for d in found
    ]
    head = ["arm", "of", "pairs", "difference", "%", "95 % interval", "so"]
    lines = ["Differences from the first arm, paired by seed", *compare.table(head, rows, 2)]
    known = [d for d in found if d.low is not None]
    if len(known) > 4:
        lines.append(
            f"({len(known)} intervals: where nothing differs, one in 20 leaves out zero by chance)"
        )
    return lines if rows else []


def drift_lines(results: Results) -> list[str]:
    lines, drift, alone = [], results.drift(), []
    if drift:
        percent, low, high, hours = drift
        lines.append(
            f"  drift: step time {percent:+.2f} % in {clock(3600 * hours)} "
            f"(95 % interval {low:+.2f} to {high:+.2f}), the trend of all runs of the first arm"
        )
    for name, unit, value in results.metrics:
        if noise := results.noise(value):
            alone.append(f"{name} {max(map(abs, noise)):.4g} {unit}")
    if alone:
        lines.append(
            "  noise: two runs of the first arm with one seed differ by at most "
            f"{', '.join(alone)}; less than that is not called measurable"
        )
    return [
        "The machine itself",
        *(lines or ["  not known: fewer than three runs of the first arm"]),
    ]


def verdict(results: Results, found: Sequence[Difference]) -> str:
    """The outcome in one sentence."""
    first, refused, clauses = results.ablation.arms[0].label, results.refusals(), []
    clauses += [f"{arm} is no ablation: {'; '.join(why)}" for arm, why in refused.items()]
    found = [d for d in found if d.arm not in refused]
    clear = [d for d in found if d.measurable]
    clauses += [
        (
            f"{d.arm} changes {d.metric} by {d.mean:+.4g} {d.unit} "
            f"(95 % interval {d.low:+.4g} to {d.high:+.4g}) against {first}"
        )
        for d in clear
    ]
    if not found:
        clauses += ["no pair of finished runs"] if not refused else []
    elif all(d.low is None for d in found):
        clauses.append(
            "one seed a pair: whether its differences are more than chance cannot be told"
        )
    elif not clear:
        one_pair = len({d.arm for d in found}) == 1
        arms = f"{found[0].arm} and {first}" if one_pair else "the arms"
        equal = [
            metric
            for metric in dict.fromkeys(d.metric for d in found)
            if all(d.equal for d in found if d.metric == metric)
        ]
        digits = f" ({', '.join(equal)}: equal to the digit)" if equal else ""
        clauses.append(f"no measurable difference between {arms}{digits}")
    elif rest := [d.metric for d in found if not d.measurable]:
        otherwise = " otherwise" * bool(set(rest) & {d.metric for d in clear})
        clauses.append(f"no measurable difference in {', '.join(dict.fromkeys(rest))}{otherwise}")
    return "Verdict: " + "; ".join(clauses)


def conclude(ablation: Ablation, folder: Folder, failures: Sequence[str]) -> int:
    """Prints and keeps the report of what is finished."""
    runs = {run: read for run in ablation.runs if (read := folder.result(run)) is not None}
    if not runs:
        print("no run is finished")
        return 1
    results = Results(
        ablation, runs, {run: folder.manifest["runs"][run.run_id]["started"] for run in runs}
    )
    logs = compare.Logs(runs=list(runs.values()))
    found = results.differences()
    blocks = [
        compare.report(logs, None),
        [ablation.words()],
        arm_lines(results),
        difference_lines(found),
        drift_lines(results),
    ]
    full = sum(read.stopped_early is None for read in runs.values())
    if full and ablation.mode and ablation.mode[0] == "seconds":
        blocks.append(
            [f"Note: ITERATIONS, not the time, ended {full} of {len(runs)} runs: raise it"]
        )
    blocks += [["Failed", *(f"  {failure}" for failure in failures)]] if failures else []
    blocks.append([verdict(results, found)])
    text = "\n\n".join("\n".join(block) for block in blocks if block)
    print(f"\n{text}")
    write_atomic(folder.path / "report.txt", f"{text}\n")
    folder.save(differences=[asdict(d) for d in found], verdict=verdict(results, found))
    problem = compare.draw(argparse.Namespace(plot=folder.path / "curves.png"), logs.runs)
    curves = f"curves: {folder.path / 'curves.png'}"
    print("\n" + (problem.replace("--plot", "curves.png") if problem else curves))
    print(
        f"report: {folder.path / 'report.txt'}   logs: {folder.logs}   "
        f"what ran on what: {folder.manifest_path}"
    )
    return int(bool(failures or results.refusals()))


def check_names(ablation: Ablation, configuration: Mapping[str, Any] | None) -> None:
    """Varied names that the trainer does not know vary nothing.

    Raises AblationError, or says so.
    """
    source = ablation.trainer.source()
    for name in ablation.vary:
        if (configuration is not None and name.lower() in configuration) or re.search(
            rf"\b{name}\b", source
        ):
            continue
        known = [other.upper() for other in configuration or {}]
        close = difflib.get_close_matches(name, known, 1, 0.85)
        if close:
            raise AblationError(
                f"--vary {name}: the trainer has no such setting: did you mean {close[0]}?"
            )
        print(
            f"note: {name} is no setting of {ablation.trainer.given[-1]}: "
            "taken as one of its surroundings"
        )


def ablate(options: argparse.Namespace, trainer: Trainer) -> int:
    mode = next(
        ((name, value) for name in MODES if (value := getattr(options, name)) is not None), None
    )
    ablation = Ablation(
        trainer,
        parse_vary(options.vary),
        parse_seeds(options.seeds, os.environ),
        options.control,
        mode,
    )
    folder = Folder(options.out or Path("logs") / f"ablate-{'-'.join(ablation.vary).lower()}"[:120])
    if twice := next((name for name in ablation.vary if name in ablation.fixed), None):
        raise AblationError(f"--vary {twice}: --{mode[0]} sets it: leave out one of them")
    configuration, seen = None, set()
    for arm in ablation.arms:
        # A wrong value is found now, not after the runs before it; each value is asked about once.
        if not seen >= set(arm.settings):
            configuration = trainer.configuration(**{**ablation.fixed, **dict(arm.settings)})
            seen |= set(arm.settings)
    check_names(ablation, configuration)
    print(
        f"{ablation.words()}; {len(ablation.runs)} runs, the first arm "
        + ("again at the end of each repeat" if ablation.control else "not repeated")
    )
    if options.dry_run:
        for number, run in enumerate(ablation.runs, 1):
            variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in ablation.settings(run).items())
            print(f"{number:4}  {variables} {shlex.join(trainer.given)}")
        print(f"nothing was run; the folder would be {folder.path}")
        return 0
    folder.open(ablation.base(configuration))
    folder.save(
        vary=ablation.vary,
        seeds=ablation.seeds,
        control=ablation.control,
        order=[run.run_id for run in ablation.runs],
    )
    try:
        failures = run_all(ablation, folder)
    except KeyboardInterrupt:
        finished = sum(folder.result(run) is not None for run in ablation.runs)
        print(
            f"\ninterrupted: {finished} of {len(ablation.runs)} runs are finished and kept "
            f"in {folder.path}; the same command goes on"
        )
        return 130
    return conclude(ablation, folder, failures)


# --- preflight ---


class Checks:
    """What was looked at, printed as it is found."""

    def __init__(self) -> None:
        self.faults = 0

    def say(self, level: str, name: str, words: str) -> None:
        self.faults += level == "FAULT"
        print(f"{level:<6}{name:<10}{words}", flush=True)

    def ok(self, name: str, words: str) -> None:
        self.say("ok", name, words)

    def note(self, name: str, words: str) -> None:
        self.say("note", name, words)

    def fault(self, name: str, words: str) -> None:
        self.say("FAULT", name, words)


@dataclass
class Settings:
    """A setting's value as the trainer resolves it, else the environment's, else None."""

    environ: Mapping[str, str]
    configuration: Mapping[str, Mapping[str, Any]] | None

    def __call__(self, name: str) -> Any:
        known = (self.configuration or {}).get(name.lower())
        return known.get("value") if known else self.environ.get(name, DEFAULT_PATHS.get(name))

    def number(self, name: str, default: float) -> float:
        try:
            return float(self(name))
        except (TypeError, ValueError):
            return default


def shard_tokens(folder: Path, split: str) -> tuple[int, int, list[str]]:
    """(shards, tokens, what is wrong) of a split, from each shard's header and size."""
    paths, tokens, faults = sorted(glob.glob(str(folder / f"fineweb_{split}_*.bin"))), 0, []
    for path in paths:
        name = os.path.basename(path)
        try:
            with open(path, "rb") as file:
                head = file.read(1024)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
            continue
        magic, version, count = struct.unpack("<3i", head[:12]) if len(head) == 1024 else (0, 0, 0)
        if (magic, version) != (20240520, 1):
            faults.append(f"{name}: {size:,} bytes, no shard of version 1: fetch it again")
        elif size != 1024 + 2 * count:
            faults.append(
                f"{name}: {size:,} bytes, but its header promises {1024 + 2 * count:,}: "
                "fetch it again"
            )
        else:
            tokens += count
    return len(paths), tokens, faults


def check_data(checks: Checks, trainer: Trainer, settings: Settings) -> dict[str, int]:
    """Shards and tokenizer; returns the tokens of each split."""
    folder, tokens = trainer.folder / str(settings("DATA_PATH")), {}
    for split in ("train", "val"):
        count, tokens[split], faults = shard_tokens(folder, split)
        if faults:
            more = f" and {len(faults) - 3} more" * (len(faults) > 3)
            checks.fault("data", f"{folder}: {'; '.join(faults[:3])}{more}")
        elif not count:
            live = split == "train" and (folder / ".producing").exists()
            words = f"{folder}: no fineweb_{split}_*.bin"
            if live:
                checks.note("data", f"{words} so far: their producer is at work")
            else:
                checks.fault("data", f"{words}: fetch the shards, or set DATA_PATH")
        else:
            checks.ok(
                "data",
                f"{count} {split} shard{'s' * (count != 1)}, {tokens[split]:,} tokens in {folder}",
            )
    path = trainer.folder / str(settings("TOKENIZER_PATH"))
    if path.is_file() and path.stat().st_size:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        checks.ok("tokenizer", f"{path}, {path.stat().st_size:,} bytes, sha256 {digest}")
    else:
        checks.fault(
            "tokenizer",
            f"{path}: {'is empty' if path.is_file() else 'no such file'}: set TOKENIZER_PATH",
        )
    return tokens


def processes(command: Sequence[str], devices: int) -> int:
    """That a command starts on this machine: one, or torchrun's --nproc_per_node."""
    given = re.search(r"(?:^| )--nproc[-_]per[-_]node[= ](\w+)", " ".join(command))
    if not given:
        return 1
    return int(given[1]) if given[1].isdigit() else devices or 1  # gpu, auto


def check_devices(checks: Checks, trainer: Trainer, settings: Settings) -> None:
    """NVIDIA devices against what the command starts."""
    found = gpus()
    count = processes(trainer.given, len(found))
    if not found:
        checks.note(
            "devices",
            f"no NVIDIA device: {count} process{'es' * (count != 1)} on the CPU, {os.cpu_count()} "
            f"cores, load {os.getloadavg()[0]:.1f}",
        )
        return
    name = ", ".join(dict.fromkeys(gpu["name"] for gpu in found))
    checks.ok(
        "devices", f"{len(found)} x {name}, driver {found[0]['driver']}, {count} of them used"
    )
    if str(settings("DEVICE")) == "cpu":
        checks.note("devices", "DEVICE=cpu: the devices stay idle")
    elif count < len(found) and "CUDA_VISIBLE_DEVICES" not in trainer.environ:
        checks.note(
            "devices",
            f"the command uses {count} of {len(found)}: set --nproc_per_node={len(found)}",
        )
    elif count > len(found):
        checks.fault(
            "devices",
            f"{count} processes for {len(found)} devices: set --nproc_per_node={len(found)}",
        )
    busy = [
        f"{i} ({gpu['used_mib']} MiB)"
        for i, gpu in enumerate(found)
        if _whole(gpu["used_mib"]) > 1500
    ]
    if busy:
        checks.note(
            "devices",
            f"memory is in use on device {', '.join(busy)}: does another process work there?",
        )


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


def short_settings(settings: Settings) -> dict[str, str]:
    """20 steps that a run of any length begins with, on a part of the validation split;
    nothing else is written.
    """
    batch = int(settings.number("VAL_BATCH_SIZE", 524_288))
    val_tokens = min(4 * batch + 1, int(settings.number("VAL_TOKENS", 0)) or 4 * batch + 1)
    return {
        "ITERATIONS": str(PREFLIGHT_STEPS),
        "MAX_WALLCLOCK_SECONDS": "0",
        "WARMDOWN_ITERS": "0",
        "WARMUP_STEPS": str(int(min(3, settings.number("WARMUP_STEPS", 20)))),
        "TRAIN_LOG_EVERY": "10",
        "VAL_LOSS_EVERY": "0",
        "VAL_TOKENS": str(val_tokens),
    }


def preflight_runs(
    checks: Checks, trainer: Trainer, settings: Settings, out: Path
) -> dict[str, Run]:
    """The runs with overlap `on` and `off` that finished; how others ended is said."""
    for name in ("CHECKPOINT_EVERY", "RESUME", "TRACE_STEPS", "TRAINING_TIMING_BREAKDOWN"):
        trainer.environ.pop(name, None)  # of the real run, not of this trial
    found: dict[str, Run] = {}
    for name in ("on", "off"):
        work, started = fresh_folder(out / name, trainer), time.monotonic()
        run_id = f"preflight_overlap_{name}"
        switches = {switch: str(int(name == "on")) for switch in OVERLAP_SWITCHES}
        print(f"...   run       {PREFLIGHT_STEPS} steps with overlap {name}", flush=True)
        code = run_child(
            trainer,
            work,
            {**short_settings(settings), **switches, "RUN_ID": run_id},
            watch=lambda output: None,
        )
        logs = read_logs(
            path
            for path in (work / "logs" / f"{run_id}.txt", work / "logs" / f"{run_id}.jsonl")
            if path.exists()
        ).runs
        lines = "\n".join(
            f"      {line}"
            for line in last_lines(work / "output.txt", 40 if code == 2 else LAST_LINES)
        )
        for model in work.glob("final_model.*"):
            model.unlink()
        if code == 2:
            checks.fault("settings", f"the trainer refuses them:\n{lines}")
            return found
        if (
            code
            or not logs
            or logs[-1].status != "finished"
            or logs[-1].last_step < PREFLIGHT_STEPS
        ):
            checks.fault("run", f"overlap {name}: ended with exit code {code}, see {work}\n{lines}")
            return found
        found[name] = logs[-1]
        checks.ok(
            "run",
            f"overlap {name}: finished in {time.monotonic() - started:.0f} s, compilation and all",
        )
    return found


def check_agreement(checks: Checks, on: Run, off: Run) -> None:
    """Overlap may change when a batch is read, never which:
    equal data, and losses as equal as the device repeats.
    """
    crcs = [
        (step, crc, off.crc_at()[step]) for step, crc in on.crc_at().items() if step in off.crc_at()
    ]
    different = next(((step, a, b) for step, a, b in crcs if a != b), None)
    if different:
        checks.fault(
            "data",
            "overlap on and off trained on different batches: data_crc "
            f"{different[1]} and {different[2]} at step {different[0]}: "
            "set TRAIN_PREFETCH=0, report it",
        )
    elif crcs:
        checks.ok(
            "overlap",
            "the same batches with overlap on and off: "
            f"data_crc {crcs[-1][1]} at step {crcs[-1][0]}",
        )
    else:
        checks.note(
            "overlap",
            "no data_crc in this trainer's log: that both runs used the same batches is not shown",
        )
    on_cpu = on.hardware.get("device") in (platform.machine(), "cpu", "CPU")
    early, late = (0.0, 0.0) if on_cpu else CUDA_TOLERANCE
    losses = {s.step: s.train_loss for s in off.steps if s.train_loss is not None}
    pairs = [
        (
            f"train_loss at step {s.step}",
            s.train_loss,
            losses[s.step],
            early if s.step == 1 else late,
        )
        for s in on.steps
        if s.train_loss is not None and s.step in losses
    ]
    ends = [run.final_validation for run in (on, off)]
    if all(end is not None and end.val_loss is not None for end in ends):
        pairs.append(("val_loss", ends[0].val_loss, ends[1].val_loss, late))
    wrong = next((pair for pair in pairs if not abs(pair[1] - pair[2]) <= pair[3]), None)
    bound = "to the last digit" if on_cpu else f"within {early:g} nats at step 1 and {late:g} later"
    if wrong:
        checks.fault(
            "overlap",
            f"losses differ: {wrong[0]} is {wrong[1]:.6f} with overlap on, {wrong[2]:.6f} off; "
            f"they must agree {bound}",
        )
    elif pairs:
        largest = max(abs(pair[1] - pair[2]) for pair in pairs)
        checks.ok(
            "overlap", f"{len(pairs)} losses agree {bound} (largest difference {largest:.2g})"
        )
    else:
        checks.fault("overlap", "the logs tell no common training loss: nothing could be compared")


def timed_ms(run: Run) -> float | None:
    """Milliseconds a step after the first ten."""
    times = {s.step: s.train_time_ms for s in run.steps if s.train_time_ms is not None}
    if TIMED_FROM not in times or PREFLIGHT_STEPS not in times:
        return run.step_times().mean
    return (times[PREFLIGHT_STEPS] - times[TIMED_FROM]) / (PREFLIGHT_STEPS - TIMED_FROM)


def say_times(
    checks: Checks, found: Mapping[str, Run], settings: Settings, tokens: Mapping[str, int]
) -> None:
    """Step time, steps that fit, passes over the data, the time of a validation."""
    times = {name: timed_ms(run) for name, run in found.items()}
    if not all(times.values()):
        checks.fault("time", "the logs tell no step time")
        return
    on, off = times["on"], times["off"]
    checks.ok(
        "time",
        f"{on:.2f} ms a step with overlap on, {off:.2f} off "
        f"({100 * (on / off - 1):+.1f} % with it; "
        f"{PREFLIGHT_STEPS - TIMED_FROM} steps each: a rough figure)",
    )
    cap_s = settings.number("MAX_WALLCLOCK_SECONDS", 600)
    iterations = int(settings.number("ITERATIONS", 20_000))
    steps = iterations
    if cap_s > 0:
        fit = int(1e3 * cap_s / on)  # a step that would end behind the cap is not begun
        steps = min(fit, iterations)
        end = f"of ITERATIONS={iterations:,}"
        if fit >= iterations:
            end = f"ITERATIONS={iterations:,} ends it first, after {clock(iterations * on / 1e3)}"
        checks.ok("steps", f"about {fit:,} steps fit MAX_WALLCLOCK_SECONDS={cap_s:g}, {end}")
    else:
        checks.ok(
            "steps",
            f"ITERATIONS={iterations:,} take about {clock(iterations * on / 1e3)}; no cap is set",
        )
    used = steps * int(settings.number("TRAIN_BATCH_TOKENS", 524_288))
    if tokens["train"]:
        (checks.note if used > tokens["train"] else checks.ok)(
            "tokens",
            f"{used:,} will be trained on: "
            f"{used / tokens['train']:.2f} passes over the shards here",
        )
    run = found["on"]
    if run.eval_total_ms and run.val_tokens and tokens["val"]:
        scored = min(tokens["val"], settings.number("VAL_TOKENS", 0) or math.inf)
        seconds = run.eval_total_ms / 1e3 * scored
        checks.ok(
            "eval",
            f"about {seconds / run.val_tokens:.1f} s a validation, "
            f"from {run.val_tokens:,} tokens in {run.eval_total_ms / 1e3:.2f} s",
        )


def say_room(checks: Checks, trainer: Trainer, run: Run, settings: Settings) -> None:
    """Memory and disk, now that the size of a run is known."""
    found, memory = gpus(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    on_cpu = run.hardware.get("device") in (platform.machine(), "cpu", "CPU")
    total = memory if on_cpu or not found else _whole(found[0]["total_mib"])
    if run.peak_mib is not None:
        checks.ok(
            "memory",
            f"{run.peak_mib:,} MiB at the peak of rank 0, of {total:,} MiB"
            + ("" if not on_cpu else " of the machine"),
        )
    model, kept = run.sizes.model or 0, int(settings.number("CHECKPOINT_KEEP", 3)) + 1
    # Weights and up to two moments each.
    checkpoints = 3 * model * kept if settings.number("CHECKPOINT_EVERY", 0) > 0 else 0
    needed = 2 * model + (run.sizes.artifact or 0) * 2 + checkpoints + SPARE_BYTES
    free = shutil.disk_usage(trainer.folder).free
    (checks.ok if free >= needed else checks.fault)(
        "disk",
        f"{free / 1e9:.1f} GB free in {trainer.folder}, about {needed / 1e9:.1f} GB wanted"
        + (" (1 GiB of it to spare)" if free >= needed else ": free the disk"),
    )
    if run.sizes.total is not None:
        level = checks.note if run.sizes.total > compare.CAP_BYTES else checks.ok
        level(
            "artifact",
            f"{run.sizes.total:,} bytes after {PREFLIGHT_STEPS} steps, "
            f"the cap is {compare.CAP_BYTES:,}: a trained model packs to another size",
        )


def preflight(options: argparse.Namespace, trainer: Trainer) -> int:
    """All checks, in the order in which a fault would stop a run."""
    checks, out = Checks(), options.out or Path("logs", "preflight")
    checks.ok("command", shlex.join(trainer.given))
    try:
        configuration = trainer.configuration()
    except AblationError as problem:
        lines = "\n".join(f"      {line}" for line in str(problem).splitlines())
        checks.fault("settings", f"the trainer refuses them:\n{lines}")
        print("NOT READY: settings are wrong")
        return 2
    settings = Settings(trainer.environ, configuration)
    given = trainer.settings(configuration)
    checks.ok(
        "settings",
        " ".join(f"{k}={v}" for k, v in given.items()) or "none in the environment: all defaults",
    )
    if configuration is None:
        checks.note(
            "settings",
            "the script has no --print-config: what it resolves them to is not checked beforehand",
        )
    tokens = check_data(checks, trainer, settings)
    check_devices(checks, trainer, settings)
    free = shutil.disk_usage(trainer.folder).free
    if free < SPARE_BYTES:
        checks.fault(
            "disk", f"{free / 1e6:.0f} MB free in {trainer.folder}: no room for logs and models"
        )
    if not checks.faults:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AblationError(
                f"{out}: cannot be made: {error.strerror}: name another --out"
            ) from error
        found = preflight_runs(checks, trainer, settings, out)
        if len(found) == 2:
            check_agreement(checks, found["on"], found["off"])
            say_times(checks, found, settings, tokens)
            say_room(checks, trainer, found["on"], settings)
    if checks.faults:
        print(f"NOT READY: {checks.faults} fault{'s' * (checks.faults != 1)}, named above")
        return 2
    print(f"READY: {shlex.join(trainer.given)}")
    return 0


# --- command line ---


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, the trainer's command: all that follows the first --)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ablate.py (--vary NAME=v1,v2 [...] | --preflight) [options] -- COMMAND",
    )
    add = parser.add_argument
    add(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=v1,v2",
        help="a setting and its values; may be repeated",
    )
    add(
        "--seeds",
        default="3",
        help="how many seeds, from SEED (1337) on, or which: 1337,42,7 (default: 3)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", metavar="N", help="fixed steps: ITERATIONS=N, MAX_WALLCLOCK_SECONDS=0"
    )
    length.add_argument(
        "--seconds", metavar="S", help="fixed time: MAX_WALLCLOCK_SECONDS=S (ITERATIONS as set)"
    )
    add(
        "--out", type=Path, metavar="FOLDER", help="default: logs/ablate-<names>, or logs/preflight"
    )
    add(
        "--no-control",
        dest="control",
        action="store_false",
        help="do not run the first arm twice in each repeat",
    )
    add("--dry-run", action="store_true", help="show the runs in their order, run nothing")
    add(
        "--preflight",
        action="store_true",
        help="check all that a run needs, and 20 steps with overlap on and off",
    )
    ours, command = list(arguments), []
    if "--" in ours:
        ours, command = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    options = parser.parse_args(ours)
    if not command:
        parser.error("name the trainer's command after --, such as: -- python3 train_gpt.py")
    if options.preflight == bool(options.vary):
        parser.error("say --vary NAME=value,value or --preflight, one of them")
    for name, kind in (("steps", int), ("seconds", float)):
        value = getattr(options, name)
        try:
            if value is not None and not 0 < kind(value) < 1e9:
                raise ValueError
        except ValueError:
            parser.error(f"--{name} {value}: a number above 0")
    return options, command


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end as Ctrl-C does,
    unless whoever started this has them ignored (nohup).
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in old.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    options, command = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        with ended_by_signals():
            trainer = Trainer(command, Path.cwd(), os.environ)
            return preflight(options, trainer) if options.preflight else ablate(options, trainer)
    except AblationError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
