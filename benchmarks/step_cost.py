"""What one private step costs: against plain training, Opacus' two ways, and between our own strategies.

One logical batch of random tokens on a BERT whose last encoder layer, pooler and classifier are trained (the paper's
setting), or whatever `--layers` says. Everything that a step does is timed: forward, backward, clipping, noise,
threshold, optimizer.

    python benchmarks/step_cost.py --size mini      # 6 layers × 384, as MiniLM
    python benchmarks/step_cost.py --size base      # 12 layers × 768, as bert-base
    python benchmarks/step_cost.py --layers last:6  # all but the embeddings, on which Opacus' ghost clipping fails
    python benchmarks/step_cost.py --layers lora    # LoRA of rank 8 on all layers
    python benchmarks/step_cost.py --tail           # hidden states of the frozen layers given, as by a trunk cache
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from timing import alternate, show
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_dcsgd import PrivacyPlan, PrivateStep
from hf_dcsgd.privacy.mechanism import DPMechanism
from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS, select_trainable_layers
from hf_dcsgd.trunk.cut import TRUNK_ENTRY, FrozenTrunk

SIZES = {
    "mini": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}


def make_model(size: str, layers: str) -> nn.Module:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES[size]))
    if layers == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, task_type="SEQ_CLS", target_modules=["query", "value"])).train()
    select_trainable_layers(model, layers)
    return model.train()


def make_batch(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 30_000, (batch, length), generator=generator)
    labels = torch.randint(2, (batch,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def fed(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[FrozenTrunk, torch.Tensor]:
    """Cut the model, and compute the hidden states of its frozen part."""
    trunk = FrozenTrunk(model)
    return trunk, trunk.capture({name: value for name, value in batch.items() if name != "labels"})


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor], tail: bool) -> Callable[[], None]:
    optimizer = torch.optim.Adam(trainable(model), lr=1e-3)
    trunk, hidden_states = fed(model, batch) if tail else (None, None)

    def step() -> None:
        with nullcontext() if trunk is None else trunk.feed(hidden_states):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: nn.Module, batch: dict[str, torch.Tensor], clipping: str, tail: bool) -> Callable[[], None]:
    size = len(batch["labels"])
    plan = PrivacyPlan.create(
        dataset_size=400 * size,
        expected_batch_size=size,
        steps=10**6,
        num_parameters=sum(p.numel() for p in trainable(model)),
        noise_multiplier=0.5,
        clipping=clipping,
    )
    trunk, hidden_states = fed(model, batch) if tail else (None, None)
    private = PrivateStep(model, DPMechanism(plan), trunk=trunk)
    batch = batch if hidden_states is None else {**batch, TRUNK_ENTRY: hidden_states}
    optimizer = torch.optim.Adam(trainable(model), lr=1e-3)

    def step() -> None:
        private.accumulate(batch)
        private.release()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus_step(model: nn.Module, batch: dict[str, torch.Tensor], ghost: bool) -> Callable[[], None]:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    size = len(batch["labels"])
    adam = torch.optim.Adam(trainable(model), lr=1e-3)
    options: dict[str, Any] = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "expected_batch_size": size}
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    if not ghost:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(adam, **options)

        def step() -> None:
            loss = nn.functional.cross_entropy(wrapped(**inputs).logits, batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    fast = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    fast_optimizer = DPOptimizerFastGradientClipping(adam, **options)
    criterion = DPLossFastGradientClipping(fast, fast_optimizer, nn.CrossEntropyLoss())

    def ghost_step() -> None:
        loss = criterion(fast(**inputs).logits, batch["labels"])
        loss.backward()
        fast_optimizer.step()
        fast_optimizer.zero_grad()

    return ghost_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mini", help="the model (default: mini)")
    parser.add_argument("--batch", type=int, default=32, help="examples per step (default: 32)")
    parser.add_argument("--length", type=int, default=128, help="tokens per example (default: 128)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: 9)")
    parser.add_argument(
        "--layers", default=DEFAULT_LAYERS, help=f"what is trained, as trainable_layers (default: {DEFAULT_LAYERS})"
    )
    parser.add_argument("--tail", action="store_true", help="hidden states of the frozen layers are given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    model, batch = make_model(options.size, options.layers), make_batch(options.batch, options.length)
    layers = "" if options.layers == DEFAULT_LAYERS else re.sub(r"\W+", "_", f"_{options.layers}")
    name = f"{options.size}{layers}{'_tail' if options.tail else ''}"
    setting = vars(options) | {"torch threads": torch.get_num_threads()}
    peers = {
        "plain training": plain_step(copy.deepcopy(model), batch, options.tail),
        "hf_dcsgd, dc_sgd_e": our_step(copy.deepcopy(model), batch, "dc_sgd_e", options.tail),
    }
    if not options.tail:
        peers["Opacus ghost clipping"] = opacus_step(copy.deepcopy(model), batch, ghost=True)
        peers["Opacus per-example gradients"] = opacus_step(copy.deepcopy(model), batch, ghost=False)
    show("One step", alternate(peers, options.rounds), setting, f"step_cost_{name}.json")
    strategies = {
        clipping: our_step(copy.deepcopy(model), batch, clipping, options.tail)
        for clipping in ("fixed", "dc_sgd_e", "dc_sgd_p", "andrew", "du", "auto_clip")
    }
    table = alternate(strategies, 2 * options.rounds)
    show("One step by strategy", table, setting, f"strategy_cost_{name}.json")


if __name__ == "__main__":
    main()
