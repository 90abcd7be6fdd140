"""`hf-dcsgd doctor`: what private training would do with a model."""

import argparse
import json

from hf_dcsgd.cli.shared import Subparsers, add_json_argument, add_subcommand

# What a model is for, and the class of transformers that loads it with the head for that.
TASKS = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = add_subcommand(
        subparsers,
        "doctor",
        run,
        help="what private training would do with a model: layers, refusals, a check, time and memory",
        description="What private training would do with a model: which parameters it would train, how the\n"
        "gradients of single examples are computed, what it would refuse and why, whether they agree\n"
        "with autograd on made-up input, and the time and memory of one step. Touches no data.\n"
        "Exit code 1 when training would be refused.",
        epilog="example:\n  hf-dcsgd doctor --model bert-base-uncased --trainable-layers last:2 --batch-size 16",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_ID",
        help="a folder written by save_pretrained, or a model on the Hub",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        help="which head the model gets (default: that of its configuration, else text-classification)",
    )
    parser.add_argument(
        "--trainable-layers",
        metavar="LAYERS",
        help="last_encoder_pooler_classifier (default), last:k, head, bias, all, or module names and globs "
        "separated by commas",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="B", help="examples per device and forward pass (default: 32)"
    )
    parser.add_argument(
        "--sequence-length", type=int, default=128, metavar="L", help="tokens of a made-up example (default: 128)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="also estimate the memory of each of N devices, with the frozen part sharded over them (default: 1)",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from hf_dcsgd.cli.diagnosis import describe, diagnose
    from hf_dcsgd.validation import require

    require(arguments.batch_size >= 1, f"expected --batch-size >= 1, got {arguments.batch_size}")
    require(arguments.devices >= 1, f"expected --devices >= 1, got {arguments.devices}")
    require(arguments.sequence_length >= 2, f"expected --sequence-length >= 2, got {arguments.sequence_length}")
    found = diagnose(
        arguments.model,
        task=arguments.task,
        trainable_layers=arguments.trainable_layers,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
        devices=arguments.devices,
    )
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else describe(found))
    return 1 if found["refused"] else 0
