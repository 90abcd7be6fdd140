"""What one private step costs: against plain training and Opacus' two ways, and which part of it takes how long.

One logical batch of random tokens, in micro-batches. Everything that a step does is timed: forward, backward,
clipping, noise, threshold, optimizer. Rows of the table are in `rows.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from timing import DEVICE, alternate, now
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_dcsgd import PrivacyPlan, PrivateStep
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.tasks.layer_selection import select_trainable_layers
from hf_dcsgd.tasks.loss_kind import unwrapped_model
from hf_dcsgd.tasks.losses import IGNORE_INDEX
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk

SIZES = {
    "mini": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
VOCABULARY = 32_000  # of the causal language model
LLAMAS = {
    "llama": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1376},
    # Little but a vocabulary: what is written down of it decides.
    "thin": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256},
}
CHOICES = 4  # of a question
Batch = dict[str, Tensor]
Step = Callable[[list[Batch]], None]


def make_model(size: str, layers: str) -> nn.Module:
    torch.manual_seed(0)
    if size == "causal":
        config = GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=1024, **SIZES["mini"])
        model: nn.Module = GPTNeoXForCausalLM(config)
    elif size.startswith(tuple(LLAMAS)):  # llama_32, thin_150_tied: thousands of tokens in the vocabulary
        name, thousands, *tied = size.split("_")
        shape = {"vocab_size": 1000 * int(thousands), "max_position_embeddings": 2048, **LLAMAS[name]}
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=bool(tied), use_cache=False, **shape))
    elif size == "choices":
        model = BertForMultipleChoice(BertConfig(**SIZES["mini"]))
    else:
        model = BertForSequenceClassification(BertConfig(**SIZES[size]))
    if layers == "lora":
        from peft import LoraConfig, get_peft_model

        task, names = "SEQ_CLS", ["query", "value"]
        if isinstance(model, LlamaForCausalLM):
            task, names = "CAUSAL_LM", ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=8, task_type=task, target_modules=names))
    else:
        select_trainable_layers(model, layers)
    return model.train().to(DEVICE)


def make_batch(model: nn.Module, size: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (size, CHOICES, length) if isinstance(model, BertForMultipleChoice) else (size, length)
    tokens = torch.randint(1000, 30_000, shape, generator=generator).to(DEVICE)
    causal = isinstance(unwrapped_model(model), GPTNeoXForCausalLM | LlamaForCausalLM)
    labels = tokens if causal else torch.randint(2, (size,), generator=generator).to(DEVICE)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def logits_and_labels(forward: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    inputs = {name: value for name, value in batch.items() if name not in ("labels", TRUNK_ENTRY)}
    logits = forward(**inputs).logits
    if logits.dim() == 2:
        return logits, batch["labels"]
    # As transformers does: labels are shifted, since a shifted copy of the logits is large.
    return logits.flatten(0, 1), F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:].flatten()


def feeding(trunk: FrozenTrunk | None, batch: Batch) -> AbstractContextManager[None]:
    return nullcontext() if trunk is None else trunk.feed(batch[TRUNK_ENTRY])


# -- variants --------------------------------------------------------------------------------------------------------


def plain_step(model: nn.Module, trunk: FrozenTrunk | None) -> Step:
    optimizer = torch.optim.Adam(trainable(model), lr=1e-3)

    def step(batches: list[Batch]) -> None:
        for batch in batches:
            with feeding(trunk, batch):
                (F.cross_entropy(*logits_and_labels(model, batch)) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(
    model: nn.Module, trunk: FrozenTrunk | None, clipping: str, size: int, some: Batch
) -> tuple[Step, PrivateStep, Any]:
    """Make a step of ours, as the trainer does after its checks on `some` rows."""
    plan = PrivacyPlan.create(
        dataset_size=400 * size,
        expected_batch_size=size,
        steps=10**6,
        num_parameters=sum(p.numel() for p in trainable(model)),
        noise_multiplier=0.5,
        clipping=clipping,
    )
    private = PrivateStep(model, DPMechanism(plan), trunk=trunk, device=DEVICE)
    model.eval()
    private.leave_out_unread(some)
    private.train()
    optimizer = torch.optim.Adam(trainable(model), lr=1e-3)

    def step(batches: list[Batch]) -> None:
        for batch in batches:
            private.accumulate(batch)
        private.release()
        optimizer.step()
        optimizer.zero_grad()

    return step, private, optimizer


def opacus_step(model: nn.Module, trunk: FrozenTrunk | None, size: int, ghost: bool) -> Step:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    adam = torch.optim.Adam(trainable(model), lr=1e-3)
    options: dict[str, Any] = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "expected_batch_size": size}
    loss: Callable[..., Any] = F.cross_entropy
    if ghost:
        wrapped: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
        optimizer: Any = DPOptimizerFastGradientClipping(adam, **options)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    else:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(adam, **options)

    def step(batches: list[Batch]) -> None:
        for k, batch in enumerate(batches):
            optimizer.signal_skip_step(do_skip=k < len(batches) - 1)
            with feeding(trunk, batch):
                logits, labels = logits_and_labels(wrapped, batch)
                tokens = len(labels) // len(batch["labels"])
                shape = {"shape": (len(batch["labels"]), tokens)} if ghost and tokens > 1 else {}
                loss(logits, labels, **shape).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def made(name: str, model: nn.Module, trunk: FrozenTrunk | None, size: int, some: Batch) -> Step:
    if name == "plain":
        return plain_step(model, trunk)
    if name.startswith("opacus"):
        return opacus_step(model, trunk, size, ghost=name == "opacus_ghost")
    return our_step(model, trunk, name, size, some)[0]


# -- rows of the table -----------------------------------------------------------------------------------------------


def prepared(model: nn.Module, row: dict[str, Any]) -> tuple[FrozenTrunk | None, list[Batch]]:
    """Make the micro-batches of a row; with `tail`, hidden states of the frozen blocks are in them."""
    batch = make_batch(model, row["micro"], row["length"])
    trunk = FrozenTrunk(model) if row["tail"] else None
    if trunk is not None:
        batch[TRUNK_ENTRY] = trunk.capture({name: value for name, value in batch.items() if name != "labels"})
    return trunk, [batch] * (row["batch"] // row["micro"])


def run_steps(row: dict[str, Any]) -> dict[str, Any]:
    """Time the variants of one row, alternated; the first call of each, on two examples, is not timed."""
    original = make_model(row["model"], row["layers"])
    variants: dict[str, Callable[[], None]] = {}
    for name in row["variants"]:
        model = copy.deepcopy(original)
        trunk, batches = prepared(model, row)
        try:
            step = made(name, model, trunk, row["batch"], few(batches))
            step([few(batches)])
            variants[name] = partial(step, batches)
        except Exception as error:  # a peer's: it is shown in the table
            variants[name] = partial(fail, error)
    count = sum(p.numel() for p in trainable(original))
    return {"trained": count, "variants": alternate(variants, row["rounds"])}


def few(batches: list[Batch]) -> Batch:
    return {name: value[:2] for name, value in batches[0].items()}


def fail(error: Exception) -> None:
    raise error


def run_parts(row: dict[str, Any]) -> dict[str, Any]:
    """Time the parts of a step of ours; the shares add up to 1."""
    model = make_model(row["model"], row["layers"])
    trunk, batches = prepared(model, row)
    step, private, optimizer = our_step(model, trunk, "dc_sgd_e", row["batch"], few(batches))
    step([few(batches)])
    parts = Parts()
    for owner, method, part in (
        (private, "_check_some", "spot checks"),
        (private, "losses", "forward"),
        (private.clipper, "norms", "backward and norms"),
        (private.clipper, "accumulate", "clipped sum"),
        (private, "release", "charge, noise, threshold"),
        (optimizer, "step", "optimizer"),
    ):
        setattr(owner, method, parts.timed(getattr(owner, method), part))
    start = now()
    for _ in range(row["rounds"]):
        step(batches)
    total = now() - start
    shares = {part: taken / total for part, taken in parts.seconds.items()}
    return {"shares": {**shares, "the rest": 1 - sum(shares.values())}, "seconds": total / row["rounds"]}


class Parts:
    """Adds up the time of functions; of those that call each other, the outermost counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._is_inside = False

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        self.seconds[part] = 0.0

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, start = True, now()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False
                self.seconds[part] += now() - start

        return run
