"""A handful of rows of every GLUE task, in the exact layout of the official files, and a tiny BERT to feed them to."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

EXAMPLES = Path(__file__).parents[1] / "examples" / "glue"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


def _tsv(*rows: str) -> str:
    return "\n".join("\t".join(field.strip() for field in row.split("|")) for row in rows) + "\n"


_MNLI_HEADER = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse|"
    "sentence1|sentence2"
)


def _mnli(number: int, one: str, two: str, *labels: str) -> str:
    return "|".join(
        [str(number), "31", f"{number}n", "fiction", "( a )", "( b )", "(X a)", "(X b)", one, two, *labels]
    )


# fmt: off
# Task → file → text. Quotation marks are left open on purpose: the official files do not quote.
OFFICIAL: dict[str, dict[str, str]] = {
    "cola": {
        "train.tsv": _tsv("gj04|1||The sailors rode.", 'gj04|0|*|They drank the "pub.', "cj99|1||More rain."),
        "dev.tsv": _tsv("gj04|1||The doll wriggled loose.", "gj04|0|*|Who do you think that left?"),
        "test.tsv": _tsv("index|sentence", "0|Bill whistled past the house.", "1|The car honked its way."),
    },
    "sst2": {
        "train.tsv": _tsv("sentence|label", 'a "smart film|1', "one long string of cliches .|0", "NA|0"),
        "dev.tsv": _tsv("sentence|label", "a charming journey .|1", "dull .|0"),
        "test.tsv": _tsv("index|sentence", "0|uneasy mishmash", "1|a treat"),
    },
    "mrpc": {
        # MRPC starts with a byte order mark.
        "train.tsv": "\ufeff"
        + _tsv(
            "Quality|#1 ID|#2 ID|#1 String|#2 String",
            '1|702876|702977|Amrozi accused his brother , "the witness" .|He called him " the witness .',
            "0|210|211|Yucaipa owned a chain .|They sold it in 1998 .",
        ),
        "dev.tsv": "\ufeff"
        + _tsv("Quality|#1 ID|#2 ID|#1 String|#2 String", "1|1|2|He said so .|So he said .", "0|3|4|Up .|Down ."),
        "test.tsv": "\ufeff" + _tsv("index|#1 ID|#2 ID|#1 String|#2 String", "0|5|6|A b c .|C b a ."),
    },
    "stsb": {
        "train.tsv": _tsv(
            "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score",
            "0|main-captions|MSRvid|2012test|0001|none|none|A plane takes off.|An air plane takes off.|5.000",
            '1|main-captions|MSRvid|2012test|0004|none|none|A man plays a "flute.|A man plays a large flute.|3.800',
            "2|main-news|MSRvid|2012test|0005|none|none|Two men smoke.|A cat sleeps.|0.250",
        ),
        "dev.tsv": _tsv(
            "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score",
            "0|main-captions|MSRvid|2012test|0000|none|none|A man dances.|A man is dancing.|5.000",
            "1|main-captions|MSRvid|2012test|0002|none|none|A child rides.|A horse eats.|1.500",
        ),
        "test.tsv": _tsv(
            "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2",
            "0|main-captions|MSRvid|2012test|0024|none|none|A girl styles her hair.|A girl brushes her hair.",
        ),
    },
    "qqp": {
        "train.tsv": _tsv(
            "id|qid1|qid2|question1|question2|is_duplicate",
            '133273|213221|213222|How is the life of a "math student?|Which level is enough?|0',
            "402555|536040|536041|How do I control my emotions?|How do you control your emotions?|1",
            "360472|364011",  # the official file has broken lines
        ),
        "dev.tsv": _tsv(
            "id|qid1|qid2|question1|question2|is_duplicate", "201359|303345|303346|Why are you?|Why you?|1",
            "263843|69383|380476|What is a pen?|How far is Rome?|0",
        ),
        "test.tsv": _tsv("id|question1|question2", "0|Would the idea work?|Would it?"),
    },
    "mnli": {
        "train.tsv": _tsv(
            f"{_MNLI_HEADER}|label1|gold_label",
            _mnli(0, "The cat sat.", "A cat sat.", "entailment", "entailment"),
            _mnli(1, 'He said "no.', "He might agree.", "neutral", "neutral"),
            _mnli(2, "It rains.", "It is dry.", "contradiction", "contradiction"),
        ),
        "dev_matched.tsv": _tsv(
            f"{_MNLI_HEADER}|label1|label2|label3|label4|label5|gold_label",
            _mnli(0, "She sings.", "She makes noise.", *["entailment"] * 6),
            _mnli(1, "She sings.", "She may.", *["neutral"] * 5, "-"),  # no gold label: left out
            _mnli(2, "She sings.", "She is silent.", *["contradiction"] * 6),
        ),
        "dev_mismatched.tsv": _tsv(
            f"{_MNLI_HEADER}|label1|label2|label3|label4|label5|gold_label",
            _mnli(0, "Up we go.", "We go down.", *["contradiction"] * 6),
        ),
        "test_matched.tsv": _tsv(_MNLI_HEADER, _mnli(0, "A b.", "C d.")),
        "test_mismatched.tsv": _tsv(_MNLI_HEADER, _mnli(0, "E f.", "G h."), _mnli(1, "I j.", "K l.")),
    },
    "qnli": {
        "train.tsv": _tsv(
            "index|question|sentence|label",
            '0|"When did it start?|It started in 1903, he said: "we began.|entailment',
            "1|Who won?|The game was played at home.|not_entailment",
        ),
        "dev.tsv": _tsv(
            "index|question|sentence|label", "0|What is it?|It is.|entailment", "1|Where?|In 1980.|not_entailment"
        ),
        "test.tsv": _tsv("index|question|sentence", "0|Who came?|Nobody came.", "1|Why?|It rained."),
    },
    "rte": {
        "train.tsv": _tsv(
            "index|sentence1|sentence2|label", '0|No "weapons.|Weapons.|not_entailment', "1|A.|A.|entailment"
        ),
        "dev.tsv": _tsv("index|sentence1|sentence2|label", "0|Dana died.|Dana died.|entailment"),
        "test.tsv": _tsv("index|sentence1|sentence2", "0|Mangla fell.|Mangla rose."),
    },
    "wnli": {
        "train.tsv": _tsv("index|sentence1|sentence2|label", "0|I stuck a pin.|It had a hole.|1", "1|A b.|B a.|0"),
        "dev.tsv": _tsv("index|sentence1|sentence2|label", "0|The drain is clogged.|The hair has to go.|0"),
        "test.tsv": _tsv("index|sentence1|sentence2", "0|Maude and Dora saw it.|Maude saw it."),
    },
}
# fmt: on

FOLDERS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP", "mnli": "MNLI"}


def write_official(root: Path, task: str) -> Path:
    """The official files of a task below `root`, in a folder of the official name."""
    folder = root / FOLDERS.get(task, task.upper())
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in OFFICIAL[task].items():
        (folder / name).write_text(text, encoding="utf-8")
    return root


def save_tiny_bert(folder: Path, num_labels: int = 2) -> str:
    """A random BERT of 10,000 parameters with a WordPiece tokenizer that knows letters, as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = "abcdefghijklmnopqrstuvwxyz0123456789.,?'\""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
            num_labels=num_labels,
        )
        BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)
