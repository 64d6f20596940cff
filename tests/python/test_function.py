"""Functions in workers: collectives, the end of servers, scripts, and Spark's stand-in."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for, worker_processes
from threads import Threads

from pybackend import ClusterError, InputError, TFDistributor, WorkerFailedError, barrier_run
from pybackend.core.function.adapters import Script
from pybackend.core.function.call import name_rank
from pybackend.core.function.sharing import ConnectingRank, ListeningRank, Outbox
from pybackend.core.net.rendezvous import address_of, listen
from pybackend.core.net.stream import Stream
from pybackend.types import WorkerContext


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    wait_for(lambda: not worker_processes())


def run(fn: Any, *args: Any, **options: Any) -> list[Any]:
    return barrier_run("local", fn, *args, verbose=0, **options)


def test_workers_share_values_in_the_order_of_ranks() -> None:
    def work(context: WorkerContext) -> Any:
        first = context.all_gather({"rank": context.rank, "big": bytes(3_000_000)})
        context.barrier()
        place = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        return [value["rank"] for value in first], context.all_gather(context.role), place

    expected = [([0, 1, 2], ["worker"] * 3, [rank, 3, rank]) for rank in range(3)]
    assert run(work, workers=3) == expected
    assert run(work, workers=1) == [([0], ["worker"], [0, 1, 0])]


def test_ranks_of_a_machine_are_counted_as_torchrun_does() -> None:
    addresses = ["ann:20001", "bob:20001", "ann:20002", "[::1]:4"]
    found = [name_rank(addresses, rank) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1", "0"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "1", "2", "1"]


def test_a_worker_that_does_not_share_ends_the_others_by_name() -> None:
    def work(context: WorkerContext, how: str) -> Any:
        if context.rank == 0:
            return None if how == "returns" else context.barrier()
        return context.all_gather(1)

    for how, message in {
        "returns": "worker 0 has returned",
        "waits": r"worker 0 calls barrier\(\) while worker 1 calls all_gather\(\)",
    }.items():
        with pytest.raises(WorkerFailedError, match=message) as caught:
            run(work, how, workers=2)
        assert caught.value.exception_type == "ClusterError"


def test_who_waits_for_a_worker_that_fails_is_no_cause() -> None:
    def work(context: WorkerContext) -> None:
        if context.rank == 1:
            raise KeyError("no such digit")
        context.all_gather(1)

    with pytest.raises(WorkerFailedError, match="no such digit") as caught:
        run(work, workers=3)
    assert {failure.exception_type for failure in caught.value.others} == {"PeerLostError"}


def test_between_machines_what_is_shared_is_encrypted() -> None:
    servers = [listen("127.0.0.1") for _ in range(3)]
    peers = [address_of(server) for server in servers]
    ended: list[Any] = []
    root = ListeningRank(servers[0], peers, "token", 20, encrypt=True)
    spokes = [ConnectingRank(peers, rank, "token", 20, True, ended.append) for rank in (1, 2)]
    members: list[ListeningRank | ConnectingRank] = [root, *spokes]
    with Threads() as pool:
        for call in ("a", "b"):
            texts = [call * 2_000_000 + str(rank) for rank in range(3)]
            found = pool.map(lambda member, text: member.gather("all_gather", text), members, texts)
            assert list(found) == [texts] * 3
        assert all(outbox.stream.is_protected for outbox in root._outboxes.values())
        end = pool.submit(root.finish, {0}, {1, 2}, {1})
        spokes[0].finish()
        wait_for(end.done)
    assert ended == [None]  # one has returned by itself
    for one in [*servers, *spokes]:
        one.close()


def test_who_does_not_read_for_a_while_gets_all_that_was_sent() -> None:
    server = listen("127.0.0.1")
    near = Stream.connect(server.getsockname(), 5)
    far = Stream.accept(server)
    lost: list[str] = []
    outbox = Outbox(near, 0.1, lost.append)
    big = b"x" * 30_000_000 + b"\n"
    outbox.put(big)
    outbox.put(b"last\n")
    outbox.finish(0.5)  # several times the limit for a machine that does not answer
    assert [far.read_line(1 << 30), far.read_line(10)] == [big, b"last\n"]
    outbox.finish(5)
    assert lost == []

    outbox = Outbox(near, 0.1, lost.append)
    outbox.put(big)
    far.close()
    outbox.finish(5)
    assert len(lost) == 1
    assert near.socket.fileno() < 0  # no output follows half a line
    server.close()


def test_a_context_travels_without_its_connection() -> None:
    def work(context: WorkerContext) -> Any:
        copy = pickle.loads(pickle.dumps(context))  # noqa: S301
        return copy == context, copy.index

    assert run(work, workers=2) == [(True, 0), (True, 1)]
    alone = WorkerContext(0, 1, ("a:1",), "{}")
    with pytest.raises(ClusterError, match="only functions that `barrier_run` runs"):
        alone.barrier()


def test_a_function_may_end_by_sys_exit() -> None:
    def work(context: WorkerContext, status: Any) -> int:
        if context.rank == 0:
            sys.exit(status)
        return 1

    assert run(work, 0, workers=2) == [None, 1]
    assert run(work, None, workers=2) == [None, 1]
    with pytest.raises(WorkerFailedError, match="SystemExit: 3"):
        run(work, 3, workers=2)


def test_what_cannot_be_sent_is_named_as_the_call_names_it() -> None:
    lock = threading.Lock()

    def work(context: WorkerContext, *args: Any) -> None:
        with lock:
            pass

    with pytest.raises(InputError, match="because of `fn`, which uses `lock`"):
        run(work, workers=1)
    with pytest.raises(InputError, match=r"because of `args\[1\]` \(class lock\)"):
        run(print, 1, lock, workers=1)


def test_arguments_may_have_any_name() -> None:
    named = dict.fromkeys(("fn", "call", "context", "self", "spark", "func", "value"), 1)
    assert barrier_run("local", lambda *_, **found: found, workers=1, verbose=0, **named) == [named]
    assert TFDistributor().run(lambda **found: found, **named) == named


@pytest.mark.full
def test_servers_end_when_those_they_serve_have_returned(capfd: Any) -> None:
    def work(context: WorkerContext, patience: float) -> Any:
        import signal
        import time

        if context.role == "ps" or (context.role, context.index) == ("worker", 1):
            signal.pause()
        if context.role == "evaluator":
            time.sleep(patience)
        return context.role, context.index

    roles = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    expected = [("chief", 0), ("worker", 0), None, None, None, ("evaluator", 0)]
    assert run(work, 0.3, roles=roles) == expected  # after the chief, but within the grace period
    assert run(work, 0, roles={"worker": 1, "ps": 1}) == [("worker", 0), None]
    assert "was stopped" not in capfd.readouterr().out
    found = barrier_run("local", work, 600, roles={"worker": 1, "evaluator": 1}, verbose=1)
    assert found == [("worker", 0), None]
    assert "worker 1, the evaluator, was stopped 3 s after" in capfd.readouterr().out


def test_a_server_that_fails_and_a_chief_that_is_killed_are_named() -> None:
    def work(context: WorkerContext, failing: str) -> None:
        import os
        import signal

        if context.role == failing == "ps":
            raise KeyError("no such variable")
        if context.role == failing:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    for failing, rank, message in (("ps", 1, "no such variable"), ("chief", 0, "SIGKILL")):
        with pytest.raises(WorkerFailedError, match=message) as caught:
            run(work, failing, roles={"chief": 1, "ps": 1})
        assert caught.value.rank == rank
    assert [failure.exception_type for failure in caught.value.others] == ["PeerLostError"]


@pytest.mark.full
def test_a_parameter_server_strategy_trains_and_its_servers_end() -> None:
    def work(context: WorkerContext, steps: int) -> Any:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if context.role != "chief":
            server = tf.distribute.Server(
                resolver.cluster_spec(), context.role, context.index, protocol="grpc"
            )
            server.join()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            weight = tf.Variable(5.0)

        @tf.function
        def step() -> None:
            weight.assign_sub(0.25 * (weight - 1.0))

        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()
        return float(weight.numpy()), "/job:ps" in weight.device

    values = run(work, 8, roles={"chief": 1, "worker": 1, "ps": 1})
    assert values[1:] == [None, None]
    assert values[0] == (pytest.approx(1 + 4 * 0.75**8, abs=1e-6), True)


def test_a_function_of_a_barrier_task_finds_its_context() -> None:
    def work(context: WorkerContext, is_known: bool) -> Any:
        import sys

        before = "pyspark" in sys.modules
        from pyspark import BarrierTaskContext, TaskContext

        task = BarrierTaskContext.get()
        task.barrier()
        assert isinstance(task, BarrierTaskContext)
        assert TaskContext.get() is task
        addresses = [info.address for info in task.getTaskInfos()]
        assert addresses == list(context.addresses)
        assert task.attemptNumber() == task.stageId() == 0
        assert task.cpus() >= 1
        return before, task.partitionId(), task.allGather(str(task.taskAttemptId()))

    values = run(work, False, workers=2)
    assert values == [(False, rank, ["0", "1"]) for rank in range(2)]


SCRIPT = """
import json, os, sys
import beside
print("here", __name__, sys.argv[1:], beside.VALUE, json.loads(os.environ["TF_CONFIG"])["task"])
if __name__ == "__main__" and sys.argv[1] != "succeed":
    sys.exit(3 if sys.argv[1] == "fail" else "no data")
sys.exit(0)
"""


def test_a_script_runs_as_the_main_module(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    assert barrier_run(None, path, "succeed", 2, workers=2) == [None, None]
    shown = capfd.readouterr().out
    for rank in (0, 1):
        task = {"type": "worker", "index": rank}
        assert f"[{rank}] here __main__ ['succeed', '2'] 7 {task}" in shown
    for how, message in {"fail": "exited with status 3", "say": "exited with no data"}.items():
        with pytest.raises(WorkerFailedError, match=f"train.py {message}"):
            run(str(path), how, workers=1)


def test_a_script_that_only_the_driver_has_is_run_from_its_text(capfd: Any) -> None:
    script = Script("/no/such/folder/train.py", b"import sys\nprint(sys.argv)")
    barrier_run(None, script, "--epochs", 3, workers=1)
    assert os.path.join("", "train.py', '--epochs', '3']") in capfd.readouterr().out


def test_models_and_histories_come_back() -> None:
    def work(context: WorkerContext) -> Any:
        import keras
        import numpy as np
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(np.ones((4, 2)), np.ones(4), epochs=2, verbose=0)
        shown = model.predict(np.ones((1, 2)), verbose=0)
        return {"model": model, "fit": history, "shown": shown, "text": tf.constant(["a", "b"][0])}

    (value,) = run(work, workers=1)
    import numpy as np

    assert int(value["model"].optimizer.iterations) == 2
    assert np.array_equal(value["model"].predict(np.ones((1, 2)), verbose=0), value["shown"])
    assert len(value["fit"].history["loss"]) == len(value["fit"].epoch) == 2
    assert value["text"] == b"a"


def test_a_value_that_cannot_be_sent_costs_no_other_rank_its_own() -> None:
    def unfit(context: WorkerContext) -> Any:
        import time

        time.sleep(1 - context.rank)
        return [None, threading.Lock()] if context.rank == 1 else {"rank": context.rank}

    pattern = r"worker 1 on .*: SerializationError: the returned value\[1\] is a .*lock"
    with pytest.raises(WorkerFailedError, match=pattern) as caught:
        run(unfit, workers=2)
    assert caught.value.values == [{"rank": 0}, None]
    assert "the values of the other ranks are in the `values` attribute of this error" in str(
        caught.value
    )
    copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert copied.values == caught.value.values
