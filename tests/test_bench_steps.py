"""The step bench times whole steps of an idle device, in turns, and refuses arms that would not be what they say."""

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, clean_environment, train_gpt

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import steps  # noqa: E402  (the benchmarks are scripts, not a package)

pytestmark = pytest.mark.timeout(180)

# A script with the contract's lines and nothing behind them; it notes who ran, in which process, with what.
SCRIPT = """
from __future__ import annotations
import json, os, sys
from dataclasses import dataclass

@dataclass
class Settings:
    log_every: int = int(os.environ.get("TRAIN_LOG_EVERY", 0))
    val_every: int = int(os.environ.get("VAL_LOSS_EVERY", 0))
    iterations: int = int(os.environ.get("ITERATIONS", 0))

class Optimizers:
    def update_muon(self): pass

def compiled(log, *functions): return ["compiled"]

def main():
    s = Settings()
    with open(os.environ["NOTES"], "a") as notes:
        print(NAME, os.getpid(), s.iterations, *compiled(print, "plain"), file=notes)
    print("val_loader:shards pattern=* tokens:4096")
    for step in range(s.iterations + 1):
        if step == s.iterations or s.val_every and step % s.val_every == 0:
            print(f"step:{step}/{s.iterations} val_loss:{loss(step):.4f} val_bpb:2.0000 train_time:0ms step_avg:0.00ms")
        if step < 10 or (step + 1) % s.log_every == 0:
            print(f"step:{step + 1}/{s.iterations} train_loss:{loss(step + 1):.4f} train_time:0ms step_avg:0.00ms")

def loss(step): return 6.9 - step / 100

if __name__ == "__main__":
    if sys.argv[1:] == ["--print-config"]: print(json.dumps({"torch_compile": {}}))
    else: main()
"""


def write_script(folder: Path, name: str, old: str = "", new: str = "") -> Path:
    assert SCRIPT.count(old) == 1 or not old
    path = folder / f"{name}.py"
    path.write_text(SCRIPT.replace("NAME,", f"{name!r},").replace(old, new))
    return path


def bench(folder: Path, *arguments: object, **settings: object) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(ROOT / "tests" / "bench" / "steps.py"),
        "--quick",
        *map(str, arguments),
    ]
    return subprocess.run(
        command,
        text=True,
        capture_output=True,
        timeout=170,
        cwd=folder,
        env=clean_environment(TMPDIR=folder, NOTES=folder / "notes", **settings),
    )


def notes(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


# --- The clock --------------------------------------------------------------------------------------------------------


class Device:
    """Works 5 s a step, asynchronously, while the host takes 1 s to ask for it."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.waits = 0

    def step(self) -> None:
        self.host += 1
        self.done = max(self.done, self.host) + 5

    def synchronize(self) -> None:
        self.host, self.waits = max(self.host, self.done), self.waits + 1


def recorded(marks: list[steps.Mark], num_steps: int) -> tuple[steps.Recorder, Device, list[int]]:
    device, ended, current = Device(), [], [0]
    out = SimpleNamespace(write=lambda text: None, flush=lambda: None)
    recorder = steps.Recorder(
        out, marks, device.synchronize, lambda: device.host, lambda _: ended.append(current[0])
    )
    for step in range(1, num_steps + 1):
        current[0] = step
        device.step()
        print(
            f"step:{step}/{num_steps} train_loss:{9 - step / 10:.4f} train_time:1ms step_avg:1ms",
            file=recorder,
        )
    return recorder, device, ended


def test_the_window_holds_whole_steps_of_the_device_and_no_wait_inside() -> None:
    recorder, device, ended = recorded([steps.Mark("train", 3), steps.Mark("train", 7)], 7)
    begin, end = (
        recorder.times.values()
    )  # the device stands idle for 1 s, until the first step is asked for
    assert end - begin == 1 + 4 * 5 and device.waits == 2 and ended == [7]
    assert recorder.losses["train"] == {step: pytest.approx(9 - step / 10) for step in range(1, 8)}


def test_a_run_ends_at_its_last_mark() -> None:
    assert recorded([steps.Mark("train", 2), steps.Mark("train", 5)], 9)[2][0] == 5


def test_lines_in_pieces_and_several_in_one_are_read() -> None:
    seen, marks = [], [steps.Mark("val", 2)]
    out = SimpleNamespace(write=seen.append, flush=lambda: None)
    recorder = steps.Recorder(out, marks, lambda: None, lambda: 1.0, lambda _: None)
    for piece in (
        "step:1/9 train_",
        "loss:2.5 tok_s:1 data_crc:0000abcd eta:1s",
        "\nstep:2/9 val_loss:2.25 val_bpb:1\nx",
    ):
        recorder.write(piece)
    assert recorder.losses == {"train": {1: 2.5}, "val": {2: 2.25}} and recorder.crcs == {
        1: "0000abcd"
    }
    assert recorder.times == {marks[0]: 1.0} and "".join(seen).endswith("val_bpb:1\n")


def test_a_cuda_device_is_waited_for_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, used = [], [False]
    cuda = SimpleNamespace(
        is_initialized=lambda: used[0],
        synchronize=lambda: waits.append(1),
        get_device_name=lambda: "NVIDIA H200",
        max_memory_allocated=lambda: 3 << 20,
    )
    monkeypatch.setattr(
        steps, "torch_in_use", lambda: SimpleNamespace(cuda=cuda, __version__="2.11.0")
    )
    steps.synchronize()
    assert not waits and not steps.hardware()["cuda"]
    used[0] = True
    steps.synchronize()
    assert waits and steps.hardware() == dict(
        cuda=True, device="NVIDIA H200", torch="2.11.0", peak_mib=3
    )


def test_milliseconds_are_of_a_step_and_of_a_median_validation() -> None:
    times = [["train", 10, 5.0], ["train", 70, 17.0]]
    options = SimpleNamespace(validation=False, skip=10, steps=60, passes=3)
    assert steps.measured_ms(dict(times=times), options) == pytest.approx(200)
    options.validation = True
    times = [
        [kind, k, 100 * k + (kind == "val") * spent]
        for k, spent in ((1, 9), (2, 2), (3, 4))
        for kind in ("train", "val")
    ]
    assert steps.measured_ms(dict(times=times), options) == pytest.approx(4000)


# --- Turns and arms ---------------------------------------------------------------------------------------------------


def test_arms_take_turns_one_process_each(tmp_path: Path) -> None:
    ours, other, result = (
        write_script(tmp_path, "mine"),
        write_script(tmp_path, "theirs"),
        tmp_path / "result.json",
    )
    said = bench(
        tmp_path,
        "--ours",
        ours,
        "--against",
        other,
        "--arms",
        "eager-optimizer",
        "--repeats",
        2,
        "--json",
        result,
    )
    assert said.returncode == 0, said.stderr + said.stdout
    turn = [("theirs", "compiled"), ("mine", "compiled"), ("mine", "plain")]
    ran = notes(tmp_path)
    assert [(name, switched) for name, _, _, switched in ran] == 3 * turn
    assert len({process for _, process, _, _ in ran}) == len(ran)
    assert [int(iterations) for _, _, iterations, _ in ran] == 3 * [24] + 6 * [14]
    runs = json.loads(result.read_text())["runs"]
    assert {name: len(found) for name, found in runs.items()} == {
        "other": 2,
        "ours": 2,
        "eager-optimizer": 2,
    }
    table = said.stdout.split("\narm ")[1].splitlines()[1:4]
    assert [line.split()[0] for line in table] == list(runs)
    assert [path.name for path in tmp_path.iterdir() if "bench" in path.name] == []


def test_an_arm_whose_lever_is_not_there_is_left_out(tmp_path: Path) -> None:
    ours = write_script(tmp_path, "mine", "    def update_muon(self): pass", "    pass")
    said = bench(
        tmp_path,
        "--ours",
        ours,
        "--arms",
        "eager-optimizer",
        "flash",
        "eager",
        "--repeats",
        2,
        TORCH_COMPILE=0,
    )
    assert said.returncode == 0, said.stderr
    out = said.stdout
    assert (
        "arm eager-optimizer: left out:" in out
        and "mine.py has no Optimizers.update_muon to switch off" in out
    )
    assert "arm flash: left out:" in out and "mine.py has no setting ATTENTION_BACKEND" in out
    assert "arm eager: left out: the environment has it so for all arms" in out
    assert len(notes(tmp_path)) == 3 and "eager-optimizer against" not in out


def test_a_patch_needs_a_place_before_main(tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("print('begun')\n")
    with pytest.raises(steps.Refused, match="flat.py has no `if __name__"):
        steps.run_script(tmp_path / "flat.py", {"print": steps.there})


def test_levers_without_a_setting_are_switched_off() -> None:
    torch = train_gpt.torch
    plain = steps.models_only(lambda log, *functions: ["compiled" for _ in functions])
    model = torch.nn.Linear(3, 2)
    assert plain(print, model, len) == ["compiled", len]

    def folded(
        self: torch.nn.Linear, x: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x @ (self.weight if scale is None else 100 * self.weight).T

    x, scale = torch.randn(5, 3), torch.tensor([2.0, -1.0])
    patched = steps.unfolded(folded)
    torch.testing.assert_close(patched(model, x), x @ model.weight.T)
    torch.testing.assert_close(patched(model, x, scale), scale * (x @ model.weight.T))
    with pytest.raises(steps.Refused, match="no scale is folded"):
        steps.unfolded(torch.nn.Linear.forward)


@pytest.mark.parametrize("arm", ["ours", "unfolded", "cast-at-use"])
def test_arms_that_multiply_otherwise_are_the_same_function(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {path.split(".")[0] for path in steps.ARMS[arm].patch}:
        thing = getattr(train_gpt, name)
        mine = type(name, (thing,), {}) if isinstance(thing, type) else thing
        monkeypatch.setattr(train_gpt, name, mine)
    steps.apply(steps.ARMS[arm].patch, train_gpt)
    sizes = dict(
        NUM_LAYERS=2, MODEL_DIM=32, NUM_HEADS=2, NUM_KV_HEADS=1, TRAIN_SEQ_LEN=16, VOCAB_SIZE=50
    )
    config, faults = train_gpt.Config.from_environment(
        {name: str(value) for name, value in sizes.items()}
    )
    torch = train_gpt.torch
    torch.manual_seed(1)
    model = train_gpt.GPT(config, torch.float32)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.2)
    model.cast()
    x = torch.randint(0, 50, (3, 16))
    loss = model(x, x.roll(-1, 1))
    loss.backward()

    def plain(
        module: torch.nn.Module, rows: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.linear(
            rows, module.weight if scale is None else scale[:, None] * module.weight
        )

    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(train_gpt.Linear, "forward", plain)
    monkeypatch.setattr(train_gpt, "used", lambda module: module.weight)
    expected = model(x, x.roll(-1, 1))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    proj = model.blocks[0].mlp.proj  # what the arm switches
    assert torch.equal(proj.low, proj.weight) == (arm == "unfolded")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"attention_mode": "attention_mode:gqa num_heads:8 attention_backend:cudnn x:1"}, "cudnn"),
        (
            {
                "attention_mode": "attention_mode:gqa",
                "sdp_backends": "sdp_backends:cudnn=False flash=True math=True",
            },
            "flash or math",
        ),
        ({}, "?"),
    ],
)
def test_attention_is_as_logged(facts: dict[str, str], words: str) -> None:
    assert steps.attention_of(dict(facts=facts)) == words


def test_pinned_switches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = train_gpt.torch
    module = types.ModuleType("script")
    module.torch, module.__file__ = torch, "script.py"
    before = steps.torch_state()["sdp"].split()
    switches = {
        name: getattr(torch.backends.cuda, name.split(".")[-1]) for name in steps.ONLY_CUDNN
    }
    for name, switch in switches.items():  # put back at the end
        monkeypatch.setattr(torch.backends.cuda, name.split(".")[-1], switch)
    try:
        steps.apply(steps.ONLY_CUDNN, module)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(True)
        assert steps.torch_state()["sdp"] == "cudnn" == steps.ARMS["other-flags"].state["sdp"]
    finally:
        for name, switch in switches.items():
            switch(name.split("_", 1)[1].removesuffix("_sdp") in before)


@pytest.mark.parametrize(
    ("arm", "base", "own", "words"),
    [
        ("other-flags", ("flash", True), ("cudnn", False), ""),
        ("other-flags", ("flash", None), ("cudnn", None), ""),  # a torch without that reduction
        ("other-flags", ("flash", True), ("flash", False), "sdp is flash in its run, not cudnn"),
        ("other-flags", ("cudnn", False), ("cudnn", False), "other runs like this here"),
        ("mix-order", ("flash", False), ("flash", True), ""),
        (
            "mix-order",
            ("flash", False),
            ("flash", False),
            "mix_order is False in its run, not True",
        ),
        ("mix-order", ("flash", None), ("flash", None), "mix_order is None in its run, not True"),
        ("mix-order", ("flash", True), ("flash", True), "ours runs like this here"),
    ],
)
def test_an_arm_that_did_not_switch_is_found(arm: str, base: tuple, own: tuple, words: str) -> None:
    states = [dict(zip(("sdp", "mix_order"), values)) for values in (base, own)]
    runs = SimpleNamespace(gate={steps.ARMS[arm].script: {"state": states[0]}})
    said = steps.Bench.unchanged(runs, arm, states[1])
    assert words in said and bool(said) == bool(words)


def test_the_script_finds_itself_as_if_run_by_python(tmp_path: Path) -> None:
    said = bench(
        tmp_path,
        "--ours",
        write_script(
            tmp_path,
            "mine",
            "    s = Settings()\n",
            (
                "    s = Settings()\n    import __main__\n    assert __main__.main is main and sys.argv == [__file__]\n"
                "    assert Settings.__annotations__['log_every'] == 'int' and sys.path[0] == os.path.dirname(__file__)\n"
            ),
        ),
        "--arms",
        "--repeats",
        2,
    )
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    s = Settings()\n",
            "    s = Settings()\n    sys.exit('no such thing')\n",
            "ended with code 1: no such thing",
        ),
        (
            "    s = Settings()\n",
            "    s = Settings()\n    s.log_every = 1 << 30\n",
            "the script ended before its lines",
        ),
        (
            "    s = Settings()\n",
            "    import time\n    time.sleep(600)\n",
            "ran for 2 s: raise --limit",
        ),
    ],
)
def test_a_run_that_fails_is_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    said = bench(
        tmp_path, "--ours", write_script(tmp_path, "mine", old, new), "--arms", "--limit", 2
    )
    assert said.returncode == 1 and len(said.stderr.splitlines()) == 1
    assert said.stderr.startswith("steps bench: arm ours: ") and words in said.stderr


def test_a_script_that_is_edited_meanwhile_ends_the_measurement(tmp_path: Path) -> None:
    edit = "    s = Settings()\n    with open(__file__, 'a') as file: file.write('# more')\n"
    said = bench(
        tmp_path, "--ours", write_script(tmp_path, "mine", "    s = Settings()\n", edit), "--arms"
    )
    assert said.returncode == 1 and "mine.py was edited since the first run" in said.stderr


def test_arms_with_other_tokens_end_the_measurement() -> None:
    def result(crc: str = "0000abcd", tokens: int = 4096) -> dict:
        return dict(
            crcs={"1": crc} if crc else {},
            facts={"val_loader": f"val_loader:shards tokens:{tokens}"},
        )

    steps.check_work({"other": result(""), "ours": result(), "flash": result()})
    with pytest.raises(
        steps.BenchError, match="arm flash: other training tokens, by data_crc, than ours"
    ):
        steps.check_work({"other": result(""), "ours": result(), "flash": result("0000abce")})
    with pytest.raises(steps.BenchError, match="arm ours: other validation tokens than other"):
        steps.check_work({"other": result(), "ours": result(tokens=4095)})


# --- The gate and the report ------------------------------------------------------------------------------------------


def gated(**changes: float) -> list[tuple[bool, str]]:
    """Of an arm whose losses differ from the reference's at steps s1, s2, ... by so much."""
    train = {str(step): 7 - step / 100 for step in (*range(1, 11), 50, 100, 200)}
    own = {step: loss + changes.get(f"s{step}", 0.0) for step, loss in train.items()}
    results = {"other": dict(losses={"train": train}), "ours": dict(losses={"train": own})}
    return list(steps.gate(results, "other", steps.seed_tolerance(steps.SEED_NOISE_BPB)))


def test_seed_noise_is_that_of_two_runs() -> None:
    assert steps.seed_tolerance(0.0007) == pytest.approx(
        3 * 2**0.5 * 0.0007 * 1.6885, rel=1e-4
    )  # 0.0050 nats


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"s1": 0.0009, "s2": 0.3, "s10": 0.3, "s50": 0.3, "s100": 0.0049, "s200": -0.0049}, ""),
        ({"s1": 0.0011}, "step 1: +0.0011 nats, at most 0.0010"),
        ({"s1": -0.0011}, "step 1: -0.0011 nats, at most 0.0010"),
        ({"s100": 0.0052}, "step 100: +0.0052 nats, at most 0.0050"),
        ({"s200": -0.0052}, "step 200: -0.0052 nats, at most 0.0050"),
        ({"s5": math.nan}, "step 5: +nan nats"),
    ],
)
def test_the_gate(changes: dict[str, float], words: str) -> None:
    ((passed, said),) = gated(**changes)
    assert passed == (not words) and words in said


def test_a_loss_that_is_not_there_does_not_pass() -> None:
    results = {
        "other": dict(losses={"train": {"1": 7.0, "200": 5.0}}),
        "ours": dict(losses={"train": {"1": 7.0}}),
    }
    assert [passed for passed, _ in steps.gate(results, "other", 0.005)] == [False]


def test_other_mathematics_fail_the_command(tmp_path: Path) -> None:
    ours, other = (
        write_script(tmp_path, "mine", "6.9 -", "6.902 -"),
        write_script(tmp_path, "theirs"),
    )
    said = bench(tmp_path, "--ours", ours, "--against", other, "--arms", "--repeats", 2)
    assert said.returncode == 1 and "FAIL ours: step 1: +0.0020 nats, at most 0.0010" in said.stdout


def test_a_difference_within_the_noise_is_none() -> None:
    assert steps.compared([100.0, 101.0, 102.0], [99.0, 101.5, 102.5]).startswith(
        "no measurable difference"
    )
    assert steps.compared([100.0, 101.0, 102.0], [100.0, 101.0, 102.0]).startswith(
        "no measurable difference"
    )
    assert steps.compared([100.0, 101.0, 102.0], [80.0, 80.9, 81.9]).startswith(
        "19.87 % faster (-20.067 ms, "
    )
    assert steps.compared([80.0, 80.9, 81.9], [100.0, 101.0, 102.0]).startswith(
        "24.79 % slower (+20.067 ms, "
    )


def test_flops_and_mfu_are_those_of_the_baseline() -> None:
    """305.8 ms on an H200 are 224 TFLOP/s or 22.6 % (openai/parameter-golf PR 1225, counted in the same way)."""
    assert (
        steps.flops_a_token(steps.SHAPE)
        == 6 * 17_039_360 + 28_311_552
        == pytest.approx(130.5e6, rel=5e-4)
    )
    untied = steps.SHAPE | {"NUM_KV_HEADS": 8, "MLP_MULT": 3, "NUM_LAYERS": 1}
    assert steps.flops_a_token(untied) == 6 * (10 * 512**2 + 1024 * 512) + 6 * 1024 * 512
    run = dict(ms=305.8, device="NVIDIA H200", peak_mib=10_184)
    bench = SimpleNamespace(
        runs={"ours": [run, run]}, options=SimpleNamespace(validation=False), environ=steps.SHAPE
    )
    row = list(steps.table(bench, "ours"))[1].split()
    assert row == ["ours", "305.800", "1.000", "224", "22.6", "10184", "305.800", "305.800"]


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("x86_64", None),
    ],
)
def test_peaks_are_of_the_very_device(device: str, peak: float | None) -> None:
    found, source = steps.peak_of(device)
    assert (found == peak and source) if peak else (math.isnan(found) and not source)


@pytest.mark.parametrize("vocab", [300, 1024])
def test_synthetic_data_fit_and_can_be_learnt(tmp_path: Path, vocab: int) -> None:
    steps.write_tokenizer(tmp_path / "tokenizer.model", vocab)
    assert (
        len(sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")))
        == vocab
    )
    tokens = steps.markov_tokens(vocab, 50_001, seed=1)
    assert len(tokens) == 50_001 and tokens.dtype == np.dtype("<u2") and tokens.max() < vocab
    pairs = {*zip(tokens[:-1].tolist(), tokens[1:].tolist())}
    assert len(pairs) <= 8 * vocab + 49  # a chain ends every 1,024 tokens
    assert not np.array_equal(tokens, steps.markov_tokens(vocab, 50_001, seed=2))


# --- The trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        ["--skip", "1", "--steps", "2", "--gate-steps", "22"],
        pytest.param(["--validation", "--passes", "1"], marks=pytest.mark.slow),
    ],
)
def test_the_trainer_runs_as_both_scripts(tmp_path: Path, mode: list[str]) -> None:
    copy = tmp_path / "theirs.py"
    copy.write_text((ROOT / "train_gpt.py").read_text(encoding="utf-8"))
    said = bench(
        tmp_path, "--against", copy, "--arms", "--repeats", 2, *mode, DEVICE="cpu", TORCH_COMPILE=0
    )
    assert said.returncode == 0, said.stderr + said.stdout
    assert (
        "PASS ours: the mathematics of other" in said.stdout
        and "no CUDA device here" in said.stdout
    )
    losses = [line.split()[1:] for line in said.stdout.split("loss at step")[1].splitlines()[:3]]
    assert losses[1] == losses[2] and len(losses[1]) == (1 if "--validation" in mode else 12)
    rows = said.stdout.split("\narm ")[1].splitlines()
    assert (
        [row.split()[0] for row in rows[1:3]] == ["other", "ours"]
        and "a validation" in rows[0]
        or len(mode) == 6
    )
    assert all(0 < float(row.split()[1]) for row in rows[1:3])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--skip", "20"], "only 1 to 10 are logged"),
        (["--repeats", "1"], "--repeats 1: set at least 2"),
        (["--against", "no/such.py"], "no/such.py: no such file"),
        (["--json", "no/such/folder/result"], "no such folder: no/such/folder"),
        (["--arms", "nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    said = bench(tmp_path, *arguments)
    assert said.returncode == 2 and words in said.stderr.splitlines()[-1]


def test_half_a_data_set_is_refused(tmp_path: Path) -> None:
    said = bench(tmp_path, DATA_PATH=tmp_path)
    assert (
        said.returncode == 1
        and "DATA_PATH is set alone" in said.stderr
        and "Traceback" not in said.stderr
    )
