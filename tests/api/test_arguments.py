"""What a user hands over from Python, if it is something else than was asked for: one line, before anything begins."""

import pytest

import fedray
from fedray import UserError, simulate
from fedray.testing.contracts import SETTINGS, small_source

CONFIG = {"algorithm.name": "fedavg", "data.clients": 4, "run.rounds": 1, "engine.kind": "local"}
NO_PLACE = "a folder or file is named by a text, a path or a result, not by "
WRONG = {
    "a configuration is a mapping or the name of a YAML file, not a list; overrides=": lambda: fedray.simulate(["a=b"]),
    "overrides= takes a list of texts, as in .*, not 'run.rounds=2'": lambda: fedray.simulate(
        CONFIG, overrides="run.rounds=2"
    ),
    "overrides= takes a list of texts, as in .*, not {'run.rounds': 2}": lambda: fedray.simulate(
        CONFIG, overrides={"run.rounds": 2}
    ),
    "overrides= takes a list of texts, as in .*, not [[]3[]]": lambda: fedray.simulate_many(CONFIG, overrides=[3]),
    "overrides= takes a list of texts, as in .*, not 'a=b'": lambda: fedray.tune("fedprox", "a=b"),
    "overrides= takes a list of texts, as in .*, not 'a=b' *": lambda: fedray.evaluate("x", overrides="a=b"),
    "callbacks= takes a list of callbacks, not <built-in function len>": lambda: fedray.Simulation(
        CONFIG, callbacks=len
    ),
    "callbacks= takes a list of callbacks, not 'mine.py'": lambda: fedray.tune("fedprox", callbacks="mine.py"),
    "loss= must be a function of outputs and targets, not 'mse': task.loss": lambda: fedray.simulate(
        CONFIG, loss="mse"
    ),
    "metrics= must be a mapping from names to functions, not [[]<": lambda: fedray.tune("fedprox", metrics=[len]),
    "data= takes the samples themselves, not 'mnist': data.source names": lambda: fedray.simulate_many(
        CONFIG, data="mnist"
    ),
    "over must be a mapping from keys to lists of values, not [[]'train.lr'[]]": lambda: fedray.simulate_many(
        CONFIG, over=["train.lr"]
    ),
    "seeds must be a whole number, not '3'": lambda: fedray.simulate_many(CONFIG, seeds="3"),
    "seeds must be at least 1, not 0": lambda: fedray.simulate_many(CONFIG, seeds=0),
    "seeds: give at least one": lambda: fedray.simulate_many(CONFIG, seeds=[]),
    "most must be a whole number, not '2'": lambda: fedray.simulate_many(CONFIG, seeds=2, most="2"),
    f"{NO_PLACE}None": lambda: fedray.tune(None),
    f"{NO_PLACE}3": lambda: fedray.evaluate(3),
    f"{NO_PLACE}[[][]]": lambda: fedray.compare([]),
}


@pytest.mark.parametrize("message", WRONG)
def test_one_line_says_what_would_be_right(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{message}") as raised:
        WRONG[message]()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_results_stand_for_their_folders(tmp_path):
    results = [fedray.simulate({**CONFIG, "run.output": str(tmp_path), "run.seed": seed}) for seed in (0,)]
    found = fedray.evaluate(results[0])
    assert found.metrics["accuracy"] == results[0].metrics["test_accuracy"].iloc[-1]
    assert fedray.compare(*results).table["runs"].tolist() == [1]


def test_results_show_themselves_in_few_words(tmp_path):
    sim = fedray.Simulation({**CONFIG, "run.output": str(tmp_path), "run.name": "short"})
    assert repr(sim) == "Simulation(not open yet)"
    sim.step()
    assert repr(sim) == f"Simulation({str(tmp_path / 'short')!r}, round 1)"
    result = sim.close()
    assert repr(result).startswith(f"RunResult({str(tmp_path / 'short')!r}, completed after 1 round, accuracy 0.")
    with pytest.raises(UserError, match="has ended after round 1"):
        fedray.Simulation({**CONFIG, "run.output": str(tmp_path), "run.name": "short"}).step()
    with pytest.raises(UserError, match=r"has no profile.csv: engine.profile=true makes it"):
        _ = result.profile
    for name, (value, message) in {
        "by": ("algorithm.name", "by= takes a list of keys, as in .*, not 'algorithm.name'"),
        "targets": (0.9, "targets= takes a list of numbers, as in .*, not 0.9"),
        "last": ("3", "--last must be a whole number, not '3'"),
        "x": (3, "--x: there is no 3 "),
    }.items():
        with pytest.raises(UserError, match=message):
            fedray.compare(result, **{name: value})
    assert " on sample, test, 2,000 samples: loss 2." in repr(fedray.evaluate(result))
    assert str(fedray.compare(result)).splitlines()[0] == "test accuracy:"


def test_a_result_without_results_shows_its_folder(tmp_path):
    lost = fedray.RunResult(tmp_path / "lost", lambda: None)
    assert repr(lost) == f"RunResult({str(tmp_path / 'lost')!r})"
    lost.folder.mkdir()
    (lost.folder / "summary.json").write_text('{"status": "failed", "reason": "x"}')
    assert repr(lost) == f"RunResult({str(tmp_path / 'lost')!r}, failed)"


def test_callbacks_may_be_a_generator(tmp_path):
    seen = []
    fedray.simulate({**CONFIG, "run.output": str(tmp_path)}, callbacks=(each for each in [seen.append]))
    assert len(seen) == 1


def test_clients_and_models_that_are_none(tmp_path):
    with fedray.Simulation({**CONFIG, "run.output": str(tmp_path)}) as sim:
        with pytest.raises(UserError, match=r"^keep_clients: client 9 does not exist or has no samples"):
            sim.step(keep_clients=[9])
        with pytest.raises(UserError, match=r"^replace_model takes a module or its state_dict\(\), not 3"):
            sim.replace_model(3)
        assert sim.round == 0


def test_public_names_are_completed():
    assert {"simulate", "Simulation", "tune", "__version__"} <= set(dir(fedray))


@pytest.mark.parametrize(("key", "value"), [("root", "/nowhere"), ("variant", "letters")])
def test_where_data_lie_is_not_said_of_data_that_are_given(key, value, tmp_path):
    with pytest.raises(UserError, match=rf"data\.{key}={value} is for data\.source, and data=\.\.\. takes its place"):
        simulate({**SETTINGS, f"data.{key}": value, "run.output": str(tmp_path)}, data=small_source())
