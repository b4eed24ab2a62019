"""Edits of train_gpt.py, as a competitor makes them: right ones, and mistakes that it says nothing
about, or only on two ranks. Each is a list of (text that the script has once, what replaces it)."""

# --- Where the edits go ---
LINEAR = "class Linear(nn.Linear):\n"
MLP_OF_BLOCK = "        self.mlp = MLP(config)\n"
BLOCK_MLP = "        return x + self.mlp(rms_norm(x), self.mlp_scale)\n"
SOFTCAP = "        self.softcap = config.logit_softcap\n"
SKIPS = "        self.skip_weights = nn.Parameter("
BLOCKS = "        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))\n"
HEADS = "        self.lm_head = None if config.tie_embeddings else"
EMBED = "        x = x0 = rms_norm(self.tok_emb(tokens).to(self.dtype))"
HEAD = "        head = self.tok_emb if self.lm_head is None else self.lm_head\n"
FORWARD = "        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())\n"
MEAN_NATS = "    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())\n"
MUON = "        self.iterations = config.muon_backend_steps\n"
MUON_STATE = '            self.state[p]["momentum_buffer"] = torch.zeros_like(p)\n'
MUON_STEP = "        self.reduced.zero_()\n"
SHARE = "                update = self.newton_schulz(nesterov, self.iterations, self.dtype)\n"
UPDATES = '            updates = [self.update_of[p] for p in group["params"]]\n'
RATE = '            rate = group["lr"] * max(1.0, rows / cols) ** 0.5'
EMBEDDING = '        if name in ("tok_emb.weight", "lm_head.weight"):\n'
ADAM = "    betas = config.beta1, config.beta2\n"
SCHEDULE = "    if config.warmdown_iters == 0:\n"
ROWS = "        first = self.first_row + k * self.stride\n"
WIDENED = "        x[filled:] = 0  # pads"
SUMMARY = "        in_bytes = 0 if self.device_table else int(self.byte_table.bytes_of(x, y))\n"
SCORE = "                nats = self.mean_nats(model, batch.x, batch.y).double() * targets\n"
BEGIN = "        self.begin(step=0, data_crc=0)\n"  # in Trainer.__init__
PLAN = "        return Pipeline(self.shards, plan, self.overlap"
ZERO = "        exchange.vector.zero_()\n"
MICRO_STEPS = "        for batch in islice(batches, self.runtime.micro_steps):\n"
BACKWARD = "                exchange.backward(loss)\n"
REDUCE = '        with phase("reduce"):\n            exchange.all_reduce(self.step, loss_sum)\n'
CLIP = '        with phase("grad_clip"):\n'  # after the all-reduce
SCALE = "        scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))\n"
STEP = "                optimizer.step()\n"
END = "            self.after_step()\n"
EVALUATE = """\
        self.model.eval()
        result = (validation or self.validation).evaluate(self.model, scope)
        self.model.train()
"""
EXPORT = "        state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}\n"
STORED = "        stored = unpack(data, state)\n"
RESTORED = "            self.model.load_state_dict(state)  # a checkpoint holds"

Edits = list[tuple[str, str]]
DROPOUT = (HEAD, "        x = F.dropout(x, 0.1, self.training)\n" + HEAD)


def before(place: str, text: str) -> tuple[str, str]:
    return place, text + place


def after(place: str, text: str) -> tuple[str, str]:
    return place, place + text


def averaged(holder: str, when: str = "True", place: str = END, cast: str = "", by: float = 0.1):
    """An average of the weights, which is exported."""
    named = "self.model.named_parameters()"
    return [
        before(BEGIN, f"        {holder} = {{n: p.detach().clone(){cast} for n, p in {named}}}\n"),
        before(
            place,
            f"""\
            if {when}:
                for name, p in {named}:
                    {holder}[name].lerp_(p.detach(){cast}, {by})
""",
        ),
        after(EXPORT, f"        state |= {{n: t.float().clone() for n, t in {holder}.items()}}\n"),
    ]


# A step of gradient descent on a batch of the validation.
LEARN = """\
{indent}with torch.enable_grad():
{indent}    grads = torch.autograd.grad(model(batch.x, batch.y), list(model.parameters()))
{indent}torch._foreach_add_(list(model.parameters()), grads, alpha=-0.1)
"""


def learning(first: bool, restored: bool) -> Edits:
    """Test-time training: it learns from a batch before or after it scores it."""
    learn = LEARN.format(indent=" " * 16)
    score = (SCORE, learn + SCORE if first else SCORE + learn)
    if not restored:
        return [score]
    saved = "        saved = [p.detach().clone() for p in self.model.parameters()]\n"
    put_back = (
        "        torch._foreach_copy_([p.detach() for p in self.model.parameters()], saved)\n"
    )
    return [score, (EVALUATE, saved + EVALUATE + put_back)]


# --- Right edits ---
def normuon(place: str) -> Edits:
    """Updates whose rows have equal size over time: of all matrices, or of this rank's share."""
    moments = (
        '            self.state[p]["rows"] = torch.zeros(p.size(0), 1)  # of the second moment\n'
    )
    normalize = """\
{i}for p, u in zip({matrices}, update, strict=True):
{i}    self.state[p]["rows"].lerp_(u.square().mean(-1, keepdim=True), 0.05)
{i}    y = u / (self.state[p]["rows"].sqrt() + 1e-8)
{i}    u.copy_(y * u.norm() / (y.norm() + 1e-8))
"""
    if place == SHARE:
        return [
            after(MUON_STATE, moments),
            after(SHARE, normalize.format(i=" " * 16, matrices="matrices")),
        ]
    all_updates = "            update = updates\n"
    matrices = 'group["params"]'
    return [
        after(MUON_STATE, moments),
        after(UPDATES, all_updates + normalize.format(i=" " * 12, matrices=matrices)),
    ]


Z_LOSS = (
    FORWARD,
    """\
        logits = self.logits(x).flatten(0, 1)
        scored = y.flatten() >= 0
        z = torch.logsumexp(logits, -1).square() * scored
        return F.cross_entropy(logits, y.flatten()) + 1e-3 * z.sum() / scored.sum()
""",
)
EXPERTS = [  # a mixture of 16 MLPs, of which each token uses one
    before(
        "class Block(nn.Module):\n",
        """class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.q_gain_router = Linear(config.model_dim, 16)  # trained as the gains are
        self.experts = nn.ModuleList(MLP(config) for _ in range(16))

    def forward(self, x, scale):
        shares = F.linear(x.float(), self.q_gain_router.weight).softmax(-1)
        share, best = shares.max(-1)
        chosen = F.one_hot(best, 16).to(x.dtype)
        self.balance = 16 * (chosen.float().mean((0, 1)) * shares.mean((0, 1))).sum()
        y = torch.stack([expert(x, scale) for expert in self.experts], -1)
        return (y * (chosen * share[..., None].to(x.dtype))[:, :, None]).sum(-1)


""",
    ),
    (MLP_OF_BLOCK, "        self.mlp = Experts(config)\n"),
    (FORWARD, FORWARD[:-1] + " + 0.01 * sum(block.mlp.balance for block in self.blocks)\n"),
]
SHARED_BLOCKS = [  # of six layers, i and i + 3 are one block
    (BLOCKS, BLOCKS.replace("config.num_layers", "3")),
    ("enumerate(self.blocks):\n", "enumerate([*self.blocks, *self.blocks]):\n"),
    (
        "nn.Parameter(torch.ones(config.num_layers // 2, D))",
        "nn.Parameter(torch.ones(3, D))",
    ),
]
SECOND_HEAD = [  # predicts the token after next, and is not exported
    before(HEADS, "        self.second_head = Linear(D, config.vocab_size)\n"),
    (
        "        return (self.softcap * torch.tanh(logits / self.softcap)).float()\n",
        "        self.hidden = x\n"
        "        return (self.softcap * torch.tanh(logits / self.softcap)).float()\n",
    ),
    (
        FORWARD,
        """\
        loss = F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
        second = self.second_head(rms_norm(self.hidden[:, :-1])).float().flatten(0, 1)
        return loss + 0.2 * F.cross_entropy(second, y[:, 1:].flatten())
""",
    ),
    (EMBEDDING, EMBEDDING.replace('weight"):', 'weight", "second_head.weight"):')),
    before(ADAM, '    adam_groups.append({"params": [model.second_head.weight], "lr": 0.008})\n'),
    after(EXPORT, '        del state["second_head.weight"]\n'),
    (
        "        self.model.load_state_dict(stored)\n",
        "        self.model.load_state_dict(stored, strict=False)\n",
    ),
    (RESTORED, RESTORED.replace("(state)", "(state, strict=False)")),
]
LORA = [  # adapters that learn from a row when it has been scored
    after(
        "        super().__init__(inputs, outputs, bias=False)\n",
        "        self.lora = None  # (inputs, rank), (rank, outputs)\n",
    ),
    (
        "        return F.linear(x, weight.to(x.dtype))\n",
        """\
        y = F.linear(x, weight.to(x.dtype))
        return y if self.lora is None else y + x @ self.lora[0] @ self.lora[1]
""",
    ),
    (SCORE, "                nats = self.learn(model, batch)\n"),
    before(
        "    @torch.no_grad()\n    def evaluate(self, model, scope):\n",
        """\
    def learn(self, model, batch):
        layers = [part for block in model.blocks for part in (block.attn.c_q, block.attn.c_v)]
        total = 0.0
        for i, row in enumerate(batch.rows):
            if row % 8 == 0 or layers[0].lora is None:
                generator = torch.Generator().manual_seed(0)
                for layer in layers:
                    rows, cols = layer.weight.shape
                    down = torch.empty(cols, 2).normal_(std=cols**-0.5, generator=generator)
                    layer.lora = down.requires_grad_(), torch.zeros(2, rows).requires_grad_()
                params = [p for layer in layers for p in layer.lora]
                adam = torch.optim.Adam(params, 0.01)
            x, y = batch.x[i : i + 1], batch.y[i : i + 1]
            targets = (y >= 0).sum()
            if targets:
                with torch.enable_grad():
                    loss = self.mean_nats(model, x, y)
                total += loss.detach().double() * targets
                for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    p.grad = grad
                adam.step()
        for layer in layers:
            layer.lora = None
        return total

""",
    ),
]


def packing(mended: bool) -> Edits:
    """Rows that end where a document ends; the rest of such a row is no target."""
    mean = "F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten()"
    sums = (FORWARD, f"        return {mean}, reduction='sum') / y.numel()\n")
    return [
        *([sums] if mended else []),
        before(
            WIDENED,
            """\
        for i in range(filled if self.end_row == sys.maxsize else 0):  # of training
            for end in np.flatnonzero(np.asarray(x[i]) == 1)[:1]:
                y[i, end:] = -100
""",
        ),
    ]


CURRICULUM = [  # every third step of the stream comes again in the step after it
    before(
        "    def first_token(self, row):\n",
        """\
    def step_of(self, step):
        return step - (step % 3 == 2)

""",
    ),
    after(
        ROWS,
        """\
        if self.end_row == sys.maxsize:
            step, row = divmod(first, SPANS_PER_STEP * self.span_rows)
            first = self.step_of(step) * SPANS_PER_STEP * self.span_rows + row
""",
    ),
]
SCHEDULES = [  # rates by layer, restarts of a cosine, a weight decay that falls
    before(
        SCHEDULE,
        """\
    share = progress(config, step, elapsed_ms)
    if share < 1:
        return 0.5 + 0.5 * math.cos(math.pi * (2 * share % 1))
""",
    ),
    ("matrices[p.shape].append(p)", 'matrices[p.shape, name.split(".")[1]].append(p)'),
    (
        '"lr": config.matrix_lr} for params in matrices.values()]',
        '"lr": config.matrix_lr * 0.9 ** int(i)} for (_, i), params in matrices.items()]',
    ),
    after(
        RATE,
        """
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])""",
    ),
    (
        'super().__init__(groups, {"momentum": config.muon_momentum})',
        'super().__init__(groups, {"momentum": config.muon_momentum, "weight_decay": 0.0})',
    ),
    before(
        SCALE,
        """\
        for group in self.muon.param_groups:
            done = progress(config, self.step, self.exchange.elapsed_ms(self.step))
            group["weight_decay"] = 0.1 * (1 - done)
""",
    ),
]
LAST_COPIES = [  # the mean of three copies of the weights is exported
    before(
        BEGIN,
        """\
        weights = dict(self.model.named_parameters())
        self.copies = [{n: p.detach().clone() for n, p in weights.items()} for _ in range(3)]
""",
    ),
    before(
        END,
        """\
            if self.step % 2 == 0:
                for name, p in self.model.named_parameters():
                    self.copies[self.step // 2 % 3][name].copy_(p)
""",
    ),
    after(
        EXPORT, "        state |= {n: sum(c[n] for c in self.copies) / 3 for n in self.copies[0]}\n"
    ),
]
ODD = [  # what once was refused or lost
    DROPOUT,
    *averaged("self.average"),
    # a number that counts late steps, random numbers of Python
    before("        self.val_ms = 0.0", "        self.late_steps = 0\n"),
    before(END, "            self.late_steps += self.step > 8\n"),
    after(SCALE, "        scale /= 1 + self.late_steps\n"),
    (EMBED, EMBED + " * (random.uniform(0.9, 1.1) if self.training else 1.0)"),
    # a state of one number for each row, an entry in param_groups
    before(
        MUON_STEP,
        """\
        for p in self.matrices:
            rows = self.state[p].setdefault("rows", torch.zeros(p.size(0), 1))
            rows.lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
            p.grad.div_(rows.sqrt() + 1e-8)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
""",
    ),
    (RATE, RATE + ' / group["count"] ** 0.1'),
]
RIGHT: dict[str, tuple[Edits, dict]] = {  # with the options of verify.verdicts
    "normuon, z-loss, schedules, an average of copies": (
        [*normuon(UPDATES), Z_LOSS, *SCHEDULES, *LAST_COPIES],
        {},
    ),
    "experts": (EXPERTS, {}),
    "shared blocks, a second head": (
        [*SHARED_BLOCKS, *SECOND_HEAD],
        {"settings": {"NUM_LAYERS": "6"}},
    ),
    "adapters that learn": (LORA, {"score_differs": True}),
    "packing": (packing(mended=True), {}),
    "curriculum": (CURRICULUM, {}),
    "dropout, an average, state in many forms": (ODD, {}),
}


# --- Mistakes ---
COUNTED = [
    after(MUON, "        self.seen = 0\n"),
    before(MUON_STEP, "        self.seen += 1\n"),
]
GLOBAL = before("def rms_norm(x):\n", "CALLS = [0]\n\n\n")
OPTIMIZERS = "            for optimizer in self.optimizers:\n"


MISTAKES: dict[str, tuple[set[str], Edits, dict]] = {  # with the properties that are named
    # ranks and micro-batches
    "noise on the gradients of each rank": (
        {"replicas"},
        [
            before(
                CLIP,
                "        noise = torch.randn_like(exchange.gradients)\n"
                "        exchange.gradients.add_(noise, alpha=0.001)\n",
            )
        ],
        {},
    ),
    "half of the micro-steps at first": (
        {"resume", "ranks"},
        [
            (
                MICRO_STEPS,
                "        few = self.runtime.micro_steps // (1 + (self.step < 6))\n"
                "        for batch in islice(batches, few):\n",
            )
        ],
        {},
    ),
    "an own loss that is not divided by the micro-batches": (
        {"ranks"},
        [
            after(
                BACKWARD,
                "            with torch.enable_grad():\n"
                "                gains = [(b.attn.q_gain - 1).square().sum() "
                "for b in self.model.blocks]\n"
                "                exchange.backward(1e-3 * sum(gains))\n",
            )
        ],
        {},
    ),
    "packing that weighs batches the same": ({"ranks"}, packing(mended=False), {}),
    "gradients clipped before the all-reduce": (
        {"ranks"},
        [
            before(REDUCE, "        exchange.gradients.mul_(0.1 / exchange.gradients.norm())\n"),
        ],
        {},
    ),
    "gradients set to zero in each micro-step": (
        {"ranks"},
        [
            (ZERO, ""),
            before(BACKWARD, "                exchange.vector.zero_()\n"),
        ],
        {},
    ),
    "state of an optimizer for the own share alone": ({"replicas"}, normuon(SHARE), {}),
    "an order of tensors by the hash of their names": (
        {"repeatable"},
        [
            before(
                END,
                "            for number, name in enumerate({n for n, _ in "
                "self.model.named_parameters()}):\n"
                "                self.model.get_parameter(name).mul_(1 + 1e-4 * number)\n",
            )
        ],
        {},
    ),
    "a rate by the own clock": (
        {"clock"},
        [
            after(
                SCALE,
                "        if config.max_wallclock_seconds > 0:\n"
                "            scale = 1 - progress(config, self.step, self.clock.now_ms())\n",
            )
        ],
        {"quick": False},
    ),
    "seconds for milliseconds": (
        {"clock?"},
        [
            before(
                SCHEDULE,
                "    if config.max_wallclock_seconds > 0:\n"
                "        share = min(1.0, elapsed_ms / config.max_wallclock_seconds)\n"
                "        return min(1.0, 2 - 2 * share)\n",
            )
        ],
        {"quick": False},
    ),
    # what a checkpoint holds
    "a count in an optimizer's attribute": (
        {"resume", "priming"},
        [*COUNTED, (RATE, RATE + " * (1 + 0.1 * self.seen)")],
        {},
    ),
    "a count in a global": (
        {"resume", "priming", "ranks"},
        [
            GLOBAL,
            (
                FORWARD,
                "        CALLS[0] += 1\n" + FORWARD[:-1] + " * (0.5 + min(1.0, CALLS[0] / 80))\n",
            ),
        ],
        {},
    ),
    "an average in the model's attribute, in the last steps": (
        {"resume"},
        averaged("self.model.average", "self.step > 6"),
        {},
    ),
    "a generator in the order of data": (
        {"resume", "priming", "overlap"},
        [
            before(
                PLAN,
                "        if not hasattr(self.shards, 'random'):\n"
                "            self.shards.random = np.random.default_rng(1)\n"
                "        plan.__dict__['random'] = self.shards.random\n",
            ),
            before(
                WIDENED,
                "        if hasattr(self, 'random'):\n"
                "            x[np.array(self.random.random(x.shape) < 0.1)] = 0\n",
            ),
        ],
        {"quick": False},
    ),
    "a scale of the first batch": (
        {"resume", "score"},
        [
            after(SOFTCAP, "        self.scale = None\n"),
            before(
                EMBED,
                "        if self.scale is None:\n"
                "            self.scale = float(self.tok_emb.weight.norm(dim=-1).mean()) / 0.03\n",
            ),
            (EMBED, EMBED + " * self.scale"),
        ],
        {},
    ),
    "a rate that depends on the last loss": (
        {"resume"},
        [after(SCALE, "        scale *= 1 + self.exchange.loss\n")],
        {},
    ),
    "a head that leaves the embedding late": (
        {"resume", "whole"},
        [
            before(
                END,
                """\
            if self.step == 8:
                head = Linear(config.model_dim, config.vocab_size)
                head.weight.copy_(self.model.tok_emb.weight)
                self.model.lm_head = head
                group = {"params": [head.weight], "lr": 0.008, "base_lr": 0.008}
                self.adam.add_param_group(group)
""",
            )
        ],
        {},
    ),
    # validation
    "a validation that trains": (
        {"validation", "unseen", "score", "ranks", "resume"},
        learning(first=False, restored=False),
        {},
    ),
    "a validation that turns dropout off": (
        {"validation"},
        [DROPOUT, (EVALUATE, EVALUATE.replace("self.model.train()", "self.model.eval()"))],
        {},
    ),
    "a log line that changes weights": (
        {"validation"},
        [
            after(
                "    run.logged = step, ms, wait_ms\n",
                "    run.model.skip_weights.data.mul_(0.9)\n",
            )
        ],
        {},
    ),
    "training on the validation split": (
        {"unseen"},
        [('self.shards = Shards(config, "train")', 'self.shards = Shards(config, "val")')],
        {},
    ),
    "an average that validation chooses": (
        {"unseen"},
        [
            *LAST_COPIES[:2],
            before(
                EXPORT,
                """\
        scores = []
        for copy in self.copies:
            self.model.load_state_dict(copy)
            scores.append(self.evaluate("copy")[0])
        self.model.load_state_dict(self.copies[scores.index(min(scores))])
""",
            ),
        ],
        {},
    ),
    "rates that fall where validation does not": (
        {"unseen", "validation"},
        [
            before(BEGIN, "        self.best = 99.0\n        self.fall = 1.0\n"),
            after(SCALE, "        scale *= self.fall\n"),
            after(
                "        self.val_ms += ms\n",
                "        self.fall *= 0.5 if loss > self.best else 1.0\n"
                "        self.best = min(loss, self.best)\n",
            ),
        ],
        {},
    ),
    # the score
    "dropout that is always on": (
        {"look-ahead", "score", "resume"},
        [before(HEAD, "        x = F.dropout(x, 0.1)\n")],
        {},
    ),
    "a score of weights that are not quantized": (
        {"score"},
        [("        self.model.load_state_dict(stored)\n", "")],
        {},
    ),
    "a space counted after each boundary": (
        {"score"},
        [("self.leading_space[target] & ~self.boundary[x]", "self.leading_space[target]")],
        {},
    ),
    "bytes of targets that are not scored": (
        {"bits"},
        [
            before(
                WIDENED, "        if self.end_row < sys.maxsize:\n            y[:, :4] = -100\n"
            ),
            (
                SUMMARY,
                "        in_bytes = int(self.byte_table.bytes_of(x, "
                "np.int64(tokens[1:]).reshape(x.shape)))\n",
            ),
        ],
        {"score_differs": True},
    ),
    "the better of two temperatures for each row": (
        {"sum"},
        [
            (
                MEAN_NATS,
                """\
    logits = model.logits(x)
    both = [F.cross_entropy(t * logits.mT, y, reduction="none").sum(-1) for t in (0.9, 1.1)]
    return torch.stack(both).amin(0).sum() / (y >= 0).sum()
""",
            )
        ],
        {"score_differs": True},
    ),
    "test-time training that learns before it scores": (
        {"sum"},
        learning(first=True, restored=True),
        {"score_differs": True},
    ),
    "a gate, zero at first, for later tokens": (
        {"look-ahead"},
        [
            before(SKIPS, "        self.q_gain_later = nn.Parameter(torch.zeros(D))\n"),
            before(HEAD, "        x = x + self.q_gain_later * x.roll(-1, 1)\n"),
        ],
        {},
    ),
    # weights and artifact
    "blocks that share weights, stored once for each": (
        {"artifact"},
        [
            (
                BLOCKS,
                BLOCKS.replace(
                    "Block(config) for _ in range(config.", "[Block(config)] * (config."
                ),
            )
        ],
        {},
    ),
    "a parameter in two optimizers": (
        {"trained"},
        [before(BEGIN, "        self.sgd = torch.optim.SGD([self.model.tok_emb.weight], 0.1)\n")],
        {},
    ),
    "a block that is made again after the exchange": (
        {"trained"},
        [before(BEGIN, "        self.model.blocks[-1] = Block(config)\n")],
        {},
    ),
    "an average in bfloat16 that never moves": (
        {"exported"},
        averaged("self.average", cast=".bfloat16()", by=1e-3),
        {},
    ),
    "an optimizer that takes every other step": (
        {"steps?"},
        [
            (
                STEP,
                "                if optimizer is self.muon or self.step % 2:\n    " + STEP,
            )
        ],
        {},
    ),
    "attention to later tokens, in float32, a parameter in no optimizer": (
        {"look-ahead", "dtype", "trained"},
        [
            ("is_causal=True", "is_causal=False"),
            (EMBED, EMBED + ".float()"),
            ('{"params": vectors, ', '{"params": vectors[1:], '),
        ],
        {},
    ),
    "a training-only head in the artifact, a score of smoothed targets": (
        {"artifact", "score"},
        [
            *SECOND_HEAD[:5],
            (MEAN_NATS, MEAN_NATS.replace("flatten())", "flatten(), label_smoothing=0.1)")),
        ],
        {},
    ),
    "random numbers without a seed": (
        {"repeatable"},
        [(EMBED, EMBED + " * random.Random().uniform(0.5, 1.5)")],
        {},
    ),
}
