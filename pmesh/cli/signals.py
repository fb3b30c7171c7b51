"""Which signals end a command that runs for long."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """A closed terminal is an end too, unless `nohup` says otherwise."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(s for s in signals if signal.getsignal(s) != signal.SIG_IGN)
