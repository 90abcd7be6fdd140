"""Load tokenizer and model of a job, with adapters where they are asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.integrations import is_fsdp_enabled

from hf_dcsgd.jobs.arguments import ModelArguments
from hf_dcsgd.jobs.errors import explained, needs_extra


def load_pretrained(
    args: ModelArguments, auto_class: Any, adapter_task: str, **config_values: Any
) -> tuple[Any, torch.nn.Module]:
    """Load tokenizer and model; with `--lora`, adapters for this kind of task (one of peft's TaskType) come on top."""
    name = args.model_name_or_path
    options: dict[str, Any] = {"cache_dir": args.cache_dir, "revision": args.model_revision}
    base = _base_of_adapters(name) or name
    with explained(partial(_cannot_load, name), OSError, ValueError, ImportError, RuntimeError):
        config = transformers.AutoConfig.from_pretrained(args.config_name or base, **config_values, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer_name or name, **options)
        if base == name and _is_handed_weights():
            with torch.device("meta"):
                model: Any = auto_class.from_config(config, dtype=torch.float32)
        else:
            options["ignore_mismatched_sizes"] = args.ignore_mismatched_sizes
            model = auto_class.from_pretrained(base, config=config, dtype=torch.float32, **options)
        if base != name:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, name, is_trainable=True)
    # Some tokenizers do not know how long a text their model takes.
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, with_adapters(model, args, adapter_task) if args.lora and base == name else model


def _is_handed_weights() -> bool:
    """Tell whether the main process reads the weights for this one, as fsdp_cpu_ram_efficient_loading asks for.

    Transformers would read them here, too, before it puts zeros in their place.
    """
    return is_fsdp_enabled() and torch.distributed.get_rank() > 0


def _base_of_adapters(name: str) -> str | None:
    """Return the model that adapters belong to, where a folder holds adapters only."""
    if not (Path(name) / "adapter_config.json").is_file():
        return None
    with needs_extra(f"--model_name_or_path {name}"):
        from peft import PeftConfig
    return PeftConfig.from_pretrained(name).base_model_name_or_path


def _cannot_load(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    if "mismatch" in reason:
        return f"{name} has another number of labels than the data; --ignore_mismatched_sizes starts with a fresh head"
    if isinstance(error, OSError) and not Path(name).is_dir():
        reason = (
            "there is no such folder, and the Hub cannot be reached or has no such model. Check the spelling and the "
            "network (HF_HUB_OFFLINE must not be set), or give a folder"
        )
    return f"cannot load the model {name!r}: {reason}"


def with_adapters(model: PreTrainedModel, args: ModelArguments, task: str) -> torch.nn.Module:
    """Add low-rank adapters to the model; these, and a classifier if there is one, are trained, the rest is frozen."""
    with needs_extra("--lora"):
        from peft import LoraConfig, get_peft_model
    targets = _names(args.lora_targets)
    config = LoraConfig(
        task_type=task,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=_names(args.lora_modules_to_save),
    )
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    message = f"--lora_targets {args.lora_targets}: no such modules; linear ones are {', '.join(sorted(linear))}"
    with explained(lambda error: message, ValueError):
        return get_peft_model(model, config)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
