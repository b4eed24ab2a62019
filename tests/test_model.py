"""Tests of GPT.

Loss and gradients equal those of a plain reference. For a SEED, the initial weights equal those of
the challenge's script to the last bit, in the same order.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import Reference, initial_state
from running import SMALL_MODEL, byte_data, make_config, make_log, make_runtime, open_data
from running import train_gpt as tg
from torch import nn
from torch.nn import functional as F

TINY = {"NUM_LAYERS": 3, "MODEL_DIM": 16, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "VOCAB_SIZE": 19}
TINY |= {"TRAIN_SEQ_LEN": 6, "MLP_MULT": 3}


def tiny_config(**more: object) -> tg.Config:
    return make_config(**{**SMALL_MODEL, **TINY, **more})


SHAPES = [{}, {"TIE_EMBEDDINGS": 0}, {"NUM_KV_HEADS": 1}, {"NUM_LAYERS": 1}]
SHAPES += [{"NUM_LAYERS": 4, "LOGIT_SOFTCAP": 2, "ROPE_BASE": 50}]
SHAPES += [{"NUM_LAYERS": 5, "TIE_EMBEDDINGS": 0, "NUM_KV_HEADS": 4}]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_loss_and_gradients_equal_a_plain_reference(changes: dict) -> None:
    """This also shows that no position sees a later token, and that every parameter is used."""
    config = tiny_config(**changes)
    model = tg.GPT(config, torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():  # projections that are zero would hide errors
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    tokens = torch.randint(0, config.vocab_size, (2, 7), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    reference = Reference(model, config)
    for t in reference.p.values():
        t.requires_grad_()
    logits = torch.cat([reference.logits(row) for row in x])
    loss, reference_loss = model(x, y), F.cross_entropy(logits, y.flatten())
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(reference_loss.item(), rel=1e-5)
    loss.backward()
    reference_loss.backward()
    for name, p in model.named_parameters():
        if p.numel():
            wanted = reference.p[name].grad.float()
            torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-5, msg=name)
            assert p.grad.abs().max() > 1e-5, f"{name} has no effect on the loss"


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [({}, 92), (TINY, 32), (TINY | {"TIE_EMBEDDINGS": 0, "QK_GAIN_INIT": 1.25}, 33)],
    ids=["default", "tiny", "untied"],
)
def test_initial_weights_are_the_challenges_to_the_bit(settings: dict, tensors: int) -> None:
    """Names and order are those of the challenge's state dict, so runs of any fork pair by seed.

    The weights are float32, whatever dtype the model computes in.
    """
    config = make_config(**settings)
    torch.manual_seed(config.seed)
    expected = initial_state(config)
    torch.manual_seed(config.seed)
    state = tg.GPT(config, torch.bfloat16).state_dict()
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
        config = make_config(**{**SMALL_MODEL, **data, "SEED": seed})
        torch.manual_seed(seed)
        expected = initial_state(config)
        state = tg.Trainer(
            config, make_runtime(config), make_log(), open_data(config)
        ).model.state_dict()
        assert all(torch.equal(t, expected[name]) for name, t in state.items())


def test_a_parameter_without_a_rule_for_its_optimizer_is_refused() -> None:
    """The parameters are a matrix outside of the blocks, and a tensor with three dimensions."""
    config, runtime = tiny_config(), make_runtime(tiny_config())
    for owner, name, shape in (("", "more", (2, 3)), ("blocks.1", "bank", (4, 2, 3))):
        model = tg.GPT(config, torch.float32)
        model.get_submodule(owner).register_parameter(name, nn.Parameter(torch.ones(shape)))
        place = f"{owner}.{name}".strip(".")
        rule = "would not be trained; add a rule for it to make_optimizers"
        with pytest.raises(tg.RunError, match=re.escape(f"{place} of shape {shape} {rule}")):
            tg.make_optimizers(model, config, runtime)


H100 = [3, 1, 2, 0, 4]  # PyTorch's order of SDPA backends: cuDNN, flash, efficient, math
A100 = [1, 2, 0, 3, 4]  # the same with an older GPU or cuDNN before 9.15.1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], SimpleNamespace]]:
    """Give a function that returns the Runtime of a stand-in for a GPU with an order of backends.

    At the first choice of a process, PyTorch writes its order over whatever is there (see
    priority_order in sdp_utils.cpp). FlashAttention-3 is installed.
    """
    before = torch._C._get_sdp_priority_order()
    choices: list[int] = []

    def make(order: list[int]) -> SimpleNamespace:
        def choose(*arguments: object, **more: object) -> int:
            if not choices:
                torch._C._set_sdp_priority_order(order)
            choices.append(torch._C._get_sdp_priority_order()[0])
            return choices[-1]

        choices.clear()
        monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
        place = {"dtype": torch.float32, "device": torch.device("cpu")}
        return SimpleNamespace(cuda=True, rank=0, world_size=1, **place)

    monkeypatch.setattr(nn.attention, "activate_flash_attention_impl", lambda name: None)
    yield make
    torch._C._set_sdp_priority_order(before)


@pytest.mark.parametrize("name", ["fa3", "cudnn", "flash", "math"])
def test_a_chosen_attention_backend_is_the_only_one_or_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, gpu: Callable[[list[int]], SimpleNamespace]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("no such package\nand many more lines")

    config = make_config(**{**SMALL_MODEL, "ATTENTION_BACKEND": name})
    assert list(tg.attention_backends(config, gpu(H100))) == [name]
    auto = make_config(**SMALL_MODEL)
    assert list(tg.attention_backends(auto, gpu(H100))) == ["fa3", "cudnn", "math"]
    monkeypatch.setattr(nn.attention, "activate_flash_attention_impl", missing)
    assert list(tg.attention_backends(auto, gpu(H100))) == ["cudnn", "flash", "math"]
    assert list(tg.attention_backends(auto, gpu(A100))) == ["flash", "math", "cudnn"]
    assert list(tg.attention_backends(auto, make_runtime(auto))) == ["flash", "math"], "on a CPU"
    if name == "fa3":
        with pytest.raises(
            tg.RunError, match="^ATTENTION_BACKEND=fa3 is not possible: no such package; set "
        ):
            tg.attention_backends(config, gpu(H100))


def test_flash_attention_3_is_in_effect_where_the_log_says_so(
    gpu: Callable[[list[int]], SimpleNamespace],
) -> None:
    """Seen with a stand-in; the order that PyTorch writes was looked up in its sources."""
    config = tiny_config(TRAIN_BATCH_TOKENS=2064)
    runtime = gpu(H100)
    backends = tg.attention_backends(config, runtime)
    assert list(backends) == ["fa3", "cudnn", "math"]
    run = SimpleNamespace(config=config, runtime=runtime)
    with tg.sdpa_kernel(list(backends.values()), set_priority=True):
        assert tg.chosen_attention(run, backends) == "fa3"
        assert torch._C._get_sdp_priority_order()[0] == int(backends["fa3"])


def test_the_log_says_which_attention_pytorch_chooses_for_the_shapes() -> None:
    config = tiny_config(TRAIN_BATCH_TOKENS=2064)
    runtime = make_runtime(config)
    run = SimpleNamespace(config=config, runtime=runtime)
    for wanted in ("auto", "flash", "math"):
        chosen = replace(config, attention_backend=wanted)
        backends = tg.attention_backends(chosen, runtime)
        with tg.sdpa_kernel(list(backends.values()), set_priority=True):
            expected = "flash" if wanted == "auto" else wanted
            assert tg.chosen_attention(run, backends) == expected
    with (
        tg.sdpa_kernel([tg.SDPBackend.CUDNN_ATTENTION]),
        pytest.raises(tg.RunError, match="does not support 4 channels per head"),
    ):
        tg.chosen_attention(run, {"cudnn": tg.SDPBackend.CUDNN_ATTENTION})
