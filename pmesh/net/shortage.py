"""What the system says when it has no descriptor or no memory for one more connection."""

import errno
from typing import Final

OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
RETRY_S: Final = 0.1  # before the next attempt to accept, as in trio.serve_listeners
