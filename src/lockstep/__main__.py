"""`python -m lockstep`: the command line without the installed script."""

from __future__ import annotations

from lockstep.cli.main import main

if __name__ == "__main__":
    main()
