"""Train on private labeled texts, sample synthetic ones, write them with their card, and compare them with the real.

| in the output directory | holds | may be shared |
|---|---|---|
| model, card, report, ledger | what any private training leaves | yes |
| `control_shares.json` | how often each label is asked for, as released | yes |
| `synthetic/` | the table, its card, the report | yes: this is what is made to be shared |
| `private_evaluation.json` | comparisons with the private rows, without noise | NO: for their owner alone |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_dcsgd.checks.arguments import OTHER_DATA
from hf_dcsgd.jobs.arguments import JobParser
from hf_dcsgd.jobs.errors import UserError, exit_code_of
from hf_dcsgd.jobs.language_arguments import LanguageDataArguments, LanguageModelArguments
from hf_dcsgd.jobs.language_data import PROMPT, Columns, RowFormat, tokenized, use_end_token
from hf_dcsgd.jobs.language_modeling import build_trainer
from hf_dcsgd.jobs.models import load_pretrained
from hf_dcsgd.jobs.synthesis.arguments import NOISED, SynthesisArguments
from hf_dcsgd.jobs.synthesis.control import (
    SHARES_FILENAME,
    Controls,
    Shares,
    count_plan,
    noise_within,
    release_shares,
    stated_shares,
)
from hf_dcsgd.jobs.synthesis.dataset import DATASET_FOLDER, write_dataset
from hf_dcsgd.jobs.synthesis.quality import compare_copies, compare_distributions
from hf_dcsgd.jobs.synthesis.sampling import Sampled, sample_rows
from hf_dcsgd.jobs.synthesis.utility import Encoder, compare_classifiers
from hf_dcsgd.jobs.text_data import read_file, require_owners
from hf_dcsgd.jobs.training import checkpoint_to_resume, look_ahead, publish, set_up, train
from hf_dcsgd.reporting.report import build_report
from hf_dcsgd.reporting.schema import Guarantee
from hf_dcsgd.runs.files import as_json
from hf_dcsgd.runs.processes import from_main_process, on_main_process
from hf_dcsgd.runs.spending import Spending, SpentRun, add_spending
from hf_dcsgd.training_args import DCSGDTrainingArguments

EVALUATION_FILENAME = "private_evaluation.json"
MARK = (
    "PRIVATE: computed from the training rows without noise, outside of any guarantee. For the owner of these rows "
    "alone; not to be published, pushed or given away."
)
_PREFIX, _TEXT = "prompt", "completion"


def main(argv: Sequence[str] | None = None, *, prog: str | None = None, description: str | None = None) -> int:
    """Run a synthesis from `argv`, or from the command line; return the exit code."""
    return exit_code_of(lambda: run(sys.argv[1:] if argv is None else argv, prog=prog, description=description))


def run(argv: Sequence[str], *, prog: str | None = None, description: str | None = None) -> Sampled:
    """Train, sample, write, and compare where there are validation data; return the synthetic rows."""
    usage = "%(prog)s --model_name_or_path MODEL --train_file FILE --output_dir DIR … | FILE.json | FILE.yaml"
    parser = JobParser(
        LanguageModelArguments, SynthesisArguments, prog=prog, usage=usage, description=description or __doc__
    )
    model_args, args, training_args = parser.parse(argv)
    _prepare(args, training_args)
    checkpoint = checkpoint_to_resume(training_args, new_run=args.new_run)
    folder, public_name = Path(str(training_args.output_dir)), model_args.model_name_or_path
    rows = args.limited(read_file(args.train_file, model_args.cache_dir), "train")
    controls = Controls.of(rows, args)
    if training_args.privacy_unit is not None:
        require_owners(rows, training_args.privacy_unit)
    if args.sample_only:
        model_args.model_name_or_path = str(folder)
    tokenizer, model = load_pretrained(model_args, AutoModelForCausalLM, "CAUSAL_LM")
    use_end_token(tokenizer, args)
    row_format = RowFormat(tokenizer, Columns(PROMPT, (_PREFIX, _TEXT)))
    if args.sample_only:
        shares = Shares.load(folder) or stated_shares(args.label_shares, controls)
        if shares.prefixes and args.prefix_template is None and args.label_words is None:
            controls = replace(controls, prefixes=shares.prefixes)  # as the model was trained with
    else:
        prepared = _tokenized(rows, controls, row_format, args, training_args.privacy_unit)
        trainer = build_trainer(model, tokenizer, {"train": prepared}, training_args)
        if look_ahead(trainer, args):
            return Sampled()
        shares = _shares(controls, rows, args, trainer, resumed=checkpoint is not None)
        train(trainer, checkpoint)
        publish(trainer, finetuned_from=public_name, tasks="text-generation")
    if training_args.process_index != 0:
        return Sampled()
    sampled = sample_rows(
        model, tokenizer, controls, shares.counts(args.num_rows),
        lambda prefix: row_format.prompt({_PREFIX: prefix}), args, show_progress=not training_args.disable_tqdm,
    )  # fmt: skip
    if not sampled.rows:
        faults = ", ".join(f"{count} {fault}" for fault, count in sampled.left_out.items())
        raise UserError(
            f"all samples were malformed ({faults}): the model was trained too little, or --max_new_tokens "
            f"{args.max_new_tokens} is too short. --sample_only samples again, at no cost"
        )
    report = build_report(folder)
    path = write_dataset(sampled, controls, shares, report, folder / DATASET_FOLDER, args.output_format)
    print(f"synthetic rows: {path} ({len(sampled.rows):,} rows)")
    if args.validation_file is not None:
        held_out = args.limited(read_file(args.validation_file, model_args.cache_dir), "validation")
        encoder = Encoder.load(args.evaluation_model or public_name, args.max_seq_length)
        _evaluate(sampled, rows, held_out, controls, report["guarantee"], encoder, training_args)
    return sampled


def _prepare(args: SynthesisArguments, training_args: DCSGDTrainingArguments) -> None:
    if args.non_private:
        raise UserError("--non_private: a synthesis without privacy would publish the rows; expected a budget")
    if args.label_shares == NOISED and training_args.earlier_spending == OTHER_DATA:
        raise UserError(
            f"--earlier_spending {OTHER_DATA}: the count of labels is of the same data, and would be left out of ε; "
            "state the shares by --label_shares, or leave the option out"
        )
    training_args.do_train = not args.sample_only
    training_args.do_predict = True
    set_up(training_args)


def _tokenized(
    rows: Dataset, controls: Controls, row_format: RowFormat, args: SynthesisArguments, privacy_unit: str | None
) -> Dataset:
    """Write each row as its prefix and its text, and tokenize these; only the text is learned."""
    columns: dict[str, Any] = {
        _PREFIX: [controls.prefixes[place] for place in controls.places(rows, "training")],
        _TEXT: list(rows[controls.text]),
    }
    if privacy_unit is not None:
        columns[privacy_unit] = list(rows[privacy_unit])
    settings = LanguageDataArguments(
        train_file=args.train_file, max_seq_length=args.max_seq_length, overwrite_cache=args.overwrite_cache
    )
    return tokenized(Dataset.from_dict(columns), "train", row_format, settings, privacy_unit)


def _shares(controls: Controls, rows: Dataset, args: SynthesisArguments, trainer: Any, *, resumed: bool) -> Shares:
    """Settle how often each cell is asked for. Counted with noise, it is paid out of the budget of the training."""
    training_args, folder = trainer.args, Path(str(trainer.args.output_dir))
    places, unit = controls.places(rows, "training"), training_args.privacy_unit
    settle: Callable[[], Shares | None] = partial(Shares.load, folder)
    sigma = None
    if args.label_shares == NOISED:
        counted = count_plan(trainer.plan, len(controls.cells), args.label_noise_multiplier)
        training = SpentRun.of(trainer.plan, trainer.plan.steps, None)
        if training_args.target_epsilon is not None:
            sigma = noise_within(trainer.plan, counted, training_args.target_epsilon)
            training = replace(training, noise_multiplier=sigma)
        if not resumed:
            owners = None if unit is None else rows[unit]
            settle = partial(release_shares, places, owners, counted, training, folder)
    elif not resumed:
        stated = stated_shares(args.label_shares, controls)
        settle = lambda: stated  # noqa: E731
    shares = from_main_process(settle)  # counted once, whatever the number of processes
    if shares is None:
        raise UserError(f"{folder / SHARES_FILENAME} is missing: the run in {folder} cannot be gone on with")
    on_main_process(partial(replace(shares, prefixes=controls.prefixes).save, folder))
    if sigma is not None:
        training_args.target_epsilon, training_args.noise_multiplier = None, sigma
    if shares.spent is not None:
        add_spending(trainer.model, Spending((shares.spent,)))
    return shares


def _evaluate(
    sampled: Sampled,
    rows: Dataset,
    held_out: Dataset,
    controls: Controls,
    guarantee: Guarantee,
    encoder: Encoder,
    training_args: DCSGDTrainingArguments,
) -> None:
    """Compare synthetic rows with the private and with held-out ones, and write what is found for the owner's eyes."""
    labels, seed = sorted({cell[0] for cell in controls.cells}), training_args.seed
    tables: list[list[Any]] = [list(rows), sampled.rows, list(held_out)]
    real, synthetic, kept = ([str(row[controls.text]) for row in table] for table in tables)
    ids = [torch.tensor([labels.index(str(row[controls.columns[0]])) for row in table]) for table in tables]
    features = [
        encoder.features(texts, show_progress=not training_args.disable_tqdm) for texts in (real, synthetic, kept)
    ]
    transformers.set_seed(seed)
    found = {
        "private": MARK,
        "rows": {"training": len(real), "synthetic": len(synthetic), "held_out": len(kept)},
        "guarantee": {"epsilon": guarantee["epsilon"], "delta": guarantee["delta"], "unit": guarantee["unit"]},
        "classifiers": compare_classifiers(
            *zip(features, ids, strict=True),
            classes=len(labels),
            epsilon=guarantee["epsilon"],
            delta=guarantee["delta"],
        ),
        "distances_to_training_rows": compare_distributions(synthetic, real, kept, seed),
        "copies": compare_copies(synthetic, real, kept, seed),
    }
    path = Path(str(training_args.output_dir)) / EVALUATION_FILENAME
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        file.write(as_json(found))
    print(f"comparison with the private rows, for their owner alone: {path}")
