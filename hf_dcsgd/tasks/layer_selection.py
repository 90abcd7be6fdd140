"""Which parameters are trained: presets and globs that set `requires_grad`.

Private training pays noise for every trainable parameter, hence the default is the paper's: the last transformer
block, the pooler and the classifier.

| expression                                 | trained                                                               |
|--------------------------------------------|-----------------------------------------------------------------------|
| `last_encoder_pooler_classifier` (default) | the last block and the head, as `last:1`                              |
| `last:k`                                   | the last k blocks and the head                                        |
| `head`                                     | what comes after the blocks: final norm, pooler, task heads           |
| `bias`                                     | every bias term and nothing else (`bias,head` adds the head)          |
| `all`                                      | everything                                                            |
| `as_is`                                    | what requires a gradient already, e.g. after peft's `get_peft_model`  |
| `ffa_lora`                                 | `as_is` without the matrices A of peft's LoRA, which stay random      |
| names or globs                             | parameters, and all parameters of modules, whose full name matches    |

Several entries, in a list or with commas in between, add up; `as_is` stands alone. A name that is also a preset means
the preset. In globs, `*` matches dots too, as in `fnmatch`.

How the blocks are found: they are the entries of the list of modules that holds most of the parameters of the base
model; of the decoder in seq2seq models. Whatever a task model adds outside its base model belongs to the head; inside
the base model, only final norms and poolers do. ALBERT's blocks all run through one shared group of layers: that group
is its last block, and training it changes every block. A head that is tied to the input embeddings (`lm_head` of GPT-2
and many others) would make the embeddings trainable, and is left out of `head`; name it to train it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

logger = logging.getLogger(__name__)

DEFAULT_LAYERS = "last_encoder_pooler_classifier"
PRESETS = (DEFAULT_LAYERS, "last:k", "head", "bias", "all", "as_is", "ffa_lora")

# Names of what follows the blocks within a base model. Attributes are registered in any order (OPT defines its final
# norm first), so that names tell more than positions. DeBERTa's `LayerNorm` beside its blocks is for `rel_embeddings`.
_HEAD_NAME = re.compile(
    r"norm|^ln_|^ln$|pool|final|post_|project_out|head|classif|score|logits|qa_outputs|^cls$", re.IGNORECASE
)
_INPUT_NAME = re.compile(r"emb|pre_|patch|rel_", re.IGNORECASE)
_LORA_A = re.compile(r"(^|\.)lora_(embedding_)?A\.")
_BIAS_NAME = re.compile(r"(^|\.)bias$|_bias$|(^|\.)bias_[^.]*$")


def select_trainable_layers(model: nn.Module, expression: str | Sequence[str] = DEFAULT_LAYERS) -> list[str]:
    """Make the parameters that `expression` names trainable and freeze all others; return their names.

    Names are those of `model.named_parameters()`, in its order; a parameter that goes by several names (tied weights)
    is matched by each and returned under the first. If the expression is in error, ValueError is raised and the model
    is left as it was. Presets other than `as_is` and `ffa_lora` are refused for models with peft adapters: they would
    train the weights that the adapters are there to spare.
    """
    entries = _entries(expression)
    names = _names_by_parameter(model)
    if entries == ["as_is"]:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("trainable_layers is as_is, but no parameter of the model requires a gradient")
        return trained
    matched = {entry: _selection(model, entry, names) for entry in entries}
    unmatched = [entry for entry, found in matched.items() if not found]
    if unmatched:
        raise ValueError(_no_match_message(model, unmatched))
    chosen = set().union(*matched.values())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return [name for name, _ in model.named_parameters() if name in chosen]


def prepare_layers(model: nn.Module, expression: str | None, *, autocast: bool = False) -> str:
    """Select the layers to train, by default those for the model, in the precision they need; return what was chosen.

    `autocast` is as for `hold_in_fp32`.
    """
    chosen = expression or default_layers(model)
    select_trainable_layers(model, chosen)
    hold_in_fp32(model, autocast=autocast)
    return chosen


def default_layers(model: nn.Module) -> str:
    """Return the expression for a model where the user gave none: as it is for adapters and plain modules."""
    return DEFAULT_LAYERS if hasattr(model, "base_model_prefix") and not _has_adapters(model) else "as_is"


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)


def hold_in_fp32(model: nn.Module, *, autocast: bool) -> None:
    """Turn trained half-precision parameters to fp32; without autocast the whole model, to fit them."""
    if any(p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        if not autocast:
            model.float()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        logger.info("trainable parameters were in half precision and are now kept in fp32")


def train_mode(model: nn.Module) -> None:
    """Call `model.train()`, but let frozen BatchNorm keep stored statistics: those of a batch would mix examples."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(any(parameter.requires_grad for parameter in module.parameters()))


def _entries(expression: str | Sequence[str]) -> list[str]:
    parts = expression.split(",") if isinstance(expression, str) else list(expression)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"expected trainable_layers to be a string or a list of strings, got {expression!r}")
    entries = [part.strip() for part in parts if part.strip()]
    if not entries:
        raise ValueError(f"trainable_layers is empty: {expression!r}; presets: {', '.join(PRESETS)}")
    if "as_is" in entries and len(entries) > 1:
        raise ValueError(f"trainable_layers: as_is cannot be combined with other entries, got {expression!r}")
    return entries


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """List all names of each parameter, the one in `model.named_parameters()` first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _selection(model: nn.Module, entry: str, names: dict[int, list[str]]) -> set[str]:
    """Return the first names of the parameters that one entry selects."""
    last = re.fullmatch(r"last:(.*)", entry)
    if entry not in PRESETS and not last:
        return {aliases[0] for aliases in names.values() if any(_matches(entry, alias) for alias in aliases)}
    if entry == "ffa_lora":
        return _without_lora_a(model)
    if _has_adapters(model):
        raise ValueError(
            f"trainable_layers={entry!r} cannot be applied to a model with peft adapters, whose own selection it "
            'would undo; use trainable_layers="as_is", or name modules'
        )
    if entry == "all":
        return {aliases[0] for aliases in names.values()}
    if entry == "bias":
        return {aliases[0] for aliases in names.values() if _BIAS_NAME.search(aliases[0])}
    blocks = block_list(model)
    head = list(_head_prefixes(model, blocks))
    # All names must lie in the head: otherwise the parameter is tied to something before it, mostly the embeddings.
    selected = {aliases[0] for aliases in names.values() if all(_is_under(alias, head) for alias in aliases)}
    if entry == "head":
        return selected
    tail = _last_blocks(model, blocks, "1" if last is None else last[1])
    return selected | {aliases[0] for aliases in names.values() if any(_is_under(alias, tail) for alias in aliases)}


def _without_lora_a(model: nn.Module) -> set[str]:
    """Select what peft's LoRA trains but A: noise on both factors of B·A would be multiplied (Sun et al., 2024)."""
    names = dict(model.named_parameters())
    if not any(_LORA_A.search(name) for name in names):
        raise ValueError("trainable_layers='ffa_lora' needs a model with LoRA adapters of peft, got none")
    return {name for name, parameter in names.items() if parameter.requires_grad and not _LORA_A.search(name)}


def _last_blocks(model: nn.Module, blocks: str, count: str) -> list[str]:
    block_names = [f"{blocks}.{name}" for name in model.get_submodule(blocks)._modules]
    size = len(block_names)
    if not count.isdecimal() or not 1 <= int(count) <= size:
        raise ValueError(
            f"trainable_layers: expected last:k with 1 <= k <= {size} (the number of blocks), got last:{count}"
        )
    return block_names[-int(count) :]


def _matches(pattern: str, name: str) -> bool:
    """Tell whether a glob matches a parameter's name or that of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _is_under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


# --- the structure of a model ----------------------------------------------------------------------------------------


def _base_name(model: nn.Module) -> str:
    """Return the name of the base model within a transformers task model; empty if the model is its own base."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def block_list(model: nn.Module) -> str:
    """Return the name of the list of transformer blocks: the list of modules with the most parameters.

    Blocks may hold lists themselves (T5's sub-layers, experts); these are never larger, and come later in case of a
    tie (ALBERT's single group). Plain modules may use `nn.Sequential`.
    """
    base = _base_name(model)
    kinds = (nn.ModuleList,) if hasattr(model, "base_model_prefix") else (nn.ModuleList, nn.Sequential)
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = _is_under(name, [base]) if base else bool(name)
        if inside and isinstance(module, kinds) and len(module):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        sizes = {name: size for name, size in sizes.items() if "decoder" in name.split(".")} or sizes
    if not sizes or not max(sizes.values()):
        raise ValueError(
            f"found no list of blocks in {type(model).__name__}: name the modules to train, or use one of bias, all, "
            "as_is"
        )
    return max(sizes, key=lambda name: sizes[name])


def _head_prefixes(model: nn.Module, blocks: str) -> Iterator[str]:
    """Yield the names of the modules and parameters that come after the blocks."""
    base = _base_name(model)
    from_transformers = hasattr(model, "base_model_prefix")
    parts = blocks.split(".")
    for depth in range(len(parts)):
        parent, inner = ".".join(parts[:depth]), parts[depth]
        module = model.get_submodule(parent)
        siblings = [name for name, _ in module.named_parameters(recurse=False)] + list(module._modules)
        outside_base = bool(base) and depth < len(base.split("."))
        if not from_transformers:
            # Nothing is known of the names: those defined after the blocks.
            siblings = siblings[siblings.index(inner) + 1 :]
        for name in siblings:
            is_head = outside_base or not from_transformers or _is_head_name(name, siblings)
            if name != inner and is_head:
                yield f"{parent}.{name}" if parent else name


def _is_head_name(name: str, siblings: Sequence[str]) -> bool:
    if name == "LayerNorm" and "rel_embeddings" in siblings:
        return False
    return bool(_HEAD_NAME.search(name)) and not _INPUT_NAME.search(name)


# --- errors ----------------------------------------------------------------------------------------------------------


def _no_match_message(model: nn.Module, entries: Sequence[str]) -> str:
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    lines = []
    for entry in entries:
        if entry in PRESETS:
            why = " (its head is tied to the input embeddings: name it to train both)" if entry == "head" else ""
            lines.append(f"trainable_layers={entry!r} selects no parameter of {type(model).__name__}{why}")
            continue
        near = _near_matches(entry, names)
        hint = f"; near matches: {', '.join(near)}" if near else ""
        lines.append(f"trainable_layers: {entry!r} matches no module or parameter of {type(model).__name__}{hint}")
    return "\n".join([*lines, f"presets: {', '.join(PRESETS)}"])


def _near_matches(entry: str, names: Sequence[str], limit: int = 5) -> list[str]:
    """List names that end alike first (`pooler` for `bert.pooler`), then those spelled alike."""
    wanted = entry.strip("*.?")
    alike = [name for name in names if wanted and name.endswith(f".{wanted}")]
    last_part = wanted.rpartition(".")[2]
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(names)}
    alike += difflib.get_close_matches(wanted, [*PRESETS, *names], n=limit, cutoff=0.6)
    alike += [by_last_part[part] for part in difflib.get_close_matches(last_part, by_last_part, n=limit, cutoff=0.7)]
    return list(dict.fromkeys(alike))[:limit]
