"""A TCP proxy that can be a bad network: slow, cut, or silent."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Literal

Direction = Literal["to_broker", "to_client"]
BOTH: tuple[Direction, ...] = ("to_broker", "to_client")
CHUNK = 65_536


class Proxy:
    """Listens on `port` and forwards to `target`. What it holds back it forwards later, as TCP
    does after an outage: a request may reach the broker long after its client has given up."""

    def __init__(self, port: int, target: int) -> None:
        self._port, self._target = port, target
        self._delay_s = 0.0
        self._open = {direction: threading.Event() for direction in BOTH}
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.heal()

    def heal(self) -> None:
        """Forward at once; what was held back first."""
        self._delay_s = 0.0
        for event in self._open.values():
            event.set()
        if self._listener is None:
            self._listen()

    def delay(self, seconds: float) -> None:
        """Forward each chunk that much later."""
        self._delay_s = seconds

    def black_hole(self, *directions: Direction) -> None:
        """Keep all connections and accept new ones, but forward nothing."""
        for direction in directions or BOTH:
            self._open[direction].clear()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _close(listener)
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _close(one)

    def close(self) -> None:
        self.cut()
        for event in self._open.values():
            event.set()

    def _listen(self) -> None:
        listener = socket.create_server(("localhost", self._port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # cut
                return
            self._connect(listener, client)

    def _connect(self, listener: socket.socket, client: socket.socket) -> None:
        try:
            broker = socket.create_connection(("localhost", self._target))
        except OSError:
            _close(client)
            return
        with self._lock:
            if self._listener is not listener:  # cut meanwhile
                _close(client)
                _close(broker)
                return
            self._sockets |= {client, broker}
        for source, sink, direction in (
            (client, broker, "to_broker"),
            (broker, client, "to_client"),
        ):
            pump = threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True)
            pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):  # one of them was closed
            while data := source.recv(CHUNK):
                time.sleep(self._delay_s)
                self._open[direction].wait()
                sink.sendall(data)
        with self._lock:
            self._sockets -= {source, sink}
        _close(source)
        _close(sink)


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
    one.close()
