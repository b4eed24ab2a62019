"""The record StepTime: its operators in Triton's interpreter and for GPUs, runs, its folder."""

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, clean_environment, run_trainer
from steptime import RECORD, SCRIPT, SMALL, load_record, losses

needs_triton = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="there is no triton for this machine",
)


# --- the operators --------------------------------------------------------------------------------


@needs_triton
@pytest.mark.timeout(400)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_operators_in_tritons_interpreter(which: str) -> None:
    without = ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    file = "tests/steptime_operators.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", which, *without, file],
        cwd=ROOT,
        env=clean_environment(TRITON_INTERPRET=1),
        text=True,
        timeout=380,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed.* in", done.stdout, re.M), done.stdout
    assert "skipped" not in done.stdout, done.stdout


BF16, FP32, INT, REAL = "*bf16", "*fp32", "i32", "fp32"
HEADS_CONSTANTS = {"H": 8, "KV": 4, "half": 32, "BLOCK": 32, "WIDTH": 32}
# A kernel's arguments at the defaults' sizes: types, constants, options.
COMPILED = {
    "heads_kernel": (
        {
            "packed": BF16,
            "gain": FP32,
            "rotary": FP32,
            "q": BF16,
            "k": BF16,
            "v": BF16,
            "rows": INT,
            "T": INT,
            "eps": REAL,
        },
        HEADS_CONSTANTS,
        {},
    ),
    "heads_grad_kernel": (
        {
            "dq": BF16,
            "dk": BF16,
            "dv": BF16,
            "packed": BF16,
            "gain": FP32,
            "rotary": FP32,
            "grad": BF16,
            "gain_grad": FP32,
            "rows": INT,
            "T": INT,
            "eps": REAL,
        },
        HEADS_CONSTANTS,
        {},
    ),
    "relu2_kernel": (
        {"x": BF16, "w": BF16, "a": BF16, "out": BF16, "M": INT, "N": INT, "K": INT, "w_n": INT},
        {"GRAD": False, "BM": 128, "BN": 256, "BK": 64, "w_k": 1},
        {"num_warps": 8, "num_stages": 3},
    ),
    "relu2_kernel with GRAD": (
        {"x": BF16, "w": BF16, "a": BF16, "out": BF16, "M": INT, "N": INT, "K": INT, "w_k": INT},
        {"GRAD": True, "BM": 128, "BN": 256, "BK": 64, "w_n": 1},
        {"num_warps": 8, "num_stages": 3},
    ),
}
# Of shared memory a block can have: an H100, an A100, an RTX 4090;
# the latter two have tiles half as wide.
SHARED_BYTES = {90: 232_448, 80: 166_912, 89: 101_376}


@needs_triton
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89))]
)
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_gpus(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, without a GPU: no spilt register, all in shared memory, wide accesses,
    tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(load_record(), name.split()[0])
    types, constants, options = COMPILED[name]
    if capability != 90 and "BN" in constants:
        constants = {**constants, "BN": 128}
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    assert not signature.keys() - types.keys() - constants.keys()
    by_16 = [["tt.divisibility", 16]]
    attributes = {
        (i,): by_16 for i, arg in enumerate(kernel.arg_names) if arg in types and types[arg] != REAL
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    done = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(done.asm["cubin"]) > 1000
    ptx = done.asm["ptx"]
    assert ".local" not in ptx and done.metadata.shared <= SHARED_BYTES[capability]
    assert "st.global.v4.b32" in ptx
    if "relu2" in name:
        assert (
            "wgmma.mma_async" if capability == 90 else "mma.sync"
        ) in ptx and "cp.async.cg.shared" in ptx


def test_without_triton_all_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    record = load_record("steptime_without_triton")
    assert record.triton is None
    lines = []
    log = type("Log", (), {"line": lambda self, text: lines.append(text)})()
    cfg = record.Config(run_id="x", operators="qkv", num_layers=1)
    record.use_operators(cfg, record.Runtime(), log)
    assert lines == [
        "warning: operator qkv does not work here, it is eager: triton cannot be imported",
        "operators:none",
    ]
    operators = record.OPERATORS
    assert operators == frozenset()


def test_an_operator_that_is_asked_for_on_the_cpu_is_a_warning() -> None:
    record, lines = load_record(), []
    log = type("Log", (), {"line": lambda self, text: lines.append(text)})()
    record.use_operators(record.Config(run_id="x", operators="mlp"), record.Runtime(), log)
    warning, state = lines
    assert warning.startswith("warning: operator mlp does not work here, it is eager: ")
    assert state == "operators:none"


def test_an_operator_that_does_not_exist_is_a_fault() -> None:
    _, faults = load_record().Config.from_environment({"OPERATORS": "all"})
    assert len(faults) == 1 and "OPERATORS=all: set auto or 0 or qkv or mlp" in faults[0]


def test_the_eager_forms_are_the_formulas() -> None:
    """Of the record's README: heads are normed, rotated and scaled; the MLP squares relu."""
    record, (B, T, D, heads, d) = load_record(), (2, 5, 12, 3, 4)
    draw = torch.Generator().manual_seed(1)
    x, wq = (torch.randn(size, generator=draw) for size in ((B, T, D), (heads * d, D)))
    wk, wv = (torch.randn(d, D, generator=draw) for _ in "kv")
    gain, angle = torch.tensor([1.5, -1.0, 0.5]), torch.randn(T, 1, d // 2, generator=draw)

    def head(weight: torch.Tensor, number: int) -> torch.Tensor:
        u = x @ weight[number * d : (number + 1) * d].T
        left, right = (u / u.square().mean(-1, keepdim=True).sqrt()).chunk(2, -1)
        cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
        return torch.cat((left * cos + right * sin, right * cos - left * sin), -1)

    q, k, v = record.qkv_eager(x, [wq, wk, wv], gain, torch.stack((angle.cos(), angle.sin())))
    near = {"rtol": 1e-4, "atol": 1e-5}
    for number in range(heads):
        torch.testing.assert_close(q[:, :, number], gain[number] * head(wq, number), **near)
    torch.testing.assert_close(k[:, :, 0], head(wk, 0), **near)
    torch.testing.assert_close(v[:, :, 0], x @ wv.T, **near)
    up, down = torch.randn(7, D, generator=draw), torch.randn(D, 7, generator=draw)
    wanted = (x @ up.T).clamp(min=0).pow(2) @ down.T
    torch.testing.assert_close(record.mlp_eager(x, up, down), wanted, **near)


# --- runs -----------------------------------------------------------------------------------------


TINY = {
    **SMALL,
    "ITERATIONS": 3,
    "TRAIN_BATCH_TOKENS": 512,
    "VAL_TOKENS": 129,
    "VAL_BATCH_SIZE": 128,
    "NUM_LAYERS": 1,
    "TRAIN_SEQ_LEN": 16,
}


@pytest.fixture(scope="module")
def plain(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of a run as it is on a CPU."""
    done = run_trainer(tmp_path_factory.mktemp("plain"), script=SCRIPT, **TINY, **corpus.env)
    assert done.code == 0, done.err
    return done.text


def test_a_run_on_the_cpu_is_eager_and_learns(plain: str) -> None:
    assert "\noperators:none\n" in plain and "warning" not in plain
    found = losses(plain, "train_loss")
    assert len(found) == 3 and found[-1] < found[0] - 0.1


@needs_triton
@pytest.mark.slow
def test_a_run_with_operators_has_the_same_losses(tmp_path: Path, corpus: Any, plain: str) -> None:
    fast = run_trainer(tmp_path, script=SCRIPT, **TINY, **corpus.env, TRITON_INTERPRET=1)
    assert fast.code == 0, fast.err
    assert "\noperators:mlp+qkv\n" in fast.text
    for word in ("train_loss", "val_loss"):
        assert losses(fast.text, word) == pytest.approx(losses(plain, word), abs=2e-4)


# --- the folder -----------------------------------------------------------------------------------


def test_the_folder_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "records/track_non_record_16mb" / RECORD.name
    shutil.copytree(RECORD, folder, ignore=shutil.ignore_patterns("__pycache__", "logs"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "records/check.py"), str(folder), "--json"],
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_the_numbers_of_the_log_and_claims_no_speed() -> None:
    readme, submission = (
        (RECORD / "README.md").read_text("utf-8"),
        json.loads((RECORD / "submission.json").read_text()),
    )
    log = (RECORD / "train_seed1337.log").read_text("utf-8")
    assert f"{submission['val_loss']:.8f}" in readme and f"{submission['val_bpb']:.8f}" in readme
    assert f"{submission['bytes_total']:,}" in readme and f"{submission['bytes_code']:,}" in readme
    assert "\noperators:none\n" in log
    assert "not yet measured on a GPU" in readme
    table = readme.split("## Measured\n", 1)[1].split("\n## ", 1)[0]
    assert not re.search(r"\d ms\b", table)
    for path in re.findall(r"\b(tests/[\w./]+\.py)\b", readme):
        assert path == "tests/bench/steps.py" or (ROOT / path).exists(), path
