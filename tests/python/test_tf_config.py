"""TF_CONFIG: TensorFlow accepts what is accepted here; values that make it hang are named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pybackend.core.errors import ClusterError
from pybackend.core.tf_config import ClusterSpec, make_tf_config, parse_address, read_tf_config

PAIR = ["a:1", "b:2"]

ports = st.integers(1, 65535)
names = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z][a-z0-9]{0,5}){0,2}", fullmatch=True)
hosts = st.one_of(names, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map("[{}]".format))
addresses = st.builds("{}:{}".format, hosts, ports)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Return arguments of `make_tf_config` that describe a valid cluster."""
    pool = draw(st.lists(addresses, min_size=1, max_size=12, unique_by=parse_address))
    found: dict[str, Any] = {"workers": [], "chief": None, "ps": None, "evaluator": None}
    for role in ("chief", "evaluator"):
        if len(pool) > 1 and draw(st.booleans()):
            found[role] = pool.pop()
    if len(pool) > 1:
        found["ps"] = [pool.pop() for _ in range(draw(st.integers(0, len(pool) - 1)))]
    found["workers"] = pool
    if draw(st.booleans()):
        indices = draw(st.sets(st.integers(0, 30), min_size=len(pool), max_size=len(pool)))
        found["workers"] = dict(zip(sorted(indices), pool, strict=True))
    members = {"worker": found["workers"], **{k: v for k, v in found.items() if k != "workers"}}
    found["role"] = draw(st.sampled_from([role for role, tasks in members.items() if tasks]))
    tasks = members[found["role"]]
    known = list(tasks) if isinstance(tasks, dict) else range(len(tasks))
    found["index"] = 0 if isinstance(tasks, str) else draw(st.sampled_from(known))
    return found


@pytest.fixture(scope="module")
def tensorflow() -> Any:
    """Import TensorFlow, only for the tests that compare with it."""
    return pytest.importorskip("tensorflow")


def config(tasks: Any, role: Any = "worker", index: Any = 0) -> str:
    """Return a TF_CONFIG text, unchecked."""
    return json.dumps({"cluster": tasks, "task": {"type": role, "index": index}})


def message(text: str) -> str:
    """Return the message of `read_tf_config` for a bad text."""
    with pytest.raises(ClusterError) as caught:
        read_tf_config(text)
    return str(caught.value)


def whole_keys(found: dict[str, Any]) -> dict[Any, Any]:
    """Convert keys: JSON has only text keys, and TensorFlow's sparse jobs have numbers."""
    return {int(key) if key.isdecimal() else key: value for key, value in found.items()}


# Shared with Hypothesis on purpose: the module's import and a variable that each example sets.
compared = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.full
@compared
@given(clusters())
@example({"workers": ["[fd77::10]:2222", "10.0.0.2:2222"], "index": 0})
@example({"workers": {0: "a:1"}, "index": 0})
@example({"workers": {3: "a:1"}, "index": 3})
def test_tensorflow_reads_what_was_made(
    tensorflow: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setenv("TF_CONFIG", make_tf_config(**arguments))
    resolver = tensorflow.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = read_tf_config()
    assert resolver.task_type == spec.role == arguments.get("role", "worker")
    assert resolver.task_id == spec.index == arguments["index"]
    read = resolver.cluster_spec()
    assert read.as_dict() == json.loads(spec.to_json(), object_hook=whole_keys)["cluster"]
    assert read.task_address(spec.role, spec.index) == spec.address


@pytest.mark.full
@compared
@given(clusters())
def test_rank_chief_and_size_are_those_of_tensorflow(
    tensorflow: Any, arguments: dict[str, Any]
) -> None:
    from tensorflow.python.distribute import multi_worker_util

    spec = read_tf_config(make_tf_config(**arguments))
    if isinstance(arguments["workers"], dict) and set(spec.cluster["worker"]) != set(
        range(len(spec.cluster["worker"]))
    ):
        return  # TensorFlow counts only the tasks that it sees
    if spec.role not in ("chief", "worker"):
        assert spec.rank is None
        assert not spec.is_chief
        return
    tasks = {role: list(found.values()) for role, found in spec.cluster.items()}
    own = (tasks, spec.role, spec.index)
    assert spec.rank == multi_worker_util.id_in_cluster(*own)
    assert spec.is_chief == multi_worker_util.is_chief(*own)
    assert spec.world_size == multi_worker_util.worker_count(tasks, spec.role)


@given(clusters())
def test_round_trip(arguments: dict[str, Any]) -> None:
    text = make_tf_config(**arguments)
    spec = read_tf_config(text)
    assert spec.to_json() == text
    assert read_tf_config(spec.to_json()) == spec


@given(st.text() | addresses | st.text("a1:[]. %-_/", max_size=8))
def test_any_text_is_an_address_or_a_cluster_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ClusterError:
        return
    assert host
    assert 1 <= port <= 65535
    again = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert parse_address(again) == (host, port)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | addresses,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["worker", "chief", "ps", "evaluator", "x"]), json_values)
    | json_values,
    json_values,
    json_values,
)
def test_any_json_is_a_spec_or_a_cluster_error(tasks: Any, role: Any, index: Any) -> None:
    try:
        spec = read_tf_config(config(tasks, role, index))
    except ClusterError:
        return
    assert spec.address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("worker-0.example.com:2222", "worker-0.example.com", 2222),
        ("Node_1:1", "node_1", 1),
        ("localhost:65535", "localhost", 65535),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("[fd77::10]:2222", "fd77::10", 2222),
        ("[FD77:0:0:0:0:0:0:10]:2222", "fd77::10", 2222),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("a:0", "has port '0': choose a free one from 1 to 65535"),
        ("a:99999", "has port '99999'"),
        ("a:65536", "from 1 to 65535"),
        ("a:-1", "has port '-1'"),
        ("a:http", "has port 'http'"),
        ("a:٢", "has port '٢'"),
        (" a:1", "white space"),
        ("a:1\n", "white space"),
        ("a: 1", "remove it"),
        ("a\u00a0b:1", "white space"),
        ("grpc://a:1", "begins with a protocol: leave it out"),
        ("a", "has no port: expected 'host:port'"),
        ("a:", "has no port"),
        ("[::1]", "has no port"),
        ("", "has no host"),
        (":1", "has no host"),
        ("fd77::10:2222", "write an IPv6 address as in '[fd00::1]:2222'"),
        ("::1", "several colons"),
        ("[::::]:1", "'[::::]' is not a host name or IP address"),
        ("[a]:1", "not a host name or IP address"),
        ("[::1:1", "not a host name or IP address"),
        ("999.1.1.1:1", "not a host name or IP address"),
        ("a..b:1", "not a host name or IP address"),
        ("-a:1", "not a host name or IP address"),
        ("a/b:1", "not a host name or IP address"),
        ("x" * 64 + ":1", "not a host name or IP address"),
        (2222, "is not text: expected 'host:port'"),
        (None, "is not text"),
    ],
)
def test_bad_addresses_are_named(address: Any, expected: str) -> None:
    with pytest.raises(ClusterError) as caught:
        make_tf_config(["ok:1", address], 0)
    assert str(caught.value) == message(config({"worker": ["ok:1", address]}))
    assert str(caught.value).startswith(f"worker[1] = {address!r}")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"worker": ["a:1", "a:1"]}, ["worker[1] = 'a:1'", "worker[0]", "its own port"]),
        ({"worker": ["a:1"], "ps": ["b:2", "A:01"]}, ["ps[1] = 'A:01'", "worker[0]"]),
        ({"worker": ["[::1]:1", "[0::1]:1"]}, ["worker[1]", "worker[0]"]),
        ({"chief": ["a:1"], "worker": ["a:1"]}, ["worker[0] = 'a:1'", "chief[0]"]),
        ({"worker": "a:1"}, ["worker = 'a:1'", "not a list", "['a:1']", "in R list()"]),
        ({"worker": 5}, ["worker = 5", "expected a list"]),
        ({"worker": ["a:1"], "ps": []}, ["ps = []", "or no ps"]),
        ({"chief": PAIR, "worker": ["c:3"]}, ["chief = ['a:1', 'b:2']", "only index 0", "drop"]),
        ({"chief": {"1": "a:1"}, "worker": ["c:3"]}, ["chief", "only index 0"]),
        ({"evaluator": PAIR, "worker": ["c:3"]}, ["evaluator", "only index 0"]),
        ({"master": ["a:1"], "worker": ["b:2"]}, ["role 'master'", "call it 'chief'"]),
        ({"Worker": ["a:1"]}, ["role 'Worker'", "chief, worker, ps, evaluator"]),
        ({"ps": ["a:1"]}, ["neither workers nor a chief"]),
        ({"worker": {"x": "a:1"}}, ["worker['x']", "whole number from 0"]),
        ({"worker": {"-1": "a:1"}}, ["worker['-1']"]),
        ({"worker": {"0": "a:1", "00": "b:1"}}, ["worker['00']", "only once"]),
    ],
)
def test_bad_clusters_are_named(tasks: Any, expected: list[str]) -> None:
    error = message(config(tasks))
    for part in expected:
        assert part in error


@pytest.mark.parametrize("index", [-1, 2, None, True, False, 1.0, 0.5, "-1", "x", "", [0]])
def test_bad_indices_are_named(index: Any) -> None:
    expected = "is missing" if index is None else f"is {index!r}"
    expected = f"`index` {expected}: expected the number of a worker, one of 0, 1"
    assert message(config({"worker": PAIR}, index=index)) == expected
    with pytest.raises(ClusterError) as caught:
        make_tf_config(PAIR, index)
    assert str(caught.value) == expected


def test_an_index_that_a_mapping_skips() -> None:
    with pytest.raises(ClusterError, match=r"`index` is 1: .* one of 0, 2$"):
        make_tf_config({0: "a:1", 2: "c:1"}, 1)


@pytest.mark.parametrize("role", ["ps", "chief", "evaluator"])
def test_a_role_without_an_entry(role: str) -> None:
    assert message(config({"worker": PAIR}, role)) == (
        f"this process is {role!r}, but the cluster lists no {role}: add it"
    )
    with pytest.raises(ClusterError, match=f"lists no {role}"):
        make_tf_config(PAIR, 0, role=role)


@pytest.mark.parametrize("role", ["master", "boss", "", None, 3, ["worker"]])
def test_unknown_roles(role: Any) -> None:
    assert f"role {role!r} is not one of chief, worker, ps, evaluator" in message(
        config({"worker": PAIR}, role)
    )


@pytest.mark.parametrize(
    "text", ["", "{}", "null", "[]", "1", '{"cluster": {}}', '{"cluster": [1]}', '{"task": {}}']
)
def test_nothing_to_train_on(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "TensorFlow would silently train in one process. Use the output of make_tf_config()"
    assert expected in message(text)
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ClusterError, match="silently"):
        read_tf_config()


def test_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ClusterError, match="TF_CONFIG is not set"):
        read_tf_config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("[" * 10**5, "nested too deeply"),
        ('{"cluster": {"worker": ' + "[" * 900 + "]" * 900 + '}, "task": {"type": "worker"}}', ""),
        ("worker", "use make_tf_config()"),
        ('{"cluster": {"worker": ["a:1"]}}', "has no `task`"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}',
            "{'type': 'worker', 'index': 0}",
        ),
    ],
)
def test_texts_without_a_task(text: str, expected: str) -> None:
    assert expected in message(text)


@pytest.mark.parametrize("workers", [8080, None, [], (), {}, {"a:1"}, "a:1", b"a:1"])
def test_arguments_that_are_no_list_of_workers(workers: Any) -> None:
    with pytest.raises(ClusterError, match="worker"):
        make_tf_config(workers, 0)


def test_arrays_and_numbers_of_numpy_are_taken() -> None:
    expected = make_tf_config(PAIR, 1, chief="c:1", ps=["p:1"])
    arrays = {"chief": np.array(["c:1"]), "ps": np.array(["p:1"])}
    assert make_tf_config(np.array(PAIR), np.int64(1), role=np.str_("worker"), **arrays) == expected


@pytest.mark.parametrize("wrong", [np.array(5), np.array([PAIR]), np.array([1.5]), np.array([])])
def test_other_arrays_are_cluster_errors(wrong: Any) -> None:
    for arguments in ({"ps": wrong}, {"role": wrong}, {"chief": wrong}, {"evaluator": wrong}):
        if wrong.size or "role" in arguments:
            with pytest.raises(ClusterError):
                make_tf_config(PAIR, 0, **arguments)
    with pytest.raises(ClusterError):
        make_tf_config(wrong, 0)
    with pytest.raises(ClusterError):
        make_tf_config(PAIR, np.array([0]))


def test_one_worker() -> None:
    spec = read_tf_config(make_tf_config(["a:1"], 0))
    assert (spec.world_size, spec.rank, spec.is_chief, spec.address) == (1, 0, True, "a:1")
    assert json.loads(spec.to_json())["cluster"] == {"worker": ["a:1"]}


def test_all_roles() -> None:
    everyone: dict[str, Any] = {"chief": "c:1", "ps": ["p:1", "p:2"], "evaluator": ["e:1"]}

    def spec(role: str, index: int | None = None) -> ClusterSpec:
        return read_tf_config(make_tf_config(PAIR, index, role=role, **everyone))

    assert [spec("worker", i).rank for i in (0, 1)] == [1, 2]
    assert (spec("chief").rank, spec("chief").is_chief, spec("chief").address) == (0, True, "c:1")
    assert spec("ps", 1).address == "p:2"
    assert spec("evaluator").rank is None
    assert not spec("worker", 0).is_chief
    assert spec("ps", 0).world_size == 3
    with pytest.raises(ClusterError, match="is missing: expected the number of a ps, one of 0, 1"):
        spec("ps")


def test_a_mapping_that_skips_workers_keeps_their_ranks() -> None:
    spec = read_tf_config(make_tf_config({4: "b:1", 1: "a:1"}, 1, chief="c:1"))
    assert (spec.rank, spec.world_size, spec.is_chief) == (2, 6, False)
    alone = read_tf_config(make_tf_config({1: "a:1"}, 1))
    assert not alone.is_chief
    assert json.loads(alone.to_json())["cluster"] == {"worker": {"1": "a:1"}}


def test_a_whole_mapping_becomes_a_list() -> None:
    assert make_tf_config({1: "b:2", 0: "a:1"}, 1) == make_tf_config(PAIR, 1)
    bad: dict[Any, str] = {True: "a:1"}
    with pytest.raises(ClusterError, match=r"worker\[True\]"):
        make_tf_config(bad, 1)


def test_numbers_of_other_kinds() -> None:
    assert read_tf_config(config({"worker": PAIR}, index="1")).index == 1
    assert read_tf_config(config({"worker": {"0": "a:1"}}, index="0")).address == "a:1"
    assert read_tf_config(make_tf_config(PAIR, np.int64(1))).index == 1  # type: ignore[arg-type]


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", make_tf_config(PAIR, 1))
    assert read_tf_config().rank == 1
    assert read_tf_config(make_tf_config(PAIR, 0)).rank == 0
