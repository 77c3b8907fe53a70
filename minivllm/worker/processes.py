"""The processes of a pipeline as the engine sees them: a connection to each, and what becomes of them.

    StageProcesses.start(world_size)       torch.multiprocessing, on this host
    StageProcesses.take_torchrun()         those that torchrun has started, on one host or several

When one of them dies, all are ended, and a `StageDied` says which one it was, with its traceback, or its signal or exit
code. Processes never outlive the engine: they are ended at exit, and they end themselves when their connection closes.
"""

import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener, Pipe, wait
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from minivllm.engine.batch_queue import StageDied
from minivllm.worker.parallel import Place, default_to_loopback, join_world
from minivllm.worker.stage_process import run_started_process, serve

_GRACE_SECONDS = 1.0
"""A death pulls others along: so long the engine listens for who was first."""
_CLOSE_SECONDS = 5.0


class StageProcesses:
    """All ranks, in order.

    Args:
        connections: to each rank.
        processes: of each rank; None where somebody else has started it.
        store: where the ranks have met.
        own_rank: the thread that serves rank 0, where the engine's process is a rank itself.
    """

    def __init__(
        self,
        connections: list[Connection],
        processes: list[Any],
        store: Any = None,
        own_rank: threading.Thread | None = None,
    ) -> None:
        self.connections, self.processes = connections, processes
        self.places: list[Place] = [Place(rank, len(connections), 1) for rank in range(len(connections))]
        self.death: StageDied | None = None
        self._store = store  # lives as long as the ranks that meet there
        self._end = weakref.finalize(self, _end, connections, processes, own_rank)

    @classmethod
    def start(cls, world_size: int) -> "StageProcesses":
        """Start a process a rank on this host. The system chooses the port on which they meet: it is always free."""
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        connections, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = Pipe()
                process = context.Process(
                    target=run_started_process,
                    args=(theirs, rank, world_size, store.port),
                    name=f"minivllm-rank-{rank}",
                    daemon=True,
                )
                with uninterrupted():
                    process.start()
                    theirs.close()  # or the engine would never see that the other end has gone
                    connections.append(ours)
                    processes.append(process)
        except BaseException:
            _end(connections, processes)
            raise
        return cls(connections, processes, store)

    @classmethod
    def take_torchrun(cls, device: str) -> "StageProcesses":
        """On rank 0, the engine's: all ranks, this process among them. On the others this call serves, and then exits.

        Raises:
            SystemExit: on other ranks, when the engine has told them to end.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if num_local == world_size:
            default_to_loopback()
        join_world(device, init_method="env://")
        is_one_host = num_local == world_size
        if rank == 0:
            key = secrets.token_bytes(32)
            listener = Listener(("127.0.0.1" if is_one_host else "", 0), backlog=world_size, authkey=key)
            dist.broadcast_object_list([listener.address[1], key])
            connections = _accept_all(listener, world_size)
            ours, theirs = Pipe()
            arguments = (theirs, rank, local_rank, num_local, _already_joined)
            own_rank = threading.Thread(target=serve, args=arguments, name="minivllm-rank-0", daemon=True)
            own_rank.start()
            return cls([ours, *connections], [None] * world_size, own_rank=own_rank)
        meeting: list[Any] = [None, None]
        dist.broadcast_object_list(meeting)
        port, key = meeting
        host = "127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"]
        connection = Client((host, port), authkey=key)
        connection.send(rank)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine says what follows
        is_well = serve(connection, rank, local_rank, num_local, _already_joined)
        os._exit(0 if is_well else 1)

    def send(self, rank: int, item: tuple) -> None:
        """To one rank; raises StageDied where one has ended."""
        if self.death is not None:
            raise self.death
        try:
            self.connections[rank].send(item)
        except (BrokenPipeError, ConnectionResetError, OSError):
            self._bury()

    def send_to_all(self, item: tuple) -> None:
        """To every rank, or to none: Ctrl-C waits."""
        with uninterrupted():
            for rank in range(len(self.connections)):
                self.send(rank, item)

    def receive(self) -> tuple[int, tuple]:
        """Wait for whatever comes next, and from which rank.

        Raises:
            StageDied: a process has ended, or has said that it will.
            ValueError: a rank's refusal of a setting or a checkpoint.
        """
        if self.death is not None:
            raise self.death
        watched: dict[Any, int] = {connection: rank for rank, connection in enumerate(self.connections)}
        ready = wait([*watched, *(process.sentinel for process in self.processes if process is not None)])
        for connection in ready:
            rank = watched.get(connection)
            if rank is None:
                continue
            try:
                item = connection.recv()
            except (EOFError, OSError):
                break
            if item[0] == "died":
                self._bury([(item[1], rank, item[2])])
            if item[0] == "refused":
                self.close()
                raise item[1]
            return rank, item
        self._bury()

    def close(self) -> None:
        """End all processes; may be called twice."""
        if self.death is None:
            self.death = StageDied("the pipeline's processes have been ended: make a new LLM")
        self._end()

    def _bury(self, reports: list[tuple[float, int, str]] | None = None) -> None:
        """Find out who died first, end the others, and raise."""
        reports = reports or []
        silent: list[tuple[int, int | None]] = []
        end = time.monotonic() + _GRACE_SECONDS
        heard = {rank for _, rank, _ in reports}
        while time.monotonic() < end:
            for rank, connection in enumerate(self.connections):
                if rank not in heard:
                    self._listen(rank, connection, heard, reports, silent)
            if any(code is not None and code < 0 for _, code in silent):
                break
            time.sleep(0.02)
        self.death = StageDied(_describe(self.places, reports, silent))
        self._end()
        raise self.death

    def _listen(self, rank: int, connection: Connection, heard: set[int], reports: list, silent: list) -> None:
        process = self.processes[rank]
        try:
            while connection.poll():
                item = connection.recv()
                if item[0] == "died":
                    heard.add(rank)
                    reports.append((item[1], rank, item[2]))
                    return
        except (EOFError, OSError):
            if process is not None:
                process.join(_GRACE_SECONDS)
            heard.add(rank)
            silent.append((rank, None if process is None else process.exitcode))


def _describe(places: list[Place], reports: list[tuple[float, int, str]], silent: list[tuple[int, int | None]]) -> str:
    """Who has been killed tells nothing, and comes first: the tracebacks of others are of what followed."""
    if silent:
        rank, code = min(silent, key=lambda entry: (entry[1] is None, entry[1] or 0))
        how = "its connection has closed"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        elif code is not None:
            how = (
                f"exit code {code} (a script that makes an LLM has to do so under `if __name__ == '__main__':`, since "
                "its processes import it)"
            )
        return f"{places[rank]} has died: {how}"
    _, rank, trace = min(reports)
    return f"{places[rank]} has died of an exception:\n{trace}"


def _end(connections: list[Connection], processes: list[Any], own_rank: threading.Thread | None = None) -> None:
    for connection in connections:
        with suppress(OSError, ValueError):
            connection.send(("close",))
    end = time.monotonic() + _CLOSE_SECONDS
    # A thread that is still inside PyTorch when the interpreter ends takes the whole process down with SIGABRT. It is
    # not waited for where it is itself the one that ends all: the garbage collector runs in any thread.
    if own_rank not in (None, threading.current_thread()):
        own_rank.join(max(0.0, end - time.monotonic()))
    started = [process for process in processes if process is not None]
    if all(process.exitcode in (None, 0) for process in started):
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
    for stop in (lambda process: process.terminate(), lambda process: process.kill()):
        for process in started:
            if process.is_alive():
                stop(process)
        for process in started:
            process.join(1.0)
    for connection in connections:
        connection.close()


def _accept_all(listener: Listener, world_size: int) -> list[Connection]:
    """Connections of ranks 1, 2, …, who come in any order and say their numbers."""
    by_rank = {}
    while len(by_rank) < world_size - 1:
        connection = listener.accept()
        by_rank[connection.recv()] = connection
    listener.close()
    return [by_rank[rank] for rank in range(1, world_size)]


def _already_joined(device: str) -> None:
    raise AssertionError("torchrun's ranks have joined before they serve")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the body of the with statement: half a message would leave ranks out of step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before: Callable | int | None = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
