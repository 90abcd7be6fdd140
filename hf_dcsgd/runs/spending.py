"""Keeps what was spent together with the weights, so that training them once more does not start from ε = 0.

A private run that starts from weights which an earlier private run has trained on the same data costs what both cost
together. Nothing in the weights tells, so every run leaves word of itself:

- `model.config.privacy_spent` of a transformers model, also under an adapter: survives `save_pretrained`,
  `from_pretrained` and the Hub, and is seen by a second trainer of the same object. A model that is made from that
  configuration is taken for a trained one.
- Digests of trained tensors in the registry of this user (`privacy/registry.py`), for adapters and plain modules. Peft
  keeps nothing of the folder that an adapter comes from: `PeftModel.from_pretrained` reads tensors, and a config
  whose unknown keys it drops. But noise has moved every number of a trained tensor, so that its first values name it,
  in memory or loaded, wherever in a model. Lost when tensors are rounded, merged or averaged, and on other machines.
- `privacy_spent.json` beside saved weights, for people.

Which data an earlier run used is not stored: a fingerprint of private data is not private, and data that differ may
overlap. So earlier runs are counted unless `earlier_spending="other_data"` says otherwise, which report and card
repeat. Everything here is public: settings, and digests of released weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_dcsgd.checks.arguments import OTHER_DATA
from hf_dcsgd.privacy.accounting import AccountedRun, composed_epsilon
from hf_dcsgd.privacy.plan import PrivacyPlan
from hf_dcsgd.privacy.registry import open_private, registry_path
from hf_dcsgd.runs.files import as_json, write_atomically
from hf_dcsgd.tasks.loss_kind import unwrapped_model
from hf_dcsgd.validation import require, require_count, require_fraction, require_non_negative

logger = logging.getLogger(__name__)

CONFIG_KEY = "privacy_spent"
SPENT_FILENAME = "privacy_spent.json"
REGISTRY_FILENAME = "trained_weights.jsonl"

_DIGESTED_VALUES = 1024
# A tensor of a few numbers could be met by chance; a few dozen of the large ones are enough to know a model by.
_FEWEST_VALUES, _MOST_TENSORS = 4, 32
_remembered: dict[str, Spending] = {}  # where there is no registry


@dataclass(frozen=True)
class SpentRun:
    """One run as it was charged when the weights were stored."""

    run_id: str
    clipping: str
    noise_multiplier: float
    sampling_rate: float
    charged: int
    delta: float
    accountant: str
    opt_outs: tuple[str, ...] = ()
    unit: str | None = None
    group_size: int = 1
    planned: int | None = None  # all steps of its plan; None in records that do not say
    # The run after it with all of its planned steps, where that was settled before this one began.
    settles_next: AccountedRun | None = None

    def __post_init__(self) -> None:
        names = (self.run_id, self.clipping, self.accountant)
        require(all(isinstance(name, str) for name in names), f"expected names, got {names}")
        require_non_negative("noise_multiplier", self.noise_multiplier)
        require(0 < self.sampling_rate <= 1, f"expected 0 < sampling_rate <= 1, got {self.sampling_rate}")
        require_count("charged", self.charged, minimum=0)
        require_fraction("delta", self.delta)
        require_count("group_size", self.group_size)
        object.__setattr__(self, "opt_outs", tuple(str(name) for name in self.opt_outs))
        if self.planned is not None:
            require_count("planned", self.planned)
        if self.settles_next is not None:
            object.__setattr__(self, "settles_next", AccountedRun(*self.settles_next))

    @classmethod
    def of(cls, plan: PrivacyPlan, charged: int, run_id: str | None) -> SpentRun:
        """Describe a run by its plan and the steps charged to it."""
        return cls(
            run_id=run_id or "",
            clipping=plan.clipping,
            noise_multiplier=plan.noise_multiplier,
            sampling_rate=plan.sampling_rate,
            charged=charged,
            delta=plan.delta,
            accountant=plan.accountant,
            opt_outs=plan.opt_outs,
            unit=None if plan.unit is None else plan.unit.column,
            group_size=plan.group_size,
            planned=plan.steps,
        )

    @property
    def accounted(self) -> AccountedRun:
        """What an accountant needs to know of the steps charged."""
        return AccountedRun(self.noise_multiplier, self.sampling_rate, self.charged, self.group_size)

    @property
    def whole(self) -> AccountedRun | None:
        """The same of all planned steps, taken or not; None where it is not known that no more were charged."""
        if self.planned is None or self.charged > self.planned:
            return None
        return self.accounted._replace(steps=self.planned)

    def has_settled(self, later: SpentRun) -> bool:
        """Tell whether a run is the one that was settled before this one began: what this one showed had no say.

        Noise, rate, steps and group must be those that were settled. Only they bound what a step reveals; everything
        else of the later run may be chosen by what this one has shown, and so may be whether it runs to its end.
        """
        return None not in (self.whole, self.settles_next) and later.whole == self.settles_next


@dataclass(frozen=True)
class Spending:
    """All private runs that led to some weights, oldest first, each of them once."""

    runs: tuple[SpentRun, ...] = ()

    def __or__(self, other: Spending) -> Spending:
        """Count the runs of both; of a run in both, the state with more charges, which holds the other."""
        runs: dict[Any, SpentRun] = {}
        for run in (*self.runs, *other.runs):
            key: Any = run.run_id or id(run)  # without a name, no two are taken for one
            if key not in runs or run.charged > runs[key].charged:
                runs[key] = run
        return Spending(tuple(runs.values()))

    def epsilon(self, delta: float) -> float:
        """Return ε of all these runs on the same data; infinite when one has no guarantee, or one for another unit."""
        return self.bound(delta)[0]

    def bound(self, delta: float, grid_scale: float = 1.0) -> tuple[float, str]:
        """Return that ε and the accountant it comes from: RDP, and PLD where all settings were settled at the start.

        Both are upper bounds then, and the smaller is taken. PLD is that of all steps that were settled, as the number
        of those taken may follow from what was shown. Where a run may have been set up by the results of those before
        it, RDP is taken, whose divergences add up for such runs as well. Of groups, only PLD knows the cost: each run
        is taken by itself then, at an equal share of δ, since ε and δ of such runs add up. `grid_scale` is that of
        `epsilon_spent`.
        """
        if any(run.opt_outs for run in self.runs) or len({run.unit for run in self.runs}) > 1:
            return math.inf, "rdp"
        runs = [run.accounted for run in self.runs if run.charged]
        if any(run.group_size > 1 for run in runs):
            return sum(composed_epsilon([run], delta / len(runs), "pld", grid_scale) for run in runs), "pld"
        bounds = [(composed_epsilon(runs, delta, "rdp"), "rdp")]
        if len(self.runs) > 1 and all(run.has_settled(later) for run, later in pairwise(self.runs)):
            whole = [run.whole for run in self.runs if run.whole is not None]
            bounds.append((composed_epsilon(whole, delta, "pld", grid_scale), "pld"))
        return min(bounds)

    def to_list(self) -> list[dict[str, Any]]:
        """Return it as JSON has it."""
        return [{**asdict(run), "opt_outs": list(run.opt_outs)} for run in self.runs]

    @classmethod
    def from_list(cls, values: Any) -> Spending:
        """Read what `to_list` wrote; ValueError when that cannot be."""
        names = {field.name for field in fields(SpentRun)}
        try:
            return cls(tuple(SpentRun(**{name: run[name] for name in names & dict(run).keys()}) for run in values))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected a list of private runs, got {str(values)[:200]}: {error}") from error


# -- before a run ----------------------------------------------------------------------------------------------------


def earlier_spending(model: nn.Module) -> Spending | None:
    """Return what earlier private runs have spent on these weights, as far as can be found; None for none."""
    found = _spending_in_config(model)
    digests = set(_digests(model.parameters()))
    for spending, tensors in _registered():
        if not digests.isdisjoint(tensors):
            found |= spending
    return found if found.runs else None


def earlier_statement(model: nn.Module, choice: str) -> dict[str, Any] | None:
    """Return what the header of a run says of earlier spending; None when these weights come from no private run."""
    found = earlier_spending(model)
    if found is None:
        return None
    return {"runs": found.to_list(), "dismissed": OTHER_DATA if choice == OTHER_DATA else None}


def describe_earlier(statement: Mapping[str, Any] | None, plan: PrivacyPlan) -> str:
    """Say in a line, to follow the plan, what these weights had spent before this run; empty when nothing."""
    if statement is None:
        return ""
    earlier = Spending.from_list(statement["runs"])
    steps = sum(run.charged for run in earlier.runs)
    if statement["dismissed"]:
        return (
            f"\n  earlier spending: {steps} steps on these weights are left out, as their data are said to be others "
            f"(earlier_spending={statement['dismissed']!r})"
        )
    total = (earlier | Spending((SpentRun.of(plan, plan.steps, None),))).epsilon(plan.delta)
    cost = f"ε ≤ {total:.4g} at δ = {plan.delta:.4g}" if math.isfinite(total) else "no guarantee"
    return (
        f"\n  earlier spending: private runs have trained these weights for {steps} steps; together with them, if the "
        f"data are the same: {cost} (other data: earlier_spending={OTHER_DATA!r})"
    )


def add_spending(model: nn.Module, spending: Spending) -> None:
    """Count a release that was made for a model's training, such as of label counts, with what its weights cost.

    The next run on these weights adds it up, as it does what earlier runs have spent.
    """
    base = unwrapped_model(model)
    require(isinstance(base, PreTrainedModel), f"expected a transformers model, got {type(base).__name__}")
    setattr(base.config, CONFIG_KEY, (_spending_in_config(model) | spending).to_list())


# -- during a run, and after it --------------------------------------------------------------------------------------


class SpendingRecorder:
    """Leaves word of one run wherever its weights go. Make it before the first step, from the weights as they are.

    `earlier` is the statement in the run's header. It travels on, dismissed or not.
    """

    def __init__(
        self, model: nn.Module, plan: PrivacyPlan, run_id: str | None, earlier: Mapping[str, Any] | None
    ) -> None:
        self._model = model
        self._plan = plan
        self._run_id = run_id
        self._earlier = Spending() if earlier is None else Spending.from_list(earlier["runs"])
        self._untouched = set(_digests(_trained(model)))

    def record(self, charged: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Store what was spent so far with the model and in the registry; with `folder`, also beside its weights."""
        if charged == 0:
            return
        spending = self._earlier | Spending((SpentRun.of(self._plan, charged, self._run_id),))
        base = unwrapped_model(self._model)
        if isinstance(base, PreTrainedModel):
            setattr(base.config, CONFIG_KEY, spending.to_list())
        # A tensor that did not move yet (a warm-up from a rate of 0) may be that of a public model.
        _register(spending, [d for d in _digests(_trained(self._model)) if d not in self._untouched])
        if folder is not None:
            write_atomically(Path(folder) / SPENT_FILENAME, as_json({"format": 1, "runs": spending.to_list()}))


def _spending_in_config(model: nn.Module) -> Spending:
    values = getattr(getattr(unwrapped_model(model), "config", None), CONFIG_KEY, None)
    try:
        return Spending() if values is None else Spending.from_list(values)
    except ValueError as error:
        raise ValueError(f"model.config.{CONFIG_KEY} cannot be read, so what was spent is unknown: {error}") from error


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the largest trained tensors."""
    tensors = [p for p in model.parameters() if p.requires_grad]
    return sorted(tensors, key=lambda p: p.numel(), reverse=True)[:_MOST_TENSORS]


def _digests(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Name tensors by their shapes and first values, in fp32."""
    digests = []
    for parameter in parameters:
        if parameter.numel() >= _FEWEST_VALUES and not parameter.is_meta:
            values = _first_part(parameter.detach()).flatten()[:_DIGESTED_VALUES].float().cpu().numpy().tobytes()
            digests.append(hashlib.sha256(str(tuple(parameter.shape)).encode() + values).hexdigest()[:16])
    return digests


def _first_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the main process's piece of a tensor in pieces, as it alone asks; where that is short, the whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    is_enough = rows * (tensor.numel() // tensor.shape[0]) >= min(_DIGESTED_VALUES, tensor.numel())
    return tensor.to_local() if is_enough else tensor.full_tensor()


def _register(spending: Spending, digests: list[str]) -> None:
    if not digests:
        return
    line = json.dumps({"runs": spending.to_list(), "tensors": digests}) + "\n"
    try:
        with os.fdopen(open_private(registry_path(REGISTRY_FILENAME), os.O_WRONLY | os.O_APPEND), "wb") as file:
            file.write(line.encode())
    except OSError as error:
        _remembered.update(dict.fromkeys(digests, spending))
        logger.warning("what was spent on these weights is remembered in this process only: %s", error)


def _registered() -> Iterable[tuple[Spending, set[str]]]:
    """Yield what the registry, or else this process, remembers; lines that cannot be read are passed over."""
    yield from ((spending, {digest}) for digest, spending in _remembered.items())
    try:
        lines = registry_path(REGISTRY_FILENAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
            yield Spending.from_list(entry["runs"]), set(entry["tensors"])
        except (ValueError, KeyError, TypeError):
            continue
