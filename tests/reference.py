"""Plain references with which tests compare the trainer and the recipes.

The model is written as the challenge and its records describe it, and the order of tokens as the
challenge's rules define it, in the simplest possible way and without regard to speed.
"""

import binascii
import math
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def rms_norm(x: Tensor) -> Tensor:
    """Divide by the root mean square of the last dimension, without a gain."""
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def rotate(x: Tensor, dims: int, base: float) -> Tensor:
    """Rotate channels i and i + dims / 2 at position t by the angle -t / base^(2 i / dims)."""
    y = x.clone()
    for t in range(len(x)):
        for i in range(dims // 2):
            angle = -t / base ** (2 * i / dims)
            a, b = x[t, i], x[t, i + dims // 2]
            y[t, i] = a * math.cos(angle) - b * math.sin(angle)
            y[t, i + dims // 2] = a * math.sin(angle) + b * math.cos(angle)
    return y


class Reference:
    """The model in float64: it computes the logits of one sequence, head by head.

    A layer that is looped is visited several times. A setting that the script under test does not
    have counts as off.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.p = {name: t.double() for name, t in model.state_dict().items()}
        self.config = config

    def setting(self, name: str, default: Any = 0) -> Any:
        """Return a setting, or the default if the script does not have it."""
        return getattr(self.config, name, default)

    def attention(self, x: Tensor, layer: str, xsa: bool) -> Tensor:
        heads = []
        width = x.size(1) // self.config.num_heads
        q, k, v = (x @ self.p[f"{layer}.attn.c_{each}.weight"].T for each in "qkv")
        for head in range(self.config.num_heads):
            of_query = slice(width * head, width * (head + 1))
            kv_head = head * self.config.num_kv_heads // self.config.num_heads
            of_key = slice(width * kv_head, width * (kv_head + 1))
            dims = self.setting("rope_dims") or width
            gain = self.p[f"{layer}.attn.q_gain"][head]
            query, key = (
                rotate(rms_norm(t), dims, self.config.rope_base)
                for t in (q[:, of_query], k[:, of_key])
            )
            scores = gain * query @ key.T
            later = torch.ones_like(scores).triu(1).bool()
            y = (scores / math.sqrt(width)).masked_fill(later, -math.inf).softmax(-1) @ v[:, of_key]
            if xsa:
                unit_v = v[:, of_key] / v[:, of_key].norm(dim=-1, keepdim=True)
                y = y - (y * unit_v).sum(-1, keepdim=True) * unit_v
            if self.setting("gate_window"):
                read = x[:, : self.config.gate_window]
                inner = self.config.gate_scale * read @ self.p[f"{layer}.attn.gate"][head]
                y = y / (1 + (-inner).exp())[:, None]
            heads.append(y)
        out = torch.cat(heads, dim=1) @ self.p[f"{layer}.attn.proj.weight"].T
        return self.p[f"{layer}.attn_scale"] * out

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        inner = x @ self.p[f"{layer}.mlp.fc.weight"].T
        inner = torch.where(inner > 0, inner, self.setting("leaky_slope") * inner).square()
        return self.p[f"{layer}.mlp_scale"] * (inner @ self.p[f"{layer}.mlp.proj.weight"].T)

    def parts(self, number: int) -> tuple:
        """Return (prefix of names, scale of inputs, whether XSA is on, resid_mix) of a layer."""
        layer = f"blocks.{number}"
        scale = 1 / math.sqrt(number + 1) if self.setting("layer_scale") else 1
        xsa = number >= self.config.num_layers - self.setting("xsa_last_n")
        return layer, scale, xsa, self.p[f"{layer}.resid_mix"]

    def block(self, number: int, x: Tensor, x0: Tensor) -> Tensor:
        layer, scale, xsa, mix = self.parts(number)
        x = mix[0] * x + mix[1] * x0
        y = x + self.attention(scale * rms_norm(x), layer, xsa)
        parallel = 0 <= self.setting("parallel_start", -1) <= number
        return y + self.mlp(scale * rms_norm(x if parallel else y), layer)

    def lanes(self, number: int, one: Tensor, two: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
        """Return both residual streams after a layer of the recipe two_lanes."""
        layer, scale, xsa, mix = self.parts(number)
        parts = (
            self.attention(scale * rms_norm(mix[0] * one + mix[1] * x0), layer, xsa),
            self.mlp(scale * rms_norm(two), layer),
        )
        weights = self.p[f"{layer}.lanes"].tolist()
        return tuple(
            weights[i] * lane + weights[i + 1] * parts[0] + weights[i + 2] * parts[1]
            for i, lane in ((0, one), (3, two))
        )

    def embedding(self, tokens: Tensor) -> Tensor:
        x = self.p["tok_emb.weight"][tokens]
        if rows := self.setting("bigram_rows"):
            for t in range(len(tokens)):
                pair = rows - 1
                if t:
                    pair = (36313 * int(tokens[t]) ^ 27191 * int(tokens[t - 1])) % (rows - 1)
                hashed = self.p["bigram_proj.weight"] @ self.p["bigram.weight"][pair]
                x[t] += self.p["bigram_scale"] * hashed
        if not self.setting("smear_gate"):
            return rms_norm(x)
        x = x if self.config.smear_window else rms_norm(x)
        y = x.clone()
        for t in range(len(tokens)):
            if tokens[t] != self.config.smear_bos:
                y[t] = self.smear(x[t], x[t - 1] if t else torch.zeros_like(x[t]))
        return rms_norm(y) if self.config.smear_window else y

    def smear(self, x: Tensor, before: Tensor) -> Tensor:
        """Mix the embedding of a token with that of the token before it."""
        if window := self.config.smear_window:
            gate = 1 / (1 + (-x[:window] @ self.p["smear"]).exp())
            return x + self.p["smear_scale"] * gate * before
        gate = 1 / (1 + (-self.p["smear"]).exp())
        return (1 - gate) * x + gate * before

    def logits(self, tokens: Tensor, looping: bool = False) -> Tensor:
        order = list(range(self.config.num_layers))
        if looping:
            first, last = self.config.loop_start, self.config.loop_end
            again = self.config.loop_count * list(range(first, last + 1))
            order = order[: last + 1] + again + order[last + 1 :]
        x = x0 = self.embedding(tokens)
        other = None  # the second lane
        half = len(order) // 2
        skips = []
        for number in order[:half]:
            x = self.block(number, x, x0)
            skips.append(x)
        for row, number in enumerate(order[half:]):
            in_lanes = 0 <= self.setting("lanes_start", -1) <= number
            if in_lanes and other is None:
                other = x
            if skips:
                skip = self.p["skip_weights"][row] * skips.pop()
                if self.setting("skip_gates"):
                    gate = 1 / (1 + (-self.p["skip_gates"][row]).exp())
                    x, skip = gate * x, (1 - gate) * skip
                x = x + skip
            if in_lanes:
                x, other = self.lanes(number, x, other, x0)
            else:
                x = self.block(number, x, x0)
        x = x if other is None else (x + other) / 2
        cap = self.config.logit_softcap
        return cap * torch.tanh(self.head(rms_norm(x)) / cap)

    def head(self, x: Tensor) -> Tensor:
        return x @ self.p.get("lm_head.weight", self.p["tok_emb.weight"]).T


def initial_state(config: Any) -> OrderedDict[str, Tensor]:
    """Return the challenge's initial weights for the current state of torch's generator.

    The modules are built in the challenge's order, because each one draws from the generator.
    """
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
    rounded = re.compile(
        r".*\.(c_q|c_k|c_v|fc)\.weight|tok_emb\.weight"
    )  # the challenge's main() rounds these
    state = {n: t.bfloat16().float() if rounded.fullmatch(n) else t for n, t in state.items()}
    return OrderedDict(
        (n, torch.zeros_like(t) if zero.fullmatch(n) else t.detach()) for n, t in state.items()
    )


def step_rows(stream: np.ndarray, batch_tokens: int, seq_len: int, step: int) -> np.ndarray:
    """Return the sequences of a step, (sequences, seq_len + 1): 8 spans of the endless stream."""
    span = batch_tokens // 8 + 1
    endless = np.arange(step * 8 * span, (step + 1) * 8 * span) % len(stream)
    spans = stream[endless].reshape(8, span)
    x, y = (part.reshape(-1, seq_len) for part in (spans[:, :-1], spans[:, 1:]))
    return np.concatenate([x, y[:, -1:]], axis=1)


def rank_batches(rows: np.ndarray, rank: int, ranks: int, micro_steps: int) -> list[np.ndarray]:
    """Return a rank's batches of a step.

    The sequences are split into equal parts. In micro-step m, a rank takes part m * ranks + rank.
    """
    parts = np.split(rows, ranks * micro_steps)
    return [parts[m * ranks + rank] for m in range(micro_steps)]


def data_crc_of_steps(stream: np.ndarray, batch_tokens: int, seq_len: int, steps: int) -> int:
    """Return the data_crc of the first `steps` steps of a run."""
    rows = [row for step in range(steps) for row in step_rows(stream, batch_tokens, seq_len, step)]
    texts = [row.astype("<u2").tobytes() for row in rows]
    return sum(binascii.crc32(text, number) for number, text in enumerate(texts)) % 2**32
