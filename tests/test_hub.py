"""Pushes to a Hub on the loopback interface, by the real client; then each byte that left is read."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from hub_pusher import CANARY, DATA_SEED, NOISE_SEED, SEED, TOKEN
from hub_server import HubServer, hub_server
from worker_pool import WorkerPool

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, WorkerPool]]:
    """A server, and processes whose client knows no other: huggingface_hub reads its address when it is imported."""
    with hub_server() as server:
        pool = WorkerPool(
            *("hub_pusher", "hf_dcsgd.reporting.plots"),
            HF_ENDPOINT=server.url,
            HF_HOME=str(tmp_path_factory.mktemp("hf_home")),
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            TOKENIZERS_PARALLELISM="false",
            no_proxy="127.0.0.1",
        )
        yield server, pool
        pool.close()


@pytest.fixture(scope="module", params=["plain", "lora", pytest.param("sharded", marks=pytest.mark.slow)])
def pushed(request: pytest.FixtureRequest, hub: tuple[HubServer, WorkerPool], tmp_path_factory):
    """(kind, server, secrets) after a training run and its pushes in another process."""
    server, pool = hub
    work = tmp_path_factory.mktemp(request.param)
    server.forget()
    pool.run(2 if request.param == "sharded" else 1, [TESTS / "hub_pusher.py", request.param, work])
    secrets = json.loads((work / "secrets.json").read_text())
    assert secrets["release"] == transformers.__version__, "another transformers than the one under test has pushed"
    return request.param, server, secrets


def everything_sent(server: HubServer) -> bytes:
    return b"\n".join([*(data for _, data in server.uploaded), *(body for _, body in server.received)])


def test_only_listed_files_are_pushed(pushed):
    kind, server, _ = pushed
    model = (
        {"adapter_config.json", "adapter_model.safetensors"}
        if kind == "lora"
        else {"config.json", "model.safetensors"}
    )
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    statement = {
        "privacy_spent.json",
        "README.md",
        "privacy_report.json",
        "privacy_report.html",
        "clip_threshold.png",
        "training_args.bin",
    }
    pushed_names = {name for name, _ in server.uploaded}
    top_level = {name for name in pushed_names if "/" not in name}
    assert top_level == model | tokenizer | statement
    folders = {name.split("/")[0] for name in pushed_names - top_level}
    assert folders == (set() if kind == "lora" else {"checkpoint-2", "checkpoint-4"})
    assert {name.split("/")[-1] for name in pushed_names} == top_level
    assert server.commits[-1] == "The end"


def test_no_byte_of_a_secret_is_sent(pushed):
    _, server, secrets = pushed
    sent = everything_sent(server)
    # Four bytes may be anywhere by chance among so many of weights and pixels.
    without_numbers = b"\n".join(data for name, data in server.uploaded if not name.endswith((".safetensors", ".png")))
    assert b"training_args" in without_numbers
    for seed in (SEED, DATA_SEED, NOISE_SEED):
        assert str(seed).encode() not in sent
        assert struct.pack("<q", seed) not in sent
        assert struct.pack("<i", seed) not in without_numbers
    for text in (TOKEN, CANARY, "patient zero", *secrets["raw_losses"], *secrets["ledger_head"]):
        assert text.encode() not in sent
    assert secrets["rng"]
    assert secrets["moments"]
    for chunk in secrets["rng"] + secrets["moments"]:
        assert base64.b64decode(chunk) not in sent
    for loss in secrets["raw_losses"]:
        assert struct.pack("<d", float(loss)) not in sent


def test_training_arguments_carry_no_seed_and_no_token(pushed):
    _, server, _ = pushed
    pushed_arguments = [data for name, data in server.uploaded if name.endswith("training_args.bin")]
    assert pushed_arguments
    for data in pushed_arguments:
        args = torch.load(io.BytesIO(data), weights_only=False)
        assert (args.seed, args.data_seed, args.unsafe_noise_seed, args.hub_token) == (42, None, None, None)


def test_the_card_states_the_guarantee_or_its_absence(pushed):
    kind, server, secrets = pushed
    card = server.files[f"someone/{kind}"]["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["language"] == ["en"]
    assert metadata["license"] == "mit"
    result = metadata["model-index"][0]["results"][0]
    assert result["task"] == {"type": "text-classification"}
    assert {metric["type"] for metric in result["metrics"]} == {"loss", "accuracy"}
    if kind != "lora":
        assert metadata["library_name"] == "transformers"
        assert metadata["privacy"]["guarantee"] == "differential-privacy"
        assert metadata["privacy"]["steps"] == 4
        assert "-differentially private at the level of single training examples" in card
        assert f'BertForSequenceClassification.from_pretrained("someone/{kind}")' in card
        assert not secrets["raw_losses"]
    else:
        assert metadata["library_name"] == "peft"
        assert metadata["privacy"] == {"guarantee": "none", "opt_outs": ["raw_train_loss", "unsafe_noise_seed"]}
        assert "THIS MODEL HAS NO PRIVACY GUARANTEE" in card
        assert "differential-privacy" not in metadata["tags"]
        assert secrets["raw_losses"]


def test_card_and_report_name_the_sharding(pushed):
    kind, server, _ = pushed
    files = server.files[f"someone/{kind}"]
    model = json.loads(files["privacy_report.json"])["model"]
    row = next(line for line in files["README.md"].decode().splitlines() if line.startswith("| processes |"))
    page = files["privacy_report.html"].decode()
    if kind == "sharded":
        assert 0 < model["sharded_parameters"] < model["total_parameters"]
        assert row == f"| processes | 2, over which {model['sharded_parameters']:,} frozen parameters were sharded |"
        assert f"{model['sharded_parameters']:,} frozen parameters" in page
        assert "It ran on 2 processes, with `fsdp=True`." in files["README.md"].decode()
    else:
        assert (model["sharded_parameters"], row) == (0, "| processes | 1 |")
        assert "sharded" not in page


def test_intermediate_pushes_tell_of_the_steps_charged_by_then(pushed):
    kind, server, _ = pushed
    if kind == "lora":  # hub_strategy is end
        assert server.commits == ["The end"]
        return
    files = server.files[f"someone/{kind}"]
    charged = {
        name: json.loads(files[f"{name}privacy_report.json"])["steps"]["charged"]
        for name in ("checkpoint-2/", "checkpoint-4/", "")
    }
    assert charged == {"checkpoint-2/": 2, "checkpoint-4/": 4, "": 4}


def test_the_client_spoke_the_real_protocol(pushed):
    _, server, _ = pushed
    paths = [path for path, _ in server.received]
    for step in (
        "/api/repos/create",
        "/preupload/",
        "/lfs/objects/batch",
        "/lfs/[0-9a-f]{64}",
        "/commit/",
        "/resolve/",
    ):
        assert any(re.search(step, path) for path in paths), step
