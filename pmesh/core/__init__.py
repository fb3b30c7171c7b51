"""Pure decisions and protocols: no I/O, no clock, no dice, no log."""
