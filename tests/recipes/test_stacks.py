"""Each stack of records/stacks as a whole: it applies, keeps what a run promises, and packs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import recipe
import torch
import verify
from packed import pack
from running import ROOT
from samples import CAP_BYTES

pytestmark = pytest.mark.timeout(300)
NAMES = sorted(path.stem for path in (ROOT / "records" / "stacks").glob("*.json"))


@pytest.mark.slow
@pytest.mark.timeout(1500)  # test-time training is tried with every value of the last token
@pytest.mark.parametrize("name", NAMES)
def test_verify_finds_no_fault_in_a_stack(name: str, tmp_path: Path) -> None:
    """Ranks, resume, priming and score; all its settings are defaults of the script."""
    script = tmp_path / "frontier.py"
    assert recipe.main(["apply", "--stack", name, "--to", str(script)]) == 0
    tiny = dict(pair.split("=") for pair in recipe.stack(name)["verify"].split())
    found = list(verify.verdicts(script, tiny, quick=True, score_differs=True))
    assert [row for row in found if row[1] == "FAULT"] == []
    assert {"resume", "ranks", "replicas", "sum"} <= {row[0] for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_is_a_script_with_its_settings_as_defaults(name: str, script: Callable) -> None:
    module = script("--stack", name)
    config = module.Config()
    values = json.loads((ROOT / "records" / "stacks" / f"{name}.json").read_text())["settings"]
    read = {key: module.parse(module.SETTINGS[key], text) for key, text in values.items()}
    assert read.items() <= {k.upper(): v for k, v in vars(config).items()}.items()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_a_stack_of_full_size_is_within_the_limit(name: str, script: Callable) -> None:
    """Random weights are an upper estimate: trained ones of this shape are easier to compress."""
    module = script("--stack", name)
    config = module.Config()
    torch.manual_seed(0)
    kinds = module.GPT(config, torch.float32).state_dict()
    state = {key: 0.02 * torch.randn_like(t) for key, t in kinds.items()}
    quantized = {}
    for key, t in state.items():
        if hasattr(module, "gptq") and module.storage(key, t, config) == "int8":
            embedding = key == "tok_emb.weight"
            bits = config.embed_bits if embedding else config.matrix_bits
            sigmas = config.embed_clip_sigmas if embedding else config.matrix_clip_sigmas
            sigmas = config.mlp_clip_sigmas or sigmas if ".mlp." in key else sigmas
            inputs = torch.randn(2 * t.size(1), t.size(1))
            quantized[key] = module.gptq(t, inputs.T @ inputs, 2 ** (bits - 1) - 1, sigmas)
    data = module.pack(state, config, *([quantized] if quantized else []))[0]
    source = pack(Path(module.__file__).read_bytes())
    assert len(data) + len(source) <= CAP_BYTES
