"""Edits of train_gpt.py, as a competitor makes them: right ones, and mistakes that it says nothing
about, or only on two ranks.

Each begins with `== name | what verify.py names | options`. A line of the script that an edit
stands at has a space in front, or - if it leaves; lines that come before it have a <, lines after
it (or in its place) a >. `~a => b` changes a part of a line. `%name` is what several edits have,
`| a => b`: with other words.
"""

Edits = list[tuple[str, str]]  # (text that the script has once, what replaces it)
OPTIONS = {  # of verify.verdicts
    "score differs": {"score_differs": True},
    "all runs": {"quick": False},
    "six layers": {"settings": {"NUM_LAYERS": "6"}},
}


def edits_of(rows: list[str]) -> Edits:
    found: Edits = []
    above = ""
    for row in rows:
        sign, line = row[0], row[1:] + "\n"
        if sign == "%":
            name, *changes = row[1:].split(" | ")
            for old, new in PARTS[name][1]:
                for change in changes:
                    new = new.replace(*change.split(" => "))
                found.append((old, new))
        elif sign == "~":
            old, new = row[1:].split(" => ")
            found.append((old, new))
        elif sign == "<":
            above += line
        elif sign == ">":
            old, new = found.pop()
            found.append((old, new + line))
        else:
            found.append((line, above + line * (sign == " ")))
            above = ""
    return found


def read(text: str) -> dict[str, tuple[set[str], Edits, dict]]:
    """{name: (the properties that are named, the edits, options of verify.verdicts)}"""
    found = {}
    for section in text.split("\n== ")[1:]:
        title, *rows = section.splitlines()
        name, *words = title.split(" | ")
        options = OPTIONS[words.pop()] if words and words[-1] in OPTIONS else {}
        rows = [row for row in rows if row and row[0] != "#"]
        found[name] = {*" ".join(words).split()}, edits_of(rows), options
    return found


PARTS = read("""
== copies
<        weights = dict(self.model.named_parameters())
<        self.copies = [{n: p.detach().clone() for n, p in weights.items()} for _ in range(3)]
         self.begin(step=0, data_crc=0)
<            if self.step % 2 == 0:
<                for name, p in self.model.named_parameters():
<                    self.copies[self.step // 2 % 3][name].copy_(p)
             self.after_step()
== average
<        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
         self.begin(step=0, data_crc=0)
<            if True:
<                for name, p in self.model.named_parameters():
<                    self.average[name].lerp_(p.detach(), 0.1)
             self.after_step()
         state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
>        state |= {n: t.float().clone() for n, t in self.average.items()}
== dropout
<        x = F.dropout(x, 0.1, self.training)
         head = self.tok_emb if self.lm_head is None else self.lm_head
== second head
<        self.second_head = Linear(D, config.vocab_size)
         self.lm_head = None if config.tie_embeddings else Linear(D, config.vocab_size, zero=True)
<        self.hidden = x
         return (self.softcap * torch.tanh(logits / self.softcap)).float()
-        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        loss = F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        second = self.second_head(rms_norm(self.hidden[:, :-1])).float().flatten(0, 1)
>        return loss + 0.2 * F.cross_entropy(second, y[:, 1:].flatten())
~"lm_head.weight"): => "lm_head.weight", "second_head.weight"):
<    adam_groups.append({"params": [model.second_head.weight], "lr": 0.008})
     betas = config.beta1, config.beta2
== packed rows
<        for i in range(filled if self.end_row == sys.maxsize else 0):  # of training
<            for end in np.flatnonzero(np.asarray(x[i]) == 1)[:1]:
<                y[i, end:] = -100
         x[filled:] = 0  # pads a short last batch: another shape would be compiled again
""")
RIGHT = read("""
== normuon, z-loss, schedules, an average of copies
             self.state[p]["momentum_buffer"] = torch.zeros_like(p)
>            self.state[p]["rows"] = torch.zeros(p.size(0), 1)  # of the second moment
             updates = [self.update_of[p] for p in group["params"]]
>            update = updates
>            for p, u in zip(group["params"], update, strict=True):
>                self.state[p]["rows"].lerp_(u.square().mean(-1, keepdim=True), 0.05)
>                y = u / (self.state[p]["rows"].sqrt() + 1e-8)
>                u.copy_(y * u.norm() / (y.norm() + 1e-8))
-        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        logits = self.logits(x).flatten(0, 1)
>        scored = y.flatten() >= 0
>        z = torch.logsumexp(logits, -1).square() * scored
>        return F.cross_entropy(logits, y.flatten()) + 1e-3 * z.sum() / scored.sum()
<    share = progress(config, step, elapsed_ms)
<    if share < 1:
<        return 0.5 + 0.5 * math.cos(math.pi * (2 * share % 1))
     if config.warmdown_iters == 0:
~matrices[p.shape] => matrices[p.shape, name.split(".")[1]]
-    muon_groups = [{"params": params, "lr": config.matrix_lr} for params in matrices.values()]
>    muon_groups = [
>        {"params": params, "lr": config.matrix_lr * 0.9 ** int(i)}
>        for (_, i), params in matrices.items()
>    ]
             rate = group["lr"] * max(1.0, rows / cols) ** 0.5  # as in Keller Jordan's Muon
>            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
~config.muon_momentum} => config.muon_momentum, "weight_decay": 0.0}
<        for group in self.muon.param_groups:
<            done = progress(config, self.step, self.exchange.elapsed_ms(self.step))
<            group["weight_decay"] = 0.1 * (1 - done)
         scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
%copies
         state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
>        state |= {n: sum(c[n] for c in self.copies) / 3 for n in self.copies[0]}
== experts
<class Experts(nn.Module):
<    def __init__(self, config):
<        super().__init__()
<        self.q_gain_router = Linear(config.model_dim, 16)  # trained as the gains are
<        self.experts = nn.ModuleList(MLP(config) for _ in range(16))
<
<    def forward(self, x, scale):
<        shares = F.linear(x.float(), self.q_gain_router.weight).softmax(-1)
<        share, best = shares.max(-1)
<        chosen = F.one_hot(best, 16).to(x.dtype)
<        self.balance = 16 * (chosen.float().mean((0, 1)) * shares.mean((0, 1))).sum()
<        y = torch.stack([expert(x, scale) for expert in self.experts], -1)
<        return (y * (chosen * share[..., None].to(x.dtype))[:, :, None]).sum(-1)
<
<
 class Block(nn.Module):
~self.mlp = MLP(config) => self.mlp = Experts(config)
-        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        loss = F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        return loss + 0.01 * sum(block.mlp.balance for block in self.blocks)
== shared blocks, a second head | six layers
~range(config.num_layers)) => range(3))
~enumerate(self.blocks) => enumerate([*self.blocks, *self.blocks])
~config.num_layers // 2 => 3
%second head
         state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
>        del state["second_head.weight"]
~load_state_dict(stored) => load_state_dict(stored, strict=False)
~state)  # a checkpoint holds the trained weights => state, strict=False)
== adapters that learn | score differs
         super().__init__(inputs, outputs, bias=False)
>        self.lora = None  # (inputs, rank), (rank, outputs)
-        return F.linear(x, weight.to(x.dtype))
>        y = F.linear(x, weight.to(x.dtype))
>        return y if self.lora is None else y + x @ self.lora[0] @ self.lora[1]
~self.mean_nats(model, batch.x, batch.y).double() * targets => self.learn(model, batch)
<    def learn(self, model, batch):
<        layers = [part for block in model.blocks for part in (block.attn.c_q, block.attn.c_v)]
<        total = 0.0
<        for i, row in enumerate(batch.rows):
<            if row % 8 == 0 or layers[0].lora is None:
<                generator = torch.Generator().manual_seed(0)
<                for layer in layers:
<                    rows, cols = layer.weight.shape
<                    down = torch.empty(cols, 2).normal_(std=cols**-0.5, generator=generator)
<                    layer.lora = down.requires_grad_(), torch.zeros(2, rows).requires_grad_()
<                params = [p for layer in layers for p in layer.lora]
<                adam = torch.optim.Adam(params, 0.01)
<            x, y = batch.x[i : i + 1], batch.y[i : i + 1]
<            targets = (y >= 0).sum()
<            if targets:
<                with torch.enable_grad():
<                    loss = self.mean_nats(model, x, y)
<                total += loss.detach().double() * targets
<                for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
<                    p.grad = grad
<                adam.step()
<        for layer in layers:
<            layer.lora = None
<        return total
<
     def score(self, model, batch, sums):
== packing
-        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        logits = self.logits(x).flatten(0, 1)
>        return F.cross_entropy(logits, y.flatten(), reduction="sum") / y.numel()
%packed rows
== curriculum
<    def step_of(self, step):
<        return step - (step % 3 == 2)
<
     def first_token(self, row):
         first = self.first_row + k * self.stride
>        if self.end_row == sys.maxsize:
>            step, row = divmod(first, SPANS_PER_STEP * self.span_rows)
>            first = self.step_of(step) * SPANS_PER_STEP * self.span_rows + row
== dropout, an average, state in many forms
%dropout
%average
<        self.late_steps = 0
         self.val_ms = 0.0  # time of all validations
<            self.late_steps += self.step > 8
             self.after_step()
         scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
>        scale /= 1 + self.late_steps
~x0 = rms_norm(x) => x0 = rms_norm(x) * (random.uniform(0.9, 1.1) if self.training else 1.0)
<        for p in self.matrices:
<            rows = self.state[p].setdefault("rows", torch.zeros(p.size(0), 1))
<            rows.lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
<            p.grad.div_(rows.sqrt() + 1e-8)
<        for group in self.param_groups:
<            group["count"] = group.get("count", 0) + 1
         self.reduced.zero_()
~** 0.5  # as in Keller Jordan's Muon => ** 0.5 / group["count"] ** 0.1
""")
MISTAKES = read("""
# ranks and micro-batches
== noise on the gradients of each rank | replicas
<        noise = torch.randn_like(exchange.gradients)
<        exchange.gradients.add_(noise, alpha=0.001)
         with phase("grad_clip"):
== half of the micro-steps at first | ranks resume
<        few = self.runtime.micro_steps // (1 + (self.step < 6))
-        for batch in islice(batches, self.runtime.micro_steps):
>        for batch in islice(batches, few):
== an own loss that is not divided by the micro-batches | ranks
                 exchange.backward(loss)
>            with torch.enable_grad():
>                gains = [(b.attn.q_gain - 1).square().sum() for b in self.model.blocks]
>                exchange.backward(1e-3 * sum(gains))
== packing that weighs batches the same | ranks
%packed rows
== gradients clipped before the all-reduce | ranks
<        exchange.gradients.mul_(0.1 / exchange.gradients.norm())
         with phase("reduce"):
== gradients set to zero in each micro-step | ranks
-        exchange.vector.zero_()
<                exchange.vector.zero_()
                 exchange.backward(loss)
== state of an optimizer for the own share alone | replicas
             self.state[p]["momentum_buffer"] = torch.zeros_like(p)
>            self.state[p]["rows"] = torch.zeros(p.size(0), 1)  # of the second moment
                 update = self.newton_schulz(nesterov, self.iterations, self.dtype)
>                for p, u in zip(matrices, update, strict=True):
>                    self.state[p]["rows"].lerp_(u.square().mean(-1, keepdim=True), 0.05)
>                    y = u / (self.state[p]["rows"].sqrt() + 1e-8)
>                    u.copy_(y * u.norm() / (y.norm() + 1e-8))
== an order of tensors by the hash of their names | repeatable
<            for number, name in enumerate({n for n, _ in self.model.named_parameters()}):
<                self.model.get_parameter(name).mul_(1 + 1e-4 * number)
             self.after_step()
== a rate by the own clock | clock | all runs
         scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
>        if config.max_wallclock_seconds > 0:
>            scale = 1 - progress(config, self.step, self.clock.now_ms())
== a cap that is looked at every 100 steps | clock | all runs
-                is_late = 0 < 1e3 * config.max_wallclock_seconds < next_ms
>                is_late = 0 < 1e3 * config.max_wallclock_seconds < next_ms and self.step % 100 == 0
== seconds for milliseconds | clock? | all runs
<    if config.max_wallclock_seconds > 0:
<        share = min(1.0, elapsed_ms / config.max_wallclock_seconds)
<        return min(1.0, 2 - 2 * share)
     if config.warmdown_iters == 0:

# what a checkpoint holds
== a count in an optimizer's attribute | priming resume
         self.iterations = config.muon_backend_steps
>        self.seen = 0
<        self.seen += 1
         self.reduced.zero_()
~** 0.5  # as in Keller Jordan's Muon => ** 0.5 * (1 + 0.1 * self.seen)
== a count in a global | priming ranks resume
<CALLS = [0]
<
<
 def rms_norm(x):
<        CALLS[0] += 1
-        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        loss = F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())
>        return loss * (0.5 + min(1.0, CALLS[0] / 80))
== an average in the model's attribute, in the last steps | resume
%average | self.average => self.model.average | True => self.step > 6
== a generator in the order of data | overlap priming resume | all runs
<        if not hasattr(self.shards, 'random'):
<            self.shards.random = np.random.default_rng(1)
<        plan.__dict__['random'] = self.shards.random
         return Pipeline(self.shards, plan, self.overlap, runtime.device, phase=self.phase)
<        if hasattr(self, 'random'):
<            x[np.array(self.random.random(x.shape) < 0.1)] = 0
         x[filled:] = 0  # pads a short last batch: another shape would be compiled again
== a scale of the first batch | resume score
         self.softcap = config.logit_softcap
>        self.scale = None
<        if self.scale is None:
<            self.scale = float(self.tok_emb.weight.norm(dim=-1).mean()) / 0.03
         x = x0 = rms_norm(x)
~x0 = rms_norm(x) => x0 = rms_norm(x) * self.scale
== a rate that depends on the last loss | resume
         scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
>        scale *= 1 + self.exchange.loss
== a head that leaves the embedding late | resume whole
<            if self.step == 8:
<                head = Linear(config.model_dim, config.vocab_size)
<                head.weight.copy_(self.model.tok_emb.weight)
<                self.model.lm_head = head
<                group = {"params": [head.weight], "lr": 0.008, "base_lr": 0.008}
<                self.adam.add_param_group(group)
             self.after_step()

# validation
== a validation that trains | ranks resume score unseen validation
                 nats = self.mean_nats(model, batch.x, batch.y).double() * targets
>                with torch.enable_grad():
>                    grads = torch.autograd.grad(model(batch.x, batch.y), list(model.parameters()))
>                torch._foreach_add_(list(model.parameters()), grads, alpha=-0.1)
== a validation that turns dropout off | validation
%dropout
~self.model.train() => self.model.eval()
== a log line that changes weights | validation
     run.logged = step, ms, wait_ms
>    run.model.skip_weights.data.mul_(0.9)
== training on the validation split | unseen
~Shards(config, "train") => Shards(config, "val")
== an average that validation chooses | unseen
%copies
<        scores = []
<        for copy in self.copies:
<            self.model.load_state_dict(copy)
<            scores.append(self.evaluate("copy")[0])
<        self.model.load_state_dict(self.copies[scores.index(min(scores))])
         state = {name: t.cpu().clone() for name, t in self.model.state_dict().items()}
== rates that fall where validation does not | unseen validation
<        self.best = 99.0
<        self.fall = 1.0
         self.begin(step=0, data_crc=0)
         scale = lr_multiplier(config, self.step, self.exchange.elapsed_ms(self.step))
>        scale *= self.fall
         self.val_ms += ms
>        self.fall *= 0.5 if loss > self.best else 1.0
>        self.best = min(loss, self.best)

# the score
== dropout that is always on | look-ahead resume score
<        x = F.dropout(x, 0.1)
         head = self.tok_emb if self.lm_head is None else self.lm_head
== a score of weights that are not quantized | score
-        self.model.load_state_dict(stored)
== a space counted after each boundary | score
~target] & ~self.boundary[x] => target]
== bytes of targets that are not scored | bits | score differs
<        if self.end_row < sys.maxsize:
<            y[:, :4] = -100
         x[filled:] = 0  # pads a short last batch: another shape would be compiled again
-        in_bytes = 0 if self.device_table else int(self.byte_table.bytes_of(x, y))
>        in_bytes = int(self.byte_table.bytes_of(x, np.int64(tokens[1:]).reshape(x.shape)))
== the better of two temperatures for each row | sum | score differs
-    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
>    logits = model.logits(x)
>    both = [F.cross_entropy(t * logits.mT, y, reduction="none").sum(-1) for t in (0.9, 1.1)]
>    return torch.stack(both).amin(0).sum() / (y >= 0).sum()
== test-time training that learns before it scores | sum | score differs
<                with torch.enable_grad():
<                    grads = torch.autograd.grad(model(batch.x, batch.y), list(model.parameters()))
<                torch._foreach_add_(list(model.parameters()), grads, alpha=-0.1)
                 nats = self.mean_nats(model, batch.x, batch.y).double() * targets
<        saved = [p.detach().clone() for p in self.model.parameters()]
         self.model.eval()
         self.model.train()
>        torch._foreach_copy_([p.detach() for p in self.model.parameters()], saved)
== a gate, zero at first, for later tokens | look-ahead
<        self.q_gain_later = nn.Parameter(torch.zeros(D))
         self.skip_weights = nn.Parameter(torch.ones(config.num_layers // 2, D))
<        x = x + self.q_gain_later * x.roll(-1, 1)
         head = self.tok_emb if self.lm_head is None else self.lm_head

# weights and artifact
== blocks that share weights, stored once for each | artifact
~Block(config) for _ in range(config.num_layers) => [Block(config)] * config.num_layers
== a parameter in two optimizers | trained
<        self.sgd = torch.optim.SGD([self.model.tok_emb.weight], 0.1)
         self.begin(step=0, data_crc=0)
== a block that is made again after the exchange | trained
<        self.model.blocks[-1] = Block(config)
         self.begin(step=0, data_crc=0)
== an average in bfloat16 that never moves | exported
%average | .detach() => .detach().bfloat16() | 0.1 => 0.001
== an optimizer that takes every other step | steps?
<                if optimizer is self.muon or self.step % 2:
-                optimizer.step()
>                    optimizer.step()
== attention to later tokens, in float32, a parameter in no optimizer | dtype look-ahead trained
~is_causal=True => is_causal=False
~x0 = rms_norm(x) => x0 = rms_norm(x).float()
~"params": vectors => "params": vectors[1:]
== a training-only head in the artifact, a score of smoothed targets | artifact score
%second head
-    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())
>    return F.cross_entropy(model.logits(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)
== the size of the compressed script in the log | bytes
-    code_bytes = len(SOURCE)
>    code_bytes = len(zlib.compress(SOURCE, 9))
== random numbers without a seed | repeatable
~x0 = rms_norm(x) => x0 = rms_norm(x) * random.Random().uniform(0.5, 1.5)
""")
