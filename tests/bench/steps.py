"""What is a step's time made of? Ours, ours with each lever off in turn, and another train_gpt.py, on one device.

    python3 tests/bench/steps.py                              ours and its levers, at the baseline's configuration
    python3 tests/bench/steps.py --against OTHER/train_gpt.py          and another script, the reference of all ratios
    python3 tests/bench/steps.py --against OTHER/train_gpt.py --arms   the two scripts alone
    python3 tests/bench/steps.py --validation                 full validation passes instead of training steps
    python3 tests/bench/steps.py --quick                      tiny, also on the CPU: times mean nothing

Settings come from the environment (DATA_PATH and TOKENIZER_PATH together; without them, synthetic shards with something
to learn); every script gets the same, spelt out, since defaults differ between versions. On one device, one process an
arm and run. First every arm runs untimed: it fills the compile caches and gives the losses at steps 1-10, 100 and 200.
Then come the repeats, in each of them every arm once, in the same order: U-O-U-O.

How a script is timed from outside, unedited. What scripts with one contract share is the line `step:<n>/<N>
train_loss:`, printed at the edge of step n; optimizers, loops and clocks differ (the challenge's own is a host clock,
true only as far as something else synchronises). So a driver runs the script as __main__ with a stdout that watches for
that line. At the lines that bound the window, and nowhere else, it waits for the device and reads the clock; at the
last one it notes the peak of memory and ends the process. TRAIN_LOG_EVERY is chosen so that no line falls inside the
window: nothing is added to what is timed. Steps 1-10 are always logged, so the window may begin at one of those; the
priming steps (WARMUP_STEPS=20) come before. A validation is timed from the training line before it to its own line; the
pass before step 0, which compiles, is left out.

The gate, that all arms do the same mathematics: the first step's loss (validation: the loss before it) within 1e-3 of
the reference, later ones within seed noise: three standard deviations of the difference of two runs, of 0.0007 bits per
byte each (between seeds of the challenge's records: 0.0005 to 0.0007), in nats a token of FineWeb at 1,024 pieces. With
other data it is a yardstick. Steps 2 to 99, where the loss still moves fast, are shown and not judged.

MFU: model FLOPs (6 a token and parameter of a matrix product, the head's too, and the causal half of attention) over
the peak of dense bfloat16 products; `-` for a device that PEAKS lacks.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import sentencepiece

ROOT = Path(__file__).resolve().parents[2]
OWN_FOLDERS = [str(ROOT / "logs"), str(ROOT / "tests" / "bench")]
sys.path[:0] = OWN_FOLDERS
import stats  # noqa: E402  (rooms and benchmarks are scripts, not packages)
from loader import BenchError, write_atomic  # noqa: E402

# --- The arms ---------------------------------------------------------------------------------------------------------

Patch = Callable[[Any], Any]  # from what the script has to what takes its place
OURS, OTHER = "ours", "other"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A script, and what of it is switched. What is not there to be switched ends the arm, never passes silently."""

    words: str
    script: str = OURS
    env: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # TORCHINDUCTOR_* or settings that must exist
    patch: Mapping[str, Patch] = dataclasses.field(
        default_factory=dict
    )  # dotted names in the script, before main()
    state: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of torch_state(), at the end: so it took
    modes: tuple[str, ...] = ("steps", "validation")
    cuda: bool = False  # only there


class Refused(Exception):
    """The arm cannot be what it says; one line."""


def there(thing: Any) -> Any:
    """Changes nothing: a script without that name is refused."""
    return thing


def models_only(compiled: Patch) -> Patch:
    """In the place of what takes a log and functions, and gives these compiled."""
    return lambda log, *functions: [
        compiled(log, function)[0] if hasattr(function, "parameters") else function
        for function in functions
    ]


def without_scales(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Weights cast as they are."""

    def patched(self: Any) -> Any:
        self.casts = [(module, None) for module, _ in self.casts]
        return cast(self)

    return patched


def cast_at_use(used: Callable[..., Any]) -> Callable[..., Any]:
    """A weight cast wherever it multiplies: in every micro-step."""

    def patched(module: Any, scale: Any = None) -> Any:
        weight = module.weight if scale is None else scale[:, None] * module.weight
        return weight.to(module.low.dtype)

    return patched


def unfolded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A product whose result is scaled, not its weight."""
    if "scale" not in inspect.signature(forward).parameters:
        raise Refused("no scale is folded into a weight")

    def patched(self: Any, x: Any, scale: Any = None) -> Any:
        y = forward(self, x)
        return y if scale is None else scale.to(y.dtype) * y

    return patched


def pinned(value: bool) -> Patch:
    """A switch, set once and for all."""

    def patch(switch: Callable[[bool], None]) -> Callable[[bool], None]:
        switch(value)
        return lambda _: None

    return patch


ONLY_CUDNN = {
    f"torch.backends.cuda.enable_{kind}_sdp": pinned(kind == "cudnn")
    for kind in ("cudnn", "flash", "mem_efficient", "math")
}
MIX_ORDER = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
ARMS = {  # a lever with no setting: the name that it goes by in the script, in `patch`
    OTHER: Arm("the other script as it is", OTHER),
    OURS: Arm("all levers on"),
    "other-flags": Arm(
        "the other script, cuDNN attention on and mix-order reduction off: flags, not structure",
        OTHER,
        env={MIX_ORDER: "0"},
        patch=ONLY_CUDNN,
        state={"sdp": "cudnn", "mix_order": False},
        cuda=True,
    ),
    "flash": Arm("FlashAttention-2 as torch ships it", env={"ATTENTION_BACKEND": "flash"}),
    "math": Arm("attention unfused", env={"ATTENTION_BACKEND": "math"}),
    "eager": Arm("nothing compiled", env={"TORCH_COMPILE": "0"}),
    "auto-accumulation": Arm(
        "micro-batches from free memory", env={"GRAD_ACCUM_STEPS": "auto"}, modes=("steps",)
    ),
    "mix-order": Arm(
        "mix-order reduction on", env={MIX_ORDER: "1"}, state={"mix_order": True}, modes=("steps",)
    ),
    "eager-optimizer": Arm(
        "the optimizer step not compiled",
        modes=("steps",),
        patch={"Optimizers.update_muon": there, "compiled": models_only},
    ),
    "unfolded": Arm(
        "residual scales applied to activations, not to weights",
        patch={"GPT.cast": without_scales, "Linear.forward": unfolded},
    ),
    "cast-at-use": Arm(
        "weights cast in every micro-step, not once a step", patch={"used": cast_at_use}
    ),
    "resident": Arm(
        "the validation split stays on the device", env={"VAL_RESIDENT": "1"}, modes=("validation",)
    ),
}

# --- What a step costs, and what a device could do --------------------------------------------------------------------

PEAKS = [  # (device's name, dense bfloat16 TFLOP/s with float32 sums, whose figure)
    (r"H100 NVL$|H200 NVL$", 835.0, "NVIDIA data sheets, half of the sparse 1,671"),
    (r"H100 PCIe$", 756.0, "NVIDIA H100 data sheet, half of the sparse 1,513"),
    (r"H100\b|H200$", 989.0, "NVIDIA H100 and H200 data sheets, half of the sparse 1,979"),
    (r"A100\b", 312.0, "NVIDIA A100 data sheet"),
    (r"A40$", 149.7, "NVIDIA A40 data sheet"),
    (r"GeForce RTX 5090$", 209.5, "NVIDIA RTX Blackwell white paper"),
    (r"GeForce RTX 4090$", 165.2, "NVIDIA Ada white paper"),
    (r"GeForce RTX 3090$", 71.0, "NVIDIA GA102 white paper"),
]


def peak_of(device: str) -> tuple[float, str]:
    """(TFLOP/s, whose figure) of a device by its name; (nan, "") if unknown, or a slice of one."""
    return next(
        (
            (peak, source)
            for name, peak, source in PEAKS
            if re.search(name, device) and "MIG" not in device
        ),
        (math.nan, ""),
    )


def flops_a_token(settings: Mapping[str, Any]) -> float:
    """Of training, forward and backward: 130.5 million at the defaults."""
    layers, width, heads, kv_heads, mlp, vocab, seq_len = (
        int(settings[name])
        for name in (
            "NUM_LAYERS",
            "MODEL_DIM",
            "NUM_HEADS",
            "NUM_KV_HEADS",
            "MLP_MULT",
            "VOCAB_SIZE",
            "TRAIN_SEQ_LEN",
        )
    )
    kv_width = width // heads * kv_heads
    a_layer = 2 * width * width + 2 * width * kv_width + 2 * mlp * width * width
    return 6.0 * (layers * a_layer + vocab * width) + 6.0 * layers * seq_len * width


# --- The driver: the script's process ---------------------------------------------------------------------------------


class Mark(NamedTuple):
    """The line at which the clock is read."""

    kind: str  # train or val
    step: int


LINE = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+)(?:.* data_crc:(\w+))?")
REFUSED = 3  # a driver's exit code


class Recorder:
    """A stdout that reads the clock, the device idle, at the lines of `marks`, and calls `finish` after the last."""

    def __init__(
        self,
        out: IO[str],
        marks: Iterable[Mark],
        synchronize: Callable[[], None],
        clock: Callable[[], float],
        finish: Callable[[Recorder], None],
    ) -> None:
        self.out, self.left, self.synchronize, self.clock, self.finish = (
            out,
            list(marks),
            synchronize,
            clock,
            finish,
        )
        self.pending, self.times, self.losses, self.crcs, self.facts = (
            "",
            {},
            {"train": {}, "val": {}},
            {},
            {},
        )

    def write(self, text: str) -> int:
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.out.write(line + "\n")
            self.heed(line)
        return len(text)

    def heed(self, line: str) -> None:
        for word in ("val_loader", "sdp_backends", "attention_mode"):
            if line.startswith(word):
                self.facts[word] = line
        if not (found := LINE.match(line)):
            return
        mark = Mark(found[2], int(found[1]))
        if mark in self.left:
            self.synchronize()
            self.times[mark] = self.clock()
            self.left.remove(mark)
        self.losses[mark.kind][mark.step] = float(found[3])
        if found[4]:
            self.crcs[mark.step] = found[4]
        if not self.left:
            self.finish(self)

    def flush(self) -> None:
        self.out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


def torch_in_use() -> Any:
    """The script's torch, or None."""
    return sys.modules.get("torch")


def synchronize() -> None:
    if (torch := torch_in_use()) and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def torch_state() -> dict[str, Any]:
    """Switches of torch that arms turn, as they are now: None where there is none, or nothing was compiled."""
    if not (torch := torch_in_use()):
        return {"sdp": None, "mix_order": None}
    kinds = ("cudnn", "flash", "mem_efficient", "math")
    enabled = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
    triton = getattr(sys.modules.get("torch._inductor.config"), "triton", None)
    return {"sdp": " ".join(enabled), "mix_order": getattr(triton, "mix_order_reduction", None)}


def hardware() -> dict[str, Any]:
    """Device, torch, and the peak of memory in MiB: the allocator's on CUDA, else the process'."""
    torch, unit = torch_in_use(), 20 if sys.platform == "darwin" else 10
    version = torch.__version__ if torch else "none"
    if torch and torch.cuda.is_initialized():
        return dict(
            cuda=True,
            device=torch.cuda.get_device_name(),
            torch=version,
            peak_mib=torch.cuda.max_memory_allocated() >> 20,
        )
    return dict(
        cuda=False,
        device=platform.machine(),
        torch=version,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> unit,
    )


def is_guard(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and "__main__" in ast.unparse(node.test)
    )


def apply(patches: Mapping[str, Patch], module: types.ModuleType) -> None:
    for name, patch in patches.items():
        *path, last = name.split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        if not hasattr(owner, last):
            raise Refused(f"{module.__file__} has no {name} to switch off")
        setattr(owner, last, patch(getattr(owner, last)))


def run_script(path: Path, patches: Mapping[str, Patch]) -> None:
    """As `python path` does, patched when all is defined and before `if __name__ == "__main__":`; Refused."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    cut = next((i for i, node in enumerate(tree.body) if is_guard(node)), len(tree.body))
    if patches and cut == len(tree.body):
        raise Refused(
            f'{path} has no `if __name__ == "__main__":` before which a lever could be switched off'
        )
    module = sys.modules["__main__"] = types.ModuleType(
        "__main__"
    )  # dataclasses look their module up
    module.__file__, sys.argv = str(path), [str(path)]
    sys.path[:] = [str(path.parent), *(folder for folder in sys.path if folder not in OWN_FOLDERS)]

    def execute(body: list[ast.stmt]) -> None:
        exec(compile(ast.Module(body, []), str(path), "exec", dont_inherit=True), module.__dict__)

    execute(tree.body[:cut])
    apply(patches, module)
    execute(tree.body[cut:])


def drive(order: Mapping[str, Any]) -> int:
    """Runs one arm, and writes its result at the last mark; ends the process there."""

    def finish(recorder: Recorder) -> None:
        result = dict(
            times=[[*mark, at] for mark, at in recorder.times.items()],
            losses=recorder.losses,
            crcs=recorder.crcs,
            facts=recorder.facts,
            state=torch_state(),
            **hardware(),
        )
        write_atomic(Path(order["result"]), json.dumps(result))
        recorder.flush()
        os._exit(0)  # what follows, a validation and an export, is not asked for

    sys.stdout = Recorder(
        sys.stdout, [Mark(*mark) for mark in order["marks"]], synchronize, time.perf_counter, finish
    )
    try:
        run_script(Path(order["script"]), ARMS[order["arm"]].patch)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    print(f"the script ended before its lines {order['marks']}", file=sys.stderr)
    return 1


# --- The runs ---------------------------------------------------------------------------------------------------------

SHAPE = dict(
    VOCAB_SIZE=1024,
    NUM_LAYERS=9,
    MODEL_DIM=512,
    NUM_HEADS=8,
    NUM_KV_HEADS=4,
    MLP_MULT=2,
    TIE_EMBEDDINGS=1,
    TRAIN_SEQ_LEN=1024,
    TRAIN_BATCH_TOKENS=524_288,
    VAL_BATCH_SIZE=524_288,
    WARMUP_STEPS=20,
    SEED=1337,
)
QUICK_SHAPE = SHAPE | dict(
    VOCAB_SIZE=300,
    NUM_LAYERS=2,
    MODEL_DIM=32,
    NUM_HEADS=2,
    NUM_KV_HEADS=1,
    TRAIN_SEQ_LEN=32,
    TRAIN_BATCH_TOKENS=2048,
    VAL_BATCH_SIZE=4096,
    WARMUP_STEPS=2,
)
# No cap and no warm-down: the same rates in every arm, however fast it is.
FIXED = dict(MAX_WALLCLOCK_SECONDS=0, WARMDOWN_ITERS=0)
# Not for all scripts, or not while time is taken.
LEFT_OUT = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "RUN_ID",
    "RESUME",
    "CHECKPOINT_EVERY",
    "VAL_TOKENS",
    "TRACE_STEPS",
    "TRAINING_TIMING_BREAKDOWN",
}
VAL_TOKENS, MOST_TRAIN_TOKENS = 62_021_633, 100_000_000


class Plan(NamedTuple):
    """A run: its settings, and the lines at which the clock is read."""

    settings: dict[str, int]
    marks: list[Mark]


def gate_plan(options: argparse.Namespace) -> Plan:
    """Untimed: losses. A validation's: the pass before step 0."""
    if options.validation:
        return Plan(dict(ITERATIONS=1, VAL_LOSS_EVERY=1, TRAIN_LOG_EVERY=1), [Mark("val", 0)])
    half = options.gate_steps // 2
    return Plan(
        dict(ITERATIONS=2 * half, VAL_LOSS_EVERY=0, TRAIN_LOG_EVERY=half), [Mark("train", 2 * half)]
    )


def timed_plan(options: argparse.Namespace) -> Plan:
    if options.validation:
        passes = range(1, options.passes + 1)
        return Plan(
            dict(ITERATIONS=options.passes, VAL_LOSS_EVERY=1, TRAIN_LOG_EVERY=1),
            [Mark(kind, step) for step in passes for kind in ("train", "val")],
        )
    last = options.skip + options.steps
    return Plan(
        dict(ITERATIONS=last, VAL_LOSS_EVERY=0, TRAIN_LOG_EVERY=last),
        [Mark("train", options.skip), Mark("train", last)],
    )


def measured_ms(result: Mapping[str, Any], options: argparse.Namespace) -> float:
    """Of a step, or of a validation (the median of a run's passes)."""
    at = {Mark(kind, step): seconds for kind, step, seconds in result["times"]}
    if not options.validation:
        return (
            1e3
            * (at[Mark("train", options.skip + options.steps)] - at[Mark("train", options.skip)])
            / options.steps
        )
    return statistics.median(
        1e3 * (at[Mark("val", k)] - at[Mark("train", k)]) for k in range(1, options.passes + 1)
    )


def markov_tokens(vocab: int, count: int, seed: int) -> np.ndarray:
    """A chain in which each token has eight likely successors: a loss can fall here, and two models can differ."""
    table = np.random.default_rng(0).integers(0, vocab, (vocab, 8), dtype=np.uint16)
    skewed = (8 * np.linspace(0, 1, 256, endpoint=False) ** 3).astype(np.uint8)
    generator, length = np.random.default_rng(seed), 1024
    tokens = np.empty((length, -(-count // length)), dtype="<u2")  # a column: a chain
    tokens[0] = generator.integers(0, vocab, tokens.shape[1])
    for k in range(1, length):
        choice = skewed[generator.integers(0, 256, tokens.shape[1], dtype=np.uint8)]
        tokens[k] = table[tokens[k - 1], choice]
    return tokens.T.reshape(-1)[:count]


def write_tokenizer(path: Path, vocab: int) -> None:
    """A SentencePiece model of `vocab` pieces: not every script takes another kind."""
    generator = np.random.default_rng(1)
    words = [
        "".join(map(chr, generator.integers(97, 123, n)))
        for n in generator.integers(2, 9, 4 * vocab)
    ]
    try:
        with open(path, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(words),
                model_writer=file,
                vocab_size=vocab,
                model_type="bpe",
                byte_fallback=True,
                pad_id=0,
                bos_id=1,
                eos_id=2,
                unk_id=3,
                minloglevel=2,
            )
    except (RuntimeError, OSError) as error:
        raise BenchError(
            f"VOCAB_SIZE={vocab}: no synthetic tokenizer of that size: set DATA_PATH and TOKENIZER_PATH"
        ) from error


def synthetic_data(
    folder: Path, settings: Mapping[str, str], options: argparse.Namespace
) -> dict[str, str]:
    """Shards and a tokenizer in `folder`; the settings that use them."""
    vocab, batch = int(settings["VOCAB_SIZE"]), int(settings["TRAIN_BATCH_TOKENS"])
    steps = max(
        int(plan.settings["ITERATIONS"]) for plan in (gate_plan(options), timed_plan(options))
    )
    full = options.validation and not options.quick
    counts = {
        "train": min(MOST_TRAIN_TOKENS, (steps + 1) * (batch + 8)),
        "val": VAL_TOKENS if full else 2 * int(settings["VAL_BATCH_SIZE"]) + 1,
    }
    for seed, (split, count) in enumerate(counts.items()):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, count
        with open(folder / f"fineweb_{split}_000000.bin", "wb") as file:
            file.write(header.tobytes() + markov_tokens(vocab, count, seed).tobytes())
    write_tokenizer(folder / "tokenizer.model", vocab)
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "tokenizer.model")}


def settings_of(
    environ: Mapping[str, str], options: argparse.Namespace, folder: Path
) -> dict[str, str]:
    """The environment of every arm's process."""
    shape = QUICK_SHAPE if options.quick else SHAPE
    kept = {name: value for name, value in environ.items() if name not in LEFT_OUT}
    settings = {
        **{k: str(v) for k, v in shape.items()},
        **kept,
        **{k: str(v) for k, v in FIXED.items()},
    }
    given = [name for name in ("DATA_PATH", "TOKENIZER_PATH") if name in environ]
    if len(given) == 1:
        raise BenchError(f"{given[0]} is set alone: set DATA_PATH and TOKENIZER_PATH, or neither")
    if not given:
        return settings | synthetic_data(folder, settings, options)
    return settings | {name: str(Path(environ[name]).resolve()) for name in given}


class Bench:
    """The scripts, the environment of their runs, and what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.count = options, folder, 0
        self.scripts = {OURS: options.ours, OTHER: options.against}
        self.texts = {path: path.read_bytes() for path in filter(None, self.scripts.values())}
        self.environ = settings_of(os.environ, options, folder)
        self.gate: dict[str, dict[str, Any]] = {}  # arm -> the result of its first, untimed run
        self.runs: dict[str, list[dict[str, Any]]] = {}  # arm -> those of its timed ones
        self.failed = False

    def known_settings(self) -> set[str]:
        """Those of our script, as it says itself."""
        command = [sys.executable, str(self.options.ours), "--print-config"]
        said = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=300
        )
        if said.returncode:
            raise BenchError(f"{self.options.ours} --print-config: {last_line(said.stderr)}")
        return {name.upper() for name in json.loads(said.stdout)}

    def missing(self, name: str, known: set[str]) -> str:
        """What keeps an arm from being run, known before it is; "" for nothing."""
        arm = ARMS[name]
        foreign = [
            key for key in arm.env if not key.startswith("TORCHINDUCTOR_") and key not in known
        ]
        if arm.script == OURS and foreign:
            return f"{self.scripts[arm.script]} has no setting {foreign[0]}"
        if arm.cuda and not self.gate[arm.script]["cuda"]:
            return "needs a CUDA device"
        if (
            arm.env
            and not arm.patch
            and all(self.environ.get(key) == value for key, value in arm.env.items())
        ):
            return "the environment has it so for all arms"
        return ""

    def execute(self, name: str, plan: Plan) -> dict[str, Any]:
        """One run in a process of its own; Refused, or BenchError, of one line."""
        arm, self.count = ARMS[name], self.count + 1
        folder = self.folder / f"run{self.count}"
        folder.mkdir()
        script, answer = self.scripts[arm.script], folder / "result.json"
        if script.read_bytes() != self.texts[script]:
            raise BenchError(f"{script} was edited since the first run: measure a copy")
        order = json.dumps(dict(arm=name, script=str(script), marks=plan.marks, result=str(answer)))
        env = (
            self.environ
            | arm.env
            | {key: str(value) for key, value in plan.settings.items()}
            | {"RUN_ID": "run"}
        )
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, __file__, "--drive", order],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code = process.wait(self.options.limit)
            except subprocess.TimeoutExpired:
                raise BenchError(f"ran for {self.options.limit:g} s: raise --limit") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # compile workers, too
                process.wait()
        said = last_line((folder / "stderr").read_text("utf-8", "replace"))
        if code in (2, REFUSED):
            raise Refused(said)
        if not answer.exists():
            raise BenchError(f"ended with code {code}: {said}")
        result = json.loads(answer.read_text("utf-8"))
        shutil.rmtree(folder)
        return result

    def attempt(self, name: str, plan: Plan) -> dict[str, Any] | None:
        """None, and a line, if the arm cannot be run; BenchError if it is one that others are held against."""
        try:
            return self.execute(name, plan)
        except (Refused, BenchError) as error:
            if name in (OURS, OTHER):
                raise BenchError(f"arm {name}: {error}") from error
            print(
                f"arm {name}: {'left out' if isinstance(error, Refused) else 'FAILED'}: {error}",
                flush=True,
            )
            self.failed |= not isinstance(error, Refused)
            return None

    def unchanged(self, name: str, state: Mapping[str, Any]) -> str:
        """Why an arm's switches of torch did not do what it says; "" if they did."""
        arm = ARMS[name]
        for key, wanted in arm.state.items():
            if (wanted or state[key]) and state[key] != wanted:
                return f"{key} is {state[key]} in its run, not {wanted}"
        base = self.gate[arm.script]["state"]
        if arm.state and all((base[key] or False) == wanted for key, wanted in arm.state.items()):
            return f"{arm.script} runs like this here: there is nothing to compare"
        return ""

    def prime(self, names: Iterable[str]) -> list[str]:
        """The untimed runs; the arms that are left."""
        known, left = self.known_settings(), []
        for name in names:
            if why := self.missing(name, known):
                print(f"arm {name}: left out: {why}", flush=True)
            elif result := self.attempt(name, gate_plan(self.options)):
                self.gate[name] = result
                if why := self.unchanged(name, result["state"]) if ARMS[name].state else "":
                    print(f"arm {name}: left out: {why}", flush=True)
                    del self.gate[name]
                else:
                    left.append(name)
        check_work(self.gate)
        return left

    def conduct(self, names: list[str]) -> None:
        """Primes, then every arm once in each repeat, in the same order."""
        names = self.prime(names)
        for repeat in range(self.options.repeats):
            for name in list(names):
                if not (result := self.attempt(name, timed_plan(self.options))):
                    names.remove(name)
                    continue
                result["ms"] = measured_ms(result, self.options)
                self.runs.setdefault(name, []).append(result)
                print(
                    f"repeat {repeat + 1}/{self.options.repeats} {name:18} {result['ms']:10.3f} ms",
                    flush=True,
                )
        self.runs = {name: self.runs[name] for name in names}


def last_line(text: str) -> str:
    return next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing"
    )


def check_work(results: Mapping[str, Mapping[str, Any]]) -> None:
    """BenchError unless all arms have as many validation tokens, and those that print a data_crc the same one."""
    counts = {
        name: re.search(r"tokens:(\d+)|$", result["facts"].get("val_loader", ""))[1]
        for name, result in results.items()
    }
    crcs = {name: result["crcs"] for name, result in results.items() if result["crcs"]}
    for what, found in (("validation tokens", counts), ("training tokens, by data_crc,", crcs)):
        first = next(iter(found), "")
        if other := next((name for name in found if found[name] != found[first]), ""):
            raise BenchError(
                f"arm {other}: other {what} than {first}: the arms do not do the same work"
            )


# --- The gate ---------------------------------------------------------------------------------------------------------

FIRST_TOLERANCE, SEED_NOISE_BPB, JUDGED_FROM = 1e-3, 0.0007, 100
NATS_A_BPB = math.log(2) * stats.PUBLISHED["sp1024"][1] / stats.PUBLISHED["sp1024"][0]


def seed_tolerance(noise_bpb: float) -> float:
    """Nats a token: 3 standard deviations of a difference of two runs, each with `noise_bpb`."""
    return 3 * math.sqrt(2) * noise_bpb * NATS_A_BPB


def losses_of(result: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(step): loss for losses in result["losses"].values() for step, loss in losses.items()
    }


def gate(
    results: Mapping[str, Mapping[str, Any]], reference: str, later: float
) -> Iterator[tuple[bool, str]]:
    """(passed, one line) an arm: its losses against those of `reference`."""
    theirs = losses_of(results[reference])
    for name, result in results.items():
        if name == reference:
            continue
        ours, faults = losses_of(result), []
        for step, loss in theirs.items():
            limit = FIRST_TOLERANCE if step <= 1 else later if step >= JUDGED_FROM else math.inf
            difference = ours.get(step, math.nan) - loss
            if not abs(difference) <= limit:
                faults.append(f"step {step}: {difference:+.4f} nats, at most {limit:.4f}")
        yield not faults, f"{name}: " + ("; ".join(faults) or f"the mathematics of {reference}")


# --- Reporting --------------------------------------------------------------------------------------------------------

TARGETS = {False: (0.80, "a step"), True: (0.85, "a validation")}  # of the other script's time


def compared(first: list[float], second: list[float]) -> str:
    """In words: the second against the first, pairs by repeat, with a 95 % interval of the mean difference."""
    test = stats.paired(first, second)
    share, words = (
        100 / statistics.mean(first),
        f"{test.difference:+.3f} ms, {test.low:+.3f} to {test.high:+.3f}",
    )
    if test.low <= 0 <= test.high:
        return f"no measurable difference ({words})"
    return f"{abs(test.difference * share):.2f} % {'faster' if test.difference < 0 else 'slower'} ({words})"


def cell(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def table(bench: Bench, reference: str) -> Iterator[str]:
    runs, validation = bench.runs, bench.options.validation
    tokens = int(bench.environ["TRAIN_BATCH_TOKENS"])
    flops = flops_a_token(bench.environ) * (1 / 3 if validation else 1)  # a forward pass is a third
    base = statistics.median(run["ms"] for run in runs[reference])
    heading = "ms " + TARGETS[validation][1]
    yield f"{'arm':18} {heading:>16} {'ratio':>7} {'TFLOP/s':>8} {'MFU %':>6} {'peak MiB':>9}  repeats"
    for name, found in runs.items():
        ms = statistics.median(run["ms"] for run in found)
        if validation:
            tokens = int(re.search(r"tokens:(\d+)", found[0]["facts"]["val_loader"])[1])
        rate = flops * tokens / ms / 1e9
        mfu = 100 * rate / peak_of(found[0]["device"])[0]
        peak = statistics.median(run["peak_mib"] for run in found)
        yield (
            f"{name:18} {ms:16.3f} {ms / base:7.3f} {cell(rate, '8.3g'):>8} {cell(mfu, '6.1f'):>6} {peak:9.0f}  "
            + " ".join(f"{run['ms']:.3f}" for run in found)
        )


def attention_of(result: Mapping[str, Any]) -> str:
    """The backend that a script names, or else those that it says may be used."""
    chosen = re.search(r"attention_backend:(\S+)", result["facts"].get("attention_mode", ""))
    allowed = re.findall(r"(\w+)=True", result["facts"].get("sdp_backends", ""))
    return chosen[1] if chosen else " or ".join(allowed) or "?"


def loss_table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    steps = sorted(set().union(*map(losses_of, results.values())))
    yield f"{'loss at step':18}" + "".join(f"{step:8}" for step in steps)
    for name, result in results.items():
        losses = losses_of(result)
        yield f"{name:18}" + "".join(
            f"{cell(losses.get(step, math.nan), '8.4f'):>8}" for step in steps
        )


def report(bench: Bench, reference: str) -> bool:
    """Prints all of it; True if every arm passed the gate."""
    options, times = (
        bench.options,
        {name: [run["ms"] for run in runs] for name, runs in bench.runs.items()},
    )
    first = bench.runs[reference][0]
    print()
    print(
        f"{first['device']}, torch {first['torch']}, {platform.platform()}, Python {platform.python_version()}"
    )
    if not first["cuda"]:
        print("no CUDA device here: these are times of the CPU, and say nothing about a GPU")
    print(*table(bench, reference), sep="\n")
    peak, source = peak_of(first["device"])
    print(
        f"ratio: to {reference}; MFU: of {peak:g} TFLOP/s ({source})"
        if source
        else f"ratio: to {reference}; MFU: no peak known for {first['device']}"
    )
    print(
        "attention, as logged: "
        + "; ".join(f"{name} {attention_of(runs[0])}" for name, runs in bench.runs.items())
    )
    for name in times:
        if name != reference:
            print(f"{name} against {reference}: {compared(times[reference], times[name])}")
    for name in times if reference != OURS else ():
        if name not in (OURS, OTHER) and ARMS[name].script == OURS:
            print(f"{name} against {OURS}: {compared(times[OURS], times[name])}")
    if reference == OTHER and first["cuda"]:
        target, what = TARGETS[options.validation]
        ratio = statistics.median(times[OURS]) / statistics.median(times[OTHER])
        print(
            f"{'PASS' if ratio <= target else 'FAIL'} {what} takes {ratio:.3f} of {OTHER}'s, at most {target:.2f}"
        )
    print("", *loss_table(bench.gate), sep="\n")
    verdicts = list(gate(bench.gate, reference, seed_tolerance(options.seed_noise)))
    for passed, words in verdicts:
        print(f"{'PASS' if passed else 'FAIL'} {words}")
    return all(passed for passed, _ in verdicts)


# --- The command ------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    mine = [name for name in ARMS if name not in (OURS, OTHER)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="another script: the reference of all ratios"
    )
    parser.add_argument(
        "--ours",
        type=Path,
        metavar="PATH",
        default=ROOT / "train_gpt.py",
        help="ours (default: the root's train_gpt.py)",
    )
    parser.add_argument(
        "--arms",
        nargs="*",
        choices=mine,
        metavar="ARM",
        help=(
            "besides ours and --against (default: all): "
            + "; ".join(f"{name}: {ARMS[name].words}" for name in mine)
        ),
    )
    parser.add_argument(
        "--validation", action="store_true", help="time full validation passes, not training steps"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs of every arm (3, at least 2)"
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=10,
        help="steps before the window, after the priming (10; 1 to 10)",
    )
    parser.add_argument("--steps", type=int, default=0, help="steps in the window (60; --quick: 4)")
    parser.add_argument(
        "--passes", type=int, default=0, help="timed validations of a run (3; --quick: 2)"
    )
    parser.add_argument(
        "--gate-steps", type=int, default=0, help="of the untimed run (200; --quick: 24)"
    )
    parser.add_argument(
        "--seed-noise",
        type=float,
        default=SEED_NOISE_BPB,
        metavar="BPB",
        help=f"standard deviation between seeds ({SEED_NOISE_BPB} bits per byte)",
    )
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="longest time of a run (1800)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run to a file")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few steps: to see that it works"
    )
    parser.add_argument("--drive", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, plain, quick in (("steps", 60, 4), ("passes", 3, 2), ("gate_steps", 200, 24)):
        setattr(options, name, getattr(options, name) or (quick if options.quick else plain))
    least = dict(repeats=2, skip=1, steps=1, passes=1, gate_steps=22)
    for name, value in least.items():
        if getattr(options, name) < value:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(options, name)}: set at least {value}"
            )
    if options.skip > 10:
        parser.error(
            f"--skip {options.skip}: of early steps only 1 to 10 are logged: set 10, and more WARMUP_STEPS"
        )
    for script in filter(None, (options.ours, options.against)):
        if not script.is_file():
            parser.error(f"{script}: no such file: name a train_gpt.py")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: no such folder: {options.json.parent}")
    options.ours, options.against = (
        options.ours.resolve(),
        options.against and options.against.resolve(),
    )
    return options


def chosen_arms(options: argparse.Namespace) -> list[str]:
    mode = "validation" if options.validation else "steps"
    return [
        name
        for name, arm in ARMS.items()
        if mode in arm.modes
        and (options.against or arm.script == OURS)
        and (name in (OURS, OTHER) or options.arms is None or name in options.arms)
    ]


def main() -> int:
    options = parse()
    if options.drive:
        return drive(options.drive)
    folder = Path(tempfile.mkdtemp(prefix="steps-bench-"))
    try:
        bench = Bench(options, folder)
        bench.conduct(chosen_arms(options))
        passed = report(bench, OTHER if options.against else OURS)
        if options.json:
            write_atomic(options.json, json.dumps(dict(gate=bench.gate, runs=bench.runs)))
    except (BenchError, OSError) as error:
        print(f"steps bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if passed and not bench.failed else 1


if __name__ == "__main__":
    sys.exit(main())
