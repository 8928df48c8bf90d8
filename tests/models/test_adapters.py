"""Models of transformers and timm, texts, and the training of a part of a model, with models made from configurations
because there is no hub here."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from small_runs import run
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.config.model import PeftConfig
from fedray.core.linear import linear_layers
from fedray.core.norms import is_frozen
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.models.adapting import adapt
from fedray.models.norms import replace_norms
from fedray.testing.contracts import assert_same

LENGTH = 9
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KEYS = {"model__hidden": None, "run__rounds": 3, "train__cohort_size": 3, "data__clients": 5}
WORDS = ["good", "bad", "film", "the", "a", "was", "plot", "very"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a small BERT's weights."""
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, num_labels=3, **SIZES)
    torch.manual_seed(1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(2)
    y = rng.integers(0, 3, 200)
    ids = rng.integers(5, 50, (200, LENGTH))
    ids[:, 1] = 10 + y
    mask = np.ones_like(ids)
    mask[::3, 6:] = 0
    x = {"input_ids": ids, "attention_mask": mask}
    train, test = ({name: part[rows] for name, part in x.items()} for rows in (slice(160), slice(160, 200)))
    return Source("tokens", train, y[:160], test, y[160:], 3)


def images():
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, 120)
    x = rng.normal(size=(120, 1, 28, 28)).astype(np.float32)
    return Source("images", x[:90], y[:90], x[90:], y[90:], 3)


def made(name, source, **keys):
    config = load({"algorithm.name": "fedavg", "model.name": name, **keys})
    return resolve(config, CustomObjects(source=source))[0]


def test_weights_and_outputs_are_those_of_the_library(bert, tokens):
    module = made(f"transformers:{bert}", tokens).build_model()
    theirs = transformers.BertForSequenceClassification.from_pretrained(bert)
    batch = {name: torch.from_numpy(part[:4]) for name, part in tokens.x_train.items()}
    with torch.no_grad():
        assert torch.equal(module.eval()(**batch), theirs.eval()(**batch).logits)
    drawn = made(f"transformers:{bert}", tokens, **{"model.pretrained": False})
    one, two = drawn.build_model(), drawn.build_model()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.classifier.weight, theirs.classifier.weight)


def test_only_what_is_trained_travels(bert, tokens, tmp_path):
    keys = {"model__name": f"transformers:{bert}", "data": tokens, **KEYS}
    result = run(tmp_path, **keys, model__peft={"kind": "lora", "r": 2, "alpha": 4, "targets": ["query", "value"]})
    # two matrices of 16 x 2 for two projections of two layers, and the classifier
    trained = 2 * 2 * 2 * (16 * 2) + 16 * 3 + 3
    assert result.summary["parameters"] == trained
    assert result.metrics.bytes_up.tolist() == [4 * 3 * trained * (r + 1) for r in range(3)]
    start, end = load_file(bert / "model.safetensors"), load_file(result.folder / "model.safetensors")
    for name, before in start.items():
        if not name.startswith("classifier"):
            key = name
            key = (
                key if key in end else key.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
            )
            assert torch.equal(end[key], before), name
    layer = "bert.encoder.layer.0.attention.self.query"
    assert end[f"{layer}.lora_B.default.weight"].abs().max() > 0
    merged = result.model().eval()
    x = torch.randn(3, 16)
    query = merged.bert.encoder.layer[0].attention.self.query
    a, b = (end[f"{layer}.lora_{part}.default.weight"] for part in "AB")
    expected = torch.nn.functional.linear(x, start["bert.encoder.layer.0.attention.self.query.weight"])
    expected = expected + start["bert.encoder.layer.0.attention.self.query.bias"] + 4 / 2 * x @ a.T @ b.T
    torch.testing.assert_close(query(x), expected)


def test_the_same_bits_anywhere_and_when_it_is_resumed(bert, tokens, tmp_path):
    keys = {"model__name": f"transformers:{bert}", "data": tokens, **KEYS, "run__checkpoint_every": 1}
    keys |= {"model__peft": {"kind": "lora", "r": 2}}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 2})
    assert_same(whole, run(tmp_path / "parts", **keys))
    assert_same(whole, run(tmp_path / "pickled", engine__kind="fedray.testing.pickling:PicklingPool", **keys))


def test_parts_of_a_model_are_trained(tmp_path):
    keys = {"model__name": "timm:resnet10t", "data": images(), **KEYS, "run__rounds": 1}
    result = run(tmp_path, **keys, model__trainable=["fc"])
    assert result.summary["parameters"] == 512 * 3 + 3
    # running statistics of layers that are not trained stay where they are
    assert result.metrics.bytes_up[0] == 3 * 4 * (512 * 3 + 3)
    all_of_it = run(tmp_path / "all", **keys)
    statistics = sum(b.numel() for name, b in all_of_it.model().named_buffers() if "running" in name)
    parameters = sum(p.numel() for p in all_of_it.model().parameters())
    assert all_of_it.metrics.bytes_up[0] == 3 * 4 * (parameters + statistics)


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "vit"])
def test_images(name, tmp_path):
    if name == "vit":
        transformers.ViTConfig(image_size=28, patch_size=7, num_channels=1, **SIZES).save_pretrained(tmp_path / "vit")
        name = f"transformers:{tmp_path / 'vit'}"
    options = {"model__patch_size": 7, "model__embed_dim": 12, "model__depth": 1} if "timm" in name else {}
    result = run(tmp_path / "runs", model__name=name, data=images(), **KEYS | {"run__rounds": 1} | options)
    assert np.isfinite(result.metrics.test_loss).all()


@pytest.fixture
def reviews(tmp_path):
    """A data set of short reviews, and a tokenizer for it."""
    rng = np.random.default_rng(4)
    label = rng.integers(0, 2, 80)
    texts = [" ".join(["the film was", WORDS[1 - y], *rng.choice(WORDS[2:], rng.integers(1, 6))]) for y in label]
    data = datasets.Dataset.from_dict({"text": texts, "label": label})
    datasets.DatasetDict({"train": data.select(range(60)), "test": data.select(range(60, 80))}).save_to_disk(
        tmp_path / "reviews"
    )
    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "tokenizer")
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **SIZES)
    config.save_pretrained(tmp_path / "bert")
    return tmp_path


def of_texts(folder, **keys):
    return {
        "algorithm.name": "fedavg", "data.source": "hf", "data.root": str(folder / "reviews"), "data.clients": 4,
        "data.target_column": "label", "data.tokenizer": str(folder / "tokenizer"), "data.max_length": 7,
        "model.name": f"transformers:{folder / 'bert'}", "run.rounds": 8, "train.lr": 0.01, "train.optimizer": "adam",
        "engine.kind": "local", "train.local_steps": 10, "run.output": str(folder / "runs"), **keys,
    }  # fmt: skip


def test_texts(reviews):
    _, data = resolve(load(of_texts(reviews)))
    first = datasets.load_from_disk(reviews / "reviews")["train"][0]["text"].split()
    tokenizer = transformers.AutoTokenizer.from_pretrained(reviews / "tokenizer")
    expected = tokenizer.convert_tokens_to_ids(first)[:7]
    assert data.x["input_ids"].shape == (60, 7)
    assert data.x["input_ids"][0].tolist() == expected + [0] * (7 - len(expected))
    assert data.x["attention_mask"][0].tolist() == [1] * len(expected) + [0] * (7 - len(expected))
    assert simulate(of_texts(reviews)).summary["final"] > 0.9


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.tokenizer": "nowhere/at/all"}, "data.tokenizer=nowhere/at/all can't be loaded"),
        ({"data.tokenizer": None, "data.max_length": None}, r"holds texts.*\(data\.tokenizer\)"),
        ({"data.tokenizer": None}, "data.max_length is for data.tokenizer"),
        ({"data.source": "csv"}, "data.tokenizer is for data.source=hf, not csv"),
        ({"model.trainable": ["clasifier"]}, r"no layer 'clasifier' \(did you mean 'classifier"),
        (
            {"model.peft": {"kind": "lora", "targets": ["query", "vaule"]}},
            r"model\.peft\.targets: there is no linear layer 'vaule' \(did you mean 'value'\?\)",
        ),
        ({"model.peft": {"kind": "lora", "alhpa": 3}}, r"alhpa.*did you mean .*alpha"),
        ({"model.peft": {"r": 3}}, r"model\.peft\.r is for model\.peft\.kind=lora"),
        ({"model.init": "zeros"}, "would erase the weights"),
        ({"model.kind": "words"}, "kind must be one of auto, sequence"),
        ({"model.name": "timm:resnet1o"}, "timm has no such model"),
        ({"model.name": "transformers:./nowhere"}, "model transformers:./nowhere can't be made"),
    ],
)
def test_what_is_refused(keys, message, reviews):
    asked = {key: value for key, value in of_texts(reviews, **keys).items() if value is not None}
    with pytest.raises(UserError, match=message):
        simulate(asked)


def test_layers_that_get_matrices(bert, tokens):
    layers = {"model.peft": {"kind": "lora", "r": 2}}
    module = made(f"transformers:{bert}", tokens, **layers).build_model()
    trained = {name.partition(".lora")[0] for name, p in module.named_parameters() if p.requires_grad}
    linear = {name for name, layer in module.named_modules() if type(layer) is torch.nn.Linear and "lora" not in name}
    assert {name.removesuffix(".base_layer") for name in linear} - {"classifier"} == trained - {
        "classifier.weight", "classifier.bias"
    }  # fmt: skip


class Encoder(nn.Module):
    """Layers of torch that read the weights of their linear layers themselves in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x).mean(1))


def test_evaluation_has_the_further_layers_too():
    module, x = Encoder(), torch.randn(4, 5, 8)
    adapt(module, PeftConfig(kind="lora", r=2), None)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    trained = module.train()(x)
    with torch.no_grad():
        assert torch.allclose(module.eval()(x), trained, atol=1e-5)


def test_features_are_the_input_of_the_whole_last_layer():
    """Not that of the narrow layers beside it."""
    module = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))
    adapt(module, PeftConfig(kind="lora", r=2), ["0.bias"])
    assert [layer.in_features for layer in linear_layers(module)] == [5, 20]


class Linear(nn.Module):
    """It has the name of a layer that gets matrices, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))


def test_a_module_that_is_called_as_a_layer():
    module = nn.Sequential(Linear(), nn.Linear(3, 3))
    adapt(module, PeftConfig(kind="lora", r=2), None)
    assert sum("lora_A" in name for name, _ in module.named_parameters()) == 2


@pytest.mark.parametrize("trainable", [["head"], ["head", "1"]])
def test_a_norm_without_parameters_is_frozen_with_its_layers(trainable):
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    adapt(module, PeftConfig(), trainable)
    assert is_frozen(module[1]) is ("1" not in trainable)


def test_layers_that_lie_the_other_way_round(tmp_path):
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config.save_pretrained(tmp_path / "gpt")
    rng = np.random.default_rng(0)
    ids, y = rng.integers(1, 50, (160, 6)), rng.integers(0, 3, 160)
    source = Source("ids", {"input_ids": ids[:130]}, y[:130], {"input_ids": ids[130:]}, y[130:], 3)
    keys = {"model__name": f"transformers:{tmp_path / 'gpt'}", "data": source, **KEYS, "run__rounds": 1}
    result = run(tmp_path / "runs", model__pad_token_id=0, model__peft={"kind": "lora", "r": 2}, **keys)
    assert result.model().transformer.h[0].attn.c_attn.lora_B["default"].weight.abs().max() > 0


def test_the_layers_of_a_new_task_are_drawn(bert, tokens, tmp_path):
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    transformers.DistilBertForMaskedLM(config).save_pretrained(tmp_path / "body")
    experiment = made(f"transformers:{tmp_path / 'body'}", tokens)
    (note,) = (note for note in experiment.notes if "drawn at random" in note)
    assert note.startswith("warning: ")
    assert "pre_classifier" in note or "classifier" in note
    body = load_file(tmp_path / "body" / "model.safetensors")
    name = "distilbert.embeddings.word_embeddings.weight"
    assert torch.equal(experiment.build_model().state_dict()[name], body[name])


def test_an_option_that_the_configuration_lacks(bert, tokens):
    with pytest.raises(
        UserError, match=r"model.num_hiden_layers: its configuration has no such key .*num_hidden_layer"
    ):
        made(f"transformers:{bert}", tokens, **{"model.num_hiden_layers": 3})


def test_how_attention_is_computed_is_no_key_of_the_configuration(bert, tokens):
    assert made(f"transformers:{bert}", tokens, **{"model.attn_implementation": "eager"}).facts.parameters > 0


def test_a_language_model_of_more_tokens_than_the_targets_have(tmp_path):
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    config.save_pretrained(tmp_path / "gpt")
    ids = np.random.default_rng(0).integers(1, 30, (60, 6))
    x, y = {"input_ids": ids[:, :-1]}, ids[:, 1:]
    source = Source("ids", x, y, x, y, 30, task="tokens")
    keys = {"model__name": f"transformers:{tmp_path / 'gpt'}", "model__kind": "causal", "data": source, **KEYS}
    keys |= {"data__public_samples": 10, "data__partition__kind": "iid"}
    result = run(tmp_path / "runs", **keys)
    assert result.metrics["train_loss"].iloc[-1] < result.metrics["train_loss"].iloc[0]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_norms_of_timm_keep_their_activations(norm):
    module = timm.create_model("efficientnet_b0", num_classes=3)
    before = sum(isinstance(layer, nn.SiLU) for layer in module.modules())
    replace_norms(module, norm, 2, "timm:efficientnet_b0")
    assert sum(isinstance(layer, nn.SiLU) for layer in module.modules()) == before
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_a_norm_that_may_do_more_is_not_replaced():
    class Own(nn.BatchNorm2d):
        pass

    with pytest.raises(UserError, match=r"model.norm: mine: 1 is a Own, which may do more than normalise"):
        replace_norms(nn.Sequential(nn.Conv2d(1, 4, 3), Own(4)), "group", 2, "mine")
    kept = nn.Sequential(nn.Conv2d(1, 4, 3), Own(4), nn.GroupNorm(2, 4))
    replace_norms(kept, "batch", 2, "mine")
    assert [type(layer) for layer in kept[1:]] == [Own, nn.BatchNorm2d]


def test_weights_that_do_not_fit(bert, tokens, tmp_path):
    config = transformers.BertConfig.from_pretrained(bert)
    config.num_hidden_layers = 3
    transformers.BertForSequenceClassification.from_pretrained(bert).save_pretrained(tmp_path / "other")
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"its weights do not fit: bert.encoder.layer.2.*model.pretrained=false"):
        made(f"transformers:{tmp_path / 'other'}", tokens)


def test_another_configuration_is_another_run(bert, tokens, tmp_path):
    folder = tmp_path / "bert"
    transformers.BertForSequenceClassification.from_pretrained(bert).save_pretrained(folder)
    keys = {"model__name": f"transformers:{folder}", "data": tokens, **KEYS, "run__rounds": 1}
    run(tmp_path / "runs", **keys)
    config = transformers.BertConfig.from_pretrained(folder)
    config.num_attention_heads = 4
    config.save_pretrained(folder)
    with pytest.raises(UserError, match="configuration of the model"):
        run(tmp_path / "runs", **keys | {"run__rounds": 2})


@pytest.mark.parametrize("library", ["transformers", "timm", "peft"])
def test_a_library_that_is_missing(library, bert, tokens, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, library, None)
    name = f"{library}:resnet18" if library != "peft" else f"transformers:{bert}"
    keys = {"model__peft": {"kind": "lora", "r": 2}} if library == "peft" else {}
    with pytest.raises(UserError, match=rf"needs the library {library}: pip install 'fedray\[{library}\]'"):
        run(tmp_path, model__name=name, data=tokens if library != "timm" else images(), **KEYS, **keys)


def test_a_subfolder_is_meant_for_the_configuration_and_for_the_weights(tmp_path, tokens):
    for number, (folder, activation) in enumerate({"": "gelu", "inner": "relu"}.items()):
        config = transformers.BertConfig(vocab_size=50, num_labels=3, hidden_act=activation, **SIZES)
        torch.manual_seed(number)
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / folder)
    found = made(f"transformers:{tmp_path}", tokens, **{"model.subfolder": "inner"}).build_model()
    weights = load_file(tmp_path / "inner" / "model.safetensors")
    assert found.config.hidden_act == "relu"
    assert torch.equal(found.classifier.weight, weights["classifier.weight"])


@pytest.mark.parametrize(
    ("key", "message"),
    [("cache_dir", "model.cache_dir is for the library itself"), ("pretrained", "must be true or false, not 'no'")],
)
def test_options_of_the_library_that_would_be_lost(bert, tokens, key, message):
    with pytest.raises(UserError, match=message):
        made(f"transformers:{bert}", tokens, **{f"model.{key}": "no" if key == "pretrained" else "there"})
