"""The recipes for a faster step: off is train_gpt.py, on is the run without them; the operators."""

import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT, Finished, byte_data, clean_environment, run_trainer, train_gpt
from steptime import (
    OPERATORS,
    RECIPES,
    SMALL,
    config_of,
    load,
    open_log,
    recipe,
    script_with,
    switched_on,
    text_with,
)

FAST = tuple(name for name in RECIPES if name not in OPERATORS)  # they need no GPU
needs_triton = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="there is no triton for this machine",
)


def test_what_the_recipes_make_is_written_as_all_code_here(tmp_path: Path) -> None:
    """Each alone, and all together."""
    for names in (*((name,) for name in RECIPES), RECIPES):
        (tmp_path / f"{'_'.join(names)[:60]}.py").write_text(text_with(*names), "utf-8")
    for arguments in (["format", "--check"], ["check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--config"]
        command += [str(ROOT / ".ruff.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_its_header_is_whole_and_the_root_refuses_its_settings(name: str) -> None:
    assert recipe.load(name).faults() == []
    for setting, (default, on) in recipe.load(name).settings.items():
        assert f"    {setting.lower()}: bool = False" in text_with(name)
        assert (default, on) == ("0", "1")
        [fault] = train_gpt.read_config({setting: on})[1]
        assert "no setting here: unset it" in fault


# In this process.


@pytest.fixture(autouse=True)
def inductor() -> Iterator[Any]:
    """The compiler's options, which a test may change."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(max_autotune=False, coordinate_descent_tuning=False):
        yield config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return byte_data(tmp_path_factory.mktemp("steptime"))


def trainer_of(module: ModuleType, data: dict[str, str], **settings: Any) -> Any:
    config = config_of(module, **SMALL | data | settings, RUN_ID="steptime")
    return module.Trainer(config, module.Runtime(config, {}), open_log(module))


def numbers(trainer: Any, losses: list[float]) -> torch.Tensor:
    weights = [p.detach().flatten().double() for p in trainer.model.parameters()]
    return torch.cat([torch.tensor(losses, dtype=torch.float64), *weights])


def train(module: ModuleType, trainer: Any, steps: int = 4) -> torch.Tensor:
    """Priming, so many steps, two validations: all losses, and all weights at the end."""
    module.prime(trainer)
    losses = []
    with module.closing(trainer.batches()) as batches:
        for _ in range(steps):
            trainer.train_step(batches)
            trainer.exchange.read(trainer.step)
            losses.append(trainer.exchange.loss())
    losses += [*trainer.evaluate("first")[:2], *trainer.evaluate("second")[:2]]
    return numbers(trainer, losses)


@pytest.fixture(scope="module")
def plain(data: dict[str, str]) -> torch.Tensor:
    return train(train_gpt, trainer_of(train_gpt, data))


def casts(trainer: Any) -> tuple[int, int]:
    return len(trainer.exchange.casts.plain), len(trainer.exchange.casts.folded)


def products(trainer: Any) -> int:
    """How many matrix products a forward pass has, but for attention's own."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with torch.profiler.profile() as profiler, torch.no_grad():
        trainer.model(tokens, tokens)
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::linear")


# What is on, how far it may be off, and whether it is at work.
ON = {
    ("cast_once", "CAST_ONCE=1"): (0, lambda run: casts(run) == (4 * 3, 0)),
    ("cast_once", "FOLD_ONCE=1"): (1e-5, lambda run: casts(run) == (0, 2 * 3)),
    ("cast_once", "CAST_ONCE=1 FOLD_ONCE=1"): (1e-5, lambda run: casts(run) == (4 * 3, 2 * 3)),
    ("exchange_shards", ""): (0, lambda run: run.exchange.parts is not None),
    ("kv_one_product", ""): (1e-5, lambda run: products(run) == 5 * 3 + 1),
    ("muon_one_bank", ""): (1e-5, lambda run: len(run.muon.param_groups) == 3),
    ("add_compiled", ""): (0, lambda run: run.config.add_compiled),
    ("max_autotune", ""): (0, lambda run: run.config.max_autotune),
    ("coordinate_descent", ""): (0, lambda run: run.config.coordinate_descent),
    ("val_resident", ""): (0, lambda run: run.validation.resident.complete),
    ("fewest_micro_steps", ""): (0, lambda run: run.config.fewest_micro_steps),
    ("attention_probe", ""): (0, lambda run: run.config.attention_probe),
}


@pytest.mark.parametrize(("name", "words"), ON, ids=str)
def test_off_is_the_root_and_on_is_the_run_without_it(
    name: str, words: str, data: dict[str, str], plain: torch.Tensor
) -> None:
    """Off to the digit, on to the digit or to rounding: losses, validations, weights; and a run
    that goes on from a snapshot is the one that was not interrupted, to the bit."""
    module = load(name)
    assert torch.equal(train(module, trainer_of(module, data)), plain)
    settings = dict(word.split("=") for word in words.split()) or switched_on((name,))
    bound, at_work = ON[name, words]
    run = trainer_of(module, data, **settings)
    found = train(module, run)
    assert at_work(run)
    off = (found - plain).abs().max()
    assert off <= bound, off
    half = trainer_of(module, data, **settings)
    train(module, half, steps=2)
    other = trainer_of(module, data, **settings)
    module.restore(other, module.snapshot(half))
    assert other.step == 2
    assert torch.equal(train(module, other, steps=2)[2:], found[4:])


def test_all_together_are_the_run_without_them(data: dict[str, str], plain: torch.Tensor) -> None:
    module = load(*RECIPES)
    assert torch.equal(train(module, trainer_of(module, data)), plain)
    run = trainer_of(module, data, **switched_on(FAST))
    assert (train(module, run) - plain).abs().max() <= 1e-5
    assert casts(run) == (4 * 3, 2 * 3) and run.validation.resident.complete


@pytest.mark.slow
def test_all_together_compile_without_a_break(
    data: dict[str, str], plain: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch.compile's first half: the second, inductor, takes minutes on a CPU."""
    half = {"backend": "aot_eager", "dynamic": False, "fullgraph": True}
    whole = torch.compile
    compiled = []

    def compile_function(function: Any, **how: Any) -> Any:
        compiled.append(function.__name__)
        return whole(function, **half)

    module = load(*RECIPES)
    monkeypatch.setattr(torch, "compile", compile_function)
    run = trainer_of(module, data, **switched_on(FAST), TORCH_COMPILE=1)
    assert sorted(compiled) == ["_call_impl", "add_to", "newton_schulz", "refresh", "spread"]
    assert (train(module, run) - plain).abs().max() <= 2e-5


@pytest.mark.parametrize("bank", [0, 1])
def test_muons_first_update_is_the_gradient_made_orthogonal(
    bank: int, data: dict[str, str]
) -> None:
    """Each matrix by itself, also a tall one that stands in a batch with wide ones."""
    module = load("muon_one_bank")
    run = trainer_of(module, data, MUON_ONE_BANK=bank)
    for p in run.muon.matrices:
        torch.nn.init.normal_(p, std=0.1)  # no gradient is 0 then
    before = {p: p.detach().clone() for p in run.muon.matrices}
    with module.closing(run.batches()) as batches:
        run.train_step(batches)
    assert {tuple(p.shape) for p in before} == {(32, 32), (16, 32), (64, 32), (32, 64)}
    for p, old in before.items():
        update = module.newton_schulz(p.grad[None], 5, torch.float32)[0]
        rate = run.config.matrix_lr * max(1.0, p.size(0) / p.size(1)) ** 0.5
        torch.testing.assert_close(old - p, rate * update, rtol=1e-3, atol=1e-5)


def test_resident_batches_are_not_read_again(data: dict[str, str], tmp_path: Path) -> None:
    """Neither do they depend on what a pass that a signal ended has kept."""
    module = load("val_resident")
    run = trainer_of(module, byte_data(tmp_path), VAL_RESIDENT=1)
    with module.closing(run.validation.batches()) as batches:
        run.validation.resident.keep(next(batches))
    first = run.evaluate("first")[:2]
    for path in tmp_path.glob("fineweb_val_*.bin"):
        path.unlink()
    assert run.evaluate("second")[:2] == first
    assert trainer_of(train_gpt, data).evaluate("another")[:2] == first


def test_shares_of_ranks_are_even() -> None:
    """At the defaults, 8 ranks: so a reduce-scatter of equal parts carries little padding."""
    module = load("exchange_shards")
    with torch.device("meta"):
        blocks = module.GPT(config_of(module), torch.float32).blocks
        matrices = [p for p in blocks.parameters() if p.ndim == 2 and len(p) > 2]
    shares = module.share_out(matrices, 8)
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, matrices))
    sizes = [sum(p.numel() for p in share) for share in shares]
    assert max(sizes) * 8 <= 1.02 * sum(sizes)
    with pytest.raises(module.RunError, match="3 matrices for 8 ranks: set 0"):
        module.share_out(matrices[:3], 8)


def test_micro_steps_are_as_few_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the defaults 88 GB in one: an H200 has that, an H100 the half, a card of 24 GB the 8th."""
    module = load("fewest_micro_steps")

    class Device:
        total_memory = 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Device)
    for world_size, memory, steps in (1, 149, 1), (1, 85, 2), (1, 25, 8), (2, 85, 1), (8, 25, 1):
        Device.total_memory = memory * 1e9
        found = module.fewest_micro_steps(config_of(module), world_size).grad_accum_steps
        assert found == steps, (world_size, memory, found)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("max_autotune", "max_autotune"),
        ("coordinate_descent", "coordinate_descent_tuning"),
    ],
)
def test_the_compiler_gets_its_option(
    name: str, option: str, data: dict[str, str], inductor: Any
) -> None:
    for wanted in (False, True):
        run = trainer_of(load(name), data, TORCH_COMPILE=1, **{name.upper(): int(wanted)})
        assert getattr(inductor, option) is wanted and run.model._compiled_call_impl


# In runs of the script.


def run_script(folder: Path, data: dict[str, str], script: Path, **settings: Any) -> Finished:
    done = run_trainer(folder, script=script, **SMALL | data | {"VAL_LOSS_EVERY": 2} | settings)
    assert done.code == 0, done.err
    return done


def losses(done: Finished) -> list[float]:
    return [float(value) for word in ("train_loss", "val_loss") for value in done.values(word)]


@pytest.mark.slow
def test_the_fewest_micro_steps_and_probed_attention_are_in_the_log(
    tmp_path: Path, data: dict[str, str]
) -> None:
    names = "fewest_micro_steps", "attention_probe"
    settings = {"GRAD_ACCUM_STEPS": 0, "ITERATIONS": 1, "VAL_LOSS_EVERY": 0, **switched_on(names)}
    done = run_script(tmp_path, data, script_with(*names), **settings)
    assert "grad_accum_steps:1\n" in done.text  # not 8
    assert re.search(r"^attention: (flash|math) [\d.]+ ms, (flash|math) ", done.text, re.MULTILINE)


@pytest.mark.slow
def test_two_ranks_with_shards_are_the_root(tmp_path: Path, data: dict[str, str]) -> None:
    """And with all others on. The checkpoint has all momentum: the root goes on from it."""
    both = {"GRAD_CLIP_NORM": 0.05, "CHECKPOINT_EVERY": 2, "RUN_ID": "ranks"}
    script = script_with(*RECIPES)
    on = {**both, **switched_on(FAST), "FEWEST_MICRO_STEPS": 0}
    root = run_script(tmp_path / "root", data, ROOT / "train_gpt.py", ranks=2, **both)
    found = run_script(tmp_path / "shards", data, script, ranks=2, **on)
    assert losses(found) == pytest.approx(losses(root), rel=2e-5)
    assert found.values("data_crc") == root.values("data_crc")
    checkpoint = tmp_path / "shards/checkpoints/ranks/step_00000002.pt"
    again = run_script(tmp_path / "again", data, ROOT / "train_gpt.py", RESUME=checkpoint, **both)
    assert losses(again)[-2:] == pytest.approx(losses(root)[-2:], rel=2e-5)
    final = "checkpoints/ranks/step_00000004.pt"
    mine, theirs = (
        torch.load(tmp_path / name / final, weights_only=True)["held"] for name in ("again", "root")
    )
    for number, state in theirs["muon"]["state"].items():
        buffer = mine["muon"]["state"][number]["momentum_buffer"]
        torch.testing.assert_close(buffer, state["momentum_buffer"], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_with_shards_that_are_told_to_end_go_on_to_the_bit(
    tmp_path: Path, data: dict[str, str]
) -> None:
    """A signal's checkpoint is made by all ranks, too."""
    script = script_with("exchange_shards")
    settings = {"EXCHANGE_SHARDS": 1, "RUN_ID": "ranks", "CHECKPOINT_EVERY": 4}
    whole = run_script(tmp_path / "whole", data, script, ranks=2, **settings)
    signal = "        if self.step == 2:\n            os.kill(os.getpid(), 15)\n"
    line = "        seed_step(config, self.runtime, self.step)\n"
    told = tmp_path / "told.py"
    told.write_text(text_with("exchange_shards").replace(line, signal + line), "utf-8")
    folder = tmp_path / "halted"
    done = run_trainer(folder, script=told, ranks=2, **SMALL | data | settings)
    assert done.code and "interrupted after step 2" in done.err
    run_script(folder, data, script, ranks=2, RESUME="auto", **settings)
    mine, theirs = (
        torch.load(path / "checkpoints/ranks/step_00000004.pt", weights_only=True)["held"]
        for path in (folder, whole.folder)
    )
    for kind in ("model", "muon"):
        found, wanted = (dict(train_gpt.state_by_name(held[kind])) for held in (mine, theirs))
        assert all(torch.equal(found[name], t) for name, t in wanted.items() if torch.is_tensor(t))


# The operators.


@needs_triton
@pytest.mark.timeout(500)
@pytest.mark.slow
def test_the_operators_in_tritons_interpreter() -> None:
    without = ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *without, "steptime_operators.py"],
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
FLOATS = {"gain", "gain_grad"}  # pointers to float32; the others are to bfloat16
SIZES = {"rows", "T", "columns", "inner", "w_column", "w_inner"}


def machine_code(name: str, constants: dict[str, Any], capability: int) -> tuple[str, str, int]:
    """(PTX, what ptxas says of it, bytes of shared memory) of a kernel; no GPU is needed."""
    backends = importlib.import_module("triton.backends.compiler")
    compiler = importlib.import_module("triton.compiler")
    kernel, options = getattr(load(*RECIPES), name), {}
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
        tile = load(*RECIPES).relu2_tile(capability // 10, 2, gradient)
        sizes = zip(("tile_rows", "tile_columns", "tile_inner"), tile, strict=True)
        constants = {"gradient": gradient, "w_column" if gradient else "w_inner": 1, **dict(sizes)}
    ptx, said, shared = machine_code("relu2_kernel" if product else name, constants, capability)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "C7515" not in said and "Performance Loss" not in said
    assert shared <= SHARED_BYTES[capability] and "st.global.v4.b32" in ptx
    if product:
        assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
        assert "cp.async.cg.shared" in ptx


def test_an_operator_that_cannot_run_here_is_a_warning(data: dict[str, str]) -> None:
    module = load(*RECIPES)
    run = trainer_of(module, data, MLP_OPERATOR=1)
    [warning] = run.log.lines
    assert warning.startswith("warning: mlp_operator does not work here, so eager: ")
    assert not run.model.blocks[0].mlp.operator
