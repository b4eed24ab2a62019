"""Proves that GPT is the documented model: loss, gradients, names, sizes, initial values, dtypes and causality."""

import math

import pytest
import torch
from conftest import SMALL_MODEL, config_of, train_gpt
from torch import Tensor

pytestmark = pytest.mark.timeout(60)

TINY = dict(
    NUM_LAYERS=3,
    MODEL_DIM=16,
    NUM_HEADS=4,
    NUM_KV_HEADS=2,
    VOCAB_SIZE=19,
    TRAIN_SEQ_LEN=6,
    MLP_MULT=3,
)


def tiny_config(**more: object) -> train_gpt.Config:
    return config_of(**{**SMALL_MODEL, **TINY, **more})


def lively_model(config: train_gpt.Config, dtype: torch.dtype = torch.float32) -> train_gpt.GPT:
    """Random values in every parameter: zero projections and identity mixes would hide most of the model."""
    torch.manual_seed(11)
    model = train_gpt.GPT(config, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    model.cast()
    return model


def random_tokens(config: train_gpt.Config, rows: int = 2) -> tuple[Tensor, Tensor]:
    shape, generator = (rows, config.train_seq_len + 1), torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# --- A plain reference: one position, one head, one pair of channels at a time ----------------------------------------


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


def attention(rows: list[Tensor], w: dict[str, Tensor], config: train_gpt.Config) -> list[Tensor]:
    """Every query against all keys up to its own position; query head h reads key head h // (heads / key heads)."""
    size, out = config.model_dim // config.num_heads, []
    for t, row in enumerate(rows):
        heads = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            of_query, of_key = (slice(n * size, (n + 1) * size) for n in (head, shared))
            query = w["attn.q_gain"][head] * rotated(
                normed(w["attn.c_q.weight"][of_query] @ row), t, config.rope_base
            )
            scores = torch.stack(
                [
                    query
                    @ rotated(normed(w["attn.c_k.weight"][of_key] @ rows[s]), s, config.rope_base)
                    for s in range(t + 1)
                ]
            ) / math.sqrt(size)
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            heads.append(
                sum(weights[s] * (w["attn.c_v.weight"][of_key] @ rows[s]) for s in range(t + 1))
            )
        out.append(w["attn.proj.weight"] @ torch.cat(heads))
    return out


def plain_block(
    rows: list[Tensor], first: list[Tensor], w: dict[str, Tensor], config: train_gpt.Config
) -> list[Tensor]:
    mix = w["resid_mix"]
    rows = [mix[0] * row + mix[1] * row0 for row, row0 in zip(rows, first)]
    rows = [
        row + w["attn_scale"] * a
        for row, a in zip(rows, attention([normed(row) for row in rows], w, config))
    ]
    hidden = [w["mlp.fc.weight"] @ normed(row) for row in rows]
    squares = [torch.where(h > 0, h, 0.0 * h) ** 2 for h in hidden]
    return [row + w["mlp_scale"] * (w["mlp.proj.weight"] @ h) for row, h in zip(rows, squares)]


def plain_loss(state: dict[str, Tensor], config: train_gpt.Config, x: Tensor, y: Tensor) -> Tensor:
    total, half = torch.zeros(()), config.num_layers // 2
    head = state["tok_emb.weight"] if config.tie_embeddings else state["lm_head.weight"]
    for tokens, targets in zip(x.tolist(), y.tolist()):
        first = rows = [normed(state["tok_emb.weight"][token]) for token in tokens]
        pushed: list[list[Tensor]] = []
        for i in range(config.num_layers):
            if i >= half and pushed:
                rows = [
                    row + state["skip_weights"][i - half] * skip
                    for row, skip in zip(rows, pushed.pop())
                ]
            prefix = f"blocks.{i}."
            weights = {
                name.removeprefix(prefix): p for name, p in state.items() if name.startswith(prefix)
            }
            rows = plain_block(rows, first, weights, config)
            if i < half:
                pushed.append(rows)
        for row, target in zip(rows, targets):
            logits = config.logit_softcap * torch.tanh(head @ normed(row) / config.logit_softcap)
            total = (
                total
                + torch.log(torch.exp(logits - logits.max()).sum())
                + logits.max()
                - logits[target]
            )
    return total / y.numel()


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(TIE_EMBEDDINGS=0),
        dict(NUM_KV_HEADS=4),
        dict(NUM_KV_HEADS=1),
        dict(NUM_LAYERS=1),
        dict(NUM_LAYERS=4),
        dict(NUM_LAYERS=5, TIE_EMBEDDINGS=0, NUM_KV_HEADS=4),
        dict(LOGIT_SOFTCAP=2, ROPE_BASE=50),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_a_plain_reference(changes: dict) -> None:
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
            assert torch.allclose(p.grad, state[name].grad, rtol=1e-5, atol=1e-5), name
            assert p.grad.abs().max() > 1e-5, f"{name} has no part in the loss"


# --- Sizes, names, initial values -------------------------------------------------------------------------------------


def test_default_model_has_17059912_parameters() -> None:
    with torch.device("meta"):
        model = train_gpt.GPT(config_of(), torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 17_059_912


@pytest.mark.parametrize("tied", [1, 0])
def test_state_dict_has_the_published_names_and_shapes(tied: int) -> None:
    expected = {"tok_emb.weight": (19, 16), "skip_weights": (1, 16)}
    for i in range(3):
        expected |= {
            f"blocks.{i}.{name}": shape
            for name, shape in {
                "attn.c_q.weight": (16, 16),
                "attn.c_k.weight": (8, 16),
                "attn.c_v.weight": (8, 16),
                "attn.proj.weight": (16, 16),
                "attn.q_gain": (4,),
                "mlp.fc.weight": (48, 16),
                "mlp.proj.weight": (16, 48),
                "attn_scale": (16,),
                "mlp_scale": (16,),
                "resid_mix": (2, 16),
            }.items()
        }
    if not tied:
        expected["lm_head.weight"] = (19, 16)
    state = train_gpt.GPT(tiny_config(TIE_EMBEDDINGS=tied), torch.float32).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == expected
    assert {t.dtype for t in state.values()} == {torch.float32}


def test_a_fresh_model_starts_from_the_documented_values() -> None:
    torch.manual_seed(0)
    config = config_of(
        NUM_LAYERS=3, MODEL_DIM=128, VOCAB_SIZE=512, QK_GAIN_INIT=1.25, TIED_EMBED_INIT_STD=0.02
    )
    state = train_gpt.GPT(config, torch.float32).state_dict()
    embedding = state["tok_emb.weight"]
    assert (
        embedding.std().item() == pytest.approx(0.02, rel=0.02)
        and abs(embedding.mean().item()) < 0.001
    )
    assert (state["skip_weights"] == 1).all()
    for i in range(3):
        block = {
            name.removeprefix(f"blocks.{i}."): t
            for name, t in state.items()
            if name.startswith(f"blocks.{i}.")
        }
        assert (block["attn.proj.weight"] == 0).all() and (block["mlp.proj.weight"] == 0).all()
        assert (block["attn.q_gain"] == 1.25).all()
        assert (block["attn_scale"] == 1).all() and (block["mlp_scale"] == 1).all()
        assert (block["resid_mix"][0] == 1).all() and (block["resid_mix"][1] == 0).all()
        for name in ("attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "mlp.fc.weight"):
            assert block[name].std().item() == pytest.approx(1 / math.sqrt(3 * 128), rel=0.05), name


def test_an_untied_head_starts_at_zero_so_that_every_token_is_as_likely() -> None:
    torch.manual_seed(0)
    config = tiny_config(TIE_EMBEDDINGS=0, VOCAB_SIZE=300, MODEL_DIM=64)
    model = train_gpt.GPT(config, torch.float32)
    assert (model.state_dict()["lm_head.weight"] == 0).all()
    assert model.state_dict()["tok_emb.weight"].std().item() == pytest.approx(1.0, rel=0.05)
    assert model(*random_tokens(config)).item() == pytest.approx(math.log(300), rel=1e-6)


def test_fresh_blocks_pass_their_input_through() -> None:
    torch.manual_seed(0)
    model, outputs = train_gpt.GPT(tiny_config(), torch.float32), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: outputs.append((inputs[0], output)))
    model(*random_tokens(tiny_config()))
    assert len(outputs) == 3 and all(torch.equal(given, output) for given, output in outputs)


# --- Dtypes -----------------------------------------------------------------------------------------------------------


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
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters()}
        == {torch.float32}
    )


def test_bfloat16_stays_near_float32() -> None:
    config = tiny_config()
    x, y = random_tokens(config)
    exact, rounded = (
        lively_model(config, dtype)(x, y).item() for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact != rounded and exact == pytest.approx(rounded, rel=0.02)


# --- Causality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_later_token_changes_no_earlier_loss(position: int) -> None:
    config = tiny_config()
    model = lively_model(config)
    x, y = random_tokens(config, rows=1)

    def share_of_position(tokens: Tensor) -> float:
        """How the loss depends on the target at `position`: its mean over positions leaves only that one's logits."""
        other = y.clone()
        other[0, position] = (y[0, position] + 1) % config.vocab_size
        with torch.no_grad():
            return (model(tokens, y) - model(tokens, other)).item() * config.train_seq_len

    plain = share_of_position(x)
    for changed in range(config.train_seq_len):
        tokens = x.clone()
        tokens[0, changed] = (x[0, changed] + 3) % config.vocab_size
        difference = abs(share_of_position(tokens) - plain)
        assert difference < 1e-4 if changed > position else difference > 1e-3, changed


# --- One cast a step --------------------------------------------------------------------------------------------------


def cast_where_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autocast does it: every product casts its weight, and autograd leads the gradient back to it."""

    def weight_of(module: torch.nn.Module, scale: Tensor | None = None) -> Tensor:
        weight = module.weight if scale is None else scale[:, None] * module.weight
        return weight.to(module.low.dtype)

    monkeypatch.setattr(train_gpt, "used", weight_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [0, 1])
def test_a_cast_ahead_is_the_cast_at_use_bit_for_bit(
    dtype: torch.dtype, tied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, results = tiny_config(TIE_EMBEDDINGS=tied), []
    for at_use in (False, True):
        if at_use:
            cast_where_used(monkeypatch)
        model = lively_model(config, dtype)
        for _ in range(2):  # gradients of micro-steps add up in float32
            model(*random_tokens(config)).backward()
        results.append([model(*random_tokens(config)), *(p.grad for p in model.parameters())])
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    for ahead, plain in zip(*results):
        assert torch.equal(ahead, plain)


def test_weights_count_as_they_were_at_the_last_cast() -> None:
    """So one cast serves all micro-steps; a second one takes every matrix and both scales."""
    config = tiny_config(TIE_EMBEDDINGS=0)
    model, tokens = lively_model(config, torch.bfloat16), random_tokens(config)
    before = model(*tokens).item()
    names = {
        name
        for name, p in model.named_parameters()
        if p.ndim == 2 and "resid" not in name and "skip" not in name
    }
    cast = {
        f"{name}.weight" for name, module in model.named_modules() if module in dict(model.casts)
    }
    assert cast == names
    for name, p in model.named_parameters():
        if name in names - {"tok_emb.weight"} or "attn_scale" in name or "mlp_scale" in name:
            p.data.mul_(1.5)
            assert model(*tokens).item() == before, name
            model.cast()
            changed = model(*tokens).item()
            assert changed != before, name
            before = changed


def test_nothing_of_the_cast_is_in_the_state() -> None:
    model = lively_model(tiny_config())
    assert not [name for name in model.state_dict() if "low" in name]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
