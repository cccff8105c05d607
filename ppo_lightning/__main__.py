"""`python -m ppo_lightning` and the console command. Light: processes that a save spawns import it again."""

from __future__ import annotations

import sys


def main() -> int:
    from ppo_lightning.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
