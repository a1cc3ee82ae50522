"""Whoever asks a service for its status again and again, in a process of their own."""

import http.client
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
    how often it was; "fetch PATH" asks once, its answer is the seconds that took.
    """
    address = urlsplit(url).netloc
    running: Scraper | None = None
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "start":
            running, answer = Scraper(address, float(words[0]), words[1:]), 0.0
        elif verb == "stop" and running:
            answer = running.stop()
        else:
            answer = fetch(connection_to(address), words[0])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
