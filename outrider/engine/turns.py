"""Threads that share an engine use it in turns."""

from collections import deque
from collections.abc import Callable
from threading import Event, RLock, get_ident

from outrider.runtime.forks import check_fork


class _Waiting:
    """A thread that waits for a turn."""

    def __init__(self, wants_round: Callable[[], bool]) -> None:
        self.wants_round = wants_round
        self.thread = get_ident()
        self.event = Event()  # set when the thread has the turn


class Turns:
    """One thread at a time has the turn, in which it runs rounds. Nobody reads sequences in the round of another.

    A thread that needs no round, since the rounds of others have done its work, goes before those that need
    one. The others go in the order of their arrival. A thread may take a turn within its own.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # held for a moment. Reentrant, since the garbage collector may end a stream at any time
        self._owner: int | None = None  # the thread that has the turn
        self._depth = 0  # turns of the owner within each other
        self._waiting: list[_Waiting] = []  # by arrival
        self._calls: deque[Callable[[], object]] = deque()

    def take(self, wants_round: Callable[[], bool] = lambda: False) -> None:
        """Wait for the turn. `wants_round` says whether the thread needs a round; it is called between rounds.

        Raises:
            OutriderError: this process was forked from the one that uses the engine.
        """
        check_fork()  # before the lock, which a thread of the other process may have
        with self._lock:
            if self._owner is None or self._owner == get_ident():
                self._owner = get_ident()
                self._depth += 1
                return
            waiting = _Waiting(wants_round)
            self._waiting.append(waiting)
        try:
            self._wait(waiting)
        except BaseException:
            self.give()
            raise

    def give(self) -> None:
        """End the turn. The next thread has it at once."""
        with self._lock:
            if self._owner != get_ident():  # an interrupt has ended the wait for it
                return
            if self._depth > 1:
                self._depth -= 1
                return
            try:
                self._run_calls()
            finally:
                if following := self._next():
                    self._pass(following)
                else:
                    self._depth = 0
                    self._owner = None

    def share(self, wants_round: Callable[[], bool]) -> None:
        """Let the threads that need no round go first. The caller has the turn, and has it again afterwards.

        Otherwise it keeps the turn, because each thread that runs rounds has worker threads of its own.
        """
        if not self._waiting:
            return
        with self._lock:
            following = self._next()
            if self._depth > 1 or following is None or following.wants_round():
                return
            self._run_calls()
            waiting = _Waiting(wants_round)
            self._waiting.append(waiting)
            self._pass(following)
        self._wait(waiting)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function now, or at the end of the turn that a thread has. It never waits."""
        with self._lock:
            self._calls.append(function)
            if self._owner is None:
                self.take()
                self.give()

    @property
    def called(self) -> bool:
        """Whether functions wait for the end of a turn."""
        return bool(self._calls)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()

    def _wait(self, waiting: _Waiting) -> None:
        try:
            waiting.event.wait()
        finally:
            with self._lock:
                if waiting in self._waiting:  # an interrupt has ended the wait
                    self._waiting.remove(waiting)

    def _next(self) -> _Waiting | None:
        """Return the thread that has the next turn, if one waits."""
        if not self._waiting:
            return None
        return next((each for each in self._waiting if not each.wants_round()), self._waiting[0])

    def _pass(self, following: _Waiting) -> None:
        self._waiting.remove(following)
        self._owner = following.thread
        self._depth = 1
        following.event.set()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
