"""Run by `test_hub.py` in a process of its own: trains a tiny model privately, pushes it, loads it back.

    python hub_pusher.py {plain,lora,sharded} WORK_DIR

Writes `secrets.json` into WORK_DIR: values that exist on this machine after the run and must not have left it.
`sharded` is run on two processes, over which the frozen part of the model is sharded.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from hf_dcsgd import DCSGDTrainer, DCSGDTrainingArguments

SEED, DATA_SEED, NOISE_SEED = 987654321, 876543219, 765432198
TOKEN = "hf_secrettokenforthetest"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CANARY = "the door code of patient zero is 4711"


def tokenizer(folder: Path) -> BertTokenizerFast:
    """One token per character, so that no word of the training text is in its vocabulary."""
    folder = folder / f"rank{RANK}"
    folder.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return BertTokenizerFast(vocab=str(folder / "vocab.txt"))


def rows(tokens: BertTokenizerFast) -> list[dict]:
    texts = [f"{CANARY} {i}" if i % 2 else f"nothing to see here {i}" for i in range(48)]
    return [{**tokens(text, truncation=True, max_length=48), "labels": i % 2} for i, text in enumerate(texts)]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_trainer(kind: str, work: Path) -> DCSGDTrainer:
    torch.manual_seed(0)
    tokens = tokenizer(work)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model = BertForSequenceClassification(config)
    options = {}
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model.save_pretrained(work / "base")
        model = BertForSequenceClassification.from_pretrained(work / "base")
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
        options = {"log_train_loss": "raw", "unsafe_noise_seed": NOISE_SEED, "clipping": "fixed"}
    else:
        options = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True}
        options |= {"fsdp": True, "fsdp_config": {"version": 2}} if kind == "sharded" else {}
    args = DCSGDTrainingArguments(
        output_dir=str(work / "run"),
        hub_model_id=f"someone/{kind}",
        hub_token=TOKEN,
        recipe="none",
        accountant="rdp",
        per_device_train_batch_size=8 // WORLD_SIZE,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        noise_multiplier=1.0,
        seed=SEED,
        data_seed=DATA_SEED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    data = rows(tokens)
    return DCSGDTrainer(
        model, args, train_dataset=data[8:], eval_dataset=data[:8], processing_class=tokens, compute_metrics=accuracy
    )


def secrets(trainer: DCSGDTrainer, work: Path) -> dict[str, Any]:
    """What the machine knows: states of random generators and optimizer, raw losses; in base64 where binary."""
    checkpoint = work / "run" / "checkpoint-4"
    states = [torch.load(file, weights_only=False)["cpu"] for file in checkpoint.glob("rng_state*.pth")]
    rng = torch.cat(states).numpy().tobytes()
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    moments = [state["exp_avg"].flatten()[:16].numpy().tobytes() for state in optimizer if state["exp_avg"].any()]
    raw_losses = [
        entry[name] for entry in trainer.state.log_history for name in ("loss", "train_loss") if name in entry
    ]
    return {
        "rng": [base64.b64encode(rng[start : start + 64]).decode() for start in range(64, len(rng) - 64, 512)],
        "moments": [base64.b64encode(moment).decode() for moment in moments],
        "raw_losses": [repr(loss) for loss in raw_losses],
        "release": transformers.__version__,
        "ledger_head": [json.loads((work / "run" / "privacy_ledger.jsonl").read_text().splitlines()[-1])["hash"]],
    }


def load_back(kind: str, work: Path) -> None:
    """Raises unless what the Hub serves has the very weights that were trained."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name = f"someone/{kind}"
    assert AutoTokenizer.from_pretrained(name).tokenize("abc") == ["a", "##b", "##c"]
    if kind == "lora":
        from peft import PeftModel, get_peft_model_state_dict

        base = AutoModelForSequenceClassification.from_pretrained(work / "base")
        found = get_peft_model_state_dict(PeftModel.from_pretrained(base, name))
        wanted = load_file(work / "run" / "adapter_model.safetensors")
    else:
        found = AutoModelForSequenceClassification.from_pretrained(name).state_dict()
        wanted = load_file(work / "run" / "model.safetensors")
    missing = wanted.keys() - found.keys() if kind == "lora" else wanted.keys() ^ found.keys()
    assert not missing, missing
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def main(kind: str, work: Path) -> None:
    trainer = make_trainer(kind, work)
    trainer.train()
    trainer.evaluate()
    # Files that a person or a script may have left in the output directory.
    (work / "run" / "notes.txt").write_text(CANARY)
    (work / "run" / "pytorch_model.bin").write_bytes(b"an old model that was not private")
    trainer.save_state()
    trainer.push_to_hub(commit_message="The end", dataset="somebody's letters", language="en", license="mit")
    if RANK:
        return
    (work / "secrets.json").write_text(json.dumps(secrets(trainer, work)))
    leftovers = [path.name for path in (work / "run").iterdir() if path.name.startswith("_upload")]
    assert not leftovers, leftovers
    load_back(kind, work)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
