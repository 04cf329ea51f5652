"""A process of GPU cells that ends, or hangs, in the middle of a cell."""

import os
import time


def start(connection, options, cells, deadline):
    """Run cells. One named `kernels` ends the process, `round` never ends, and `sampled` makes the GPU unusable."""
    connection.send(("facts", {"commit": "none"}))
    for name in cells:
        connection.send(("begun", 0.2))
        if name.endswith(":kernels"):
            os._exit(1)
        if name.endswith(":round"):
            time.sleep(60)
        error = {"error": "CUDA error"} if name.endswith(":sampled") else {"result": {}}
        connection.send(("ended", error | {"seconds": 0.0}))
        if name.endswith(":sampled"):
            break
    connection.send(("stopped", None))
