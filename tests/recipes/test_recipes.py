"""Tests of every recipe and stack.

Each one applies, gives the results of train_gpt.py while it is off, and is right when it is on.
What must hold for every recipe (resume, ranks, warm-up, score, no look-ahead) is checked by
tools/verify.py. What a single recipe does is compared with a plain reference.
"""

import io
import itertools
import lzma
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recipe
import torch
import verify
from running import ROOT
from running import train_gpt as tg
from tiny import (
    MODEL_RECIPES,
    SETTINGS,
    attend_by_mask,
    find_faults,
    randomize_weights,
    read_artifact,
    script_module,
    settings_for,
    train_and_export,
)

Run = Callable[..., Any]
COMPILED = {"add_compiled", "coordinate_descent", "max_autotune"}  # these have no effect on a CPU
# Recipes that change how a model is stored or scored; brotli and gptq are tested in stacks.
STORED = {"brotli", "gptq", "score_first_ttt", "byte_sidecar"}
ALONE = [name for name in recipe.list_names() if name not in COMPILED | STORED]
APRIL = [
    "orthogonal_init", *MODEL_RECIPES, "muon_row_norm", "muon_weight_decay", "adam_weight_decay",
    "warmdown_share", "ema", "shuffled_order", "sliding_window", "polar_express", "attn_gate",
    "two_lanes", "smear_gate",
]  # fmt: skip
STACKS = sorted(path.stem for path in recipe.STACKS.glob("*.json"))
STORE = ["gptq", "brotli", "score_first_ttt", "ema", "sliding_window", "muon_weight_decay", "xsa"]


@pytest.mark.parametrize("name", recipe.list_names())
def test_recipe_applies_and_its_header_is_complete(name: str, script: Callable) -> None:
    one = recipe.load_recipe(name)
    assert one.field("source") and one.field("effect") and recipe.TODO not in one.header
    assert {*one.not_with} <= {*recipe.list_names()}
    module = script(name)
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", f"--config={ROOT}/.ruff.toml"]
        done = subprocess.run([*ruff, module.__file__], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    added = {field.upper() for field in module.Config.__annotations__} - set(tg.SETTINGS)
    assert added == set(one.settings)
    defaults = {name.upper(): value for name, value in vars(module.Config()).items()}
    for setting, (default, value) in one.settings.items():
        kind = module.SETTINGS[setting]
        assert (module.parse_setting(kind, default) if default else default) == defaults[setting]
        assert module.read_config([f"{setting}={value}"], {})[2] == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([name] for name in recipe.list_names()), STORE], ids=" ".join)
def test_a_recipe_that_is_off_changes_no_digit(names: list[str], make_run: Run) -> None:
    ends = []
    for recipes in names, ():
        run = make_run(tuple(recipes), WARMDOWN_ITERS=2, WARMUP_STEPS=2)
        ends.append((train_and_export(run), read_artifact()))
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.timeout(1500)  # test-time training is tried with every value of the last token
@pytest.mark.parametrize(
    "names", [*([name] for name in ALONE), APRIL, ["documents", *MODEL_RECIPES]], ids=" ".join
)
def test_verify_finds_no_fault_in_recipes_that_are_on(names: list[str], script: Callable) -> None:
    """verify.py also runs on two ranks, and resumes from steps before and after loops begin."""
    differs = not {"sliding_window", "document_ttt", "global_sgd"}.isdisjoint(names)
    settings = settings_for(*names, layers=3)
    options = {"score_differs": differs}
    assert find_faults(script(*names), settings, **options) == []


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_applies(name: str, tmp_path: Path) -> None:
    assert recipe.main(["apply", "--stack", name, "--to", str(tmp_path / "x.py")]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)  # test-time training is tried with every value of the last token
@pytest.mark.parametrize("name", STACKS)
def test_verify_finds_no_fault_in_a_stack(name: str, tmp_path: Path) -> None:
    """All settings of the stack are defaults of the script."""
    script = tmp_path / "frontier.py"
    assert recipe.main(["apply", "--stack", name, "--to", str(script)]) == 0
    tiny = dict(pair.split("=") for pair in recipe.load_stack(name)["verify"].split())
    found = list(verify.verdicts(script, tiny, score_differs=True))
    assert [row for row in found if row[1] == "FAULT"] == []
    assert {"resume", "ranks", "replicas", "sum"} <= {row[0] for row in found}


def test_ema_is_the_average_of_the_weights_after_each_step(
    make_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(("ema",), EMA_DECAY=0.8, VAL_LOSS_EVERY=3)
    names = [name for name, _ in run.model.named_parameters()]
    after = [[p.detach().double().clone() for p in run.model.parameters()]]
    step = type(run).train_step

    def step_and_record(run: Any, batches: Any) -> None:
        step(run, batches)
        after.append([p.detach().double().clone() for p in run.model.parameters()])

    monkeypatch.setattr(type(run), "train_step", step_and_record)
    train_and_export(run)
    wanted = after[0]
    for weights in after[1:]:
        wanted = [0.8 * mean + 0.2 * p for mean, p in zip(wanted, weights, strict=True)]
    exported = torch.load("final_model.pt")
    for name, mean, p in zip(names, wanted, after[-1], strict=True):
        torch.testing.assert_close(exported[name].double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(run.model.get_parameter(name).double(), p), (
            "the model itself keeps the last weights"
        )


REJECTED = (ROOT / "tests/recipes/rejected.txt").read_text("utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", REJECTED)
def test_rejects_settings_that_do_not_fit(
    row: str, make_run: Run, script: Callable, data: SimpleNamespace
) -> None:
    """The error is one line that says what to do."""
    (name, *settings), words = row.split("|")[0].split(), row.split("|")[1].strip()
    module = script() if name == "root" else script(name)
    given = dict(each.split("=") for each in settings)
    env = {"WORLD_SIZE": "1"} | SETTINGS | data.env | given
    env = {key: str(value) for key, value in env.items()}
    config, _, found, _ = module.read_config([], env)
    found = found or module.check_settings(config, env)[0]
    if found:
        assert len(found) == 1 and words in found[0] and "\n" not in found[0]
    else:
        with pytest.raises(Exception, match=words):
            make_run((name,), **given).train()


def test_int6_has_31_levels_and_keeps_small_rows(make_run: Run) -> None:
    """With the minimum of train_gpt.py's scales, rows of small weights would use few levels."""
    run = make_run(("int6",), INT6_NAMES=".mlp.", MODEL_DIM=64)
    module = script_module(run)
    with torch.no_grad():
        for block in run.model.blocks:
            block.mlp.fc.weight.mul_(0.1)
    state = run.model.state_dict()
    data = module.pack(state, run.config)[0]
    file = torch.load(io.BytesIO(zlib.decompress(data)))
    most = {name: int(q.abs().max()) for name, q in file["quantized"].items()}
    assert [m for name, m in most.items() if ".fc." in name] == [31, 31, 31]
    assert most["tok_emb.weight"] < 31, "other tensors keep the minimum scale of train_gpt.py"
    unpacked = module.unpack(data, state)
    weight = state["blocks.0.mlp.fc.weight"]
    error = (unpacked["blocks.0.mlp.fc.weight"] - weight).norm() / weight.norm()
    assert error < 0.03
    scales = file["scales"]["blocks.0.mlp.fc.weight"].float()
    largest = weight.abs().amax(1)
    torch.testing.assert_close(scales, largest / 31, rtol=2e-3, atol=0)


def test_lzma_compresses_and_reads_lzma_and_zlib(make_run: Run) -> None:
    run = make_run(("lzma",), ARTIFACT_CODEC="lzma")
    module = script_module(run)
    state = run.model.state_dict()
    small = module.pack(state, run.config)[0]
    plain = tg.pack(state, make_run().config)[0]
    assert lzma.decompress(small) == zlib.decompress(plain)
    for data in (small, plain):
        both = module.unpack(data, state), tg.unpack(plain, state)
        assert all(map(torch.equal, *(weights.values() for weights in both)))


MODELS = ["bigram_hash", "smear_gate", "partial_rope", "xsa", "leaky_relu2"]
MODELS += ["attn_gate", "two_lanes", "documents"]


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(4, 260, shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_model_compiles_as_one_graph(
    name: str, make_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as on a GPU. A mask replaces the attention kernel of `documents`."""
    run = make_run((name,), **settings_for(name, layers=3))
    module = script_module(run)
    monkeypatch.setattr(module, "attend_one_by_one", attend_by_mask, raising=False)
    model = randomize_weights(SimpleNamespace(model=module.GPT(run.config, torch.bfloat16)))
    tokens = random_tokens(2, 32)
    with torch.no_grad():
        eager = model(tokens, tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(tokens, tokens), eager)


def test_longer_rows_double_at_equal_intervals_and_equal_the_shards(
    make_run: Run, data: SimpleNamespace
) -> None:
    settings = {"SHORT_ROW_LEN": 8, "SHORT_ROW_SHARE": 0.6, "ITERATIONS": 10, "WARMUP_STEPS": 3}
    run = make_run(("longer_rows",), **settings)
    seen = []
    run.model.register_forward_pre_hook(lambda _, inputs: seen.append([t.clone() for t in inputs]))
    run.train()
    shapes = [tuple(x.shape) for x, _ in seen[: 4 * 13 : 4]]  # 4 micro-steps
    assert shapes[:3] == [(64, 8), (32, 16), (16, 32)], "the warm-up steps run every length"
    assert shapes[3:] == 3 * [(64, 8)] + 3 * [(32, 16)] + 4 * [(16, 32)]
    x, y = seen[12]  # the first micro-step after the warm-up: two spans of 257 tokens
    for half in range(2):
        span = torch.from_numpy(data.train[257 * half : 257 * half + 257].astype(np.int64))
        assert torch.equal(x[32 * half : 32 * half + 32].flatten(), span[:-1])
        assert torch.equal(y[32 * half : 32 * half + 32].flatten(), span[1:])


def read_rows(run: Any, steps: int) -> list[torch.Tensor]:
    """Return the sequences (x and the last y) of one rank's batches in the next steps."""
    rows = []
    with tg.closing(run.batches()) as batches:
        for batch in itertools.islice(batches, steps * run.runtime.micro_steps):
            rows.append(torch.cat((batch.x, batch.y[:, -1:]), dim=1))
    return rows


def test_shuffled_order_reads_every_span_once_per_epoch(
    make_run: Run, data: SimpleNamespace
) -> None:
    run = make_run(("shuffled_order",), SHUFFLE_SPANS=1)
    spans = len(data.train) // 257  # of 256 targets
    steps = 2 * spans // 8 - 1
    rows = torch.cat(read_rows(run, steps)).unflatten(0, (-1, 8))  # (spans, rows, tokens)
    drawn = torch.cat((rows[:, :, :-1].flatten(1), rows[:, -1, -1:]), dim=1).tolist()
    plain = data.train[: 257 * spans].reshape(-1, 257).tolist()
    assert sorted(drawn[:spans]) == sorted(plain) and drawn[:spans] != plain
    second = drawn[spans:]
    assert all(span in plain for span in second) and second != drawn[: len(second)]
    other = make_run(("shuffled_order",), SHUFFLE_SPANS=1, SEED=2)
    assert not torch.equal(read_rows(other, 1)[0], read_rows(run, 1)[0])


def test_document_rows_begin_documents(make_run: Run, data: SimpleNamespace) -> None:
    run = make_run(("document_rows",), ROW_START_TOKEN=1)
    starts, at = [], 0
    while at + 32 < len(data.train):
        found = data.train[at] == 1
        starts += [at] if found else []
        at += 32 if found else 1
    assert run.shards.starts.tolist() == starts
    steps = len(starts) // 64 + 2  # into the next epoch
    rows = torch.cat(read_rows(run, steps)).numpy()
    for number, row in enumerate(rows):
        start = starts[number % len(starts)]
        assert row[0] == 1 and row.tolist() == data.train[start : start + 33].tolist()


@pytest.mark.parametrize("name", ["shuffled_order", "document_rows"])
def test_an_order_that_needs_all_shards_refuses_a_growing_data_set(
    name: str, make_run: Run, data: SimpleNamespace
) -> None:
    producing = data.folder / ".producing"
    producing.write_text('{"val_complete": true}', encoding="utf-8")
    try:
        with pytest.raises(Exception, match="is still being made; wait"):
            make_run((name,), **settings_for(name))
    finally:
        producing.unlink()
