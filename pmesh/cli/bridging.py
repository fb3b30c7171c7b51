"""The commands by which other programs take part in a job, and their options."""

from pmesh.cli.options import Home


def entrenar(
    *,
    job: str,
    listen: str = "127.0.0.1:9000",
    workers: int,
    rows: int | None = None,
    wait_for: int = 2,
    worker_timeout: float = 300.0,
    timeout: float = 300.0,
    max_frame: str = "256MiB",
    home: Home = None,
) -> int:
    """Average the gradients of entrenar's workers with those of a job's ranks, until either ends.

    Args:
        job: Its name; its ranks call pmesh.bridge.client.average_blocks or average_whole.
        listen: HOST:PORT for the workers, by plain TCP: nothing is encrypted or has a key.
        workers: How many must come before the bridge enters the job.
        rows: How many rows of a data set to deal in each step, for workers that fine-tune.
            Default none: workers that train by blocks choose their own.
        wait_for: How many trainers to wait for, this one included.
        worker_timeout: After so many seconds without a byte of a worker whose gradient is due, the
            others go on without it.
        timeout: How long to wait for the workers, and then for the job, in seconds.
        max_frame: The largest message of a worker, in bytes, KiB, MiB or GiB.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.bridge.cli.command import bridge_entrenar

    return bridge_entrenar(
        home,
        job,
        listen,
        workers=workers,
        rows=rows,
        wait_for=wait_for,
        worker_timeout=worker_timeout,
        timeout=timeout,
        max_frame=max_frame,
    )
