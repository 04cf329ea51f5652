"""The program `outrider`, also as `python -m outrider`."""

import os
import signal
from types import FrameType

_INTERRUPTED = 130  # exit code; that of `runtime.report.console`, which is not imported yet


def main() -> None:
    """Run a command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from outrider.cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the program if it imports: the C++ code of torch aborts on an exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
