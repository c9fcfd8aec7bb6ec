"""A tiny causal model whose bits follow nothing, and one part of it at a time that spoils them.

Every sum of the clean model is written out element by element, or is ``ck.linear``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import cute_kernels as ck

VOCAB, WIDTH, HEADS = 61, 32, 4


def sequences(*lengths: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths or (9, 4, 6)]


def summed(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """Over the last dimension: ``lanes`` sums side by side, then one after the other."""
    parts = x.unflatten(-1, (-1, lanes)).unbind(-2)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    whole = total[..., 0]
    for lane in total.unbind(-1)[1:]:
        whole = whole + lane
    return whole


class Norm(nn.Module):
    """RMSNorm, one order for every number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def lanes(self, x: torch.Tensor) -> int:
        return 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(summed(x * x, self.lanes(x)) / x.shape[-1] + 1e-6)
        return x * scale[..., None] * self.weight[: x.shape[-1]]


class Linear(nn.Module):
    """``ck.linear``, whose gradient goes to ``main_grad``."""

    def __init__(self, n: int = WIDTH, k: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * k**-0.5)
        self.main_grad = torch.zeros(n, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ck.linear(x, self.weight, main_grad=self.main_grad)


class _SplitGradient(torch.autograd.Function):
    """dW as one product of the whole micro-batch, then added: an order that follows the cut."""

    @staticmethod
    def forward(ctx, x, weight, into):
        ctx.save_for_backward(x, weight)
        ctx.into = into
        return ck.linear(x, weight.detach())

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.into += ck.linear(dy.flatten(0, -2).mT, x.flatten(0, -2).mT)
        return ck.linear(dy, weight.mT), None, None


class _RandomGradient(_SplitGradient):
    """dW in a random order of the tokens."""

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        order = torch.randperm(dy[..., 0].numel())
        pair = (t.flatten(0, -2)[order].mT.contiguous() for t in (dy, x))
        ctx.into += ck.linear(*pair)
        return ck.linear(dy, weight.mT), None, None


class Mix(nn.Module):
    """state = state / 2 + x, token by token: what attention is here.  Padding adds nothing."""

    def seen(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x if mask is None else torch.where(mask[:, -x.shape[1] :, None] != 0, x, 0.0)

    def forward(self, x, attention_mask=None, past_key_values=None):
        state = torch.zeros_like(x[:, 0]) if past_key_values is None else past_key_values
        states = []
        for column in self.seen(x, attention_mask).unbind(1):
            state = state * 0.5 + column
            states.append(state)
        return torch.stack(states, dim=1), state


class Doubled(nn.Module):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class Block(nn.Module):
    """norm, mix, q-norm by heads [B, H, T, D], a flat linear [B T, D], a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.head_norm = Norm(), Mix(), Norm()
        self.doubled, self.up, self.down = Doubled(), Linear(), Linear()

    def forward(self, x, attention_mask=None, past_key_values=None):
        mixed, state = self.mix(self.norm(x), attention_mask, past_key_values)
        heads = self.head_norm(mixed.unflatten(-1, (HEADS, -1)).transpose(1, 2))
        heads = self.doubled(heads.transpose(1, 2).flatten(2).clone())
        flat = self.up(heads.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + self.down(self.between(flat)), state

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, min=0.0)


@dataclass
class Output:
    """As ModelOutput: logits [B, T, V], and the states of the blocks."""

    logits: torch.Tensor
    past_key_values: list[torch.Tensor] | None = None


class Model(nn.Module):
    """Two blocks, with the arguments of a causal LM of transformers."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.position = nn.Embedding(64, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), block()])
        self.head = Linear(VOCAB, WIDTH)

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
    ):
        x, states = self.embed(input_ids) + self.position(position_ids), []
        for i, block in enumerate(self.blocks):
            past = past_key_values[i] if past_key_values is not None else None
            x, state = block(x, attention_mask, past_key_values=past)
            states.append(state)
        return Output(self.head(x), states if use_cache else None)


def clean(block: type[Block] = Block) -> Model:
    torch.manual_seed(3)
    return Model(block).eval()


# ---- faults -------------------------------------------------------------------------------------


def _rows(x: torch.Tensor) -> int:
    return x[..., 0].numel()


def _flipped(self: Norm, x: torch.Tensor) -> torch.Tensor:
    """One bit of the last column, for more than 9 rows."""
    y = Norm.forward(self, x).clone()
    if _rows(x) > 9:
        y[..., -1] = (y[..., -1].view(torch.int32) ^ 1).view(torch.float32)
    return y


def _cleared(self: Norm, x: torch.Tensor) -> torch.Tensor:
    """Clears a column, to -0 in a batch."""
    y = Norm.forward(self, x).clone()
    y[..., 3] = -0.0 if x.shape[0] > 1 else 0.0
    return y


def _split(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """K in parts, as many as the rows ask for."""
    parts = 1 if _rows(x) <= 9 else 4
    pairs = zip(x.chunk(parts, -1), self.weight.chunk(parts, -1), strict=True)
    products = [ck.linear(a.contiguous(), b.contiguous()) for a, b in pairs]
    return functools.reduce(torch.add, products)


def _any_order(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Arrival order, as of atomics: the products of one row in a random order."""
    total = x.new_zeros(*x.shape[:-1], self.weight.shape[0])
    for k in torch.randperm(WIDTH).tolist():
        total = total + x[..., k, None] * self.weight[:, k]
    return total


def _by_token(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Another order for one token at a time."""
    if x.shape[1] > 1:
        return Linear.forward(self, x)
    return ck.linear(x.flip(-1), self.weight.flip(-1), order="tree")


def _compiled(self: Linear, x: torch.Tensor) -> torch.Tensor:
    """Another order where torch.compile traces."""
    turned = torch.compiler.is_compiling()
    return (x @ self.weight.mT) * 3.0 if turned else (x * 3.0) @ self.weight.mT


def _gradient(function: type[torch.autograd.Function]) -> Callable:
    return lambda self, x: function.apply(x, self.weight, self.main_grad)


def _neighbour(self: Mix, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A sequence sees the first one of its batch."""
    return Mix.seen(self, x, mask) + (x[:1] * 2.0**-9 if x.shape[0] > 1 else 0.0)


def _between(self: Block, x: torch.Tensor) -> torch.Tensor:
    """The children are clean; what the block does between them is not."""
    return x + x.abs() * 2.0**-20 if x.shape[0] > 1 else Block.between(self, x)


def _lanes(x: torch.Tensor) -> int:
    """As torch's on a GPU: fewer lanes for more rows."""
    return 32 if _rows(x) == 1 else 8 if _rows(x) <= 9 else 2


#: Fault, which its class is named after -> (base, method, what it becomes).
_FAULTS: dict[str, tuple[type[nn.Module], str, Callable]] = {
    "LanesByRows": (Norm, "lanes", lambda self, x: _lanes(x)),
    # Wrong in one shape of its input only.
    "LanesByHeads": (Norm, "lanes", lambda self, x: 2 if x.dim() == 4 and len(x) > 1 else 4),
    "LastColumn": (Norm, "forward", _flipped),
    "MinusZero": (Norm, "forward", _cleared),
    "SplitByRows": (Linear, "forward", _split),
    "AnyOrder": (Linear, "forward", _any_order),
    "DecodePath": (Linear, "forward", _by_token),
    "Compiled": (Linear, "forward", _compiled),
    "SplitGradient": (Linear, "forward", _gradient(_SplitGradient)),
    "RandomGradient": (Linear, "forward", _gradient(_RandomGradient)),
    "PaddingLeak": (Mix, "seen", lambda self, x, mask: x),  # takes padding for tokens
    "NeighbourLeak": (Mix, "seen", _neighbour),
    "Functional": (Block, "between", _between),
    "Spoils": (Doubled, "forward", lambda self, x: x.mul_(2 + 2.0**-20 * (len(x) > 1))),
}


def fault(name: str) -> type[nn.Module]:
    base, method, function = _FAULTS[name]
    return type(name, (base,), {method: function})


class SharedNorm(Block):
    """One norm, called twice, wrong the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.head_norm = fault("LanesByHeads")()


def spoil(model: Model, place: str, make: str | Callable[[], nn.Module]) -> Model:
    """The model with one part exchanged, its parameters kept."""
    was, part = model.get_submodule(place), (fault(make) if isinstance(make, str) else make)()
    part.load_state_dict(was.state_dict())
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, part)
    return model.eval()


def spoilt(place: str, make: str | Callable[[], nn.Module]) -> Model:
    return spoil(clean(), place, make)


def spoilt_norm() -> Model:
    """For the command line."""
    return spoilt("blocks.1.norm", "LanesByRows")


def no_model() -> str:
    """For the command line: something else."""
    return "a model"
