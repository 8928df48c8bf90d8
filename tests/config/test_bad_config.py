"""A mistake in a key, a value, a config file or a command is one line that says what would be right."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml
from command_runs import refused

from fedray import simulate
from fedray.cli.main import main
from fedray.config import dump_yaml, load, parse_yaml

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")

KEYS = [
    ("trian.lr=1", "unknown key trian .did you mean 'train'"),
    ("train.lrr=1", "unknown key train.lrr .did you mean 'train.lr'"),
    ("Train.lr=1", "did you mean 'train'"),
    ("rounds=3", "did you mean 'run.rounds'"),
    ("train.rounds=3", "did you mean 'run.rounds'"),
    ("train.learning_rate=1", "unknown key train.learning_rate .did you mean 'train.lr'"),
    ("num_clients=5", "did you mean 'data.clients'"),
    ("train.num_rounds=5", "did you mean 'run.rounds'"),
    ("kind=iid", "did you mean 'data.partition.kind' or 'task.kind' or "),
    ("data.partition.apha=1", "did you mean 'data.partition.alpha'"),
    ("engine.gpus=1", r"unknown key engine.gpus \(there are: .*gpus_per_actor"),
    ("algorithm.mu=1", r"fedavg: unknown key algorithm.mu \(it has no keys of its own"),
    ("algorithm.name=fedprox algorithm.muu=1", "fedprox: unknown key algorithm.muu .did you mean 'algorithm.mu'"),
    ("algorithm.name=fedprox algorithm.lr=1", "did you mean 'train.lr'"),
    ("model.hidden=[3]", r"logistic: unknown key model.hidden \(it has no keys of its own"),
    ("model.name=mlp model.hiden=[3]", "did you mean 'model.hidden'"),
    ("run.output=" + "a" * 300, "can't write to run.output=a*: File name too long"),
    ("model.weights=" + "a" * 300, "model.weights: can't read a*: File name too long"),
    ("algorithm.name=" + "a" * 300 + ".py:A", "can't read the file .*File name too long"),
    ("train=3", "train is a section, as in train.local_steps"),
    ("data=mnist", "data is a section, as in data.source: ..., not 'mnist'"),
    ("algorithm=fedavg", "algorithm is a section, as in algorithm.name"),
    ("train.lr.x=1", "train.lr must be a number, not a section"),
    ("=3", "not of the form key=value"),
    ("run.rounds=ten", "run.rounds must be a whole number, not 'ten'"),
    ("run.rounds=2.5", "run.rounds must be a whole number, not 2.5"),
    ("run.rounds=true", "run.rounds must be a number, not true or false"),
    ("run.rounds=0", "run.rounds must be at least 1, not 0"),
    ("run.rounds=1e999", "run.rounds must be a finite number"),
    ("run.seed=-1", "run.seed must be at least 0, not -1"),
    ("data.seed=9223372036854775808", "data.seed must be below 9223372036854775808, not 9223372036854775808"),
    ("train.lr=0", "train.lr must be above 0, not 0"),
    ("train.lr=nan", "train.lr must be a finite number"),
    ("train.lr=[", "is not valid YAML: line 1, column 2"),
    ("run.name=#5", "YAML takes '#5' for a comment"),
    ("a" * 300, "can't read the config file aaa"),
    ("run.rounds=010", "not valid YAML: line 1, column 1: 010 is a number in YAML 1.1 only: write 8, or put a text in"),
    ("run.rounds=1_000", "1_000 is a number in YAML 1.1 only: write 1000, or"),
    ("run.name=1:30", "1:30 is a number in YAML 1.1 only: write 90, or put a text in quotes"),
    ("run.seed=" + "9" * 5000, "a number is too long"),
    ("train.momentum=1", "train.momentum must be below 1, not 1"),
    ("train.batch_size=all", "train.batch_size must be a whole number or 'full', not 'all'$"),
    ("train.batch_size=0", "train.batch_size must be 'full' or at least 1, not 0"),
    ("train.precision=bf61", "must be 'fp32', 'tf32', 'bf16' or 'fp16', not 'bf61' .did you mean 'bf16'"),
    ("train.sampling=Uniform", "did you mean 'uniform'"),
    ("train.participation=2", "train.participation must be at most 1, not 2"),
    ("train.participation=.5 train.cohort_size=3", "train.cohort_size or train.participation, not both"),
    ("run.iterations=100", "run.rounds or run.iterations, not both"),
    ("run.targets=0.5", "run.targets must be a list, not 0.5"),
    ("run.targets=[0.5,abc]", r"run.targets\[1\] must be a number, not 'abc'"),
    ("run.resume=maybe", "run.resume must be 'auto' or true or false, not 'maybe'"),
    ("run.name=3", "run.name must be text, not 3: put it in quotes"),
    ("run.name=1e3", "run.name must be text, not 1000.0: put it in quotes"),
    ("run.output=s3:/bucket/x", "run.output names no bucket or host: s3://NAME/FOLDER"),
    ("run.output=file:/runs", "lacks slashes: a folder is file:///FOLDER, with three slashes"),
    ("run.output=file://host/runs", "names a host, host: a folder is file:///FOLDER, with three slashes"),
    ("run.name=a/b", "run.name must be the name of one folder, not 'a/b'; run.output"),
    ("run.name=../../x", "run.name must be the name of one folder"),
    ("run.name=..", "run.name must be the name of one folder"),
    ("run.name=" + "x" * 300, "run.name must be the name of one folder"),
    ('run.name="a\\0b"', "run.name must be the name of one folder"),
    ("engine.chunk=0", "engine.chunk must be .auto. or at least 1, not 0"),
    ("engine.threads=100000", "engine.threads must be at most 1024"),
    ("engine.gpus_per_actor=0.18", "use engine.actors_per_gpu=5"),
    ("engine.kind=lcoal", "engine.kind must be 'ray' or 'local', or your own as .*, not 'lcoal' .did you mean 'local'"),
    ("algorithm.name=fedavgg", "unknown algorithm 'fedavgg' .did you mean 'fedavg'"),
    ("algorithm.name=zzz", "unknown algorithm 'zzz' .there are: .*fedavg, "),
    ("algorithm.name=fedprox algorithm.mu=-1", "algorithm.mu must be at least 0, not -1"),
    ("algorithm.name=pfedmo algorithm.form=veloctiy", "did you mean 'velocity'"),
    ("algorithm.name=pfedmo data.public_samples=0", "trains a model on a public set; use auto"),
    ("model.name=lenet", "unknown model 'lenet' .did you mean 'lenet5'"),
    ("model.name=mlp model.hidden=100", "hidden must be a list of positive whole numbers, not 100"),
    ("algorithm.name=moon model.head=none", "moon needs a head with a projection, such as moon; use auto"),
    ("algorithm.name=moon model.name=logistic", "model logistic has no representation"),
    ("data.source=mnits", "no source 'mnits' .did you mean 'mnist'"),
    ("data.source=npz", "npz needs data.root"),
    ("data.partition.kind=dirichelt", "no partition 'dirichelt' .did you mean 'dirichlet'"),
    (
        "data.partition.kind=iid data.partition.alpha=1",
        "does not apply to data.partition.kind=iid; it does to dirichlet",
    ),
    ("data.partition.kind=label_skew data.partition.classes_per_client=11", "more than the 10 classes"),
    ("data.partition.kind=natural", "needs a source that says whose each sample is"),
    ("data.partition.alpha=0.001 data.clients=60", "some client always had no samples: raise data.partition.alpha"),
    ("data.clients=20000", "can't give data.clients=20000 at least 1 each"),
    ("train.cohort_size=50", "more than the 20 clients that have samples"),
    ("data.public_samples=10000", "leave none of the 10000 training samples"),
    ("run.eval_train_samples=100000", "the clients have 10000"),
]


@pytest.mark.parametrize(("arguments", "message"), KEYS)
def test_keys_and_values(arguments, message, capsys):
    assert re.search(message, refused(capsys, *arguments.split(" ")))
    assert not Path("runs").exists()


def test_a_misspelt_name_of_an_algorithm(capsys):
    assert refused(capsys, "algorithm.nam=fedprox", base=["engine.kind=local"]) == (
        "pfedmo (algorithm.name is not set): unknown key algorithm.nam (did you mean 'algorithm.name'?)"
    )


def test_a_key_of_an_algorithm_that_was_not_named(capsys):
    line = refused(capsys, "algorithm.mu=1", base=["engine.kind=local"])
    assert line.startswith("pfedmo (algorithm.name is not set): unknown key algorithm.mu (")
    assert re.search("; it is a key of .*fedprox, .*moon", line)
    assert "is not set" not in refused(capsys, "algorithm.mu=1")


CONFIGS = [
    (None, "can't read the config file c.yaml: No such file"),
    (b"a: [1\nb: 2", "c.yaml is not valid YAML: line 2, column 2"),
    (b"train:\n\tlr: 1\n", "c.yaml is not valid YAML: line 2, column 1"),
    (b"- 1\n- 2\n", "c.yaml must hold sections"),
    (b"hello", "c.yaml must hold sections"),
    (b"\xff\xfe\x00abc", "c.yaml is not a text file: a config is YAML in UTF-8"),
    (b"train:\n  lr: 0.1\n  lr: 0.2\n", "line 3, column 3: key 'lr' is given twice"),
    (b"? [1, 2]\n: 3\n", "c.yaml is not valid YAML: line 1"),
    (b"a: !!timestamp abc", "c.yaml is not valid YAML: a value can't be read"),
    (b"a: " + b"[" * 5000, "c.yaml is nested too deeply"),
    (b"train: &t\n  sub: *t\n", "c.yaml is nested too deeply"),
    (b"train: 3\ntrain.lr: 0.1\n", "train.lr is below train, which has a value already"),
    (b"train: {lrr: 1}", "c.yaml: unknown key train.lrr .did you mean 'train.lr'"),
    (b"a: 1\n---\nb: 2\n", "c.yaml is not valid YAML"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_config_files(content, message, capsys):
    if content is not None:
        Path("c.yaml").write_bytes(content)
    assert re.search(message, refused(capsys, "c.yaml"))


def test_a_users_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"train\.lr must be above 0, not -1"):
        simulate({"train.lr": -1})


def test_more_config_files(capsys):
    Path("folder.yaml").mkdir()
    assert "Is a directory" in refused(capsys, "folder.yaml")
    assert "one config file at most, not a.yaml and b.yaml" in refused(capsys, "a.yaml", "b.yaml")


def test_what_replaces_values_of_a_file_is_not_said_to_be_in_it(capsys):
    Path("c.yaml").write_text("train: {lr: 0.1}")
    assert refused(capsys, "c.yaml", "train.lr=0").startswith("train.lr must be above 0")
    assert refused(capsys, "c.yaml", "train.lrr=1").startswith("unknown key train.lrr")
    Path("c.yaml").write_text("train: {lr: 0}")
    assert refused(capsys, "c.yaml", "train.momentum=0.5").startswith("c.yaml: train.lr must be above 0")
    Path("space.yaml").write_text("spaces: {one: {train.lr: {uniform: [0.1, 1]}}}")
    assert refused(capsys, "space.yaml", "tune.trial=1", command="tune", base=[]).startswith("unknown key tune.trial ")


def test_what_yaml_may_look_like():
    """1e-3 is a number, an empty section is none, a date is text, and what is dotted is nested."""
    Path("c.yaml").write_text(
        "train:\nrun: {rounds: 1e3, name: 2024-01-01}\ntrain.lr: 1e-3\ndata.partition:\n  alpha: 1\n"
    )
    config = load("c.yaml", ["train.momentum=5e-1"])
    assert (config.run.rounds, config.run.name) == (1000, "2024-01-01")
    assert (config.train.lr, config.train.momentum, config.data.partition.alpha) == (1e-3, 0.5, 1)


NUMBERS = {
    "1e3": 1000.0, "-1E-3": -0.001, "-.5": -0.5, "2.": 2.0, "0x1f": 31, "0o17": 15, "08": 8, "-12": -12, "1e": "1e",
    "-0o7": "-0o7", ".inf": math.inf, "yes": True, "Off": False, "~": None, "'1e3'": "1e3", "2024-01-01": "2024-01-01",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_those_of_yaml_1_2(text, value):
    """What is read is written so that both versions of YAML read the same again."""
    read = parse_yaml(text)
    assert (type(read), read) == (type(value), value)
    written = dump_yaml({"key": value})
    assert parse_yaml(written) == yaml.safe_load(written) == {"key": value}


def test_commands(capsys):
    for arguments, message in (
        (["rnu"], "no command 'rnu' .did you mean 'run'"),
        (["c.yaml"], "did you mean 'fedray run c.yaml'"),
        (["run", "--foo"], "unrecognized arguments: --foo; see fedray run --help"),
        (["run", "run.rounds=1", "--foo", "train.lr=1"], "unrecognized arguments: --foo; see fedray run --help"),
        (["--foo"], "unrecognized arguments: --foo; see fedray --help"),
        (["keys", "lenet5"], "unrecognized arguments: lenet5; see fedray keys --help"),
        (["data", "--plot"], "argument --plot: expected one argument; see fedray data --help"),
    ):
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert re.search(message, lines[0])


def test_helps_and_lists(capsys):
    for command in ("run", "data", "keys", "algorithms", "models", "datasets"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: fedray {command}")
        assert command != "run" or "train.momentum = 0.0" in text
    for command, pieces in {
        "keys": ["train.lr = 0.01", "client learning rate eta_l", "[a number > 0]", "data.partition.kind = auto"],
        "algorithms": ["fedprox  (Li et al., MLSys 2020", "algorithm.mu = 0.01", "[a number >= 0]"],
        "models": ["lenet5", "model.hidden"],
        "datasets": [
            "mnist",
            "free for research",
            "data.partition.classes_per_client",
            "data.normalization=ghbm: the standard dev",
        ],
    }.items():
        assert main([command]) == 0
        text = capsys.readouterr().out
        assert all(piece in text for piece in pieces), command


def test_a_value_is_not_cut_at_a_comment(capsys):
    line = refused(capsys, "run.name=exp #5")
    assert line.startswith("'run.name=exp #5': YAML takes '#5' for a comment; put the value in quotes, key=")
    assert load(None, ['run.name="exp #5"']).run.name == "exp #5"
