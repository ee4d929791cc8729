"""Trains a small language model with our attention and with torch's, and compares the loss.

The model has two layers and learns generated text character by character. It trains for 200 steps
in fp32. With each attention, training starts from the same weights and sees the same batches. The
figure also shows how much the loss differs between random seeds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from fa_numba.problem import Problem

from .lab.measure.check import WrongResult
from .lab.measure.series import LABELS, columns
from .lab.measure.timing import attempt
from .lab.measure.workloads import SEED
from .lab.record import Bench, Options, Row, select
from .lab.show import style, tables

try:
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fa_numba.torch import attention
except ImportError:  # pragma: no cover
    torch = None

NAME = "char_model"
NEEDS = ("GPU", "torch")
TAKES = ()
PROTOCOL = "nothing is timed: losses of training in fp32 without TF32"

CONTEXT, BATCH, HEAD_DIM, D_MODEL, LAYERS = 256, 32, 64, 256, 2
STEPS, QUICK_STEPS, EVERY = 200, 20, 5
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
LEARNING_RATE, WARMUP, LARGEST_GRADIENT = 3e-4, 20, 1.0
CHARACTERS = 2**19
# 1 / HELD_OUT of the text is held out. The loss of held-out text is over HELD_OUT batches.
HELD_OUT = 8
# The series with whose losses the losses of the other series are compared.
REFERENCE = "torch-efficient"
OURS = "fa2-simt"
SERIES = (REFERENCE, "torch-unfused", OURS)
# The column "pass" of two losses: of training batches, and of held-out text after the last step.
TRAINING, AFTER = "fwd+bwd", "fwd"


def attention_of(series: str) -> Callable[..., Any]:
    """Return the function that computes causal attention by the given series.

    The function takes q, k and v of shape (batch, heads, context, head_dim), and returns the
    output.
    """
    if series == OURS:
        return lambda q, k, v: attention(q, k, v, causal=True)
    backend = {
        "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "torch-unfused": SDPBackend.MATH,
    }[series]

    def torch_attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return torch_attention


BRACKETS = ("()", "[]", "<>")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: (a + b) % 10,
    "-": lambda a, b: (a - b) % 10,
    "*": lambda a, b: (a * b) % 10,
}
ALPHABET = "\n0123456789=" + "".join(BRACKETS) + "".join(OPERATIONS)


def expression(rng: random.Random, depth: int) -> tuple[str, int]:
    """Return a random expression of digits in nested brackets, and the value modulo 10.

    `depth` is the largest number of nested brackets.
    """
    if depth == 0 or rng.random() < 0.2:
        digit = rng.randrange(10)
        return str(digit), digit
    (left, a), (right, b) = (expression(rng, depth - 1) for _ in range(2))
    sign, pair = rng.choice(tuple(OPERATIONS)), rng.choice(BRACKETS)
    opened, closed = pair[0], pair[1]
    return f"{opened}{left}{sign}{right}{closed}", OPERATIONS[sign](a, b)


def generate(characters: int, seed: int = SEED) -> str:
    """Return random text of the given length, in lines such as "<(3+4)*2>=4".

    A model must learn to close each bracket with a bracket of the same kind, and to compute the
    value of the expression modulo 10.
    """
    rng, lines, length = random.Random(seed), [], 0
    while length < characters:
        left, value = expression(rng, 4)
        lines.append(f"{left}={value}\n")
        length += len(lines[-1])
    return "".join(lines)[:characters]


@dataclass(frozen=True)
class Text:
    """A text as numbers, divided into a part for training and a part for evaluation.

    `training` and `held_out` are arrays with one number per character.
    """

    training: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of(cls, text: str) -> Text:
        """Return a text as numbers. The last part of the text (1 / HELD_OUT) is held out."""
        numbers = np.array([ALPHABET.index(character) for character in text], np.int64)
        last = len(numbers) // HELD_OUT
        return cls(numbers[:-last], numbers[-last:])

    def batches(self, problem: Problem, seed: int, steps: int) -> np.ndarray:
        """Return random pieces of the training text, shape (steps, batch, context + 1).

        The seed decides where the pieces begin.
        """
        rng = np.random.default_rng([SEED, seed])
        size = (steps, problem.batch, 1)
        starts = rng.integers(0, len(self.training) - problem.seqlen_q, size)
        return self.training[starts + np.arange(problem.seqlen_q + 1)]

    def to_evaluate(self, problem: Problem) -> np.ndarray:
        """Return pieces of the held-out text, shape (HELD_OUT, batch, context + 1).

        The pieces begin at equal distances.
        """
        last = len(self.held_out) - problem.seqlen_q - 1
        starts = np.linspace(0, last, HELD_OUT * problem.batch).astype(int)
        starts = starts.reshape(HELD_OUT, problem.batch, 1)
        return self.held_out[starts + np.arange(problem.seqlen_q + 1)]


def setting(context: int, head_dim: int) -> Problem:
    """Return the attention problem of one layer, with D_MODEL / head_dim heads (at least one)."""
    heads = max(1, D_MODEL // head_dim)
    return Problem(BATCH, heads, heads, context, context, head_dim, causal=True)


def weights(problem: Problem, seed: int, device: str) -> dict[str, Any]:
    """Return the initial parameters of the model by name, drawn with the seed.

    Matrices are normal with standard deviation 0.02. Norms are 1. There are no biases.
    """
    D, N = problem.heads_q * problem.head_dim, problem.seqlen_q
    shapes: dict[str, tuple[int, ...]] = {"characters": (len(ALPHABET), D), "places": (N, D)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.norm": (D,),
            f"{layer}.qkv": (3 * D, D),
            f"{layer}.out": (D, D),
            f"{layer}.norm_mlp": (D,),
            f"{layer}.up": (4 * D, D),
            f"{layer}.down": (D, 4 * D),
        }
    shapes |= {"norm": (D,), "head": (len(ALPHABET), D)}
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        w = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=rng)
        found[name] = w.to(device).requires_grad_()
    return found


def logits(w: dict[str, Any], characters: Any, problem: Problem, causal_attention: Callable) -> Any:
    """Return the model's logits (batch, context, alphabet) for characters (batch, context).

    `w` contains the parameters. `causal_attention` computes the attention of a layer from q, k and
    v.
    """
    H, d = problem.heads_q, problem.head_dim
    x = F.embedding(characters, w["characters"]) + w["places"]
    B, N, D = x.shape

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (D,), w[name])

    for layer in range(LAYERS):
        qkv = F.linear(norm(x, f"{layer}.norm"), w[f"{layer}.qkv"])
        q, k, v = qkv.view(B, N, 3, H, d).permute(2, 0, 3, 1, 4)
        heads = causal_attention(q, k, v).transpose(1, 2).reshape(B, N, D)
        x = x + F.linear(heads, w[f"{layer}.out"])
        hidden = F.gelu(F.linear(norm(x, f"{layer}.norm_mlp"), w[f"{layer}.up"]))
        x = x + F.linear(hidden, w[f"{layer}.down"])
    return F.linear(norm(x, "norm"), w["head"])


def _loss(w: dict[str, Any], window: Any, problem: Problem, causal_attention: Callable) -> Any:
    found = logits(w, window[:, :-1], problem, causal_attention)
    return F.cross_entropy(found.flatten(0, 1), window[:, 1:].flatten())


def train(
    series: str, problem: Problem, text: Text, seed: int, steps: int, device: str = "cuda"
) -> tuple[np.ndarray, float]:
    """Train the model from the beginning, with the attention of one series.

    Return the training losses, shape (steps,), and the loss of held-out text after the last step.
    Losses are in nats per character. Raise WrongResult if a loss is not finite.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    causal_attention, w = attention_of(series), weights(problem, seed, device)
    batches = torch.as_tensor(text.batches(problem, seed, steps), device=device)
    optimizer = torch.optim.AdamW(w.values(), lr=LEARNING_RATE)
    losses = []
    for step, window in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
        loss = _loss(w, window, problem, causal_attention)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), LARGEST_GRADIENT)
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        windows = torch.as_tensor(text.to_evaluate(problem), device=device)
        held_out = torch.stack(
            [_loss(w, window, problem, causal_attention) for window in windows]
        ).mean()
    found = torch.stack([*losses, held_out]).double().cpu().numpy()
    if not np.isfinite(found).all():
        raise WrongResult(f"the loss is not finite from step {np.isfinite(found).argmin()} on")
    return found[:-1], float(found[-1])


def measure(options: Options, bench: Bench) -> Iterator[Row]:
    """Train with each series and seed. Yield losses and their differences from REFERENCE."""
    problem, steps = setting(CONTEXT, HEAD_DIM), QUICK_STEPS if options.quick else STEPS
    text = Text.of(generate(CHARACTERS))
    runs = list(itertools.product(QUICK_SEEDS if options.quick else SEEDS, SERIES))
    expected = None
    for seed, series in bench.track(runs, "training"):
        found, failure = attempt(train, series, problem, text, seed, steps)
        common = columns(NAME, series, problem, bench.machine, unit="nat")
        if series == REFERENCE:
            expected = found
        if failure:
            note = f"{place(seed, 0)}; {failure}"
            yield Row(pass_=TRAINING, metric="loss", value=None, note=note, **common)
        else:
            yield from _rows(found, expected, seed, **common)


def _rows(found: Any, expected: Any, seed: int, **common: Any) -> Iterator[Row]:
    """Yield rows with the losses of one training run, and with differences of losses.

    `found` is the result of `train` for this run. `expected` is the result of `train` for the
    series REFERENCE with the same seed. Rows are yielded for the first step, for every EVERY-th
    step and for the held-out text. A difference is the loss in `found` minus the loss in
    `expected`. There are no differences if `expected` is None, or if this run is the run of
    REFERENCE.
    """
    losses, held_out = found
    steps = len(losses)
    kept = [step for step in range(1, steps + 1) if step == 1 or step % EVERY == 0]
    values = [(TRAINING, step, losses[step - 1]) for step in kept] + [(AFTER, steps, held_out)]
    for pass_, step, value in values:
        fields = {"pass_": pass_, "note": place(seed, step), **common}
        yield Row(metric="loss", value=float(value), **fields)
        if expected is None or common["series"] == REFERENCE:
            continue
        other = expected[0][step - 1] if pass_ == TRAINING else expected[1]
        yield Row(metric="loss_difference", value=float(value - other), **fields)


def place(seed: int, step: int) -> str:
    """Return the beginning of a row's note, which names the seed and the step."""
    return f"seed {seed}, step {step:03d}"


def seed_and_step(row: Row) -> tuple[int, int]:
    """Return the seed and the step that a row's note names."""
    seed, step = row.place.removeprefix("seed ").split(", step ")
    return int(seed), int(step)


def curves(rows: Sequence[Row], series: str, metric: str, pass_: str) -> dict[int, list[float]]:
    """Return the values of one series and metric, as {training step: values of all seeds}.

    `pass_` is TRAINING for the losses of training batches, or AFTER for the loss of held-out text.
    """
    found: dict[int, list[float]] = {}
    wanted = select(rows, series=series, metric=metric, pass_=pass_)
    for row in sorted(wanted, key=seed_and_step):
        found.setdefault(seed_and_step(row)[1], []).append(row.number)
    return found


def after(rows: Sequence[Row], series: str, metric: str = "loss") -> list[float]:
    """Return the values of a metric after the last training step, one for each random seed.

    The values are in nats per character. All rows must be of one problem.
    """
    found = curves(rows, series, metric, AFTER)
    return found[max(found)] if found else []


def draw(rows: Sequence[Row]) -> Any:
    """Draw the losses over the training steps. Return None without rows."""
    rows = [row for row in rows if not row.failed]
    if not rows:
        return None
    figure, axes = style.new(1, 2, 4.5)
    left, right = axes[0]
    left.set_title(f"training loss, context {CONTEXT}, d={HEAD_DIM}")
    right.set_title("difference to torch's memory-efficient attention")
    for series in SERIES:
        _band(left, curves(rows, series, "loss", TRAINING), series, lw=_WIDTHS[series])
        signed = curves(rows, series, "loss_difference", TRAINING)
        # A difference of 0 cannot be drawn on a logarithmic axis.
        away = {step: [abs(x) for x in values if x] for step, values in signed.items()}
        _band(right, {step: x for step, x in away.items() if x}, series)
    losses = curves(rows, REFERENCE, "loss", TRAINING)
    spread = {step: max(x) - min(x) for step, x in losses.items() if max(x) > min(x)}
    label = f"{LABELS[REFERENCE]}: spread over seeds"
    style.line(right, spread, color="#444444", ls=":", label=label)
    for ax in axes[0]:
        ax.set(xlabel="training step", xlim=(0, None))
    left.set_ylabel("loss (nats per character)")
    right.set_ylabel("difference (nats per character)")
    right.set_yscale("log" if right.lines else "linear")
    title = "Training a character model"
    about = f"{LAYERS} layers, fp32, batch {BATCH}. Lines: mean over seeds. Bands: all seeds."
    if held := [mean(x) for series in SERIES if (x := after(rows, series))]:
        span = f"{min(held):.2f} to {max(held):.2f}"
        title = f"All attention kernels train to {span} nats per character"
        about = f"Loss of held-out text. {about} Right: the same seed."
    style.legend(figure, list(style.handles(axes).values()), title, 2, about)
    return figure


# Line widths: the line of our series is on top and thinner, so that all lines are visible.
_WIDTHS = {REFERENCE: 4.5, "torch-unfused": 3.0, OURS: 1.4}


def _band(ax: Any, points: dict[int, list[float]], series: str, **look: Any) -> None:
    """Draw the mean over the seeds as a line, and the range from smallest to largest as a band.

    `points` maps a step to the values of all seeds.
    """
    x = sorted(points)
    if x:
        colour = style.COLOURS[series]
        ax.plot(x, [mean(points[n]) for n in x], color=colour, label=LABELS[series], **look)
        low, high = ([f(points[n]) for n in x] for f in (min, max))
        ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)


def table(rows: Sequence[Row]) -> tables.Table | None:
    """Return the table of losses after training, or None without rows."""
    lines = []
    for series in (s for s in SERIES if after(rows, s)):
        losses, away = after(rows, series), after(rows, series, "loss_difference")
        spread = max(losses) - min(losses)
        line = [LABELS[series], str(len(losses)), f"{mean(losses):.4f}", f"{spread:.4f}"]
        lines.append([*line, f"{max(map(abs, away)):.1e}" if away else tables.MISSING])
    header = [
        "attention",
        "seeds",
        "held-out loss, nats per character",
        "largest - smallest loss over the seeds",
    ]
    header.append(f"largest difference from {LABELS[REFERENCE]}, same seed")
    caption = (
        "The table of training losses contains the loss of a character-level transformer after "
        f"{STEPS} training steps in fp32. The character-level transformer has {LAYERS} layers of "
        f"width {D_MODEL}, and is trained with context length {CONTEXT} and batch size {BATCH}."
    )
    return tables.of(caption, header, lines)
