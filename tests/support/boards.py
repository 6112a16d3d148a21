"""Stores of a job in one process, in place of the TCPStore that torchrun starts."""

from __future__ import annotations

import threading

from lastgood.errors import TierDown, TimedOut


class Board:
    """`ports.Store` in one process. A read of a missing key times out at once; while the store is `down`, each call
    fails. With `loses_reply`, the next post is made and fails all the same."""

    def __init__(self):
        self.posts: dict[str, bytes] = {}
        self.down, self.calls, self.loses_reply = False, 0, False

    def set(self, values):
        self._answer()
        self.posts |= values
        if self.loses_reply:
            self.loses_reply = False
            raise TierDown("no answer in time")

    def has(self, keys):
        self._answer()
        return self.posts.keys() >= set(keys)

    def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
        self._answer()
        if not self.posts.keys() >= set(keys):
            cancelled()
            raise TimedOut("no other rank posts")
        return [self.posts[key] for key in keys]

    def delete(self, keys):
        for key in keys:
            self.posts.pop(key, None)

    def _answer(self):
        self.calls += 1
        if self.down:
            raise TierDown("the board is gone")


class ThreadedBoard(Board):
    """A board on which other threads post. A wait for a key that no rank will post times out at once."""

    def __init__(self):
        super().__init__()
        self.news = threading.Condition()

    def set(self, values):
        with self.news:
            super().set(values)
            self.news.notify_all()

    def get(self, keys, timeout_seconds, cancelled=lambda: False, poll_seconds=None):
        with self.news:
            self.news.notify_all()
            self.news.wait_for(lambda: self.posts.keys() >= set(keys), min(timeout_seconds, 20.0))
            return super().get(keys, timeout_seconds)
