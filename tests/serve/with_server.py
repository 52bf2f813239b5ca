"""Runs a command beside real servers over the tiny checkpoint: ``python -m tests.serve.with_server COUNT COMMAND...``.

The command finds their addresses in ``SERVER_URLS``, separated by spaces. Its exit status is passed on, unless a server
has died.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serve.harness import server_process
from tests.serve.tiny_checkpoint import write_checkpoint


def main(count: int, command: list[str]) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        checkpoint = write_checkpoint(folder)
        servers = [stack.enter_context(server_process(checkpoint, folder / "programs")) for _ in range(count)]
        urls = " ".join(server.url for server in servers)
        status = subprocess.run(command, env={**os.environ, "SERVER_URLS": urls}, check=False).returncode
        for server in servers:
            if server.process.poll() is not None:
                print(f"{server.url} has died:\n{server.output()}", file=sys.stderr)
                return 1
        return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
