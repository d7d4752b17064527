"""Sizes of models: those of transformers itself, read from configurations alone."""

import json
import subprocess
import sys

import pytest
import torch
from stepwell.planning.families import FAMILIES
from stepwell.planning.model import model_of

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 515,
    "intermediate_size": 192,
    "pad_token_id": 0,
}
# What configurations of some families say beside that.
VARIANTS = [
    {},
    {"num_key_value_heads": 4},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"use_bias": False},
    {"use_qkv_bias": True},
]


def built(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("said", VARIANTS, ids=lambda said: "_".join(said) or "plain")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_a_configuration_are_those_of_the_model(family, said, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **SMALL, **said)
    numels = sorted(param.numel() for param in built(config).parameters())
    # All that it has, and only what is not the default.
    for has_defaults in (True, False):
        text = config.to_json_string(use_diff=not has_defaults)
        (tmp_path / "config.json").write_text(text)
        assert sorted(model_of(tmp_path).numels) == numels


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            },
            8_030_261_248,  # Llama 3.1 8B
        ),
        (
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
                "tie_word_embeddings": False,
            },
            7_615_616_512,  # Qwen2.5 7B
        ),
        (
            {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_hidden_layers": 18,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "vocab_size": 256000,
            },
            2_506_172_416,  # Gemma 2B
        ),
    ],
    ids=["llama", "qwen2", "gemma"],
)
def test_published_models_have_their_published_counts(config, count, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_of(str(path)).num_params == model_of(tmp_path).num_params == count


@pytest.mark.parametrize("text", ["1.5B", "7B", "125e6", "70b", "350M", "1t", "12345678"])
def test_a_number_of_parameters_is_that_many(text):
    units = {"m": 10**6, "b": 10**9, "t": 10**12}
    number = text.lower().rstrip("mbt")
    count = round(float(number) * units.get(text.lower()[-1], 1))
    model = model_of(text)
    assert model.num_params == count == model_of(count).num_params
    assert model.is_assumed


def test_a_callable_is_built_on_meta():
    def build():
        layers = [torch.nn.Linear(64, 64) for _ in range(5)]
        return torch.nn.Sequential(
            torch.nn.Embedding(100, 64), torch.nn.ModuleList(layers), torch.nn.LayerNorm(64)
        )

    model = model_of(build)
    assert model.num_params == 100 * 64 + 5 * (64 * 64 + 64) + 128
    assert (model.num_layers, model.hidden, model.vocab) == (5, 64, 100)
    whole = build()
    whole[0].requires_grad_(False)
    assert (model_of(whole).num_frozen, model_of(whole).num_all) == (6400, model.num_params)


def test_a_callable_is_named_by_its_module(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 4)\n"
    )
    program = "from stepwell.planning.model import model_of; print(model_of('mine:build').num_all)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True, text=True
    )
    assert ended.stdout == "36\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nothing.json", "`nothing.json`, expected a config.json"),
        ("12", "`12` parameters, expected 1000000 or more"),
        ("nothing:build", "`nothing:build`, which cannot be imported"),
        ("json:nothing", "`json:nothing`, which cannot be imported"),
        ("sys:path", "cannot be called"),
        ("json:JSONEncoder", "gives a `JSONEncoder`, expected a torch.nn.Module"),
        (True, "the model is `True`"),
        (None, "the model is `None`"),
    ],
)
def test_what_is_no_model_is_refused(source, said):
    with pytest.raises(ValueError) as refused:
        model_of(source)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[]", "has no object"),
        ("{", "cannot be read"),
        ('{"model_type": "bert"}', "`bert`, expected one of arcee"),
        ('{"model_type": "llama", "hidden_size": 64}', "`num_hidden_layers`"),
        ('{"model_type": "llama", "hidden_size": "64"}', "`hidden_size` of"),
    ],
)
def test_a_configuration_that_is_none_is_refused(config, said, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError) as refused:
        model_of(tmp_path)
    assert said in str(refused.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"which is not there, expected a config\.json"):
        model_of(tmp_path)
