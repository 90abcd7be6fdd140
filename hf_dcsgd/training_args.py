"""`DCSGDTrainingArguments`: transformers' `TrainingArguments` with the options of private training.

The `help` of each field is the only text about it: command line, documentation and error messages all come from here,
and for options of a clipping strategy from its declaration in `clipping/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from hf_dcsgd.checks.arguments import (
    COUNTED,
    OTHER_DATA,
    as_mapping,
    refuse_incompatible_arguments,
    require_sound_arguments,
)
from hf_dcsgd.checks.environment import refuse_sharding_environment
from hf_dcsgd.checks.sharding_options import fsdp_config_of_accelerate, is_fsdp_asked_of_accelerate
from hf_dcsgd.clipping import BUILTIN_OPTIONS, STRATEGIES, strategy
from hf_dcsgd.privacy.accountants import ACCOUNTANTS
from hf_dcsgd.privacy.accounting import planned_steps
from hf_dcsgd.privacy.plan import BY_UNIT, RAW_TRAIN_LOSS, UNIT_CLIPPINGS, PrivacyPlan, PrivacyUnit
from hf_dcsgd.recipe import AUTO, NONE, RECIPES, Travel, epochs, expected_batch_size, fixed_values, split_batch
from hf_dcsgd.validation import require_count, require_one_of

DEFAULT_EPSILON = 8.0
DEFAULT_ROWS_PER_UNIT = 4


def _option(default: Any, text: str, choices: Collection[str] | None = None) -> Any:
    """Make a field; `choices` may still grow, by registration."""
    return field(default=default, metadata={"help": text} if choices is None else {"help": text, "choices": choices})


def _strategy_option(name: str) -> Any:
    """Make a field of an option as its strategies declare it; its help says which these are, unless most are."""
    option = BUILTIN_OPTIONS[name]
    users = [known.name for known in STRATEGIES.values() if option in known.options]
    prefix = f"{' and '.join(users)}: " if 2 * len(users) < len(STRATEGIES) else ""
    return _option(option.default, prefix + option.help)


@dataclass
class DCSGDTrainingArguments(TrainingArguments):
    """Arguments of `DCSGDTrainer`: everything `TrainingArguments` has, and the privacy options below.

    Defaults that differ from `TrainingArguments`, because its own would hurt private training:

    | argument                      | here | `TrainingArguments` | why                                               |
    |-------------------------------|------|---------------------|---------------------------------------------------|
    | `per_device_train_batch_size` | None | 8                   | derived from the number of examples               |
    | `gradient_accumulation_steps` | None | 1                   | derived, up to the expected batch size            |
    | `num_train_epochs`            | None | 3.0                 | derived; every step costs budget                  |
    | `learning_rate`               | None | 5e-5                | derived from the noise                            |
    | `lr_scheduler_type`           | None | linear              | derived                                           |
    | `max_grad_norm`               | 0.0  | 1.0                 | examples are clipped one by one: `clip_threshold` |

    What is derived, and how, is up to the `recipe`; `derived` tells which values were, and why. One logical batch has
    `per_device_train_batch_size × gradient_accumulation_steps × world size` examples in expectation.
    """

    # --- derived unless given
    recipe: str = _option(
        AUTO,
        "Where unset values come from. auto: batch size, epochs, learning rate, schedule and accountant follow from "
        "the number of examples and the budget, by rules that were settled beforehand. paper: batches of 256, 5 "
        "epochs, rate 1e-3, constant, RDP, the paper's rule for the histogram. none: batches of 8, 3 epochs, rate "
        "1e-3, constant.",
        RECIPES,
    )
    per_device_train_batch_size: int = _option(
        None, "The expected batch size per device for training. Default: by the recipe."
    )
    gradient_accumulation_steps: int = _option(
        None,
        "How many batches make a logical one. Default: as many as bring it to the expected batch size of the recipe.",
    )
    num_train_epochs: float = _option(None, "Total number of training epochs to perform. Default: by the recipe.")
    learning_rate: float = _option(None, "The initial learning rate. Default: by the recipe, from the noise.")
    lr_scheduler_type: SchedulerType | str = _option(None, "The learning rate schedule. Default: by the recipe.")

    scale_free_gradient: bool = _option(
        None,
        "Divide the released gradient by its threshold, a public number: moves of the threshold then stay out of "
        "the optimizer's state. Default: by the recipe, on for auto.",
    )

    # --- changed defaults
    max_grad_norm: float = _option(
        0.0,
        "Clips the norm of the whole, already noised gradient (0: off). It has no effect on privacy; the per-example "
        "threshold is clip_threshold.",
    )

    # --- budget
    target_epsilon: float | None = _option(
        None,
        f"The privacy budget ε of the whole run; the noise is calibrated to it. {DEFAULT_EPSILON:g} when neither this "
        "nor noise_multiplier is given.",
    )
    target_delta: float | None = _option(
        None, "δ of the guarantee. Default 1/N for N training examples, as in the paper; smaller is better practice."
    )
    noise_multiplier: float | None = _option(
        None, "The noise multiplier σ of a step, instead of target_epsilon. ε then follows from it."
    )
    accountant: str = _option(
        None,
        "How ε is computed: pld (privacy loss distributions, tight), rdp (Rényi, as in the paper), or a registered "
        "accountant. Default: by the recipe, pld but for the paper's.",
        ACCOUNTANTS,
    )

    # --- whose privacy
    privacy_unit: str | None = _option(
        None,
        "The column whose values are the units of privacy, such as user_id: what is guaranteed holds for adding or "
        "removing one of them with all of its rows. N, δ and the batch size then count units, and no model sees the "
        "column. Default: each row is a unit.",
    )
    max_rows_per_unit: int = _option(
        DEFAULT_ROWS_PER_UNIT,
        "privacy_unit: how many of its rows, drawn anew each time, a unit enters a step with at most. Its loss is "
        "their mean. With privacy_unit_clipping=row: how many of its rows are used at all.",
    )
    privacy_unit_clipping: str = _option(
        BY_UNIT,
        "privacy_unit: what is drawn and clipped. unit: a unit with its rows, as one example. row: row by row, and ε "
        "is that of a group of max_rows_per_unit rows; for comparison.",
        UNIT_CLIPPINGS,
    )

    # --- clipping
    clipping: str = _option(
        "dc_sgd_e",
        "How the clipping threshold is chosen: "
        + ", ".join(f"{known.name} ({known.summary})" for known in STRATEGIES.values())
        + ", or a registered strategy.",
        STRATEGIES,
    )
    clip_threshold: float = _strategy_option("clip_threshold")
    percentile: float = _strategy_option("percentile")
    histogram_bins: int = _strategy_option("histogram_bins")
    histogram_range: float | None = _strategy_option("histogram_range")
    histogram_rule: str | None = _strategy_option("histogram_rule")
    histogram_noise_multiplier: float | None = _strategy_option("histogram_noise_multiplier")
    andrew_learning_rate: float = _strategy_option("andrew_learning_rate")
    andrew_count_noise_std: float | None = _strategy_option("andrew_count_noise_std")
    du_decay: float = _strategy_option("du_decay")
    auto_clip_gamma: float = _strategy_option("auto_clip_gamma")
    clipping_options: dict[str, Any] | str | None = _option(
        None, "Options of a strategy from another package, by name; JSON text on the command line."
    )

    # --- what is trained, what is shown
    trainable_layers: str | None = _option(
        None,
        "Which parameters are trained: last_encoder_pooler_classifier (the paper's), last:k, head, bias, all, as_is "
        "(keep requires_grad as it stands), ffa_lora (as_is without LoRA's A), or module names and globs separated by "
        "commas. Default: as_is for peft models and plain modules, the paper's layers otherwise.",
    )
    trunk_cache: str = _option(
        "off",
        "Compute the frozen blocks in front of the first trained one once per training row, without dropout, and keep "
        "the result on disk, so that later epochs and runs pass over them, as do evaluations during training. "
        "on: refuse models for which that cannot be done. auto: train those without it. The cache is private data; "
        "hf-dcsgd cache lists and removes it.",
        ("off", "on", "auto"),
    )
    trunk_cache_dir: str | None = _option(
        None, "Where trunk caches are kept. Default: hf_dcsgd/trunk_cache in the Hugging Face home directory."
    )
    trunk_cache_dtype: str = _option(
        "fp32", "The precision of cached hidden states; 16 bits take half the disk space.", ("fp32", "bf16", "fp16")
    )
    log_train_loss: str = _option(
        "off",
        "The training loss is private data. off: it is not written anywhere. private: a clipped and noised loss is "
        "released, out of the same budget. raw: it is logged as it is, OUTSIDE the guarantee, and the report says so.",
        ("off", "private", "raw"),
    )
    loss_clip: float = _option(2.0, "log_train_loss=private: each example's loss is cut to [0, loss_clip].")
    loss_noise_multiplier: float = _option(
        10.0, "log_train_loss=private: the noise multiplier σ_L of the released loss, which must exceed σ."
    )
    unsafe_noise_seed: int | None = _option(
        None,
        "VOIDS THE GUARANTEE. Makes noise and sampling repeatable, for debugging; whoever knows the seed can subtract "
        "the noise. The report repeats it.",
    )

    earlier_spending: str = _option(
        COUNTED,
        "What earlier private runs have spent on the weights that this one starts from. count: plan, report and card "
        "add it, as the data may be the same. other_data: it is left out, because you know that the data have no "
        "example in common; report and card say so.",
        (COUNTED, OTHER_DATA),
    )
    derived: dict[str, str] = field(init=False, default_factory=dict)
    planned: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Before transformers asks for packages that could not be used anyway.
        refuse_sharding_environment()
        refuse_incompatible_arguments(self)
        require_one_of("recipe", self.recipe, RECIPES)
        self._derived_values: dict[str, Any] = {}
        for name, (value, reason) in fixed_values(self.recipe).items():
            self._derive(name, value, reason)
        if is_fsdp_asked_of_accelerate() and not self.fsdp:
            self.fsdp_config = fsdp_config_of_accelerate()
            self.fsdp = True  # type: ignore[assignment]
        super().__post_init__()
        self.fsdp_plugin_args = None  # `sharding/` does what accelerate's plugin would
        layers: Any = self.trainable_layers
        if isinstance(layers, list | tuple) and all(isinstance(entry, str) for entry in layers):
            self.trainable_layers = ",".join(layers)
        if self.target_epsilon is None and self.noise_multiplier is None:
            self.target_epsilon = DEFAULT_EPSILON
        require_sound_arguments(self)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether transformers moves the whole model to the device; a model that is sharded goes there in pieces."""
        return False if self.fsdp else super().place_model_on_device

    def check(self) -> None:
        """Check again, for arguments changed one by one; `ValueError` or `TypeError` names what is wrong."""
        refuse_sharding_environment()
        refuse_incompatible_arguments(self)
        require_sound_arguments(self)

    def _derive(self, name: str, value: Any, reason: str) -> None:
        """Set what is unset, or was derived before and not changed since."""
        if self._is_free(name):
            setattr(self, name, value)
            self.derived[name], self._derived_values[name] = reason, value

    def _is_free(self, name: str) -> bool:
        value = getattr(self, name)
        return value is None or (name in self._derived_values and value == self._derived_values[name])

    def settle(self, dataset_size: int | None, num_units: int | None = None) -> None:
        """Derive batch size, epochs and learning rate, where unset, for this many training examples, or units.

        Called again, it derives them anew for what has changed since. Without data they get values that do no harm.
        """
        batch_names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        if dataset_size is None:
            for name, value in zip((*batch_names, "learning_rate"), (8, 1, 1e-3), strict=True):
                self._derive(name, value, "there are no training data")
            return
        if self.recipe == NONE:
            return
        wanted, reason = expected_batch_size(self.recipe, dataset_size)
        given = [None if self._is_free(name) else require_count(name, getattr(self, name)) for name in batch_names]
        split = split_batch(wanted, self.world_size, *given, trunk_is_cached=self.trunk_cache == "on")
        for name, value in zip(batch_names, split, strict=True):
            self._derive(name, value, f"for an expected batch size of {wanted}, {reason}")
        if self.recipe != AUTO:
            return
        self._derive("num_train_epochs", *epochs(dataset_size, self._expected_batch_size()))
        if self._is_free("learning_rate"):
            self._derive("learning_rate", *self.travel(self._plan(dataset_size, 1, num_units)).rate())

    def _expected_batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    def travel(self, plan: PrivacyPlan) -> Travel:
        """Return how far the schedule goes under the noise of a plan."""
        return Travel.of(plan, self.lr_scheduler_type, self.warmup_steps, self.lr_scheduler_kwargs)

    def clipping_settings(self) -> dict[str, Any]:
        """Return the options of the chosen strategy, as far as they are given."""
        names = [option.name for option in strategy(self.clipping).options if option.name in BUILTIN_OPTIONS]
        others = as_mapping("clipping_options", self.clipping_options) or {}
        return {name: getattr(self, name) for name in names} | others

    def privacy_plan(self, *, dataset_size: int, num_parameters: int, num_units: int | None = None) -> PrivacyPlan:
        """Return the plan of these arguments for this many examples and trainable parameters.

        Args:
            dataset_size: How many examples can be drawn: rows, or units where these are clipped.
            num_parameters: How many numbers are trained.
            num_units: How many units of privacy there are, with `privacy_unit`.
        """
        self.settle(dataset_size, num_units)
        return self._plan(dataset_size, num_parameters, num_units)

    def _plan(self, dataset_size: int, num_parameters: int, num_units: int | None) -> PrivacyPlan:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            require_count(name, getattr(self, name))
        if self.max_steps == 0:
            raise ValueError("expected max_steps >= 1, or -1 to go by num_train_epochs, got 0")
        batch_size = self._expected_batch_size()
        if dataset_size < batch_size:
            raise ValueError(
                "expected at least as many training examples as one logical batch has in expectation, got "
                f"{dataset_size} examples and {batch_size} = per_device_train_batch_size "
                f"{self.per_device_train_batch_size} × gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} × world size {self.world_size}"
            )
        if self.max_steps > 0:
            steps = self.max_steps
        else:
            steps = planned_steps(dataset_size, batch_size, self.num_train_epochs)
        private_loss = self.log_train_loss == "private"
        return PrivacyPlan.create(
            dataset_size=dataset_size,
            expected_batch_size=batch_size,
            steps=steps,
            num_parameters=num_parameters,
            target_epsilon=self.target_epsilon,
            noise_multiplier=self.noise_multiplier,
            target_delta=self.target_delta,
            accountant=self.accountant,
            clipping=self.clipping,
            settings=self.clipping_settings(),
            loss_clip=self.loss_clip if private_loss else None,
            loss_noise_multiplier=self.loss_noise_multiplier if private_loss else None,
            world_size=self.world_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            unsafe_noise_seed=self.unsafe_noise_seed,
            opt_outs=(RAW_TRAIN_LOSS,) if self.log_train_loss == "raw" else (),
            unit=self._unit(num_units),
        )

    def _unit(self, num_units: int | None) -> PrivacyUnit | None:
        if self.privacy_unit is None:
            return None
        if num_units is None:
            raise ValueError(f"expected num_units with privacy_unit={self.privacy_unit!r}, got None")
        return PrivacyUnit(self.privacy_unit, num_units, self.max_rows_per_unit, self.privacy_unit_clipping)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, and with them the plan of their run once there is one, for trackers to show."""
        return super().to_dict() | ({"privacy_plan": self.planned} if self.planned else {})

    def privacy_options(self) -> dict[str, Any]:
        """Return the options of private training, by name."""
        theirs = {f.name for f in dataclasses.fields(TrainingArguments)}
        own = {f.name for f in dataclasses.fields(DCSGDTrainingArguments) if f.init} - theirs
        return {name: getattr(self, name) for name in sorted(own)}
