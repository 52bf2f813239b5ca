"""JAX profiles of decode steps, on request and never for longer than was allowed."""

import datetime
import logging
import threading
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


class ProfilingError(RuntimeError):
    """A profile that can't be started or stopped now; the message says why."""


class ProfileLostError(ProfilingError):
    """A profile that could not be written."""


def profile_options() -> jax.profiler.ProfileOptions:
    """Of the device, and of JAX on the host; without Python's calls, which would be most of the file."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    return options


class Profiler:
    """Writes JAX profiles of this process, one at a time, from any thread.

    Args:
        folder: where each profile gets a folder of its own.
        max_seconds: after which a profile ends by itself; all that it records stays in memory until then.
    """

    def __init__(self, folder: Path, *, max_seconds: float) -> None:
        self.folder, self.max_seconds = folder, max_seconds
        self._lock = threading.Lock()
        self._running: Path | None = None
        self._timer: threading.Timer | None = None
        self._lost = False

    def start(self) -> Path:
        """Begins a profile and returns the folder that it will be in.

        Raises:
            ProfilingError: one is running already, here or elsewhere in the process.
            ProfileLostError: its folder can't be made.
        """
        with self._lock:
            if self._running is not None:
                raise ProfilingError(f"a profile is running already, into {self._running}; stop it first")
            self._release()  # first, since it may write a folder of the name that is chosen now
            name = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
            paths = (self.folder / (name + (f"-{count}" if count else "")) for count in range(1 << 30))
            try:
                path = next(path for path in paths if not path.exists())
                path.mkdir(parents=True)
            except OSError as error:
                raise ProfileLostError(f"no profile was started: {self.folder} can't be written ({error})") from error
            try:
                jax.profiler.start_trace(path, profiler_options=profile_options())
            except RuntimeError as error:
                path.rmdir()
                raise ProfilingError(f"no profile was started: {error}") from error
            self._running, self._lost = path, False
            self._timer = threading.Timer(self.max_seconds, self._end, args=(path,))
            self._timer.daemon = True
            self._timer.start()
        logger.info("a profile has begun, for %g seconds at most: %s", self.max_seconds, path)
        return path

    def stop(self) -> Path:
        """Ends the running profile, writes it, and returns its folder.

        Raises:
            ProfilingError: none is running.
            ProfileLostError: it can't be written.
        """
        with self._lock:
            if self._running is None:
                raise ProfilingError(f"no profile is running; one ends by itself after {self.max_seconds:g} seconds")
            return self._write()

    def close(self) -> None:
        """Ends a running profile, if there is one."""
        self._end(None)

    def _release(self) -> None:
        """JAX holds on to what it could not write, and starts nothing until it has: it may be able to by now."""
        if self._lost:
            try:
                jax.profiler.stop_trace()
            except RuntimeError:
                logger.info("the profile that was lost is no longer there, or still can't be written")
            else:
                self._lost = False

    def _end(self, path: Path | None) -> None:
        """Ends a profile that nobody waits for; with a path, only that one."""
        with self._lock:
            if self._running is None or path not in (None, self._running):
                return
            try:
                self._write()
            except ProfileLostError:
                logger.exception("a profile was lost")

    def _write(self) -> Path:
        """Call it with the lock, while one runs."""
        path, self._running = self._running, None
        assert path is not None
        if self._timer is not None:
            self._timer.cancel()
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # whatever the profiler or the disk said
            self._lost = True
            raise ProfileLostError(f"the profile could not be written to {path}: {error}") from error
        logger.info("a profile was written: %s", path)
        return path
