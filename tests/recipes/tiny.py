"""Helpers of the recipes' tests: settings that switch recipes on in a tiny model, and results."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import recipe
import torch
import verify
from running import SMALL_MODEL
from torch import Tensor, nn
from torch.nn import functional as F

SETTINGS = SMALL_MODEL | {"NUM_LAYERS": 3, "VOCAB_SIZE": 260, "ITERATIONS": 6, "WARMDOWN_ITERS": 0}
SETTINGS |= {"VAL_LOSS_EVERY": 0, "VAL_BATCH_SIZE": 2048, "GRAD_ACCUM_STEPS": 4, "VAL_TOKENS": 600}
LORA = {"LORA_RANK": 3, "LORA_LR": 0.02, "LORA_CHUNK": 8, "LORA_BATCH": 3}
# Settings for a model of five layers, of recipes whose header has values that do not fit it.
ON = {
    "orthogonal_init": {"ORTHOGONAL_INIT": 1, "MODEL_DIM": 64},
    "parallel_residuals": {"PARALLEL_START": 3},
    "loop": {"LOOP_START": 1, "LOOP_END": 2, "LOOP_COUNT": 2, "LOOP_FROM": 0.5},
    "xsa": {"XSA_LAST_N": 2},
    "partial_rope": {"ROPE_DIMS": 4},
    "leaky_relu2": {"LEAKY_SLOPE": 0.5},
    "muon_weight_decay": {"MUON_WD": 0.1},
    "adam_weight_decay": {"EMBED_WD": 0.3, "SCALAR_WD": 0.2, "SKIP_WD": 0.1},
    "warmdown_share": {"WARMDOWN_SHARE": 0.6, "MIN_LR": 0.1},
    "ema": {"EMA_DECAY": 0.8},
    "sliding_window": {"EVAL_STRIDE": 8},
    "attn_gate": {"GATE_WINDOW": 5, "GATE_SCALE": 0.7},
    "two_lanes": {"LANES_START": 3},
    "smear_gate": {"SMEAR_GATE": 1, "SMEAR_WINDOW": 6},
    "bigram_hash": {"BIGRAM_ROWS": 97, "BIGRAM_DIM": 16},
    "longer_rows": {"SHORT_ROW_LEN": 8},
    "gptq": {"GPTQ_BATCHES": 2},
    "documents": {"DOC_TOKEN": 1},
    "document_ttt": LORA,
    "global_sgd": LORA
    | {"SGD_DOCS": 30, "SGD_PHASES": 2, "SGD_MARGIN": 3, "SGD_CHUNK": 64, "SGD_LR": 0.3},
}
MODEL_RECIPES = ["layer_scale", "parallel_residuals", "skip_gates", "loop", "xsa", "partial_rope"]
MODEL_RECIPES += ["leaky_relu2"]
THREE_LAYERS = {"LOOP_END": 1, "PARALLEL_START": 2, "LANES_START": 2}


def settings_for(*names: str, layers: int = 5) -> dict[str, Any]:
    """Return the settings that switch these recipes on in a model of five (or three) layers."""
    found: dict[str, Any] = {}
    for name in names:
        settings = recipe.load_recipe(name).settings.items()
        found |= ON.get(name) or {setting: value for setting, (_, value) in settings}
    return found | {n: v for n, v in THREE_LAYERS.items() if n in found and layers == 3}


def find_faults(module: ModuleType, settings: dict, **options: Any) -> list[tuple[str, str, str]]:
    """Return the FAULT verdicts of verify.py for a script with recipes."""
    found = list(verify.verdicts(module.__file__, settings, **options))
    assert {name for name, _, _ in found} >= {"resume", "ranks", "replicas", "trained"}
    return [row for row in found if row[1] == "FAULT"]


def script_module(run: Any) -> Any:
    """Return the module of the script that a Trainer belongs to."""
    return sys.modules[type(run).__module__]


def read_artifact() -> bytes:
    """Return the bytes of the artifact that the last run wrote."""
    return Path("final_model.int8.ptz").read_bytes()


def train_and_export(run: Any) -> tuple[list, list]:
    """Train and export; return ([(loss, data_crc) of each step], (nats, bits per byte))."""
    run.train()
    run.export_and_score()
    events = run.log.events
    steps = [(e["train_loss"], e["data_crc"]) for e in events if e["event"] == "step"]
    [score] = [(e["val_loss"], e["val_bpb"]) for e in events if e["event"] == "score"]
    return steps, score


def randomize_weights(run: Any) -> nn.Module:
    """Give every parameter random values, so that every part has an effect; return the model."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in run.model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=random))
    return run.model


def call_on_all_ranks(runs: Any, work: Any) -> tuple[list[Any], list[Any]]:
    """Call `work` for each Trainer that make_run returned, on all ranks at once.

    Return (the Trainers, the results of `work`).
    """
    if not isinstance(runs, tuple):
        return [runs], [work(runs)]
    return runs[0], runs[1].run(lambda rank: work(runs[0][rank]))


def attend_by_mask(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Compute attention inside segments with a mask: a stand-in for a loop or for the kernel."""
    place = torch.arange(len(q))
    segment = torch.bucketize(place, ends, right=True)
    mask = (segment[:, None] == segment) & (place[:, None] >= place)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1)
