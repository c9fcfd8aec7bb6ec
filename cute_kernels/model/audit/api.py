"""``ck.audit``: the public function."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import nn

from . import checks, probe, promises, runs
from .report import Report


def audit(
    model: nn.Module,
    inputs: torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]],
    *,
    transforms: Sequence[str] | None = None,
    gradients: bool = True,
    compile: bool = False,
    pad_token: int | None = None,
) -> Report:
    """Run a model in other surroundings and name the modules whose bits follow them.

    Each sequence runs alone, in one forward pass: the reference.  Then it runs again under each
    transform, and every module's output rows, one for a token, are compared with the reference's by
    their bytes.  A module whose rows differ though all rows that it took are equal is a culprit.
    For attention, which is found by its behaviour, those are the rows of the sequence up to the
    token.  docs/audit.md says what the transforms do and where this ends.

    The model is not changed: no hook is left, and gradients and main_grads are put back.  Its ops
    need not be this library's.  It stays in the mode and on the device where it is.

    Args:
        model: Takes ids [B, T] first.  With ``attention_mask``, ``position_ids``, ``use_cache`` and
            ``past_key_values`` in its forward, as a causal LM of transformers has them, all
            transforms apply.  On one device, not distributed, no dropout that is active.
        inputs: Ids: int64 or int32 [B, T], or a list of 1-D sequences of any lengths.
        transforms: Names of ``checks.TRANSFORMS``; None: all that apply.
        gradients: Whether parameters' gradients are compared too (``gradient_repeat`` and
            ``micro_batches``).  Needs the memory of a backward, and of one copy on the CPU.
        compile: Whether the outputs of ``torch.compile(model)`` are compared with eager ones.
        pad_token: The id of padding; None: the config's, else 0.

    Returns:
        A `Report`: ``ok``, ``first``, ``findings``, ``victims``, ``skipped``; ``print`` shows it.
        ``ok`` says that nothing differed in these runs.  It is no proof for other inputs.  Of a
        model behind ``ck.patch``, ``.grad`` under ``micro_batches`` is ``information``.

    Raises:
        ArgumentTypeError, ArgumentValueError, ShapeError, DtypeError, DeviceError: an argument, or
            a transform that was asked for and does not apply.  And what the model itself raises.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Embedding(97, 64), torch.nn.Linear(64, 97))
        >>> report = ck.audit(net, torch.randint(97, (2, 8)), gradients=False)
        >>> str(report).split(',')[0]  # torch's bits follow the batch on some machines
        '...differing rows of 336'
    """
    problem = checks.problem(model, inputs, pad_token)
    if transforms is not None:
        checks.names(transforms)
    facts = probe.probe(model, torch.cat(problem.sequences), problem.accepts)
    problem = checks.after_probe(problem, facts)
    names, skipped = checks.chosen(transforms, gradients, compile, problem)
    outcomes, reference = runs.outputs(problem, names)
    culprits = runs.findings(problem, outcomes, reference)
    of_parameters, ran, count = runs.of_gradients(problem, names, reference)
    cases: dict[str, tuple[str, ...]] = {}
    for outcome in outcomes:
        transform = outcome.case.transform
        cases[transform] = (*cases.get(transform, ()), outcome.case.label)
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts.values()]
    promised, information = promises.split(model, of_parameters)
    return Report(
        findings=(*culprits, *promised),
        victims=tuple(runs.victims(problem, outcomes)),
        ran=cases | ran,
        skipped=skipped,
        unfollowed=tuple(
            dict.fromkeys(name for outcome in outcomes for name in outcome.unfollowed)
        ),
        rows=sum(int(verdict.compared.sum()) for verdict in verdicts),
        differing=sum(int(verdict.differs.sum()) for verdict in verdicts),
        gradients=count,
        facts=_facts(problem),
        information=information,
        unrecognised=checks.unrecognised(skipped, problem),
    )


def _facts(problem: checks.Problem) -> dict[str, str]:
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in problem.model.parameters()})
    on_gpu = problem.device.type == "cuda"
    return {
        "model": type(problem.model).__name__,
        "device": torch.cuda.get_device_name(problem.device) if on_gpu else problem.device.type,
        "threads": str(torch.get_num_threads()),
        "dtypes": ", ".join(kinds),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
