"""Autograd nodes of mhc: an op and its backward op of one description, and gradients of weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from ..runtime import main_grad as destination
from ..runtime.dispatch import Launches, plan_launches
from ..runtime.torch_ops import define_op, own_result, refuse_double, refuse_vmap
from .config import mappings
from .tensors import Gates, Mapping, Parts

#: Elements of alpha: of pre, post and res.
_ALPHAS = 3
#: First columns of alpha and beta in the parts of both.
_FIRST_COLUMN = {"alpha": 0, "beta": _ALPHAS}
#: Tensor of an op -> the public argument, where that has another name.
_ARGUMENTS = {"h": "H", "post": "H_post", "res": "H_res", "shifted": "H_pre"}


# ---- ops -----------------------------------------------------------------------------------------


def define(schema: str, function: Callable, **options: object) -> Callable:
    """Define an op without vmap; ``function(launch, *args)`` computes it."""
    return define_op(schema, plan=plan_launches(function), vmap=_vmap_refused, **options)


_vmap_refused = refuse_vmap("mhc", "is not supported; leading dimensions do the same")


class Backward(NamedTuple):
    """One run of a backward op; what belongs to a tensor of the op has its name."""

    launch: Launches
    upstream: Sequence[torch.Tensor | None]
    tensors: dict[str, torch.Tensor | None]
    kept: Sequence[torch.Tensor]
    main_grads: dict[str, torch.Tensor | None]
    needs: dict[str, bool]


class Node:
    """A differentiable op and its backward op; a subclass describes both.

        mhc_<name>(tensors, main_grads, options, link) -> results
        mhc_<name>_backward(d_<result>, tensors, kept results, main_grads, options, link, needs)
            -> a gradient of each tensor

    A gradient that is not needed, or that went into a main_grad, is an empty tensor there.
    """

    name: str
    #: The public function, for errors.
    function: str
    #: Schemas of the tensors, the first with a row for each token, and of the other arguments.
    tensors: str
    options: str
    #: Schema of what links the op to others (op.py), and the backward op.
    link = backward_link = ""
    #: Names of the tensors that may have a main_grad.
    weights: Sequence[str] = ()
    #: Names of the results; of those that backward reads; of those without a gradient.
    results: Sequence[str]
    kept: Sequence[str] = ()
    constant: Collection[str] = ()

    def run(self, launch: Launches, *args):
        """Compute the results of tensors, options and link, for one token or more."""

    def fake(self, *args):
        """Return empty results of tensors, options and link.

        By shape[0]: len() would make a number of a size that a graph leaves open.
        """

    def gradients(self, backward: Backward, *args) -> dict[str, torch.Tensor | None]:
        """Compute the gradients that are not zeros, for one token or more."""

    def define(self) -> tuple[Callable, Callable]:
        """Define the op and its backward op."""
        self._names = [tensor.split()[-1] for tensor in self.tensors.split(", ")]
        self._positions = [self._names.index(weight) for weight in self.weights]
        self._upstream = [i for i, name in enumerate(self.results) if name not in self.constant]
        self._kept = [self.results.index(name) for name in self.kept]
        self._arguments = _slices(self._names, self.weights)
        self._backward_arguments = _slices(self._upstream, self._names, self.kept, self.weights)
        mains = [f"Tensor? main_{weight}" for weight in self.weights]
        written = [main.replace("Tensor", f"Tensor({'abcde'[i]}!)") for i, main in enumerate(mains)]
        upstream = [f"Tensor? d_{self.results[i]}" for i in self._upstream]
        kept = [f"Tensor result_{name}" for name in self.kept]
        options = self.options, self.backward_link, "bool[] needs"
        arguments = *upstream, self.tensors, *kept, *written, *options
        schema = _schema(f"{self.name}_backward", arguments, self._names)
        self._backward_op = define(schema, self._run_backward, fake=self._fake_backward)
        schema = _schema(self.name, (self.tensors, *mains, self.options, self.link), self.results)
        transforms = {"setup": self.setup, "backward": self.backward}
        return define(schema, self._run, fake=self._fake, **transforms), self._backward_op

    def _run(self, launch, *args):
        tensors, mains, options = [args[part] for part in self._arguments]
        if any(main is not None for main in mains):
            named = zip(self._names, tensors, strict=True)
            read = {_ARGUMENTS.get(name, name): t for name, t in named}
            check_no_alias(dict(zip(self.weights, mains, strict=True)), read)
        if tensors[0].shape[0] == 0:
            return self.fake(*tensors, *options)
        return self.run(launch, *tensors, *options)

    def _fake(self, *args):
        tensors, _, options = [args[part] for part in self._arguments]
        return self.fake(*tensors, *options)

    def setup(self, ctx, inputs: Sequence, output, unsaved: Collection[str] = ()) -> None:
        """Save the tensors, but for those whose names are ``unsaved``, and the kept results."""
        tensors, mains, options = [inputs[part] for part in self._arguments]
        saved = list(tensors)
        for name in unsaved:
            saved[self._names.index(name)] = None
        ctx.save_for_backward(*saved, *[output[i] for i in self._kept])
        if self.constant:
            ctx.mark_non_differentiable(*[output[self.results.index(i)] for i in self.constant])
        ctx.options = options[: len(options) - bool(self.link)]
        ctx.tensors = [True if isinstance(t, torch.Tensor) else None for t in inputs]
        # Not saved tensors: backward of an earlier micro-batch may write them before ours reads
        # them.
        ctx.main_grads = dict(zip(self._positions, mains, strict=True))
        ctx.set_materialize_grads(False)

    def backward(self, ctx, *upstream: torch.Tensor | None, **unsaved: torch.Tensor) -> tuple:
        """Return a gradient of each input; ``unsaved``: the tensors that `setup` did not save."""
        refuse_double(f"mhc.{self.function}")
        if len(upstream) == 1 and upstream[0] is None:
            return (None,) * len(ctx.tensors)
        targets = destination.targets(ctx, ctx.tensors, ctx.main_grads, upstream)
        needs = list(ctx.needs_input_grad[: len(self._names)])
        for position, target in targets.items():
            needs[position] = target.wanted
        saved = list(ctx.saved_tensors)
        for name, t in unsaved.items():
            saved[self._names.index(name)] = t
        into = [targets[position].into for position in self._positions]
        arguments = *[upstream[i] for i in self._upstream], *saved, *into, *ctx.options
        gradients = list(_tuple(self._backward_op(*arguments, needs)))
        for position, target in targets.items():
            target.written()
            needs[position] = target.returned
        returned = [t if need else None for t, need in zip(gradients, needs, strict=True)]
        return *returned, *(None,) * (len(ctx.tensors) - len(returned))

    def _run_backward(self, launch, *args):
        backward, options = self._backward_of(launch, args)
        tokens = backward.tensors[self._names[0]].shape[0]
        some = tokens and any(backward.needs.values())
        return self._finished(backward, self.gradients(backward, *options) if some else {})

    def _fake_backward(self, *args):
        backward, _ = self._backward_of(None, args)
        return self._finished(backward, {})

    def _backward_of(self, launch, args) -> tuple[Backward, tuple]:
        *args, needs = args
        upstream, tensors, kept, mains, options = [args[part] for part in self._backward_arguments]
        tensors = dict(zip(self._names, tensors, strict=True))
        needs = dict(zip(self._names, needs, strict=True))
        main_grads = dict(zip(self.weights, mains, strict=True))
        return Backward(launch, upstream, tensors, kept, main_grads, needs), options

    def _finished(self, backward: Backward, gradients: dict[str, torch.Tensor | None]):
        """Return the results of the backward op: an empty tensor for one that nothing returns."""
        out = []
        like = backward.tensors[self._names[0]]
        for name, t in backward.tensors.items():
            if not backward.needs[name] or backward.main_grads.get(name) is not None:
                out.append(like.new_empty(0, dtype=torch.float32))
            elif (gradient := gradients.get(name)) is None:
                out.append(t.new_zeros(t.shape))
            else:
                out.append(gradient)
        return tuple(out) if len(out) > 1 else out[0]


def _schema(name: str, arguments: Iterable[str], results: Sequence[str]) -> str:
    returned = ", ".join(["Tensor"] * len(results))
    returned = f"({returned})" if len(results) > 1 else returned
    return f"mhc_{name}({', '.join(filter(None, arguments))}) -> {returned}"


def _slices(*each: Sequence) -> list[slice]:
    """Slices of arguments: as many as each sequence is long, in order, then the rest."""
    ends = [0, *itertools.accumulate(map(len, each))]
    return [slice(*ends) for ends in itertools.pairwise([*ends, None])]


def _tuple(results: object) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def check_no_alias(
    mains: dict[str, torch.Tensor | None], read: dict[str, torch.Tensor | None]
) -> None:
    """Check that no main_grad shares memory with a tensor that is read, or with another one."""
    named = {f"main_grads[{name!r}]": main for name, main in mains.items() if main is not None}
    for argument, main in named.items():
        others = {name: t for name, t in named.items() if name != argument}
        destination.check_no_alias(main, argument, **read, **others)


# ---- tensors as kernels take them ----------------------------------------------------------------


def mapping(phi: torch.Tensor, norm_weight: torch.Tensor | None, precision: str, n: int) -> Mapping:
    """Return phi and norm_weight for the kernels."""
    weight = None if norm_weight is None else _fp32(norm_weight)
    return Mapping(_pad_rows(_fp32(phi), mappings(n)), weight, precision)


def gates(alpha, beta, eps: float, pre_eps: float, post_scale: float, n: int) -> Gates:
    """Return alpha and beta for the kernels."""
    alpha = _pad_rows(_fp32(alpha), _ALPHAS)
    return Gates(alpha, _pad_rows(_fp32(beta).view(-1), mappings(n)), eps, pre_eps, post_scale)


def _fp32(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float32).contiguous()


def _pad_rows(t: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad the rows of a head, which has those of H_pre only, with zeros that are not read."""
    first = t.shape[0]
    return t if first == rows else torch.cat([t, t.new_zeros(rows - first, *t.shape[1:])])


def rows(t: torch.Tensor) -> torch.Tensor:
    """Return fp32 rows whose last stride is 1, as kernels read coefficients."""
    return t if t.stride(-1) == 1 else t.contiguous()


def shaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """View an op's result in the operands' shape; the caller may write it in place."""
    return own_result(result.view(*shape))


# ---- gradients of weights ------------------------------------------------------------------------


def finish_weights(
    backward: Backward, parts: Parts | None, mapping: Mapping
) -> dict[str, torch.Tensor | None]:
    """Add parts of dpsi to the gradients of phi and norm_weight, or to their main_grads."""
    phi, norm_weight = backward.tensors["phi"], backward.tensors["norm_weight"]
    of_weight = backward.needs["norm_weight"]
    if not (backward.needs["phi"] or of_weight):
        return {}
    into_phi = _accumulator(phi, backward.main_grads["phi"], len(mapping.phi))
    into_weight = None
    if of_weight:
        into_weight = _accumulator(norm_weight, backward.main_grads["norm_weight"])
    backward.launch("mhc_weights", phi, parts, mapping, into_phi, into_weight)
    sums = {"phi": into_phi, "norm_weight": into_weight}
    return {name: _returned(backward, name, t) for name, t in sums.items() if backward.needs[name]}


def finish_bias(backward: Backward, parts: Parts | None) -> dict[str, torch.Tensor | None]:
    """Add parts of dbias [P, C] to its gradient, or to its main_grad."""
    if not backward.needs["bias"]:
        return {}
    total = _accumulator(backward.tensors["bias"], backward.main_grads["bias"])
    backward.launch("mhc_add_parts", parts.values, parts, total)
    return {"bias": _returned(backward, "bias", total)}


def finish_gates(backward: Backward, parts: Parts) -> dict[str, torch.Tensor | None]:
    """Add parts of dalpha and dbeta in one sum: a launch costs more than its numbers."""
    names = [name for name in _FIRST_COLUMN if backward.needs[name]]
    if not names:
        return {}
    total = parts.values.new_zeros(parts.values.shape[1])
    columns = {}
    for name in names:
        like, main = backward.tensors[name], backward.main_grads[name]
        first = _FIRST_COLUMN[name]
        columns[name] = total[first : first + like.numel()].view(like.shape)
        if main is not None:
            columns[name].copy_(main)
    backward.launch("mhc_add_parts", parts.values, parts, total)
    return {name: _returned(backward, name, column) for name, column in columns.items()}


def _accumulator(
    like: torch.Tensor, into: torch.Tensor | None, rows: int | None = None
) -> torch.Tensor:
    """Accumulator for sums over tokens: contiguous, fp32, of as many rows as kernels make.

    The first rows of a head's phi start from ``into``: elements are independent, so they get the
    bytes that ``into`` itself would get.
    """
    rows = len(like) if rows is None else rows
    if into is None:
        return like.new_zeros(rows, *like.shape[1:], dtype=torch.float32)
    return _pad_rows(into if into.is_contiguous() else into.contiguous(), rows)


def _returned(backward: Backward, name: str, total: torch.Tensor) -> torch.Tensor | None:
    """Return sums as a gradient, or None when they are in the main_grad."""
    like, into = backward.tensors[name], backward.main_grads[name]
    if total.shape != like.shape:
        total = total[: len(like)]
    if into is None:
        # A copy of its own where further rows or columns share the memory.
        shared = total.untyped_storage().nbytes() > total.nbytes
        return total.to(like.dtype, copy=shared)
    if total is not into:
        into.copy_(total)
    return None
