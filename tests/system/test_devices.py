"""What clients' devices are and when they can be reached: from files, profiles and distributions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from command_runs import refused

from fedray import UserError, simulate
from fedray.config import load
from fedray.config.system import OF_DEVICES
from fedray.experiment.resolve import resolve
from fedray.system.availability import availability_of
from fedray.system.devices import devices_of, profiles

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")

ALL = np.arange(3)


def system(**keys):
    return load({f"system.{name}": value for name, value in keys.items()}).system


def test_numbers_and_distributions():
    found = devices_of(
        system(flops_per_second=2e9, down_mbps={"choice": [1, 10]}, latency_ms={"uniform": [5, 7]}), 4000, 3
    )
    assert set(found.flops_per_second) == {2e9}
    assert np.mean(found.down_mbps == 10) == pytest.approx(0.5, abs=0.04)
    assert 5 <= found.latency_ms.min() < 5.01 < 6.99 < found.latency_ms.max() <= 7
    assert np.isinf(found.up_mbps).all()
    assert np.isnan(found.watts).all()
    drawn = devices_of(system(up_mbps={"lognormal": [8, 0.5]}), 4000, 3).up_mbps
    assert np.median(drawn) == pytest.approx(8, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.05)
    # a key does not change what is drawn for another, and a seed gives the same devices again
    assert (
        devices_of(system(up_mbps={"lognormal": [8, 0.5]}, watts={"uniform": [1, 2]}), 4000, 3).up_mbps == drawn
    ).all()
    assert (devices_of(system(up_mbps={"lognormal": [8, 0.5]}), 4000, 4).up_mbps != drawn).any()


def test_profiles_have_their_shares():
    found = devices_of(
        system(devices={"raspberry_pi_4": 0.25, "edge_server": 0.75}, networks="mobile_4g", watts=3), 16, 0
    )
    pi, server = (profiles("devices")[name]["flops_per_second"] for name in ("raspberry_pi_4", "edge_server"))
    assert sorted(found.flops_per_second) == [float(pi)] * 4 + [float(server)] * 12
    assert found.flops_per_second.tolist() != sorted(found.flops_per_second)
    assert set(found.up_mbps) == {11.22}
    assert set(found.watts) == {3.0}
    for kind in ("devices", "networks"):
        for name, profile in profiles(kind).items():
            assert profile["source"], name
            assert all(float(value) > 0 for key, value in profile.items() if key != "source")


def test_a_file_of_devices():
    Path("all.csv").write_text("client, flops_per_second, watts\n2, 3e9, 1\n0, 1e9, 2\n1, 2e9, 3\n")
    found = devices_of(system(devices="all.csv", down_mbps=4), 3, 0)
    assert found.flops_per_second.tolist() == [1e9, 2e9, 3e9]
    assert found.watts.tolist() == [2, 3, 1]
    assert set(found.down_mbps) == {4.0}
    Path("all.csv").write_bytes(b"\xef\xbb\xbfclient,watts\r\n2 ,1\r\n0,2\r\n1,3 \r\n")
    assert devices_of(system(devices="all.csv"), 3, 0).watts.tolist() == [2, 3, 1]
    Path("named.csv").write_text("client,watts\nann,1\nbob,2\n2,3\n")
    assert devices_of(system(devices="named.csv"), 3, 0, ["ann", "bob", "eve"]).watts.tolist() == [1, 2, 3]


def test_a_file_of_intervals():
    Path("when.csv").write_text("client,from,to\n0,10,20\n1,0,5\n2,0,1e9\n0,20,30\n0,0,5\n")
    found = availability_of("when.csv", 3, 0)
    assert found.until(ALL, 0.0).tolist() == [5, 5, 1e9]
    assert found.until(ALL, 5.0).tolist() == [5, 5, 1e9]
    # two intervals that meet are one
    assert found.until(ALL, 10.0).tolist() == [30, 10, 1e9]
    assert [found.next_start(ALL, time)[0] for time in (0, 5, 12, 30)] == [0, 10, 12, math.inf]
    assert found.next_start(ALL, 6.0).tolist() == [10, math.inf, 6]
    assert found.longest(ALL).tolist() == [20, 5, 1e9]
    assert found.last(ALL).tolist() == [30, 5, 1e9]


def test_hours_of_the_day():
    night = availability_of({"from": 22.0, "to": 6.0, "shift": 0}, 3, 0)
    hours = [0, 5.5, 6, 12, 22, 23.5, 24 + 3]
    there = [night.until(ALL, 3600.0 * hour)[1] / 3600 for hour in hours]
    assert there == [6, 6, 6, 12, 30, 30, 30]
    assert night.next_start(ALL, 3600.0 * 12).tolist() == [3600.0 * 22] * 3
    assert (night.longest(ALL).tolist(), night.last(ALL).tolist()) == ([3600.0 * 8] * 3, [math.inf] * 3)
    shifted = availability_of({"from": 22.0, "to": 6.0, "shift": {"choice": [0, 12]}}, 1000, 0)
    awake = shifted.until(np.arange(1000), 0.0) > 0
    assert 0.4 < np.mean(awake) < 0.6
    # those who sleep at midnight are there at noon
    assert ((shifted.until(np.arange(1000), 43200.0) > 43200.0) == ~awake).all()


FILES = {
    "fast.yaml": "flops_per_second: fast",
    "odd.yaml": "watt: 3",
    "lacks.csv": "client,watts\n0,1\n2,1\n",
    "twice.csv": "client,watts\n0,1\n1,1\n2,1\n1,2\n",
    "stranger.csv": "client,watts\n0,1\n1,1\n2,1\n3,1\n",
    "negative.csv": "client,down_mbps\n0,1\n1,-4\n2,1\n",
    "text.csv": "client,down_mbps\n0,1\n1,fast\n2,1\n",
    "column.csv": "client,down_mps\n0,1\n1,1\n2,1\n",
    "none.csv": "client\n0\n1\n2\n",
    "backwards.csv": "client,from,to\n0,0,9\n1,8,8\n2,0,9\n",
    "overlap.csv": "client,from,to\n0,0,9\n1,0,8\n2,0,9\n1,7,9\n",
    "somebody.csv": "client,from,to\n0,0,9\n2,0,9\n",
    "before.csv": "client,from,to\n0,-9,9\n1,0,8\n2,-9,0\n",
    "long.csv": "client,watts\n0,1,7\n1,1,7\n2,1,7\n",
    "longer.csv": "client,watts\n0,1\n\n1,1,7\n2,1\n",
    "short.csv": "client,watts,down_mbps\n0,1,7\n1,1\n2,1,7\n",
    "blank.csv": "client,watts\n\n0,1\n  \n1,none\n2,1\n",
    "double.csv": "client,watts,watts\n0,1,7\n1,1,7\n2,1,7\n",
    "empty.csv": "\n",
    "link.yaml": "flops_per_second: 1e9\ndown_mbps: 3\n",
}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("devices=lacks.csv", "system.devices=lacks.csv lacks client 1 (it needs one for each of 3)"),
        ("devices=twice.csv", "system.devices=twice.csv has more than one line for client 1 (it needs"),
        ("devices=stranger.csv", "stranger.csv, line 5: there is no client '3'; clients are numbered from 0 to 2"),
        ("devices=negative.csv", "negative.csv, line 3: down_mbps must be above 0, not -4"),
        ("devices=text.csv", "text.csv, line 3: down_mbps must be a number, not 'fast'"),
        ("devices=column.csv", "has an unknown column 'down_mps' (did you mean 'down_mbps'?)"),
        ("devices=none.csv", "has none of the columns flops_per_second, down_mbps"),
        ("devices=absent.csv", "can't read system.devices=absent.csv: No such file"),
        ("devices=rasberry_pi_4", "there is no profile 'rasberry_pi_4' (did you mean 'raspberry_pi_4'?)"),
        ("devices={phone_low: 0.5, phone_mid: 0.6}", "must have shares that add up to 1, not {phone_low: 0.5"),
        ("devices={phone_low: half}", "with shares from 0 to 1, not phone_low: 'half'"),
        ("networks=5", "must be a profile or a file, or {name: share, ...}, not 5"),
        ("availability=backwards.csv", "line 3: the interval must end after it begins, not from 8 to 8"),
        ("availability=overlap.csv", "line 5: the interval of client 1 from 7 to 9 overlaps that from 0 to 8"),
        ("availability=somebody.csv", "lacks client 1: a client without an interval could never be reached"),
        ("availability=before.csv", "line 4: the clock begins at 0 s, and the interval from -9 to 0 is before"),
        # pandas would take the clients for an index, and their watts for the clients
        ("devices=long.csv", "long.csv, line 2: there are 3 cells, and the header has 2"),
        ("devices=longer.csv", "longer.csv, line 4: there are 3 cells, and the header has 2"),
        ("devices=short.csv", "short.csv, line 3: there are 2 cells, and the header has 3"),
        ("devices=blank.csv", "blank.csv, line 5: watts must be a number, not 'none'"),
        ("devices=double.csv", "double.csv has two columns 'watts'"),
        ("devices=empty.csv", "empty.csv is empty"),
        ("networks=all.csv", "system.networks: all.csv is a CSV file, which goes into system.devices alone"),
        ("devices={all.csv: 0.5, phone_low: 0.5}", "system.devices: all.csv is a CSV file, which goes into"),
        ("devices=wifi_2_4ghz", "system.devices: wifi_2_4ghz is a profile of system.networks"),
        ("networks={phone_low: 1}", "system.networks: phone_low is a profile of system.devices"),
        ("availability=trace.txt", "must be a file that ends with .csv, or {from: hour"),
        ("devices=fast.yaml", "system.devices=fast.yaml: flops_per_second must be a number above 0, not 'fast'"),
        (
            "devices={odd.yaml: 0.5, phone_mid: 0.5}",
            "system.devices=odd.yaml: unknown key watt (did you mean 'watts'?)",
        ),
        ("networks=absent.yaml", "can't read system.networks=absent.yaml: No such file"),
        ("availability={from: 8}", "with an hour from 0 to 24 as to, not nothing"),
        ("availability={from: 8, untl: 9}", "not 'untl'"),
        ("availability={from: 8, to: 8}", "begins and ends at the same hour, 8; leave it out if clients can always be"),
        ("availability={from: 0, to: 24}", "begins and ends at the same hour, 0 and 24; leave it out if clients can"),
        ("availability=[]", "must be a file that ends with .csv, or {from: hour, to: hour, shift: hours}, not []"),
        ("availability=5", "must be a file that ends with .csv, or {from: hour, to: hour, shift: hours}, not 5"),
        ("availability={from: .nan, to: 9}", "with an hour from 0 to 24 as from, not nan"),
        ("availability={from: 8, to: 9, shift: .nan}", "with a finite number of hours as shift, not nan"),
        ("availability={from: 8, to: 9, shift: .inf}", "with a finite number of hours as shift, not inf"),
        ("availability={from: 8, to: 9, shift: -1}", "must have a shift of at least 0, not -1"),
        ("availability={from: 8, to: 9, shift: {uniform: [-1, .inf]}}", "uniform: must have finite numbers, not inf"),
        ("flops_per_second=-1", "system.flops_per_second must be above 0, not -1"),
        ("flops_per_second={uniform: [0, 0]}", "system.flops_per_second must be above 0, not 0 (uniform: [0, 0])"),
        ("flops_per_second={lognormal: [0, 1]}", "must be above 0, not 0 (lognormal: [0, 1])"),
        ("flops_per_second={choice: [-3, 1e9]}", "must be above 0, not -3 (choice: [-3, 1e+09])"),
        ("latency_ms={choice: [-3, 1]}", "must be at least 0, not -3 (choice: [-3, 1])"),
        ("up_mbps={lognormal: [20, 15]}", "must have a sigma from 0 to 5, the standard deviation of the natural log"),
        ("up_mbps={lognormal: [20, -1]}", "must have a sigma from 0 to 5"),
        ("up_mbps={choice: [.nan]}", "choice: must have finite numbers, not nan"),
        ("up_mbps={uniform: [3, 1]}", "uniform: [3, 1] must begin with the smaller number"),
        ("up_mbps={lognormal: [3]}", "must be lognormal: [median, sigma], not [3]"),
        ("up_mbps={choice: [0, 1]}", "system.up_mbps must be above 0, not"),
        ("dropout=1", "system.dropout must be below 1"),
        ("over_select=0.5", "system.over_select must be at least 1"),
        ("over_select=2", "draws 6 clients for a cohort of 3, and only 3 have samples"),
        ("on_late=keep", "system.on_late is for runs with system.deadline_seconds"),
        ("upmbps=3", "unknown key system.upmbps (did you mean 'system.up_mbps'?)"),
    ],
)
def test_bad_input(setting, message, capsys):
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert message in refused(capsys, "data.clients=3", f"system.{setting}")
    assert not Path("runs").exists()


def test_what_two_places_say(capsys):
    Path("all.csv").write_text("client,watts,up_mbps\n0,1,2\n1,1,2\n2,1,2\n")
    Path("link.yaml").write_text(FILES["link.yaml"])
    line = refused(capsys, "data.clients=3", "system.devices=all.csv", "system.watts=3")
    assert "system.watts is also said by the file system.devices=all.csv: give one of them" in line
    for file, what in (("all.csv", "up_mbps"), ("link.yaml", "down_mbps")):
        line = refused(capsys, "data.clients=3", f"system.devices={file}", "system.networks=ethernet")
        assert f"system.networks says {what}, and so does system.devices={file}: give one of them" in line
    line = refused(
        capsys, "data.clients=3", "system.devices={link.yaml: 0.5, phone_low: 0.5}", "system.networks=ethernet"
    )
    assert "system.networks says down_mbps, and so does system.devices: give one of them" in line
    # what a file says nothing of, others may say
    Path("all.csv").write_text("client,watts\n0,1\n1,1\n2,1\n")
    found = devices_of(system(devices="all.csv", networks="ethernet"), 3, 0)
    assert (set(found.watts), set(found.up_mbps)) == ({1.0}, {941.0})


def test_numbers_of_every_key_are_finite(capsys):
    for key in (*OF_DEVICES, "server_flops_per_second", "server_mbps", "dropout", "deadline_seconds", "over_select"):
        for number in (".nan", ".inf"):
            assert f"system.{key} must be" in refused(capsys, "data.clients=3", f"system.{key}={number}")


def test_names_that_are_numbers():
    """Three clients are named 2, 3 and 4. A file of names has no number, and a file of numbers no name."""
    names = ["2", "3", "4"]
    for text, watts in (("4,1\n2,2\n3,3", [2, 3, 1]), ("0,1\n2,2\n1,3", [1, 3, 2])):
        Path("all.csv").write_text(f"client,watts\n{text}\n")
        assert devices_of(system(devices="all.csv"), 3, 0, names).watts.tolist() == watts
    Path("all.csv").write_text("client,watts\n3,1\n0,2\n2,3\n")
    with pytest.raises(
        UserError, match="line 4: '2' is the number of one client and the name of another, and the file"
    ):
        devices_of(system(devices="all.csv"), 3, 0, names)
    # the same client either way
    Path("all.csv").write_text("client,watts\nann,1\n1,2\n2,3\n")
    assert devices_of(system(devices="all.csv"), 3, 0, ["ann", "1", "eve"]).watts.tolist() == [1, 2, 3]


def lines_of(clients=10, **keys):
    """The lines about the virtual clock of a run that is only resolved."""
    settings = {
        "data.source": "sample", "data.clients": clients, "train.cohort_size": None if "mode" in keys else 3,
        "train.local_steps": 1, "model.name": "logistic", "algorithm.name": "fedavg", "engine.kind": "local",
    }  # fmt: skip
    experiment, _ = resolve(load(settings | {f"system.{name}": value for name, value in keys.items()}))
    return [line for line in experiment.notes if "system." in line]


def test_lines_about_what_few_expect():
    few = {"phone_low": 0.99, "phone_mid": 0.01, "phone_high": 0}
    assert lines_of(devices=few) == [
        "warning: system.devices: phone_mid has a share of 0.01, which is none of 10 clients"
    ]
    late = {"over_select": 1.25, "deadline_seconds": 3}
    (line,) = lines_of(**late, watts=3)
    assert line.startswith("warning: system.over_select=1.25 and system.deadline_seconds=3: what clients do takes no")
    assert lines_of(**late, latency_ms=1) == lines_of(**late, dropout=0.1) == []
    (line,) = lines_of(mode="buffered", buffer=3)
    assert line.startswith("warning: system.mode=buffered: what clients do takes no time")
    (line,) = lines_of(mode="buffered", buffer=6, concurrency=4, devices="phone_low")
    assert line.startswith("system.buffer=6 is more than system.concurrency=4: an update waits for clients that begin")


def test_hours_that_are_too_short_for_everybody(capsys):
    keys = ["data.clients=3", "system.down_mbps=1", "system.latency_ms=100"]
    line = refused(capsys, *keys, "system.availability={from: 8, to: 8.0001}")
    assert line == (
        "system.availability: nobody can ever answer: client 0, which comes closest, can be reached for 0.36 s at a "
        "time, and needs 0.4512 s: 0.4512 s = 0.1 s of latency + 0.251 s for 31,400 bytes down + 0 s for 6.02e+07 "
        "FLOPs + 0.1 s + 0 s for 31,400 up"
    )
    # mime's two phases together
    hours = "system.availability={from: 8, to: 8.0002}"
    line = refused(capsys, *keys, "algorithm.name=mime", hours)
    assert "can be reached for 0.72 s at a time, and needs " in line
    assert line.count(" bytes down + ") == 2
    Path("when.csv").write_text("client,from,to\n0,-5,0.4\n1,3,3.4\n2,1,2\n")
    (line,) = lines_of(3, down_mbps=1, latency_ms=100, availability="when.csv")
    assert line.startswith("warning: 2 of the 3 clients can never be reached for as long as they need (system.avail")


def test_a_deadline_that_nobody_can_meet(capsys):
    """The line has the whole arithmetic: logistic regression has 7,850 parameters."""
    keys = ["data.clients=3", "system.down_mbps=1", "system.up_mbps={choice: [0.1]}", "system.latency_ms=100"]
    line = refused(capsys, *keys, "system.deadline_seconds=2")
    assert line == (
        "system.deadline_seconds=2 is less than even client 0, the fastest one, needs: 2.963 s = 0.1 s of latency + "
        "0.251 s for 31,400 bytes down + 0 s for 6.02e+07 FLOPs + 0.1 s + 2.51 s for 31,400 up"
    )
    assert "in phase gradients" in refused(capsys, *keys, "algorithm.name=mime", "system.deadline_seconds=2")


def test_a_deadline_that_nobody_can_meet_together(tmp_path):
    """A client alone needs 2 x 0.251 s, but ten together share the connection: each gets 0.1 Mbit/s of it."""
    keys = {
        "data.source": "sample",
        "data.clients": 20,
        "train.cohort_size": 10,
        "train.local_steps": 1,
        "run.rounds": 1,
    }
    keys |= {"algorithm.name": "fedavg", "model.name": "logistic", "engine.kind": "local", "run.output": str(tmp_path)}
    clock = {"system.server_mbps": 1.0, "system.deadline_seconds": 5.0}
    made = simulate(keys | clock)
    line = next(line for line in (made.folder / "log.txt").read_text().splitlines() if "fastest clients" in line)
    assert line.endswith(
        "warning: if the 10 fastest clients begin together and share system.server_mbps=1, the first answers after "
        "5.024 s, and system.deadline_seconds=5: rounds will have nobody"
    )
    assert made.metrics.cohort_size.tolist() == [0]
    assert made.metrics.virtual_seconds.tolist() == [5.0]
