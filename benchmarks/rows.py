"""The rows of the benchmark: name, what is measured, and the settings. Sizes are chosen for minutes on two cores."""

from __future__ import annotations

from typing import Any

from hf_dcsgd.tasks.layer_selection import DEFAULT_LAYERS

ALL = ("plain", "fixed", "dc_sgd_e", "opacus_ghost", "opacus_hooks")
BOTH = ("plain", "dc_sgd_e")
STRATEGIES = ("fixed", "dc_sgd_e", "dc_sgd_p", "andrew", "du", "auto_clip")


def step(
    model: str, layers: str, batch: int, length: int, *, micro: int | None = None, tail: bool = False, rounds: int = 3,
    variants: tuple[str, ...] = ALL,
) -> dict[str, Any]:  # fmt: skip
    return {
        **{"kind": "step", "model": model, "layers": layers, "batch": batch, "micro": micro or batch},
        **{"length": length, "tail": tail, "rounds": rounds, "variants": list(variants)},
    }


def epochs(size: str, lengths: str, rows: int, batch: int, rounds: int = 1) -> dict[str, Any]:
    return {"kind": "epochs", "model": size, "lengths": lengths, "rows": rows, "batch": batch, "rounds": rounds}


LAST = DEFAULT_LAYERS
OPACUS = ("plain", "dc_sgd_e", "opacus_ghost", "opacus_hooks")
ROWS: dict[str, dict[str, Any]] = {
    "step_mini_tail_64": step("mini", LAST, 256, 64, micro=32, tail=True, rounds=3),
    "step_mini_last_128": step("mini", LAST, 8, 128, rounds=7),
    "step_mini_all_128": step("mini", "last:6", 32, 128, micro=8),
    "step_mini_lora_128": step("mini", "lora", 8, 128, rounds=9),
    "epochs_base_fixed": epochs("base", "fixed", 128, 32),
    "epochs_base_mixed": epochs("base", "mixed", 64, 32),
    "step_base_last_128": step("base", LAST, 4, 128),
    "step_base_lora_128": step("base", "lora", 4, 128),
    "step_base_all_64": step("base", "last:12", 32, 64, micro=8, rounds=2, variants=OPACUS),
    "step_causal_all_256": step("causal", "all", 8, 256, micro=2, rounds=1, variants=OPACUS),
    "strategies": step("mini", LAST, 64, 32, micro=32, tail=True, rounds=25, variants=STRATEGIES),
    **{
        f"growth_batch_{batch}": step(
            "mini", LAST, batch, 128, micro=32, tail=True, rounds=max(1, 1024 // batch), variants=("dc_sgd_e",)
        )
        for batch in (64, 256, 1024, 4096)
    },
    "parts_tail": {**step("mini", LAST, 256, 64, micro=32, tail=True, rounds=1), "kind": "parts"},
    "parts_last": {**step("mini", LAST, 16, 128, rounds=2), "kind": "parts"},
    "parts_all": {**step("mini", "last:6", 32, 128, micro=8, rounds=1), "kind": "parts"},
    "parts_lora": {**step("mini", "lora", 8, 128, rounds=3), "kind": "parts"},
    "parts_causal": {**step("causal", "all", 16, 256, micro=2, rounds=1), "kind": "parts"},
    "forms": {"kind": "forms"},
    "noise": {"kind": "noise"},
    "step_choices_last_64": step("choices", LAST, 8, 64, variants=BOTH, rounds=9),
    "step_choices_all_64": step("choices", "last:6", 8, 64, variants=BOTH, rounds=5),
    "step_base_tail_32": step("base", LAST, 64, 32, micro=32, tail=True),
    "step_causal_all_1024": step("causal", "all", 4, 1024, micro=1, rounds=1, variants=OPACUS),
    **{f"growth_layers_{k}": step("mini", f"last:{k}", 64, 64, micro=16, variants=BOTH) for k in (1, 2, 4, 6)},
    "step_mini_last_64": step("mini", LAST, 16, 64),
    "step_mini_last_512": step("mini", LAST, 2, 512),
    "step_mini_all_64": step("mini", "last:6", 32, 64, micro=16, rounds=2),
    "step_mini_all_512": step("mini", "last:6", 8, 512, micro=2, rounds=2),
    "step_mini_lora_64": step("mini", "lora", 16, 64),
    "step_mini_lora_512": step("mini", "lora", 2, 512),
    "step_mini_embeddings_64": step("mini", "all", 32, 64, micro=16, rounds=2),
    "step_llama_lora_256": step("llama_32", "lora", 4, 256, variants=BOTH),
    **{
        f"step_thin{vocabulary}_{layers.removeprefix('lm_')}_{length}": step(
            f"thin_{vocabulary}", layers, max(1, 512 // length), length, rounds=5, variants=BOTH
        )
        for vocabulary, layers, length in (
            *((32, layers, length) for layers in ("lora", "lm_head") for length in (256, 1024, 2048)),
            *((150, layers, length) for layers in ("lora", "lm_head") for length in (256, 1024, 2048)),
        )
    },
    "step_thin32_tied_256": step("thin_32_tied", "lm_head", 2, 256, rounds=5, variants=BOTH),
    "collectives": {"kind": "collectives"},
}
