"""`python -m tests.torture.sabotage_command MISTAKE ARGUMENT …`: `slotbridge` with a mistake."""

import sys

from services.bridge.cli.app import app
from tests.torture.sabotage import commit

if __name__ == "__main__":
    mistake, *arguments = sys.argv[1:]
    commit(mistake)
    app(arguments)
