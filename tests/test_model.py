"""GPT is the documented model: loss and gradients of a plain reference, and for a SEED, to the bit
and in their order, the initial weights of the challenge's script. It computes in the dtype that it
is told, attention takes the first backend that works, a compiler that does not work costs one
warning, and a step line's mfu is that of the model's operations."""

import gzip
import math
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import SMALL_MODEL, Recorder, byte_data, config_of, run_trainer, runtime_of
from conftest import train_gpt as tg
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

pytestmark = pytest.mark.timeout(120)
TINY = {
    "NUM_LAYERS": 3,
    "MODEL_DIM": 16,
    "NUM_HEADS": 4,
    "NUM_KV_HEADS": 2,
    "VOCAB_SIZE": 19,
    "TRAIN_SEQ_LEN": 6,
    "MLP_MULT": 3,
}


def tiny_config(**more: object) -> tg.Config:
    return config_of(**{**SMALL_MODEL, **TINY, **more})


def lively_model(config: tg.Config, dtype: torch.dtype = torch.float32) -> tg.GPT:
    """No parameter is constant: zero projections and identity mixes would hide most of it."""
    torch.manual_seed(11)
    model = tg.GPT(config, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model


def random_tokens(config: tg.Config, rows: int = 2) -> tuple[Tensor, Tensor]:
    shape, generator = (rows, config.train_seq_len + 1), torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# --- A plain reference: one position, one head, one pair of channels at a time ----------------


def normed(v: Tensor) -> Tensor:
    return v / torch.sqrt((v * v).mean() + torch.finfo(torch.float32).eps)


def rotated(v: Tensor, position: int, base: float) -> Tensor:
    half = len(v) // 2
    left, right = [], []
    for i in range(half):
        angle = position * base ** (-2 * i / len(v))
        left.append(v[i] * math.cos(angle) + v[half + i] * math.sin(angle))
        right.append(v[half + i] * math.cos(angle) - v[i] * math.sin(angle))
    return torch.stack(left + right)


def attended(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query against all keys up to its own position."""
    scores = torch.stack([query @ key for key in keys]) / math.sqrt(len(query))
    weights = torch.exp(scores - scores.max())
    return sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True))


def attention(rows: list[Tensor], w: dict[str, Tensor], config: tg.Config) -> list[Tensor]:
    """Query head h reads key head h // (heads / key heads)."""
    size, heads = config.model_dim // config.num_heads, [[] for _ in rows]
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        mine, theirs = (slice(n * size, (n + 1) * size) for n in (head, shared))
        keys, values = [], []
        for t, row in enumerate(rows):
            key, query = w["attn.c_k.weight"][theirs] @ row, w["attn.c_q.weight"][mine] @ row
            keys.append(rotated(normed(key), t, config.rope_base))
            values.append(w["attn.c_v.weight"][theirs] @ row)
            query = w["attn.q_gain"][head] * rotated(normed(query), t, config.rope_base)
            heads[t].append(attended(query, keys, values))
    return [w["attn.proj.weight"] @ torch.cat(parts) for parts in heads]


def plain_block(
    rows: list[Tensor], first: list[Tensor], w: dict[str, Tensor], config: tg.Config
) -> list[Tensor]:
    mix = w["resid_mix"]
    rows = [mix[0] * row + mix[1] * row0 for row, row0 in zip(rows, first, strict=True)]
    outputs = attention([normed(row) for row in rows], w, config)
    rows = [row + w["attn_scale"] * out for row, out in zip(rows, outputs, strict=True)]
    hidden = [w["mlp.fc.weight"] @ normed(row) for row in rows]
    squares = [torch.where(h > 0, h, 0.0 * h) ** 2 for h in hidden]
    outputs = [w["mlp.proj.weight"] @ h for h in squares]
    return [row + w["mlp_scale"] * out for row, out in zip(rows, outputs, strict=True)]


def plain_loss(state: dict[str, Tensor], config: tg.Config, x: Tensor, y: Tensor) -> Tensor:
    total, half, cap = torch.zeros(()), config.num_layers // 2, config.logit_softcap
    head = state["tok_emb.weight"] if config.tie_embeddings else state["lm_head.weight"]
    for tokens, targets in zip(x.tolist(), y.tolist(), strict=True):
        first = rows = [normed(state["tok_emb.weight"][token]) for token in tokens]
        pushed: list[list[Tensor]] = []
        for i in range(config.num_layers):
            if i >= half and pushed:
                weight = state["skip_weights"][i - half]
                rows = [row + weight * skip for row, skip in zip(rows, pushed.pop(), strict=True)]
            own = {n.removeprefix(f"blocks.{i}."): p for n, p in state.items()}
            rows = plain_block(rows, first, own, config)
            if i < half:
                pushed.append(rows)
        for row, target in zip(rows, targets, strict=True):
            logits = cap * torch.tanh(head @ normed(row) / cap)
            total = total + torch.log(torch.exp(logits).sum()) - logits[target]
    return total / y.numel()


SHAPES = [
    {},
    {"TIE_EMBEDDINGS": 0},
    {"NUM_KV_HEADS": 1},
    {"NUM_LAYERS": 1},
    {"NUM_LAYERS": 4, "LOGIT_SOFTCAP": 2, "ROPE_BASE": 50},
    {"NUM_LAYERS": 5, "TIE_EMBEDDINGS": 0, "NUM_KV_HEADS": 4},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_loss_and_gradients_equal_a_plain_reference(changes: dict) -> None:
    """So also: no position sees a later token, and every parameter has its part."""
    config = tiny_config(**changes)
    model = lively_model(config)
    x, y = random_tokens(config)
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ours, theirs = model(x, y), plain_loss(state, config, x, y)
    assert ours.dtype == torch.float32 and ours.shape == ()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    ours.backward()
    theirs.backward()
    for name, p in model.named_parameters():
        if p.numel():
            torch.testing.assert_close(p.grad, state[name].grad, rtol=1e-5, atol=1e-5, msg=name)
            assert p.grad.abs().max() > 1e-5, f"{name} has no part in the loss"


def test_a_missing_target_counts_for_nothing() -> None:
    """The last validation batch is filled up with them."""
    config = tiny_config()
    model, (x, y) = lively_model(config), random_tokens(config, rows=3)
    padded_x, padded_y = x.clone(), y.clone()
    padded_x[2], padded_y[2] = 0, -100
    assert model(padded_x, padded_y).item() == pytest.approx(model(x[:2], y[:2]).item(), rel=1e-6)


# --- Initial weights --------------------------------------------------------------------------


def plain_state(config: tg.Config) -> OrderedDict[str, Tensor]:
    """Plain modules in the challenge's order: what each draws from the generator counts."""
    D, head_dim = config.model_dim, config.model_dim // config.num_heads
    hidden, kv = config.mlp_mult * D, config.num_kv_heads * head_dim
    shapes = {"c_q": (D, D), "c_k": (D, kv), "c_v": (D, kv), "proj": (D, D)}
    embedding = nn.Embedding(config.vocab_size, D).weight
    state = {"skip_weights": torch.ones(config.num_layers // 2, D), "tok_emb.weight": embedding}
    for i in range(config.num_layers):
        block = f"blocks.{i}."
        controls = {"attn_scale": torch.ones(D), "mlp_scale": torch.ones(D)}
        controls["resid_mix"] = torch.stack((torch.ones(D), torch.zeros(D)))
        state |= {block + name: t for name, t in controls.items()}
        matrices = {n: nn.Linear(*shape, bias=False).weight for n, shape in shapes.items()}
        state[f"{block}attn.q_gain"] = torch.full((config.num_heads,), config.qk_gain_init)
        state |= {f"{block}attn.{n}.weight": weight for n, weight in matrices.items()}
        state[f"{block}mlp.fc.weight"] = nn.Linear(D, hidden, bias=False).weight
        state[f"{block}mlp.proj.weight"] = nn.Linear(hidden, D, bias=False).weight
    if not config.tie_embeddings:
        state["lm_head.weight"] = nn.Linear(D, config.vocab_size, bias=False).weight
    else:
        nn.init.normal_(embedding, mean=0.0, std=config.tied_embed_init_std)
    zero = re.compile(r".*\.proj\.weight|lm_head\.weight")
    rounded = re.compile(r".*\.(c_q|c_k|c_v|fc)\.weight|tok_emb\.weight")  # by its main()
    state = {n: t.bfloat16().float() if rounded.fullmatch(n) else t for n, t in state.items()}
    return OrderedDict(
        (n, torch.zeros_like(t) if zero.fullmatch(n) else t.detach()) for n, t in state.items()
    )


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [({}, 92), (TINY, 32), (TINY | {"TIE_EMBEDDINGS": 0, "QK_GAIN_INIT": 1.25}, 33)],
    ids=["default", "tiny", "untied"],
)
def test_initial_weights_are_the_challenges_to_the_bit(settings: dict, tensors: int) -> None:
    """By name, in the order of its state dict, so that runs of any fork pair by seed."""
    config = config_of(**settings)
    torch.manual_seed(config.seed)
    expected = plain_state(config)
    torch.manual_seed(config.seed)
    state = tg.GPT(config, torch.float32).state_dict()
    assert list(state) == list(expected) and len(state) == tensors
    for name, t in state.items():
        assert t.dtype == torch.float32
        assert torch.equal(t, expected[name]), name
    if not settings:
        assert sum(t.numel() for t in state.values()) == 17_059_912


def test_a_run_starts_from_the_weights_of_its_seed(tmp_path: Path) -> None:
    """Nothing else draws from the generator before the model does."""
    data = byte_data(tmp_path)
    for seed in (1, 2):
        config = config_of(**{**SMALL_MODEL, **data, "SEED": seed})
        torch.manual_seed(seed)
        expected = plain_state(config)
        state = tg.Trainer(config, runtime_of(config), Recorder()).model.state_dict()
        assert all(torch.equal(t, expected[name]) for name, t in state.items())


# --- What a user may change, and in which dtype it computes -----------------------------------


def test_renaming_a_module_keeps_its_scale() -> None:
    """A scale belongs to a block, not to a name: `proj` called otherwise trains it alike."""
    config = tiny_config()
    model, tokens = lively_model(config), random_tokens(config)
    model(*tokens).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if "_scale" in name}
    renamed = lively_model(config)
    for block in renamed.blocks:
        for module in (block.attn, block.mlp):
            projection = module.proj
            del module.proj
            module.down = projection
            module.__class__ = type("Renamed", (type(module),), {"proj": projection})
    renamed(*tokens).backward()
    assert [n for n in renamed.state_dict() if "down" in n] and len(expected) == 6
    for name, p in renamed.named_parameters():
        if name in expected:
            assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("tied", [1, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stream_has_the_compute_dtype_and_weights_and_loss_stay_float32(
    dtype: torch.dtype, tied: int
) -> None:
    config, seen = tiny_config(TIE_EMBEDDINGS=tied), []
    model = lively_model(config, dtype)
    for module in model.blocks.modules():
        module.register_forward_hook(
            lambda _, inputs, output: seen.extend([inputs[0].dtype, output.dtype])
        )
    loss = model(*random_tokens(config))
    loss.backward()
    assert len(seen) >= 2 * 3 * 8 and set(seen) == {dtype}
    assert loss.dtype == torch.float32
    dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    assert dtypes == {torch.float32}
    exact = lively_model(config)(*random_tokens(config)).item()
    assert loss.item() == pytest.approx(exact, rel=0.02)
    assert (loss.item() == exact) == (dtype == torch.float32)


def test_a_users_plain_linear_is_a_line_that_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing casts its weight, so it would fail in bfloat16 alone: on another machine."""

    class Edited(tg.MLP):
        def __init__(self, config: tg.Config) -> None:
            super().__init__(config)
            self.fc = nn.Linear(config.model_dim, config.mlp_mult * config.model_dim, bias=False)

    monkeypatch.setattr(tg, "MLP", Edited)
    config = config_of(**SMALL_MODEL | byte_data(tmp_path))
    with pytest.raises(tg.RunError, match=r"^blocks\.0\.mlp\.fc is an nn\.Linear.* a Linear$"):
        tg.Trainer(config, runtime_of(config), Recorder())


# --- Attention --------------------------------------------------------------------------------


class Kernels:
    """SDPA of a machine on which only some of the backends work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *working: str) -> None:
        self.working, self.enabled, self.flash = working, [], "flash"
        self.real = functional.scaled_dot_product_attention
        self.real_kernel = tg.sdpa_kernel
        monkeypatch.setattr(tg, "sdpa_kernel", self.kernel)
        monkeypatch.setattr(functional, "scaled_dot_product_attention", self.attend)
        monkeypatch.setattr(nn.attention, "activate_flash_attention_impl", self.activate)
        monkeypatch.setattr(nn.attention, "restore_flash_attention_impl", self.restore)

    def kernel(self, backends: object, **more: object) -> object:
        names = {"FLASH_ATTENTION": self.flash, "CUDNN_ATTENTION": "cudnn", "MATH": "math"}
        several = backends if isinstance(backends, list) else [backends]
        self.enabled = [names[backend.name] for backend in several]
        return self.real_kernel([tg.SDPBackend.MATH])

    def activate(self, name: str) -> None:
        if "no fa3" in self.working:
            raise ModuleNotFoundError("no such package")
        self.flash = "fa3"

    def restore(self, **_: object) -> None:
        self.flash = "flash"

    def attend(self, *qkv: Tensor, **more: object) -> Tensor:
        out = self.real(*qkv, **more)
        for name in self.enabled:
            if f"{name} forward" in self.working or name in self.working:
                break
        else:
            raise RuntimeError("no kernel\nand many more lines")
        if name not in self.working:
            out.register_hook(lambda gradient: 1 / 0)
        return out


@pytest.mark.parametrize(
    ("working", "names"),
    [
        (("fa3", "cudnn", "math"), ["fa3", "cudnn", "math"]),
        (("no fa3", "cudnn", "flash", "math"), ["cudnn", "flash", "math"]),
        (("cudnn", "flash", "math"), ["cudnn", "flash", "math"]),  # fa3 is there and fails
        (("no fa3", "cudnn forward", "flash", "math"), ["flash", "math"]),  # no backward pass
        (("no fa3", "math"), ["math"]),
    ],
)
def test_attention_passes_over_what_does_not_work(
    working: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Best first; what FlashAttention-3 leaves behind does not hide torch's own."""
    Kernels(monkeypatch, *working)
    config = config_of(**SMALL_MODEL)
    found = tg.attention_backends(config, runtime_of(config), Recorder())
    assert list(found.values()) == names


@pytest.mark.parametrize("name", ["fa3", "cudnn", "flash", "math"])
def test_a_forced_attention_is_the_only_one_or_ends_the_run_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(**{**SMALL_MODEL, "ATTENTION_BACKEND": name})
    Kernels(monkeypatch, "fa3", "cudnn", "flash", "math")
    found = tg.attention_backends(config, runtime_of(config), Recorder())
    assert list(found.values()) == [name]
    Kernels(monkeypatch)
    with pytest.raises(tg.RunError, match=f"^ATTENTION_BACKEND={name}: [^\n]*set auto$"):
        tg.attention_backends(config, runtime_of(config), Recorder())


# --- Compilation ------------------------------------------------------------------------------


def compile_with(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """torch.compile with a back end of its own, one of whose two passes does not work."""

    def compiler(name: str) -> object:
        def work(graph: torch.fx.GraphModule, _: list) -> object:
            if name == broken:
                raise RuntimeError(f"no {name} pass\nand many more lines")
            return make_boxed_func(graph.forward)

        return work

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: real(f, **more, backend=backend))
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_pass_that_cannot_be_compiled_ends_the_run_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run in eager would take the ten minutes and be no result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg.Runtime, "start", lambda *_: None)  # leaves our signals alone
    compile_with(monkeypatch, "forward")
    settings = byte_data(tmp_path) | {"ITERATIONS": 2, "VAL_LOSS_EVERY": 0, "WARMUP_STEPS": 1}
    config = config_of(**{**SMALL_MODEL, **settings, "TORCH_COMPILE": 1})
    assert tg.execute(config, {}) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "torch.compile fails: " in said[0]
    assert said[0].endswith("set TORCH_COMPILE=0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_attention_is_not_taken_from_the_compilers_cache(tmp_path: Path) -> None:
    """Its keys do not name the backend by themselves; a trace names the operators that ran."""
    settings = {**SMALL_MODEL, **byte_data(tmp_path), "ITERATIONS": 2, "VAL_LOSS_EVERY": 0}
    settings |= {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache", "TORCH_COMPILE": 1}
    for backend, kernels in (("flash", True), ("math", False)):
        folder = tmp_path / backend
        done = run_trainer(folder, ATTENTION_BACKEND=backend, TRACE_STEPS=1, **settings)
        assert done.code == 0, done.err[-2000:]
        [trace] = (folder / "logs").glob("*.trace.json.gz")
        assert (b"flash_attention_for_cpu" in gzip.decompress(trace.read_bytes())) == kernels


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_compiled_model_and_iteration_are_the_eager_ones() -> None:
    """Compiled by the real compiler, on the CPU."""
    config = config_of(**SMALL_MODEL)
    model, tokens = lively_model(config), random_tokens(config)
    model(*tokens).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    eager = model(*tokens).item()
    model.compile(dynamic=False)
    model.zero_grad()
    loss = model(*tokens)
    loss.backward()
    assert loss.item() == pytest.approx(eager, rel=1e-5)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-5)
    matrices = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1))
    arguments = matrices, 5, torch.float32
    fast = torch.compile(tg.newton_schulz, dynamic=False)
    torch.testing.assert_close(fast(*arguments), tg.newton_schulz(*arguments), rtol=1e-4, atol=1e-5)


# --- What a step costs ------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [1, 0])
def test_operations_a_token_are_those_of_the_matrices_and_the_causal_half(tied: int) -> None:
    with torch.device("meta"):
        model = tg.GPT(config := config_of(TIE_EMBEDDINGS=tied), torch.float32)
    matrices = 9 * (512 * 512 * 2 + 512 * 256 * 2 + 512 * 1024 * 2) + 1024 * 512
    expected = 6 * (matrices + 9 * 1024 * 512)
    assert model.flops_per_token(config) == expected == pytest.approx(130.55e6, rel=1e-4)


@pytest.mark.parametrize(("gpu", "known"), [("NVIDIA H100 80GB HBM3", True), ("x86_64", False)])
def test_a_step_line_ends_with_the_share_of_a_known_gpus_peak(
    gpu: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tg.PEAK_TFLOPS["H100"] == 989
    monkeypatch.setitem(tg.PEAK_TFLOPS, "H100", 1e-3)  # else this machine's share would be 0.0%
    settings = byte_data(tmp_path) | {"ITERATIONS": 2, "VAL_LOSS_EVERY": 0}
    config = config_of(**{**SMALL_MODEL, **settings})
    trainer = tg.Trainer(config, runtime_of(config), Recorder())
    trainer.runtime.hardware = gpu
    trainer.train()
    lines = [line for line in trainer.log.lines if "train_loss:" in line]
    events = [event for event in trainer.log.events if event["event"] == "step"]
    assert len(lines) == len(events) == 2
    for line, event in zip(lines, events, strict=True):
        assert bool(re.search(r" mfu:\d+\.\d%$", line)) == ("mfu_percent" in event) == known
        if known:
            share = event["tok_s"] * trainer.model.flops_per_token(config) / 1e9
            assert event["mfu_percent"] == pytest.approx(100 * share, rel=0.01)
