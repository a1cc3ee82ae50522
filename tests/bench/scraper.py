"""Whoever asks a service for its status again and again, in a process of their own."""

import contextlib
import http.client
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

_ANSWER_SECONDS = 60.0


class Scraper:
    """Asks for some pages, each over a connection of its own: so often a second together, if it can."""

    def __init__(self, address: str, per_second: float, paths: list[str]) -> None:
        self._address = address
        self._seconds = len(paths) / per_second
        self._stopped = threading.Event()
        self._answers = [0] * len(paths)
        self._threads = [threading.Thread(target=self._scrape, args=each) for each in enumerate(paths)]
        self._started = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def stop(self) -> float:
        """Answers a second, up to now."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return sum(self._answers) / (time.perf_counter() - self._started)

    def _scrape(self, number: int, path: str) -> None:
        connection = connection_to(self._address)
        due = time.perf_counter()
        while not self._stopped.wait(max(0.0, due - time.perf_counter())):
            fetch(connection, path)
            self._answers[number] += 1
            due = max(due + self._seconds, time.perf_counter() - self._seconds)
        connection.close()


class Watcher:
    """Reads so many streams of the status, as pages in browsers do."""

    def __init__(self, address: str, streams: int) -> None:
        self._answers = [_stream(address) for _ in range(streams)]
        self._threads = [threading.Thread(target=_read, args=(each,), daemon=True) for each in self._answers]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Read no more."""
        for answer in self._answers:
            if answer.fp:
                answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]  # Wakes who reads.
        for thread in self._threads:
            thread.join()


def _stream(address: str) -> http.client.HTTPResponse:
    connection = connection_to(address)
    connection.request("GET", "/status", headers={"Accept": "text/event-stream"})
    return connection.getresponse()


def _read(answer: http.client.HTTPResponse) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        while answer.readline():
            pass


def connection_to(address: str) -> http.client.HTTPConnection:
    """A connection to HOST:PORT on which no answer is waited for for ever."""
    return http.client.HTTPConnection(address, timeout=_ANSWER_SECONDS)


def fetch(connection: http.client.HTTPConnection, path: str) -> float:
    """Seconds until a page was there, whole."""
    started = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path} is answered with status {answer.status}")
    return time.perf_counter() - started


def scraper(url: str) -> None:
    """Answer every line: "start RATE PATH..." asks for these pages so often a second until "stop", whose answer is
    how often it was; "fetch PATH" asks once, its answer is the seconds that took; "watch STREAMS" reads as many
    of them until "look away".
    """
    address = urlsplit(url).netloc
    running: Scraper | None = None
    watching: Watcher | None = None
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "start":
            running, answer = Scraper(address, float(words[0]), words[1:]), 0.0
        elif verb == "stop" and running:
            answer = running.stop()
        elif verb == "watch":
            watching, answer = Watcher(address, int(words[0])), 0.0
        elif verb == "look" and watching:
            answer = 0.0
            watching.stop()
        else:
            answer = fetch(connection_to(address), words[0])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
