"""define_op(): a function becomes a torch op with a schema, a fake, autograd, autocast and vmap.

On ``torch.library.Library`` rather than ``@custom_op``: 6 us a call instead of 14 (measured on a
2-core CPU host, design section 4).  A call that nothing watches or changes on its way (`_plain`)
goes straight to what the dispatcher would come to in the end: the same function computes it, so
there is one set of bits.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..errors import CuteKernelsError, UnsupportedTransformError
from . import checking
from .caching import capturing
from .dynamo import untraced
from .plan_cache import LEGACY_VMAP, MODE, Plan, PlanCache, intercepted

if TYPE_CHECKING:
    from typing import Unpack

NAMESPACE = "cute_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)

BELOW_MODE = torch._C._dispatch_keyset_full_after(MODE)
#: Where they are excluded, torch's ops are torch's, and nothing is cast.
MODE_KEYS = torch._C.DispatchKeySet(MODE) | _AUTOCAST_KEYS
_MODE_ALONE = torch._C.DispatchKeySet(MODE)


def _check_nothing(*_) -> None:
    pass


class Transforms(TypedDict, total=False):
    """Functions of an op for autograd, vmap and autocast.

    setup: ``setup(ctx, inputs, output)`` saves what backward needs.  Without one all tensors among
        the inputs are saved, and ``ctx.options`` has the other inputs.
    backward: ``backward(ctx, *grads)`` returns a tuple: a gradient or None per input, also of one
        input.  Without one the op refuses inputs that require a gradient.
    vmap: ``vmap(info, in_dims, *args)`` as in ``torch.library.register_vmap``.
    autocast_args: Positions of the arguments that autocast casts to its dtype; all others pass as
        they are, and no product inside the op is ever cast.
    """

    setup: Callable
    backward: Callable
    vmap: Callable
    autocast_args: Sequence[int]


def refuse_vmap(function: str, why: str) -> Callable:
    """Return a ``vmap`` that refuses ``function``; ``why``: the reason, and what to do instead."""

    def refused(info, in_dims, *args):
        raise UnsupportedTransformError(f"cute_kernels.{function}: torch.func.vmap {why}")

    return refused


def refuse_double(function: str, why: str = "") -> None:
    """Refuse a backward that makes a graph; ``why``: when or why, and what to do instead."""
    if torch.is_grad_enabled():
        want = "double backward (create_graph=True) is not available"
        raise UnsupportedTransformError(f"cute_kernels.{function}: {want}{why}")


def define_op(
    schema: str,
    run: Callable | None = None,
    *,
    plan: Callable[..., Plan] | None = None,
    check: Callable[..., object] = _check_nothing,
    check_each: Callable[..., object] | None = None,
    fake: Callable,
    **transforms: Unpack[Transforms],
) -> Callable:
    """Registers one op in the namespace ``torch.ops.cute_kernels``; returns what calls it.

    Args:
        schema: ``"linear(Tensor x, Tensor weight) -> Tensor"``.
        run: The implementation for CPU and CUDA tensors.  It sees no autograd and no autocast.
        plan: Instead of ``run``, which is the plan of all calls: ``plan(*args)`` returns the `Plan`
            of a call, which is cached by the call's signature (runtime/plan_cache.py), in eager
            mode and in compiled graphs.
        check: ``check(*args)`` raises for arguments that the op does not take.  It runs in each
            call by the function returned, but for eager calls with a cached plan, and before a plan
            is cached.  So it reads the signature alone: tensors by shape, strides, dtype, device
            and alignment, other arguments by type and value, and settings.  What a compiled graph
            must ask too (aliases, torch's determinism flag) is in the plan's ``run``.
        check_each: ``check_each(*args)``: whether ``check`` runs in such an eager call even if its
            plan is cached, as it reads more than the signature.  None: in no such call.
        fake: The same signature; returns empty outputs, from shapes alone.
        transforms: `Transforms`.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    types = [str(argument.type) for argument in op._schema.arguments]
    names = [argument.name for argument in op._schema.arguments]
    plan = plan or (lambda *_: Plan(run, fresh=False))
    planned = Planned(plan, names, types, check)
    planned_run = untraced(planned.run_function())
    _LIBRARY.impl(name, planned_run, "CPU")
    _LIBRARY.impl(name, planned_run, "CUDA")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if "vmap" in transforms:
        torch.library.register_vmap(qualified, transforms["vmap"], lib=_LIBRARY)
    below = _below_autograd(op, planned_run)
    if "backward" not in transforms:
        autograd, apply = _no_gradient(op, below), None
    else:
        setup = transforms.get("setup") or _save_tensors(types)
        apply = _node(op, setup, transforms["backward"])
        autograd = _autograd(op, apply, below)
    _LIBRARY.impl(name, untraced(autograd), "Autograd", with_keyset=True)
    cast = frozenset(transforms.get("autocast_args", ()))
    for key, device_type in _AUTOCAST.items():
        autocast = _below_autocast(op, device_type, cast)
        _LIBRARY.impl(name, untraced(autocast), key)
    _LIBRARY.impl(name, untraced(_below_mode(op)), "DeferredInit", with_keyset=True)
    # Mutating ops need the dispatcher's version counters.
    if op._schema.is_mutable or "Tensor" not in types:
        return op
    return _entrance(op, apply, types.index("Tensor"), planned, check_each)


def _save_tensors(types: Sequence[str]) -> Callable:
    """Return the ``setup`` of an op that gives none; types: of its arguments, in its schema."""
    are_tensors = ["Tensor" in kind for kind in types]

    def setup(ctx, inputs, output):
        pairs = list(zip(inputs, are_tensors, strict=True))
        ctx.save_for_backward(*(value for value, is_tensor in pairs if is_tensor))
        ctx.options = [value for value, is_tensor in pairs if not is_tensor]

    return setup


#: Types without ``__torch_function__``: calls of others go to the dispatcher.
_PLAIN_TYPES = frozenset(
    (
        torch.Tensor,
        torch.nn.Parameter,
        type(None),
        str,
        float,
        int,
        bool,
        list,
        torch.dtype,
        torch.device,
    )
)
_C = torch._C


def _plain(args: Sequence[object], tensor: torch.Tensor) -> bool:
    """Whether nothing can intercept a call, and all its arguments are plain values.

    ``tensor``: one of the arguments.
    """
    return (
        not (intercepted() or tensor.is_meta)
        and _PLAIN_TYPES.issuperset(map(type, args))
        and not (any(a.is_neg() for a in args if isinstance(a, torch.Tensor)))
    )


_autograd_is_excluded = functools.partial(
    _C._dispatch_tls_is_dispatch_key_excluded, _C._parse_dispatch_key("AutogradFunctionality")
)


def requires_gradient(*args) -> bool:
    """Whether autograd records a call of these arguments where it is enabled.

    Below autograd, as in the body of a ``torch.library.custom_op``, it records nothing.
    """
    return _C._any_requires_grad(*args) and not _autograd_is_excluded()


def _entrance(
    op: Callable,
    apply: Callable | None,
    index: int,
    planned: Planned,
    check_each: Callable[..., object] | None,
) -> Callable:
    """Eager entry point: runs the cached plan, or checks, plans and caches.

    It bypasses the dispatcher when no dispatch key would intervene.  The op's `Planned` is
    ``entrance.planned``; ``entrance.or_else(miss)`` returns a function that runs the cached plan of
    a call, or ``miss(*args)`` without one.

    index: Position of a tensor.
    """

    def run_plan(run: Callable, args: tuple):
        if _C.is_grad_enabled() and requires_gradient(*args):
            return op(*args) if apply is None else apply(*args, run)
        return run(*args)

    def run_new(*args):
        if not _plain(args, args[index]):
            return op(*args)
        return run_plan(planned.add(args), args)

    def run_unchecked(*args):
        planned.check(*args)
        return run_new(*args)

    def caller(miss: Callable) -> list[Callable]:
        def call(*args):
            # A call with a cached plan has plain arguments, and nothing intercepts it.
            run = planned.find(args)
            return run_plan(run, args) if run else miss(*args)

        def install(in_c: Callable | None) -> None:
            cell[0] = in_c or call

        cell = [call]
        planned.on_caller(apply, miss, install)
        return cell

    def or_else(miss: Callable) -> Callable:
        cell = caller(miss)
        return lambda *args: cell[0](*args)

    unchecked, checked = caller(run_unchecked), caller(run_new)

    def enter(*args):
        if is_dynamo_compiling():
            planned.check(*args)
            return op(*args)
        if check_each is not None and check_each(*args):
            planned.check(*args)
            return checked[0](*args)
        return unchecked[0](*args)

    enter.or_else = or_else
    planned.on_caller(apply, op._op, _direct(op))
    enter.planned = planned
    return enter


def _direct(op: Callable) -> Callable[[Callable | None], None]:
    """``install(call)``: calls of ``op`` are ``call(*args)``; None: the dispatcher's again.

    Compiled graphs call ops by name, ``torch.ops.cute_kernels.linear.default(x, ...)``.  The
    dispatcher converts each argument and calls two Python kernels on the way to a plan; ``call`` of
    compile/calls.c runs a cached plan where nothing could intercept it, as eager calls do, and
    hands all others to the dispatcher.
    """
    direct = type("OpOverload", (type(op),), {"__module__": type(op).__module__})
    direct.__signature__ = inspect.signature(op)  # a function of C has none
    op.__class__ = direct

    def install(call: Callable | None) -> None:
        if call is not None:
            direct.__call__ = call
        elif "__call__" in vars(direct):
            del direct.__call__

    return install


def _run_of(plan: Plan) -> Callable:
    """Function that runs a plan, with results that are no views for autograd."""
    return plan.bound() if plan.fresh else _detaching(plan.run)


def _picker(positions: Sequence[int]) -> Callable[[tuple], tuple]:
    """Function that returns the arguments at these positions as a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    first = positions[0] if positions else 0
    return operator.itemgetter(slice(first, first + len(positions)))


#: Types of arguments that are described in a signature; tensors in lists are not.
_TENSORS = frozenset(("Tensor", "Optional[Tensor]"))


class Planned:
    """The plans of one op with arguments of these names and types; ``check``: as in `define_op`."""

    def __init__(
        self,
        plan: Callable[..., Plan],
        names: Sequence[str],
        types: Sequence[str],
        check: Callable[..., object] = _check_nothing,
    ):
        self._plan, self._names, self.cache = plan, names, PlanCache()
        self.check = check
        tensors = tuple([i for i, kind in enumerate(types) if kind in _TENSORS])
        options = tuple([i for i in range(len(types)) if i not in tensors])
        self._positions = options, tensors
        self._tensors, self._options = _picker(tensors), _picker(options)
        self._lists = any("List" in types[i] for i in options)

    def on_caller(
        self, apply: Callable | None, miss: Callable, install: Callable[[Callable | None], None]
    ) -> None:
        """Have ``install(call)`` called with what finds and runs cached plans in C, or with None.

        apply: The op's autograd node, as in `_node`.
        miss: ``miss(*args)`` takes calls without a cached plan.
        """
        autograd = _C.is_grad_enabled, _C._any_requires_grad, _autograd_is_excluded
        arguments = len(self._names), *self._positions, autograd, apply, miss
        self.cache.on_caller(arguments, install)

    def run_function(self) -> Callable:
        """``run(*args)``: by the cached plan, or a new one."""
        cache, signature, add = self.cache, self._signature, self._add

        def run(*args):
            options, tensors = signature(args)
            cached = cache.find(options, *tensors)
            if cached:
                return cached(*args)
            if cached is None:
                # An eager call runs the plan that it finds: it has passed the check.
                self.check(*args)
            return add(args, (options, tensors) if cached is None else None)(*args)

        return run

    def find(self, args: tuple) -> Callable | bool | None:
        """`PlanCache.find` of a call: what runs its cached plan, if there is one."""
        options, tensors = self._signature(args)
        return self.cache.find(options, *tensors)

    def add(self, args: tuple) -> Callable:
        """Return what runs the plan of a checked call, made and, if it can be, cached."""
        return self._add(args, self._signature(args))

    def _add(self, args: tuple, signature: tuple[tuple, tuple] | None) -> Callable:
        _require_storage(self._names, args)
        plan = self._plan(*args)
        run = _run_of(plan)
        if signature is not None and _holds_lists(plan, args):
            entry = self._asking_captures(run) if plan.holds else run
            self.cache.add(*signature, entry if plan.cacheable else None, plan.holds)
        return run

    def _asking_captures(self, run: Callable) -> Callable:
        """``run`` that plans anew while a CUDA graph is captured.

        The cache that made the tensors of a plan is then asked for them, and keeps them for replays
        of the graph.
        """

        def run_held(*args):
            return self._add(args, None)(*args) if capturing() else run(*args)

        return run_held

    def _signature(self, args: tuple) -> tuple[tuple, tuple]:
        """(options, tensors) of a call, as `PlanCache` takes them."""
        options = self._options(args)
        if self._lists:
            options = tuple([tuple(map(_constant, a)) if type(a) is list else a for a in options])
        return options, self._tensors(args)


def _holds_lists(plan: Plan, args: Sequence[object]) -> bool:
    """Whether a plan holds the tensors in lists: signatures have them by identity."""
    held = set(map(id, plan.holds))
    lists = [a for a in args if isinstance(a, list)]
    return all(id(t) in held for a in lists for t in a if isinstance(t, torch.Tensor))


def _constant(value: object) -> object:
    """Member of a list in a signature: the id of a tensor, others as they are."""
    return id(value) if isinstance(value, torch.Tensor) else value


def detach_view(value: object) -> object:
    """Tensor of the same memory that autograd does not track as a view; others as they are.

    Autograd refuses in-place writes to a view that an ``autograd.Function`` returned.
    """
    return value.detach() if isinstance(value, torch.Tensor) and value._is_view() else value


def own_result(view: torch.Tensor) -> torch.Tensor:
    """Result for a caller: of a view without a graph, a tensor that is no view for autograd.

    Autograd refuses in-place writes with gradients to a view that was made under ``no_grad``.
    """
    return view if view.requires_grad else view.detach()


def _require_storage(names: Sequence[str], args: Sequence[object]) -> None:
    """Refuse tensors whose storage was freed; plans are cached for none of those."""
    for name, value in zip(names, args, strict=False):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, torch.Tensor):
                checking.storage(name, t)


def _detaching(run: Callable) -> Callable:
    """``run`` with results that are no views for autograd.

    A launcher computes [rows, columns]; ``run`` gives them the operands' shape by a view.
    """

    def run_detached(*args):
        results = run(*args)
        if isinstance(results, tuple):
            return tuple(map(detach_view, results))
        if isinstance(results, list):
            return list(map(detach_view, results))
        return detach_view(results)

    return run_detached


def _node(op: Callable, setup: Callable, backward: Callable) -> Callable:
    """The op's node in autograd graphs: takes the op's arguments, and what computes it of them.

    It is what ``torch.library.register_autograd`` builds, without its look at the schema's defaults
    in every call (the ops here have none).
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            *args, compute = args
            output = compute(*args)
            setup(ctx, args, output)
            return output

        @staticmethod
        @untraced
        def backward(ctx, *grads):
            if not torch._C._dispatch_tls_is_dispatch_key_included(MODE):
                if _C._dispatch_tls_is_dispatch_key_included(LEGACY_VMAP):
                    return (*_batched(op, backward, ctx, grads), None)
                return (*backward(ctx, *grads), None)
            with torch._C._ExcludeDispatchKeyGuard(_MODE_ALONE):
                return (*backward(ctx, *grads), None)

    # Function.apply itself spends 2 us on functorch's wrappers; its transforms never get here.
    return super(torch.autograd.Function, Differentiable).apply


def _batched(op: Callable, backward: Callable, ctx: object, grads: Sequence) -> tuple:
    """Gradients of a batch of upstream gradients; torch loops over the batch where it can."""
    try:
        return backward(ctx, *grads)
    except (CuteKernelsError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise UnsupportedTransformError(
            f"{op}: is_grads_batched=True is not supported; call torch.autograd.grad for each "
            "gradient"
        ) from error


def _below_autograd(op: Callable, run: Callable) -> Callable:
    """How the op's autograd kernel computes: takes its keyset and the op's arguments.

    By ``run`` at once, where nothing but a backend lies below in the dispatcher's way: a second
    Python kernel costs the host as much as the first.  An op that writes an argument goes on to the
    kernel that marks it.
    """
    runs = {} if op._schema.is_mutable else {_C.DispatchKey.CPU: run, _C.DispatchKey.CUDA: run}
    ends: dict[int, Callable | None] = {}  # by keyset; there are few

    def below(keyset, *args):
        raw = keyset.raw_repr()
        if raw not in ends:
            ends[raw] = runs.get(
                (keyset & _C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
            )
        if (end := ends[raw]) is not None:
            return end(*args)
        with _C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _C._after_autograd_keyset, *args)

    return untraced(below)


def _autograd(op: Callable, apply: Callable, below: Callable) -> Callable:
    """The op's autograd kernel."""

    def run(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        if torch._C.is_grad_enabled() and requires_gradient(*args):
            if torch._C._are_functorch_transforms_active():
                raise UnsupportedTransformError(
                    f"{op}: torch.func.grad and its kin are not supported; use torch.autograd.grad"
                )
            return apply(*args, functools.partial(below, keyset))
        return below(keyset, *args)

    return run


def _no_gradient(op: Callable, below: Callable) -> Callable:
    """The autograd kernel of an op without a backward: torch's own would warn, and go on."""

    name = str(op).removesuffix(".default")
    forward, in_backward = re.subn(r"(_kept)?(?<!scale)_(backward|gradients?)_?$", "", name)
    why = "no gradient of it is available (under torch.no_grad() none is asked for)"
    if in_backward:
        name, why = forward, "double backward (create_graph=True) is not available"

    def run(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args, "")
        if torch._C.is_grad_enabled() and requires_gradient(*args):
            raise UnsupportedTransformError(f"{name}: {why}")
        return below(keyset, *args)

    return run


def _below_mode(op: Callable) -> Callable:
    """The op's kernel in `model.batch_invariant`: what it calls of torch is torch's own.

    A thread without the mode never comes here.
    """

    def run(keyset, *args):
        with torch._C._ExcludeDispatchKeyGuard(_MODE_ALONE):
            return op.redispatch(keyset & BELOW_MODE, *args)

    return run


def _refuse_tangents(
    op: Callable, args: Sequence[object], instead: str = "; use reverse mode"
) -> None:
    """Forward-mode AD would silently see a constant."""
    listed = (a if isinstance(a, (list, tuple)) else (a,) for a in args)
    tensors = (t for each in listed for t in each if isinstance(t, torch.Tensor))
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedTransformError(
            f"{op}: forward-mode differentiation (jvp) is not supported{instead}"
        )


def _below_autocast(op: Callable, device_type: str, cast: frozenset[int]) -> Callable:
    """The op's autocast kernel: cast what is to be cast, then run with autocast out of the way."""

    def run(*args):
        if cast:
            dtype = torch.get_autocast_dtype(device_type)
            args = [_cast(a, dtype) if i in cast else a for i, a in enumerate(args)]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return op(*args)

    return run


def _cast(value: object, dtype: torch.dtype) -> object:
    """Floating-point tensors to the autocast dtype; float64 stays, to be refused by name."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value if value.dtype == torch.float64 else value.to(dtype)
