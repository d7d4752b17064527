"""The programs and commands of the pages, run: on the CPU, with a small model, and its folders."""

import json
import re
import shlex

import pytest
import stepwell
import torch
from stepwell.cli import app
from stepwell.deepspeed.options import Options
from stepwell.store.volume import Volume
from test_docs import PAGES, ROOT, blocks
from typer.main import get_command

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.skipif(
    not (ROOT / "ARCHITECTURE.md").is_file(), reason="the pages are not beside the tests"
)

# Those of docs/other_trainers.md are run with the trainers, in tests/offload, and so is that of
# docs/guide.md with a policy of FSDP2.
RUN = [page for page in PAGES if page.name != "other_trainers.md"]


def given(language):
    found = [(page, text) for page in RUN for text in blocks(page, language)]
    found = [(page, text) for page, text in found if "CPUOffloadPolicy" not in text]
    return [
        pytest.param(text, id=f"{page.stem}-{number}") for number, (page, text) in enumerate(found)
    ]


def small_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


class Loader:
    @staticmethod
    def from_pretrained(name, dtype):
        return small_llama().to(dtype)


def on_this_machine(text, folder):
    """A program or a command of a page, with drives that are here, and without a GPU."""
    for drive in sorted(set(re.findall(r"/(?:mnt|dev)/\w+", text))):
        place = folder / drive.rpartition("/")[2]
        place.mkdir(exist_ok=True)
        text = text.replace(drive, str(place))
    return text.replace('"cuda"', '"cpu"').replace(".cuda()", ".cpu()")


@pytest.mark.slow
# Its new name is not there in the oldest release that we serve.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("program", given("python"))
def test_a_program_of_a_page_runs(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from stepwell import Deferred, OffloadAdamW

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    ids = torch.arange(16).view(1, -1)
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    model = small_llama()
    names = {
        "stepwell": stepwell,
        "torch": torch,
        "transformers": transformers,
        "Deferred": Deferred,
        "OffloadAdamW": OffloadAdamW,
        "Volume": Volume,
        "AutoModelForCausalLM": Loader,
        "name": "a name",
        "tier": None,
        "model": model,
        "batches": [batch, batch],
        "accelerator": accelerate.Accelerator(cpu=True),
        "checkpoint": torch.utils.checkpoint.checkpoint,
        "fully_shard": lambda module: None,
        "loader": torch.utils.data.DataLoader([ids[0]]),
        "dataset": [{"input_ids": ids[0], "labels": ids[0]}] * 4,
        "args": args,
    }
    if "optimizer = " not in program:
        names["optimizer"] = OffloadAdamW(model)
    exec(compile(on_this_machine(program, tmp_path), "a page", "exec"), names)  # noqa: S102
    if "loss_of" in names:
        loss = names["loss_of"](small_llama(), ids, tokens=8)
        loss.backward()
        assert loss.isfinite()


@pytest.mark.parametrize("text", given("json"))
def test_a_block_of_the_json_is_understood(text, tmp_path):
    block = json.loads("{" + on_this_machine(text, tmp_path) + "}")["stepwell"]
    options = Options(**block)
    Volume(options.nvme_paths or [tmp_path], **(options.volume or {}))


COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in RUN
        for text in blocks(page, "")
        for line in text.splitlines()
        if re.match(r"(stepwell|.* -m stepwell|.*--module stepwell) ", line)
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_a_page_is_understood(line, tmp_path, monkeypatch):
    """What a launcher hands on, or a shell, up to where it would begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    _, _, arguments = on_this_machine(line, tmp_path).rpartition("stepwell ")
    command, words = get_command(app), shlex.split(arguments)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(line, words)
