"""Proves that what makes a step faster is chosen rightly, leaves the mathematics alone, and is told in the log."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, Corpus, config_of, run_trainer, train_gpt
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

pytestmark = pytest.mark.timeout(120)
CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
SHAPE = dict(TRAIN_SEQ_LEN=24, MODEL_DIM=32, NUM_HEADS=4, NUM_KV_HEADS=2)
KINDS = ("cudnn", "flash", "mem_efficient", "math")
FLAGS = [
    (
        getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
    )
    for name in KINDS
]


@pytest.fixture(autouse=True)
def flags():
    """Whatever a test switches is switched back."""
    before = [enabled() for _, enabled in FLAGS]
    yield
    for (enable, _), value in zip(FLAGS, before):
        enable(value)


def enabled() -> list[str]:
    return [name for name, (_, is_on) in zip(KINDS, FLAGS) if is_on()]


# --- Attention --------------------------------------------------------------------------------------------------------


def test_the_first_backend_that_works_and_agrees_is_taken() -> None:
    assert (
        train_gpt.choose_attention(config_of(**SHAPE), CPU) == "flash"
    )  # no FlashAttention-3, no cuDNN on a CPU
    assert enabled() == ["flash"]


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_backend_that_is_asked_for_is_the_only_one_enabled(backend: str) -> None:
    assert train_gpt.choose_attention(config_of(**SHAPE, ATTENTION_BACKEND=backend), CPU) == backend
    assert enabled() == [backend]


@pytest.mark.parametrize("backend", ["fa3", "cudnn"])
def test_a_backend_that_is_not_there_is_refused_in_one_line(backend: str) -> None:
    with pytest.raises(
        train_gpt.RunError, match=f"ATTENTION_BACKEND={backend} does not work here.*set auto"
    ) as caught:
        train_gpt.choose_attention(config_of(**SHAPE, ATTENTION_BACKEND=backend), CPU)
    assert "\n" not in str(caught.value)


def spoilt(part: str):
    """attend(), wrong where the flash backend runs: in the output, in one gradient alone, or not a number."""
    attend = train_gpt.attend

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if enabled() != ["flash"]:
            return attend(q, k, v)
        if part == "output":
            return 1.03 * attend(q, k, v)
        if part == "nan":
            return attend(q, k, v) * float("nan")
        inputs, (name, *nan) = {"q": q, "k": k, "v": v}, part.split()
        share = float("nan") if nan else 0.9
        inputs[name] = inputs[name].clone()
        inputs[name].register_hook(lambda gradient: share * gradient)
        return attend(**inputs)

    return wrong


@pytest.mark.parametrize("part", ["output", "q", "k", "v", "nan", "v nan"])
def test_a_backend_that_computes_something_else_is_passed_over(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, "attend", spoilt(part))
    assert train_gpt.choose_attention(config_of(**SHAPE), CPU) == "math"
    assert enabled() == ["math"]
    with pytest.raises(train_gpt.RunError, match="or is wrong"):
        train_gpt.choose_attention(config_of(**SHAPE, ATTENTION_BACKEND="flash"), CPU)


def test_flash_attention_3_comes_first_and_leaves_no_trace_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, attend = [], train_gpt.attend
    impls = SimpleNamespace(
        activate_flash_attention_impl=calls.append,
        restore_flash_attention_impl=lambda **_: calls.append("restored"),
    )
    monkeypatch.setattr(torch.nn, "attention", impls)
    assert (
        train_gpt.choose_attention(config_of(**SHAPE), CPU) == "fa3"
        and calls == ["FA3"]
        and enabled() == ["flash"]
    )
    calls.clear()
    monkeypatch.setattr(train_gpt, "attend", lambda *qkv: attend(*qkv) * (1 + (calls == ["FA3"])))
    assert train_gpt.choose_attention(config_of(**SHAPE), CPU) == "flash" and calls == [
        "FA3",
        "restored",
    ]


def test_a_torch_that_knows_no_other_flash_attention_takes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.nn, "attention", SimpleNamespace())  # before torch 2.11
    assert train_gpt.choose_attention(config_of(**SHAPE), CPU) == "flash"


# --- Micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_rows", "world_size", "micro_steps"),
    [
        (1000, 1, 1),
        (64, 1, 2),
        (36, 1, 2),
        (35, 1, 4),
        (17, 1, 8),
        (2, 1, 64),
        (0.1, 1, 64),
        (18, 2, 2),
        (8, 8, 2),
    ],
)
def test_accumulation_follows_the_free_memory(
    free_rows: float, world_size: int, micro_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows a step; the trial of eight rows is said to have taken 8 GB; a tenth stays free."""
    shape = dict(
        TRAIN_SEQ_LEN=8, TRAIN_BATCH_TOKENS=64 * 8, VAL_BATCH_SIZE=64 * 8, DATA_PATH="/nowhere"
    )
    config = config_of(**{**SMALL_MODEL, **shape, "GRAD_ACCUM_STEPS": "auto"})
    runtime = SimpleNamespace(**vars(CPU), cuda=True, world_size=world_size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_rows * 2**30), 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 8 * 2**30)
    assert train_gpt.fitting_accumulation(config, runtime) == micro_steps
    resolved = config_of(**{**SMALL_MODEL, **shape, "GRAD_ACCUM_STEPS": micro_steps})
    assert not any("GRAD_ACCUM" in fault for fault in resolved.problems(world_size))


def test_accumulation_without_a_gpu_is_the_default() -> None:
    config = config_of(GRAD_ACCUM_STEPS="auto")
    assert train_gpt.fitting_accumulation(config, SimpleNamespace(cuda=False)) == "auto"
    assert [config.accumulation(ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert (
        train_gpt.fitting_accumulation(config_of(GRAD_ACCUM_STEPS=3), SimpleNamespace(cuda=True))
        == 3
    )


# --- What a step costs, and what it could -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tied", "expected"), [(1, 130.55e6), (0, 130.55e6)])
def test_operations_a_token_are_those_of_the_matrices_and_the_causal_half(
    tied: int, expected: float
) -> None:
    with torch.device("meta"):
        model = train_gpt.GPT(config_of(TIE_EMBEDDINGS=tied), torch.float32)
    matrices = 9 * (512 * 512 * 2 + 512 * 256 * 2 + 512 * 1024 * 2) + 1024 * 512
    assert model.flops == 6 * (matrices + 9 * 1024 * 512) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce GTX 1080", 0),
        ("x86_64", 0),
    ],
)
def test_the_peak_is_that_of_the_gpu(name: str, tflops: int) -> None:
    fitting = [peak for part, peak in train_gpt.PEAK_TFLOPS.items() if part in name]
    assert fitting[-1:] == [tflops] * bool(tflops)  # the last that fits


def test_step_lines_end_with_the_share_of_the_peak(corpus: Corpus, tmp_path: Path) -> None:
    """With a peak of a millionth of a TFLOP/s, as a CPU has none: the log's own rate has to give the share again."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt\n"
        "train_gpt.PEAK_TFLOPS = {'': 1e-6}\nsys.exit(train_gpt.main())"
    )
    env = {**corpus.env, **SMALL_MODEL, "ITERATIONS": 3, "VAL_LOSS_EVERY": 0, "RUN_ID": "mfu"}
    done = run_trainer(tmp_path, script=script, **env)
    assert done.code == 0, done.err[-2000:]
    flops = train_gpt.GPT(config_of(**env), torch.float32).flops
    found = re.findall(r"train_loss:.* tok_s:(\d+) .* eta:\d+s mfu:([\d.]+)%$", done.text, re.M)
    assert len(found) == 3
    for tokens_a_second, percent in found:
        assert float(percent) == pytest.approx(100 * float(tokens_a_second) * flops / 1e6, rel=1e-3)
    events = map(json.loads, (tmp_path / "logs" / "mfu.jsonl").read_text().splitlines())
    assert [event["mfu_percent"] > 0 for event in events if event["event"] == "step"] == [True] * 3
    assert "`mfu_percent`" in (ROOT / "logs" / "README.md").read_text(encoding="utf-8")


# --- The optimizer's step, compiled -----------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a compiler")
@pytest.mark.timeout(300)
def test_the_compiled_step_is_the_plain_one() -> None:
    """Three steps, the last one halted; schedules change and nothing is compiled again."""
    config, results = config_of(**{**SMALL_MODEL, "NUM_LAYERS": 1}), []
    for compiles in (False, True):
        torch.manual_seed(3)
        optimizers = train_gpt.Optimizers(train_gpt.GPT(config, torch.float32), config, tail=2)
        if compiles:
            torch._dynamo.reset()
            log = SimpleNamespace(line=lambda text: pytest.fail(text))
            names = "update_muon", "update_adam", "cast"
            for name, fast in zip(
                names, train_gpt.compiled(log, *(getattr(optimizers, name) for name in names))
            ):
                setattr(optimizers, name, fast)
        for step, (lr_scale, momentum) in enumerate([(1.0, 0.85), (0.7, 0.9), (0.5, 0.95)]):
            gradients = torch.randn(
                len(optimizers.grads), generator=torch.Generator().manual_seed(step)
            )
            optimizers.grads.copy_(gradients)
            if step == 2:  # what halts a run reaches no state
                optimizers.grads.fill_(float("nan"))
                optimizers.halted.fill_(True)
            optimizers.reduce(train_gpt.Runtime())
            optimizers.step(lr_scale, momentum)
        results.append(optimizers.snapshot())
        optimizers.restore(results[-1])  # as after priming: its cast is the step's
    shapes = len(optimizers.banks)  # a graph each; and one for Adam, one for the cast
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == shapes + 2
    for plain, compiled in zip(*results):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "script",
    [
        "train_gpt.py",
        *(str(path.relative_to(ROOT)) for path in ROOT.glob("records/*/*_StepTime/train_gpt.py")),
    ],
)
def test_nothing_compiled_takes_a_truth_value_as_index(script: str) -> None:
    """torch 2.11 cannot compile (a, b)[x.is_cuda]; later versions can, so no run here would show it."""
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    bodies = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    compiled = [
        "Cast",
        "used",
        "folded",
        "Linear",
        "rotate",
        "attend",
        "Attention",
        "Block",
        "GPT",
        "newton_schulz",
        "update_muon",
        "update_adam",
        *{"qkv_heads", "relu2_mlp", "qkv_operator", "mlp_operator"} & bodies.keys(),
    ]
    flags = (ast.Compare, ast.BoolOp, ast.Attribute)  # attributes: is_cuda and the like
    found = [
        ast.unparse(node)
        for name in compiled
        for node in ast.walk(bodies[name])
        if isinstance(node, ast.Subscript) and isinstance(node.slice, flags)
    ]
    assert found == []


@pytest.mark.parametrize("at_use", [False, True])
def test_the_compiled_forward_pass_casts_and_scales_no_weight(
    at_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come cast: 13 matrices of two layers and the tied head; cast at use, all of them would be seen here."""
    if at_use:
        monkeypatch.setattr(
            train_gpt, "used", lambda m, scale=None: train_gpt.folded(m, scale).to(m.low.dtype)
        )
    torch._dynamo.reset()
    forward = []

    def keep(graph: torch.fx.GraphModule, _: list) -> Callable:
        forward.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=lambda graph, _: make_boxed_func(graph.forward)
    )
    config = config_of(**{**SMALL_MODEL, "NUM_LAYERS": 2})
    model = torch.compile(
        train_gpt.GPT(config, torch.bfloat16), dynamic=False, fullgraph=True, backend=backend
    )
    tokens = torch.randint(0, config.vocab_size, (2, config.train_seq_len))
    model(tokens, tokens).backward()
    shapes = {p.shape for p in model.parameters() if p.ndim == 2 and len(p) > 4}
    made = [
        str(node.target)
        for node in forward[0].graph.nodes
        if node.op == "call_function" and getattr(node.meta.get("val"), "shape", 0) in shapes
    ]
    casts, products = (sum(word in name for name in made) for word in ("_to_copy", "mul"))
    assert (casts, products) == ((13, 4) if at_use else (0, 0))


def test_the_log_says_which_attention_runs(corpus: Corpus, tmp_path: Path) -> None:
    settings = dict(
        ITERATIONS=1, VAL_LOSS_EVERY=0, ATTENTION_BACKEND="math", GRAD_ACCUM_STEPS="auto"
    )
    run = run_trainer(tmp_path, **{**corpus.env, **SMALL_MODEL, **settings})
    assert run.code == 0, run.err[-2000:]
    assert re.search(
        r"^attention_mode:gqa num_heads:\d+ num_kv_heads:\d+ attention_backend:math$",
        run.text,
        re.M,
    )
    assert "sdp_backends:math=True\n" in run.text
    assert "grad_accum_steps:8" in run.text and "mfu:" not in run.text


def test_an_attention_that_is_not_there_ends_the_run_in_one_line(
    corpus: Corpus, tmp_path: Path
) -> None:
    done = run_trainer(tmp_path, **{**corpus.env, **SMALL_MODEL, "ATTENTION_BACKEND": "cudnn"})
    assert done.code == 1 and "Traceback" not in done.err
    assert re.search(
        r"^train_gpt.py: ATTENTION_BACKEND=cudnn does not work here", done.err, re.M
    ), done.err
