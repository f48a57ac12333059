"""`python -m tests.torture.recover_process MISTAKE recover …`: slotbridge with that mistake."""

import sys

from services.bridge.cli.app import app
from tests.torture.sabotage import commit

if __name__ == "__main__":
    commit(sys.argv[1])
    app(sys.argv[2:])
