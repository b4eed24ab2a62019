"""Tests of GPT.

Loss and gradients equal those of a plain reference. For a SEED, the initial weights equal those of
the challenge's script to the last bit, in the same order.
"""

import re
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


@pytest.mark.parametrize("name", ["fa3", "cudnn", "flash", "math"])
def test_a_chosen_attention_backend_is_the_only_one_or_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("no such package\nand many more lines")

    activate = "activate_flash_attention_impl"
    monkeypatch.setattr(nn.attention, activate, lambda name: None)
    config = make_config(**{**SMALL_MODEL, "ATTENTION_BACKEND": name})
    gpu = SimpleNamespace(cuda=True)
    assert list(tg.attention_backends(config, gpu)) == [name]
    auto = make_config(**SMALL_MODEL)
    assert list(tg.attention_backends(auto, gpu)) == ["fa3", "cudnn", "math"]
    monkeypatch.setattr(nn.attention, activate, missing)
    assert list(tg.attention_backends(auto, gpu)) == ["cudnn", "flash", "math"]
    assert list(tg.attention_backends(auto, make_runtime(auto))) == ["flash", "math"], "on a CPU"
    if name == "fa3":
        with pytest.raises(
            tg.RunError, match="^ATTENTION_BACKEND=fa3 is not possible: no such package; set "
        ):
            tg.attention_backends(config, gpu)
