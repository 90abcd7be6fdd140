"""`DCSGDTrainingArguments`: transformers' `TrainingArguments` with the options of private training.

The `help` of each field is the only text about it: command line, documentation and error messages all come from here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from hf_dcsgd.checks.environment import refuse_sharding_environment
from hf_dcsgd.clipping import STRATEGIES
from hf_dcsgd.privacy.accounting import ACCOUNTANTS, planned_steps
from hf_dcsgd.privacy.plan import RAW_TRAIN_LOSS, STRATEGY_OPTIONS, PrivacyPlan
from hf_dcsgd.runs.spending import COUNTED, EARLIER_SPENDING_CHOICES
from hf_dcsgd.validation import require_count

logger = logging.getLogger(__name__)

DEFAULT_EPSILON = 8.0
TRAIN_LOSS_MODES = ("off", "private", "raw")
TRUNK_CACHE_MODES = ("off", "on", "auto")
TRUNK_CACHE_DTYPES = ("fp32", "bf16", "fp16")
SAMPLING_STRATEGIES = ("random", "group_by_length")
LARGEST_NOISE_MULTIPLIER = 1e6
MOST_BINS = 100_000
# By how the annotation of an option starts: what its values are, and how that is said.
_KINDS: dict[str, tuple[type, str]] = {
    "float": (numbers.Real, "a number"),
    "int": (numbers.Integral, "a whole number"),
    "str": (str, "a string"),
}


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    if choices is not None:
        metadata["choices"] = list(choices)
    return field(default=default, metadata=metadata)


@dataclass
class DCSGDTrainingArguments(TrainingArguments):
    """Arguments of `DCSGDTrainer`: everything `TrainingArguments` has, and the privacy options below.

    Defaults that differ from `TrainingArguments`, because its own would hurt private training (all as in the paper):

    | argument            | here       | `TrainingArguments` | why                                                   |
    |---------------------|------------|---------------------|-------------------------------------------------------|
    | `learning_rate`     | 1e-3       | 5e-5                | Adam's own default; noise is the limit, not stability |
    | `lr_scheduler_type` | "constant" | "linear"            | every step is paid for: none should be wasted         |
    | `max_grad_norm`     | 0.0        | 1.0                 | examples are clipped one by one; see `clip_threshold` |

    One logical batch has `per_device_train_batch_size × gradient_accumulation_steps × world size` examples in
    expectation. Large ones (256 and more) serve privacy and the threshold's histogram far better than small ones.
    """

    # --- changed defaults
    learning_rate: float = _option(1e-3, "The learning rate (1e-3 suits Adam under noise, as in the paper).")
    lr_scheduler_type: SchedulerType | str = _option("constant", "The learning rate schedule.")
    max_grad_norm: float = _option(
        0.0,
        "Clips the norm of the whole, already noised gradient (0: off). It protects nobody; the per-example threshold "
        "is clip_threshold.",
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
        "rdp", "How ε is computed: rdp (Rényi, as in the paper) or pld (tighter; slower to compute).", ACCOUNTANTS
    )

    # --- clipping
    clipping: str = _option(
        "dc_sgd_e",
        "How the clipping threshold is chosen: dc_sgd_e (least expected squared error; nothing to tune), dc_sgd_p (a "
        "percentile of the norms), fixed (DP-SGD), andrew (geometric quantile tracking), du (a decay set beforehand), "
        "auto_clip (AUTO-S: normalised gradients).",
        STRATEGIES,
    )
    clip_threshold: float = _option(1.0, "The threshold C of the first step; with clipping=fixed, of every step.")
    percentile: float = _option(
        0.5, "dc_sgd_p and andrew: the fraction of examples, in (0, 1), whose gradients should stay unclipped."
    )
    histogram_bins: int = _option(20, "dc_sgd_e and dc_sgd_p: the number of bins of the histogram of norms.")
    histogram_range: float | None = _option(
        None, "dc_sgd_e and dc_sgd_p: the first range R of the histogram. Default: histogram_bins for e, 1 for p."
    )
    histogram_noise_multiplier: float | None = _option(
        None,
        "dc_sgd_e and dc_sgd_p: the noise multiplier σ_H of the histogram, which must exceed σ. Default, by the "
        "paper's rule: 5, or 8 when 2 ≤ σ ≤ 3, or 12 when σ > 3.",
    )
    andrew_learning_rate: float = _option(0.2, "andrew: the step size η_C of the threshold's logarithm.")
    andrew_noise_multiplier: float | None = _option(
        None, "andrew: standard deviation σ_b of the noise on the count of unclipped examples. Default: B/20."
    )
    du_decay: float = _option(0.5, "du: ρ_C; the threshold falls from clip_threshold to ρ_C · clip_threshold.")
    auto_clip_gamma: float = _option(0.01, "auto_clip: γ in the factor 1 / (norm + γ).")

    # --- what is trained, what is shown
    trainable_layers: str | None = _option(
        None,
        "Which parameters are trained: last_encoder_pooler_classifier (the paper's), last:k, head, bias, all, as_is "
        "(keep requires_grad as it stands), or module names and globs separated by commas. Default: as_is for peft "
        "models and plain modules, the paper's layers otherwise.",
    )
    trunk_cache: str = _option(
        "off",
        "Compute the frozen blocks in front of the first trained one once per training row, without dropout, and keep "
        "the result on disk, so that later epochs and runs pass over them. on: refuse models for which that cannot be "
        "done. auto: train those without it. The cache is private data; hf-dcsgd cache lists and removes it.",
        TRUNK_CACHE_MODES,
    )
    trunk_cache_dir: str | None = _option(
        None, "Where trunk caches are kept. Default: hf_dcsgd/trunk_cache in the Hugging Face home directory."
    )
    trunk_cache_dtype: str = _option(
        "fp32", "The precision of cached hidden states: fp32, bf16 or fp16 (half the disk space).", TRUNK_CACHE_DTYPES
    )
    log_train_loss: str = _option(
        "off",
        "The training loss is private data. off: it is not written anywhere. private: a clipped and noised loss is "
        "released, out of the same budget. raw: it is logged as it is, OUTSIDE the guarantee, and the report says so.",
        TRAIN_LOSS_MODES,
    )
    loss_clip: float = _option(2.0, "log_train_loss=private: each example's loss is cut to [0, loss_clip].")
    loss_noise_multiplier: float = _option(
        10.0, "log_train_loss=private: the noise multiplier σ_L of the released loss, which must exceed σ."
    )
    earlier_spending: str = _option(
        COUNTED,
        "What earlier private runs have spent on the weights that this one starts from. count: plan, report and card "
        "add it, as the data may be the same. other_data: it is left out, because you know that the data have no "
        "example in common; report and card say so.",
        EARLIER_SPENDING_CHOICES,
    )
    unsafe_noise_seed: int | None = _option(
        None,
        "VOIDS THE GUARANTEE. Makes noise and sampling repeatable, for debugging; whoever knows the seed can subtract "
        "the noise. The report repeats it.",
    )

    def __post_init__(self) -> None:
        # Before transformers asks for packages that could not be used anyway, and after it has parsed its own options.
        self._refuse_incompatible()
        super().__post_init__()
        layers: Any = self.trainable_layers
        if isinstance(layers, list | tuple) and all(isinstance(entry, str) for entry in layers):
            self.trainable_layers = ",".join(layers)
        if self.target_epsilon is None and self.noise_multiplier is None:
            self.target_epsilon = DEFAULT_EPSILON
        self.check()

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other or cannot be private."""
        self._check_types()
        self._check_budget()
        self._check_clipping()
        self._check_optimization()
        self._refuse_incompatible()

    def _check_types(self) -> None:
        """A number given as text, or a flag for a number, would otherwise fail later and elsewhere."""
        for name, value in self.privacy_options().items():
            # Not those of the dataclass' fields, which transformers' command line parser replaces by types.
            declared = DCSGDTrainingArguments.__annotations__[name]
            if value is None and declared.endswith("| None"):
                continue
            kind, said = next(kinds for start, kinds in _KINDS.items() if declared.startswith(start))
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"expected {name} to be {said}, got {value!r}")

    def _check_budget(self) -> None:
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                "expected one of target_epsilon and noise_multiplier, got both: "
                f"{self.target_epsilon:g} and {self.noise_multiplier:g}"
            )
        _require_positive("target_epsilon", self.target_epsilon)
        _require_positive("noise_multiplier", self.noise_multiplier)
        if self.noise_multiplier is not None and self.noise_multiplier > LARGEST_NOISE_MULTIPLIER:
            raise ValueError(
                f"expected noise_multiplier <= {LARGEST_NOISE_MULTIPLIER:g}, got {self.noise_multiplier:g}: nothing "
                "but noise would be left"
            )
        if self.unsafe_noise_seed is not None and self.unsafe_noise_seed < 0:
            raise ValueError(f"expected unsafe_noise_seed >= 0, got {self.unsafe_noise_seed}")
        if self.target_delta is not None and not 0 < self.target_delta < 1:
            raise ValueError(f"expected target_delta in (0, 1), got {self.target_delta:g}")
        _require_choice("accountant", self.accountant, ACCOUNTANTS)
        _require_choice("log_train_loss", self.log_train_loss, TRAIN_LOSS_MODES)
        _require_choice("trunk_cache", self.trunk_cache, TRUNK_CACHE_MODES)
        _require_choice("trunk_cache_dtype", self.trunk_cache_dtype, TRUNK_CACHE_DTYPES)
        _require_choice("earlier_spending", self.earlier_spending, EARLIER_SPENDING_CHOICES)
        _require_positive("loss_clip", self.loss_clip)
        _require_positive("loss_noise_multiplier", self.loss_noise_multiplier)

    def _check_clipping(self) -> None:
        _require_choice("clipping", self.clipping, STRATEGIES)
        for name in ("percentile", "du_decay"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"expected {name} in (0, 1), got {value:g}")
        for name in (
            "clip_threshold",
            "histogram_range",
            "histogram_noise_multiplier",
            "andrew_learning_rate",
            "andrew_noise_multiplier",
            "auto_clip_gamma",
        ):
            _require_positive(name, getattr(self, name))
        self._warn_of_unused_options()
        if self.histogram_bins < 2:
            raise ValueError(f"expected histogram_bins >= 2, got {self.histogram_bins}")
        if self.histogram_bins > MOST_BINS:
            raise ValueError(f"expected histogram_bins <= {MOST_BINS}, got {self.histogram_bins}")
        if self.noise_multiplier is None:
            return
        for name, used in (
            ("histogram_noise_multiplier", self.clipping in ("dc_sgd_e", "dc_sgd_p")),
            ("loss_noise_multiplier", self.log_train_loss == "private"),
        ):
            value = getattr(self, name)
            if used and value is not None and value <= self.noise_multiplier:
                raise ValueError(f"expected {name} > noise_multiplier, got {value:g} and {self.noise_multiplier:g}")

    def _warn_of_unused_options(self) -> None:
        """Options of another strategy are no error, so that one argument changes the strategy; but they do nothing."""
        defaults = {option.name: option.default for option in dataclasses.fields(DCSGDTrainingArguments)}
        used = {*STRATEGY_OPTIONS[self.clipping], "clip_threshold"}
        if "histogram_bins" in used:
            used.add("histogram_noise_multiplier")
        options = {"histogram_noise_multiplier", *(name for names in STRATEGY_OPTIONS.values() for name in names)}
        unused = sorted(
            f"{name}={getattr(self, name)}" for name in options - used if getattr(self, name) != defaults[name]
        )
        if unused:
            logger.warning("clipping=%s does not use %s", self.clipping, ", ".join(unused))

    def _check_optimization(self) -> None:
        """What would turn the weights into NaN after the budget is spent, or fail inside the optimizer."""
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "label_smoothing_factor"):
            value: Any = getattr(self, name)
            if not isinstance(value, numbers.Real):
                raise TypeError(f"expected {name} to be a number, got {value!r}")
            if not (float(value) >= 0 and math.isfinite(value)):
                raise ValueError(f"expected {name} >= 0 and finite, got {value:g}")
        if self.label_smoothing_factor > 1:
            raise ValueError(f"expected label_smoothing_factor in [0, 1], got {self.label_smoothing_factor:g}")

    def _refuse_incompatible(self) -> None:
        refuse_sharding_environment()
        refusals = {
            "fp16": (self.fp16, "its gradient scaler skips steps depending on private data; use bf16 or fp32"),
            "auto_find_batch_size": (
                self.auto_find_batch_size,
                "the batch size sets the sampling rate and so ε; choose it with per_device_train_batch_size",
            ),
            "deepspeed": (
                self.deepspeed is not None,
                "DeepSpeed owns gradients and optimizer, so noise cannot enter exactly once; use plain data "
                "parallelism (accelerate launch --multi_gpu) and, for memory, trainable_layers or LoRA",
            ),
            "fsdp": (
                bool(self.fsdp),
                "sharded parameters have no whole per-example gradient on any rank; use plain data parallelism "
                "(accelerate launch --multi_gpu) and, for memory, trainable_layers or LoRA",
            ),
            "include_num_input_tokens_seen": (
                self.include_num_input_tokens_seen not in ("no", False),
                "the number of tokens drawn is private; leave it at 'no'",
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy not in SAMPLING_STRATEGIES,
                f"the guarantee needs Poisson sampling; expected one of {', '.join(SAMPLING_STRATEGIES)}",
            ),
            "optim": (
                any(word in str(getattr(self.optim, "value", self.optim)) for word in ("lomo", "layerwise")),
                "it steps inside the backward pass, before the noise; use another optimizer",
            ),
            "neftune_noise_alpha": (
                self.neftune_noise_alpha is not None,
                "its noise on an example is scaled by the padded length of the batch, so examples affect each other",
            ),
            "gradient_checkpointing_kwargs": (
                self.gradient_checkpointing and "reentrant': True" in str(self.gradient_checkpointing_kwargs),
                "reentrant checkpointing hides the gradients of single layers; use {'use_reentrant': False}",
            ),
        }
        for name, (refused, reason) in refusals.items():
            if refused:
                raise ValueError(f"{name}={getattr(self, name)} cannot be used for private training: {reason}")

    def privacy_plan(self, *, dataset_size: int, num_parameters: int) -> PrivacyPlan:
        """The plan that these arguments make for a training set of this size and so many trainable parameters."""
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            require_count(name, getattr(self, name))
        if self.max_steps == 0:
            raise ValueError("expected max_steps >= 1, or -1 to go by num_train_epochs, got 0")
        batch_size = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
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
        options = self.privacy_options()
        for name in ("trainable_layers", "earlier_spending", "trunk_cache", "trunk_cache_dir", "trunk_cache_dtype"):
            options.pop(name)
        log_train_loss = options.pop("log_train_loss")
        if log_train_loss != "private":
            options["loss_clip"] = options["loss_noise_multiplier"] = None
        return PrivacyPlan.create(
            dataset_size=dataset_size,
            expected_batch_size=batch_size,
            steps=steps,
            num_parameters=num_parameters,
            world_size=self.world_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            opt_outs=(RAW_TRAIN_LOSS,) if log_train_loss == "raw" else (),
            **options,
        )

    def privacy_options(self) -> dict[str, Any]:
        """The options that this class adds, by name."""
        own = {f.name for f in dataclasses.fields(self)} - {f.name for f in dataclasses.fields(TrainingArguments)}
        return {name: getattr(self, name) for name in sorted(own)}


def _require_positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"expected {name} > 0 and finite, got {value:g}")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
