"""The record StepTime: each lever gives the run without it; its operators; its folder."""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Finished, byte_data, clean_environment, run_trainer
from steptime import RECORD, SCRIPT, SMALL, config_of, load_record, open_log

record = load_record()
needs_triton = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="there is no triton for this machine",
)


# The operators.


@needs_triton
@pytest.mark.timeout(500)
@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_the_operators_in_tritons_interpreter(which: str) -> None:
    without = ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", which, *without, "steptime_operators.py"],
        cwd=ROOT / "tests",
        env=clean_environment(TRITON_INTERPRET=1),
        text=True,
        timeout=480,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed.* in", done.stdout, re.M), done.stdout
    assert "skipped" not in done.stdout, done.stdout


HEADS = {"q_heads": 8, "kv_heads": 4, "half": 32, "block": 32, "width": 32}  # at the defaults
FLOATS = {"gain", "cos", "sin", "gain_grad"}  # pointers to float32; the others are to bfloat16
SIZES = {"rows", "T", "columns", "inner", "w_column", "w_inner"}


def machine_code(name: str, constants: dict[str, Any], capability: int) -> tuple[str, str, int]:
    """(PTX, what ptxas says of it, bytes of shared memory) of a kernel; no GPU is needed."""
    backends = importlib.import_module("triton.backends.compiler")
    compiler = importlib.import_module("triton.compiler")
    kernel, options = getattr(record, name), {}
    if name == "relu2_kernel":
        options = {"num_warps": 8, "num_stages": 3}
    types = {
        arg: "*fp32" if arg in FLOATS else "i32" if arg in SIZES else "*bf16"
        for arg in kernel.arg_names
        if arg not in constants
    }
    types |= {"eps": "fp32"} if "eps" in types else {}
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    by_16 = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if types.get(arg, "fp32") != "fp32"
    }
    source = compiler.ASTSource(kernel, signature, constexprs=constants, attrs=by_16)
    target = backends.GPUTarget("cuda", capability, 32)
    done = compiler.compile(source, target=target, options=options)
    folder = Path(importlib.import_module("triton").__file__).parent
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(done.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (\w+)", done.asm["ptx"])[1]
        command = [folder / "backends/nvidia/bin/ptxas", "-v", f"--gpu-name={arch}", file.name]
        said = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return done.asm["ptx"], said.stderr, done.metadata.shared


# Of shared memory a block can have: an H100, an A100, an RTX 4090.
SHARED_BYTES = {90: 232_448, 80: 166_912, 89: 101_376}


@needs_triton
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89))]
)
@pytest.mark.parametrize("name", ["heads_kernel", "heads_gradient_kernel", "forward", "gradient"])
def test_kernels_compile_for_gpus(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No register is spilt, no tensor core waits, all shared memory is there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants, gradient = HEADS, name == "gradient"
    product = name in ("forward", "gradient")
    if product:
        tile = record.relu2_tile(capability // 10, 2, gradient)
        sizes = zip(("tile_rows", "tile_columns", "tile_inner"), tile, strict=True)
        constants = {"gradient": gradient, "w_column" if gradient else "w_inner": 1, **dict(sizes)}
    ptx, said, shared = machine_code("relu2_kernel" if product else name, constants, capability)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "C7515" not in said and "Performance Loss" not in said
    assert shared <= SHARED_BYTES[capability] and "st.global.v4.b32" in ptx
    if product:
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
        assert "cp.async.cg.shared" in ptx


def test_an_operator_that_cannot_run_here_is_a_warning() -> None:
    config, log = config_of(**SMALL, MLP_OPERATOR=1), open_log()
    model = record.GPT(config, torch.float32)
    record.use_operators(model, config, record.Runtime(config, {}), log)
    warning, state = log.lines
    assert warning.startswith("warning: operator mlp does not work here, so eager: ")
    assert state == "operators:none"


def test_the_eager_forms_are_the_formulas() -> None:
    """Of the record's README: heads are normed, rotated and scaled; the MLP squares relu."""
    B, T, D, heads, d = 2, 5, 12, 3, 4
    random = torch.Generator().manual_seed(1)
    x, wq = (torch.randn(size, generator=random) for size in ((B, T, D), (heads * d, D)))
    wk, wv = (torch.randn(d, D, generator=random) for _ in "kv")
    gain, angle = torch.tensor([1.5, -1.0, 0.5]), torch.randn(T, 1, d // 2, generator=random)

    def head(weight: torch.Tensor, number: int) -> torch.Tensor:
        u = x @ weight[number * d : (number + 1) * d].T
        left, right = (u / u.square().mean(-1, keepdim=True).sqrt()).chunk(2, -1)
        cos, sin = angle[:, 0].cos(), angle[:, 0].sin()
        return torch.cat((left * cos + right * sin, right * cos - left * sin), -1)

    q, k, v = record.heads_eager(x, [wq, wk, wv], gain, (angle.cos(), angle.sin()))
    near = {"rtol": 1e-4, "atol": 1e-5}
    for number in range(heads):
        torch.testing.assert_close(q[:, :, number], gain[number] * head(wq, number), **near)
    torch.testing.assert_close(k[:, :, 0], head(wk, 0), **near)
    torch.testing.assert_close(v[:, :, 0], x @ wv.T, **near)
    up, down = torch.randn(7, D, generator=random), torch.randn(D, 7, generator=random)
    wanted = (x @ up.T).clamp(min=0).pow(2) @ down.T
    torch.testing.assert_close(record.mlp_eager(x, up, down), wanted, **near)


# The levers, in this process.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return byte_data(tmp_path_factory.mktemp("steptime"))


def trainer_of(data: dict[str, str], **settings: Any) -> Any:
    config = config_of(**SMALL | data | settings, RUN_ID="steptime")
    return record.Trainer(config, record.Runtime(config, {}), open_log())


def train(trainer: Any, steps: int = 3) -> torch.Tensor:
    """The losses of so many steps, and all weights after them."""
    losses = []
    with record.closing(trainer.batches()) as batches:
        for _ in range(steps):
            trainer.train_step(batches)
            trainer.exchange.read(trainer.step)
            losses.append(trainer.exchange.messages[0].loss)
    weights = [p.detach().flatten().double() for p in trainer.model.parameters()]
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *weights])


@pytest.fixture(scope="module")
def plain(data: dict[str, str]) -> torch.Tensor:
    return train(trainer_of(data))


def casts(trainer: Any) -> int:
    modules = trainer.model.modules()
    return sum(getattr(module, "cast", None) is not None for module in modules)


# How far a lever may be off, and whether it is at work.
LEVERS = {
    "CAST_ONCE=1": (0, lambda trainer: casts(trainer) == 4 * 3),
    "FOLD_ONCE=1": (1e-5, lambda trainer: casts(trainer) == 2 * 3),
    "CAST_ONCE=1 FOLD_ONCE=1": (1e-5, lambda trainer: casts(trainer) == 6 * 3),
    "ADD_COMPILED=1": (0, lambda trainer: len(trainer.leaves) == len(trainer.adam.state) + 6 * 3),
    "EXCHANGE=parts": (0, lambda trainer: len(trainer.exchange.parts) == 4),
    "EXCHANGE=shards": (0, lambda trainer: trainer.exchange.share is not None),
    "MUON_ONE_BANK=1": (1e-5, lambda trainer: len(trainer.muon.param_groups) == 3),
    "TRAIN_PREFETCH=0": (0, lambda trainer: trainer.overlap.queue == 0),
    "GRAD_CLIP_NORM=0.01": (None, lambda trainer: True),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_gives_the_run_without_it(
    lever: str, data: dict[str, str], plain: torch.Tensor
) -> None:
    """To the digit, or to rounding; in losses and weights. The gradient's norm is no lever."""
    bound, at_work = LEVERS[lever]
    trainer = trainer_of(data, **dict(word.split("=") for word in lever.split()))
    found = train(trainer)
    assert at_work(trainer)
    off = (found - plain).abs().max()
    assert off > 1e-3 if bound is None else off <= bound, off


@pytest.mark.parametrize("bank", [0, 1])
def test_muons_first_update_is_the_gradient_made_orthogonal(
    bank: int, data: dict[str, str]
) -> None:
    """Times the root of rows over columns of a tall matrix; each one by itself."""
    trainer = trainer_of(data, MUON_ONE_BANK=bank)
    for p in trainer.muon.update_of:
        torch.nn.init.normal_(p, std=0.1)  # no gradient is 0 then
    train(trainer, steps=1)
    for p, update in trainer.muon.update_of.items():
        wanted = record.newton_schulz(p.grad[None], 5, torch.float32)[0]
        wanted *= max(1.0, p.size(0) / p.size(1)) ** 0.5
        torch.testing.assert_close(update, wanted, rtol=1e-3, atol=1e-4)


def test_resident_batches_are_not_read_again(data: dict[str, str], tmp_path: Path) -> None:
    own = byte_data(tmp_path)
    trainer = trainer_of(own, VAL_RESIDENT=1)
    first = trainer.evaluate("first")[:2]
    for path in tmp_path.glob("fineweb_val_*.bin"):
        path.unlink()
    assert trainer.evaluate("second")[:2] == first
    assert trainer_of(data).evaluate("another")[:2] == first


def test_shares_of_ranks_are_even() -> None:
    """At the defaults, 8 ranks: so a reduce-scatter of equal parts carries little padding."""
    with torch.device("meta"):
        blocks = record.GPT(config_of(), torch.float32).blocks
        matrices = [p for p in blocks.parameters() if p.ndim == 2 and len(p) > 2]
    shares = record.share_out(matrices, 8)
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, matrices))
    sizes = [sum(p.numel() for p in share) for share in shares]
    assert max(sizes) * 8 <= 1.02 * sum(sizes)


def test_micro_steps_are_as_few_as_fit() -> None:
    """At the defaults 88 GB in one: an H200 has that, an H100 the half, a card of 24 GB the 8th."""
    config, gigabyte = config_of(), 1e9
    for world_size, memory, steps in (1, 149, 1), (1, 85, 2), (1, 25, 8), (2, 85, 1), (8, 25, 1):
        found = record.fewest_micro_steps(config, world_size, memory * gigabyte)
        assert found == steps, (world_size, memory, found)


def test_the_compiler_knows_its_options() -> None:
    options = record.compile_options(config_of(MAX_AUTOTUNE=1, COORDINATE_DESCENT=1))
    assert options == {"max_autotune": True, "coordinate_descent_tuning": True}
    torch.compile(torch.sin, options=options)  # raises where a name is none of its own
    assert record.compile_options(config_of()) is None


# The levers, in runs of the script.
ALL_ON = {"CAST_ONCE": 1, "FOLD_ONCE": 1, "ADD_COMPILED": 1, "MUON_ONE_BANK": 1}
ALL_ON |= {"FEWEST_MICRO_STEPS": 1, "ATTENTION_PROBE": 1, "VAL_RESIDENT": 1}


def run(folder: Path, data: dict[str, str], **settings: Any) -> Finished:
    done = run_trainer(folder, script=SCRIPT, **SMALL | data | {"VAL_LOSS_EVERY": 2} | settings)
    assert done.code == 0, done.err
    return done


def losses(done: Finished) -> list[float]:
    return [float(value) for word in ("train_loss", "val_loss") for value in done.values(word)]


@pytest.fixture(scope="module")
def plain_run(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("plain"), data)


@pytest.mark.slow
def test_a_run_with_all_levers(tmp_path: Path, data: dict[str, str], plain_run: Finished) -> None:
    done = run(tmp_path, data, **ALL_ON, GRAD_ACCUM_STEPS=0)
    assert losses(done) == pytest.approx(losses(plain_run), rel=2e-4)
    assert "grad_accum_steps:1\n" in done.text  # not 8
    assert re.search(r"^attention: (flash|math) [\d.]+ ms, (flash|math) ", done.text, re.M)
    assert done.values("data_crc") == plain_run.values("data_crc")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("clip", [0, 0.05])
def test_ranks_exchange_in_parts_and_in_shards(
    clip: float, tmp_path: Path, data: dict[str, str]
) -> None:
    """As whole. A checkpoint of shards has all averages: a run without them goes on from it."""
    both = {"GRAD_CLIP_NORM": clip, "CHECKPOINT_EVERY": 2, "RUN_ID": "ranks"}
    done = {
        how: run(tmp_path / how, data, ranks=2, EXCHANGE=how, **both)
        for how in ("whole", "parts", "shards")
    }
    wanted = losses(done["whole"])
    assert losses(done["parts"]) == losses(done["shards"]) == pytest.approx(wanted, rel=1e-5)
    checkpoint = tmp_path / "shards/checkpoints/ranks/step_00000002.pt"
    resumed = run(tmp_path / "resumed", data, RESUME=checkpoint, **both)
    assert losses(resumed)[-2:] == pytest.approx(wanted[-2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_levers_compile(tmp_path: Path, data: dict[str, str], plain_run: Finished) -> None:
    done = run(tmp_path, data, **ALL_ON, TORCH_COMPILE=1)
    assert "warning" not in done.text
    assert losses(done) == pytest.approx(losses(plain_run), rel=2e-4)


# The folder.


def test_the_folder_is_accepted() -> None:
    command = [sys.executable, str(ROOT / "records/check.py"), str(RECORD)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_is_written_as_all_code_here() -> None:
    for arguments in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--config"]
        command += [str(ROOT / ".ruff.toml"), "--config", "extend-exclude=[]", str(SCRIPT)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_every_lever_and_the_numbers_of_the_log() -> None:
    readme = (RECORD / "README.md").read_text("utf-8")
    submission = json.loads((RECORD / "submission.json").read_text("utf-8"))
    for name in ("val_loss", "val_bpb"):
        assert f"{submission[name]:.8f}" in readme
    for name in ("bytes_total", "bytes_code"):
        assert f"{submission[name]:,}" in readme
    levers = re.findall(r"^\| `(\w+)=", readme, re.M)
    root = importlib.import_module("train_gpt")
    assert sorted(set(levers)) == sorted(record.SETTINGS.keys() - root.SETTINGS.keys())
    assert re.search(r"<!-- gpu:steptime -->\n.*<!-- /gpu -->", readme, re.DOTALL)
