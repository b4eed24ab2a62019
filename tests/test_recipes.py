"""Recipes: each applies, is the root when it is off, and is right when it is on.

Recipes are applied as users do, and the scripts that come out run here as modules.
"""

import importlib.util
import io
import itertools
import lzma
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL_MODEL, Call, SimulatedRanks, run_trainer, runtime_of, write_split
from conftest import train_gpt as tg
from steptime import RECIPES as FASTER
from torch.nn import functional as F

sys.path.append(str(ROOT / "records"))
import recipe  # noqa: E402  (records/ is no package)

pytestmark = pytest.mark.timeout(240)
SETTINGS = SMALL_MODEL | {
    "RUN_ID": "r",
    "NUM_LAYERS": 3,
    "VOCAB_SIZE": 260,
    "ITERATIONS": 6,
    "WARMUP_STEPS": 0,
    "WARMDOWN_ITERS": 0,
    "VAL_LOSS_EVERY": 0,
    "VAL_BATCH_SIZE": 2048,
    "GRAD_ACCUM_STEPS": 4,
    "VAL_TOKENS": 600,
}
# What switches a recipe on in a model as small as that, where its header's values do not fit.
ON = {
    "ema": {"EMA_DECAY": 0.8},
    "muon_weight_decay": {"MUON_WD": 0.5},
    "sliding_window": {"EVAL_STRIDE": 8},
    "bigram_hash": {"BIGRAM_ROWS": 97, "BIGRAM_DIM": 16},
    "partial_rope": {"ROPE_DIMS": 4},
    "xsa": {"XSA_LAST_N": 2},
    "depth_recurrence": {"BLOCK_ORDER": "0,1,2,1,2"},
    "longer_rows": {"SHORT_ROW_LEN": 8},
}
STACKS = {
    "first": ["ema", "sliding_window", "int6", "lzma", "muon_weight_decay"],
    "model": ["bigram_hash", "smear_gate", "partial_rope", "xsa", "leaky_relu2"],
    "data": ["depth_recurrence", "longer_rows", "shuffled_order", "ema", "bigram_hash"],
}
ALL = [name for name in recipe.names() if name not in FASTER]  # those: test_recipes_steptime.py
TRAINED = [name for name in ALL if name not in ("sliding_window", "int6", "lzma")]


def on(name: str) -> dict[str, Any]:
    """The settings that switch a recipe on."""
    return ON.get(name) or {n: value for n, (_, value) in recipe.load(name).settings.items()}


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """The root's script with some recipes, as a module."""
    folder = tmp_path_factory.mktemp("scripts")
    made: dict[tuple[str, ...], ModuleType] = {(): tg}

    def make(*names: str) -> ModuleType:
        if names not in made:
            path = folder / f"with_{'_'.join(names)}.py"
            assert recipe.main(["apply", *names, "--to", str(path)]) == 0
            spec = importlib.util.spec_from_file_location(path.stem, path)
            made[names] = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = made[names]
            spec.loader.exec_module(made[names])
        return made[names]

    return make


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Documents of bytes, each behind a 1, in three training shards."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "byte.json").write_text('{"kind": "byte", "offset": 4}', encoding="utf-8")
    random = np.random.default_rng(0)
    texts = [random.integers(4, 260, random.integers(5, 90)) for _ in range(900)]
    tokens = np.concatenate([np.r_[1, text] for text in texts])
    write_split(folder, "val", tokens[:2000], [])
    write_split(folder, "train", tokens[2000:], [9000, 14_000])
    env = {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(folder / "byte.json")}
    return SimpleNamespace(env=env, train=tokens[2000:], val=tokens[:2000], folder=folder)


Run = Callable[..., Any]


@pytest.fixture
def run_of(
    script: Callable, data: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Makes a Trainer of the root with some recipes; more than one rank: a list of Trainers."""
    monkeypatch.chdir(tmp_path)

    def make(names: tuple[str, ...] = (), ranks: int = 1, **settings: object) -> Any:
        module = script(*names)
        monkeypatch.setattr(module, "SMALL", 500)  # in so small a model tensors are quantized, too
        env = SETTINGS | data.env | settings
        config, faults = module.read_config({name: str(value) for name, value in env.items()})
        assert not faults, faults
        if ranks == 1:
            return module.Trainer(config, runtime_of(config, trainer=module), log_of(module))
        together = SimulatedRanks(config, ranks, module)
        return [module.Trainer(config, one, log_of(module)) for one in together.runtimes], together

    return make


def log_of(module: ModuleType) -> tg.RunLog:
    """A log that writes no file: what was logged is in `lines` and `events`."""
    log = module.RunLog("r", enabled=False)
    log.lines = []
    log.events = []
    log.line = lambda text: log.lines.extend(text.splitlines())
    log.event = lambda name, **values: log.events.append({"event": name, **values})
    return log


def finish(run: Any) -> SimpleNamespace:
    """Trains and exports; what came out."""
    run.train()
    assert run.export_and_score(code_bytes=0) == ""
    events = run.log.events
    steps = [event for event in events if event["event"] == "step"]
    [score] = [event for event in events if event["event"] == "score"]
    return SimpleNamespace(
        losses=[event["train_loss"] for event in steps],
        crcs=[event["data_crc"] for event in steps],
        score=(score["val_loss"], score["val_bpb"]),
        artifact=Path("final_model.int8.ptz").read_bytes(),
        state=dict(tg.state_by_name(run.checkpoints.final["held"])),
    )


def without_clocks(state: dict[str, Any]) -> dict[str, Any]:
    return {name: t for name, t in state.items() if not name.startswith(("logged", "val_ms"))}


def assert_same(mine: dict[str, Any], other: dict[str, Any], *parts: str) -> None:
    """All that two runs hold, or those parts of it."""
    mine, other = without_clocks(mine), without_clocks(other)
    assert mine.keys() == other.keys()
    names = [name for name in mine if name.startswith(parts or "")]
    assert len(names) > 20
    for name in names:
        assert tg.is_same(mine[name], other[name]), name


# --- Each recipe ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_it_applies_and_its_header_is_whole(name: str, script: Callable) -> None:
    one = recipe.load(name)
    assert one.faults() == []
    module = script(name)
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", f"--config={ROOT}/.ruff.toml"]
        done = subprocess.run([*ruff, module.__file__], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    added = {field.upper() for field in module.Config.__annotations__} - set(tg.SETTINGS)
    assert added == set(one.settings)
    defaults = module.Config().as_text()
    for setting, (default, value) in one.settings.items():
        kind = module.SETTINGS[setting]
        assert str(module.parse(kind, default) if default else default) == defaults[setting]
        assert module.read_config({setting: value})[1] == []
        assert "no setting here: unset it" in tg.read_config({setting: value})[1][0]


@pytest.fixture(scope="session")
def of_root() -> dict[str, Any]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_off_it_is_the_root_to_the_digit(name: str, run_of: Run, of_root: dict) -> None:
    if not of_root:
        of_root.update(vars(finish(run_of())))
    off = vars(finish(run_of((name,))))
    for what in ("losses", "crcs", "score", "artifact"):
        assert off[what] == of_root[what], what


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALL, *STACKS])
def test_on_it_trains_on_ranks_resumes_and_survives_priming(name: str, run_of: Run) -> None:
    names = tuple(STACKS.get(name, [name]))
    settings = {n: value for each in names for n, value in on(each).items()}
    run = run_of(names, **settings, CHECKPOINT_EVERY=3)
    whole = finish(run)
    plain = finish(run_of())
    assert (whole.losses != plain.losses) == (set(names) & set(TRAINED) != set() and name != "ema")
    assert (whole.artifact, whole.score) != (plain.artifact, plain.score)
    # All parameters are in the artifact and in the checkpoint, and those that are new have moved.
    model = {name: p.detach() for name, p in run.model.named_parameters()}
    unpacked = sys.modules[type(run).__module__].unpack(whole.artifact, model)
    assert unpacked.keys() == model.keys() == run.checkpoints.final["held"]["model"].keys()
    fresh = run_of(names, **settings).model.state_dict()
    assert all(not torch.equal(whole.state[f"model.{n}"], t) for n, t in fresh.items())
    # Resumed to the bit, from its file.
    again = run_of(names, **settings, RESUME="checkpoints/r/step_00000003.pt")
    again_module = sys.modules[type(again).__module__]
    again_module.resume(again, again_module.find_checkpoint(again.config))
    assert again.step == 3
    assert_same(finish(again).state, whole.state)
    # Priming leaves no trace.
    assert_same(finish(run_of(names, **settings, WARMUP_STEPS=3)).state, whole.state)
    # Two ranks train on the same data, to rounding with the same result.
    both, together = run_of(names, ranks=2, **settings, GRAD_ACCUM_STEPS=2)
    results = together.run(lambda rank: finish(both[rank]))
    assert results[0].crcs == whole.crcs
    assert results[0].losses == pytest.approx(whole.losses, rel=1e-4)
    assert results[0].score == pytest.approx(whole.score, rel=1e-3)
    assert_same(results[0].state, results[1].state, "model", "average")


# --- What each one promises -------------------------------------------------------------------


def test_ema_is_the_average_of_the_weights_after_each_step(
    run_of: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(("ema",), EMA_DECAY=0.8, VAL_LOSS_EVERY=3)
    names = [name for name, _ in run.model.named_parameters()]
    after = [[p.detach().double().clone() for p in run.model.parameters()]]
    step = type(run).train_step

    def noted(run: Any, batches: Any) -> None:
        step(run, batches)
        after.append([p.detach().double().clone() for p in run.model.parameters()])

    monkeypatch.setattr(type(run), "train_step", noted)
    end = finish(run)
    wanted = after[0]
    for weights in after[1:]:
        wanted = [0.8 * mean + 0.2 * p for mean, p in zip(wanted, weights, strict=True)]
    exported = torch.load("final_model.pt")
    for name, mean, p in zip(names, wanted, after[-1], strict=True):
        torch.testing.assert_close(
            end.state[f"average.{name}"].double(), mean, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(exported[name], end.state[f"average.{name}"])
        assert torch.equal(end.state[f"model.{name}"].double(), p), "training goes on with these"


def test_ema_gives_the_weights_back_when_a_signal_ends_the_validation(run_of: Run) -> None:
    run = run_of(("ema",), EMA_DECAY=0.8)
    module = sys.modules[type(run).__module__]
    before = [p.detach().clone() for p in run.model.parameters()]
    for mean in run.average.values():
        mean += 1
    run.runtime.signum = 2
    with pytest.raises(module.HaltError):
        run.validate()
    assert all(map(torch.equal, before, run.model.parameters()))


def test_muon_weight_decay_shrinks_the_matrices_alone(run_of: Run) -> None:
    """After one step: what the root has, less the rate times the decay of the weights before."""
    settings = {"ITERATIONS": 1}
    plain = run_of((), **settings)
    decayed = run_of(("muon_weight_decay",), **settings, MUON_WD=0.5)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    plain.train()
    decayed.train()
    matrices = {id(p) for p in decayed.muon.matrices}
    after = dict(plain.model.named_parameters())
    assert len(matrices) == 18
    for name, p in decayed.model.named_parameters():
        decay = 0.04 * 0.5 * before[name] if id(p) in matrices else 0
        torch.testing.assert_close(
            p, after[name] - decay, rtol=0, atol=1e-7 if id(p) in matrices else 0
        )


def test_sliding_windows_score_each_target_once_with_the_longest_context(
    run_of: Run, data: SimpleNamespace
) -> None:
    """Window by window, in a plain loop, with the bytes of exactly those targets."""
    run = run_of(("sliding_window",), EVAL_STRIDE=8)
    run.train()
    run.validation = run.windows
    targets = (600 - 1) // 32 * 32
    tokens = torch.from_numpy(data.val[: targets + 1].astype(np.int64))
    nats, in_bytes = [], 0
    with torch.no_grad():
        for end in range(32, targets + 1, 8):
            window = tokens[end - 32 : end + 1]
            losses = F.cross_entropy(
                run.model.logits(window[None, :-1])[0], window[1:], reduction="none"
            )
            scored = 32 if end == 32 else 8
            nats += losses[-scored:].tolist()
            in_bytes += int((window[1:][-scored:] >= 4).sum())
    assert len(nats) == targets == run.validation.targets
    loss, bpb, _ = run.evaluate(tg.FINAL)
    module = sys.modules[type(run).__module__]
    ranks = SimulatedRanks(run.config, 3, module).runtimes
    plans = [module.WindowPlan.val(run.config, one, len(data.val)) for one in ranks]
    rows = [row for plan in plans for k in range(plan.num_batches) for row in plan.rows(k)]
    assert rows == list(range(len(range(32, targets + 1, 8)))), "each window on one rank"
    assert loss == pytest.approx(np.mean(nats), rel=1e-6)
    assert bpb == pytest.approx(np.sum(nats) / np.log(2) / in_bytes, rel=1e-6)


def test_windows_that_do_not_overlap_are_the_plain_rows(run_of: Run) -> None:
    run = run_of(("sliding_window",), EVAL_STRIDE=32)
    run.train()
    plain = run.evaluate(tg.FINAL)[:2]
    run.validation = run.windows
    assert run.evaluate(tg.FINAL)[:2] == pytest.approx(plain, rel=1e-9)


@pytest.mark.slow
def test_a_run_without_windows_can_be_scored_with_them(run_of: Run) -> None:
    """RESUME with another EVAL_STRIDE, also of what the root has kept."""
    at_once = finish(run_of(("sliding_window",), EVAL_STRIDE=8))
    for names in ((), ("sliding_window",)):
        finish(run_of(names, CHECKPOINT_EVERY=6))
        run = run_of(("sliding_window",), EVAL_STRIDE=8, RESUME="checkpoints/r/step_00000006.pt")
        module = sys.modules[type(run).__module__]
        module.resume(run, module.find_checkpoint(run.config))
        assert finish(run).score == at_once.score


def test_windows_that_would_leave_targets_out_are_refused(run_of: Run) -> None:
    with pytest.raises(Exception, match="EVAL_STRIDE=12: set a divisor of TRAIN_SEQ_LEN=32"):
        run_of(("sliding_window",), EVAL_STRIDE=12)


def test_int6_has_31_levels_and_keeps_small_rows(run_of: Run) -> None:
    """Read from the file; with the root's floor rows of small weights had few levels left."""
    run = run_of(("int6",), INT6_NAMES=".mlp.", MODEL_DIM=64)
    module = sys.modules[type(run).__module__]
    with torch.no_grad():
        for block in run.model.blocks:
            block.mlp.fc.weight.mul_(0.1)
    state = run.model.state_dict()
    packed = module.pack(state, run.config)
    file = torch.load(io.BytesIO(zlib.decompress(packed.data)))
    most = {name: int(q.abs().max()) for name, q in file["quantized"].items()}
    assert {n: m for n, m in most.items() if ".fc." in n} == dict.fromkeys(
        [f"blocks.{i}.mlp.fc.weight" for i in range(3)], 31
    )
    assert most["tok_emb.weight"] < 31, "the root's floor, on purpose"
    unpacked = module.unpack(packed.data, state)
    weight = state["blocks.0.mlp.fc.weight"]
    error = (unpacked["blocks.0.mlp.fc.weight"] - weight).norm() / weight.norm()
    assert error < 0.03
    scales = file["scales"]["blocks.0.mlp.fc.weight"].float()
    largest = weight.abs().amax(1)
    torch.testing.assert_close(scales, largest / 31, rtol=2e-3, atol=0)
    assert "13 int8, 0 float16, 13 float32, 6 int6, mean error" in packed.stored
    misspelt = module.pack(state, tg.replace(run.config, int6_names=".mpl."))
    assert "WARNING: INT6_NAMES=.mpl.: no tensor" in misspelt.stored


def test_lzma_compresses_and_reads_both(run_of: Run) -> None:
    run = run_of(("lzma",), ARTIFACT_CODEC="lzma")
    module = sys.modules[type(run).__module__]
    state = run.model.state_dict()
    small = module.pack(state, run.config)
    plain = tg.pack(state, run_of().config)
    assert lzma.decompress(small.data) == zlib.decompress(plain.data)
    assert small.stored == plain.stored + ", compressed by lzma"
    for data in (small.data, plain.data):
        assert all(
            map(
                torch.equal,
                *(d.values() for d in (module.unpack(data, state), tg.unpack(plain.data, state))),
            )
        )
    for bad in (small.data[:-200], b"no artifact"):
        with pytest.raises(module.RunError, match="no artifact of this model"):
            module.unpack(bad, state)


MODELS = ["bigram_hash", "smear_gate", "partial_rope", "xsa", "leaky_relu2", "depth_recurrence"]


def stirred(run: Any) -> Any:
    """The run's model with random weights, so that every part of it has an effect."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(0.3 * torch.randn(p.shape))
    return run.model


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(4, 260, shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", MODELS)
def test_no_position_sees_a_later_one(name: str, run_of: Run) -> None:
    model = stirred(run_of((name,), **on(name)))
    tokens = tokens_of(2, 32)
    changed = tokens.clone()
    changed[:, 20] = (tokens[:, 20] - 3) % 256 + 4
    with torch.no_grad():
        before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 20:], after[:, 20:]).all(-1).any(-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_compiles_as_one_graph(name: str, run_of: Run) -> None:
    """In bfloat16, as on a GPU: no part falls back to float32."""
    run = run_of((name,), **on(name))
    module = sys.modules[type(run).__module__]
    model = stirred(SimpleNamespace(model=module.GPT(run.config, torch.bfloat16)))
    tokens = tokens_of(2, 32)
    seen = [inputs_of(block.mlp) for block in model.blocks]
    with torch.no_grad():
        eager = model(tokens, tokens)
        assert {x.dtype for block in seen for x, _ in block} == {torch.bfloat16}
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(tokens, tokens), eager)


def inputs_of(module: torch.nn.Module) -> list[Any]:
    """The inputs of a module's calls, as they come."""
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    return seen


def test_bigram_hash_looks_up_each_pair(run_of: Run) -> None:
    model = stirred(run_of(("bigram_hash",), **on("bigram_hash")))
    rows, embedded = inputs_of(model.bigram), inputs_of(model.blocks[0])
    tokens = tokens_of(2, 32)
    with torch.no_grad():
        model.logits(tokens)
        wanted = torch.empty(2, 32, 32)
        for b, t in itertools.product(range(2), range(32)):
            pair = 96
            if t:
                pair = (36313 * int(tokens[b, t]) ^ 27191 * int(tokens[b, t - 1])) % 96
            assert rows[0][0][b, t] == pair
            hashed = model.bigram_proj.weight @ model.bigram.weight[pair] * model.bigram_scale
            wanted[b, t] = tg.rms_norm(model.tok_emb.weight[tokens[b, t]] + hashed)
    torch.testing.assert_close(embedded[0][0], wanted, rtol=1e-4, atol=1e-5)


def test_smear_gate_mixes_neighbours_of_a_document(run_of: Run) -> None:
    model = stirred(run_of(("smear_gate",), SMEAR_GATE=1))
    embedded = inputs_of(model.blocks[0])
    tokens = tokens_of(2, 32)
    tokens[0, 7] = 1
    with torch.no_grad():
        model.logits(tokens)
        plain = tg.rms_norm(model.tok_emb.weight[tokens])
        gate = 1 / (1 + (-model.smear).exp())
        for b, t in itertools.product(range(2), range(32)):
            before = plain[b, t - 1] if t else torch.zeros(32)
            wanted = (1 - gate) * plain[b, t] + gate * before
            wanted = plain[0, 7] if (b, t) == (0, 7) else wanted
            torch.testing.assert_close(embedded[0][0][b, t], wanted, rtol=1e-5, atol=1e-6)
    assert embedded[0][0] is embedded[0][1], "x0 is mixed, too"


def test_partial_rope_rotates_the_first_channels_alone(run_of: Run) -> None:
    run = run_of(("partial_rope",), ROPE_DIMS=4)
    module = sys.modules[type(run).__module__]
    x = torch.randn(1, 32, 2, 16, generator=torch.Generator().manual_seed(1))
    rotated = module.rotate(x, run.model.cos, run.model.sin)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    for t, pair in itertools.product(range(32), range(2)):
        angle = torch.tensor(t * 10_000.0 ** (-2 * pair / 4))
        left, right = x[0, t, :, pair], x[0, t, :, pair + 2]
        wanted = left * angle.cos() + right * angle.sin()
        torch.testing.assert_close(rotated[0, t, :, pair], wanted, rtol=1e-4, atol=1e-5)
        wanted = right * angle.cos() - left * angle.sin()
        torch.testing.assert_close(rotated[0, t, :, pair + 2], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims", [3, 18])
def test_rope_dims_that_do_not_fit_are_refused(dims: int, run_of: Run) -> None:
    with pytest.raises(Exception, match=f"ROPE_DIMS={dims}: set an even number up to 16"):
        run_of(("partial_rope",), ROPE_DIMS=dims)


def test_xsa_leaves_nothing_of_the_own_value(run_of: Run) -> None:
    run = run_of(("xsa",), XSA_LAST_N=2, NUM_HEADS=4, NUM_KV_HEADS=2)
    model = stirred(run)
    assert [block.attn.xsa for block in model.blocks] == [False, True, True]
    heads = [inputs_of(block.attn.proj) for block in model.blocks]
    values = [inputs_of(block.attn.c_v) for block in model.blocks]
    with torch.no_grad():
        model.logits(tokens_of(1, 32))
        for layer, block in enumerate(model.blocks):
            y = heads[layer][0][0].unflatten(-1, (4, 8))
            v = block.attn.c_v(values[layer][0][0]).unflatten(-1, (2, 8))
            along = torch.stack([(y[..., h, :] * v[..., h // 2, :]).sum(-1) for h in range(4)])
            assert (along.abs().max() < 1e-4) == (layer > 0)
    wide = run_of(("xsa",), XSA_LAST_N=99).model
    assert all(block.attn.xsa for block in wide.blocks)


def test_xsa_takes_away_the_part_along_the_value_and_no_more(script: Callable) -> None:
    random = torch.Generator().manual_seed(1)
    y, v = (torch.randn(1, 5, heads, 8, generator=random) for heads in (4, 2))
    less = script("xsa").without_own_value(y, v)
    for t, head in itertools.product(range(5), range(4)):
        one, own = y[0, t, head], v[0, t, head // 2]
        torch.testing.assert_close(less[0, t, head], one - (one @ own) / (own @ own) * own)


def test_leaky_relu2_squares_a_share_of_what_is_negative(run_of: Run) -> None:
    mlp = stirred(run_of(("leaky_relu2",), LEAKY_SLOPE=0.5)).blocks[0].mlp
    squared = inputs_of(mlp.proj)
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mlp(x, torch.ones(32))
        inner = x @ mlp.fc.weight.T
    wanted = torch.where(inner > 0, inner**2, 0.25 * inner**2)
    torch.testing.assert_close(squared[0][0], wanted)


def test_depth_recurrence_runs_blocks_in_the_order_given(run_of: Run) -> None:
    run = run_of(("depth_recurrence",), BLOCK_ORDER="0,1,2,1,2")
    order = []
    for number, block in enumerate(run.model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: order.append(number))
    run.model.logits(tokens_of(1, 32))
    assert order == [0, 1, 2, 1, 2] and run.model.skip_weights.shape == (2, 32)
    five = run_of((), NUM_LAYERS=5)
    assert run.model.flops_per_token(run.config) == five.model.flops_per_token(five.config)
    for wrong in ("0,1", "0,1,2,3", "0,1,2,x", "0,1,-1"):
        with pytest.raises(Exception, match=f"BLOCK_ORDER={wrong}: name each block, as in 0,1,1,2"):
            run_of(("depth_recurrence",), BLOCK_ORDER=wrong)


def test_longer_rows_double_in_equal_parts_and_are_those_of_the_shards(
    run_of: Run, data: SimpleNamespace
) -> None:
    settings = {"SHORT_ROW_LEN": 8, "SHORT_ROW_SHARE": 0.6, "ITERATIONS": 10, "WARMUP_STEPS": 3}
    run = run_of(("longer_rows",), **settings)
    seen = []
    run.model.register_forward_pre_hook(lambda _, inputs: seen.append([t.clone() for t in inputs]))
    run.train()
    shapes = [tuple(x.shape) for x, _ in seen[: 4 * 13 : 4]]  # 4 micro-steps
    assert shapes[:3] == [(64, 8), (32, 16), (16, 32)], "each length is primed"
    assert shapes[3:] == 3 * [(64, 8)] + 3 * [(32, 16)] + 4 * [(16, 32)]
    x, y = seen[12]  # the first micro-step that counts: two spans of 257 tokens
    for half in range(2):
        span = torch.from_numpy(data.train[257 * half : 257 * half + 257].astype(np.int64))
        assert torch.equal(x[32 * half : 32 * half + 32].flatten(), span[:-1])
        assert torch.equal(y[32 * half : 32 * half + 32].flatten(), span[1:])
    with pytest.raises(Exception, match="SHORT_ROW_LEN=12: set 0, or 32 halved up to 6 times"):
        run_of(("longer_rows",), SHORT_ROW_LEN=12).train()
    with pytest.raises(Exception, match="SHORT_ROW_LEN=1: set 0, or 128 halved up to 6 times"):
        run_of(("longer_rows",), SHORT_ROW_LEN=1, TRAIN_SEQ_LEN=128).train()


def batches_of(run: Any, steps: int, first: int = 0) -> list[torch.Tensor]:
    """The rows (x and the last y) of the next steps' batches of one rank."""
    run.step = first
    rows = []
    with tg.closing(run.batches()) as batches:
        for batch in itertools.islice(batches, steps * run.runtime.micro_steps):
            rows.append(torch.cat((batch.x, batch.y[:, -1:]), dim=1))
    return rows


def test_shuffled_order_takes_every_span_once_an_epoch(run_of: Run, data: SimpleNamespace) -> None:
    run = run_of(("shuffled_order",), SHUFFLE_SPANS=1)
    spans = len(data.train) // 257  # of 256 targets
    steps = 2 * spans // 8 - 1
    rows = torch.cat(batches_of(run, steps)).unflatten(0, (-1, 8))  # (spans, rows, tokens)
    drawn = torch.cat((rows[:, :, :-1].flatten(1), rows[:, -1, -1:]), dim=1).tolist()
    plain = data.train[: 257 * spans].reshape(-1, 257).tolist()
    assert sorted(drawn[:spans]) == sorted(plain) and drawn[:spans] != plain
    second = drawn[spans:]
    assert all(span in plain for span in second) and second != drawn[: len(second)]
    other = run_of(("shuffled_order",), SHUFFLE_SPANS=1, SEED=2)
    assert not torch.equal(batches_of(other, 1)[0], batches_of(run, 1)[0])
    later = batches_of(run, 2, first=30)  # RESUME begins there
    assert torch.equal(torch.cat(later), rows.flatten(0, 1)[30 * 64 : 32 * 64])


def test_document_rows_begin_documents(run_of: Run, data: SimpleNamespace) -> None:
    run = run_of(("document_rows",), ROW_START_TOKEN=1)
    starts = []
    at = 0
    while at + 32 < len(data.train):
        if data.train[at] == 1:
            starts.append(at)
            at += 32
        else:
            at += 1
    assert run.shards.starts.tolist() == starts
    steps = len(starts) // 64 + 2  # into the next epoch
    rows = torch.cat(batches_of(run, steps)).numpy()
    for number, row in enumerate(rows):
        start = starts[number % len(starts)]
        assert row[0] == 1 and row.tolist() == data.train[start : start + 33].tolist()
    run.step = len(starts) // 64  # the step whose rows are of two epochs
    sys.modules[type(run).__module__].warn_of_new_epoch(run)
    assert run.log.lines == [f"WARNING: step {run.step + 1} begins the shards anew"]
    with pytest.raises(Exception, match="ROW_START_TOKEN=3: no row begins with it"):
        run_of(("document_rows",), ROW_START_TOKEN=3)


@pytest.mark.parametrize("name", ["shuffled_order", "document_rows"])
def test_off_a_set_may_be_without_a_shard_yet(
    name: str, run_of: Run, data: SimpleNamespace, tmp_path: Path
) -> None:
    write_split(tmp_path, "val", data.val, [])
    (tmp_path / ".producing").write_text('{"progress": 1, "val_complete": true}', encoding="utf-8")
    run = run_of((name,), DATA_PATH=tmp_path)
    module = sys.modules[type(run).__module__]
    module.log_input(run, SimpleNamespace(waits_ms=[], bytes_read=0), 0.0)  # as of no step
    assert run.log.events[-1]["epochs"] == 0


@pytest.mark.parametrize("name", ["shuffled_order", "document_rows"])
def test_an_order_of_complete_shards_needs_them(
    name: str, run_of: Run, data: SimpleNamespace
) -> None:
    run = run_of((name,), **on(name))
    module = sys.modules[type(run).__module__]
    state = module.snapshot(run)
    state["shards"].pop()
    with pytest.raises(module.RunError, match="the order of data is another"):
        module.find_changes(run.config, "file", state)
    producing = data.folder / ".producing"
    producing.write_text('{"progress": 1}', encoding="utf-8")
    try:
        with pytest.raises(module.RunError, match="is being made: wait for it or set 0"):
            module.open_shards(run.config, "train")
    finally:
        producing.unlink()


# --- records/recipe.py ------------------------------------------------------------------------


@pytest.fixture
def own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes that a test may fill."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.setattr(recipe, "FOLDER", folder)
    monkeypatch.setattr(recipe, "TRAINER", tmp_path / "root.py")
    (tmp_path / "root.py").write_text(recipe_root(), encoding="utf-8")
    return folder


def recipe_root() -> str:
    return (ROOT / "train_gpt.py").read_text(encoding="utf-8")


SOFTCAP = "return (self.softcap * torch.tanh(logits / self.softcap)).float()"
HEADER = "# It does this.\n# source: none\n# effect: none\n"


def make_recipe(folder: Path, name: str, old: str, new: str) -> None:
    text = recipe_root()
    assert text.count(old) == 1
    diff = recipe.difference(text, text.replace(old, new))
    (folder / f"{name}.diff").write_text(HEADER + diff, encoding="utf-8")


def test_a_pager_that_has_seen_enough_is_no_fault() -> None:
    command = [sys.executable, recipe.__file__, "list"]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    tool.stdout.close()  # before it prints
    assert tool.stderr.read() == "" and tool.wait() != 1


def test_what_cannot_be_merged_is_shown_with_both_sides(call: Call, own_recipes: Path) -> None:
    make_recipe(own_recipes, "one", SOFTCAP, "return logits.float()")
    make_recipe(own_recipes, "two", SOFTCAP, "return (2 * logits).float()")
    code, out, err = call(recipe.main, "apply", "one", "two", "--to", "x.py")
    assert code == 1 and out == "" and not Path("x.py").exists()
    assert err.startswith("error: one and two change the same lines:")
    sides = ("one", "return logits.float()"), ("train_gpt.py", SOFTCAP), ("two", "2 * logits")
    for name, line in sides:
        assert f"--- {name}\n" in err and line in err
    assert err.endswith("\nThey do not combine: leave one out\n")
    code, out, err = call(recipe.main, "check", "--pairs")
    assert code == 0 and "not together: one and two" in out


def test_lines_added_at_one_place_stand_in_the_order_named(
    call: Call, own_recipes: Path, tmp_path: Path
) -> None:
    """Also directly before or behind a line that the other changes."""
    line = "        head = self.lm_head or self.tok_emb\n"
    make_recipe(own_recipes, "one", line, line + "        # first\n")
    make_recipe(own_recipes, "two", line, line + "        # second\n")
    make_recipe(own_recipes, "three", line, "        head = self.tok_emb\n")
    assert call(recipe.main, "apply", "two", "three", "one", "--to", tmp_path / "x.py")[0] == 0
    wanted = "        head = self.tok_emb\n        # second\n        # first\n"
    assert wanted in (tmp_path / "x.py").read_text()


def test_new_makes_a_recipe_of_an_edited_copy(
    call: Call, own_recipes: Path, tmp_path: Path
) -> None:
    edited = recipe_root().replace(
        "    logit_softcap: ",
        "    cap_more: Bound[bool] = False  # 0/1; a cap\n    logit_softcap: ",
    )
    (tmp_path / "mine.py").write_text(edited, encoding="utf-8")
    assert call(recipe.main, "new", "caps", "--from", tmp_path / "mine.py")[0] == 0
    made = recipe.load("caps")
    assert made.settings == {"CAP_MORE": ("0", "TODO")} and made.lines == "+1 -0"
    code, out, err = call(recipe.main, "check")
    assert code == 1 and "caps: its header has a TODO" in err
    assert call(recipe.main, "apply", "caps", "--to", tmp_path / "x.py")[0] == 0
    first, rest = (tmp_path / "x.py").read_text().split("\n", 1)
    assert rest == edited and first == recipe.MADE_BY + "caps"
    # What was applied can be edited, and made a recipe again.
    code, out, err = call(recipe.main, "new", "again", "--from", tmp_path / "x.py")
    assert code == 0 and recipe.load("again").diff == made.diff


def test_recipes_follow_the_root(call: Call, own_recipes: Path, tmp_path: Path) -> None:
    make_recipe(own_recipes, "one", SOFTCAP, "return logits.float()")
    old = recipe_root()
    (tmp_path / "old.py").write_text(old)
    near = old[: old.index(SOFTCAP)].splitlines(keepends=True)[-2]  # the line before
    recipe.TRAINER.write_text("# a line\n" + old.replace(near, "        # new\n" + near))
    code, out, err = call(recipe.main, "check")
    assert code == 1 and "one does not apply" in err and "update --from OLD_TRAIN_GPT.py" in err
    code, out, err = call(recipe.main, "apply", "one", "--to", tmp_path / "x.py")
    assert code == 1 and err.startswith("error: one does not apply: train_gpt.py has other lines n")
    assert "git checkout train_gpt.py" in err and err.count("\n") == 1
    assert call(recipe.main, "update", "--from", tmp_path / "old.py")[0] == 0
    assert recipe.load("one").header == HEADER
    assert call(recipe.main, "check")[:2] == (0, "1 of 1 recipes apply to train_gpt.py\n")
    # A root that has changed the same line: said, and the recipe stays.
    before = recipe.load("one")
    (tmp_path / "old.py").write_text(recipe.TRAINER.read_text())
    recipe.TRAINER.write_text(recipe.TRAINER.read_text().replace(SOFTCAP, "return logits"))
    code, out, err = call(recipe.main, "update", "--from", tmp_path / "old.py")
    assert code == 1 and "change the same lines" in err and recipe.load("one") == before


@pytest.mark.slow
def test_set_makes_values_the_defaults(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    apply = "apply", "ema", "lzma", "--to", file, "--set"
    code, out, err = call(recipe.main, *apply, "EMA_DECAY=1.5")
    assert code == 1 and "EMA_DECAY=1.5: set a number >= 0, < 1" in err and not file.exists()
    code, out, err = call(recipe.main, *apply, "EMA_DECYA=0.5")
    assert code == 1 and "did you mean EMA_DECAY?" in err
    code, out, err = call(recipe.main, *apply, "EMA_DECAY=0.5", "RUN_ID=a-b", "TIE_EMBEDDINGS=0")
    assert code == 0 and "lzma is off until it is set: ARTIFACT_CODEC=lzma" in out
    assert "ema is off" not in out
    code, out, err = call(recipe.main, *apply, "EMA_DECAY=0.5")
    assert code == 1 and "x.py exists, and stays as it is: name another" in err
    text = file.read_text()
    assert "ema_decay: Bound[Fraction] = 0.5  # share;" in text and 'run_id: str = "a-b"  #' in text
    assert "tie_embeddings: Bound[bool] = False  #" in text


def test_refusals_are_one_line(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.py"
    code, out, err = call(recipe.main, "apply", "emma", "--to", file)
    assert code == 1 and "emma: no such recipe" in err and "did you mean ema? `recipe.py" in err
    (tmp_path / "foreign.py").write_text("import torch\n")
    for command, words in {
        f"apply EMA,int6 --to {file}": "EMA,int6: no such recipe in records: write ema int6",
        f"apply swa --to {file}": "swa: no such recipe in records: there are add_compiled, ",
        f"apply ema --to {file} --set EMA=0.9": "these recipes add EMA_DECAY; --help",
        f"apply ema ema --to {file}": "a recipe is named twice",
        f"apply --to {file} --set A=1 ema": "no recipe is named: write the names in front",
        f"apply ema --to {file} --set MUON_WD=1": "it is of the recipe muon_weight_decay: name",
        f"apply lzma --to {tmp_path / 'lzma.py'}": "lzma is the name of a module",
        f"apply ema --to {tmp_path / 'foreign.py'}": "exists, and stays as it is",
        f"apply ema --to {tmp_path / 'no' / 'x.py'}": f"run mkdir -p {tmp_path / 'no'}",
        f"new foreign --from {tmp_path / 'foreign.py'}": "no edited copy of train_gpt.py",
        f"update --from {tmp_path / 'foreign.py'}": "no earlier train_gpt.py: git show",
    }.items():
        code, out, err = call(recipe.main, *command.split())
        assert (code, out) == (1, "") and words in err.replace(str(recipe.FOLDER), "records")
        assert err.count("\n") == 1 and not file.exists()
    assert call(recipe.main, "apply", "ema")[0] == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe.patched.cache_clear()
    code, out, err = call(recipe.main, "apply", "ema", "--to", file)
    assert code == 1 and err == (
        "error: git is missing, which applies and merges recipes: install git\n"
    )


def test_it_works_inside_another_repository(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There `git apply` would pass over files that the repository does not know, silently."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "sub").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "sub"))
    assert call(recipe.main, "apply", "ema", "--to", tmp_path / "x.py")[0] == 0
    assert "ema_decay" in (tmp_path / "x.py").read_text()


@pytest.mark.slow
def test_the_readme_has_todays_table_and_the_pairs_that_exclude_each_other(call: Call) -> None:
    code, out, err = call(recipe.main, "check", "--pairs")
    pairs = [line.split(" change ")[0] for line in out.splitlines()[1:]]
    assert code == 0 and "not together: document_rows and shuffled_order" in pairs
    readme = (ROOT / "records" / "recipes" / "README.md").read_text(encoding="utf-8")
    for pair in pairs:
        assert re.sub(r".*: (\w+) and (\w+)", r"`\1` and `\2`", pair) in readme
    assert call(recipe.main, "table")[1] in readme
    listed = call(recipe.main, "list")[1]
    assert all(
        re.search(rf"^{name} +\+\d+ -\d+  \w", listed, re.MULTILINE) for name in recipe.names()
    )


# --- From recipes to a record -----------------------------------------------------------------


@pytest.mark.slow
def test_the_first_stack_becomes_a_record_that_is_accepted(
    data: SimpleNamespace, tmp_path: Path
) -> None:
    """Applied, packed, trained and packaged as users do; check.py accepts the folder."""
    x = tmp_path / "x.py"
    on_values = {n: str(value) for name in STACKS["first"] for n, value in on(name).items()}
    words = [f"{name}={value}" for name, value in on_values.items()]
    names = STACKS["first"]
    assert recipe.main(["apply", *names, "--to", str(x), "--set", *words]) == 0
    tool = [sys.executable, str(ROOT / "records" / "package.py")]
    subprocess.run([*tool, "--pack", str(x)], cwd=tmp_path, check=True, capture_output=True)
    settings = {**SETTINGS, **data.env, "VAL_TOKENS": 0, "MODEL_DIM": 64, "RUN_ID": "x1"}
    run = run_trainer(tmp_path, script=tmp_path / "x_packed.py", **settings)
    assert run.code == 0, run.err
    assert "final score: sliding windows, eval_stride:8" in run.text
    assert "compressed by lzma" in run.text
    command = [*tool, "logs/x1.txt", "--track", "track_non_record_16mb", "--name", "First Stack"]
    command += ["--author", "Ada", "--github-id", "ada", "--description", "A stack of recipes."]
    command += ["--date", "2026-11-22", "--records", str(tmp_path / "records")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "records" / "track_non_record_16mb" / "2026-11-22_FirstStack"
    readme = (folder / "README.md").read_text()
    (folder / "README.md").write_text(readme.replace("TODO", "Five recipes."))
    check = [sys.executable, str(ROOT / "records" / "check.py"), str(folder)]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "refused" not in done.stdout, done.stdout
