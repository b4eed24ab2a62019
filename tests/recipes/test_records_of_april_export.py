"""Recipes of the records of April 2026 that store and score: each against a plain reference.

The references are written from what the records of 2026-04-05 and 2026-04-09 do, in words.
"""

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipe
import tiny
import torch
from running import SMALL_MODEL, byte_data, run_trainer, write_split
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(240)
OURS = "gptq", "brotli", "score_first_ttt"
MORE = *OURS, "ema", "sliding_window", "muon_weight_decay", "xsa", "leaky_relu2"
SETTINGS = SMALL_MODEL | {
    "RUN_ID": "r",
    "NUM_LAYERS": 3,
    "TRAIN_BATCH_TOKENS": 512,
    "VAL_BATCH_SIZE": 256,
    "GRAD_ACCUM_STEPS": 2,
    "ITERATIONS": 4,
    "MATRIX_LR": 0.2,
    "VAL_LOSS_EVERY": 0,
}
GPTQ = {"GPTQ_BATCHES": 6, "MATRIX_CLIP_SIGMAS": 3, "EMBED_CLIP_SIGMAS": 4, "EMBED_BITS": 7}
GPTQ |= {"MLP_CLIP_SIGMAS": 2.5}
TTT = {"EVAL_STRIDE": 8, "TTT_EPOCHS": 2, "TTT_CHUNK_TOKENS": 96, "TTT_LR": 0.5}
ON = GPTQ | TTT | {"ARTIFACT_BROTLI": 1}
MORE_ON = ON | {"EMA_DECAY": 0.8, "MUON_WD": 0.5, "XSA_LAST_N": 2, "LEAKY_SLOPE": 0.5}


@pytest.fixture
def script(script: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """The script with some recipes, as a module. In it small matrices are quantized, too."""

    def make(*names: str) -> ModuleType:
        module = script(*names)
        monkeypatch.setattr(module, "SMALL", 500)
        return module

    return make


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Validation has 13 rows of 32: four chunks of 3 rows and one of 1 row."""
    return byte_data(tmp_path_factory.mktemp("data"), 20_000, 13 * 32 + 1)


def trainer(module: ModuleType, data: dict[str, str], **settings: Any) -> Any:
    return trainers(module, data, 1, **settings)[0][0]


def trainers(module: ModuleType, data: dict, ranks: int, **settings: Any) -> tuple[list, Any]:
    shutil.rmtree("checkpoints/r", ignore_errors=True)  # of the run before
    return tiny.trainers(
        module, ranks, **SETTINGS | {"GRAD_ACCUM_STEPS": 2 // ranks} | data | settings
    )


def finish(run: Any) -> SimpleNamespace:
    """Trains and exports; what came out."""
    run.train()
    run.export_and_score()
    steps = [event["train_loss"] for event in run.log.events if event["event"] == "step"]
    [score] = [event for event in run.log.events if event["event"] == "score"]
    return SimpleNamespace(losses=steps, score=score["val_loss"], run=run)


def artifact() -> bytes:
    """Of the last run."""
    return Path("final_model.int8.ptz").read_bytes()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- All of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*([name] for name in OURS), MORE], ids=lambda names: names[-1])
def test_off_it_is_the_root_to_the_digit(names: list, script: Callable, data: dict) -> None:
    ends = []
    for recipes in [], names:
        end = finish(trainer(script(*recipes), data))
        ends.append((end.losses, end.score, artifact()))
    assert ends[0] == ends[1]


def test_with_other_recipes_two_ranks_score_as_one(script: Callable, data: dict) -> None:
    pytest.importorskip("brotli")
    one = finish(trainer(script(*MORE), data, **MORE_ON))
    both, together = trainers(script(*MORE), data, 2, **MORE_ON)
    two = together.run(lambda rank: finish(both[rank]))
    assert two[0].score == two[1].score == pytest.approx(one.score, rel=1e-6)
    for name, t in one.run.model.state_dict().items():
        torch.testing.assert_close(two[0].run.model.state_dict()[name], t, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "            run.model.logits(batch.x)\n",
        "        exchange = self.exchange\n        for _ in",
    ],
    ids=["gptq", "ttt"],
)
def test_a_signal_in_the_export_ends_both_ranks_and_resume_repeats_it(
    place: str, script: Callable, data: dict, tmp_path: Path
) -> None:
    """The edit: rank 1 is told to end, but not when the run was resumed."""
    text = Path(script("gptq", "score_first_ttt", "ema").__file__).read_text()
    assert text.count(place) == 1
    runtime = "runtime" if "model.logits" in place else "self.runtime"
    indent = place[: len(place) - len(place.lstrip())]
    told = f"if {runtime}.rank == 1 and 'RESUME' not in os.environ: os.kill(os.getpid(), 15)\n"
    told += f"{indent}if {runtime}.rank == 0: tell('here')\n"
    edited = tmp_path / "edited.py"
    edited.write_text(text.replace(place, f"{indent}{told}{place}"))
    settings = SETTINGS | data | GPTQ | TTT | {"EMA_DECAY": 0.8, "GRAD_ACCUM_STEPS": 1}
    whole = run_trainer(tmp_path / "whole", ranks=2, script=edited, **settings, RESUME="auto")
    ended = run_trainer(tmp_path / "again", ranks=2, script=edited, **settings)
    assert ended.code and "interrupted after step 4" in ended.err
    if "exchange" in place:  # both ranks hear of it in the first step
        assert (ended.out.count("here\n"), whole.out.count("here\n")) == (1, 4)
    assert not ended.values("val_bpb")[1:]  # of the validation after training alone
    again = run_trainer(tmp_path / "again", ranks=2, script=edited, **settings, RESUME="auto")
    assert (again.code, whole.code) == (0, 0), again.err
    assert again.values("val_bpb")[-2:] == whole.values("val_bpb")[-2:]
    for name in "final_model.pt", "final_model.int8.ptz":
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"TTT_EPOCHS": 1}, "TTT_EPOCHS=1: set EVAL_STRIDE"),
        ({"TTT_EPOCHS": 1, "EVAL_STRIDE": 8, "TTT_CHUNK_TOKENS": 40}, "set a multiple of 32"),
        ({"GPTQ_BATCHES": 1, "MAX_WALLCLOCK_SECONDS": 12}, "set less than MAX_WALLCLOCK_SECONDS"),
        ({"MATRIX_BITS": 9}, "MATRIX_BITS=9: set a whole number from 2 to 8"),
    ],
)
def test_refuses_settings_that_do_not_fit(
    settings: dict, words: str, script: Callable, data: dict
) -> None:
    module = script(*OURS)
    env = {name: str(value) for name, value in (SETTINGS | data | settings).items()}
    config, _, faults, _ = module.read_config([], env)
    faults += module.find_faults(config, env)[0]
    assert len(faults) == 1 and words in faults[0]


# --- gptq ---------------------------------------------------------------------------------------


def reference_gptq(weight: Tensor, hessian: Tensor, levels: int, sigmas: float) -> tuple:
    """One column after the other, in float64, without blocks and without a new order in memory."""
    w, hessian = weight.double(), hessian.double()
    rows, columns = w.shape
    diagonal = [float(hessian[j, j]) or 1.0 for j in range(columns)]
    damping = 0.01 * sum(diagonal) / columns
    damped = hessian.clone()
    for j in range(columns):
        w[:, j] = w[:, j] if hessian[j, j] else 0.0
        damped[j, j] = diagonal[j] + damping
    order = sorted(range(columns), key=lambda j: -damped[j, j])
    u = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    scales = []
    for row in weight.double():
        deviation = math.sqrt(float(((row - row.mean()) ** 2).sum()) / (columns - 1))
        scales.append(max(sigmas * deviation / levels, 2.0**-24))
    scale = torch.tensor(scales).half()
    q = torch.zeros(rows, columns)
    for i, j in enumerate(order):
        q[:, j] = (w[:, j] / scale.double()).round().clamp(-levels, levels)
        error = (w[:, j] - q[:, j] * scale.double()) / u[i, i]
        for later in range(i + 1, columns):
            w[:, order[later]] -= error * u[i, later]
    return q.to(torch.int8), scale


@pytest.mark.parametrize(("levels", "sigmas"), [(31, 12.85), (127, 20.0), (7, 3.0), (1, 1.5)])
def test_gptq_rounds_as_the_plain_loop_does(levels: int, sigmas: float, script: Callable) -> None:
    random = torch.Generator().manual_seed(levels)
    weight = 0.02 * torch.randn(24, 300, generator=random)
    weight[3] = 0.0
    weight[4] = 1e-9  # below float16's least number
    inputs = torch.randn(500, 300, generator=random) @ torch.randn(300, 300, generator=random)
    inputs[:, [5, 200]] = 0.0
    inputs /= 400  # so that the diagonal is about 1, as that of columns without inputs
    q, scale = script("gptq").gptq(weight, inputs.T @ inputs, levels, sigmas)
    wanted_q, wanted_scale = reference_gptq(weight, inputs.T @ inputs, levels, sigmas)
    assert torch.equal(scale, wanted_scale) and (scale > 0).all()
    assert int((q != wanted_q).sum()) == 0
    assert not q[:, [5, 200]].any() and not q[3].any()
    plain = (weight / scale[:, None]).round().clamp(-levels, levels)
    ours, theirs = (((n * scale[:, None] - weight) @ inputs.T).norm() for n in (q, plain))
    assert ours < 0.9 * theirs  # the error in the outputs is what it makes small


def test_hessians_are_of_the_first_batches_on_any_number_of_ranks(
    script: Callable, data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("gptq")
    both, together = trainers(module, data, 2, **GPTQ)
    on_two = together.run(lambda rank: module.collect_hessians(both[rank]))
    run = trainer(module, data, **GPTQ)
    on_one = module.collect_hessians(run)
    assert on_one.keys() == {n for n, p in run.model.named_parameters() if p.numel() > 500}
    wanted = {name: torch.zeros(h.shape, dtype=torch.float64) for name, h in on_one.items()}
    names = {p.data_ptr(): name for name, p in run.model.named_parameters()}

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        if name := names.get(weight.data_ptr()):  # all but the scaled ones: proj
            wanted[name] += x.double().flatten(0, -2).T @ x.double().flatten(0, -2) / 6
        return torch._C._nn.linear(x, weight)

    monkeypatch.setattr(F, "linear", linear)
    tokens = np.fromfile(Path(data["DATA_PATH"], "fineweb_train_000000.bin"), "<u2")[512:]
    starts = range(0, 6 * 256 + 24, 65)  # spans of 2 rows: 6 batches are 24 of them
    for start in starts[:24]:
        rows = torch.tensor(tokens[start : start + 64].astype(np.int64)).view(2, 32)
        run.model.logits(rows)
    for name, hessian in on_one.items():
        torch.testing.assert_close(on_two[0][name], hessian, rtol=1e-4, atol=1e-4)
        if ".proj." not in name:
            torch.testing.assert_close(hessian.double(), wanted[name], rtol=1e-4, atol=1e-4)


def test_the_artifact_holds_the_rounded_average(script: Callable, data: dict) -> None:
    module = script("gptq", "ema")
    run = finish(trainer(module, data, **GPTQ, EMA_DECAY=0.8)).run
    run.swap_average()
    state = run.model.state_dict()
    stored = module.unpack(artifact(), state)
    hessians = module.collect_hessians(run)
    assert len(hessians) == 19
    for name, hessian in hessians.items():
        levels, sigmas = (63, 4.0) if name == "tok_emb.weight" else (31, 3.0)
        sigmas = 2.5 if ".mlp." in name else sigmas
        q, scale = module.gptq(state[name], hessian, levels, sigmas)
        assert torch.equal(stored[name], module.dequantize(q, scale)), name
    assert any(
        line.startswith("gptq: 19 matrices, 6 bits (head: 7), mean error") for line in run.log.lines
    )


def test_a_matrix_without_inputs_is_stored_as_in_the_root(script: Callable, data: dict) -> None:
    """kv_one_product multiplies by c_k and c_v without their modules."""
    module = script("gptq", "kv_one_product")
    settings = GPTQ | {"KV_ONE_PRODUCT": 1, "NUM_KV_HEADS": 2}
    run = finish(trainer(module, data, **settings)).run
    stored = module.unpack(artifact(), run.model.state_dict())
    name = "blocks.0.attn.c_v.weight"
    expected = module.dequantize(*module.quantize(run.model.get_parameter(name)))
    assert torch.equal(stored[name], expected) and expected.any()


def test_the_reserve_is_taken_off_the_cap(script: Callable, data: dict) -> None:
    module = script("gptq")
    length = {"MAX_WALLCLOCK_SECONDS": 600, "ITERATIONS": 1000, "WARMDOWN_ITERS": 100}
    settings = SETTINGS | data | length
    reserved = tiny.config_of(module, **settings, GPTQ_BATCHES=6, GPTQ_RESERVE_SECONDS=100)
    root = tiny.config_of(script(), **settings | {"MAX_WALLCLOCK_SECONDS": 500})
    for ms in 1.0, 250_000.0, 499_999.0, 500_001.0:
        for function in "progress", "lr_multiplier":
            with_reserve = getattr(module, function)(reserved, 50, ms)
            assert with_reserve == getattr(script(), function)(root, 50, ms)
    for ms, steps in (499_999.0, 1), (500_001.0, 0):
        reserve = {"GPTQ_BATCHES": 6, "GPTQ_RESERVE_SECONDS": 100}
        run = trainer(module, data, MAX_WALLCLOCK_SECONDS=600, ITERATIONS=1, **reserve)
        run.exchange.elapsed_ms = lambda step, ms=ms: ms
        run.train()
        assert run.step == steps


# --- brotli -------------------------------------------------------------------------------------


def test_brotli_gives_back_every_byte(script: Callable, data: dict) -> None:
    pytest.importorskip("brotli")
    module = script("brotli")
    for length in 0, 1, 2, 7, 100_001:
        random = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
        assert module.decompress(module.compress_by_brotli(random)) == random
    sizes = []
    weights = []
    for on in 0, 1:
        end = finish(trainer(module, data, ARTIFACT_BROTLI=on))
        sizes.append(len(artifact()))
        weights.append(module.unpack(artifact(), end.run.model.state_dict()))
    assert sizes[1] < sizes[0]
    assert all(torch.equal(t, weights[0][name]) for name, t in weights[1].items())


def test_without_brotli_nothing_starts(
    script: Callable, data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("brotli")
    monkeypatch.setitem(sys.modules, "brotli", None)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    env = {name: str(value) for name, value in (SETTINGS | data).items()}
    assert module.find_faults(module.read_config([], env)[0], env)[0] == []
    config = module.read_config(["ARTIFACT_BROTLI=1"], env)[0]
    [fault] = module.find_faults(config, env)[0]
    assert fault.endswith("brotli is missing: python3 -m pip install brotli")


# --- score_first_ttt ----------------------------------------------------------------------------


def reference_nats(model: Any, tokens: Tensor, stride: int, settings: dict) -> Tensor:
    """The nats of each target of whole rows: one window after the other, steps in between."""
    length, size = SETTINGS["TRAIN_SEQ_LEN"], settings["TTT_CHUNK_TOKENS"]
    total = (len(tokens) - 1) // length * length
    nats = torch.full((total,), math.nan, dtype=torch.float64)
    chunks = math.ceil(total / size)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for chunk in range(chunks):
        for start in range(0, total - length + 1, stride):
            first = start + length - stride if start else 0
            if first // size == chunk:
                with torch.no_grad():
                    logits = model.logits(tokens[start : start + length][None])[0]
                y = tokens[start + 1 : start + length + 1]
                each = F.cross_entropy(logits, y, reduction="none")
                nats[first : start + length] = each[first - start :].double()
        if chunk == chunks - 1:
            return nats
        rows = tokens[chunk * size : (chunk + 1) * size + 1]
        lr = settings["TTT_LR"] * 0.5 * (1 + math.cos(math.pi * chunk / (chunks - 1)))
        for _ in range(settings["TTT_EPOCHS"]):
            logits = model.logits(rows[:-1].view(-1, length)).flatten(0, 1)
            grads = torch.autograd.grad(F.cross_entropy(logits, rows[1:]), model.parameters())
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
            with torch.no_grad():
                for p, grad, momentum in zip(model.parameters(), grads, momenta, strict=True):
                    momentum.mul_(0.9).add_(grad / max(1.0, norm + 1e-6))
                    p.sub_(lr * momentum)
    raise AssertionError


def recorded(run: Any) -> list[Tensor]:
    """The nats of each scored target, in the order of scoring, during the run."""
    nats = []

    def mean_nats(model: Any, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten(), reduction="none")
        nats.append(each[y.flatten() >= 0].double())
        return nats[-1].mean()

    run.scorer.mean_nats = mean_nats
    return nats


def val_tokens(data: dict) -> np.ndarray:
    return np.fromfile(Path(data["DATA_PATH"], "fineweb_val_000000.bin"), "<u2")[512:]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"TTT_EPOCHS": 3, "EVAL_STRIDE": 32}, {"TTT_CHUNK_TOKENS": 32}], ids=str
)
def test_scores_first_as_the_plain_loop_does(
    settings: dict, ranks: int, script: Callable, data: dict
) -> None:
    settings = TTT | settings
    module = script("score_first_ttt")
    runs, together = trainers(module, data, ranks, **settings)
    ends = together.run(lambda rank: finish(runs[rank])) if together else [finish(runs[0])]
    model = module.GPT(runs[0].config, torch.float32)
    model.load_state_dict(module.unpack(artifact(), model.state_dict()))
    tokens = torch.tensor(val_tokens(data).astype(np.int64))
    wanted = float(reference_nats(model, tokens, settings["EVAL_STRIDE"], settings).mean())
    assert [end.score for end in ends] == pytest.approx([wanted] * ranks, rel=2e-7)
    # Files and checkpoint hold the weights from before.
    state = torch.load("final_model.pt")
    held = torch.load("checkpoints/r/step_00000004.pt")["held"]["model"]
    for name, t in runs[0].model.state_dict().items():
        assert torch.equal(t, state[name]) and torch.equal(t, held[name])
    assert abs(wanted - finish(trainer(module, data, EVAL_STRIDE=8)).score) > 1e-4


def test_no_step_is_made_on_a_target_before_its_score(
    script: Callable, data: dict, tmp_path: Path
) -> None:
    """The last token of the second chunk is another one: of both chunks' scores that one differs,
    and after the next step all do."""
    scores = []
    for change in 0, 1:
        tokens = val_tokens(data).copy()
        tokens[192] = tokens[192] % 250 + 1 + change
        write_split(tmp_path / "data", "val", tokens, [])
        train = Path(data["DATA_PATH"], "fineweb_train_000000.bin")
        shutil.copy(train, tmp_path / "data")
        run = trainer(script("score_first_ttt"), data | {"DATA_PATH": tmp_path / "data"}, **TTT)
        nats = recorded(run)
        finish(run)
        scores.append(torch.cat(nats))
    differ = (scores[0] != scores[1]).nonzero().flatten().tolist()
    assert len(scores[0]) == 13 * 32 and differ == list(range(191, 13 * 32))


def test_without_steps_it_is_sliding_window(script: Callable, data: dict) -> None:
    root = recipe.root_text()
    alone, sliding = recipe.load("score_first_ttt"), recipe.load("sliding_window")
    assert recipe.combined(root, [alone]) == recipe.combined(root, [sliding, alone])
    ends = [finish(trainer(script(r.name), data, EVAL_STRIDE=8)) for r in (alone, sliding)]
    assert ends[0].score == ends[1].score != finish(trainer(script(), data)).score


@pytest.mark.parametrize("name", ["sliding_window", "score_first_ttt"])
def test_windows_are_scored_by_the_compiled_function(
    name: str, script: Callable, data: dict
) -> None:
    module = script(name)
    run = trainer(module, data, EVAL_STRIDE=8, TORCH_COMPILE=1)
    assert run.scorer is not run.validation
    assert run.scorer.mean_nats is run.validation.mean_nats is not module.mean_nats
