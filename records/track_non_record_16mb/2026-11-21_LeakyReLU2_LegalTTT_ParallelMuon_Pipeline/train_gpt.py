"""A parameter-golf record: LeakyReLU^2, legal test-time training, Parallel Muon, overlapped input.

  torchrun --standalone --nproc_per_node=8 train_gpt.py  (eight GPUs; 1, 2, 4: the same order of tokens)
  python train_gpt.py  (one process, GPU or CPU)
  python train_gpt.py --help | --print-config  (the settings, environment variables | their values)

What is not the recipe's own is the repository's train_gpt.py.
"""
import bisect, copy, datetime, faulthandler, io, itertools, json, lzma, math, os, pickle, queue, re, resource, select
import signal, sys, threading, time, uuid, zipfile, zlib
from collections import defaultdict, deque, namedtuple
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter as now

import numpy as np, sentencepiece, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn

# === CONFIG ===
CONTROLS = ("attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,skip_weight,skip_weights,smear,"
	"dtg_gate,ve_layer_scales,ve_shared.scale,attn_gate,vr_lambda")
# Kinds of settings: in words; from text to value, or an error.
def within(low, below=2**63):
	kind = type(low)
	return f"{low:g} <= {kind.__name__} < {below:g}", lambda t: next(n for n in [kind(t)] if low <= n < below)
def word(pattern, means=""): return means or pattern.replace("|", " or "), lambda t: re.fullmatch(pattern, t)[0]
whole, count, share = within(0), within(1), within(0.0, 1.0)
number, rate, positive = within(-1e18), within(0.0), within(1e-6)
name, text = word(r"[.-]*\w[\w.-]*", "letters, digits, '.', '_', '-'"), word(r".*\S.*", "a value")
flag = "0 or 1", {"0": False, "1": True}.__getitem__

@dataclass(frozen=True)
class Config:
	"""README.md has units and meanings."""
	data_path: text = "./data/datasets/fineweb10B_sp1024"
	tokenizer_path: text = "./data/tokenizers/fineweb_1024_bpe.model"
	run_id: name = "random_uuid4"; seed: whole = 1337
	val_batch_size: count = 524_288; val_loss_every: whole = 4000; val_tokens: whole = 0
	val_progress_log_every: whole = 0; train_log_every: whole = 500
	iterations: whole = 20_000; warmdown_iters: whole = 3500; warmup_steps: whole = 20
	train_batch_tokens: count = 786_432; train_seq_len: count = 2048; eval_seq_len: whole = 2048
	max_wallclock_seconds: number = 600.0
	vocab_size: within(1, 65_537) = 1024; num_layers: count = 11; model_dim: count = 512; num_heads: count = 8
	num_kv_heads: count = 4; mlp_mult: positive = 3.0; mlp_fused_form: flag = True; tie_embeddings: flag = True
	rope_base: positive = 10_000.0; rope_dims: whole = 16; logit_softcap: positive = 30.0; qk_gain_init: number = 1.5
	xsa_last_n: whole = 4; ln_scale: flag = True; bigram_vocab_size: whole = 2048; bigram_dim: count = 128
	ve_enabled: flag = True; ve_dim: count = 128; ve_layers: word(r"\d+(,\d+)*", "layers, as 9,10") = "9,10"
	gated_attention: flag = False; value_residual: flag = False; dtg_enabled: flag = False
	embed_lr: rate = 0.6; head_lr: rate = 0.008; tied_embed_lr: rate = 0.035; tied_embed_init_std: rate = 0.005
	matrix_lr: rate = 0.025; muon_momentum: share = 0.99; muon_backend_steps: count = 5; muon_wd: rate = 0.04
	muon_momentum_warmup_start: share = 0.92; muon_momentum_warmup_steps: whole = 1500
	scalar_lr: rate = 0.025; adam_wd: rate = 0.04; beta1: share = 0.9; beta2: share = 0.95; adam_eps: rate = 1e-8
	grad_clip_norm: rate = 0.3; ema_enabled: flag = True; ema_decay: share = 0.997
	swa_enabled: flag = False; swa_every: count = 50
	lawa_enabled: flag = False; lawa_k: count = 10; lawa_freq: count = 100
	qat_enabled: flag = False; late_qat: flag = False; late_qat_threshold: rate = 0.15
	control_tensor_name_patterns: text = CONTROLS
	eval_stride: whole = 64; ttt_enabled: flag = False; ttt_lr: rate = 0.002; ttt_epochs: whole = 3
	ttt_momentum: share = 0.9; ttt_grad_clip: rate = 1.0; ttt_chunk_tokens: count = 32_768
	ttt_batch_seqs: count = 32; ttt_freeze_blocks: whole = 2
	train_prefetch: flag = True; train_prefetch_queue: count = 2; train_copy_stream: flag = True
	val_prefetch: flag = True; val_prefetch_queue: count = 2; val_copy_stream: flag = True
	gpu_prefetch: count = 2; val_resident: flag = False; val_bytecount_device: word("cpu|cuda") = "cpu"
	data_stall_seconds: positive = 60.0
	device: word("auto|cuda|cpu") = "auto"; torch_compile: word("auto|0|1") = "auto"; grad_accum_steps: whole = 0
	attention_backend: word("auto|fa3|cudnn|flash|math") = "auto"
	training_timing_breakdown = trace_steps = 0  # not here
	@classmethod
	def from_environment(cls, env):
		"""(the settings, faults: of a wrong value the default is taken)."""
		values, faults = {"run_id": str(uuid.uuid4())}, []
		for name in filter(env.__contains__, SETTINGS):
			meaning, parse = SETTINGS[name].type
			try: values[name.lower()] = parse(env[name])
			except Exception:  # whatever a wrong text raises
				faults.append(f"{name}={env[name]}: set {meaning}; default is {shown(SETTINGS[name].default)}")
		return cls(**values), faults
	def accumulation(self, W):
		return max(1, SPANS_A_STEP // W) if self.grad_accum_steps in (0, "auto") else self.grad_accum_steps
	def evaluated(self): return replace(self, train_seq_len=self.eval_seq_len or self.train_seq_len)
	def problems(self, W):
		"""Every fault on W ranks, with value and remedy."""
		return [f"{name.upper()}={shown(getattr(self, name))}: {text}" if name else text for name, text in (
			*runtime_faults(self), *shape_faults(self, W), *recipe_faults(self, W), *tokenizer_faults(self),
			*dataset_faults(self.evaluated()))]

def shape_faults(cfg, W):
	"""(a setting, what is wrong, what to do)."""
	heads, T, batch, steps = cfg.num_heads, cfg.train_seq_len, cfg.train_batch_tokens, cfg.accumulation(W)
	rows, unit, need = batch // T, SPANS_A_STEP * T, W * steps * T
	if gap := -cfg.model_dim % (2 * heads): yield "model_dim", f"must divide by 2 x NUM_HEADS: set {cfg.model_dim + gap}"
	if heads % cfg.num_kv_heads:
		yield "num_kv_heads", f"must divide NUM_HEADS={heads}: set {math.gcd(heads, cfg.num_kv_heads)}"
	if gap := -batch % unit: yield "train_batch_tokens", f"must divide by 8 x TRAIN_SEQ_LEN: set {batch + gap}"
	elif batch % need:
		fit = next((f"{n}, or " for n in range(min(steps, rows // W) or 1, rows + 1) if rows % (W * n) == 0), "")
		fit += f"TRAIN_BATCH_TOKENS={math.lcm(unit, need)}"
		yield "grad_accum_steps", f"{W} ranks x {steps} steps must divide {rows} rows: set {fit}"
	if cfg.val_batch_size < need: yield "val_batch_size", f"{W} ranks x {steps} steps, a row each: set at least {need}"
	if cfg.trace_steps and cfg.training_timing_breakdown:
		yield "trace_steps", "nothing overlaps with TRAINING_TIMING_BREAKDOWN=1: set one"
def recipe_faults(cfg, W):
	T, stride, head, last = cfg.train_seq_len, cfg.eval_stride, cfg.model_dim // cfg.num_heads, cfg.num_layers - 1
	if cfg.rope_dims % 2 or cfg.rope_dims > head: yield "rope_dims", f"set an even number up to {head}"
	if cfg.bigram_vocab_size == 1: yield "bigram_vocab_size", "set 0 or 2"
	if cfg.ve_enabled and last < max(map(int, cfg.ve_layers.split(","))):
		yield "ve_layers", f"the last layer is {last}: set {last}, or VE_ENABLED=0"
	if cfg.val_batch_size < W * cfg.accumulation(W) * cfg.evaluated().train_seq_len:
		yield "eval_seq_len", "no row for each rank: raise VAL_BATCH_SIZE"
	if not cfg.ttt_enabled: return
	if T % (stride or T + 1): yield "eval_stride", f"TTT: set a divisor of TRAIN_SEQ_LEN={T}"
	if cfg.ttt_chunk_tokens % T: yield "ttt_chunk_tokens", f"set a multiple of TRAIN_SEQ_LEN={T}"

SETTINGS = {f.name.upper(): f for f in fields(Config)}
FOREIGN = re.compile(r"(GPTQ|CHECKPOINT|TRACE|TRAINING_TIMING|MTP)_\w+|MUON_BETA2|INT8_KEEP_\w+|"
	r"DATA_VERIFY|RESUME")
def shown(value): return f"{value:g}" if isinstance(value, float) else str(value * 1)  # as in the environment
def similar(a, b, slips):
	"""Damerau-Levenshtein distance at most `slips`."""
	if a[:1] == b[:1]: return not a or similar(a[1:], b[1:], slips)
	cuts = [(1, 0), (0, 1), (1, 1)] + [(2, 2)] * (a[:2] == b[1::-1])
	return slips and any(similar(a[i:], b[j:], slips - 1) for i, j in cuts)
def foreign_names(env):
	"""(faults: nearly ours; warnings: other scripts' settings)."""
	faults, others = [], []
	for name in sorted(env.keys() - SETTINGS - {"MODEL_DIR"}):  # common, a letter from ours
		near = (other for slips in range(2 + (len(name) >= 12)) for other in SETTINGS if similar(name, other, slips))
		if re.fullmatch(FOREIGN, name): others.append(name)
		elif best := next(near, ""): faults.append(f"{name}={env[name]}: no such setting: did you mean {best}?")
	return faults, [f"set, but no settings here: {', '.join(others)}"] * bool(others)
def print_help():
	print(__doc__)
	table = "\n".join(f"| `{name}` | - | - |" for name in SETTINGS)
	with suppress(OSError, IndexError):
		table = Path(__file__).with_name("README.md").read_text("utf-8").split("\n## Settings\n")[1]
	for group, name, unit, meaning in re.findall(r"(?m)^### (.+)|^\| `(\w+)` \| (.*?) \| (.*) \|", table):
		default = getattr(Config, name.lower(), "")
		print(f"  {name}={shown(default)}  ({type(default).__name__}, {unit}) {meaning}" if name else f"\n{group}")

# === RUNTIME ===
FIRST_WAIT_S = 300  # for ranks, where they first meet
class RunError(Exception): """A foreseeable failure, in a line: what, where, which value, what to do."""
class Stop(Exception): """Told to stop; others learn it in the next collective."""
class Halt(Exception): """All ranks end after one step: (their signals' sum,) or (0, what is not finite)."""
def first_line(error): return (str(error).strip() or repr(error)).splitlines()[0]
def runtime_faults(cfg):
	"""Of torch, devices; creates no context on one."""
	version, driver = torch.__version__, "present" * os.path.exists("/dev/nvidia0")
	with suppress(OSError): driver = Path("/proc/driver/nvidia/version").read_text()
	if version < "2.6.dev": yield "", f"torch {version}: loads files unsafely: pip install torch==2.13.0"
	if cfg.device != "cpu" and torch.cuda.is_available():
		if int(ranks := os.getenv("LOCAL_WORLD_SIZE", 1)) > (count := torch.cuda.device_count()):
			yield "", f"LOCAL_WORLD_SIZE={ranks}: {count} CUDA devices: set --nproc_per_node={count}"
		return
	if cfg.val_bytecount_device == "cuda": yield "val_bytecount_device", "no CUDA in use: set cpu"
	if cfg.device == "cuda" or driver and cfg.device == "auto":
		yield "device", (f"torch {version} (CUDA {torch.version.cuda}) sees no GPU (driver {first_line(driver or 'none')}, "
			"see CUDA_VISIBLE_DEVICES): fit torch to it, or set DEVICE=cpu")

@dataclass
class Runtime:
	"""This process. Its main thread may sit in a collective: another hears signals, tells all ranks, ends long waits."""
	rank: int = 0
	world_size: int = 1
	stall_seconds: float = 60.0
	device, dtype, store, log = torch.device("cpu"), torch.float32, None, None
	signum = meetings = longest_s = 0  # heard; begun; longest step
	since, place, met = math.inf, "", frozenset()  # a wait for ranks: begun, where; ended, where
	def start(self, cfg, env):
		hears, wakes = os.pipe()
		os.set_blocking(wakes, False)
		signal.set_wakeup_fd(wakes)
		for number in signal.SIGINT, signal.SIGTERM: signal.signal(number, lambda *_: None)
		threading.Thread(target=self._watch, args=[hears], daemon=True).start()
		if cfg.device != "cpu" and torch.cuda.is_available():
			self.device = torch.device("cuda", int(env.get("LOCAL_RANK", 0)))
			torch.cuda.set_device(self.device)
			if torch.cuda.get_device_capability() >= (8, 0): self.dtype = torch.bfloat16
			torch.set_float32_matmul_precision("high")  # TF32 for products in float32
		if "RANK" not in env: return
		store = next(dist.rendezvous("env://", timeout=datetime.timedelta(0, FIRST_WAIT_S)))[0]
		store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # one for all restarts
		with suppress(AttributeError): self.store = dist.PrefixStore("watch", store.clone())  # own connection; torch >= 2.8
		with self.waiting("start"):  # bounds all waits, so the group need not
			dist.init_process_group("nccl" if self.cuda else "gloo", None, datetime.timedelta(1), self.world_size, self.rank,
				store, device_id=self.device if self.cuda else None)
	@property
	def cuda(self): return self.device.type == "cuda"
	@contextmanager
	def waiting(self, place):
		self.place, self.since = place, now()
		yield
		self.since, self.met = math.inf, self.met | {place}
	def all_reduce(self, tensor, place): return self._meet(place, dist.all_reduce, tensor) or tensor  # a sum, in place
	def begin(self, call, *args):
		"""Begins a collective; returns its wait: a synchronisation point, on CUDA of the stream alone."""
		work = self._meet("launch", lambda: call(*args, async_op=True))
		return lambda: self._meet("reduction", work and work.wait)
	def broadcast(self, value):
		"""Rank 0's `value` on every rank. Synchronisation point: start and end of a run."""
		return self._meet("broadcast", dist.broadcast_object_list, box := [value], 0, None, self.device) or box[0]
	def _meet(self, place, call, *args):
		"""Synchronisation point, but for a step's reductions: Control reads the tail."""
		self.meetings += 1
		with self.waiting(place):
			try: result = dist.is_initialized() and call(*args)
			except RuntimeError as error: raise RunError(f"rank {self.rank}: another rank died: {first_line(error)}")
			if place not in ("launch", "reduction"): self.synchronize(place)
		return result
	def synchronize(self, place="device"):
		"""Synchronisation point: when the device has done all it was given."""
		if self.cuda:
			with self.waiting(place): torch.cuda.synchronize()
		return now()
	def _watch(self, hears):
		gone = suppress(AttributeError, RuntimeError)  # no group, or its store is
		while now() - self.since <= self._limit_s():
			heard = os.read(hears, 1)[0] if select.select([hears], [], [], 0.5)[0] else 0
			with gone:
				if heard: self.store.set("signal", str(heard))
				self.store.set(str(self.rank), str(self.meetings))
				heard = self.store.add("signal", 0)
			self.signum = self.signum or heard
		late = []
		with gone: late = [f"rank {r}" for r in range(self.world_size) if self.store.add(str(r), 0) < self.meetings]
		faulthandler.dump_traceback()
		last_words(self.log, 1, "failed", f"rank {self.rank} waited {self._limit_s():.0f} s at the {self.place} for "
			+ (", ".join(late) or "its device"))
		os._exit(1)
	def _limit_s(self):
		if self.signum: return 5 + 2 * self.longest_s  # to leave
		return max(self.stall_seconds + 60, 20 * self.longest_s) if self.place in self.met else FIRST_WAIT_S
	def close(self): dist.is_initialized() and dist.destroy_process_group()

class RunLog:
	"""Rank 0's console, logs/<RUN_ID>.txt, .jsonl; unless resumed, an older log is renamed."""
	def __init__(self, run_id, enabled, resumed=False):
		self.path, self.events = files = Path(f"logs/{run_id}.txt"), Path(f"logs/{run_id}.jsonl")
		self.streams, self.lost, mark = {"stdout": enabled and sys.stdout}, set(), time.time_ns()
		try:
			for path in files * enabled:
				path.parent.mkdir(exist_ok=True)
				if path.exists() and not resumed: path.rename(path.with_suffix(f".{mark}{path.suffix}"))
				self.streams[path] = path.open("a", encoding="utf-8")
		except OSError as error: raise RunError(f"{path}: cannot open the log: {error.strerror}: run where you can write")
	def write(self, text, *names):
		"""A full disk or a closed terminal costs the log, not the run."""
		for name in filter(self.streams.get, names):
			try: print(text, file=self.streams[name], flush=True)
			except OSError as error:
				if name not in self.lost: print(f"warning: {name}: lines are lost: {error}", file=sys.stderr)
				self.lost.add(name)
	def console(self, text): self.write(text, "stdout")
	def line(self, text): self.write(text, self.path, "stdout")
	def event(self, name, **kw): self.write(json.dumps(dict(event=name, time=round(time.time(), 3), **kw)), self.events)
	def say(self, event, template, **fields):
		self.line(template.format(*fields.values()))
		self.event(event, **fields)

def words(fields, digits=2):
	return " ".join(f"{k}:{v:.{digits}f}" if isinstance(v, float) else f"{k}:{v}" for k, v in fields.items())
def write_atomic(path, data):
	temporary = path.with_suffix(f".{os.getpid()}.tmp")
	try:
		with open(temporary, "wb") as file: file.write(data), file.flush(), os.fsync(file.fileno())
		os.replace(temporary, path)
	except OSError as error: raise RunError(f"{path}: cannot write {len(data)} bytes: {error.strerror}: free the disk")
	finally: temporary.unlink(missing_ok=True)

# === INSTRUMENTS ===
def timed_event(): return torch.cuda.Event(enable_timing=True, blocking=True)
def recorded(): return torch.cuda.current_stream().record_event(timed_event())
HOST, DEVICE, COPY = "main thread", "compute stream", "copy stream"  # tracks
@dataclass
class Clock:
	"""Training time in ms; both edges are synchronisation points."""
	rt: Runtime
	total_ms, since, edge = 0.0, math.inf, None
	def now_ms(self): return self.total_ms + 1e3 * max(0.0, now() - self.since)
	def ms_at(self, event): return self.total_ms + max(0.0, self.edge.elapsed_time(event))
	def start(self): self.edge, self.since = self.rt.cuda and recorded(), self.rt.synchronize()
	def stop(self): self.total_ms, self.since = self.rt.synchronize() and self.now_ms(), math.inf

def forecast(rt, log, unit, count, *, pieces=1, cap_s=0.0, compiles=False):
	"""Advanced as pieces of work begin and end; the first (but what compiles) tells how long all take."""
	yield from [None] * 2 * compiles
	start = rt.synchronize()  # a synchronisation point, and the next
	yield
	unit_s = pieces * (rt.synchronize() - start)
	total_s = min(count * unit_s, max(0, cap_s) or math.inf)
	hint = f"; on a CPU try `{QUICKSTART}`" * (total_s > 600 and not rt.cuda)
	log.console(f"({unit}: {unit_s:.3g} s each, {total_s / 60:.1f} min in all{hint})")
	while True: yield

@dataclass
class Spans:
	"""Instruments, off. `with spans("forward"):` marks a phase."""
	cfg: Config = None
	rt: Runtime = None
	log: RunLog = None
	nothing = nullcontext()
	def __call__(self, name, track=DEVICE): return self.nothing
	__post_init__ = instant = handed = step_done = close = lambda *_: None
	@contextmanager
	def phase(self, name, track=DEVICE):
		begin = self.mark(track)
		yield
		self.add(name, track, begin, self.mark(track))
class Unverified:  # no DATA_VERIFY
	on, consumed, settle = False, lambda *_: None, lambda *_, **__: None
def batch_sum(x, y): return (3 * x + y).ravel().cumsum(0).sum()  # by position, int64, wraps

# === DATA ===
SPANS_A_STEP = 8  # of TRAIN_BATCH_TOKENS / 8 + 1 tokens: the challenge's order
HEADER_BYTES, CRC = 1024, 0xFFFFFFFF  # of a shard (a token has 2); of a sum
QUICKSTART = "python3 data/quickstart.py"
def shard_tokens(path):
	"""How many; RunError if it is not whole."""
	try: (magic, version, n, *_), size = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0), stamp(path)[0]
	except OSError as error: raise RunError(f"{path}: {error.strerror}: make it readable")
	if (magic, version, size) == (20240520, 1, whole := HEADER_BYTES + 2 * n) and n > 0: return n
	raise RunError(f"{path}: no whole shard: magic {magic}, version {version} (not 20240520, 1), {size} bytes "
		f"({n} tokens need {whole}): delete it, fetch anew")
def stamp(file): return (found := os.stat(file)).st_size, found.st_mtime_ns
def read_json(path):
	with suppress(OSError, ValueError): return dict(json.loads(path.read_bytes()))
	return {}
def promised(folder, split):
	"""Shards, by the manifest; 0: unknown."""
	try: return sum(d["stats"][f"files_{split}"] for d in read_json(folder / "../../manifest.json")["datasets"]
		if d["name"] == folder.resolve().name)
	except (KeyError, TypeError): return 0
def producing(folder):
	"""What the producer there last said; {}: none."""
	state = read_json(folder / ".producing")
	return {"error": "has died"} | state if time.time() - state.get("time", math.inf) > 30 else state

class Shards:
	"""A split's files by name, an endless stream; a live producer's join in turn."""
	awaited = None
	def __init__(self, folder, split):
		self.folder, self.paths, self.ends, self.stamps = Path(folder), [], [0], []
		self.growing = split == "train" and "error" not in (producing(self.folder) or "error")
		for path in sorted(self.folder.glob(f"fineweb_{split}_*.bin")):
			if not self.growing or path == self.following(): self.add(path)
	@property
	def total(self): return sys.maxsize if self.growing else self.ends[-1]
	def following(self): return self.folder / f"fineweb_train_{len(self.paths):06}.bin"
	def add(self, path):
		self.ends.append(self.ends[-1] + shard_tokens(path))
		self.paths.append(path), self.stamps.append(stamp(path))
	def await_token(self, token, reader):  # until on disk, or the set complete
		moved, done = now(), None
		while self.growing and token >= self.ends[-1] and not reader.closed:
			state, path = producing(self.folder), self.following()
			if path.exists(): self.add(path)
			elif self.paths and (not state or state.get("shards_promised") == len(self.paths)): self.growing = False
			elif not state or "error" in state or now() - moved > reader.rt.stall_seconds:
				raise RunError(f"{path} will not come: its producer {state.get('error', 'stands still')}")
			else:
				if done != (said := state.get("progress")): moved, done = now(), said
				if path != self.awaited: reader.rt.log.say("stall", "waiting for {}: it is being made", shard=str(path))
				self.awaited = path
				time.sleep(0.05)
	def pieces(self, first, count):
		"""A stretch as (epoch, file index, byte offset, bytes)."""
		while count:
			epoch, at = divmod(first, self.total)
			i = bisect.bisect(self.ends, at) - 1
			n = min(count, self.ends[i + 1] - at)
			yield epoch, i, HEADER_BYTES + 2 * (at - self.ends[i]), 2 * n
			first, count = first + n, count - n

def dataset_faults(cfg):
	folder = Path(cfg.data_path)
	for split in "train", "val":
		paths, tokens = sorted(folder.glob(f"fineweb_{split}_*.bin")), 0
		if not (paths or Shards(folder, split).growing):
			yield "data_path", f"no fineweb_{split}_*.bin: {where_else(cfg, 'data_path')}"
		elif split == "val" and len(paths) < (whole := promised(folder, split)):
			yield "data_path", f"{len(paths)} of {whole} val shards: fetch all"
		for path in paths:
			try:
				tokens, ids = tokens + shard_tokens(path), np.memmap(path, "<u2", "r", HEADER_BYTES)
				if (worst := np.r_[ids[:32768], ids[-32768:]].max()) >= cfg.vocab_size:
					yield "vocab_size", f"{path} holds token {worst}: set its tokenizer's, or DATA_PATH"
			except RunError as error: yield "", str(error)
	if tokens and cut_val_tokens(cfg, tokens) == 1:  # of val, the last
		yield "train_seq_len", f"{tokens} val tokens (VAL_TOKENS={cfg.val_tokens}) make no row: set less"
def where_else(cfg, name):
	for parent in Path.cwd().parents:
		if (found := parent / getattr(cfg, name)).exists(): return f"set {name.upper()}={found.resolve()}"
	return f"make: `{QUICKSTART} --prepare-only`; fetch: `python3 data/cached_challenge_fineweb.py --variant sp1024`"
def cut_val_tokens(cfg, total):  # whole rows, and one more to predict
	return (min(total, cfg.val_tokens or total) - 1) // (T := cfg.train_seq_len) * T + 1

class BatchPlan(namedtuple("BatchPlan", "seq_len span_rows first_row stride batch_rows end_row")):
	"""A rank's rows of seq_len + 1 tokens, by arithmetic, never by timing. stride: batch to batch."""
	@classmethod
	def train(cls, cfg, rank, W):  # micro-step k % accumulation of step k // accumulation
		n = (rows := cfg.train_batch_tokens // (T := cfg.train_seq_len)) // (W * cfg.accumulation(W))
		return cls(T, rows // SPANS_A_STEP, rank * n, W * n, n, sys.maxsize)
	@classmethod
	def val(cls, cfg, tokens, rank, W):
		rows = (tokens - 1) // (T := cfg.train_seq_len)
		first, end = rows * rank // W, rows * (rank + 1) // W
		n = min(cfg.val_batch_size // (W * cfg.accumulation(W)) // T, end - first) or 1
		return cls(T, rows, first, n, n, end)
	def num_batches(self): return -((self.first_row - self.end_row) // self.stride)
	def rows(self, k): return range(first := self.first_row + k * self.stride, min(first + self.batch_rows, self.end_row))
	def token(self, row): return row * self.seq_len + row // self.span_rows  # a span's last begins no row
	def tokens(self, rows):
		"""Of a batch: the first, how many."""
		return (first := self.token(rows.start)), self.token(rows.stop - 1) + self.seq_len + 1 - first
	def last_token(self, rows):  # of the step: every rank waits for it
		return self.token(rows.start // (n := SPANS_A_STEP * self.span_rows) * n + n) - 1
	def segments(self, rows):
		"""(row, end, token) in the batch, cut by spans."""
		first, n = rows.start, self.span_rows
		cuts = [first, *range(first - first % n + n, rows.stop, n), rows.stop]
		return [(a - first, b - first, self.token(a) - self.token(first)) for a, b in zip(cuts, cuts[1:])]
def data_crc(plan, rows, tokens):
	"""The rows' crc32, begun with their numbers, summed: the same for any ranks."""
	T, n, data, first = plan.seq_len, plan.span_rows, memoryview(tokens), plan.token(rows.start)
	return sum(zlib.crc32(data[(at := row * T + row // n - first):at + T + 1], row) for row in rows) & CRC
def widen(tokens, x, y, segments):
	"""uint16 -> int64 x, y (rows, T); numpy or tensors. Spare rows: no targets (-100)."""
	T = x.shape[1]
	for row, end, begin in segments:
		part = tokens[begin:begin + (end - row) * T + 1]
		x[row:end], y[row:end] = part[:-1].reshape(-1, T), part[1:].reshape(-1, T)
	if end < len(y): x[end:], y[end:] = 0, -100

class Overlap(namedtuple("Overlap", "queue copy_stream device_slots resident words")):
	"""A split's settings, less what is ruled out. queue, device_slots: 0: no prefetch, no CUDA."""
	@classmethod
	def of(cls, cfg, split, cuda):
		off, no_cuda = "(timing_breakdown)" * cfg.training_timing_breakdown, "(no_cuda)" * (not cuda)
		early, apart, depth = (getattr(cfg, split + name) for name in ("_prefetch", "_copy_stream", "_prefetch_queue"))
		gone, keep = off or no_cuda, split == "val" and cfg.val_resident
		on, stream, stay = early and not off, apart and not gone, keep and not gone
		slots, on_demand = cuda * (on * cfg.gpu_prefetch or 1), "(prefetch_off)" * (not on)
		words = f"prefetch:{on}{off * early} copy_stream:{stream}{gone * apart} prefetch_queue:{on * depth}{on_demand}"
		if split == "val": words = (f"overlap:{on or stream} {words} bytecount_device:{cfg.val_bytecount_device} "
			f"resident:{stay:d}{gone * keep}")
		words += f" gpu_prefetch:{slots}{no_cuda or on_demand * (slots != cfg.gpu_prefetch)}"
		return cls(on * depth, stream, slots, stay, words)


class Slot:
	"""A batch: uint16 tokens; where handed out, int64 x and y: whole, as slices cost 50 us, new shapes compile anew."""
	def __init__(self, plan, device, pinned=False):
		self.tokens = torch.empty(plan.token(plan.batch_rows) + 2, dtype=torch.uint16, device=device, pin_memory=pinned)
		self.x, self.y = (torch.zeros(plan.batch_rows, plan.seq_len, dtype=torch.int64, device=device) for _ in "xy")

class HandOut:
	"""The CPU's last stage: host slots; the next call frees them."""
	bytes_copied = wait_ms = copy_ms = 0  # wait_ms: sum(waits_ms)
	def __init__(self): self.pending, self.waits_ms = [], []  # host slots in use
	ask = close = lambda self: None
	def waited(self, ms):
		self.waits_ms.append(ms)
		self.wait_ms += ms
	def submit(self, slot): self.pending.append(slot)
	def recycle(self, block): return self.pending.pop(0)  # if no longer needed; block: once it is
	def hand_out(self): return self.pending[-1]

class DeviceRing(HandOut):
	"""CUDA's last stage: README.md's ring. `ready`: tokens have arrived; `free`: they were read."""
	def __init__(self, plan, overlap, device, spans):
		super().__init__()
		self.spans, self.compute = spans, torch.cuda.current_stream(device)
		self.copy = torch.cuda.Stream(device) if overlap.copy_stream else self.compute
		self.idle, self.full, self.empty = [], [], []
		for _ in range(plan.num_batches() if overlap.resident else overlap.device_slots):
			self.empty.append(slot := Slot(plan, device))
			if overlap.resident: slot.x, slot.y = self.empty[0].x, self.empty[0].y  # of all, in turn
			slot.ready, slot.free = torch.cuda.Event(), self.compute.record_event()  # unrecorded: a wait passes
	def ask(self):  # the compute stream begins to wait
		while self.idle and self.idle[0][1].query():
			asked, fed = self.idle.pop(0)
			self.waited(asked.elapsed_time(fed))
		self.asked = recorded()
	def submit(self, slot):
		if not self.empty: raise RuntimeError("a copy beyond the ring")
		target, n = self.empty.pop(0), slot.size
		with torch.cuda.stream(self.copy):
			self.copy.wait_event(target.free)
			slot.begun.record()
			with self.spans("h2d", COPY): target.tokens[:n].copy_(slot.tokens[:n], non_blocking=True)
			target.ready.record(), slot.copied.record()
		target.segments, target.digest = slot.segments, slot.digest
		self.full.append(target), self.pending.append(slot)
		self.bytes_copied += 2 * n
	def recycle(self, block):
		slot = self.pending[0]
		if block: slot.copied.synchronize()  # synchronisation point: every host slot waits
		if slot.copied.query():
			self.copy_ms += slot.begun.elapsed_time(slot.copied)
			return self.pending.pop(0)
	def hand_out(self):
		self.compute.wait_event((slot := self.full.pop(0)).ready)
		self.idle.append((self.asked, recorded()))
		widen(slot.tokens, slot.x, slot.y, slot.segments)
		slot.free.record(self.compute)
		self.empty.append(slot)
		return slot
	def close(self): self.copy.synchronize()  # synchronisation point: no copy outlives its slots

class Pipeline:
	"""Shards -> reader thread (whose error comes last) -> host slots -> device slots -> x, y."""
	filled = taken = handed = late_copies = bytes_read = closed = read_ms = busy_ms = 0  # _ms: of the reader
	place, where, since = None, "no file", math.inf  # (epoch, shard); in a read since
	def __init__(self, source, name, digest, spans=Spans()):  # source: a run, a validation
		rt, self.shards, self.plan, overlap = source.rt, source.shards, source.plan, source.overlap
		self.name, self.spans, self.digest, self.overlap, self.verify = name, spans, digest, overlap, source.verify.on
		self.who, self.rt, self.end = f"rank {rt.rank}: the {name} reader", rt, self.plan.num_batches()
		slots = self.slots = overlap.device_slots
		self.stage = DeviceRing(self.plan, overlap, rt.device, spans) if slots else HandOut()
		self.host_waits_ms, self.file, self.crossings = [], open(os.devnull), []  # batches in a new shard
		self.free, self.ready = queue.SimpleQueue(), queue.SimpleQueue()  # slots to fill, filled
		for i in range(overlap.queue + max(1, slots)):
			slot = Slot(self.plan, "cpu", rt.cuda)
			slot.host = [*map(np.asarray, (slot.tokens, slot.x, slot.y))]
			if slots: slot.begun, slot.copied = (self.stage.copy.record_event(timed_event()) for _ in "bc")
			(self.free.put if i < overlap.queue else self.stage.pending.append)(slot)
		self.thread = threading.Thread(target=self._read_all, name=f"{name} reader", daemon=True)
		self.thread.start()
	def _read_all(self):
		try:
			for k in range(self.end):
				slot = self.free.get()
				if self.closed: raise Stop
				self._fill(slot, k)
				self.ready.put(slot)
				self.filled += 1
				self._advise(k + 1 + self.overlap.queue)
		except BaseException as error: self.ready.put(error)  # or the consumer hangs
		finally: self.file.close()
	def _fill(self, slot, k):
		rows = (plan := self.plan).rows(k)
		self.shards.await_token(plan.last_token(rows), self)
		start, (first, n) = now(), plan.tokens(rows)
		slot.size, slot.segments, tokens = n, plan.segments(rows), slot.host[0][:n]
		with self.spans("disk_read", self.thread.name):
			out = memoryview(tokens).cast("B")
			for epoch, i, offset, size in self.shards.pieces(first, n):
				if self.place not in (None, (epoch, i)):
					self.spans.instant(("epoch", "shard_boundary")[self.place[0] == epoch], self.thread.name)
					self.crossings.append(k)
				self.place = epoch, i
				self._read(i, offset, out[:size])
				out = out[size:]
		self.bytes_read += 2 * n
		self.read_ms += 1e3 * (now() - start)
		slot.digest = self.digest(plan, rows, tokens)
		if self.verify or not self.slots: widen(*slot.host, slot.segments)
		if self.verify: slot.digest |= int(batch_sum(*slot.host[1:])) << 32
		self.busy_ms += 1e3 * (now() - start)
	def _read(self, i, offset, out):  # EOFError: the file shrank (mapped: a crash)
		(file := self._open(i, offset)).seek(offset)
		while out:
			if not (n := file.readinto(out)): raise EOFError(f"ends at byte {file.tell()}, {len(out)} short")
			out = out[n:]
		if stamp(file.fileno()) != self.shards.stamps[i]: raise EOFError("changed since this run began")
		self.since = math.inf
	def _open(self, i, offset):
		path = str(self.shards.paths[i])
		self.where, self.since = f"{path} at byte {offset}", now()
		if self.file.name != path:
			old, self.file = self.file, open(path, "rb", 0)
			old.close()
		return self.file
	def _advise(self, k):  # has the kernel read batch k ahead
		if k >= self.end or self.shards.growing: return
		with suppress(OSError, AttributeError):  # not on macOS
			for _, i, offset, size in self.shards.pieces(*self.plan.tokens(self.plan.rows(k))):
				os.posix_fadvise(self._open(i, offset).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
		self.since = math.inf
	def _take(self):  # and a slot back: the reader stays within the queue
		stage = self.stage
		while len(stage.pending) >= (self.slots or 1) and (slot := stage.recycle(self.ready.empty())): self.free.put(slot)
		start = now()
		with self.spans("input_wait", HOST): slot = self._await()
		self.taken += 1
		self.host_waits_ms.append(ms := 1e3 * (now() - start))
		if not self.slots: stage.waited(ms)
		stage.submit(slot)
	def _await(self):
		while True:
			with suppress(queue.Empty):
				if isinstance(slot := self.ready.get(timeout=0.2), Slot): return slot
				self.ready.put(slot)
				what = slot if isinstance(slot, RunError) else f"{self.where}: {slot!r}"
				raise RunError(f"{self.who} failed on {what}") from slot
			if self.rt.signum: raise Stop
			if now() - self.since > (limit_s := self.rt.stall_seconds):
				faulthandler.dump_traceback()
				raise RunError(f"{self.who} waits for {self.where} over DATA_STALL_SECONDS={limit_s:g}: use a local disk")
	__iter__ = lambda self: self
	def __next__(self):
		"""int64 x, y (rows, T), valid until the next call (CUDA: GPU_PREFETCH-th); their digest."""
		if self.handed >= self.end: raise StopIteration
		if self.rt.signum: raise Stop
		self.stage.ask()
		if self.taken == self.handed:
			self.late_copies += self.handed > 0 < self.slots
			self._take()
		slot = self.stage.hand_out()
		self.handed += 1
		while self.taken < min(self.filled, self.handed + self.slots - 1): self._take()
		self.spans.handed(self)
		return slot.x, slot.y, slot.digest
	def again(self, spans):  # from its start, all on the device: a slot handed out goes to the end of `full`
		self.spans, self.handed, self.stage.full = spans, 0, self.stage.empty
		return self
	def close(self):  # within a second; a stuck reader is left
		self.closed = True
		self.free.put(None)
		self.thread.join(0.8)
		self.stage.close()

# === MODEL ===
class Linear(nn.Linear):
	"""Float32, cast at use: torch 2.12's autocast keeps the residual stream in float32 (pytorch PR 174824)."""
	def __init__(self, *sizes, zero=False):
		super().__init__(*sizes, bias=False)
		if zero: nn.init.zeros_(self.weight)
	def forward(self, x): return F.linear(x, self.weight.to(x.dtype))
def rms_norm(x): return F.rms_norm(x, x.shape[-1:])
def rotate(x, rotary):
	"""Rotary positions (arXiv:2104.09864), halves of a head paired: x (B, T, heads, d), rotary (2, T, 1, d / 2)."""
	(cos, sin), (left, right) = rotary.to(x.dtype), x.chunk(2, dim=-1)
	return torch.cat((left * cos + right * sin, right * cos - left * sin), dim=-1)
def attend(q, k, v):
	"""Causal attention of (B, T, heads, d), fewer heads in k and v."""
	q, k, v = (t.transpose(1, 2) for t in (q, k, v))
	return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)
def choose_attention(cfg, rt):
	"""From now on attend() runs this: the first whose output and gradients on one batch are those of math in float32."""
	H, KV = cfg.num_heads, cfg.num_kv_heads
	q, k, v, y = (torch.randn(2, min(cfg.train_seq_len, 1024), heads, cfg.model_dim // H, device=rt.device,
		dtype=rt.dtype).requires_grad_() for heads in (H, KV, KV, H))
	def results(backend, dtype=rt.dtype):
		if backend == "fa3": nn.attention.activate_flash_attention_impl("FA3")
		for name in "cudnn", "flash", "mem_efficient", "math":
			getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == backend.replace("fa3", "flash"))
		out = attend(*(t.to(dtype) for t in (q, k, v)))
		return [out, *torch.autograd.grad(out, (q, k, v), y.to(dtype))]
	expected = results("math", torch.float32)
	for backend in cfg.attention_backend.replace("auto", "fa3 cudnn flash math").split():
		try:
			off = torch.stack([(a - b).norm() / b.norm() for a, b in zip(results(backend), expected)]).max().item()
			if off < 0.02: return backend
		except Exception as error: off = first_line(error)  # whatever one raises that is not there
		if backend == "fa3":
			with suppress(AttributeError): nn.attention.restore_flash_attention_impl(_raise_warn=False)  # from torch 2.11 on
	raise RunError(f"ATTENTION_BACKEND={backend} does not work here, or is wrong ({off}): set auto")

class Gate(nn.Linear):
	"""Sigmoid of a linear map, at first of its bias."""
	def __init__(self, fan_in, fan_out, bias):
		super().__init__(fan_in, fan_out)
		nn.init.zeros_(self.weight), nn.init.constant_(self.bias, bias)
	def forward(self, x): return torch.sigmoid(F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))
class Lookup(nn.Module):  # narrow
	def __init__(self, rows, width, fan_out, *, std, scale):
		super().__init__()
		self.embed, self.proj = nn.Embedding(rows, width), Linear(width, fan_out)
		self.scale = nn.Parameter(torch.tensor(scale))
		nn.init.normal_(self.embed.weight, std=std), nn.init.orthogonal_(self.proj.weight)
	def forward(self, ids):
		x = self.proj(self.embed(ids))
		return x * self.scale.to(x.dtype)
def bigram_ids(ids, rows):
	"""A hash of each token (B, T) and the one before it, int32; the first of a row has an id of its own."""
	t = ids.int()
	return F.pad((36313 * t[:, 1:] ^ 27191 * t[:, :-1]) % (rows - 1), (1, 0), value=rows - 1)
def without_own_value(y, v):
	"""XSA: y (B, T, heads, d) less its part along the own value v (B, T, KV heads, d); in float32."""
	own = F.normalize(v.float(), dim=-1).unsqueeze(3)
	y32 = y.float().unflatten(2, (v.size(2), -1))  # neighbouring query heads share a KV head
	return (y32 - (y32 * own).sum(-1, keepdim=True) * own).flatten(2, 3).to(y.dtype)

class Attention(nn.Module):
	"""Causal attention: grouped queries, rms norm on queries and keys, a gain per query head."""
	def __init__(self, cfg, layer):
		super().__init__()
		D, heads = cfg.model_dim, cfg.num_heads
		self.head_dim, self.xsa = D // heads, layer >= cfg.num_layers - cfg.xsa_last_n
		self.q_gain = nn.Parameter(torch.full((heads,), cfg.qk_gain_init))
		self.attn_gate = Gate(D, heads, 4.0) if cfg.gated_attention else None
		self.vr_lambda = nn.Parameter(torch.full((2,), 0.5)) if cfg.value_residual and layer else None
	def heads(self, x): return x.unflatten(-1, (-1, self.head_dim))  # (B, T, heads, head_dim)
	def rotated(self, x, rotary):
		x, width = rms_norm(x), 2 * rotary.size(-1)
		return torch.cat((rotate(x[..., :width], rotary), x[..., width:]), dim=-1)
	def forward(self, x, w, rotary, ve, first_v):
		"""x (B, T, D); ve: added to the values; first_v: layer 0's values. Returns its values too."""
		q, k, v = map(self.heads, (F.linear(x, w.q), F.linear(x, w.k), F.linear(x, w.v) + ve))
		if self.vr_lambda is not None:
			mix = self.vr_lambda.to(v.dtype)
			v = mix[0] * first_v + mix[1] * v
		q = self.rotated(q, rotary) * self.q_gain.to(q.dtype)[:, None]
		y = attend(q, self.rotated(k, rotary), v)
		if self.xsa: y = without_own_value(y, v)
		if self.attn_gate: y = y * self.attn_gate(x).unsqueeze(-1)
		return F.linear(y.flatten(2), w.out), v

class Block(nn.Module):
	"""Attention and the MLP down(leaky(up x)^2), slope 0.5, scaled by channel; the embedding x0 is mixed in."""
	def __init__(self, cfg, layer):
		super().__init__()
		ones, self.fused_form = torch.ones(D := cfg.model_dim), cfg.mlp_fused_form
		self.attn, self.branch_scale = Attention(cfg, layer), (layer + 1) ** -0.5 if cfg.ln_scale else 1.0
		self.attn_scale, self.mlp_scale = (nn.Parameter(ones.clone()) for _ in "am")
		self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))
		self.dtg_gate = Gate(D, 1, 2.0) if cfg.dtg_enabled else None
	def forward(self, x, x0, w, rotary, ve, first_v):
		mix = self.resid_mix.to(x.dtype)
		start = mix[0] * x + mix[1] * x0
		y, v = self.attn(self.branch_scale * rms_norm(start), w, rotary, ve, first_v)
		x = start + self.attn_scale.to(x.dtype) * y
		hidden = F.leaky_relu(F.linear(self.branch_scale * rms_norm(x), w.up), 0.5)
		# One value, rounded once: a product, or, as with autocast, a float32 square.
		hidden = hidden * hidden if self.fused_form else hidden.float().square().to(x.dtype)
		x = x + self.mlp_scale.to(x.dtype) * F.linear(hidden, w.down)
		return start + self.dtg_gate(start.detach()) * (x - start) if self.dtg_gate else x, v

def parameters(module): return sum(p.numel() for p in module.parameters())
def is_table(name): return name.endswith(("tok_emb.weight", ".embed.weight"))
def orthogonal(n, rows, cols): return torch.stack([nn.init.orthogonal_(torch.empty(rows, cols)) for _ in range(n)])
Matrices = namedtuple("Matrices", "q k v out up down")  # one layer's slices of the banks, as activations
class GPT(nn.Module):
	"""All layers' matrices lie in four banks (slices, rows, columns), float32, cast to `dtype` at use; tables
	of embeddings are in `dtype`."""
	def __init__(self, cfg, dtype):
		super().__init__()
		L, D, V, self.cfg, self.dtype = cfg.num_layers, cfg.model_dim, cfg.vocab_size, cfg, dtype
		kv, hidden, self.num_encoder = D // cfg.num_heads * cfg.num_kv_heads, int(cfg.mlp_mult * D), L // 2
		self.ve_layers = [*map(int, cfg.ve_layers.split(","))] * cfg.ve_enabled
		self.tok_emb = nn.Embedding(V, D)
		if cfg.tie_embeddings: nn.init.normal_(self.tok_emb.weight, std=cfg.tied_embed_init_std)
		self.bigram = Lookup(rows, cfg.bigram_dim, D, std=0.0, scale=0.05) if (rows := cfg.bigram_vocab_size) else None
		self.ve_shared = Lookup(V, cfg.ve_dim, kv, std=0.01, scale=0.1) if self.ve_layers else None
		self.ve_layer_scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in self.ve_layers)
		self.smear, self.skip_weights = nn.ParameterDict({"gate": torch.zeros(D)}), nn.Parameter(torch.ones(L // 2, D))
		# First all queries (keys), then outputs (values). Outputs and down-projections start at zero.
		self.qo_bank = nn.Parameter(torch.cat((orthogonal(L, D, D), torch.zeros(L, D, D))))
		self.kv_bank, self.mlp_up_bank = nn.Parameter(orthogonal(2 * L, kv, D)), nn.Parameter(orthogonal(L, hidden, D))
		self.mlp_down_bank = nn.Parameter(torch.zeros(L, D, hidden))
		self.blocks = nn.ModuleList(Block(cfg, i) for i in range(L))
		self.lm_head = None if cfg.tie_embeddings else Linear(D, V, zero=True)
		qat = torch.tensor(float(cfg.qat_enabled)) if cfg.qat_enabled or cfg.late_qat else None
		self.register_buffer("qat", qat, persistent=False)  # 0 or 1: a tensor costs no recompilation
		self.flops = 6 * (sum(map(torch.numel, self.banks())) + V * D + L * cfg.train_seq_len * D)  # a token, with gradients
		for name, p in self.named_parameters():  # all begin as values of `dtype`
			p.data = p.data.to(dtype) if is_table(name) else p.data.to(dtype).float()
	def banks(self): return [self.qo_bank, self.kv_bank, self.mlp_up_bank, self.mlp_down_bank]
	def matrices(self):
		"""Each layer's; unbound at once, so that backward writes each bank's gradient once."""
		L, (qo, kv, up, down) = len(self.blocks), [self.trained(bank).to(self.dtype).unbind() for bank in self.banks()]
		return [Matrices(qo[i], kv[i], kv[L + i], qo[L + i], up[i], down[i]) for i in range(L)]
	def trained(self, bank):
		"""QAT, where something learns: forward sees the export's int6 values, backward the bank (straight-through)."""
		if self.qat is None or not torch.is_grad_enabled(): return bank
		scale = int6_scale((raw := bank.detach()).abs().amax(-1, keepdim=True)).float()
		return bank + self.qat * ((raw / scale).round() * scale - raw)
	def rotary(self, T, device):
		"""cos and sin (2, T, 1, ROPE_DIMS / 2) in float32."""
		dims = self.cfg.rope_dims or self.cfg.model_dim // self.cfg.num_heads
		base = self.cfg.rope_base * max(1.0, T / 1024) ** (dims / max(dims - 2, 1))  # stretched for longer T, in training too
		angle = torch.arange(T, device=device)[:, None, None] * base ** -(torch.arange(0, dims, 2, device=device) / dims)
		return torch.stack((angle.cos(), angle.sin()))
	def hidden(self, ids):
		"""Tokens (B, T) -> (B, T, D), ready for a head."""
		x, skips, first_v, rotary = self.tok_emb(ids), [], None, self.rotary(ids.size(1), ids.device)
		if self.bigram: x = x + self.bigram(bigram_ids(ids, self.cfg.bigram_vocab_size))
		x, g = rms_norm(x), torch.sigmoid(self.smear["gate"].to(x.dtype))
		x = x0 = (1 - g) * x + g * F.pad(x, (0, 0, 1, -1))  # each position mixed with the one before it
		shared = self.ve_shared and self.ve_shared(ids)
		for i, (block, w) in enumerate(zip(self.blocks, self.matrices())):
			if i >= self.num_encoder and skips: x = x + self.skip_weights[i - self.num_encoder].to(x.dtype) * skips.pop()
			ve = self.ve_layer_scales[self.ve_layers.index(i)].to(x.dtype) * shared if i in self.ve_layers else 0
			x, v = block(x, x0, w, rotary, ve, first_v)
			if i == 0: first_v = v
			if i < self.num_encoder: skips.append(x)
		return rms_norm(x)
	def logits(self, x):
		head, cap = (self.lm_head or self.tok_emb).weight, self.cfg.logit_softcap
		return (cap * torch.tanh(F.linear(self.hidden(x), head.to(self.dtype)) / cap)).float().flatten(0, 1)
	def nats(self, x, y):
		"""Of predicting each y from x, both (B, T): float32."""
		return F.cross_entropy(self.logits(x), y.flatten(), reduction="none").view(y.shape)
	def forward(self, x, y): return F.cross_entropy(self.logits(x), y.flatten())  # mean nats

def compiled(log, *functions):
	"""`functions` compiled; eager, with one warning, where that cannot work."""
	if "2.11." in torch.__version__:  # costs 6 ms of 67 there on an H100 (parameter-golf PR 1420)
		os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
	broken = []
	def calling(slow):
		fast = torch.compile(slow, dynamic=False, fullgraph=True)
		def call(*args):
			try:
				if not broken: return fast(*args)
			except (torch._dynamo.exc.TorchDynamoException, ImportError, OSError) as error:
				log.line(f"warning: torch.compile does not work here: {first_line(error)}")
				broken.append(error)
			return slow(*args)
		return call
	return [*map(calling, functions)]

# === OPTIMIZERS ===
def newton_schulz(x, steps, dtype):
	"""(n, rows, cols) -> about the nearest semi-orthogonal, in `dtype` (https://kellerjordan.github.io/posts/muon/)."""
	tall = x.size(-2) > x.size(-1)
	x = (x.mT if tall else x).to(dtype)
	x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
	for _ in range(steps):
		gram = x @ x.mT
		x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
	return x.mT if tall else x
class Flat:
	"""Parameters and gradients of one dtype as views of one vector each: one reduction, which `tail` elements ride."""
	def __init__(self, groups, tail):
		members = sum(groups, [])
		self.values = torch.cat([p.detach().flatten() for p in members])
		self.reduced = self.values.new_zeros(len(self.values) + tail)
		self.grads, self.tail = self.reduced.tensor_split([len(self.values)])
		self.halted = self.values.new_zeros((), dtype=torch.bool)
		def cut(sizes): return zip(self.values.split(sizes), self.grads.split(sizes))  # 1-D (values, gradients)
		for p, (values, grads) in zip(members, cut([p.numel() for p in members])):
			p.data, p.grad = values.view_as(p), grads.view_as(p)
		self.groups = [*cut([sum(p.numel() for p in group) for group in groups])]
	def reduce(self, rt): rt.all_reduce(self.reduced, "reduction")

SCATTER, GATHER = (getattr(dist, new, None) or getattr(dist, old) for new, old in (  # renamed in torch 2.13
	("reduce_scatter_single", "reduce_scatter_tensor"), ("all_gather_single", "all_gather_into_tensor")))
class Shard:
	"""A bank for Muon: slices, padded with zeros to a multiple of the ranks, and this rank's; on CUDA in bfloat16."""
	def __init__(self, bank, cfg, rt):
		self.bank, self.cfg, self.rt, self.wait, share = bank, cfg, rt, list, -(-len(bank) // rt.world_size)
		dtype = (torch.float32, torch.bfloat16)[bank.is_cuda]
		self.padded, self.update = (bank.new_zeros(share * rt.world_size, *bank.shape[1:], dtype=dtype) for _ in "pu")
		self.grad, self.average, bank.grad = *(torch.zeros_like(self.padded[:share]) for _ in "ga"), torch.zeros_like(bank)
	def begin(self, call, out, source):  # a collective; on one rank a copy
		if self.rt.world_size == 1: out.copy_(source)
		else: self.wait = self.rt.begin(call, out, source)
	def scatter(self):
		"""Begins: this rank's slices of the summed gradient."""
		self.padded[:len(self.bank)] = self.bank.grad
		self.begin(SCATTER, self.grad, self.padded)
	def orthogonalize(self, momentum):
		"""This rank's slices of the update; begins: all slices."""
		self.wait()
		self.average.mul_(momentum).add_(self.grad)
		update = self.grad.add(self.average, alpha=momentum)
		self.sent = newton_schulz(update, self.cfg.muon_backend_steps, update.dtype).contiguous()
		self.begin(GATHER, self.update, self.sent)
	def apply(self, lr):
		"""Decays the bank, adds the update times sqrt(max(1, rows / cols))."""
		self.wait()
		scale = max(1.0, self.bank.size(-2) / self.bank.size(-1)) ** 0.5
		self.bank.mul_(1 - lr * self.cfg.muon_wd).add_(self.update[:len(self.bank)], alpha=-lr * scale)

class Optimizers:
	"""Parallel Muon on the banks, the largest first; AdamW on tables, head, and all that is small."""
	def __init__(self, model, cfg, rt, tail):
		self.cfg, self.limit, banks, kinds = cfg, cfg.grad_clip_norm / rt.world_size, model.banks(), defaultdict(list)
		self.muon = [Shard(bank, cfg, rt) for bank in sorted(banks, key=torch.numel, reverse=True)]
		for name, p in model.named_parameters():
			kinds["bank" if "_bank" in name else "table" if is_table(name) else "head" * ("_head" in name)].append(p)
		self.tables = Flat([kinds["table"]], 0)
		self.flat = Flat([kinds[""], *filter(None, [kinds["head"]])], tail)
		rates, groups = (cfg.tied_embed_lr if cfg.tie_embeddings else cfg.embed_lr, cfg.scalar_lr, cfg.head_lr), []
		for (values, grads), lr, decay in zip(self.tables.groups + self.flat.groups, rates, (cfg.adam_wd, cfg.adam_wd, 0)):
			(vector := nn.Parameter(values)).grad = grads
			groups.append(dict(params=[vector], lr=lr, base_lr=lr, weight_decay=decay))
		self.adam = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)
		self.values = [*(bank.data for bank in banks), self.flat.values, self.tables.values]
		self.grads = [*(bank.grad for bank in banks), self.flat.grads, self.tables.grads]
	def zero(self): torch._foreach_zero_(self.grads)
	def clip(self):
		"""Each rank its own gradient, as published: of loss / ranks, so to limit / ranks."""
		if self.limit <= 0: return
		norm = torch.stack([g.float().norm() for g in self.grads]).norm()
		for g in self.grads: g.mul_((self.limit / (norm + 1e-7)).clamp(max=1.0))
	@torch.no_grad()
	def step(self, lr_scale, momentum):
		"""Small gradients are reduced. Scatters run under AdamW and the banks before, a bank's gather under the next's
		Newton-Schulz: it is awaited behind that."""
		lr = self.cfg.matrix_lr * lr_scale
		for shard in self.muon: shard.scatter()
		for group in self.adam.param_groups: group["lr"] = group["base_lr"] * lr_scale
		self.adam.step()
		for before, shard in zip([None, *self.muon], self.muon):
			shard.orthogonalize(momentum)
			if before: before.apply(lr)
		self.muon[-1].apply(lr)
	def state(self): return self.values + [shard.average for shard in self.muon]
	def snapshot(self): return copy.deepcopy((self.state(), self.adam.state_dict()))
	def restore(self, saved):
		for mine, theirs in zip(self.state(), saved[0]): mine.copy_(theirs)
		self.adam.load_state_dict(copy.deepcopy(saved[1]))  # it would change the saved tensors

def floats(tensors): return [t.float().clone() for t in tensors]
class Averages:
	"""Means over the run, float32; LAWA's, else SWA's (of the EMA, if any), else the EMA, become the weights."""
	def __init__(self, cfg, values):
		self.cfg, self.values, self.swa, self.count, self.lawa = cfg, values, [], 0, deque([], cfg.lawa_k)
		self.ema = floats(values) if cfg.ema_enabled else []
	def update(self, step, lr_scale, log):
		c = self.cfg
		for mean, value in zip(self.ema, self.values): mean.lerp_(value.float(), 1 - c.ema_decay)
		if c.swa_enabled and lr_scale < 0.2 and step % c.swa_every == 0:
			if not self.swa: log.line(f"swa:start step:{step}")
			source, self.count = self.ema or self.values, self.count + 1
			self.swa = self.swa or floats(source)
			for mean, value in zip(self.swa, source): mean.lerp_(value.float(), 1 / self.count)
		if c.lawa_enabled and step % c.lawa_freq == 0: self.lawa.append(floats(self.values))
	def apply(self):  # returns what to log
		mean, text = self.ema, "ema:applying EMA weights" * bool(self.ema)
		if self.swa: mean, text = self.swa, f"swa:applying SWA weights n={self.count}"
		if (k := len(self.lawa)) > 1:
			mean, text = [sum(ts) / k for ts in zip(*self.lawa)], f"lawa:applying LAWA averaging k={k}"
		for value, new in zip(self.values, mean): value.copy_(new)
		return text

def named(name, patterns): return any(part in name for part in patterns.split(",") if part)
def lr_multiplier(cfg, step, elapsed_ms):
	"""1, at the end linearly to 0."""
	n, cap_s = cfg.warmdown_iters, cfg.max_wallclock_seconds
	if not n: return 1.0
	if cap_s <= 0: return min(1.0, (cfg.iterations - step) / n)
	return min(1.0, max(0.0, 1e3 * cap_s - elapsed_ms) * max(step, 1) / max(n * elapsed_ms, 1e-9))
def muon_momentum(cfg, step):
	"""Linear up to MUON_MOMENTUM."""
	share = step / n if step < (n := cfg.muon_momentum_warmup_steps) else 1.0
	return (1 - share) * cfg.muon_momentum_warmup_start + share * cfg.muon_momentum

Agreed = namedtuple("Agreed", "elapsed_ms train_loss stop data_crc wait_ms bad")  # wait_ms, bad: of each rank
class Control:
	"""The control vector of README.md; a crc in parts of 11 bits: exact float32 sums."""
	FIELDS = 6  # before those of each rank
	def __init__(self, optimizers, rt):
		self.optimizers, self.rt, self.lag = optimizers, rt, 1 + rt.cuda
		self.ring = torch.zeros(4, 2, len(optimizers.tail), pin_memory=rt.cuda)  # steps, (sent, received)
		self.events = [recorded() for _ in range(4 * rt.cuda)]
	def agree(self, step, loss, *, clock, wait_ms, data_crc):
		"""Sums gradients and tail over the ranks; loss: this rank's share of the mean, a device scalar."""
		(sent, received), rt, mine = self.ring[step % 4], self.rt, self.optimizers
		tail, bad = mine.tail, mine.tail[-rt.world_size:]
		ms = clock.ms_at(self.events[step - 2 & 3]) if clock.edge else clock.now_ms()  # CUDA: the last sum surely there
		sent[:self.FIELDS] = torch.tensor([*(data_crc >> n & 0x7FF for n in (0, 11, 22)), ms * (rt.rank == 0), 0, rt.signum])
		sent[self.FIELDS + rt.rank] = wait_ms
		tail.copy_(sent, non_blocking=True)
		tail[4], bad[rt.rank] = loss, ~torch.isfinite(loss + mine.grads.sum())
		mine.reduce(rt)
		mine.halted |= tail[5] + bad.sum() > 0
		received.copy_(tail, non_blocking=True)
		if rt.cuda: self.events[step % 4].record()
	def read(self, step):
		"""Synchronisation point: the reduction of `step`, two steps ago (logging: just now)."""
		with self.rt.waiting("step"):
			if self.rt.cuda: self.events[step % 4].synchronize()
		low, mid, high, ms, loss, stop, *ranks = self.ring[step % 4][1].tolist()
		crc, W = int(low + 2**11 * mid + 2**22 * high) & CRC, self.rt.world_size
		return Agreed(ms, loss, stop, crc, ranks[:W], ranks[W:])

# === EVALUATION ===
class ByteTable(namedtuple("ByteTable", "base leading_space boundary")):
	"""Of each id, numpy or tensors: UTF-8 bytes less a leading space; has it one? is it control, unknown, unused?"""
	@classmethod
	def load(cls, path):
		"""A SentencePiece .model, or .json {"kind": "byte", "offset": n}: ids below n are controls."""
		if path.endswith(".json"):
			boundary = np.arange(256 + (offset := read_json(Path(path))["offset"])) < offset
			return cls(1 - boundary, 0 * boundary, boundary)
		ids = [*range(len(model := sentencepiece.SentencePieceProcessor(model_file=path)))]
		pieces = [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]
		boundary = np.any([model.is_control(ids), model.is_unknown(ids), model.is_unused(ids)], 0)
		space = np.char.startswith(pieces, " ") & ~boundary
		base = np.where(model.is_byte(ids), 1, [len(piece.encode()) for piece in pieces] - space)
		return cls(base * ~boundary, space, boundary)
	def count(self, previous, target):
		"""Bytes of the ids `target`, each after its `previous`; no leading space after a boundary."""
		return self.base[target].sum() + (self.leading_space[target] & ~self.boundary[previous]).sum()

def tokenizer_faults(cfg):
	path = cfg.tokenizer_path
	try:
		if not os.path.isfile(path): yield "tokenizer_path", f"no such file: {where_else(cfg, 'tokenizer_path')}"
		elif (size := len(ByteTable.load(path).base)) != cfg.vocab_size:
			yield "vocab_size", f"the tokenizer {path} has {size} tokens: set {size}"
	except Exception as error:	# whatever a damaged file raises
		yield "tokenizer_path", f"no SentencePiece .model, no byte .json ({first_line(error)}): set one"
def due(every, step): return every and step % every == 0

class Validation:
	"""Nats from the model; bytes from the tokens, counted once."""
	bytes, resident = 0, None  # the pipeline that keeps its batches
	def __init__(self, cfg, rt, log, verify):
		self.cfg, self.rt, self.log, self.verify, self.shards = cfg, rt, log, verify, Shards(cfg.data_path, "val")
		self.tokens, self.table = cut_val_tokens(cfg, self.shards.total), ByteTable.load(cfg.tokenizer_path)
		self.plan = BatchPlan.val(cfg, self.tokens, rt.rank, rt.world_size)
		self.overlap, self.on_device = Overlap.of(cfg, "val", rt.cuda), cfg.val_bytecount_device == "cuda"
		if self.on_device: self.table = ByteTable(*(torch.tensor(part, device=rt.device) for part in self.table))
	def host_bytes(self, plan, rows, tokens):  # in the reader thread
		return 0 if self.bytes or self.on_device else int(self.table.count(tokens[:-1], tokens[1:]))
	@torch.no_grad()
	def evaluate(self, loss_of, scope, compiles, spans):
		"""(nats a token, bits per byte, ms). Halt: a signal."""
		log, plan, total = self.log, self.plan, self.plan.num_batches()
		sums = torch.zeros(3, dtype=torch.float64, device=self.rt.device)  # nats, bytes, signals
		start, foretell = (told := now()), forecast(self.rt, log, f"{scope}: {total} batches", total, compiles=compiles)
		pipeline = self.resident.again(spans) if self.resident else Pipeline(self, "val", self.host_bytes, spans)
		if self.overlap.resident: self.resident = pipeline
		with suppress(Stop), closing(pipeline), spans("validate"):
			for k, (x, y, digest) in enumerate(pipeline, 1):
				next(foretell)
				n = len(rows := plan.rows(k - 1))
				with spans("forward"): sums[0] += loss_of(x, y).double() * n * plan.seq_len
				sums[1] += self.table.count(x[:n], y[:n]) if self.on_device and not self.bytes else digest & CRC
				self.verify.consumed(pipeline, (x, y, digest), k)
				at = f"{scope} batch {k}/{total}"
				if due(self.cfg.val_progress_log_every, k):  # a synchronisation point
					seen = (rows.stop - plan.first_row) * plan.seq_len
					log.line(f"val_progress:{at} partial_mean_loss:{sums[0].item() / seen:.4f} tokens_seen:{seen}")
				if now() - told > 30: told = log.console(f"({at})") or now()
		sums[2] = self.rt.signum  # then a synchronisation point: the end
		nats, counted, stop = self.rt.all_reduce(sums, re.sub(r"step_\d+", "validation", scope)).tolist()
		if stop: raise Halt(stop)
		self.verify.settle()
		self.bytes = self.bytes or int(counted)
		return nats / (self.tokens - 1), nats / math.log(2) / self.bytes, 1e3 * (now() - start)

SCORE_ROWS = 32  # windows a forward pass
Piece = namedtuple("Piece", "rows counted share")  # a batch: its last `counted` are scored; or: share of a step
def part(rows, rank, W): return rows[len(rows) * rank // W:len(rows) * (rank + 1) // W]
class WindowPlan:
	"""Windows over `targets` predicted tokens, arithmetic like BatchPlan. Row j: seq_len + 1 tokens from token j * stride
	(past the end the stream begins again: nothing there counts). A chunk: the windows whose first scored target lies in
	it, then, except the last, for each epoch the sequences of just its targets."""
	span_rows = sys.maxsize  # no spans
	def __init__(self, cfg, rt, targets, *, seq_len, stride, chunk_tokens=0):
		self.targets, self.seq_len, self.stride, self.rt, size = targets, seq_len, stride, rt, chunk_tokens or targets
		self.windows, begins = range(-(-targets // stride)), range(0, targets, size)
		cuts = [bisect.bisect_left(self.windows, b, key=lambda row: row * stride + self.counted(row)[0]) for b in begins]
		self.chunks = []  # (pieces to score, pieces to train on), in order
		for begin, first, end in zip(begins, cuts, [*cuts[1:], None]):
			sequences = range(begin // stride, (begin + size) // stride if end else 0, seq_len // stride)
			trained = self.trained(sequences, cfg.ttt_batch_seqs) * cfg.ttt_epochs
			self.chunks.append((self.scored(self.windows[first:end]), trained))
		self.pieces = [piece for piece in itertools.chain(*itertools.chain(*self.chunks)) if piece.rows]
		self.batch_rows = max((len(piece.rows) for piece in self.pieces), default=1)
	def scored(self, rows):
		"""Batches of one size, for one graph: the last reaches back."""
		rows = part(rows, self.rt.rank, self.rt.world_size)
		stops = ((begin, min(begin + SCORE_ROWS, rows.stop)) for begin in rows[::SCORE_ROWS])
		return [Piece(range(max(0, stop - SCORE_ROWS), stop), stop - begin, 0.0) for begin, stop in stops]
	def trained(self, rows, size):
		"""Steps of up to `size` sequences a rank. Every rank takes every step, if with nothing, so none waits for ever;
		shares make the gradient the mean over its sequences."""
		W = self.rt.world_size
		parts = [part(rows, r, W) for r in range(W)]
		steps = ([p[i:i + size] for p in parts] for i in range(0, max(map(len, parts)), size))
		return [Piece(mine := step[self.rt.rank], 0, len(mine) / sum(map(len, step))) for step in steps]
	def num_batches(self): return len(self.pieces)
	def rows(self, k): return self.pieces[k].rows
	def token(self, row): return row * self.seq_len  # of a batch's rows, laid out whole
	def tokens(self, rows): return rows[0] * self.stride, (rows[-1] - rows[0]) * self.stride + self.seq_len + 1
	def last_token(self, rows): return 0  # a val split is complete
	def segments(self, rows): return [(i, i + 1, (row - rows[0]) * self.stride) for i, row in enumerate(rows)]
	def counted(self, row):
		"""Positions of a row that are scored: all of the first, else the last `stride`."""
		end = min(self.seq_len, self.targets - row * self.stride)
		return max(end - self.stride, 0) if row else 0, end
	def byte_count(self, table):
		"""The pipeline's digest, asked for in order: bytes of a batch's scored targets."""
		pieces = iter(self.pieces)
		def count(plan, rows, tokens):
			new = rows[len(rows) - next(pieces).counted:]
			cuts = [[(row - rows[0]) * self.stride + edge for edge in self.counted(row)] for row in new]
			return sum(int(table.count(tokens[a:b], tokens[a + 1:b + 1])) for a, b in cuts)
		return count

class Learner:
	"""Test-time training: SGD on scored targets; momentum persists."""
	def __init__(self, run, plan):
		self.run, self.last, c = run, max(len(plan.chunks) - 1, 1), run.cfg
		frozen = tuple(f"blocks.{i}." for i in range(c.ttt_freeze_blocks))  # the banks always learn
		for name, p in run.model.named_parameters(): p.requires_grad_(not name.startswith(frozen))
		self.params = [p for p in run.model.parameters() if p.requires_grad]
		self.sgd = torch.optim.SGD(self.params, lr=c.ttt_lr, momentum=c.ttt_momentum)
		learning = sum(map(torch.numel, self.params))
		run.log.line(f"ttt_sliding:start chunks={len(plan.chunks)} chunk_tokens={c.ttt_chunk_tokens} total_windows="
			f"{len(plan.windows)} stride={c.eval_stride} ttt_lr={c.ttt_lr} ttt_epochs={c.ttt_epochs} freeze_blocks="
			f"{c.ttt_freeze_blocks}\nttt_sliding:params unfrozen={learning} frozen={parameters(run.model) - learning}")
	def step(self, piece, batches, chunk):
		run, c = self.run, self.run.cfg
		run.optimizers.zero()
		with suppress(Stop):  # then all halt behind this chunk
			if piece.rows:
				x, y, _ = handed(batches, piece)
				(run.loss_of(x, y) * piece.share).backward()
		for grads in run.optimizers.grads: run.rt.all_reduce(grads, "reduction")
		if c.ttt_grad_clip > 0: nn.utils.clip_grad_norm_(self.params, c.ttt_grad_clip)
		self.sgd.param_groups[0]["lr"] = c.ttt_lr * 0.5 * (1 + math.cos(math.pi * chunk / self.last))
		self.sgd.step()

def handed(batches, piece):  # without rows to spare
	x, y, digest = next(batches)
	return x[:len(piece.rows)], y[:len(piece.rows)], digest
def score_windows(run, plan, scope, learner=None):
	"""(nats a target, bits per byte, ms). A learner trains on a chunk after all of it is scored: no score comes
	from weights that have seen its target. Halt: a signal came."""
	log, val, last, started = run.log, run.validation, len(plan.chunks) - 1, (told := now())
	sums = torch.zeros(4, dtype=torch.float64, device=run.rt.device)  # nats, bytes, targets, signals
	def eta(): return f"eta:{(now() - started) * (plan.num_batches() / max(batches.handed, 1) - 1):.0f}s"
	(source := copy.copy(val)).plan, source.overlap = plan, val.overlap._replace(resident=False)
	with closing(batches := Pipeline(source, "val", plan.byte_count(val.table))):
		for chunk, (scored, trained) in enumerate(plan.chunks):
			for piece in scored:
				try: x, y, digest = handed(batches, piece)
				except Stop: break
				with torch.no_grad(): nats = run.nats_of(x, y)[-piece.counted:]  # (windows, T)
				cuts = [plan.counted(row) for row in piece.rows[-piece.counted:]]
				for cut in set(cuts):  # equal ones are neighbours
					scores = nats[cuts.index(cut):, slice(*cut)][:cuts.count(cut)]
					sums[0] += scores.sum(dtype=torch.float64)
					sums[2] += scores.numel()
				sums[1] += digest & CRC
				if now() - told > 15: told = log.console(f"({scope} batch {batches.handed}/{plan.num_batches()} {eta()})") or now()
			sums[3] = run.rt.signum
			# Synchronisation point: the means so far, of all ranks; whether all leave.
			nats, size, targets, stop = run.rt.all_reduce(sums.clone(), scope).tolist()
			if stop: raise Halt(stop)
			means = nats / targets, nats / math.log(2) / size
			for piece in trained: learner.step(piece, batches, chunk)
			if learner and (chunk % 10 == 0 or chunk == last):
				log.line(f"  ttt_chunk [{chunk + 1}/{last + 1}] bpb={means[1]:.6f} time={now() - started:.1f}s {eta()}")
	return *means, 1e3 * (now() - started)

# === ARTIFACT ===
SLOTS = {"qo_bank": ("attn.c_q", "attn.proj"), "kv_bank": ("attn.c_k", "attn.c_v"), "mlp_up_bank": ("mlp.fc",),
	"mlp_down_bank": ("mlp.proj",)}
def quantize(t):
	"""Float tensor -> (int8 of its shape, scale): float16 (rows,) for a matrix, else a float32 scalar."""
	t, matrix = t.float(), t.ndim == 2
	clip = t.abs().quantile(0.9999984, 1 if matrix else None, True)
	scale = (clip / 127).clamp(1 / 127) if matrix else torch.where(clip > 0, clip / 127, 1.0)
	q = (t.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
	return q, scale[:, 0].half() if matrix else scale.view(())
def dequantize(q, scale):
	"""Undoes quantize() up to half a scale, float32."""
	return q.float() * scale.float().view(-1, *[1] * (q.ndim - 1))
def saved(thing):
	"""A torch file, as bytes."""
	torch.save(thing, buffer := io.BytesIO())
	return buffer.getvalue()
@contextmanager
def refused(what):
	"""What a damaged or hostile file raises is a RunError."""
	try: yield
	except Exception as error: raise RunError(f"{what}: {first_line(error)}")
def load(data, limit):
	"""What torch.save wrote. Executes nothing; ValueError above `limit` bytes."""
	file = len(data) <= limit and zipfile.ZipFile(io.BytesIO(data))
	if not file or sum(part.file_size for part in file.infolist()) > limit: raise ValueError(f"it has over {limit} bytes")
	if any(b"bytearray" in file.read(part) for part in file.infolist()): raise ValueError("it asks for memory")
	try: return torch.load(io.BytesIO(data), "cpu", weights_only=True)
	except pickle.UnpicklingError: raise ValueError("it holds code")
def int6_scale(clip):
	"""float16 steps of rows. Their floor fits the record under the cap, and ruins short runs."""
	return (clip / 31).clamp(min=1 / 31).half()
def quantize_int6(t):
	"""Matrix -> (int8 codes of -31 .. 31, float16 steps of its rows), of five clips by the one with the least error."""
	least, t = math.inf, t.float()
	for clip in torch.quantile(t.abs(), torch.tensor([0.999, 0.9995, 0.9999, 0.99999, 1.0]), dim=1):
		q = (t / int6_scale(clip).float()[:, None]).round().clamp(-31, 31).to(torch.int8)
		if (error := (t - dequantize(q, int6_scale(clip))).square().mean().item()) < least:
			least, best = error, (q, int6_scale(clip))
	return best
def bank_slices(state):
	"""(bank, names of its matrices in the order of its slots) of each."""
	L = range(len(state["mlp_up_bank"]))
	return [(bank, [f"blocks.{i}.{part}.weight" for part in parts for i in L]) for bank, parts in SLOTS.items()]
def unbanked(state):
	"""A state with matrices by layer, under the challenge's names, in the place of banks."""
	return {name: t for name, t in state.items() if name not in SLOTS} | {
		name: matrix for bank, names in bank_slices(state) for name, matrix in zip(names, state[bank])}
def pack(state, cfg):
	"""The artifact: torch.save of {"w": tensors, "m": how each is stored}, as xz."""
	w, m = {}, {}
	for name, t in unbanked(state).items():
		m[name], real = "passthrough", t.is_floating_point()
		if not real or t.numel() <= 65_536: w[name] = t.half() if real else t
		elif named(name, cfg.control_tensor_name_patterns): w[name] = t.float().clone()
		else:
			kind, encode = ("int6", quantize_int6) if named(name, ".mlp.,.attn.,.proj.") else ("int8", quantize)
			(w[name + ".q"], w[name + ".scale"]), m[name] = encode(t), {"type": kind}
	return lzma.compress(saved({"w": w, "m": m}), preset=6)
def unpack(data, state):
	"""The state in an artifact; RunError unless it fits `state`. Bounded in size and memory."""
	expected, found, limit = unbanked(state), {}, (1 << 20) + sum(8 * t.numel() for t in state.values())
	with refused("the artifact cannot be loaded"):
		raw = (stream := lzma.LZMADecompressor(memlimit=1 << 28)).decompress(data, limit)
		if not stream.eof: raise ValueError(f"it is cut short, or unpacks to over {limit} bytes")
		w = load(raw, limit)["w"]
		for name, t in expected.items():
			found[name] = w[name] if name in w else dequantize(w[name + ".q"], w[name + ".scale"]).to(t.dtype)
			if found[name].shape != t.shape: raise ValueError(f"{name} has the shape {tuple(found[name].shape)}")
		return found | {bank: torch.stack([*map(found.pop, names)]).float() for bank, names in bank_slices(state)}

# === TRAINING ===
class Run:
	"""The model and all that trains it; rank 0's weights on every rank."""
	step = heeded = crc = 0  # steps taken, looked at; their data_crc
	def __init__(self, cfg, rt, log):
		self.cfg, self.rt, self.log, self.clock, self.attention = cfg, rt, log, Clock(rt), choose_attention(cfg, rt)
		torch.manual_seed(cfg.seed)
		self.accumulation = cfg.accumulation(rt.world_size)
		self.model = GPT(cfg, rt.dtype).to(rt.device)
		for p in self.model.parameters(): rt._meet("start", dist.broadcast, p.data, 0)
		self.loss_of, self.nats_of = self.model, self.model.nats
		self.compiles = cfg.torch_compile in ["1", "auto"][:1 + rt.cuda]
		if self.compiles: self.loss_of, self.nats_of = compiled(log, self.loss_of, self.nats_of)
		self.optimizers = Optimizers(self.model, cfg, rt, tail=Control.FIELDS + 2 * rt.world_size)
		self.control, self.averages = Control(self.optimizers.flat, rt), Averages(cfg, self.optimizers.values)
		self.shards = Shards(cfg.data_path, "train")
		self.overlap, self.plan = Overlap.of(cfg, "train", rt.cuda), BatchPlan.train(cfg, rt.rank, rt.world_size)
		self.verify, self.qat, self.history = Unverified(), cfg.qat_enabled, []  # (step, val_loss, val_bpb, ms) validated
		self.validation = Validation(cfg.evaluated(), rt, log, self.verify)
		self.partial = " partial_val:1" * bool(cfg.val_tokens)
		self.hardware = torch.cuda.get_device_name() if rt.cuda else os.uname().machine
	def heed(self, step):
		"""Halt at the first step before `step` that was not taken. All ranks ask alike."""
		while self.heeded < step:
			said = self.control.read(self.heeded)
			if said.stop or any(said.bad): self.step = self.heeded
			if any(said.bad): raise Halt(0, f"rank {said.bad.index(1)}: step {self.step + 1}: loss or gradient not finite: "
				"lower the learning rates")
			if said.stop: raise Halt(said.stop)
			self.heeded, self.crc = self.heeded + 1, said.data_crc
	def late_qat(self, step, lr_scale):
		if self.qat or not self.cfg.late_qat or lr_scale >= self.cfg.late_qat_threshold: return
		self.qat = bool(self.model.qat.fill_(1.0))
		self.log.line(f"late_qat:enabled step:{step} scale:{lr_scale:.4f}")
	def batches(self, spans=Spans()): return Pipeline(self, "train", data_crc, spans)

def train_step(run, batches, step, elapsed_ms, crc, foretell):
	"""elapsed_ms: agreed; crc: this rank's data_crc, returned."""
	optimizers, loss_share, started = run.optimizers, 0.0, now()
	optimizers.zero()
	with suppress(Stop):  # then all leave the step out
		for _ in range(run.accumulation):
			next(foretell)
			x, y, digest = next(batches)
			loss = run.loss_of(x, y) / (run.accumulation * run.rt.world_size)
			loss.backward()
			loss_share += loss.detach()
			crc = crc + digest & CRC
			next(foretell)
	optimizers.clip()
	run.rt.all_reduce(optimizers.tables.grads, "reduction")  # what is small; the banks' runs under the optimizers
	run.control.agree(step, loss_share, clock=run.clock, wait_ms=batches.stage.wait_ms, data_crc=crc)
	optimizers.step(lr_multiplier(run.cfg, step, elapsed_ms), muon_momentum(run.cfg, step))
	run.rt.longest_s = max(run.rt.longest_s, now() - started)
	return crc
def warm_up(run, foretell):
	"""Priming steps, off the clock, rolled back."""
	saved, count, first, run.heeded = run.optimizers.snapshot(), run.cfg.warmup_steps, (run.step, run.step, run.crc), 0
	try:
		with closing(run.batches()) as batches:
			for step in range(count):
				train_step(run, batches, step, 0.0, 0, foretell)
				run.heed(step + 1)
				run.log.line(f"warmup_step:{step + 1}/{count}")
	finally:
		run.optimizers.restore(saved)
		run.step, run.heeded, run.crc = first
def validate(run, step, spans):
	run.clock.stop()
	run.heed(step)
	val, ms = run.validation, run.clock.total_ms
	loss, bpb, val_ms = val.evaluate(run.loss_of, f"step_{step}", run.compiles, spans)
	run.log.say("validation", "step:{0}/{1} val_loss:{2:.4f} val_bpb:{3:.4f} train_time:{4:.0f}ms step_avg:{5:.2f}ms"
		+ run.partial + "\nval_stage_time_ms:{6:.0f}ms step:{0}/{1}", step=step, iterations=run.cfg.iterations, val_loss=loss,
		val_bpb=bpb, train_time_ms=ms, step_avg_ms=ms / max(step, 1), val_ms=val_ms, val_tokens=val.tokens - 1,
		val_bytes=val.bytes)
	run.history.append([step, loss, bpb, val_ms])
	run.clock.start()
# Dense bfloat16, NVIDIA's data sheets; the last that fits counts.
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "NVL": 835, "H100 PCIe": 756, "A100": 312, "4090": 165}

def log_step(run, step):
	"""A training line; rates since the last. Synchronisation point: its time must be true."""
	run.rt.synchronize()
	run.heed(step)
	run.verify.settle()
	c, ms, agreed = run.cfg, run.clock.now_ms(), run.control.read(step - 1)
	mark = step, ms, *agreed.wait_ms
	(steps, since_ms, *waits_ms), run.logged = np.subtract(mark, run.logged), mark
	tok_s = 1e3 * steps * c.train_batch_tokens / since_ms
	left_ms = min((c.iterations - step) * ms / step, (1e3 * max(0, c.max_wallclock_seconds) or math.inf) - ms)
	mfu = {"mfu_percent": tok_s * run.model.flops / run.rt.world_size / peak / 1e10
		for gpu, peak in PEAK_TFLOPS.items() if gpu in run.hardware}
	run.log.say("step", "step:{}/{} train_loss:{:.4f} train_time:{:.0f}ms step_avg:{:.2f}ms tok_s:{:.0f} "
		"input_wait:{:.2f}% data_crc:{} eta:{:.0f}s" + " mfu:{:.1f}%" * len(mfu), step=step, iterations=c.iterations,
		train_loss=agreed.train_loss, train_time_ms=ms, step_avg_ms=ms / step, tok_s=tok_s,
		input_wait_percent=100 * max(waits_ms) / since_ms, data_crc=f"{agreed.data_crc:08x}", eta_s=max(0, left_ms) / 1e3,
		**mfu)

def train(run):
	c, log, clock, step, elapsed_ms, crc = run.cfg, run.log, run.clock, 0, 0.0, 0
	run.logged = run.start = 0, 0.0, *[0.0] * run.rt.world_size  # step, ms, input waits; at the last line
	foretell = forecast(run.rt, log, f"{c.warmup_steps} + {c.iterations} steps", c.warmup_steps + c.iterations,
		pieces=run.accumulation, cap_s=(cap_s := c.max_wallclock_seconds), compiles=run.compiles)
	warm_up(run, foretell)
	with closing(run.batches()) as batches:
		clock.start()
		while True:
			# Synchronisation point, past unless the host runs far ahead.
			run.heed(step - run.control.lag)
			if step >= 2:
				elapsed_ms = run.control.read(step - 2).elapsed_ms * min(1.5, step / max(1, step - 1 - 2 * run.rt.cuda))
			capped = step < c.iterations and 0 < 1e3 * cap_s <= elapsed_ms + elapsed_ms / max(step, 1)
			last = capped or step == c.iterations
			if last or due(c.val_loss_every, step): validate(run, step, batches.spans)
			if last: break
			if step == run.shards.total // (c.train_batch_tokens + SPANS_A_STEP):
				log.line(f"WARNING: step {step + 1} begins a second epoch of {len(run.shards.paths)} shards")
			lr_scale = lr_multiplier(c, step, elapsed_ms)
			run.late_qat(step, lr_scale)
			crc = train_step(run, batches, step, elapsed_ms, crc, foretell)
			run.step = step = step + 1
			run.averages.update(step, lr_scale, log)
			if step <= 10 or due(c.train_log_every, step): log_step(run, step)
		clock.stop()
		if capped: log.line(f"stopping_early: wallclock_cap train_time:{clock.total_ms:.0f}ms step:{step}/{c.iterations}")
		report(run, batches, step)
def waits(run, batches, waits_ms, train_ms):
	n = run.accumulation
	steps = np.reshape(waits_ms[:batches.handed] or [0.0] * n, (-1, n)).sum(1)
	worst = int(steps.argmax())
	return dict(total_ms=steps.sum(), percent=100 * steps.sum() / train_ms, median_ms=np.median(steps),
		p99_ms=np.percentile(steps, 99), max_ms=steps.max(), worst_step=run.start[0] + worst + 1,
		at_shard_boundary=worst in {k // n for k in batches.crossings})
def verdict(percent, hidden, prefetch, needed, delivered, awaited=None):
	"""hidden: %; needed, delivered: MB/s."""
	cost = f"input cost {percent:.2f} % of training: "
	if percent < 0.5 <= hidden: return f"{cost}overlap hides {hidden:.2f} %"
	if percent < 0.5: return cost + "overlap settings do not matter here"
	if not prefetch: return cost + "nothing overlaps: set TRAIN_PREFETCH=1"
	if awaited: return cost + "shards were still being made"
	if delivered > needed: return cost + "stalls: raise TRAIN_PREFETCH_QUEUE"
	return f"reads are the limit: {needed:.3g} MB/s needed, {delivered:.3g} MB/s delivered: move DATA_PATH to a local disk"
def report(run, batches, step):
	"""What the run has cost, its input since resumed; the device is idle."""
	stage, (first, first_ms, *_), total_ms, read = batches.stage, run.start, run.clock.total_ms, batches.bytes_read
	train_ms, tokens = total_ms - first_ms, step * (run.cfg.train_batch_tokens + SPANS_A_STEP)
	stage.ask()
	host, device = (waits(run, batches, ms, train_ms) for ms in (batches.host_waits_ms, stage.waits_ms))
	rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 * (sys.platform != "darwin")  # in bytes there
	peak = [(most() or rss) >> 20 for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)]
	percent = 100 * (step > first) * max(run.control.read(step - 1).wait_ms) / train_ms
	needed, delivered = (read / 1e3 / max(ms, 1e-9) for ms in (train_ms - stage.wait_ms, batches.read_ms))
	moved = dict(read=read, read_gb_s=delivered / 1e3, copied=stage.bytes_copied,
		copy_gb_s=stage.bytes_copied / 1e6 / (stage.copy_ms or 1),
		late_copies_percent=100 * batches.late_copies / (batches.handed or 1))
	seen, val_ms = dict(tokens_seen=tokens, epochs=tokens / run.shards.ends[-1]), sum(row[3] for row in run.history)
	advice = verdict(percent, 100 * (batches.busy_ms + stage.copy_ms) / train_ms - device["percent"], run.overlap.queue,
		needed, delivered, run.shards.awaited)
	run.log.line(f"timing_train_loop_ms:{total_ms:.0f}ms timing_val_total_ms:{val_ms:.0f}ms\n"
		f"host_wait {words(host, 3)}\ndevice_wait {words(device, 3)}\ninput_bytes {words(moved)}\ninput: {advice}\n"
		f"{words(seen, 3)}\npeak memory allocated: {peak[0]} MiB reserved: {peak[1]} MiB")
	run.log.event("input", step=step, train_time_ms=total_ms, val_total_ms=val_ms, host_wait=host, device_wait=device,
		percent_of_slowest_rank=percent, bytes=moved, verdict=advice, **seen, peak_mib=peak)
	run.verify.settle(total=True)
	batches.spans.close()
def artifact(run, code_bytes):
	log, state = run.log, {name: t.cpu().clone() for name, t in run.model.state_dict().items()}
	write_atomic(Path("final_model.pt"), model := saved(state))
	write_atomic(Path("final_model.int6.ptz"), data := pack(state, run.cfg))
	total = len(data) + code_bytes
	log.say("artifact", "Serialized model: {} bytes\nCode size: {} bytes\nSerialized model int6+lzma: {} bytes\n"
		"Total submission size int6+lzma: {} bytes", model_bytes=len(model), code_bytes=code_bytes,
		artifact_bytes=len(data), total_bytes=total)
	if total > 16_000_000: log.line(f"WARNING: {total} bytes, the cap is 16000000")
	return data
def announce(run, label, scored, *exact, words=""):
	"""A score; under the names in `exact` to eight places."""
	lines = "".join(f"\n{name} val_loss:{{1:.8f}} val_bpb:{{2:.8f}}{{5}}" for name in exact)
	run.log.say("score", "{0} val_loss:{1:.4f} val_bpb:{2:.4f}{4} eval_time:{3:.0f}ms{5}" + lines, scope=label,
		val_loss=scored[0], val_bpb=scored[1], eval_ms=scored[2], words=words, partial=run.partial)
def export_and_score(run, code_bytes):
	"""Rank 0 writes the artifact; all decode its very bytes: every score but the first is its."""
	c, log, rt, model, targets = run.cfg, run.log, run.rt, run.model, run.validation.tokens - 1
	eval_len = run.validation.cfg.train_seq_len
	def standard(scope): return run.validation.evaluate(run.loss_of, scope, False, Spans())
	if averaged := run.averages.apply():
		log.line(averaged)
		announce(run, "DIAGNOSTIC post_ema", standard("post_ema"))
	model.qat = None
	data = rt.rank or artifact(run, code_bytes)
	rt.all_reduce(torch.zeros(1, device=rt.device), "export")  # waits longer than broadcast does by now
	data = rt.broadcast(data)
	model.load_state_dict(unpack(data, model.state_dict()))
	announce(run, label := "final_int6_roundtrip", standard(label), f"{label}_exact")
	for stride in dict.fromkeys((c.eval_stride, 64) if c.eval_stride else ()):
		if stride >= eval_len: continue
		label = "final_int6_sliding_window" + "_s64" * (stride != c.eval_stride)
		scored = score_windows(run, WindowPlan(c, rt, targets, seq_len=eval_len, stride=stride), label)
		announce(run, label, scored, f"{label}_exact", "final_int8_zlib_roundtrip_exact", words=f" stride:{stride}")
	if not c.ttt_enabled: return
	plan = WindowPlan(c, rt, targets, seq_len=c.train_seq_len, stride=c.eval_stride, chunk_tokens=c.ttt_chunk_tokens)
	val_loss, val_bpb, ms = scored = score_windows(run, plan, "ttt", Learner(run, plan))
	log.line(f"ttt_sliding:done val_loss={val_loss:.6f} val_bpb={val_bpb:.6f} elapsed={ms / 1e3:.1f}s")
	announce(run, "legal_ttt", scored, "legal_ttt_exact")

# === MAIN ===
def log_header(run, source):
	c, log, rt, val, shards = run.cfg, run.log, run.rt, run.validation, run.shards
	rule, found = "=" * 100, len(shards.paths)
	log.write(f"{source}\n{rule}\nRunning Python {sys.version}\nRunning PyTorch {torch.__version__}\n"
		f"{os.popen('timeout 30 nvidia-smi 2>/dev/null').read()}\n{rule}", log.path)
	def of(names): return " ".join(f"{name}:{getattr(c, name)}" for name in names.split())
	log.line(f"val_bpb:enabled tokenizer_kind={('sentencepiece', 'byte')[c.tokenizer_path.endswith('.json')]} "
		f"tokenizer_path={c.tokenizer_path}\ntrain_loader:dataset:{shards.folder.resolve().name} train_shards:{found}\n"
		f"val_loader:shards pattern={c.data_path}/fineweb_val_*.bin tokens:{val.tokens - 1}{run.partial}\n"
		f"model_params:{parameters(run.model)}\nmtp_num_heads:0 mtp_loss_weight:0.2 mtp_params:0\n"
		f"XSA:last_{c.xsa_last_n} active_layers:{[i for i, block in enumerate(run.model.blocks) if block.attn.xsa]}\n"
		f"world_size:{rt.world_size} grad_accum_steps:{run.accumulation}\nsdp_backends:{run.attention}=True\n"
		f"attention_mode:gqa {of('num_heads num_kv_heads')} attention_backend:{run.attention}\n{of('tie_embeddings')} "
		f"embed_lr:{(c.embed_lr, c.tied_embed_lr)[c.tie_embeddings]} head_lr:{c.head_lr * (not c.tie_embeddings)} "
		f"{of('matrix_lr scalar_lr')}\n{of('train_batch_tokens train_seq_len iterations warmup_steps')} "
		f"max_wallclock_seconds:{c.max_wallclock_seconds:.3f}\n{of('seed')}\ntrain_io:{run.overlap.words}\n"
		f"val_io:{val.overlap.words}")
	if found < (whole := promised(shards.folder, "train")): log.line(f"WARNING: train_shards: {found} of {whole}")
	log.event("config", **vars(c))
	log.event("hardware", device=run.hardware, cpus=os.cpu_count(), torch=torch.__version__, cuda=torch.version.cuda,
		python=sys.version.split()[0], world_size=rt.world_size)
def execute(cfg, rt, env, warnings):
	"""An exit code. A foreseeable failure is one line."""
	end = 1, "failed", ""
	try:
		rt.start(cfg, env)
		cfg = replace(cfg, run_id=rt.broadcast(cfg.run_id))
		log = rt.log = RunLog(cfg.run_id, rt.rank == 0)
		source = Path(__file__).read_text("utf-8")
		log.console(log.path)
		log.event("run", run_id=cfg.run_id, argv=sys.argv)
		log_header(run := Run(cfg, rt, log), source)
		for warning in warnings: log.line(f"warning: {warning}")
		train(run)
		export_and_score(run, len(source.encode()))
		end = 0, "finished", ""
	except Halt as halt:
		signum, *bad = halt.args
		code = 128 + (rt.signum or (signal.SIGINT if signum % signal.SIGTERM else signal.SIGTERM))
		end = (1, "nonfinite", *bad) if bad else (code, "interrupted", f"interrupted after step {run.step}")
		if rt.rank: end = end[0], "", ""
	except torch.OutOfMemoryError:
		n = cfg.train_batch_tokens // rt.world_size // (steps := cfg.accumulation(rt.world_size))
		end = 1, "failed", (f"GRAD_ACCUM_STEPS={steps}: out of memory on rank {rt.rank} at {n} tokens a micro-step, "
			f"{torch.cuda.mem_get_info()[0] >> 20} MiB free: set {2 * steps}")
	except RunError as error: end = 1, "failed", str(error)
	finally:
		last_words(rt.log, *end)
		rt.close()
	return end[0]
def last_words(log, code, status, problem="", hint=""):
	if problem: print(f"train_gpt.py: {problem}", file=sys.stderr)
	if not log: return
	if problem: log.write(f"error: {problem}", log.path)
	log.event("end", status=status, exit_code=code, error=problem)
	log.console(f"{status}: see {log.path}{hint}")
def main():
	env, arguments = os.environ, sys.argv[1:]
	if arguments in (["--help"], ["-h"]): return print_help() or 0
	(cfg, faults), (misspelt, warnings) = Config.from_environment(env), foreign_names(env)
	faults += misspelt + [f"{word}: no such argument: see --help" for word in arguments if word != "--print-config"]
	if arguments and not faults:
		return print(json.dumps({name: dict(value=value, source=("default", "environment")[name.upper() in env])
			for name, value in vars(cfg).items()}, indent=1)) or 0
	rt = Runtime(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), cfg.data_stall_seconds)
	faults += cfg.problems(rt.world_size)
	if torch.__version__ < "2.11.dev": warnings.append(f"torch {torch.__version__}: untried below 2.11")
	if not faults: return execute(cfg, rt, env, warnings)
	if env.get("LOCAL_RANK", "0") == "0":
		print("train_gpt.py: nothing started, wrong settings:", *faults, sep="\n  ", file=sys.stderr)
	return 2
# Python's own exit aborts now and then, in gloo's threads (torch 2.13).
if __name__ == "__main__": os._exit((main(), sys.stdout.flush())[0])
